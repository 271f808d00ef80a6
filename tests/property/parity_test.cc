// Every table that this machine can run against the reference, page by page: equal bytes out of encode, equal bits out
// of restore, and nothing touched or read that is not theirs. codec_test.cc has the properties of the format itself.
#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::Counters;
using kernels::Table;
using namespace testing;

const std::vector<int32_t> kDims = {1, 40, 64, 72, 80, 96, 100, 112, 128, 192, 256};

const std::vector<ParamType> kParams = {ParamType::f16, ParamType::bf16, ParamType::f8e4m3};

class Parity : public ::testing::TestWithParam<int32_t> {};

TEST_P(Parity, BytesAndValuesAreTheReferences) {
    const int32_t dim = GetParam();
    for (kvmosaic::ParamType params : kParams) {
        for (const Case& c : codec_cases({dim}, {8, 32, 64, 128}, params)) {
            const std::vector<float> rows = hostile_rows(dim, uint64_t(dim) + 1);
            const Page want = encoded(kernels::reference(), c.page, c.channels, rows);
            const std::vector<float> values = restored(kernels::reference(), want);
            for (float x : values)
                ASSERT_TRUE(std::isfinite(x)) << c.name;
            for (const Table* table : kernels::available()) {
                const Page page = encoded(*table, c.page, c.channels, rows);
                ASSERT_TRUE(page.guards_intact()) << table->isa << " " << c.name;
                ASSERT_EQ(page.copy(), want.copy()) << table->isa << " " << c.name << " " << name_of(params);
                const std::vector<float> back = restored(*table, want);
                ASSERT_EQ(std::memcmp(back.data(), values.data(), back.size() * sizeof(float)), 0)
                    << table->isa << " " << c.name << " " << name_of(params);
            }
        }
    }
}
INSTANTIATE_TEST_SUITE_P(Dims, Parity, ::testing::ValuesIn(kDims));

// fp32 rows as no 16-bit cache holds them: the largest and smallest numbers of fp32, where sums overflow and scales
// underflow.
TEST(ParityEdges, NumbersAtTheEndsOfFp32) {
    const float large = 3.0e38f, small = 1e-40f;
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (const Case& c : codec_cases({40, 100}, {8, 32}, params)) {
            std::vector<float> rows = normal_rows(c.page.dim, 5);
            Random random(6);
            for (size_t i = 0; i < rows.size(); ++i) {
                const size_t channel = i % c.page.dim, token = i / c.page.dim;
                const size_t kind = c.page.side == Side::key ? channel % 6 : token % 6;
                if (kind == 0) rows[i] = random.below(2) ? large : -large;
                if (kind == 1) rows[i] = random.below(2) ? large : 1.0f;
                if (kind == 2) rows[i] = small * float(random.below(100));
                if (kind == 3) rows[i] = large;
                if (kind == 4) rows[i] = 1e-37f * random.normal();
            }
            const Page want = encoded(kernels::reference(), c.page, c.channels, rows);
            const std::vector<float> values = restored(kernels::reference(), want);
            for (const Table* table : kernels::available()) {
                ASSERT_EQ(encoded(*table, c.page, c.channels, rows).copy(), want.copy())
                    << table->isa << " " << c.name << " " << name_of(params);
                ASSERT_EQ(restored(*table, want), values) << table->isa << " " << c.name;
            }
        }
    }
}

// Rows come in pieces: keys in whole groups, values one by one and in runs of any length.
TEST(ParityEdges, PiecesGiveTheBytesOfTheWhole) {
    for (const Case& c : codec_cases({64, 100}, {8, 32, 48, 128})) {
        const std::vector<float> rows = hostile_rows(c.page.dim, 3);
        const std::vector<uint8_t> want = encoded(kernels::reference(), c.page, c.channels, rows).copy();
        for (const Table* table : kernels::available()) {
            for (int32_t pieces : {1, 3, 7, 33}) {
                Page page(c.page);
                const int32_t step = c.page.side == Side::key ? c.page.group * ((pieces + 3) / 4) : pieces;
                for (int32_t t = 0; t < kPageTokens; t += step)
                    table->encode(c.page, map_or_null(c.page, c.channels), rows.data() + t * c.page.dim, t,
                                  std::min(step, kPageTokens - t), page.bytes());
                ASSERT_EQ(page.copy(), want) << table->isa << " " << c.name << " by " << step;
            }
        }
    }
}

// Part of a page: only the rows asked for are written, whatever the stride, and only bytes of the page are read.
TEST(ParityEdges, AnyRangeOfRowsRestores) {
    for (const Case& c : codec_cases({1, 40, 100, 128}, {32, 128})) {
        const int32_t dim = c.page.dim, stride = dim + 3;
        const Page page = encoded(kernels::reference(), c.page, c.channels, hostile_rows(dim, 4));
        const std::vector<float> values = restored(kernels::reference(), page);
        const std::vector<uint8_t> exact = page.copy(); // no room behind the page: a sanitizer sees reads past it
        Random random(9);
        for (const Table* table : kernels::available()) {
            for (int round = 0; round < 12; ++round) {
                const int32_t first = random.below(kPageTokens), n = 1 + random.below(kPageTokens - first);
                std::vector<float> out(size_t(n + 2) * size_t(stride), 123.0f);
                table->restore(c.page, exact.data(), first, n, out.data() + stride, stride);
                for (int32_t t = -1; t <= n; ++t) {
                    for (int32_t d = 0; d < stride; ++d) {
                        const bool inside = t >= 0 && t < n && d < dim;
                        const float expect = inside ? values[size_t((first + t) * dim + d)] : 123.0f;
                        ASSERT_EQ(out[size_t((t + 1) * stride + d)], expect)
                            << table->isa << " " << c.name << " rows " << first << "+" << n << " at " << t << "," << d;
                    }
                }
            }
        }
    }
}

