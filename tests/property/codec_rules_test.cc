// Pages of every rule and axis, on every table: the reference's bytes and values, however the rows come in.
#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

const std::vector<ParamType> kParams = {ParamType::f16, ParamType::bf16, ParamType::f8e4m3};

// Whole tokens, constant runs and zeros besides what hostile_rows has per channel.
std::vector<float> rows_of(int32_t dim, uint64_t seed) {
    std::vector<float> rows = hostile_rows(dim, seed);
    Random random(seed);
    for (int32_t d = 0; d < dim; ++d) {
        rows[size_t(9 * dim + d)] = 0.0f;
        rows[size_t(10 * dim + d)] = -7.5f;
        rows[size_t(11 * dim + d)] = -0.0f;
        rows[size_t(12 * dim + d)] = float(random.below(3) - 1); // ties of the outliers
        for (int32_t t = 16; t < 96; ++t) // most tokens are ordinary ones: their groups have fine grids
            rows[size_t(t * dim + d)] = f16_to_f32(f32_to_f16(random.normal()));
    }
    return rows;
}

class RuleParity : public ::testing::TestWithParam<int32_t> {};

TEST_P(RuleParity, BytesAndValuesAreTheReferences) {
    const int32_t dim = GetParam();
    for (kvmosaic::ParamType params : kParams) {
        const std::vector<int32_t> groups = params == kvmosaic::ParamType::f16    ? std::vector<int32_t>{32, 128, 512}
                                            : params == kvmosaic::ParamType::bf16 ? std::vector<int32_t>{40}
                                                                                  : std::vector<int32_t>{64};
        const std::vector<float> rows = rows_of(dim, uint64_t(dim) + 3);
        for (const RuleCase& c : rule_cases(dim, groups, params)) {
            const Page want = encoded(kernels::reference(), c, rows);
            ASSERT_TRUE(want.guards_intact()) << c.name;
            const std::vector<float> values = restored(kernels::reference(), want);
            for (float x : values)
                ASSERT_TRUE(std::isfinite(x)) << c.name;
            for (const Table* table : kernels::available()) {
                const Page page = encoded(*table, c, rows);
                ASSERT_TRUE(page.guards_intact()) << table->isa << " " << c.name;
                ASSERT_EQ(page.copy(), want.copy()) << table->isa << " " << c.name;
                const std::vector<float> back = restored(*table, want);
                ASSERT_EQ(std::memcmp(back.data(), values.data(), back.size() * sizeof(float)), 0)
                    << table->isa << " " << c.name;
            }
        }
    }
}
INSTANTIATE_TEST_SUITE_P(Dims, RuleParity, ::testing::Values(1, 8, 20, 64, 80, 96, 100, 112, 128, 192, 256, 512));

// Groups inside a token take rows one by one or in any pieces; groups along tokens take whole groups.
TEST(CodecRules, SplitPointsDoNotMatter) {
    Random random(5);
    for (int32_t dim : {20, 64, 100}) {
        const std::vector<float> rows = rows_of(dim, 4);
        for (const RuleCase& c : rule_cases(dim, {32, 48})) {
            for (const Table* table : tables()) {
                const std::vector<uint8_t> want = encoded(*table, c, rows).copy();
                for (int round = 0; round < 3; ++round) {
                    Page page(c.page);
                    for (int32_t first = 0; first < kPageTokens;) {
                        const int32_t step = in_token(c.page) ? 1 : c.page.group;
                        const int32_t most = (kPageTokens - first + step - 1) / step;
                        const int32_t pieces = round == 0 ? 1 : 1 + random.below(std::min(most, 40));
                        const int32_t n = std::min(pieces * step, kPageTokens - first);
                        table->encode(c.page, map_of(c), rows.data() + first * dim, first, n, page.bytes());
                        first += n;
                    }
                    ASSERT_EQ(page.copy(), want) << table->isa << " " << c.name;
                    ASSERT_TRUE(page.guards_intact()) << table->isa << " " << c.name;
                }
            }
        }
    }
}

// Part of a page: only the rows asked for are written, whatever the stride, and only bytes of the page are read.
TEST(CodecRules, AnyRangeOfRowsRestores) {
    for (int32_t dim : {1, 40, 64, 100}) {
        const int32_t stride = dim + 3;
        const std::vector<float> rows = rows_of(dim, 6);
        Random random(9);
        for (const RuleCase& c : rule_cases(dim, {32, 48, 512})) {
            const Page page = encoded(kernels::reference(), c, rows);
            const std::vector<float> values = restored(kernels::reference(), page);
            const std::vector<uint8_t> exact = page.copy(); // no room behind the page: a sanitizer sees reads past it
            for (const Table* table : tables()) {
                for (int round = 0; round < 4; ++round) {
                    const int32_t first = random.below(kPageTokens), n = 1 + random.below(kPageTokens - first);
                    std::vector<float> out(size_t(n + 2) * size_t(stride), 123.0f);
                    table->restore(c.page, exact.data(), first, n, out.data() + stride, stride);
                    for (int32_t t = -1; t <= n; ++t) {
                        for (int32_t d = 0; d < stride; ++d) {
                            const bool inside = t >= 0 && t < n && d < dim;
                            const float expect = inside ? values[size_t((first + t) * dim + d)] : 123.0f;
                            ASSERT_EQ(out[size_t((t + 1) * stride + d)], expect)
                                << table->isa << " " << c.name << " rows " << first << "+" << n << " at " << t << ","
                                << d;
                        }
                    }
                }
            }
        }
    }
}

