#include "kvmosaic/store.h"

#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using testing::grid_spec;
using testing::ladder_of;
using testing::tiered_spec;

const std::vector<int> kWidths = {1, 2, 3, 4, 6, 8};

// The published formulas of the 2-bit pages, against the general walk.
TEST(Store, TwoBitPagesFollowTheClosedForm) {
    for (int32_t dim : {64, 80, 96, 128, 192, 256}) {
        const PageLayout key = layout(grid_spec(Side::key, 2, 128), Side::key, dim);
        const PageLayout value = layout(grid_spec(Side::value, 2, 32), Side::value, dim);
        for (int32_t t = 0; t < kPageTokens; ++t) {
            for (int32_t c = 0; c < dim; ++c) {
                CodeSite site[2];
                ASSERT_EQ(code_sites(key, key.tiers[0], t, c, site), 1);
                ASSERT_EQ(site[0].byte, uint32_t((t >> 3) * 2 * dim + (c >> 4) * 32 + 4 * (t & 7) + (c & 3)));
                ASSERT_EQ(site[0].shift, 2 * ((c >> 2) & 3));
                ASSERT_EQ(code_sites(value, value.tiers[0], c, t, site), 1);
                ASSERT_EQ(site[0].byte, uint32_t((c >> 3) * 256 + (t >> 4) * 32 + 4 * (c & 7) + (t & 3)));
                ASSERT_EQ(site[0].shift, 2 * ((t >> 2) & 3));
            }
        }
        EXPECT_EQ(key.bytes, uint32_t(36 * dim));
        EXPECT_EQ(key.scale_offset, uint32_t(32 * dim));
        EXPECT_EQ(key.zero_offset, uint32_t(34 * dim));
    }
    EXPECT_EQ(layout(grid_spec(Side::key, 2, 128), Side::key, 128).true_bits(), 2.25);
    EXPECT_EQ(layout(grid_spec(Side::key, 2, 32), Side::key, 128).true_bits(), 3.0);
    EXPECT_EQ(layout(grid_spec(Side::value, 2, 32), Side::value, 128).true_bits(), 3.0);
    EXPECT_EQ(layout(grid_spec(Side::value, 4, 128), Side::value, 128).true_bits(), 4.25);
}

// No two codes share a bit, no bit of the code area is left over, and nothing lies outside it.
TEST(Store, CodesCoverTheirAreaExactlyOnce) {
    for (const testing::Case& c : testing::codec_cases({8, 40, 64, 80, 96, 100, 128}, {32})) {
        std::vector<int> used(size_t(c.page.raw_offset) * 8, 0);
        for (int t = 0; t < c.page.tier_count; ++t) {
            const TierLayout& tier = c.page.tiers[size_t(t)];
            for (int32_t lane = 0; lane < c.page.lane_blocks * kLaneBlock; ++lane) {
                for (int32_t pos = 0; pos < tier.padded; ++pos) {
                    CodeSite sites[2];
                    const int n = code_sites(c.page, tier, lane, pos, sites);
                    int bits = 0;
                    for (int i = 0; i < n; ++i) {
                        ASSERT_EQ(sites[i].weight, bits) << c.name;
                        bits += sites[i].width;
                        for (int b = 0; b < sites[i].width; ++b) {
                            const size_t bit = size_t(sites[i].byte) * 8 + sites[i].shift + size_t(b);
                            ASSERT_LT(bit, used.size()) << c.name;
                            ASSERT_EQ(used[bit]++, 0) << c.name;
                        }
                    }
                    ASSERT_EQ(bits, tier.bits) << c.name;
                }
            }
        }
        EXPECT_EQ(std::count(used.begin(), used.end(), 1), std::ptrdiff_t(used.size())) << c.name;
    }
}

