// Bug cases of the quantizer's numerics: reports from other engines turned into inputs, named by their id.
#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using kernels::Counters;
using kernels::RowState;
using kernels::Table;
using namespace testing;

constexpr float kInf = std::numeric_limits<float>::infinity();

float as_param(ParamType type, float x) {
    uint8_t byte[2];
    store(type, byte, 0, x);
    return load(type, byte, 0);
}

// Everything of a page that is a scale or an offset is finite.
void expect_finite_metadata(const Page& page, const std::string& what) {
    for (int32_t i = 0; i < page.layout().groups * page.layout().coded; ++i) {
        EXPECT_TRUE(std::isfinite(scale_at(page, 0, i))) << what;
        EXPECT_TRUE(std::isfinite(zero_at(page, 0, i))) << what;
    }
}

// A constant group beside ordinary ones comes back as its constant, to the precision of the stored offset.
TEST(BugCase, A1_ConstantGroup) {
    const std::vector<float> constants = {0.0f, 9.0f, -9.0f, 100.0f, -100.0f, 1e-3f, 0.01f, 60000.0f, -0.0f};
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (int bits : {1, 2, 3, 4, 6, 8}) {
            for (Side side : {Side::key, Side::value}) {
                for (float c : constants) {
                    const int32_t dim = 64, group = 32;
                    const PageLayout l = layout(grid_spec(side, bits, group, params), side, dim);
                    std::vector<float> rows = normal_rows(dim, 21);
                    for (int32_t i = 0; i < group; ++i) // one channel's second group, or one token's
                        rows[size_t(side == Side::key ? (group + i) * dim + 5 : 5 * dim + group + i)] = c;
                    for (const Table* table : tables()) {
                        const std::string what = std::string(table->isa) + " " + name_of(side) + " bits " +
                                                 std::to_string(bits) + " c " + std::to_string(c);
                        const Page page = encoded(*table, l, {}, rows);
                        const std::vector<float> back = restored(*table, page);
                        expect_finite_metadata(page, what);
                        for (int32_t i = 0; i < group; ++i)
                            ASSERT_EQ(back[size_t(side == Side::key ? (group + i) * dim + 5 : 5 * dim + group + i)],
                                      as_param(params, c))
                                << what;
                        std::vector<float> others = rows;
                        for (size_t i = 0; i < others.size(); ++i) // the rest is as good as ever
                            others[i] = rows[i] == c ? back[i] : rows[i];
                        ASSERT_LE(worst_error(page, {}, others, back), 1.0) << what;
                        ASSERT_EQ(scale_at(page, 1, 5), 0.0f) << what;
                    }
                }
            }
        }
    }
}

// A range far below the spacing of the offset's type: never worse than half a step or one unit of that type.
TEST(BugCase, A2_AlmostConstantGroup) {
    for (const float base : {1000.0f, 1000.2f, -1000.3f, 60000.0f, 60010.0f})
        for (int bits : {1, 2, 3, 4, 6, 8})
            for (Side side : {Side::key, Side::value}) {
                const bool large = std::fabs(base) > 50000.0f;
                const float steps[3] = {0.0f, large ? 32.0f : 0x1p-6f, large ? 0.0f : 0x1p-5f};
                const float unit = large ? 32.0f : 0.5f, range = large ? 32.0f : 0x1p-5f; // f16 spacing at the base
                const int32_t dim = 64;
                const PageLayout l = layout(grid_spec(side, bits, 32), side, dim);
                std::vector<float> rows(size_t(kPageTokens * dim));
                for (size_t i = 0; i < rows.size(); ++i) {
                    const size_t lane = side == Side::key ? i / size_t(dim) : i % size_t(dim);
                    rows[i] = base + steps[lane % 3];
                }
                const float allowed = std::max(range / float((1 << bits) - 1) / 2.0f, unit);
                for (const Table* table : tables()) {
                    const Page page = encoded(*table, l, {}, rows);
                    const std::vector<float> back = restored(*table, page);
                    expect_finite_metadata(page, table->isa);
                    for (size_t i = 0; i < rows.size(); ++i)
                        ASSERT_LE(std::fabs(back[i] - rows[i]), allowed)
                            << table->isa << " " << name_of(side) << " bits " << bits << " base " << base;
                }
            }
}

