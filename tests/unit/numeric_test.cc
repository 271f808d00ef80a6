#include "kvmosaic/numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kvmosaic {
namespace {

// Every pair of neighbouring finite values: the middle goes to the even one, just beside it to the nearer one. With
// the values themselves this pins the whole conversion, as rounding is monotone.
template <typename Widen, typename Narrow>
void check_all_neighbours(uint32_t largest, Widen widen, Narrow narrow, uint32_t sign) {
    for (uint32_t low = 0; low < largest; ++low) {
        const uint32_t high = low + 1;
        const float a = widen(low), b = widen(high);
        ASSERT_LT(a, b);
        ASSERT_EQ(narrow(a), low);
        ASSERT_EQ(narrow(-a), low | sign);
        const double middle = (double(a) + double(b)) / 2;
        const float m = float(middle);
        if (double(m) != middle) continue; // neighbours closer than fp32 can split
        const uint32_t even = low % 2 == 0 ? low : high;
        ASSERT_EQ(narrow(m), even) << low;
        ASSERT_EQ(narrow(-m), even | sign) << low;
        ASSERT_EQ(narrow(std::nextafter(m, 0.0f)), low);
        ASSERT_EQ(narrow(std::nextafter(m, std::numeric_limits<float>::infinity())), high);
    }
    ASSERT_EQ(narrow(widen(largest)), largest);
}

TEST(Numeric, F16RoundsHalfToEvenEverywhere) { check_all_neighbours(0x7BFF, f16_to_f32, f32_to_f16, 0x8000); }
TEST(Numeric, Bf16RoundsHalfToEvenEverywhere) { check_all_neighbours(0x7F7F, bf16_to_f32, f32_to_bf16, 0x8000); }
TEST(Numeric, F8E4m3RoundsHalfToEvenEverywhere) { check_all_neighbours(0x7E, f8e4m3_to_f32, f32_to_f8e4m3_sat, 0x80); }
TEST(Numeric, F8E5m2RoundsHalfToEvenEverywhere) { check_all_neighbours(0x7B, f8e5m2_to_f32, f32_to_f8e5m2_sat, 0x80); }

TEST(Numeric, KnownValues) {
    EXPECT_EQ(f16_to_f32(0x3C00), 1.0f);
    EXPECT_EQ(f16_to_f32(0x0001), 0x1p-24f);
    EXPECT_EQ(f16_to_f32(0x7BFF), 65504.0f);
    EXPECT_EQ(f16_to_f32(0xC000), -2.0f);
    EXPECT_EQ(bf16_to_f32(0x3F80), 1.0f);
    EXPECT_EQ(f8e4m3_to_f32(0x38), 1.0f);
    EXPECT_EQ(f8e4m3_to_f32(0x01), 0x1p-9f);
    EXPECT_EQ(f8e4m3_to_f32(0x7E), 448.0f);
    EXPECT_EQ(f8e5m2_to_f32(0x3C), 1.0f);
    EXPECT_EQ(f8e5m2_to_f32(0x01), 0x1p-16f);
    EXPECT_EQ(f8e5m2_to_f32(0x7B), 57344.0f);
}

TEST(Numeric, SignOfZeroStays) {
    EXPECT_EQ(f32_to_f16(-0.0f), 0x8000);
    EXPECT_TRUE(std::signbit(f16_to_f32(0x8000)));
    EXPECT_EQ(f32_to_bf16(-0.0f), 0x8000);
    EXPECT_EQ(f32_to_f8e4m3_sat(-1e-30f), 0x80);
    EXPECT_EQ(f32_to_f8e5m2_sat(-1e-30f), 0x80);
}

TEST(Numeric, OverflowPolicy) {
    const float inf = std::numeric_limits<float>::infinity();
    EXPECT_EQ(f32_to_f16(65519.996f), 0x7BFF); // below the middle between 65504 and 65536
    EXPECT_EQ(f32_to_f16(65520.0f), 0x7C00);
    EXPECT_EQ(f32_to_f16_sat(65520.0f), 0x7BFF);
    EXPECT_EQ(f32_to_f16_sat(-1e30f), 0xFBFF);
    EXPECT_EQ(f32_to_f16(inf), 0x7C00);
    EXPECT_EQ(f32_to_f16_sat(inf), 0x7BFF);
    EXPECT_EQ(f32_to_f16_sat(-inf), 0xFBFF);
    EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
    EXPECT_EQ(f32_to_bf16_sat(std::numeric_limits<float>::max()), 0x7F7F);
    EXPECT_EQ(f32_to_bf16_sat(-inf), 0xFF7F);
}

TEST(Numeric, NanStaysNan) {
    // A quiet one, and one whose payload lies in the bits that narrowing drops.
    for (uint32_t bits : {0x7FC00000u, 0x7F800001u, 0xFF800001u}) {
        const float nan = std::bit_cast<float>(bits);
        EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan))));
        EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16_sat(nan))));
        EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan))));
        EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16_sat(nan))));
        EXPECT_TRUE(std::isnan(f8e4m3_to_f32(f32_to_f8e4m3_sat(nan))));
        EXPECT_TRUE(std::isnan(f8e5m2_to_f32(f32_to_f8e5m2_sat(nan))));
    }
}

TEST(Numeric, SubnormalFloatsRoundToZeroOrToTheRightBf16) {
    EXPECT_EQ(f32_to_f16(std::bit_cast<float>(0x00000001u)), 0);
    EXPECT_EQ(f32_to_f16(0x1p-25f), 0); // a tie between 0 and the smallest: even
    EXPECT_EQ(f32_to_f16(0x1.000002p-25f), 1);
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x00008000u)), 0);
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x00008001u)), 1);
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x00018000u)), 2);
}

TEST(Numeric, LoadAndStoreByType) {
    uint8_t memory[64] = {};
    for (ParamType t : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        store(t, memory + 1, 3, 1.5f); // unaligned on purpose
        store(t, memory + 1, 4, -1e30f);
        EXPECT_EQ(load(t, memory + 1, 3), 1.5f) << name_of(t);
        EXPECT_TRUE(std::isfinite(load(t, memory + 1, 4))) << name_of(t);
        EXPECT_LE(load(t, memory + 1, 4), -448.0f) << name_of(t);
    }
    for (RawType t : {RawType::f32, RawType::f16, RawType::bf16}) {
        store(t, memory + 1, 3, -0.375f);
        store(t, memory + 1, 4, std::numeric_limits<float>::infinity());
        EXPECT_EQ(load(t, memory + 1, 3), -0.375f) << name_of(t);
        EXPECT_TRUE(std::isfinite(load(t, memory + 1, 4))) << name_of(t);
    }
    EXPECT_STREQ(name_of(ParamType::f8e4m3), "f8e4m3");
    EXPECT_STREQ(name_of(RawType::bf16), "bf16");
}

} // namespace
} // namespace kvmosaic