TEST(Store, ArraysFollowEachOtherWithoutOverlap) {
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (const testing::Case& c : testing::codec_cases({1, 7, 64, 100, 128, 257, 512}, {8, 32, 128}, params)) {
            const PageLayout& p = c.page;
            const uint32_t array = uint32_t(p.groups) * p.coded * bytes_of(params);
            EXPECT_EQ(p.raw_offset, uint32_t(p.lane_blocks) * p.lane_block_bytes) << c.name;
            EXPECT_EQ(p.scale_offset, p.raw_offset + 2u * p.raw_depth * p.lanes) << c.name;
            EXPECT_EQ(p.zero_offset, p.scale_offset + array) << c.name;
            EXPECT_GE(p.map_offset, p.zero_offset + array) << c.name;
            EXPECT_LE(p.map_offset + p.map_bytes, p.bytes) << c.name;
            EXPECT_LT(p.bytes - p.map_offset - p.map_bytes, kPageAlign) << c.name;
            EXPECT_EQ(p.bytes % kPageAlign, 0u) << c.name;
            EXPECT_EQ(p.scale_offset % bytes_of(params), 0u) << c.name;
            EXPECT_EQ(p.zero_offset % bytes_of(params), 0u) << c.name;
            if (p.kind == StoreKind::tiered) {
                EXPECT_EQ(p.map_bytes, p.dim * (p.dim > 256 ? 2u : 1u)) << c.name;
                EXPECT_EQ(p.map_offset % (p.dim > 256 ? 2u : 1u), 0u) << c.name;
            }
            uint32_t live = p.raw_depth + uint32_t(p.zero_bits), coded = p.zero_bits;
            for (int t = 0; t < p.tier_count; ++t) {
                const TierLayout& tier = p.tiers[size_t(t)];
                EXPECT_EQ(tier.padded % granule(tier.bits), 0) << c.name;
                EXPECT_LT(tier.padded - tier.live, granule(tier.bits)) << c.name;
                live += tier.live;
                coded += tier.padded;
            }
            EXPECT_EQ(live, p.depth) << c.name;
            EXPECT_EQ(coded, p.coded) << c.name;
        }
    }
}

TEST(Store, MixedLadderByHand) {
    // 8 raw, 32 of 4 bits, 88 of 2 bits (padded to 96), group 128: the worked example of docs/format.md.
    const PageLayout p = layout(tiered_spec(128), Side::key, 128, ladder_of({{16, 8}, {4, 32}, {2, 88}}));
    EXPECT_EQ(p.tier_count, 2);
    EXPECT_EQ(p.tiers[0].bits, 4);
    EXPECT_EQ(p.tiers[0].first, 8);
    EXPECT_EQ(p.tiers[0].offset, 0u);
    EXPECT_EQ(p.tiers[1].bits, 2);
    EXPECT_EQ(p.tiers[1].padded, 96);
    EXPECT_EQ(p.tiers[1].first, 40);
    EXPECT_EQ(p.tiers[1].param_first, 32);
    EXPECT_EQ(p.tiers[1].offset, 128u);
    EXPECT_EQ(p.lane_block_bytes, 320u);
    EXPECT_EQ(p.raw_offset, 5120u);
    EXPECT_EQ(p.scale_offset, 7168u);
    EXPECT_EQ(p.zero_offset, 7424u);
    EXPECT_EQ(p.map_offset, 7680u);
    EXPECT_EQ(p.bytes, 7808u);
}

TEST(Store, RawLayout) {
    const PageLayout p = raw_layout(RawType::f16, Side::key, 80, 5);
    EXPECT_EQ(p.bytes, 800u);
    EXPECT_EQ(raw_layout(RawType::f32, Side::value, 3, 1).bytes, 32u);
    EXPECT_EQ(raw_layout(RawType::bf16, Side::value, 64).bytes, 128u * 64 * 2);
    EXPECT_EQ(raw_layout(RawType::bf16, Side::value, 64).true_bits(), 16.0);
    EXPECT_EQ(raw_layout(RawType::f16, Side::key, 128, 4096).tokens, 4096);
}

// Largest page over every ladder of `widths`, by trying them all.
uint32_t worst_by_trying(const StoreSpec& spec, int32_t dim, const std::vector<uint8_t>& widths, size_t at,
                         const Ladder& so_far, int32_t left) {
    if (at + 1 == widths.size()) {
        Ladder ladder = so_far;
        ladder.push(widths[at], uint16_t(left));
        return layout(spec, Side::key, dim, ladder).bytes;
    }
    uint32_t worst = 0;
    for (int32_t n = 0; n <= left; ++n) {
        Ladder ladder = so_far;
        ladder.push(widths[at], uint16_t(n));
        worst = std::max(worst, worst_by_trying(spec, dim, widths, at + 1, ladder, left - n));
    }
    return worst;
}

