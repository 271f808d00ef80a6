// The byte order of pages on a GPU. Codes and metadata are those of the CPU page (include/kvmosaic/store.h), only their
// places differ: code words lie as the registers of the tensor cores' A operand (mma.m16n8k16), so that one AND with a
// mask makes an operand of a word. docs/format.md draws it; kernels, transcoder and byte counts read the DevicePage.
//
// Terms. A page is the matrix [lane][depth] of store.h. A *tile* is 16 lanes, a *quad* 4 tiles, a *step* 16 depth. A
// *set* is 512 bytes, word [32 threads][4 registers]: one quad times one or more steps.
#pragma once

#include <array>
#include <cstdint>

#include "kvmosaic/store.h"

#ifdef __CUDACC__
#define KVMOSAIC_HD __host__ __device__
#else
#define KVMOSAIC_HD
#endif

namespace kvmosaic::cuda {

inline constexpr int32_t kTileLanes = 16, kQuadLanes = 64, kStepDepth = 16;
inline constexpr uint32_t kSetBytes = 512;
inline constexpr uint32_t kUnit = 32; // pages start at multiples of this; page references count in it

struct DeviceTier {
    uint8_t bits = 0;
    uint16_t live = 0, padded = 0; // channels (depth) with data; rounded up to device_granule(bits)
    uint16_t first = 0;            // ladder position of its first channel, as in TierLayout
    uint16_t column = 0;           // its first column of scales
    uint32_t offset = 0, bytes = 0;
};

// Plain data, passed to kernels by value.
struct DevicePage {
    StoreKind kind = StoreKind::raw;
    Side side = Side::key;
    RawType raw = RawType::f16;
    ParamType params = ParamType::f16;
    GridRule rule = GridRule::asym;
    uint8_t levels = 0;
    float clip = 1.0f;
    bool along_depth = false, scales = false, offsets = false;
    uint16_t dim = 0, tokens = 0, lanes = 0, depth = 0;
    uint16_t quads = 0;             // ceil(lanes / 64)
    uint16_t group = 0, groups = 0; // as in PageLayout; unequal groups have group = 0
    uint16_t columns = 0;           // stride of a group in scales and offsets
    uint16_t raw_live = 0;          // 16-bit channels, and rounded up to 8
    uint16_t raw_padded = 0;
    uint16_t zero_bits = 0, zero_column = 0;
    uint16_t outliers = 0;
    uint16_t map_entries = 0; // [raw_padded + coded columns + zero_bits]; 0: no map in the page
    uint8_t map_element = 0;  // bytes
    uint8_t tier_count = 0;
    std::array<DeviceTier, kMaxTiers> tiers{};
    uint16_t wide = 0;          // planes of values: channels with a bit more
    bool planes = false;        // see plane_site; everything behind the codes lies as in the CPU's page
    uint32_t ladder_offset = 0; // planes of keys: u16 channels of 8, 4, 6, 2, 3, 1, 0 bits, padded to 32 bytes
    uint32_t raw_offset = 0, scale_offset = 0, zero_offset = 0, outlier_offset = 0, map_offset = 0;
    uint32_t bytes = 0; // a multiple of kUnit

