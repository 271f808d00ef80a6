// Which channels turn together, on real files: a llama file holds permuted rows (adjacent pairs), a qwen2 file does not
// (halves). Bug case H4: a wrong pair table still runs and only loses accuracy.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <gtest/gtest.h>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

float gap_of(const std::vector<float>& a, const std::vector<float>& b) { return largest_gap(a, b); }

void check_model(const std::string& name, bool halves) {
    const std::string path = model_path(name);
    if (path.empty()) GTEST_SKIP() << "model '" << name << "' is not in " << models_folder();
    const ModelPtr model = load_model(path);
    ASSERT_TRUE(model);
    setenv("KVMOSAIC_CHECK_ROPE", "1", 1);
    const ContextPtr context = own_context(model.get(), small_context(256), "f32");
    unsetenv("KVMOSAIC_CHECK_ROPE");
    ASSERT_TRUE(context);

    const ModelShape shape = shape_of(model.get());
    const std::vector<llama_token> tokens = tokenize(model.get(), prose());
    std::vector<Item> items;
    for (int i = 0; i < 96; ++i)
        items.push_back({tokens[size_t(i)], i, {0}, i == 95});
    ASSERT_EQ(decode(context.get(), items), 0);
    // every key of every layer against its un-rotated form, turned by our own code
    const float gap = rope_gap(context.get());
    EXPECT_GT(gap, 0.0f);
    EXPECT_LT(gap, 5e-3f);
    std::printf("    %s: largest gap between the graph's keys and ours %.2e\n", name.c_str(), double(gap));
    for (size_t il = 0; il < shape.layers.size(); ++il) {
        const Rope* rope = rope_of(context.get(), int32_t(il));
        ASSERT_NE(rope, nullptr);
        EXPECT_TRUE(rope->known) << "layer " << il;
        EXPECT_EQ(rope->halves, halves) << "layer " << il;
        EXPECT_EQ(rope->rotary, shape.layers[il].key_dim) << "layer " << il;
    }
    EXPECT_EQ(rope_of(context.get(), int32_t(shape.layers.size())), nullptr);
    // methods see the rotation before any graph exists: what the parameters promise is what the graph does
    for (size_t il = 0; il < shape.layers.size(); ++il) {
        const Rope& promised = cache_of(context.get())->shape().layers[il].rope;
        const Rope& stated = *rope_of(context.get(), int32_t(il));
        ASSERT_TRUE(promised.known) << "layer " << il;
        ASSERT_EQ(promised.rotary, stated.rotary);
        EXPECT_EQ(promised.halves, stated.halves);
        EXPECT_EQ(promised.magnitude(), stated.magnitude());
        for (int32_t i = 0; i < stated.rotary / 2; ++i)
            EXPECT_EQ(promised.angle(i), stated.angle(i)) << "layer " << il << ", pair " << i;
    }

    // The first layer's key of a lone token depends on the token alone: at another position it is the same key, turned.
    constexpr int kFar = 23;
    ASSERT_EQ(decode(context.get(), {{tokens[5], 0, {1}, true}}), 0);
    ASSERT_EQ(decode(context.get(), {{tokens[5], kFar, {2}, true}}), 0);
    const Cache* cache = cache_of(context.get());
    const Rope right = *rope_of(context.get(), 0);
    Rope wrong = right;
    wrong.halves = !right.halves;
    const size_t dim = size_t(shape.layers[0].key_dim);
    for (int32_t head = 0; head < shape.layers[0].kv_heads; ++head) {
        std::vector<float> near(dim), far(dim);
        cache->decode(1, 0, head, Side::key, 0, 1, near.data());
        cache->decode(2, 0, head, Side::key, 0, 1, far.data());
        std::vector<float> turned = near, mistaken = near;
        right.turn(turned.data(), kFar);
        wrong.turn(mistaken.data(), kFar);
        EXPECT_GT(gap_of(near, far), 0.1f) << "head " << head << ": the position makes no difference";
        EXPECT_LT(gap_of(turned, far), 5e-3f) << "head " << head;
        EXPECT_GT(gap_of(mistaken, far), 0.1f) << "head " << head << ": the other pairing fits as well";
    }
}

// Calibration files are bound to a model, not to one of its quantizations.
TEST(RopePairs, FingerprintIsThatOfEveryQuantization) {
    const std::string tiny = model_path("tiny"), exact = f32_model_path("tiny"), small = model_path("small");
    if (tiny.empty() || small.empty()) GTEST_SKIP() << "models 'tiny' and 'small' are not in " << models_folder();
    const auto fingerprint = [](const std::string& path) { return shape_of(load_model(path).get()).fingerprint; };
    const std::string own = fingerprint(tiny);
    EXPECT_EQ(own.size(), 16u);
    EXPECT_EQ(own.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_EQ(fingerprint(exact), own);
    EXPECT_NE(fingerprint(small), own);
}

TEST(RopePairs, LlamaFileTurnsAdjacentChannels) { check_model("tiny", false); }
TEST(RopePairs, Qwen2FileTurnsHalves) { check_model("small", true); }

} // namespace
} // namespace kvmosaic::testing