// One outlier of -125000 among values in [-1, 4], metadata in f16: the offset saturates before codes are made from it.
TEST(BugCase, A3_MetadataOverflow) {
    for (int bits : {2, 3, 4, 8}) {
        const int32_t dim = 128;
        const PageLayout l = layout(grid_spec(Side::value, bits, 128), Side::value, dim);
        Random random(31);
        std::vector<float> rows(size_t(kPageTokens) * dim);
        for (float& x : rows)
            x = random.uniform(-1.0f, 4.0f);
        rows[size_t(3 * dim + 77)] = -125000.0f;
        for (const Table* table : tables()) {
            const Page page = encoded(*table, l, {}, rows);
            const std::vector<float> back = restored(*table, page);
            expect_finite_metadata(page, table->isa);
            EXPECT_EQ(zero_at(page, 0, 3), -65504.0f);
            const double step = 125004.0 / double((1 << bits) - 1);
            for (int32_t c = 0; c < dim; ++c) {
                const size_t i = size_t(3 * dim + c);
                ASSERT_TRUE(std::isfinite(back[i]));
                if (c == 77) continue;
                EXPECT_LE(std::fabs(back[i] - rows[i]), 0.502 * step) << table->isa << " bits " << bits;
            }
            EXPECT_EQ(back[size_t(3 * dim + 77)], -65504.0f); // saturated
            for (int32_t c = 0; c < dim; ++c)                 // other tokens do not notice
                ASSERT_LE(std::fabs(back[size_t(4 * dim + c)] - rows[size_t(4 * dim + c)]), 2.6 / ((1 << bits) - 1));
        }
    }
}

// Blocks whose sum of values passes f16's largest: sums run in fp32 or in integers, so scores and mixes are right.
TEST(BugCase, A4_BlockSumOverflow) {
    const int32_t dim = 32;
    std::vector<float> rows(size_t(kPageTokens) * dim);
    for (int32_t t = 0; t < kPageTokens; ++t) {
        for (int32_t c = 0; c < dim; ++c) // alternating tokens: 32 x 2100 = 67200, and +-60000
            rows[size_t(t * dim + c)] = t % 2 == 0 ? 2100.0f : (c % 2 == 0 ? 60000.0f : -60000.0f);
    }
    for (Side side : {Side::key, Side::value}) {
        const PageLayout l = layout(grid_spec(side, 8, 32), side, dim);
        for (const Table* table : tables()) {
            const std::vector<float> back = restored(*table, encoded(*table, l, {}, rows));
            const std::vector<float> ones(dim, 1.0f);
            std::vector<float> s(kPageTokens);
            table->scores(ones.data(), 1, back.data(), dim, kPageTokens, dim, 1.0f, s.data(), kPageTokens);
            for (int32_t t = 0; t < kPageTokens; ++t) {
                double want = 0.0;
                for (int32_t c = 0; c < dim; ++c)
                    want += double(back[size_t(t * dim + c)]);
                ASSERT_NEAR(double(s[size_t(t)]), want, 0.5) << table->isa;
                if (t % 2 != 0) continue; // keys share their steps with the +-60000, values do not
                ASSERT_NEAR(double(s[size_t(t)]), 67200.0, side == Side::key ? 17000.0 : 64.0);
            }
            std::vector<float> p(kPageTokens, 1.0f), o(dim, 0.0f); // 64 x 2100 + 64 x 60000 in one sum
            const int32_t lo = 0, hi = kPageTokens;
            table->mix(p.data(), kPageTokens, &lo, &hi, 1, back.data(), dim, dim, o.data(), dim);
            for (int32_t c = 0; c < dim; ++c) {
                double want = 0.0;
                for (int32_t t = 0; t < kPageTokens; ++t)
                    want += double(back[size_t(t * dim + c)]);
                ASSERT_NEAR(double(o[size_t(c)]), want, 4.0) << table->isa;
            }
        }
    }
}

