// Transforms: exact where they only move values, to rounding where they compute, and the same whichever way.
#include "kvmosaic/transform.h"

#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using testing::Random;
using testing::shuffled_channels;

std::vector<float> numbers(int32_t n, uint64_t seed) {
    Random random(seed);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x)
        v = random.normal();
    return x;
}

// Blocks of powers of two, largest first.
std::vector<int32_t> blocks_of(int32_t n) {
    std::vector<int32_t> blocks;
    for (int32_t bit = 1 << 20; bit > 0; bit /= 2)
        if (n & bit) blocks.push_back(bit);
    return blocks;
}

TEST(Transform, HadamardIsTheMatrixOfSigns) {
    for (int32_t n : {1, 2, 3, 8, 20, 64, 80, 96, 100, 112, 128, 192, 256, 512}) {
        const std::vector<float> x = numbers(n, uint64_t(n));
        std::vector<float> y = x;
        hadamard(y.data(), n);
        int32_t at = 0;
        for (int32_t block : blocks_of(n)) {
            for (int32_t i = 0; i < block; ++i) {
                double want = 0.0;
                for (int32_t j = 0; j < block; ++j)
                    want += (__builtin_popcount(unsigned(i & j)) % 2 != 0 ? -1.0 : 1.0) * double(x[size_t(at + j)]);
                ASSERT_NEAR(double(y[size_t(at + i)]), want / std::sqrt(double(block)), 3e-6) << n;
            }
            at += block;
        }
        ASSERT_EQ(at, n);
    }
}

// The plain loop of the header's words, bit by bit: whatever vectors the machine has.
TEST(Transform, HadamardHasOneOrderOfSums) {
    for (int32_t n : {1, 2, 4, 8, 16, 20, 32, 64, 80, 96, 112, 128, 192, 256, 512, 1024}) {
        const std::vector<float> x = numbers(n, uint64_t(n) + 7);
        std::vector<float> got = x, want = x;
        hadamard(got.data(), n);
        size_t at = 0;
        for (int32_t block : blocks_of(n)) {
            for (int32_t half = 1; half < block; half *= 2) {
                for (int32_t i = 0; i < block; ++i) {
                    if (i & half) continue;
                    const float a = want[at + size_t(i)], b = want[at + size_t(i + half)];
                    want[at + size_t(i)] = a + b;
                    want[at + size_t(i + half)] = a - b;
                }
            }
            const float norm = float(1.0 / std::sqrt(double(block)));
            for (int32_t i = 0; i < block; ++i)
                want[at + size_t(i)] *= norm;
            at += size_t(block);
        }
        ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0) << n;
    }
}

// By hand, with exact numbers: the order of the butterflies and the factor.
TEST(Transform, HadamardOfFour) {
    float x[4] = {1.0f, 2.0f, 3.0f, 5.0f};
    hadamard(x, 4);
    const float want[4] = {5.5f, -1.5f, -2.5f, 0.5f};
    for (int i = 0; i < 4; ++i)
        EXPECT_EQ(x[i], want[i]);
}

TEST(Transform, HadamardKeepsLengthAndScores) {
    for (int32_t n : {64, 80, 96, 128, 256}) {
        std::vector<float> k = numbers(n, 1), q = numbers(n, 2);
        double score = 0.0, turned = 0.0, length = 0.0, kept = 0.0;
        for (size_t i = 0; i < k.size(); ++i)
            score += double(k[i]) * double(q[i]), length += double(k[i]) * double(k[i]);
        hadamard(k.data(), n);
        hadamard(q.data(), n);
        for (size_t i = 0; i < k.size(); ++i)
            turned += double(k[i]) * double(q[i]), kept += double(k[i]) * double(k[i]);
        EXPECT_NEAR(turned, score, 1e-4) << n;
        EXPECT_NEAR(kept, length, 1e-3) << n;
    }
}

