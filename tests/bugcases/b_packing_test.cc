// Bug cases of packing and memory layout whose subject is the codec, named by their id.
#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

// Head sizes that no block divides: the tail is a shorter group, padding takes no part.
TEST(BugCase, B1_OddHeadSizes) {
    for (int32_t dim : {40, 72, 80, 96, 100, 112, 120, 192}) {
        for (int group : {32, 64, 128}) {
            for (int bits : {2, 3, 4}) {
                for (Side side : {Side::key, Side::value}) {
                    const StoreSpec spec = grid_spec(side, bits, group);
                    ASSERT_TRUE(validate(spec, side, dim));
                    const PageLayout l = layout(spec, side, dim);
                    EXPECT_EQ(l.groups, side == Side::key ? 128 / group : (dim + group - 1) / group);
                    const std::vector<float> rows = normal_rows(dim, uint64_t(dim));
                    for (const Table* table : tables()) {
                        const Page page = encoded(*table, l, {}, rows);
                        EXPECT_TRUE(page.guards_intact());
                        EXPECT_LE(worst_error(page, {}, rows, restored(*table, page)), 1.0)
                            << table->isa << " " << name_of(side) << " D " << dim << " group " << group;
                    }
                }
            }
        }
    }
}

// All values in [5, 6]: a dead lane that counted as 0 would make the range six times as wide.
TEST(BugCase, B2_DeadLanesStayOutOfTheRange) {
    for (int32_t dim : {96, 80, 100, 20, 128}) {
        for (float low : {5.0f, -6.0f}) {
            Random random(71);
            std::vector<float> rows(size_t(kPageTokens) * size_t(dim));
            for (float& x : rows)
                x = random.uniform(low, low + 1.0f);
            std::vector<PageLayout> pages;
            for (int bits : {1, 2, 3, 4, 6, 8}) {
                pages.push_back(layout(grid_spec(Side::value, bits, 64), Side::value, dim));
                pages.push_back(layout(grid_spec(Side::key, bits, 48), Side::key, dim)); // last group: 32 tokens
            }
            pages.push_back(layout(tiered_spec(32), Side::key, dim, ladder_of({{3, 5}, {2, 3}, {1, dim - 8}})));
            const std::vector<uint16_t> channels = shuffled_channels(dim);
            for (const PageLayout& l : pages) {
                for (const Table* table : tables()) {
                    const std::vector<uint16_t> map = l.kind == StoreKind::tiered ? channels : std::vector<uint16_t>();
                    const Page page = encoded(*table, l, map, rows);
                    EXPECT_LE(worst_error(page, map, rows, restored(*table, page)), 1.0) << table->isa;
                    for (int32_t depth = 0; depth < l.depth; ++depth) {
                        const Place place = l.side == Side::key ? place_of(l, depth) : Place{l.tiers[0].bits, depth};
                        const float top = float((1 << place.bits) - 1);
                        for (int32_t g = 0; g < l.groups; ++g) {
                            ASSERT_LE(scale_at(page, g, place.column) * top, 1.002f) << table->isa << " D " << dim;
                            ASSERT_GE(zero_at(page, g, place.column), low - 0.003f);
                        }
                    }
                    for (int t = 0; t < l.tier_count; ++t) { // padding of a tier holds nothing
                        const TierLayout& tier = l.tiers[size_t(t)];
                        for (int32_t pos = tier.live; pos < tier.padded; ++pos) {
                            for (int32_t g = 0; g < l.groups; ++g) {
                                ASSERT_EQ(scale_at(page, g, tier.param_first + pos), 0.0f) << table->isa;
                                ASSERT_EQ(zero_at(page, g, tier.param_first + pos), 0.0f) << table->isa;
                            }
                        }
                    }
                }
            }
        }
    }
}

