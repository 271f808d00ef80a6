// What holds for every page of every store, side, width and group, on every table.
#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

const std::vector<int32_t> kDims = {8, 20, 64, 80, 96, 100, 128};

TEST(CodecProperty, ErrorIsAtMostHalfAStep) {
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (const Case& c : codec_cases(kDims, {8, 32, 128}, params)) {
            for (float scale : {1.0f, 0.01f, 30.0f}) {
                const std::vector<float> rows = normal_rows(c.page.dim, 1, scale);
                const Page page = encoded(kernels::reference(), c.page, c.channels, rows);
                const double worst = worst_error(page, c.channels, rows, restored(kernels::reference(), page));
                ASSERT_LE(worst, 1.0) << c.name << " " << name_of(params) << " scale " << scale;
                if (c.page.kind == StoreKind::grid) {
                    EXPECT_GT(worst, 0.5) << c.name; // near the bound: the check looks at real errors
                }
            }
        }
    }
}

TEST(CodecProperty, EveryTableMakesTheReferencesBytes) {
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (const Case& c : codec_cases(kDims, {24, 32, 128}, params)) {
            std::vector<float> rows = normal_rows(c.page.dim, 2, 3.0f);
            rows[5] = 60000.0f; // saturates f8 metadata, stretches one group
            for (int32_t d = 0; d < c.page.dim; ++d)
                rows[size_t(9 * c.page.dim + d)] = -0.0f;
            const Page want = encoded(kernels::reference(), c.page, c.channels, rows);
            const std::vector<float> values = restored(kernels::reference(), want);
            for (const Table* table : tables()) {
                const Page page = encoded(*table, c.page, c.channels, rows);
                ASSERT_TRUE(page.guards_intact()) << table->isa << " " << c.name;
                ASSERT_EQ(page.copy(), want.copy()) << table->isa << " " << c.name << " " << name_of(params);
                ASSERT_EQ(restored(*table, want), values) << table->isa << " " << c.name << " " << name_of(params);
            }
        }
    }
}

// Encodes in pieces that are whole groups (keys) or anything (values).
TEST(CodecProperty, SplitPointsDoNotMatter) {
    Random random(3);
    for (const Case& c : codec_cases({64, 100}, {8, 32, 48, 128})) {
        const std::vector<float> rows = normal_rows(c.page.dim, 4);
        for (const Table* table : tables()) {
            const std::vector<uint8_t> want = encoded(*table, c.page, c.channels, rows).copy();
            for (int round = 0; round < 4; ++round) {
                Page page(c.page);
                for (int32_t first = 0; first < kPageTokens;) {
                    const int32_t step = c.page.side == Side::key ? c.page.group : 1;
                    const int32_t most = (kPageTokens - first + step - 1) / step;
                    const int32_t pieces = round == 0 ? 1 : 1 + random.below(std::min(most, 40));
                    const int32_t n = std::min(pieces * step, kPageTokens - first);
                    table->encode(c.page, map_or_null(c.page, c.channels), rows.data() + first * c.page.dim, first, n,
                                  page.bytes());
                    first += n;
                }
                ASSERT_EQ(page.copy(), want) << table->isa << " " << c.name;
                ASSERT_TRUE(page.guards_intact()) << table->isa << " " << c.name;
            }
        }
    }
}

