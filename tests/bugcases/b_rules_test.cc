// Bug cases of packing on the pages of every rule.
#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

// Head sizes and widths that make odd payloads. By design every array of two-byte elements starts at an even byte of
// its page and pages are multiples of 32 bytes; and access is by bytes, so that a page at an odd address works as well.
TEST(BugCase, B5_UnalignedMetadata) {
    for (int32_t dim : {8, 24, 40, 56, 1, 7}) {
        const std::vector<float> rows = hostile_rows(dim, 5);
        for (ParamType params : {ParamType::f16, ParamType::f8e4m3}) {
            for (const RuleCase& c : rule_cases(dim, {8, 24, 40}, params)) {
                const PageLayout& l = c.page;
                const uint32_t size = bytes_of(params);
                EXPECT_EQ(l.scale_offset % size, 0u) << c.name;
                EXPECT_EQ(l.zero_offset % size, 0u) << c.name;
                EXPECT_EQ(l.outlier_offset % 2, 0u) << c.name;
                EXPECT_EQ(l.raw_offset % 2, 0u) << c.name;
                EXPECT_EQ(l.bytes % kPageAlign, 0u) << c.name;
                const std::vector<uint8_t> want = encoded(kernels::reference(), c, rows).copy();
                for (const Table* table : tables()) {
                    std::vector<uint8_t> buffer(l.bytes + 64, 0);
                    for (size_t shift : {1, 3}) {
                        std::fill(buffer.begin(), buffer.end(), uint8_t(0));
                        table->encode(l, map_of(c), rows.data(), 0, kPageTokens, buffer.data() + shift);
                        ASSERT_EQ(std::memcmp(buffer.data() + shift, want.data(), want.size()), 0)
                            << table->isa << " " << c.name << " at " << shift;
                        std::vector<float> back(rows.size()), again(rows.size());
                        table->restore(l, buffer.data() + shift, 0, kPageTokens, back.data(), dim);
                        table->restore(l, want.data(), 0, kPageTokens, again.data(), dim);
                        ASSERT_EQ(std::memcmp(back.data(), again.data(), back.size() * sizeof(float)), 0)
                            << table->isa << " " << c.name << " at " << shift;
                    }
                }
            }
        }
    }
}

// The order of bits is one, and the version's: every width has its low code in the low bits of the byte that the format
// says, on every table. (A dump that declares another order is refused: tests/golden/pages_test.cc.)
TEST(BugCase, B12_OneOrderOfBits) {
    for (int bits : {1, 2, 3, 4, 6, 8}) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            StoreSpec spec = grid_spec(Side::key, bits, 128);
            spec.axis = axis;
            const int32_t dim = 128;
            const PageLayout l = layout(spec, Side::key, dim);
            std::vector<float> rows(size_t(kPageTokens) * dim, 0.0f);
            const float top = float((1 << bits) - 1);
            // Token 0: channel 0 has code 1, the lowest bit of byte 0; channel 127 and token 127 open the range.
            rows[0] = 1.0f;
            rows[127] = top;
            for (int32_t c = 0; c < dim; ++c)
                rows[size_t(127 * dim + c)] = top;
            for (int32_t t = 0; t < kPageTokens; ++t)
                rows[size_t(t * dim + 127)] = top;
            rows[size_t(126 * dim + 127)] = 0.0f;
            for (const Table* table : tables()) {
                const Page page = encoded(*table, l, {}, rows);
                EXPECT_EQ(page.bytes()[0], 1) << table->isa << " bits " << bits;
                for (int i = 1; i < 32; ++i) // no other lane or depth of the first vector
                    EXPECT_EQ(page.bytes()[i], 0) << table->isa << " bits " << bits << " byte " << i;
            }
        }
    }
    // Three levels: the first digit is the lowest.
    StoreSpec spec = grid_spec(Side::key, 2, 128);
    spec.axis = Axis::channels;
    spec.levels = 3;
    const PageLayout l = layout(spec, Side::key, 64);
    std::vector<float> rows(size_t(kPageTokens) * 64, 0.0f);
    rows[0] = 1.0f, rows[1] = 2.0f, rows[4] = 1.0f; // codes 1, 2, 0, 0, 1
    for (const Table* table : tables())
        EXPECT_EQ(encoded(*table, l, {}, rows).bytes()[0], 1 + 3 * 2 + 81) << table->isa;
}

} // namespace
} // namespace kvmosaic
