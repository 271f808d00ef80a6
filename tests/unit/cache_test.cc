// The cache against attention in double precision over its own decoded values, and its bookkeeping.
#include "rig.h"

#include <thread>

namespace kvmosaic::test {
namespace {

class CacheAttend : public testing::TestWithParam<std::string> {};

// Row by row: what attend gives is attention over what decode shows, at every page border.
TEST_P(CacheAttend, MatchesDoubleOverDecodedValues) {
    for (const ModelShape& shape : {one_layer(9, 3, 64), one_layer(4, 2, 80), one_layer(5, 1, 128, 64)}) {
        const LayerShape& l = shape.layers[0];
        const Text text(l, 560, 3);
        for (const bool restore : {false, true}) {
            CacheOptions options;
            options.restore = restore;
            auto cache = make(shape, GetParam(), options);
            ASSERT_TRUE(cache);
            if (restore && make(shape, GetParam())->path() == cache->path()) continue; // the same again
            for (int64_t t = 0; t < 560; ++t) {
                const auto out = feed(*cache, text, t, 1);
                const int64_t near = (t - 4) % 128;
                if (t > 8 && near > 3 && near < 125 && t % 41 != 0) continue;
                const auto want = expected(*cache, text, t, 0, t + 1);
                EXPECT_LT(error_of(out.data(), want), bound_of(*cache))
                    << GetParam() << " D " << l.key_dim << " row " << t << (restore ? " restored" : "");
                EXPECT_LT(l2_error_of(out.data(), want), 5e-4) << GetParam() << " D " << l.key_dim << " row " << t;
            }
        }
    }
}

// D4: one-shot, chunked and token-by-token appends give the same bytes, and in decode mode the same outputs, bit for
// bit.
TEST_P(CacheAttend, SplitsDoNotMatter) {
    const ModelShape shape = one_layer(6, 2, 64);
    const int64_t total = 1000;
    const Text text(shape.layers[0], total, 5);
    auto single = make(shape, GetParam());
    const auto want = feed_split(*single, text, total, {1});
    const auto bytes = single->save(0);
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{total}, {17, total}, {128}, {31, 1, 97, 300, 5}, {512}}) {
        auto cache = make(shape, GetParam());
        const auto got = feed_split(*cache, text, total, sizes);
        ASSERT_EQ(got.size(), want.size());
        EXPECT_EQ(0, std::memcmp(got.data(), want.data(), got.size() * sizeof(float)))
            << GetParam() << " first piece " << sizes[0];
        EXPECT_TRUE(cache->save(0) == bytes) << GetParam() << " first piece " << sizes[0];
    }
}

// In chunk mode rows of one step see each other raw and everything older packed; bytes are those of decode mode.
TEST_P(CacheAttend, ChunkModeSeesOwnStepRaw) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 600, 7);
    CacheOptions options;
    options.step = StepMode::chunk;
    auto cache = make(shape, GetParam(), options);
    auto decode = make(shape, GetParam());
    feed(*decode, text, 0, 300);
    feed(*cache, text, 0, 300);
    EXPECT_TRUE(cache->save(0) == decode->save(0));

    // The first step saw nothing packed: it equals an f16 cache.
    auto again = make(shape, GetParam(), options);
    auto raw = make(shape, GetParam() == "f32" || GetParam() == "bf16" ? GetParam() : "f16", options);
    const auto a = feed(*again, text, 0, 300), b = feed(*raw, text, 0, 300);
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i)
        worst = std::max(worst, double(std::fabs(a[i] - b[i])));
    EXPECT_LT(worst, 1e-5) << GetParam();
}