// 8 bits per token: every token, however small, uses its whole range of codes.
TEST(BugCase, A6_ScaleIsNotFlooredAtOne) {
    const std::vector<float> absmax = {0.3f, 1.0f, 5.0f, 126.0f, 127.0f, 400.0f};
    const int32_t dim = 64;
    const PageLayout l = layout(grid_spec(Side::value, 8, 64), Side::value, dim);
    Random random(41);
    std::vector<float> rows(size_t(kPageTokens) * dim, 0.0f); // tokens past the list are all zero
    for (size_t t = 0; t < absmax.size(); ++t) {
        for (int32_t c = 0; c < dim; ++c)
            rows[t * dim + size_t(c)] = random.uniform(-absmax[t], absmax[t]);
        rows[t * dim] = absmax[t];
        rows[t * dim + 1] = -absmax[t];
    }
    for (const Table* table : tables()) {
        const Page page = encoded(*table, l, {}, rows);
        const std::vector<float> back = restored(*table, page);
        for (size_t t = 0; t < absmax.size(); ++t) {
            const double m = double(absmax[t]), step = 2.0 * m / 255.0;
            EXPECT_NEAR(double(scale_at(page, 0, int32_t(t))), step, step * 0x1p-11);
            EXPECT_NEAR(double(back[t * dim]), m, m / 254.0) << table->isa;
            EXPECT_NEAR(double(back[t * dim + 1]), -m, m * 0x1p-11 * 1.001) << table->isa;
            for (int32_t c = 0; c < dim; ++c)
                ASSERT_NEAR(double(back[t * dim + size_t(c)]), double(rows[t * dim + size_t(c)]), m / 254.0 * 1.13)
                    << table->isa;
        }
        EXPECT_EQ(back[absmax.size() * dim], 0.0f);
    }
}

// The two 8-bit float types against their definitions, bit by bit, and the written policy at their edges.
TEST(BugCase, A7_Float8Tables) {
    for (int code = 0; code < 256; ++code) {
        const int sign = code >> 7, e4 = (code >> 3) & 15, m3 = code & 7, e5 = (code >> 2) & 31, m2 = code & 3;
        double e4m3 = e4 == 0 ? std::ldexp(m3, -9) : std::ldexp(8 + m3, e4 - 10);
        if (e4 == 15 && m3 == 7) e4m3 = NAN;
        double e5m2 = e5 == 0 ? std::ldexp(m2, -16) : std::ldexp(4 + m2, e5 - 17);
        if (e5 == 31) e5m2 = m2 == 0 ? INFINITY : NAN;
        if (sign != 0) e4m3 = -e4m3, e5m2 = -e5m2;
        const float a = f8e4m3_to_f32(uint8_t(code)), b = f8e5m2_to_f32(uint8_t(code));
        if (std::isnan(e4m3)) {
            EXPECT_TRUE(std::isnan(a)) << code;
            EXPECT_TRUE(std::isnan(f8e4m3_to_f32(f32_to_f8e4m3_sat(a)))) << code;
        } else {
            EXPECT_EQ(double(a), e4m3) << code;
            EXPECT_EQ(std::signbit(a), sign == 1) << code;
            EXPECT_EQ(f32_to_f8e4m3_sat(a), code); // all codes come back
        }
        if (std::isnan(e5m2)) {
            EXPECT_TRUE(std::isnan(b)) << code;
            EXPECT_TRUE(std::isnan(f8e5m2_to_f32(f32_to_f8e5m2_sat(b)))) << code;
        } else {
            EXPECT_EQ(double(b), e5m2) << code;
            // Infinities saturate on the way back; all others return.
            EXPECT_EQ(f32_to_f8e5m2_sat(b), std::isfinite(b) ? code : (sign << 7 | 0x7B));
        }
    }
    const float in[] = {256.0f, 288.0f, 448.0f, 464.0f, 465.0f, 480.0f, 500.0f, 1000.0f, kInf};
    const float e4m3[] = {256.0f, 288.0f, 448.0f, 448.0f, 448.0f, 448.0f, 448.0f, 448.0f, 448.0f};
    const float e5m2[] = {256.0f, 256.0f, 448.0f, 448.0f, 448.0f, 512.0f, 512.0f, 1024.0f, 57344.0f};
    for (size_t i = 0; i < std::size(in); ++i) {
        EXPECT_EQ(f8e4m3_to_f32(f32_to_f8e4m3_sat(in[i])), e4m3[i]) << in[i];
        EXPECT_EQ(f8e4m3_to_f32(f32_to_f8e4m3_sat(-in[i])), -e4m3[i]) << in[i];
        EXPECT_EQ(f8e5m2_to_f32(f32_to_f8e5m2_sat(in[i])), e5m2[i]) << in[i]; // 288 and 480 are ties
        EXPECT_EQ(f8e5m2_to_f32(f32_to_f8e5m2_sat(-in[i])), -e5m2[i]) << in[i];
    }
    EXPECT_EQ(f32_to_f8e4m3_sat(NAN) & 0x7F, 0x7F);
    EXPECT_EQ(f32_to_f8e4m3_sat(-NAN), 0xFF);
    // Ties among the subnormals: 1.5 and 2.5 smallest steps.
    EXPECT_EQ(f32_to_f8e4m3_sat(0x1.8p-9f), 2);
    EXPECT_EQ(f32_to_f8e4m3_sat(0x1.4p-8f), 2);
    EXPECT_EQ(f32_to_f8e4m3_sat(0x1p-10f), 0);
    EXPECT_EQ(f32_to_f8e5m2_sat(0x1.8p-16f), 2);
    EXPECT_EQ(f32_to_f8e5m2_sat(0x1p-17f), 0);
}

