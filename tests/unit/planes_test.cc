// Stores in planes: where codes lie, what parameters say, and every table against the reference bit for bit.
#include "kernels/planes.h"

#include <gtest/gtest.h>

#include <cmath>

#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

StoreSpec searched() {
    StoreSpec spec = tiered_spec(kPageTokens);
    spec.rule = GridRule::searched;
    return spec;
}
StoreSpec fitted(int bits, int wide = 0) {
    StoreSpec spec = grid_spec(Side::value, bits, kPageTokens);
    spec.rule = GridRule::fitted;
    spec.wide = uint16_t(wide);
    return spec;
}

struct Shape {
    std::string name;
    PageLayout page;
    std::vector<uint16_t> channels;
};
std::vector<Shape> shapes() {
    std::vector<Shape> all;
    for (const int32_t dim : {8, 36, 64, 80, 100, 128, 256, 300, 512}) {
        const auto key = [&](const Ladder& ladder, const char* name) {
            ASSERT_TRUE(validate(ladder, dim, searched())) << validate(ladder, dim, searched()).message();
            all.push_back({std::string(name).append(" D ").append(std::to_string(dim)),
                           layout(searched(), Side::key, dim, ladder), shuffled_channels(dim)});
        };
        for (const int bits : {0, 1, 2, 3, 4, 6, 8})
            key(Ladder::uniform(uint8_t(bits), uint16_t(dim)), "one width");
        if (dim >= 36) key(ladder_of({{8, 3}, {4, 9}, {6, 5}, {2, 4}, {3, 7}, {1, 3}, {0, dim - 31}}), "all widths");
        for (const int bits : {1, 2, 3, 4, 5, 6})
            for (const int32_t wide : {0, dim / 16 * 8}) {
                if (wide > 0 && bits == 6) continue;
                EXPECT_TRUE(validate(fitted(bits, wide), Side::value, dim));
                all.push_back({std::string("values D ").append(std::to_string(dim)),
                               layout(fitted(bits, wide), Side::value, dim),
                               {}});
            }
    }
    return all;
}

// Channels of very different sizes, some with a mean far from zero, a constant one and one of zeros.
std::vector<float> rows_of(int32_t dim, uint64_t seed) {
    Random random(seed);
    std::vector<float> rows(size_t(kPageTokens) * size_t(dim));
    for (int32_t t = 0; t < kPageTokens; ++t)
        for (int32_t d = 0; d < dim; ++d) {
            const float size = std::ldexp(1.0f, d % 13 - 8), shift = d % 7 == 2 ? 11.0f : 0.0f;
            float x = size * random.normal() + shift;
            if (d == 5) x = 3.25f;
            if (d == 6) x = 0.0f;
            rows[size_t(t * dim + d)] = f16_to_f32(f32_to_f16_sat(x));
        }
    return rows;
}

TEST(Planes, EveryTableMakesTheReferencesBytes) {
    for (const Shape& s : shapes()) {
        std::vector<float> rows = rows_of(s.page.dim, 3);
        for (const bool large : {false, true}) {
            if (large) rows[1] = 60000.0f, rows[size_t(s.page.dim) + 2] = -65504.0f;
            const Page want = encoded(kernels::reference(), s.page, s.channels, rows);
            const std::vector<float> values = restored(kernels::reference(), want);
            for (const float v : values)
                ASSERT_TRUE(std::isfinite(v)) << s.name;
            for (const Table* table : tables()) {
                const Page page = encoded(*table, s.page, s.channels, rows);
                ASSERT_TRUE(page.guards_intact()) << table->isa << " " << s.name;
                ASSERT_EQ(page.copy(), want.copy()) << table->isa << " " << s.name << " large " << large;
                ASSERT_EQ(restored(*table, want), values) << table->isa << " " << s.name;
            }
        }
    }
}

TEST(Planes, AnyRangeOfRowsRestores) {
    for (const Shape& s : shapes()) {
        const Page page = encoded(kernels::reference(), s.page, s.channels, rows_of(s.page.dim, 5));
        const std::vector<float> values = restored(kernels::reference(), page);
        const int32_t dim = s.page.dim, stride = dim + 3;
        for (const Table* table : tables())
            for (const auto& [first, n] : {std::pair{0, 1}, {3, 9}, {37, 64}, {120, 8}}) {
                std::vector<float> out(size_t(n) * size_t(stride), -7.0f);
                table->restore(s.page, page.bytes(), first, n, out.data(), stride);
                for (int32_t t = 0; t < n; ++t)
                    for (int32_t d = 0; d < stride; ++d)
                        ASSERT_EQ(out[size_t(t * stride + d)], d < dim ? values[size_t((first + t) * dim + d)] : -7.0f)
                            << table->isa << " " << s.name << " row " << first + t << " channel " << d;
            }
    }
}