TEST_P(CacheAttend, ThreadsDoNotChangeBits) {
    const ModelShape shape = one_layer(6, 3, 64, 64, 2);
    const Text text(shape.layers[0], 1400, 9);
    const SeqId seq = 0;
    const auto run = [&](int32_t threads) {
        auto cache = make(shape, GetParam());
        std::vector<float> out;
        for (const auto& [from, n] :
             std::vector<std::pair<int64_t, int64_t>>{{0, 700}, {700, 650}, {1350, 1}, {1351, 4}}) {
            std::vector<StepRow> rows;
            for (int64_t t = 0; t < n; ++t)
                rows.push_back({int32_t(from + t), {&seq, 1}});
            EXPECT_TRUE(cache->begin_step(rows).ok());
            std::vector<float> part(size_t(n) * 6 * 64);
            for (int32_t layer = 0; layer < 2; ++layer) {
                AttendArgs args;
                args.scale = 0.125f;
                const auto each = [&](auto body) {
                    std::vector<std::thread> pool;
                    for (int32_t i = 0; i < threads; ++i)
                        pool.emplace_back([=] { body(Thread{i, threads}); });
                    for (auto& t : pool)
                        t.join();
                };
                each(
                    [&](Thread t) { cache->write(layer, text.q.rows(from), text.k.rows(from), text.v.rows(from), t); });
                each([&](Thread t) { cache->attend(layer, text.q.rows(from), args, part.data(), t); });
            }
            cache->end_step();
            out.insert(out.end(), part.begin(), part.end());
        }
        return out;
    };
    const auto one = run(1), four = run(4);
    EXPECT_EQ(0, std::memcmp(one.data(), four.data(), one.size() * sizeof(float))) << GetParam();
}

INSTANTIATE_TEST_SUITE_P(Specs, CacheAttend, testing::ValuesIn(all_specs()), [](const auto& test_info) {
    std::string name = test_info.param;
    for (char& c : name)
        if (!isalnum(static_cast<unsigned char>(c))) c = '_';
    return name;
});

TEST(Cache, ForksAreIsolated) { // E7: prefix inside a page, then both go on in turns, then a fork of a fork
    const ModelShape shape = one_layer(4, 2, 64);
    const Text base(shape.layers[0], 400, 1), a(shape.layers[0], 400, 2), b(shape.layers[0], 400, 3);
    for (const std::string& spec : all_specs()) {
        auto cache = make(shape, spec);
        feed(*cache, base, 0, 100, 0);
        ASSERT_TRUE(cache->fork(0, 1).ok());
        for (int64_t t = 100; t < 160; ++t) {
            feed(*cache, a, t, 1, 0);
            if (t < 105) feed(*cache, b, t, 1, 1);
        }
        ASSERT_TRUE(cache->fork(0, 2).ok());
        feed(*cache, b, 160, 100, 2);
        auto alone = make(shape, spec);
        feed(*alone, base, 0, 100, 0);
        for (int64_t t = 100; t < 160; ++t)
            feed(*alone, a, t, 1, 0);
        EXPECT_TRUE(cache->save(0) == alone->save(0)) << spec;
        feed(*alone, b, 160, 100, 0);
        EXPECT_TRUE(cache->save(2) == alone->save(0)) << spec;
        auto other = make(shape, spec);
        feed(*other, base, 0, 100, 0);
        for (int64_t t = 100; t < 105; ++t)
            feed(*other, b, t, 1, 0);
        EXPECT_TRUE(cache->save(1) == other->save(0)) << spec;
        for (const SeqId id : {0, 1, 2})
            cache->remove(id);
        EXPECT_EQ(cache->footprint().allocated, 0) << spec;
    }
}

TEST(Cache, RowsOfSeveralSequencesAreStoredOnce) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 300, 1);
    auto cache = make(shape, "kivi:bits=2");
    const std::vector<SeqId> both{2, 3};
    const SeqId two = 2, three = 3;
    std::vector<StepRow> rows;
    for (int32_t t = 0; t < 200; ++t)
        rows.push_back({t, both});
    std::vector<float> out(300 * 4 * 64);
    AttendArgs args;
    args.scale = 0.125f;
    ASSERT_TRUE(cache->append_and_attend(0, rows, text.q.rows(), text.k.rows(), text.v.rows(), args, out.data()).ok());
    auto alone = make(shape, "kivi:bits=2");
    feed(*alone, text, 0, 200, 0);
    EXPECT_EQ(cache->footprint().allocated, alone->footprint().allocated);
    EXPECT_EQ(cache->footprint().tokens, 200);
    EXPECT_TRUE(cache->save(2) == alone->save(0));
    EXPECT_TRUE(cache->save(3) == alone->save(0));
    // One step in which the shared history ends: row 0 for both, row 1 for one only, row 2 for the other.
    rows = {{200, both}, {201, {&two, 1}}, {201, {&three, 1}}};
    ASSERT_TRUE(
        cache->append_and_attend(0, rows, text.q.rows(200), text.k.rows(200), text.v.rows(200), args, out.data()).ok());
    EXPECT_EQ(cache->rows(2), 202);
    EXPECT_EQ(cache->rows(3), 202);
    feed(*alone, text, 200, 2, 0);
    EXPECT_TRUE(cache->save(2) == alone->save(0));
    EXPECT_FALSE(cache->save(3) == alone->save(0));
}