// Rows decode one by one to what they decode to together, whatever the stride; the gap between rows stays untouched.
TEST(CodecProperty, RestoreOfAnyRangeAndStride) {
    Random random(6);
    for (const Case& c : codec_cases({20, 64, 96}, {32})) {
        const std::vector<float> rows = normal_rows(c.page.dim, 5);
        const Page page = encoded(kernels::reference(), c.page, c.channels, rows);
        const std::vector<float> all = restored(kernels::reference(), page);
        for (const Table* table : tables()) {
            for (int round = 0; round < 6; ++round) {
                const int32_t first = random.below(kPageTokens), n = 1 + random.below(kPageTokens - first);
                const int64_t stride = c.page.dim + random.below(9);
                std::vector<float> out(size_t(n * stride) + 16, -777.0f);
                table->restore(c.page, page.bytes(), first, n, out.data(), stride);
                for (int64_t i = 0; i < int64_t(out.size()); ++i) {
                    const int64_t row = i / stride, d = i % stride;
                    const float want =
                        row < n && d < c.page.dim ? all[size_t((first + row) * c.page.dim + d)] : -777.0f;
                    ASSERT_EQ(out[size_t(i)], want) << table->isa << " " << c.name << " first " << first << " n " << n;
                }
            }
        }
    }
}

// A value page that is only partly filled: its rows are right, the rest of its bytes is still zero.
TEST(CodecProperty, OpenValuePagesHoldOnlyTheirRows) {
    for (int bits : {1, 2, 3, 4, 6, 8}) {
        const PageLayout l = layout(grid_spec(Side::value, bits, 32), Side::value, 96);
        const std::vector<float> rows = normal_rows(96, 8);
        for (const Table* table : tables()) {
            const std::vector<float> all = restored(*table, encoded(*table, l, {}, rows));
            for (int32_t n : {1, 3, 31, 32, 33, 127}) {
                Page page(l);
                table->encode(l, nullptr, rows.data(), 0, n, page.bytes());
                std::vector<float> back(size_t(n) * 96);
                table->restore(l, page.bytes(), 0, n, back.data(), 96);
                EXPECT_TRUE(std::equal(back.begin(), back.end(), all.begin())) << table->isa << " " << bits;
                for (int32_t lane = 0; lane < l.lanes; ++lane) {
                    for (int32_t t = n; t < kPageTokens; ++t) {
                        CodeSite sites[2];
                        const int count = code_sites(l, l.tiers[0], lane, t, sites);
                        for (int i = 0; i < count; ++i)
                            ASSERT_EQ((page.bytes()[sites[i].byte] >> sites[i].shift) & ((1 << sites[i].width) - 1), 0);
                    }
                }
            }
        }
    }
}

// Whatever finite floats come in, what comes out is finite, and so is the metadata.
TEST(CodecProperty, FiniteInFiniteOut) {
    Random random(12);
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (const Case& c : codec_cases({20, 64}, {32, 128}, params)) {
            std::vector<float> rows(size_t(kPageTokens) * c.page.dim);
            for (float& x : rows) {
                do
                    x = std::bit_cast<float>(uint32_t(random.bits())); // all exponents, subnormals too
                while (!std::isfinite(x));
            }
            for (int32_t d = 0; d < c.page.dim; ++d) { // extremes that overflow max - min, and tiny ranges
                rows[size_t(d)] = d % 2 ? std::numeric_limits<float>::max() : -std::numeric_limits<float>::max();
                rows[size_t(3 * c.page.dim + d)] = d % 2 ? 1e-41f : 0.0f;
                rows[size_t(4 * c.page.dim + d)] = d % 2 ? 3e-38f : 2.9e-38f;
            }
            const Page want = encoded(kernels::reference(), c.page, c.channels, rows);
            for (const Table* table : tables()) {
                const Page page = encoded(*table, c.page, c.channels, rows);
                ASSERT_EQ(page.copy(), want.copy()) << table->isa << " " << c.name << " " << name_of(params);
                for (float x : restored(*table, page))
                    ASSERT_TRUE(std::isfinite(x)) << table->isa << " " << c.name << " " << name_of(params);
                for (int32_t i = 0; i < c.page.groups * c.page.coded; ++i) {
                    ASSERT_TRUE(std::isfinite(scale_at(page, 0, i))) << c.name;
                    ASSERT_TRUE(std::isfinite(zero_at(page, 0, i))) << c.name;
                    ASSERT_GE(scale_at(page, 0, i), 0.0f) << c.name;
                }
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