// B3, one byte layout for each width, is tests/golden/pages_test.cc: the bytes of every width, and an independent
// reader of docs/format.md over them. This is its 3-bit case by hand: dense planes, not ten values a word.
TEST(BugCase, B3_ThreeBitsAreTwoPlanes) {
    const PageLayout l = layout(grid_spec(Side::key, 3, 32), Side::key, 32);
    EXPECT_EQ(l.lane_block_bytes, 96u); // 8 tokens x 32 channels x 3 bits
    std::vector<float> rows(size_t(kPageTokens) * 32, 0.0f);
    for (int32_t t = 0; t < kPageTokens; ++t)
        rows[size_t(t * 32 + 21)] = float(t % 8); // codes 0 .. 7 down one channel
    for (const Table* table : tables()) {
        const Page page = encoded(*table, l, {}, rows);
        for (int32_t t = 0; t < 8; ++t) {
            // Channel 21: second 2-bit vector (channels 16 .. 31), quad 1 (bits 2..3), byte 1; 1-bit vector: quad 5.
            EXPECT_EQ(page.bytes()[32 + 4 * t + 1], (t & 3) << 2) << table->isa;
            EXPECT_EQ(page.bytes()[64 + 4 * t + 1], (t >> 2) << 5) << table->isa;
        }
    }
}

// Every code in every position, for every width: a ramp through all 2^b levels, shifted by one in each position.
TEST(BugCase, B4_EveryCodeInEveryPosition) {
    for (int bits : {1, 2, 3, 4, 6, 8}) {
        const int levels = 1 << bits;
        for (Side side : {Side::key, Side::value}) {
            const int32_t dim = 32; // every position of a vector of every plane
            const PageLayout l = layout(grid_spec(side, bits, 128), side, dim);
            for (const Table* table : tables()) {
                std::vector<std::vector<bool>> seen(size_t(l.lanes) * l.depth,
                                                    std::vector<bool>(size_t(levels), false));
                for (int round = 0; round < 2 * levels; ++round) {
                    const int shift = round / 2;
                    std::vector<float> rows(size_t(kPageTokens) * dim);
                    for (int32_t t = 0; t < kPageTokens; ++t) {
                        for (int32_t c = 0; c < dim; ++c)
                            rows[size_t(t * dim + c)] = float((t + 3 * c + shift) % levels);
                    }
                    // The lanes cannot hold all 256 levels: two of them take the ends, so that the grid is 0 .. 255;
                    // the other round takes two other lanes.
                    for (int32_t d = 0; d < l.depth; ++d) {
                        const int32_t low = 2 * (round % 2), high = low + 1;
                        rows[size_t(side == Side::key ? low * dim + d : d * dim + low)] = 0.0f;
                        rows[size_t(side == Side::key ? high * dim + d : d * dim + high)] = float(levels - 1);
                    }
                    const std::vector<float> back = restored(*table, encoded(*table, l, {}, rows));
                    ASSERT_EQ(back, rows) << table->isa << " " << name_of(side) << " bits " << bits;
                    for (size_t i = 0; i < rows.size(); ++i)
                        seen[i][size_t(back[i])] = true;
                }
                for (const std::vector<bool>& codes : seen)
                    ASSERT_EQ(std::count(codes.begin(), codes.end(), true), levels);
            }
        }
    }
}

// Key and value pages side by side in one buffer sized by the layouts, a guard behind each.
TEST(BugCase, B7_BuffersAreAsLargeAsTheLayoutSays) {
    constexpr size_t kGuard = 32;
    for (int32_t dim : {64, 128, 100}) {
        for (int bits : {1, 2, 3, 4, 6, 8}) {
            const PageLayout k = layout(grid_spec(Side::key, bits, 32), Side::key, dim);
            const PageLayout v = layout(grid_spec(Side::value, bits, 32), Side::value, dim);
            const std::vector<float> rows = normal_rows(dim, 81);
            for (const Table* table : tables()) {
                std::vector<uint8_t> buffer(k.bytes + v.bytes + 2 * kGuard, 0xC3);
                uint8_t* value_page = buffer.data() + k.bytes + kGuard;
                std::memset(buffer.data(), 0, k.bytes);
                std::memset(value_page, 0, v.bytes);
                table->encode(v, nullptr, rows.data(), 0, kPageTokens, value_page);
                table->encode(k, nullptr, rows.data(), 0, kPageTokens, buffer.data());
                for (size_t i = 0; i < kGuard; ++i) {
                    ASSERT_EQ(buffer[k.bytes + i], 0xC3) << table->isa << " D " << dim << " bits " << bits;
                    ASSERT_EQ(value_page[v.bytes + i], 0xC3) << table->isa << " D " << dim << " bits " << bits;
                }
                // Decoding writes its rows and not one float more.
                std::vector<float> out(rows.size() + 16, -5.0f);
                for (const auto& [page, bytes] : {std::pair{&k, buffer.data()}, std::pair{&v, value_page}}) {
                    table->restore(*page, bytes, 0, kPageTokens, out.data(), dim);
                    for (size_t i = rows.size(); i < out.size(); ++i)
                        ASSERT_EQ(out[i], -5.0f) << table->isa;
                }
            }
        }
    }
}