TEST(Planes, OnlyTheEndOfAPlaneIsPadded) {
    // 16 channels in low4 (2 vectors), 3 + 4 + 7 + 2 = 16 in two (1 vector), 7 + 25 = 32 in one (1 vector).
    const Ladder ladder = ladder_of({{4, 13}, {6, 3}, {2, 6}, {3, 7}, {1, 25}, {0, 10}});
    const PageLayout page = layout(searched(), Side::key, 64, ladder);
    ASSERT_EQ(page.plane_count, 3);
    EXPECT_EQ(page.scale_offset, 4u * 32 * 16); // 2 bits a value exactly
    EXPECT_EQ(page.map_offset + page.map_bytes, page.scale_offset + 3 * 64 + 2);
    StoreSpec tight = searched();
    tight.vectors = 4;
    EXPECT_TRUE(validate(ladder, 64, tight));
    EXPECT_EQ(worst_page_bytes(tight, Side::key, 64, {}), page.bytes);
    tight.vectors = 3;
    EXPECT_FALSE(validate(ladder, 64, tight));
    EXPECT_FALSE(validate(ladder_of({{6, 32}, {4, 32}}), 64, searched())); // not the order of the planes
}

TEST(Planes, FractionsOfABitAreExact) {
    for (const int bits : {1, 2, 3, 4, 5}) {
        const PageLayout page = layout(fitted(bits, 32), Side::value, 64);
        EXPECT_EQ(page.scale_offset * 8, uint32_t(kPageTokens * 64 * (2 * bits + 1) / 2)) << bits;
    }
}

TEST(Planes, LogarithmsCoverWhatTheyAreGiven) {
    Random random(11);
    for (int i = 0; i < 2000; ++i) {
        const float unit = f16_to_f32(f32_to_f16_sat(std::ldexp(1.0f + random.uniform(0, 1), random.below(20) - 10)));
        const float x = unit * std::exp2(-random.uniform(0.0f, 15.0f));
        for (const bool fine : {false, true}) {
            const int code = kernels::log_code(unit, x, fine);
            EXPECT_GE(kernels::log_decode(unit, code, fine), x);
            EXPECT_LE(kernels::log_decode(unit, code, fine), x * (fine ? 1.0445f : 1.0906f)); // a step more
        }
    }
    for (int i = 0; i < 16; ++i)
        EXPECT_EQ(kernels::kSixteenths[i], float(std::exp2(-double(i) / 16))) << i;
}

// More bits, less error; and less than an evenly spaced grid over the whole range makes of heavy tails.
TEST(Planes, ErrorsFallAlongTheLadder) {
    const int32_t dim = 64;
    Random random(21);
    std::vector<float> rows(size_t(kPageTokens) * dim);
    for (float& x : rows)
        x = random.normal();
    double last = 1e9;
    for (const int bits : {0, 1, 2, 3, 4, 6, 8}) {
        const PageLayout page = layout(searched(), Side::key, dim, Ladder::uniform(uint8_t(bits), uint16_t(dim)));
        const std::vector<float> values =
            restored(kernels::reference(), encoded(kernels::reference(), page, shuffled_channels(dim), rows));
        double error = 0;
        for (size_t i = 0; i < rows.size(); ++i)
            error += (values[i] - rows[i]) * (values[i] - rows[i]) / double(rows.size());
        EXPECT_LT(error, bits == 0 ? 1.01 : 0.6 * last) << bits;
        last = error;
    }
    last = 1.01;
    for (const int bits : {1, 2, 3, 4, 5, 6}) {
        const PageLayout page = layout(fitted(bits), Side::value, dim);
        const std::vector<float> values = restored(kernels::reference(), encoded(kernels::reference(), page, {}, rows));
        double error = 0;
        for (size_t i = 0; i < rows.size(); ++i)
            error += (values[i] - rows[i]) * (values[i] - rows[i]) / double(rows.size());
        EXPECT_LT(error, 0.45 * last) << bits;
        last = error;
    }
}

} // namespace
} // namespace kvmosaic