TEST(Store, WorstPageIsTheLargestOfAllLadders) {
    const std::vector<std::vector<uint8_t>> sets = {{16, 4, 2}, {4, 2},        {3, 1}, {16, 2}, {8, 6, 3}, {8, 0},
                                                    {2, 0},     {16, 3, 1, 0}, {2},    {16},    {0}};
    for (const std::vector<uint8_t>& widths : sets) {
        for (int group : {8, 32, 128}) {
            for (ParamType params : {ParamType::f16, ParamType::f8e4m3}) {
                for (int32_t dim : {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 34, 40, 48, 64, 80}) {
                    if (widths.size() > 3 && dim > 40) continue;
                    const StoreSpec spec = tiered_spec(group, params);
                    EXPECT_EQ(worst_page_bytes(spec, Side::key, dim, widths),
                              worst_by_trying(spec, dim, widths, 0, Ladder(), dim))
                        << "D " << dim << " group " << group << " widths " << widths.size();
                }
            }
        }
    }
    const std::vector<uint8_t> all = {16, 8, 6, 4, 3, 2, 1, 0};
    for (int32_t dim : {1, 4, 9, 12})
        EXPECT_EQ(worst_page_bytes(tiered_spec(32), Side::key, dim, all),
                  worst_by_trying(tiered_spec(32), dim, all, 0, Ladder(), dim));
}

TEST(Store, WorstPageOfLargeHeadsIsNeverExceeded) {
    testing::Random random(11);
    const std::vector<uint8_t> all = {16, 8, 6, 4, 3, 2, 1, 0};
    for (int round = 0; round < 3000; ++round) {
        const int32_t dim = 1 + random.below(kMaxHeadDim);
        const StoreSpec spec = tiered_spec(8 * (1 + random.below(16)), ParamType(random.below(3)));
        Ladder ladder;
        int32_t left = dim;
        for (uint8_t width : all) {
            const int32_t n = width == 0 ? left : random.below(3) == 0 ? random.below(left + 1) : 0;
            ladder.push(width, uint16_t(n));
            left -= n;
        }
        ASSERT_TRUE(validate(ladder, dim));
        ASSERT_LE(layout(spec, Side::key, dim, ladder).bytes, worst_page_bytes(spec, Side::key, dim, all));
    }
    // Without a ladder the size is the page's own.
    EXPECT_EQ(worst_page_bytes(grid_spec(Side::value, 3, 32), Side::value, 100, {}),
              layout(grid_spec(Side::value, 3, 32), Side::value, 100).bytes);
}

std::string message_of(const Status& status) { return status.ok() ? "" : status.message(); }

TEST(Store, ValidateNamesTheFieldAndItsRange) {
    const StoreSpec good = grid_spec(Side::key, 2, 32);
    EXPECT_TRUE(validate(good, Side::key, 64));
    EXPECT_TRUE(validate(grid_spec(Side::value, 3, 512), Side::value, 64)); // one group
    EXPECT_TRUE(validate(StoreSpec(), Side::value, 1));
    EXPECT_EQ(message_of(validate(good, Side::key, 0)), "head size = 0: must be from 1 to 512");
    EXPECT_EQ(message_of(validate(good, Side::key, 513)), "head size = 513: must be from 1 to 512");
    EXPECT_EQ(message_of(validate(grid_spec(Side::key, 5, 32), Side::key, 64)), "bits = 5: must be 1, 2, 3, 4, 6 or 8");
    EXPECT_EQ(message_of(validate(grid_spec(Side::key, 2, 136), Side::key, 64)),
              "group = 136: must be a multiple of 8 from 8 to 128");
    EXPECT_EQ(message_of(validate(grid_spec(Side::key, 2, 0), Side::key, 64)),
              "group = 0: must be a multiple of 8 from 8 to 128");
    EXPECT_EQ(message_of(validate(grid_spec(Side::value, 2, 20), Side::value, 64)),
              "group = 20: must be a multiple of 8 from 8 to 512");
    EXPECT_TRUE(validate(good, Side::value, 64)); // groups along tokens, on either side
    EXPECT_TRUE(validate(grid_spec(Side::value, 2, 32), Side::key, 64));
    StoreSpec value_ladder = grid_spec(Side::value, 0, 32);
    value_ladder.kind = StoreKind::tiered;
    EXPECT_EQ(validate(value_ladder, Side::value, 64).code(), StatusCode::unsupported);
}

