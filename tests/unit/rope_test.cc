#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <random>

#include "kvmosaic/shape.h"

namespace kvmosaic {
namespace {

Rope plain(bool halves, int32_t rotary, float base = 10000.0f) {
    Rope rope;
    rope.known = true;
    rope.halves = halves;
    rope.rotary = rotary;
    rope.base = base;
    return rope;
}

std::vector<float> noise(int32_t n, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x)
        v = normal(random);
    return x;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i)
        sum += double(a[i]) * double(b[i]);
    return sum;
}

TEST(Rope, FirstAndLastAngle) {
    const Rope rope = plain(true, 128);
    EXPECT_DOUBLE_EQ(rope.angle(0), 1.0);
    EXPECT_NEAR(rope.angle(32), 0.01, 1e-12);
    EXPECT_NEAR(rope.angle(63), std::pow(10000.0, -126.0 / 128.0), 1e-12);
    EXPECT_DOUBLE_EQ(rope.magnitude(), 1.0);
}

TEST(Rope, QuarterTurnGoesFromFirstToSecondChannel) {
    for (const bool halves : {false, true}) {
        const Rope rope = plain(halves, 2);
        std::vector<float> x = {1.0f, 0.0f};
        rope.turn(x.data(), std::numbers::pi / 2);
        EXPECT_NEAR(x[0], 0.0f, 1e-7);
        EXPECT_NEAR(x[1], 1.0f, 1e-7);
    }
}

TEST(Rope, ScoresDependOnDistanceOnly) {
    for (const bool halves : {false, true}) {
        const Rope rope = plain(halves, 64);
        const std::vector<float> q0 = noise(64, 1), k0 = noise(64, 2);
        const auto score = [&](double q_at, double k_at) {
            std::vector<float> q = q0, k = k0;
            rope.turn(q.data(), q_at);
            rope.turn(k.data(), k_at);
            return dot(q, k);
        };
        EXPECT_NEAR(score(700, 650), score(50, 0), 2e-5);
        EXPECT_NEAR(score(2355, 2300), score(55, 0), 2e-5);
    }
}

TEST(Rope, TurningBackRestoresAndTurnsAdd) {
    const Rope rope = plain(true, 64);
    const std::vector<float> x = noise(80, 3);
    std::vector<float> y = x, z = x;
    rope.turn(y.data(), 1234);
    rope.turn(y.data(), -1000);
    rope.turn(z.data(), 234);
    for (size_t i = 0; i < 80; ++i)
        EXPECT_NEAR(y[i], z[i], 1e-6);
    rope.turn(y.data(), -234);
    for (size_t i = 0; i < 80; ++i)
        EXPECT_NEAR(y[i], x[i], 1e-6);
}

TEST(Rope, LinearScaleAndFactorsDivideAngles) {
    Rope rope = plain(false, 8);
    rope.freq_scale = 0.25f;
    rope.factors = {1.0f, 2.0f, 4.0f, 8.0f};
    for (int32_t i = 0; i < 4; ++i) {
        EXPECT_NEAR(rope.angle(i), 0.25 * std::pow(10000.0, -i / 4.0) / double(1 << i), 1e-12);
    }
}

// YaRN as published: pairs that turn more than beta_fast times over the original context keep their frequency, those
// below beta_slow are interpolated, and a ramp lies between; scores grow by the magnitude.
TEST(Rope, YarnKeepsFastAndInterpolatesSlowPairs) {
    Rope rope = plain(true, 128);
    rope.original_context = 4096;
    rope.freq_scale = 1.0f / 16.0f;
    rope.ext_factor = 1.0f;
    const Rope kept = plain(true, 128);
    double before = 1.1;
    for (int32_t i = 0; i < 64; ++i) {
        const double turns = 4096.0 * kept.angle(i) / (2 * std::numbers::pi);
        const double share = rope.angle(i) / kept.angle(i); // 1: kept, 1/16: interpolated
        if (turns > 40) {
            EXPECT_DOUBLE_EQ(share, 1.0) << i;
        }
        if (turns < 0.8) {
            EXPECT_NEAR(share, 1.0 / 16.0, 1e-9) << i;
        }
        EXPECT_LE(share, before + 1e-12) << i;
        before = share;
    }
    // The ramp in full: floor and ceil of the pairs with 32 and 1 turns are 20 and 46 here.
    for (int32_t i = 20; i <= 46; ++i) {
        const double keep = 1.0 - (i - 20) / 26.0;
        EXPECT_NEAR(rope.angle(i) / kept.angle(i), keep + (1 - keep) / 16.0, 1e-6) << i;
    }
    EXPECT_NEAR(rope.magnitude(), 1.0 + 0.1 * std::log(16.0), 1e-6);
    rope.attn_factor = 0.5f;
    EXPECT_NEAR(rope.magnitude(), 0.5 * (1.0 + 0.1 * std::log(16.0)), 1e-6);
    rope.ext_factor = 0.0f;
    EXPECT_DOUBLE_EQ(rope.magnitude(), 0.5);
}

TEST(Rope, TurnKeepsLengths) {
    Rope rope = plain(true, 64);
    rope.attn_factor = 1.3f; // the magnitude belongs to the first rotation, not to a turn
    std::vector<float> x = noise(64, 5);
    const double before = dot(x, x);
    rope.turn(x.data(), 777);
    EXPECT_NEAR(dot(x, x), before, 1e-4);
}

} // namespace
} // namespace kvmosaic