// Keys and values of different head sizes: each side by its own sizes.
TEST(BugCase, B8_KeyAndValueSizesDiffer) {
    for (auto [dk, dv] : {std::pair{192, 128}, std::pair{128, 64}, std::pair{64, 128}}) {
        const std::vector<float> k = normal_rows(dk, 91), v = normal_rows(dv, 92);
        Random random(93);
        std::vector<float> q(static_cast<size_t>(dk));
        for (float& x : q)
            x = random.normal();
        const PageLayout kl = layout(grid_spec(Side::key, 4, 32), Side::key, dk);
        const PageLayout vl = layout(grid_spec(Side::value, 4, 32), Side::value, dv);
        for (const Table* table : tables()) {
            const Page kp = encoded(*table, kl, {}, k), vp = encoded(*table, vl, {}, v);
            const std::vector<float> kb = restored(*table, kp), vb = restored(*table, vp);
            EXPECT_LE(worst_error(kp, {}, k, kb), 1.0) << table->isa;
            EXPECT_LE(worst_error(vp, {}, v, vb), 1.0) << table->isa;
            std::vector<float> s(kPageTokens), o(static_cast<size_t>(dv), 0.0f);
            kernels::RowState state{-std::numeric_limits<float>::infinity(), 0.0f};
            const int32_t lo = 0, hi = kPageTokens;
            table->scores(q.data(), 1, kb.data(), dk, kPageTokens, dk, 0.1f, s.data(), kPageTokens);
            table->softmax(s.data(), kPageTokens, &state, o.data(), dv);
            table->mix(s.data(), kPageTokens, &lo, &hi, 1, vb.data(), dv, dv, o.data(), dv);
            std::vector<double> p(kPageTokens);
            double sum = 0.0;
            for (int32_t t = 0; t < kPageTokens; ++t) {
                for (int32_t d = 0; d < dk; ++d)
                    p[size_t(t)] += 0.1 * double(q[size_t(d)]) * double(kb[size_t(t * dk + d)]);
                sum += p[size_t(t)] = std::exp(p[size_t(t)]);
            }
            for (int32_t d = 0; d < dv; ++d) {
                double want = 0.0;
                for (int32_t t = 0; t < kPageTokens; ++t)
                    want += p[size_t(t)] / sum * double(vb[size_t(t * dv + d)]);
                ASSERT_NEAR(double(o[size_t(d)] / state.l), want, 1e-5) << table->isa << " " << dk << "/" << dv;
            }
        }
    }
    // 576 is beyond what a page can hold: refused with the range, not cut.
    const Status status = validate(grid_spec(Side::key, 4, 32), Side::key, 576);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_EQ(status.message(), "head size = 576: must be from 1 to 512");
}

// Two heads, 5 tokens then 3, against one append of 8: identical bytes for each head.
TEST(BugCase, B10_SecondAppendKeepsTheLayout) {
    const int32_t dim = 64;
    for (int bits : {1, 2, 3, 4, 6, 8}) {
        const PageLayout l = layout(grid_spec(Side::value, bits, 32), Side::value, dim);
        for (const Table* table : tables()) {
            for (uint64_t head : {1, 2}) {
                const std::vector<float> rows = normal_rows(dim, 100 + head);
                Page once(l), twice(l);
                table->encode(l, nullptr, rows.data(), 0, 8, once.bytes());
                table->encode(l, nullptr, rows.data(), 0, 5, twice.bytes());
                table->encode(l, nullptr, rows.data() + 5 * dim, 5, 3, twice.bytes());
                EXPECT_EQ(once.copy(), twice.copy()) << table->isa << " bits " << bits << " head " << head;
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