TEST(Store, ValidateRules) {
    const auto refused = [](StoreSpec spec, const char* what, Side side = Side::key) {
        const Status status = validate(spec, side, 64);
        EXPECT_EQ(status.code(), StatusCode::invalid_argument) << what;
        EXPECT_NE(message_of(status).find(what), std::string::npos) << message_of(status);
    };
    const float book[4] = {-1.5f, -0.5f, 0.5f, 1.5f}, falling[4] = {0.0f, 1.0f, 0.5f, 2.0f};
    StoreSpec grid = grid_spec(Side::value, 2, 32), coded = grid;
    coded.kind = StoreKind::codebook;
    coded.rule = GridRule::codebook_range;
    coded.book = book;
    for (GridRule rule : {GridRule::midpoint, GridRule::integer, GridRule::symmetric, GridRule::extreme,
                          GridRule::hybrid_1bit, GridRule::hybrid_4level}) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            for (Side side : {Side::key, Side::value}) {
                StoreSpec spec = grid;
                spec.rule = rule, spec.axis = axis;
                EXPECT_TRUE(validate(spec, side, 64)) << int(rule);
            }
        }
    }
    EXPECT_TRUE(validate(coded, Side::key, 64));
    EXPECT_TRUE(validate(coded, Side::value, 64));
    for (auto change : std::vector<std::pair<const char*, void (*)(StoreSpec*)>>{
             {"rule", [](StoreSpec* s) { s->rule = GridRule::asym; }},
             {"book", [](StoreSpec* s) { s->book = nullptr; }},
             {"bits = 6 of a codebook", [](StoreSpec* s) { s->bits = 6; }},
             {"outliers", [](StoreSpec* s) { s->rule = GridRule::codebook_norm, s->outliers = 1; }},
             {"axis", [](StoreSpec* s) { s->axis = Axis::tokens; }},
             {"clip", [](StoreSpec* s) { s->clip = 0.9f; }},
         }) {
        StoreSpec spec = coded;
        change.second(&spec);
        refused(spec, change.first);
    }
    coded.book = falling;
    refused(coded, "book: its levels must ascend");
    for (auto change : std::vector<std::pair<const char*, void (*)(StoreSpec*)>>{
             {"rule", [](StoreSpec* s) { s->rule = GridRule::codebook_norm; }},
             {"outliers", [](StoreSpec* s) { s->outliers = 1; }},
             {"bits = 1", [](StoreSpec* s) { s->rule = GridRule::symmetric, s->bits = 1; }},
             {"bits = 1", [](StoreSpec* s) { s->rule = GridRule::hybrid_4level, s->bits = 1; }},
             {"bits = 3", [](StoreSpec* s) { s->rule = GridRule::hybrid_1bit, s->bits = 3; }},
             {"f8e4m3", [](StoreSpec* s) { s->rule = GridRule::hybrid_1bit, s->params = ParamType::f8e4m3; }},
             {"levels = 5", [](StoreSpec* s) { s->levels = 5; }},
             {"levels = 3", [](StoreSpec* s) { s->levels = 3, s->bits = 3; }},
             {"levels = 3", [](StoreSpec* s) { s->levels = 3, s->rule = GridRule::extreme; }},
             {"clip", [](StoreSpec* s) { s->clip = 0.0f; }},
             {"clip", [](StoreSpec* s) { s->clip = 1.01f; }},
             {"clip", [](StoreSpec* s) { s->clip = NAN; }},
         }) {
        StoreSpec spec = grid;
        change.second(&spec);
        refused(spec, change.first);
    }
    StoreSpec tiered = tiered_spec(32);
    tiered.rule = GridRule::symmetric;
    refused(tiered, "rule: a tiered store");
    tiered = tiered_spec(32);
    tiered.axis = Axis::channels;
    refused(tiered, "axis = channels");
}

TEST(Store, ValidateEdges) {
    StoreSpec spec = grid_spec(Side::value, 2, 32);
    const uint16_t good[4] = {0, 5, 40, 64}, gap[4] = {1, 5, 40, 64}, flat[4] = {0, 5, 5, 64}, over[4] = {0, 5, 40, 65};
    spec.edge_groups = 3;
    EXPECT_FALSE(validate(spec, Side::value, 64)); // no edges
    spec.edges = good;
    EXPECT_TRUE(validate(spec, Side::value, 64));
    EXPECT_TRUE(validate(spec, Side::key, 64));
    EXPECT_FALSE(validate(spec, Side::key, 80));
    for (const uint16_t* edges : {gap, flat, over}) {
        spec.edges = edges;
        EXPECT_FALSE(validate(spec, Side::key, 64));
    }
    spec.edges = good;
    const PageLayout page = layout(spec, Side::value, 64);
    EXPECT_EQ(page.groups, 3);
    EXPECT_EQ(page.group_at(0), 0);
    EXPECT_EQ(page.group_at(4), 0);
    EXPECT_EQ(page.group_at(5), 1);
    EXPECT_EQ(page.group_at(63), 2);
    spec.axis = Axis::tokens;
    EXPECT_EQ(message_of(validate(spec, Side::key, 64)), "edges: only for groups along channels");
}