Transform example(int32_t joined, int32_t dim, int hadamard, bool scale, bool shift, bool order) {
    Transform t;
    const int32_t n = joined * dim;
    t.joined = joined;
    t.hadamard = hadamard;
    Random random(9);
    for (int32_t i = 0; i < n; ++i) {
        if (scale) t.scale.push_back(random.uniform(0.1f, 5.0f));
        if (shift) t.shift.push_back(random.normal());
    }
    if (order) t.order = shuffled_channels(n);
    return t;
}

TEST(Transform, InverseUndoesForward) {
    for (auto [joined, dim] : {std::pair{1, 64}, std::pair{1, 80}, std::pair{4, 32}, std::pair{2, 100}}) {
        for (int hadamard : {0, 16, 48, joined * dim}) {
            for (int steps = 0; steps < 6; ++steps) {
                const bool scale = steps / 2 > 0, shift = steps / 2 > 1, order = steps % 2 != 0;
                const Transform t = example(joined, dim, hadamard, scale, shift, order);
                ASSERT_TRUE(validate(t, dim, joined)) << validate(t, dim, joined).message();
                EXPECT_EQ(t.identity(), joined == 1 && hadamard == 0 && !scale && !order);
                const int32_t n = joined * dim;
                const std::vector<float> x = numbers(n, 3);
                std::vector<float> y = x, scratch(static_cast<size_t>(n));
                t.forward(y.data(), n, scratch.data());
                const bool changes = hadamard > 0 || scale || order;
                EXPECT_EQ(y != x, changes);
                t.inverse(y.data(), n, scratch.data());
                for (size_t i = 0; i < x.size(); ++i)
                    ASSERT_NEAR(y[i], x[i], hadamard > 0 || scale ? 1e-5 : 0.0) << joined << "x" << dim << " " << steps;
            }
        }
    }
}

// Each step alone, by its definition: Hadamard, then (x - shift) / scale, then the order.
TEST(Transform, StepsComeInTheirOrder) {
    const int32_t n = 8;
    Transform t = example(1, n, 8, true, true, true);
    const std::vector<float> x = numbers(n, 5);
    std::vector<float> want = x, got = x, scratch(static_cast<size_t>(n));
    hadamard(want.data(), n);
    for (size_t i = 0; i < want.size(); ++i)
        want[i] = (want[i] - t.shift[i]) / t.scale[i];
    t.forward(got.data(), n, scratch.data());
    for (size_t i = 0; i < got.size(); ++i)
        EXPECT_EQ(got[i], want[t.order[i]]);
}

TEST(Transform, ValidateNamesTheField) {
    const auto message = [](const Transform& t) {
        const Status status = validate(t, 64, 8);
        return status.ok() ? std::string() : status.message();
    };
    EXPECT_EQ(message(Transform()), "");
    EXPECT_EQ(message(example(4, 64, 256, true, true, true)), "");
    Transform t;
    t.joined = 3;
    EXPECT_EQ(message(t), "transform: joined = 3: must divide the 8 KV heads");
    t = Transform();
    t.hadamard = 65;
    EXPECT_EQ(message(t), "transform: hadamard = 65: must be 0 to 64");
    t = example(1, 64, 0, true, true, true);
    t.scale[5] = 0.0f;
    EXPECT_NE(message(t).find("scale = 0.0"), std::string::npos);
    t.scale[5] = NAN;
    EXPECT_NE(message(t).find("scale"), std::string::npos);
    t = example(1, 64, 0, true, true, true);
    t.scale.pop_back();
    EXPECT_EQ(message(t), "transform: scale has 63 channels, must have 64");
    t.scale.clear();
    EXPECT_EQ(message(t), "transform: shift needs scale");
    t = example(1, 64, 0, true, true, true);
    t.shift[0] = INFINITY;
    EXPECT_EQ(message(t), "transform: shift must be finite");
    t = example(1, 64, 0, false, false, true);
    t.order[3] = t.order[4];
    EXPECT_EQ(message(t), "transform: order is no permutation of 0..63");
    t.order[3] = 64;
    EXPECT_EQ(message(t), "transform: order is no permutation of 0..63");
}

} // namespace
} // namespace kvmosaic
