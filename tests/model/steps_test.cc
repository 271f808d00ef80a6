// Decoding semantics on a real model: a text fed in chunks gives the predictions of the text fed token by token. The
// cache gives the same bits for the same q, k, v (tests/unit/cache_test.cc); here only ggml's products differ in their
// last bits with the number of rows. That stays within the floor of a comparison, except that now and then it tips a
// value over the edge of a code; with two bits such a step is large, so there it may be a tenth of what the codes lose
// at all.
#include <gtest/gtest.h>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

constexpr double kFloor = 3e-4; // largest KL between an f16 and an f32 cache that is accepted as noise

TEST(Steps, ChunksGiveThePredictionsOfSingleTokens) {
    const std::string path = f32_model_path("tiny");
    if (path.empty()) GTEST_SKIP() << "model 'tiny' is not in " << models_folder();
    const ModelPtr model = load_model(path);
    ASSERT_TRUE(model);
    const std::vector<llama_token> text = tokenize(model.get(), prose());
    const int n = 200;
    const ContextPtr raw = own_context(model.get(), small_context(512), "f16");
    ASSERT_TRUE(raw);
    for (const auto& [spec, coarse] : std::vector<std::pair<const char*, bool>>{
             {"kivi:bits=4", false}, {"mixkvq", false}, {"kivi:bits=2,residual=32", true}}) {
        const ContextPtr chunked = own_context(model.get(), small_context(512), spec);
        const ContextPtr single = own_context(model.get(), small_context(512), spec);
        ASSERT_TRUE(chunked && single);
        std::vector<Item> all;
        for (int i = 0; i < n; ++i)
            all.push_back({text[size_t(i) % text.size()], i, {0}, i % 10 == 9});
        ASSERT_EQ(decode(chunked.get(), all), 0);
        llama_memory_clear(llama_get_memory(raw.get()), true);
        ASSERT_EQ(decode(raw.get(), all), 0);
        double sum = 0, loss = 0, scored = 0;
        for (int i = 0; i < n; ++i) {
            ASSERT_EQ(decode(single.get(), {{all[size_t(i)].token, i, {0}, true}}), 0);
            if (!all[size_t(i)].logits) continue;
            sum += divergence(logits_of(single.get(), 0), logits_of(chunked.get(), i));
            loss += divergence(logits_of(raw.get(), i), logits_of(chunked.get(), i));
            ++scored;
        }
        EXPECT_LT(sum / scored, coarse ? 0.1 * loss / scored : kFloor) << spec << ", which loses " << loss / scored;
        EXPECT_GT(loss / scored, kFloor) << spec << " packed nothing, or nothing was compared";
    }
}

} // namespace
} // namespace kvmosaic::testing
