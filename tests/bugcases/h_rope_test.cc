// Bug cases H: rotary embedding (H1 frequency scaling, H3 partial rotary, H4 which channels are a pair).
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <set>

#include "kvmosaic/shape.h"

namespace kvmosaic {
namespace {

// The published rule, written in wavelengths as in the Llama 3.1 reference code (`apply_scaling`): returns the scaled
// frequency of pair i.
double published_frequency(int32_t rotary, int32_t i, double base, double factor, double low, double high,
                           double original) {
    const double frequency = 1.0 / std::pow(base, 2.0 * i / rotary);
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    if (wavelength < original / high) return frequency;
    if (wavelength > original / low) return frequency / factor;
    const double smooth = (original / wavelength - low) / (high - low);
    return (1.0 - smooth) * frequency / factor + smooth * frequency;
}

// H1: the table itself, since short prompts cannot tell. With a factors tensor (as GGUF files hold) the rope node has
// factors; without one (parameters only) the factors are computed: both must give the published angles.
TEST(BugH1, Llama3FactorsEqualThePublishedFormula) {
    for (const int32_t rotary : {64, 128}) {
        for (const float factor : {8.0f, 32.0f}) {
            Rope computed;
            computed.known = true;
            computed.halves = false;
            computed.rotary = rotary;
            computed.base = 500000.0f;
            computed.factors = llama3_factors(rotary, 500000.0f, factor, 1.0f, 4.0f, 8192);
            ASSERT_EQ(computed.factors.size(), size_t(rotary / 2));

            Rope tensor = computed; // f32 divisors as a converter writes them
            for (int32_t i = 0; i < rotary / 2; ++i) {
                const double plain = std::pow(500000.0, -2.0 * i / rotary);
                tensor.factors[size_t(i)] = float(plain / published_frequency(rotary, i, 500000.0, factor, 1, 4, 8192));
            }
            int kept = 0, divided = 0, blended = 0;
            for (int32_t i = 0; i < rotary / 2; ++i) {
                const double published = published_frequency(rotary, i, 500000.0, factor, 1, 4, 8192);
                for (const Rope* rope : {&computed, &tensor}) {
                    for (const double position : {0.0, 8191.0, 8192.0, 131071.0}) {
                        // f32 divisors: relative 2^-24 of the angle, at most 0.01 rad at the far end of pair 0
                        EXPECT_NEAR(position * rope->angle(i), position * published, position * published * 1.2e-7)
                            << "pair " << i << " position " << position;
                    }
                }
                const double divisor = std::pow(500000.0, -2.0 * i / rotary) / published;
                (divisor == 1.0 ? kept : std::abs(divisor - factor) < 1e-9 ? divided : blended) += 1;
            }
            EXPECT_GT(kept, 0);
            EXPECT_GT(divided, 0);
            EXPECT_GT(blended, 0);
        }
    }
}

TEST(BugH1, FactorsChangeFarPositionsOnly) {
    Rope with, without;
    with.rotary = without.rotary = 128;
    with.base = without.base = 500000.0f;
    with.factors = llama3_factors(128, 500000.0f, 8.0f, 1.0f, 4.0f, 8192);
    const int32_t slow = 50;
    EXPECT_NEAR(with.angle(slow) * 8, without.angle(slow), 1e-12);
    EXPECT_LT(std::abs(without.angle(slow) - with.angle(slow)) * 50, 0.01);    // a short prompt cannot tell
    EXPECT_GT(std::abs(without.angle(slow) - with.angle(slow)) * 131071, 1.0); // a long one can
}

// H3: frequencies and partners use the rotary width; channels past it pass through.
TEST(BugH3, PartialRotaryUsesTheRotaryWidth) {
    for (const auto& [head, rotary] : {std::pair(256, 64), std::pair(80, 32)}) {
        for (const bool halves : {false, true}) {
            Rope rope;
            rope.halves = halves;
            rope.rotary = rotary;
            std::set<int32_t> seen;
            for (int32_t i = 0; i < rotary / 2; ++i) {
                EXPECT_NEAR(rope.angle(i), std::pow(10000.0, -2.0 * i / rotary), 1e-15);
                const auto [a, b] = rope.pair(i);
                EXPECT_EQ(b - a, halves ? rotary / 2 : 1);
                seen.insert({a, b});
            }
            EXPECT_EQ(seen.size(), size_t(rotary)); // every turning channel is in exactly one pair
            EXPECT_EQ(*seen.rbegin(), rotary - 1);

            for (const int32_t position : {0, 700, 2355}) {
                std::vector<float> x(static_cast<size_t>(head));
                for (int32_t c = 0; c < head; ++c)
                    x[size_t(c)] = float(c % 7) - 3.0f;
                const std::vector<float> before = x;
                rope.turn(x.data(), position);
                for (int32_t i = 0; i < rotary / 2; ++i) {
                    const auto [a, b] = rope.pair(i);
                    const double angle = position * std::pow(10000.0, -2.0 * i / rotary);
                    const double xa = before[size_t(a)], xb = before[size_t(b)];
                    EXPECT_NEAR(x[size_t(a)], xa * std::cos(angle) - xb * std::sin(angle), 1e-5);
                    EXPECT_NEAR(x[size_t(b)], xa * std::sin(angle) + xb * std::cos(angle), 1e-5);
                }
                for (int32_t c = rotary; c < head; ++c)
                    EXPECT_EQ(x[size_t(c)], before[size_t(c)]);
            }
        }
    }
}

// H4: which stored channels move together when the position changes, found by turning unit vectors.
TEST(BugH4, ChannelsThatMoveTogetherAreThePairTable) {
    for (const bool halves : {false, true}) { // llama-architecture files; qwen2-architecture files
        Rope rope;
        rope.halves = halves;
        rope.rotary = 64;
        const int32_t head = 96;
        std::vector<int32_t> partner(head, -1);
        for (int32_t c = 0; c < head; ++c) {
            std::vector<float> x(head, 0.0f);
            x[size_t(c)] = 1.0f;
            rope.turn(x.data(), 1.0);
            for (int32_t d = 0; d < head; ++d) {
                if (d == c || x[size_t(d)] == 0.0f) continue;
                EXPECT_EQ(partner[size_t(c)], -1) << "channel " << c << " moves more than one other";
                partner[size_t(c)] = d;
            }
        }
        for (int32_t c = 0; c < head; ++c) {
            const int32_t expected = c >= 64 ? -1 : halves ? (c < 32 ? c + 32 : c - 32) : (c ^ 1);
            EXPECT_EQ(partner[size_t(c)], expected) << "channel " << c;
        }
        for (int32_t i = 0; i < 32; ++i) {
            const auto [a, b] = rope.pair(i);
            EXPECT_EQ(partner[size_t(a)], b);
            EXPECT_EQ(partner[size_t(b)], a);
        }
    }
}

} // namespace
} // namespace kvmosaic
