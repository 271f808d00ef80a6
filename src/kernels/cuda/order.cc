#include "kernels/cuda/order.h"

#include <algorithm>

namespace kvmosaic::cuda {
namespace {

uint32_t round_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

// Arrays that kernels read sixteen bytes at a time start at multiples of 16.
constexpr uint32_t kArrayAlign = 16;

void add_tier(DevicePage* page, uint8_t bits, uint16_t live, uint16_t first, uint32_t* codes, uint16_t* column) {
    DeviceTier& tier = page->tiers[page->tier_count++];
    tier.bits = bits;
    tier.live = live;
    tier.padded = uint16_t(round_up(live, uint32_t(device_granule(bits))));
    tier.first = first;
    tier.column = *column;
    tier.offset = *codes;
    tier.bytes = uint32_t(tier.padded) * page->quads * kQuadLanes * bits / 8;
    *codes += tier.bytes;
    *column = uint16_t(*column + tier.padded);
}

} // namespace

bool same_order(const PageLayout& page) { return page.kind == StoreKind::raw; }

int32_t device_granule(int bits) {
    switch (bits) {
    case 1:
    case 3:
        return 4 * kStepDepth; // a byte of a word holds two steps of one bit, a half four
    case 2:
    case 6:
        return 2 * kStepDepth;
    default:
        return kStepDepth;
    }
}

DevicePage device_page(const PageLayout& from) {
    DevicePage page;
    page.kind = from.kind;
    page.side = from.side;
    page.raw = from.raw;
    page.params = from.params;
    page.rule = from.rule;
    page.levels = from.levels;
    page.clip = from.clip;
    page.dim = from.dim;
    page.tokens = from.tokens;
    page.lanes = from.lanes;
    page.depth = from.depth;
    if (same_order(from)) {
        page.bytes = from.bytes;
        return page;
    }
    if (in_planes(from.rule)) {
        page.planes = true;
        page.wide = from.wide;
        page.tiers[0].bits = from.side == Side::value ? from.tiers[0].bits : uint8_t(0);
        page.quads = uint16_t((from.lanes + kQuadLanes - 1) / kQuadLanes);
        page.scale_offset = from.scale_offset;
        page.zero_offset = from.zero_offset;
        page.ladder_offset = from.bytes;
        page.bytes = from.bytes + (from.side == Side::key ? kUnit : 0);
        return page;
    }
    page.along_depth = from.along_depth;
    page.scales = from.has_scales();
    page.offsets = from.has_offsets();
    page.group = from.edges ? uint16_t(0) : from.group;
    page.groups = from.groups;
    page.quads = uint16_t((from.lanes + kQuadLanes - 1) / kQuadLanes);
    page.raw_live = from.raw_depth;
    page.raw_padded = uint16_t(round_up(from.raw_depth, 8));
    page.zero_bits = from.zero_bits;
    page.outliers = from.outliers;
    uint32_t at = 0;
    uint16_t column = 0;
    for (int i = 0; i < from.tier_count; ++i) {
        const TierLayout& tier = from.tiers[size_t(i)];
        add_tier(&page, tier.bits, tier.live, tier.first, &at, &column);
    }
    page.zero_column = column;
    const uint32_t coded = uint32_t(column) + page.zero_bits;
    page.columns = uint16_t(page.along_depth ? page.quads * kQuadLanes : round_up(coded, 8));
    page.raw_offset = at;
    at += uint32_t(page.raw_padded) * page.quads * kQuadLanes * 2;
    const uint32_t params = round_up(uint32_t(page.groups) * page.columns * bytes_of(page.params), kArrayAlign);
    page.scale_offset = at;
    at += page.scales ? params : 0;
    page.zero_offset = at;
    at += page.offsets ? params : 0;
    page.outlier_offset = at;
    at += uint32_t(page.outliers) * kPageTokens * 4;
    page.map_offset = at = round_up(at, kArrayAlign);
    if (from.map_bytes > 0) {
        page.map_entries = uint16_t(page.raw_padded + coded);
        page.map_element = uint8_t(from.map_bytes / from.dim);
        at += uint32_t(page.map_entries) * page.map_element;
    }
    page.bytes = round_up(at, kUnit);
    return page;
}

// As in store.cc: the most that n channels can cost, a tier gains at the first channel of each granule.
uint32_t worst_device_page_bytes(const StoreSpec& spec, Side side, int32_t dim, const std::vector<uint8_t>& widths) {
    if (spec.kind != StoreKind::tiered) return device_page(layout(spec, side, dim)).bytes;
    if (in_planes(spec.rule)) return worst_page_bytes(spec, side, dim, widths) + kUnit;
    std::vector<uint8_t> used = widths.empty() ? std::vector<uint8_t>{16, 8, 6, 4, 3, 2, 1, 0} : widths;
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    Ladder ladder;
    ladder.push(8, uint16_t(dim));
    const DevicePage page = device_page(layout(spec, side, dim, ladder));
    const uint32_t lanes = uint32_t(page.quads) * kQuadLanes, element = page.map_element;
    const uint32_t column = 2 * page.groups * bytes_of(page.params) + element;
    std::vector<uint32_t> best(size_t(dim) + 1, 0); // [channels spent] most bytes
    for (const uint8_t bits : used) {
        const int32_t step = bits == 16 ? 8 : bits == 0 ? 1 : device_granule(bits);
        const uint32_t one = bits == 16 ? lanes * 2 + element : bits == 0 ? column : lanes * bits / 8 + column;
        for (int32_t spent = dim; spent >= 1; --spent)
            for (int32_t n = 1, chunks = 1; n <= spent; n += step, ++chunks)
                best[size_t(spent)] =
                    std::max(best[size_t(spent)], best[size_t(spent - n)] + uint32_t(chunks * step) * one);
    }
    const uint32_t most = *std::max_element(best.begin(), best.end());
    // Columns are rounded up to 8, three arrays and the page are aligned.
    return round_up(most + 8 * column + 3 * kArrayAlign, kUnit);
}

} // namespace kvmosaic::cuda
