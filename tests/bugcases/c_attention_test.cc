// Failures that attention kernels of other engines had: head mapping, garbage in unwritten memory, paths that differ.
#include "rig.h"

namespace kvmosaic::test {
namespace {

// C1: output of a query head is the constant of the KV head it must read, for ratios off the powers of two.
TEST(BugCaseC1, GqaRatios) {
    for (const int32_t ratio : {1, 2, 3, 5, 6, 7, 9, 12, 16, 17, 24, 71})
        for (const int32_t kv : {1, 2, 3, 8}) {
            if (ratio > 17 && kv > 2) continue;
            const ModelShape shape = one_layer(ratio * kv, kv, 64);
            Text text(shape.layers[0], 150, 2);
            for (int64_t t = 0; t < 150; ++t)
                for (int32_t h = 0; h < kv; ++h)
                    std::fill_n(text.v.at(t, h), 64, float(h + 1));
            for (const char* spec : {"f16", "kivi:bits=2", "mixkvq"}) {
                auto cache = make(shape, spec);
                const auto many = feed(*cache, text, 0, 149), one = feed(*cache, text, 149, 1);
                for (int32_t h = 0; h < ratio * kv; ++h)
                    for (int32_t d = 0; d < 64; ++d) {
                        ASSERT_NEAR(one[size_t(h * 64 + d)], float(h / ratio + 1), 1e-4) << spec << " ratio " << ratio;
                        ASSERT_NEAR(many[size_t((148 * ratio * kv + h) * 64 + d)], float(h / ratio + 1), 1e-4);
                    }
            }
        }
}

// C5: a pool full of NaN and 0xFF, lengths at page borders, and a slot that a longer sequence used before.
TEST(BugCaseC5, UnwrittenMemoryIsNeverSeen) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 400, 3);
    for (const std::string& spec : all_specs())
        for (const int64_t rows : {1, 13, 31, 33, 127, 128, 129, 131, 132, 133, 260}) {
            auto poisoned = make(shape, spec); // make() poisons
            feed(*poisoned, text, 0, 400, 9);
            poisoned->remove(9);
            auto plain = Cache::create(shape, calibrations::with_file(spec, shape));
            ASSERT_TRUE(plain.ok());
            const auto a = feed(*poisoned, text, 0, rows), b = feed(**plain, text, 0, rows);
            EXPECT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float))) << spec << " rows " << rows;
            EXPECT_TRUE(poisoned->save(0) == (*plain)->save(0)) << spec << " rows " << rows;
        }
}

// C6: a sliding window that leaves a row nothing but itself, and the public rule for a sequence without rows.
TEST(BugCaseC6, EmptyAndNarrowRanges) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 300, 4);
    for (const std::string& spec : all_specs()) {
        auto cache = make(shape, spec);
        AttendArgs args;
        args.window = 1;
        const auto out = feed(*cache, text, 0, 300, 0, args);
        // A row whose window holds only itself gives its own value, as the cache holds it after that row's step.
        auto single = make(shape, spec);
        for (int64_t t = 0; t < 300; ++t) {
            const auto alone = feed(*single, text, t, 1, 0, args);
            EXPECT_LT(error_of(alone.data(), expected(*single, text, t, t, t + 1, 0, args)), 1e-5) << spec << t;
            EXPECT_EQ(0, std::memcmp(alone.data(), out.data() + t * 128, 128 * sizeof(float))) << spec << t;
        }
        for (const float x : out)
            ASSERT_TRUE(std::isfinite(x)) << spec;
        EXPECT_EQ(cache->rows(77), 0);
    }
}

// C8: scores far above the range of fp16.
TEST(BugCaseC8, LargeScores) {
    const ModelShape shape = one_layer(2, 1, 128);
    Text text(shape.layers[0], 200, 5);
    for (float& x : text.q.x)
        x *= 60.0f;
    for (float& x : text.k.x)
        x *= 60.0f;
    for (const std::string& spec : all_specs()) {
        auto cache = make(shape, spec);
        AttendArgs args;
        args.scale = 1.0f / 11.3f;
        const auto many = feed(*cache, text, 0, 199, 0, args), out = feed(*cache, text, 199, 1, 0, args);
        EXPECT_LT(error_of(out.data(), expected(*cache, text, 199, 0, 200, 0, args)), 2e-2) << spec;
        for (const float x : many)
            ASSERT_TRUE(std::isfinite(x)) << spec;
    }
}