TEST(Cache, TruncationFollowsTheWrittenRule) { // E4: rows of a cut page return to raw, others keep their bytes
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 600, 1), more(shape.layers[0], 600, 2);
    for (const std::string& spec : all_specs())
        for (const int64_t rows : {399, 389, 388, 387, 300, 261, 260, 132, 131, 128, 33, 5, 4, 3, 1, 0}) {
            auto cache = make(shape, spec);
            feed(*cache, text, 0, 400);
            std::vector<float> before(size_t(rows) * 64), after(size_t(rows) * 64);
            for (const Side side : {Side::key, Side::value}) {
                cache->decode(0, 0, 1, side, 0, rows, before.data());
                auto copy = make(shape, spec);
                ASSERT_TRUE(copy->load(0, cache->save(0)).ok());
                ASSERT_TRUE(copy->truncate(0, rows).ok());
                EXPECT_EQ(copy->rows(0), rows);
                copy->decode(0, 0, 1, side, 0, rows, after.data());
                for (size_t i = 0; i < after.size(); ++i) // raw rows hold the decoded value, rounded to their type
                    ASSERT_NEAR(before[i], after[i], 1e-3 * std::max(1.0f, std::fabs(before[i])))
                        << spec << " " << rows;
                if (rows == 0) continue;
                feed(*copy, more, rows, 40);
                EXPECT_EQ(copy->rows(0), rows + 40);
            }
            ASSERT_TRUE(cache->truncate(0, rows).ok());
            const auto out = feed(*cache, more, rows, 1);
            EXPECT_LT(error_of(out.data(), expected(*cache, more, rows, 0, rows + 1)), bound_of(*cache))
                << spec << " " << rows;
            cache->clear();
            EXPECT_EQ(cache->footprint().allocated, 0);
        }
    auto cache = make(shape, "f16");
    feed(*cache, text, 0, 10);
    EXPECT_EQ(cache->truncate(0, 11).code(), StatusCode::invalid_argument);
    EXPECT_EQ(cache->truncate(7, 0).code(), StatusCode::not_found);
}

TEST(Cache, RawTruncationIsExact) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 400, 1);
    auto cache = make(shape, "f16"), fresh = make(shape, "f16");
    feed(*cache, text, 0, 400);
    ASSERT_TRUE(cache->truncate(0, 150).ok());
    feed(*fresh, text, 0, 150);
    EXPECT_TRUE(cache->save(0) == fresh->save(0));
}

TEST(Cache, PositionsMustNotDecrease) {
    const ModelShape shape = one_layer(2, 1, 64);
    const SeqId seq = 4;
    auto cache = make(shape, "kivi");
    std::vector<StepRow> rows{{5, {&seq, 1}}, {4, {&seq, 1}}};
    EXPECT_EQ(cache->begin_step(rows).code(), StatusCode::invalid_argument);
    EXPECT_TRUE(cache->sequences().empty());
    EXPECT_EQ(cache->footprint().allocated, 0);
}

TEST(Cache, ReferenceKernelsAgree) {
    const ModelShape shape = one_layer(6, 2, 64);
    const Text text(shape.layers[0], 300, 11);
    for (const std::string& spec : all_specs()) {
        CacheOptions options;
        options.reference = true;
        auto fast = make(shape, spec), plain = make(shape, spec, options);
        const auto a = feed(*fast, text, 0, 300), b = feed(*plain, text, 0, 300);
        EXPECT_TRUE(fast->save(0) == plain->save(0)) << spec;
        for (int64_t t = 0; t < 300; t += 7) {
            const std::vector<double> want(b.begin() + t * 384, b.begin() + (t + 1) * 384);
            EXPECT_LT(error_of(a.data() + t * 384, want), bound_of(*fast)) << spec << " row " << t;
        }
    }
}

} // namespace
} // namespace kvmosaic::test
