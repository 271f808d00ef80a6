// Layout of pages in planes (docs/format.md, "Pages in planes").
#include "store/planes.h"

namespace kvmosaic {
namespace {

uint32_t round_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }

// Vectors of a lane block that planes need: 32 bytes each, 8 channels of four bits, 16 of two or 32 of one.
uint32_t plane_padding(PlaneRole role, uint32_t live) { return round_up(live, 32u / uint32_t(width_of(role))); }

void add_plane(PageLayout* page, PlaneRole role, int32_t first, int32_t live, int32_t block_first, int32_t block_count,
               uint32_t* at) {
    PlaneLayout& plane = page->planes[page->plane_count++];
    plane.role = role;
    plane.first = uint16_t(first);
    plane.live = uint16_t(live);
    plane.padded = uint16_t(plane_padding(role, uint32_t(live)));
    plane.block_first = uint16_t(block_first);
    plane.block_count = uint16_t(block_count);
    plane.offset = *at;
    plane.stride = plane.padded * uint32_t(width_of(role));
    *at += plane.stride * plane.block_count;
}

constexpr PlaneRole kRoles[] = {PlaneRole::low4, PlaneRole::high4, PlaneRole::two, PlaneRole::one};

// Keys: a plane is the run of the tiers that have it, over all lane blocks.
uint32_t place_key_planes(PageLayout* page, const Ladder& ladder) {
    uint32_t at = 0;
    for (const PlaneRole role : kRoles) {
        int32_t first = -1, live = 0, position = 0;
        for (int i = 0; i < ladder.count; ++i) {
            const Tier& tier = ladder.tiers[size_t(i)];
            if (tier.bits > 0 && plane_shift(role, tier.bits) >= 0) {
                if (first < 0) first = position;
                live += tier.channels;
            }
            position += tier.channels;
        }
        if (live > 0) add_plane(page, role, first, live, 0, page->lane_blocks, &at);
    }
    return at;
}

// Values: channels are lanes, so a plane may cover the wide lane blocks, the others, or all.
uint32_t place_value_planes(PageLayout* page, int bits) {
    const int32_t wide = page->wide / kLaneBlock, all = page->lane_blocks, depth = page->depth;
    uint32_t at = 0;
    for (const PlaneRole role : kRoles) {
        const int high = wide > 0 ? plane_shift(role, bits + 1) : -1, low = wide < all ? plane_shift(role, bits) : -1;
        if (high >= 0 && high == low) {
            add_plane(page, role, 0, depth, 0, all, &at);
            continue;
        }
        if (high >= 0) add_plane(page, role, 0, depth, 0, wide, &at);
        if (low >= 0) add_plane(page, role, 0, depth, wide, all - wide, &at);
    }
    return at;
}

} // namespace

PageLayout planes_layout(const StoreSpec& spec, Side side, const Ladder& ladder, PageLayout page) {
    const bool key = side == Side::key;
    page.wide = key ? 0 : spec.wide;
    page.shrinks = key ? spec.shrinks : 0;
    page.group = page.lanes;
    page.groups = 1;
    const auto add = [&](uint8_t bits, uint16_t channels, uint16_t first) {
        TierLayout& tier = page.tiers[page.tier_count++];
        tier.bits = bits;
        tier.live = tier.padded = channels;
        tier.first = tier.param_first = first;
    };
    uint16_t first = 0;
    for (int i = 0; key && i < ladder.count; ++i) {
        const Tier& tier = ladder.tiers[size_t(i)];
        if (tier.bits == 0)
            page.zero_bits = tier.channels;
        else
            add(tier.bits, tier.channels, first);
        first = uint16_t(first + tier.channels);
    }
    if (!key) add(spec.bits, page.depth, 0);
    page.coded = page.columns = page.depth;
    page.scale_offset = key ? place_key_planes(&page, ladder) : place_value_planes(&page, spec.bits);
    page.raw_offset = page.scale_offset;
    page.zero_offset = page.scale_offset + page.columns;
    page.unit_offset = round_up(page.zero_offset + page.dim, 2);
    page.outlier_offset = page.map_offset = page.unit_offset + (key ? 2 : 4);
    page.bytes = round_up(page.map_offset + page.map_bytes, kPageAlign);
    return page;
}

int plane_shift(PlaneRole role, int bits) {
    switch (role) {
    case PlaneRole::low4:
        return bits >= 4 ? 0 : -1;
    case PlaneRole::high4:
        return bits == 8 ? 4 : -1;
    case PlaneRole::two:
        return bits == 6 ? 4 : bits == 2 || bits == 3 ? 0 : -1;
    case PlaneRole::one:
        return bits == 5 ? 4 : bits == 3 ? 2 : bits == 1 ? 0 : -1;
    }
    return -1;
}

} // namespace kvmosaic