// What a page of the other rules takes, by hand: D = 64, 128 tokens.
TEST(Store, SizesOfTheOtherKinds) {
    StoreSpec spec = grid_spec(Side::value, 4, 32);
    spec.rule = GridRule::extreme; // key, groups of 32 channels, scales only: 8192 bytes of codes, 2 x 128 scales
    EXPECT_EQ(layout(spec, Side::key, 64).bytes, 4096u + 512u);
    EXPECT_EQ(layout(spec, Side::key, 64).true_bits(), 4.5); // as llama.cpp's q4_0
    spec.bits = 8;
    spec.rule = GridRule::symmetric;
    EXPECT_EQ(layout(spec, Side::key, 64).true_bits(), 8.5); // q8_0
    EXPECT_EQ(layout(spec, Side::value, 64).true_bits(), 8.5);
    spec = grid_spec(Side::key, 2, 32);
    const PageLayout along = layout(spec, Side::value, 64); // values, groups of 32 tokens
    EXPECT_TRUE(along.along_depth);
    EXPECT_EQ(along.columns, 64);
    EXPECT_EQ(along.groups, 4);
    EXPECT_EQ(along.zero_offset, 2048u + 512u);
    EXPECT_EQ(along.bytes, 2048u + 2 * 512u);
    spec.levels = 3;
    const PageLayout three = layout(spec, Side::key, 64); // 13 bytes a token for 64 digits
    EXPECT_EQ(three.tiers[0].padded, 65);
    EXPECT_EQ(three.tiers[0].bytes, 8u * 13u);
    EXPECT_EQ(three.scale_offset, 16u * 8u * 13u);
    EXPECT_EQ(three.columns, 65);
    const float book[4] = {-1, -0.5, 0.5, 1};
    StoreSpec coded = grid_spec(Side::value, 2, 64);
    coded.kind = StoreKind::codebook;
    coded.book = book;
    coded.rule = GridRule::codebook_fixed;
    coded.outliers = 2;
    const PageLayout fixed = layout(coded, Side::key, 64);
    EXPECT_EQ(fixed.scale_offset, fixed.outlier_offset); // no scales, no offsets
    EXPECT_EQ(fixed.bytes, 2048u + 128u * 2u * 4u);
    coded.rule = GridRule::codebook_norm;
    coded.outliers = 0;
    EXPECT_EQ(layout(coded, Side::key, 64).bytes, 2048u + 256u);
    StoreSpec bare = tiered_spec(128);
    bare.page_map = false;
    const Ladder ladder = ladder_of({{4, 16}, {2, 48}});
    EXPECT_EQ(layout(bare, Side::key, 64, ladder).bytes + 64, layout(tiered_spec(128), Side::key, 64, ladder).bytes);
    EXPECT_EQ(layout(bare, Side::key, 64, ladder).map_bytes, 0u);
}

TEST(Store, ValidateLadder) {
    EXPECT_TRUE(validate(ladder_of({{16, 4}, {4, 20}, {2, 40}}), 64));
    EXPECT_TRUE(validate(Ladder::uniform(0, 64), 64));
    EXPECT_FALSE(validate(Ladder(), 64));
    EXPECT_EQ(message_of(validate(ladder_of({{4, 20}, {2, 40}}), 64)),
              "ladder: its channels add up to 60, must be the head size 64");
    EXPECT_FALSE(validate(ladder_of({{2, 40}, {4, 24}}), 64));
    EXPECT_FALSE(validate(ladder_of({{4, 40}, {4, 24}}), 64));
    EXPECT_FALSE(validate(ladder_of({{5, 64}}), 64));
    Ladder empty_tier = ladder_of({{4, 64}, {2, 1}});
    empty_tier.tiers[1].channels = 0;
    EXPECT_FALSE(validate(empty_tier, 64));
    EXPECT_EQ(ladder_of({{16, 0}, {2, 64}}), Ladder::uniform(2, 64)); // push leaves empty tiers out
}

TEST(Store, GranulesAndWidths) {
    for (int bits = -1; bits <= 17; ++bits)
        EXPECT_EQ(is_width(bits), std::find(kWidths.begin(), kWidths.end(), bits) != kWidths.end()) << bits;
    const std::vector<int32_t> granules = {32, 16, 32, 8, 16, 8};
    for (size_t i = 0; i < kWidths.size(); ++i)
        EXPECT_EQ(granule(kWidths[i]), granules[i]);
}

} // namespace
} // namespace kvmosaic
