// Sliding windows, layers that borrow another layer's cache, layers without one.
#include "rig.h"

namespace kvmosaic::test {
namespace {

// G1: prompts around the window's edge, then decoding; a chunk that crosses the edge.
TEST(BugCaseG1, WindowEdges) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 600, 1);
    for (const std::string& spec : all_specs())
        for (const int32_t window : {100, 128, 131})
            for (int64_t prompt = window - 2; prompt <= window + 3; ++prompt) {
                AttendArgs args;
                args.window = window;
                auto cache = make(shape, spec);
                feed(*cache, text, 0, prompt, 0, args);
                for (int64_t t = prompt; t < prompt + 5; ++t) {
                    const auto out = feed(*cache, text, t, 1, 0, args);
                    const int64_t lo = std::max<int64_t>(0, t - window + 1);
                    ASSERT_LT(error_of(out.data(), expected(*cache, text, t, lo, t + 1, 0, args)), bound_of(*cache))
                        << spec << " window " << window << " row " << t;
                }
            }
}

// G3: stored rows and positions are two numbers: positions that begin late or jump.
TEST(BugCaseG3, PositionsAreNotRows) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 300, 2);
    const SeqId seq = 0;
    auto cache = make(shape, "kivi:bits=4");
    std::vector<StepRow> rows;
    for (int32_t t = 0; t < 300; ++t)
        rows.push_back({1000 + 2 * t, {&seq, 1}});
    AttendArgs args;
    args.scale = 0.125f;
    args.window = 101; // positions: 51 rows
    std::vector<float> out(300 * 128);
    ASSERT_TRUE(cache->append_and_attend(0, rows, text.q.rows(), text.k.rows(), text.v.rows(), args, out.data()).ok());
    EXPECT_EQ(cache->rows(0), 300);
    EXPECT_EQ(cache->positions(0).front(), 1000);
    EXPECT_EQ(cache->positions(0).back(), 1598);
    EXPECT_LT(error_of(out.data() + 299 * 128, expected(*cache, text, 299, 249, 300, 0, args)), bound_of(*cache));
}

// G4: a layer without K/V reads its owner's rows, with its own queries and head count, and writes nothing.
TEST(BugCaseG4, BorrowedLayers) {
    ModelShape shape = one_layer(4, 2, 64);
    shape.layers.push_back({8, 0, 64, 64}); // borrows from layer 0
    const Text text(shape.layers[0], 200, 3);
    const Text other({8, 2, 64, 64}, 200, 4);
    for (const std::string& spec : all_specs()) {
        auto cache = make(shape, spec);
        const SeqId seq = 0;
        for (int64_t t = 0; t < 200; ++t) {
            const StepRow row{int32_t(t), {&seq, 1}};
            ASSERT_TRUE(cache->begin_step({&row, 1}).ok());
            cache->write(0, text.q.rows(t), text.k.rows(t), text.v.rows(t));
            std::vector<float> own(256), borrowed(512);
            AttendArgs args;
            args.scale = 0.125f;
            cache->attend(0, text.q.rows(t), args, own.data());
            args.heads = 8;
            cache->attend(0, other.q.rows(t), args, borrowed.data());
            cache->end_step();
            if (t % 50 != 49) continue;
            std::vector<double> want(512);
            std::vector<float> k(size_t(t + 1) * 64), v(k.size());
            for (int32_t h = 0; h < 8; ++h) {
                cache->decode(0, 0, h / 4, Side::key, 0, t + 1, k.data());
                cache->decode(0, 0, h / 4, Side::value, 0, t + 1, v.data());
                std::vector<double> s(size_t(t) + 1);
                double sum = 0;
                for (int64_t i = 0; i <= t; ++i) {
                    for (int32_t d = 0; d < 64; ++d)
                        s[size_t(i)] += 0.125 * double(other.q.at(t, h)[d]) * double(k[size_t(i * 64 + d)]);
                    sum += s[size_t(i)] = std::exp(s[size_t(i)]);
                }
                for (int64_t i = 0; i <= t; ++i)
                    for (int32_t d = 0; d < 64; ++d)
                        want[size_t(h * 64 + d)] += s[size_t(i)] / sum * double(v[size_t(i * 64 + d)]);
            }
            EXPECT_LT(error_of(borrowed.data(), want), bound_of(*cache)) << spec << " row " << t;
        }
    }
}

// G5: nothing is evicted: dropping filler is not something this cache does behind anyone's back.
TEST(BugCaseG5, NothingIsEvicted) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 2062, 5);
    auto cache = make(shape, "mixkvq");
    feed_split(*cache, text, 2061, {512});
    const auto out = feed(*cache, text, 2061, 1);
    EXPECT_EQ(cache->rows(0), 2062);
    EXPECT_LT(error_of(out.data(), expected(*cache, text, 2061, 0, 2062)), bound_of(*cache));
    // The window form of "drop the oldest" equals attention with those rows masked.
    AttendArgs args;
    args.window = 1900;
    auto windowed = make(shape, "mixkvq");
    feed_split(*windowed, text, 2061, {512}, 0, args);
    const auto masked = feed(*windowed, text, 2061, 1, 0, args);
    EXPECT_LT(error_of(masked.data(), expected(*windowed, text, 2061, 162, 2062, 0, args)), bound_of(*windowed));
}

// G7: layer numbers with gaps: only layers with K/V cost anything, and each keeps its own sizes.
TEST(BugCaseG7, LayersWithoutKv) {
    ModelShape shape;
    shape.layers = {{4, 0, 64, 64}, {4, 2, 64, 64}, {4, 0, 64, 64}, {4, 0, 64, 64}, {6, 3, 80, 80}};
    auto cache = make(shape, "kivi:bits=2");
    const Text a(shape.layers[1], 300, 6), b(shape.layers[4], 300, 7);
    const SeqId seq = 0;
    std::vector<StepRow> rows;
    for (int32_t t = 0; t < 300; ++t)
        rows.push_back({t, {&seq, 1}});
    ASSERT_TRUE(cache->begin_step(rows).ok());
    cache->write(1, a.q.rows(), a.k.rows(), a.v.rows());
    cache->write(4, b.q.rows(), b.k.rows(), b.v.rows());
    cache->end_step();
    const Footprint f = cache->footprint();
    EXPECT_EQ(f.values[0], 300 * (2 * 64 + 3 * 80));
    EXPECT_EQ(f.tokens, 300);
    std::vector<float> got(80);
    cache->decode(0, 4, 2, Side::value, 299, 1, got.data());
    for (int32_t d = 0; d < 80; ++d)
        EXPECT_NEAR(got[size_t(d)], b.v.at(299, 2)[d], 2e-3);
}

} // namespace
} // namespace kvmosaic::test
