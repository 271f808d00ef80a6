// Sliding windows on a real model (gemma3-270m: five layers of six see 512 positions), around and past the edge.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include <gtest/gtest.h>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

using Rows = std::vector<std::vector<float>>;

// The model with another window, in all its layers that have one.
ModelPtr load_with_window(const std::string& path, int window) {
    load_model(path); // sets up the library; the model itself is dropped
    llama_model_kv_override overrides[2] = {};
    std::strncpy(overrides[0].key, "gemma3.attention.sliding_window", sizeof(overrides[0].key) - 1);
    overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    overrides[0].val_i64 = window;
    llama_model_params params = llama_model_default_params();
    params.kv_overrides = overrides;
    ModelPtr model(llama_model_load_from_file(path.c_str(), params));
    EXPECT_TRUE(model);
    EXPECT_EQ(llama_model_n_swa(model.get()), window);
    return model;
}

// Logits of a prompt's rows from `first` on, then of single tokens.
Rows run(llama_context* context, const std::vector<llama_token>& tokens, int count, const std::vector<int>& watched) {
    Rows out;
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
}

double mean_divergence(const Rows& p, const Rows& q) {
    double sum = 0.0;
    for (size_t i = 0; i < p.size(); ++i)
        sum += divergence(p[i], q[i]);
    return sum / double(p.size());
}

llama_context_params params_for(int count) {
    llama_context_params params = small_context(uint32_t(count + 64));
    params.swa_full = true;
    return params;
}

class Window : public ::testing::Test {
protected:
    void SetUp() override {
        path = f32_model_path("swa");
        if (path.empty()) GTEST_SKIP() << "model 'swa' is not in " << models_folder();
    }
    std::string path;
};

// A short window, so that one position more or less is seen; the test shows that it would be.
TEST_F(Window, EdgeIsWhereLlamaCppHasIt) {
    constexpr int kWindow = 17, kCount = 90;
    const ModelPtr model = load_with_window(path, kWindow);
    const std::vector<llama_token> tokens = tokenize(model.get(), prose());
    const std::vector<int> watched = {kWindow - 2, kWindow - 1, kWindow, kWindow + 1, 63, 64, kCount - 1};
    const Rows reference = run(stock_context(model.get(), params_for(kCount)).get(), tokens, kCount, watched);
    for (const auto& [spec, bound] : {std::pair<std::string, double>{"f32", 1e-5}, {"f16", 4e-4}}) {
        const ContextPtr own = own_context(model.get(), params_for(kCount), spec);
        ASSERT_TRUE(own);
        const double kl = mean_divergence(reference, run(own.get(), tokens, kCount, watched));
        std::printf("    %-4s KL %9.2e\n", spec.c_str(), kl);
        EXPECT_LT(kl, bound) << spec;
    }
    const ModelPtr wider = load_with_window(path, kWindow + 1);
    const double off_by_one = mean_divergence(
        reference, run(own_context(wider.get(), params_for(kCount), "f32").get(), tokens, kCount, watched));
    std::printf("    one position more: KL %9.2e\n", off_by_one);
    EXPECT_GT(off_by_one, 4e-3);
}

TEST_F(Window, OwnWindowOfTheModel) {
    const ModelPtr model = load_model(path);
    ASSERT_TRUE(model);
    const int window = llama_model_n_swa(model.get());
    ASSERT_GT(window, 0);
    const int count = window + 60;
    const std::vector<llama_token> tokens = tokenize(model.get(), prose());
    llama_context_params params = params_for(count);
    params.n_ubatch = 256;
    const std::vector<int> watched = {window - 1, window, window + 1, count - 1};
    const Rows reference = run(stock_context(model.get(), params).get(), tokens, count, watched);
    const ContextPtr own = own_context(model.get(), params, "f16");
    ASSERT_TRUE(own);
    const double kl = mean_divergence(reference, run(own.get(), tokens, count, watched));
    std::printf("    f16 KL %9.2e\n", kl);
    EXPECT_LT(kl, 4e-4);
}

} // namespace
} // namespace kvmosaic::testing