// C10: a learned sink joins the denominator and has no value, in one part or merged from many, with every store; and
// logit soft-capping likewise.
TEST(BugCaseC10, SinksAndSoftCap) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 1500, 6);
    const std::vector<float> sinks{0.0f, 3.0f, 10.0f, -4.0f};
    for (const std::string& spec : all_specs())
        for (const float cap : {0.0f, 5.0f}) {
            auto cache = make(shape, spec);
            AttendArgs args;
            args.sinks = sinks.data();
            args.soft_cap = cap;
            for (const auto& [from, n] :
                 std::vector<std::pair<int64_t, int64_t>>{{0, 70}, {70, 1}, {71, 1428}, {1499, 1}}) {
                const auto out = feed(*cache, text, from, n, 0, args);
                const int64_t row = from + n - 1;
                EXPECT_LT(error_of(out.data() + (n - 1) * 256, expected(*cache, text, row, 0, row + 1, 0, args)),
                          bound_of(*cache))
                    << spec << " row " << row << " cap " << cap;
            }
        }
}

// C11: the same prompt cold, chunked, as a shared prefix, one by one, and as a verify step of four rows: one answer.
TEST(BugCaseC11, EveryPathUsesTheScales) {
    const ModelShape shape = one_layer(6, 2, 64);
    Text text(shape.layers[0], 400, 7);
    for (float& x : text.k.x)
        x *= 0.25f;
    for (float& x : text.v.x)
        x *= 0.5f;
    for (const std::string& spec : all_specs()) {
        auto cold = make(shape, spec);
        const auto want = feed(*cold, text, 0, 400);
        const auto tail = [&](int64_t n) { return want.data() + (400 - n) * 384; };
        const auto same = [&](const std::vector<float>& got, int64_t n) {
            return std::memcmp(got.data(), tail(n), size_t(n) * 384 * sizeof(float)) == 0;
        };
        auto prefix = make(shape, spec);
        feed(*prefix, text, 0, 300, 5);
        ASSERT_TRUE(prefix->fork(5, 0).ok()); // the second request hits the first one's prefix
        EXPECT_TRUE(same(feed(*prefix, text, 300, 100), 100)) << spec;
        auto decode = make(shape, spec);
        feed(*decode, text, 0, 396);
        EXPECT_TRUE(same(feed(*decode, text, 396, 4), 4)) << spec; // verify of four
        auto restored = make(shape, spec);
        ASSERT_TRUE(restored
                        ->load(3,
                               [&] {
                                   auto half = make(shape, spec);
                                   feed(*half, text, 0, 399);
                                   return half->save(0);
                               }())
                        .ok());
        EXPECT_TRUE(same(feed(*restored, text, 399, 1, 3), 1)) << spec;
    }
}

// C11, batched: four sequences of different length in one step, each as if alone.
TEST(BugCaseC11, BatchedDecodeEqualsAlone) {
    const ModelShape shape = one_layer(6, 2, 64);
    const std::vector<int64_t> lengths{1, 130, 257, 399};
    for (const std::string& spec : all_specs()) {
        auto batch = make(shape, spec);
        std::vector<Text> texts;
        for (size_t i = 0; i < 4; ++i) {
            texts.emplace_back(shape.layers[0], 400, uint32_t(20 + i));
            feed(*batch, texts[i], 0, lengths[i], SeqId(i));
        }
        Tensor q(4, 6, 64), k(4, 2, 64), v(4, 2, 64);
        std::vector<SeqId> ids{0, 1, 2, 3};
        std::vector<StepRow> rows;
        for (size_t i = 0; i < 4; ++i) {
            std::copy_n(texts[i].q.at(lengths[i], 0), 384, q.at(int64_t(i), 0));
            std::copy_n(texts[i].k.at(lengths[i], 0), 128, k.at(int64_t(i), 0));
            std::copy_n(texts[i].v.at(lengths[i], 0), 128, v.at(int64_t(i), 0));
            rows.push_back({int32_t(lengths[i]), {&ids[i], 1}});
        }
        std::vector<float> out(4 * 384);
        AttendArgs args;
        args.scale = 0.125f;
        ASSERT_TRUE(batch->append_and_attend(0, rows, q.rows(), k.rows(), v.rows(), args, out.data()).ok());
        for (size_t i = 0; i < 4; ++i) {
            auto alone = make(shape, spec);
            const auto want = feed(*alone, texts[i], 0, lengths[i] + 1);
            EXPECT_EQ(0, std::memcmp(out.data() + i * 384, want.data() + lengths[i] * 384, 384 * sizeof(float)))
                << spec << " sequence " << i;
        }
    }
}

// C15: working memory does not grow with decode steps.
TEST(BugCaseC15, ScratchIsBounded) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 4096, 8);
    auto cache = make(shape, "mixkvq");
    feed(*cache, text, 0, 512);
    const int64_t early = cache->footprint().scratch;
    for (int64_t t = 512; t < 4000; t += 512)
        feed(*cache, text, t, 512);
    EXPECT_LE(cache->footprint().scratch, early + 64 * 1024);
}

} // namespace
} // namespace kvmosaic::test