// Bug case C5 at the kernels: what lies in rows not yet written must not reach a row that is.
TEST(BugCaseC5, UnwrittenRowsOfAnOpenPageDoNotMatter) {
    for (int bits : {1, 2, 3, 4, 6, 8}) {
        for (int32_t dim : {64, 100}) {
            const PageLayout page = layout(grid_spec(Side::value, bits, 32), Side::value, dim);
            const std::vector<float> rows = normal_rows(dim, 8);
            for (int32_t filled : {1, 13, 31, 33, 127}) {
                for (const Table* table : tables()) {
                    Page clean(page);
                    table->encode(page, nullptr, rows.data(), 0, filled, clean.bytes());
                    std::vector<float> want(size_t(filled * dim)), got(want);
                    table->restore(page, clean.bytes(), 0, filled, want.data(), dim);
                    // Poison what the unwritten tokens own: codes and parameters.
                    for (int32_t t = filled; t < kPageTokens; ++t) {
                        for (int32_t lane = 0; lane < dim; ++lane) {
                            CodeSite sites[2];
                            const int count = code_sites(page, page.tiers[0], lane, t, sites);
                            for (int i = 0; i < count; ++i)
                                clean.bytes()[sites[i].byte] |= uint8_t(((1 << sites[i].width) - 1) << sites[i].shift);
                        }
                        for (int32_t g = 0; g < page.groups; ++g) {
                            const uint32_t at = uint32_t(g * page.coded + t) * 2;
                            std::memset(clean.bytes() + page.scale_offset + at, 0xFF, 2);
                            std::memset(clean.bytes() + page.zero_offset + at, 0xFF, 2);
                        }
                    }
                    table->restore(page, clean.bytes(), 0, filled, got.data(), dim);
                    ASSERT_EQ(got, want) << table->isa << " bits " << bits << " D " << dim << " rows " << filled;
                }
            }
        }
    }
}

TEST(ParityRaw, StoreLoadAndSumsEqualTheReference) {
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> edges = {0.0f,      -0.0f, 1.0f,     65504.0f, -65504.0f, 65519.9f,  65520.0f,
                                      -65520.0f, 1e10f, -1e10f,   3.4e38f,  -3.4e38f,  inf,       -inf,
                                      nan,       -nan,  0x1p-24f, 0x1p-25f, 1e-40f,    -1e-40f,   3.39e38f,
                                      0x1p-14f,  0.1f,  2049.0f,  2051.0f,  0x1p-149f, 3.3961e38f};
    for (RawType type : {RawType::f32, RawType::f16, RawType::bf16}) {
        for (int32_t dim : kDims) {
            Random random{uint64_t(dim)};
            std::vector<float> x(static_cast<size_t>(dim));
            for (int round = 0; round < 40; ++round) {
                for (float& v : x)
                    v = random.below(3) == 0 ? edges[size_t(random.below(int32_t(edges.size())))]
                                             : random.normal() * std::ldexp(1.0f, random.below(60) - 30);
                const size_t bytes = size_t(dim) * bytes_of(type);
                std::vector<uint8_t> want(bytes), got(bytes + 8, 0x5A);
                Counters want_count, count;
                kernels::reference().store_raw(type, x.data(), dim, want.data(), &want_count);
                std::vector<float> want_sum(size_t(dim), 0.5f);
                kernels::reference().add_abs(type, x.data(), dim, want_sum.data());
                std::vector<float> want_back(size_t(dim) * 2);
                want.insert(want.end(), want.begin(), want.begin() + long(bytes)); // two equal rows
                kernels::reference().load_raw(type, want.data(), 2, dim, want_back.data(), dim);
                for (const Table* table : kernels::available()) {
                    count = {};
                    table->store_raw(type, x.data(), dim, got.data(), &count);
                    ASSERT_EQ(std::memcmp(got.data(), want.data(), bytes), 0) << table->isa << " " << name_of(type);
                    ASSERT_EQ(got[bytes], 0x5A);
                    ASSERT_EQ(count.non_finite, want_count.non_finite) << table->isa;
                    ASSERT_EQ(count.saturated, want_count.saturated) << table->isa << " " << name_of(type);
                    std::vector<float> sum(size_t(dim), 0.5f), back(size_t(dim) * 2);
                    table->add_abs(type, x.data(), dim, sum.data());
                    ASSERT_EQ(sum, want_sum) << table->isa << " " << name_of(type);
                    table->load_raw(type, want.data(), 2, dim, back.data(), dim);
                    ASSERT_EQ(back, want_back) << table->isa << " " << name_of(type);
                }
            }
        }
    }
}

// Halves have only 65536 values: all of them.
TEST(ParityRaw, EveryHalfLoads) {
    std::vector<uint8_t> rows(65536 * 2);
    for (uint32_t h = 0; h < 65536; ++h) {
        rows[2 * h] = uint8_t(h & 0xFF);
        rows[2 * h + 1] = uint8_t(h >> 8);
    }
    std::vector<float> out(65536);
    for (const Table* table : kernels::available()) {
        table->load_raw(RawType::f16, rows.data(), 256, 256, out.data(), 256);
        for (uint32_t h = 0; h < 65536; ++h) {
            const float want = f16_to_f32(uint16_t(h));
            if (std::isnan(want))
                ASSERT_TRUE(std::isnan(out[h])) << table->isa << " " << h;
            else
                ASSERT_EQ(std::bit_cast<uint32_t>(out[h]), std::bit_cast<uint32_t>(want)) << table->isa << " " << h;
        }
    }
}

} // namespace
} // namespace kvmosaic