// What lies in rows not yet written must not reach a row that is: codes, digits, parameters and outliers of the rows to
// come hold the worst that such bytes can hold.
TEST(BugCaseC5, PoisonBeyondTheWrittenRows) {
    for (int32_t dim : {20, 64, 100}) {
        const std::vector<float> rows = rows_of(dim, 7);
        for (const RuleCase& c : rule_cases(dim, {32, 64})) {
            if (c.page.kind == StoreKind::tiered) continue;
            const int32_t step = in_token(c.page) ? 1 : c.page.group;
            for (int32_t filled : {1, 13, 33, 64, 127}) {
                filled = filled / step * step;
                if (filled == 0) continue;
                const PageLayout& l = c.page;
                Page page(l);
                kernels::reference().encode(l, nullptr, rows.data(), 0, filled, page.bytes());
                std::vector<float> want(size_t(filled * dim)), got(want);
                kernels::reference().restore(l, page.bytes(), 0, filled, want.data(), dim);
                const auto poison = [&](uint32_t offset, int32_t group, int32_t column) {
                    const uint32_t size = bytes_of(l.params);
                    std::memset(page.bytes() + offset + uint32_t(group * l.columns + column) * size, 0xFF, size);
                };
                for (int32_t t = filled; t < kPageTokens; ++t) {
                    for (int32_t d = 0; d < dim; ++d) {
                        const int32_t lane = l.side == Side::key ? t : d, pos = l.side == Side::key ? d : t;
                        if (l.levels == 3) {
                            static const int power[5] = {1, 3, 9, 27, 81};
                            page.bytes()[uint32_t(lane / 8) * l.lane_block_bytes + uint32_t(pos / 5 * 8 + lane % 8)] +=
                                uint8_t(2 * power[pos % 5]);
                            continue;
                        }
                        CodeSite sites[2];
                        const int count = code_sites(l, l.tiers[0], lane, pos, sites);
                        for (int i = 0; i < count; ++i)
                            page.bytes()[sites[i].byte] |= uint8_t(((1 << sites[i].width) - 1) << sites[i].shift);
                    }
                    for (int32_t i = 0; i < l.outliers; ++i)
                        std::memset(page.bytes() + l.outlier_offset + uint32_t(t * l.outliers + i) * 4, 0xFF, 4);
                    for (int32_t g = 0; in_token(l) && g < l.groups; ++g) {
                        if (l.has_scales()) poison(l.scale_offset, g, t);
                        if (l.has_offsets()) poison(l.zero_offset, g, t);
                    }
                }
                for (int32_t g = filled / l.group; !in_token(l) && g < l.groups; ++g) {
                    for (int32_t column = 0; column < dim; ++column) {
                        poison(l.scale_offset, g, column);
                        if (l.has_offsets()) poison(l.zero_offset, g, column);
                    }
                }
                for (const Table* table : tables()) {
                    table->restore(l, page.bytes(), 0, filled, got.data(), dim);
                    ASSERT_EQ(got, want) << table->isa << " " << c.name << " rows " << filled;
                }
            }
        }
    }
}

// fp32 rows as no 16-bit cache holds them: sums overflow, scales underflow; what comes out is finite.
TEST(CodecRules, FiniteInFiniteOut) {
    Random random(12);
    for (ParamType params : kParams) {
        for (int32_t dim : {20, 64}) {
            std::vector<float> rows(size_t(kPageTokens) * size_t(dim));
            for (float& x : rows) {
                do
                    x = std::bit_cast<float>(uint32_t(random.bits())); // all exponents, subnormals too
                while (!std::isfinite(x));
            }
            for (int32_t i = 0; i < 40 * dim; ++i) // some tokens of tiny numbers alone
                rows[size_t(i)] = std::ldexp(rows[size_t(i)] > 0 ? 1.0f : -1.0f, -149 + random.below(30));
            for (const RuleCase& c : rule_cases(dim, {32}, params)) {
                const Page want = encoded(kernels::reference(), c, rows);
                const std::vector<float> values = restored(kernels::reference(), want);
                for (float x : values)
                    ASSERT_TRUE(std::isfinite(x)) << c.name;
                for (const Table* table : kernels::available()) {
                    ASSERT_EQ(encoded(*table, c, rows).copy(), want.copy()) << table->isa << " " << c.name;
                    const std::vector<float> back = restored(*table, want);
                    ASSERT_EQ(std::memcmp(back.data(), values.data(), back.size() * sizeof(float)), 0)
                        << table->isa << " " << c.name;
                }
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