// |K| up to 40 and |V| up to 0.5 have nothing in common: V's error is measured by V's own range.
TEST(BugCase, A9_KeysAndValuesHaveTheirOwnScales) {
    const int32_t dim = 64;
    Random random(51);
    std::vector<float> k(size_t(kPageTokens) * dim), v(k.size());
    for (float& x : k)
        x = random.uniform(-40.0f, 40.0f);
    for (float& x : v)
        x = random.uniform(-0.5f, 0.5f);
    const PageLayout kl = layout(grid_spec(Side::key, 8, 128), Side::key, dim);
    const PageLayout vl = layout(grid_spec(Side::value, 8, 64), Side::value, dim);
    for (const Table* table : tables()) {
        const std::vector<float> kb = restored(*table, encoded(*table, kl, {}, k));
        const std::vector<float> vb = restored(*table, encoded(*table, vl, {}, v));
        for (size_t i = 0; i < k.size(); ++i) {
            ASSERT_LE(std::fabs(kb[i] - k[i]), 80.0f / 255 * 0.63f) << table->isa;
            ASSERT_LE(std::fabs(vb[i] - v[i]), 1.0f / 255 * 0.63f) << table->isa;
        }
    }
}

// The policy for NaN and infinities, where rows enter the cache: NaN becomes 0, infinities the largest finite value,
// both counted. So no group ever sees one, and neighbours keep their range.
TEST(BugCase, A13_NonFiniteRowsAreReplacedAndCounted) {
    const int32_t dim = 64;
    for (float bad : {float(NAN), kInf, -kInf}) {
        for (const Table* table : tables()) {
            Counters counters;
            std::vector<float> rows = normal_rows(dim, 61), stored(rows.size());
            rows[size_t(9 * dim + 4)] = bad;
            std::vector<uint8_t> raw(size_t(dim) * 2);
            for (int32_t t = 0; t < kPageTokens; ++t) {
                table->store_raw(RawType::f16, rows.data() + t * dim, dim, raw.data(), &counters);
                table->load_raw(RawType::f16, raw.data(), 1, dim, stored.data() + t * dim, dim);
            }
            EXPECT_EQ(counters.non_finite, 1) << table->isa;
            EXPECT_EQ(counters.saturated, 0) << table->isa;
            const float want = std::isnan(bad) ? 0.0f : std::copysign(65504.0f, bad);
            EXPECT_EQ(stored[size_t(9 * dim + 4)], want) << table->isa;
            for (Side side : {Side::key, Side::value}) {
                const PageLayout l = layout(grid_spec(side, 2, 32), side, dim);
                const Page page = encoded(*table, l, {}, stored);
                const std::vector<float> back = restored(*table, page);
                expect_finite_metadata(page, table->isa);
                EXPECT_LE(worst_error(page, {}, stored, back), 1.0) << table->isa;
                for (int32_t t = 0; t < kPageTokens; ++t) {
                    for (int32_t c = 0; c < dim; ++c) {
                        const bool hit = t == 9 && c == 4;
                        const bool same_group = side == Side::key ? c == 4 && t < 32 : t == 9 && c < 32;
                        // Its own group pays for an infinity; a NaN that became 0 widens no range.
                        if (hit || (same_group && !std::isnan(bad))) continue;
                        const size_t i = size_t(t * dim + c);
                        ASSERT_LE(std::fabs(back[i] - rows[i]), 1.7f) << table->isa;
                    }
                }
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
