// Sliding windows on a real model (gemma3-270m: five layers of six see 512 positions), past the window's edge.
#include <algorithm>
#include <cstdio>

#include <gtest/gtest.h>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

TEST(Window, LogitsPastTheWindowMatchLlamaCpp) {
    const std::string path = f32_model_path("swa");
    if (path.empty()) GTEST_SKIP() << "model 'swa' is not in " << models_folder();
    const ModelPtr model = load_model(path);
    ASSERT_TRUE(model);
    const int window = llama_model_n_swa(model.get());
    ASSERT_GT(window, 0);
    std::vector<llama_token> tokens = tokenize(model.get(), prose());
    const int count = window + 80;
    ASSERT_GT(int(tokens.size()), 200);

    llama_context_params params = small_context(uint32_t(count + 64));
    params.n_ubatch = 256;
    params.swa_full = true;
    // rows on both sides of the edge, then single tokens
    std::vector<int> watched = {window - 2, window - 1, window, window + 1, count - 1};
    const auto run = [&](llama_context* context) {
        std::vector<std::vector<float>> out;
        std::vector<Item> items;
        for (int i = 0; i < count; ++i) {
            const bool watch = std::find(watched.begin(), watched.end(), i) != watched.end();
            items.push_back({tokens[size_t(i) % tokens.size()], i, {0}, watch});
        }
        EXPECT_EQ(decode(context, items), 0);
        for (const int i : watched)
            out.push_back(logits_of(context, i));
        for (int i = count; i < count + 3; ++i) {
            EXPECT_EQ(decode(context, {{tokens[size_t(i) % tokens.size()], i, {0}, true}}), 0);
            out.push_back(logits_of(context, 0));
        }
        return out;
    };
    const ContextPtr stock = stock_context(model.get(), params);
    const auto reference = run(stock.get());
    const std::vector<std::pair<std::string, double>> bounds = {{"f32", 1e-5}, {"f16", 4e-4}};
    for (const auto& [spec, bound] : bounds) {
        const ContextPtr own = own_context(model.get(), params, spec);
        ASSERT_TRUE(own);
        const auto logits = run(own.get());
        double sum = 0.0;
        for (size_t i = 0; i < logits.size(); ++i) {
            const double kl = divergence(reference[i], logits[i]);
            std::printf("    %-4s row %zu KL %9.2e\n", spec.c_str(), i, kl);
            sum += kl;
        }
        EXPECT_LT(sum / double(logits.size()), bound) << spec;
    }
}

} // namespace
} // namespace kvmosaic::testing