    double true_bits() const { return 8.0 * bytes / (double(tokens) * dim); }
};

int32_t device_granule(int bits);        // depth: 64, 32, 64, 16, 32, 16 for 1, 2, 3, 4, 6, 8 bits
bool same_order(const PageLayout& page); // raw pages: their bytes are the same in both orders
DevicePage device_page(const PageLayout& page);

// Largest device page over all ladders drawn from `widths`, as worst_page_bytes of store.h.
uint32_t worst_device_page_bytes(const StoreSpec& spec, Side side, int32_t dim, const std::vector<uint8_t>& widths);

// ---- places; all usable in kernels ----

// Order of 16 neighbours over the 16 rows (or 16 k indices) of a tile: thread t of a group of four gets the four
// neighbours 4t .. 4t + 3, two in each half.
KVMOSAIC_HD constexpr int32_t place_of_row(int32_t row) { return 4 * ((row & 7) >> 1) + 2 * (row >> 3) + (row & 1); }
KVMOSAIC_HD constexpr int32_t row_of_place(int32_t x) { return 2 * (x >> 2) + (x & 1) + 8 * ((x >> 1) & 1); }

struct LaneSite {
    int32_t tile, row; // in the quad
};
KVMOSAIC_HD constexpr LaneSite lane_site(Side side, int32_t lane) {
    const int32_t l = lane & 63;
    if (side == Side::key) return {l >> 4, row_of_place(l & 15)};
    // Value channels: eight threads own four neighbours each of 32 channels, which are a pair of tiles.
    return {2 * (l >> 5) + ((l >> 1) & 1), ((l >> 2) & 7) + 8 * (l & 1)};
}

struct Site {
    uint32_t word = 0;            // byte offset in the page, a multiple of 4
    uint8_t shift = 0, width = 0; // bits of the plane
    uint8_t weight = 0;           // of the plane's lowest bit in the code
};

// Widths of a searched page's tiers in the order of its ladder.
inline constexpr uint8_t kPlaneWidths[7] = {8, 4, 6, 2, 3, 1, 0};

// Offset of the word and shift of its half for a plane of sets that hold `steps` steps each.
KVMOSAIC_HD constexpr Site word_site(uint32_t base, int32_t quads, LaneSite at, int32_t quad, int32_t pos,
                                     int32_t steps) {
    const int32_t k = row_of_place(pos & 15), set = (pos >> 4) / steps * quads + quad;
    const int32_t thread = (at.row & 7) * 4 + ((k & 7) >> 1), reg = (at.row >> 3) + 2 * (k >> 3);
    Site site;
    site.word = base + uint32_t(set) * kSetBytes + uint32_t(thread * 16 + reg * 4);
    site.shift = uint8_t(16 * (k & 1));
    return site;
}

// The planes of the code of (lane, depth position in the tier); returns how many.
KVMOSAIC_HD constexpr int device_sites(Side side, int32_t quads, const DeviceTier& tier, int32_t lane, int32_t pos,
                                       Site out[3]) {
    const LaneSite at = lane_site(side, lane);
    const int32_t quad = lane >> 6, step = pos >> 4;
    const uint32_t plane2 = uint32_t(tier.padded) * uint32_t(quads) * 16; // bytes of a 2-bit plane
    const auto two = [&](uint32_t base, int weight) {
        Site s = word_site(base, quads, at, quad, pos, 2);
        s.shift = uint8_t(s.shift + 8 * (step & 1) + 2 * at.tile), s.width = 2, s.weight = uint8_t(weight);
        return s;
    };
    const auto one = [&](uint32_t base, int weight) {
        Site s = word_site(base, quads, at, quad, pos, 4);
        s.shift = uint8_t(s.shift + 8 * ((step >> 1) & 1) + 2 * at.tile + (step & 1)), s.width = 1;
        s.weight = uint8_t(weight);
        return s;
    };
    const auto four = [&](uint32_t base, int weight) {
        Site s = word_site(base, quads, at, quad, pos, 1);
        s.shift = uint8_t(s.shift + 4 * at.tile), s.width = 4, s.weight = uint8_t(weight);
        return s;
    };
    switch (tier.bits) {
    case 1:
        out[0] = one(tier.offset, 0);
        return 1;
    case 2:
        out[0] = two(tier.offset, 0);
        return 1;
    case 3:
        out[0] = two(tier.offset, 0), out[1] = one(tier.offset + plane2, 2);
        return 2;
    case 4:
        out[0] = four(tier.offset, 0);
        return 1;
    case 6:
        out[0] = two(tier.offset, 0), out[1] = two(tier.offset + plane2, 2), out[2] = two(tier.offset + 2 * plane2, 4);
        return 3;
    case 8:
        out[0] = four(tier.offset, 0), out[1] = four(tier.offset + 2 * plane2, 4);
        return 2;
    default:
        return 0;
    }
}

// Place of (lane, position) in a plane of `width` bits: padded depth `depth`, `quads` quads of lanes. Whole sets first,
// as in tiers of one plane: 1, 2 or 4 steps each for 4, 2 and 1 bits. A key plane may end in half a set, which then
// holds both quads (keys have two): of 4 bits 8 channels, quad q in the registers 2q and 2q + 1 as operands of 8
// channels; of 2 and 1 bits one or two steps, quad q in byte q of each half.
KVMOSAIC_HD constexpr Site plane_site(Side side, uint32_t base, int32_t width, int32_t depth, int32_t quads,
                                      int32_t lane, int32_t pos) {
    const LaneSite at = lane_site(side, lane);
    const int32_t quad = lane >> 6, span = 64 / width, whole = depth / span * span; // depth of a set: 16, 32, 64
    Site site;
    if (pos < whole) {
        site = word_site(base, quads, at, quad, pos, span / kStepDepth);
        const int32_t step = pos >> 4;
        site.shift = uint8_t(site.shift + (width == 4   ? 4 * at.tile
                                           : width == 2 ? 8 * (step & 1) + 2 * at.tile
                                                        : 8 * ((step >> 1) & 1) + 2 * at.tile + (step & 1)));
    } else {
        const int32_t rest = pos - whole, set = whole / span * quads;
        if (width == 4) {
            site.word = base + uint32_t(set) * kSetBytes +
                        uint32_t(((at.row & 7) * 4 + (rest >> 1)) * 16 + (2 * quad + (at.row >> 3)) * 4);
            site.shift = uint8_t(16 * (rest & 1) + 4 * at.tile);
        } else {
            site = word_site(base + uint32_t(set) * kSetBytes, 1, at, 0, rest & 15, 1);
            site.shift = uint8_t(site.shift + 8 * quad + 2 * at.tile + (width == 1 ? rest >> 4 : 0));
        }
    }
    site.width = uint8_t(width);
    return site;
}

// Byte offset of a 16-bit channel's element: units of 8 channels, as the A operand of mma.m16n8k8, two tiles a set.
KVMOSAIC_HD constexpr uint32_t raw_site(Side side, uint32_t base, int32_t quads, int32_t lane, int32_t pos) {
    const LaneSite at = lane_site(side, lane);
    const int32_t set = (pos >> 3) * 2 * quads + (lane >> 6) * 2 + (at.tile >> 1), k = pos & 7;
    const int32_t thread = (at.row & 7) * 4 + (k >> 1), reg = 2 * (at.tile & 1) + (at.row >> 3);
    return base + uint32_t(set) * kSetBytes + uint32_t(thread * 16 + reg * 4 + 2 * (k & 1));
}

// Order of the columns of a pair of steps, so that sixteen bytes are a thread's operand for both: its first two columns
// of the even step, of the odd one, then the other two of each. Tiers of 4 and 8 bits, which may end at an odd step,
// keep their order.
KVMOSAIC_HD constexpr int32_t param_place(int bits, int32_t pos) {
    if (bits == 0 || bits == 4 || bits == 8) return pos;
    const int32_t x = pos & 31;
    return (pos & ~31) + 8 * ((x >> 2) & 3) + 4 * ((x >> 1) & 1) + 2 * (x >> 4) + (x & 1);
}

// Index of a scale or offset in its array. Groups along the lanes: of depth position `at` of the tier. Groups along the
// depth: one for each lane `at`, in the order in which threads meet them: [quad][row & 7][tile][row >> 3].
KVMOSAIC_HD constexpr uint32_t param_index(const DevicePage& page, int bits, uint32_t column, int32_t group,
                                           int32_t at) {
    if (!page.along_depth) return uint32_t(group) * page.columns + column + uint32_t(param_place(bits, at));
    const LaneSite site = lane_site(page.side, at);
    return uint32_t(group) * page.columns +
           uint32_t((at >> 6) * 64 + (site.row & 7) * 8 + site.tile * 2 + (site.row >> 3));
}

KVMOSAIC_HD inline int device_code(const DevicePage& page, const DeviceTier& tier, int32_t lane, int32_t pos,
                                   const uint8_t* bytes) {
    Site site[3];
    const int n = device_sites(page.side, page.quads, tier, lane, pos, site);
    int code = 0;
    for (int i = 0; i < n; ++i) {
        const uint8_t* at = bytes + site[i].word + site[i].shift / 8; // no field crosses a byte
        code |= ((*at >> (site[i].shift % 8)) & ((1 << site[i].width) - 1)) << site[i].weight;
    }
    return code;
}

} // namespace kvmosaic::cuda
