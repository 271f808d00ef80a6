// Where each bit of a page lies. Plain data and arithmetic; kernels, the footprint, `inspect` and docs/format.md
// all read the PageLayout made here, so that no byte count is typed in by hand anywhere.
//
// A page holds kPageTokens tokens of one KV head and side as a matrix [lane][depth]:
//   key side:   lane = token, depth = channel      (the score sums over channels)
//   value side: lane = channel, depth = token      (the mix sums over tokens)
// Codes: lane blocks of 8 lanes, one after the other; in a lane block the tiers of the ladder, widest first; in a
// tier chunks of granule(bits) depth; in a chunk bit planes of 4, 2 or 1 bits, low bits first. One 32-byte vector
// of a plane: byte 4*i + j belongs to lane i of the block, depth 4*quad + j; quads lie in bit fields of the byte.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kvmosaic/numeric.h"
#include "kvmosaic/shape.h"
#include "kvmosaic/status.h"

namespace kvmosaic {

inline constexpr int32_t kPageTokens = 128;
inline constexpr int32_t kLaneBlock = 8;
inline constexpr int32_t kMaxTiers = 8;
inline constexpr int32_t kMaxHeadDim = 512;

enum class StoreKind : uint8_t {
    raw,      // elements as they came, rounded to RawType; [token][channel]
    grid,     // one width for all channels, levels evenly spaced
    tiered,   // a ladder of widths over channels (key side)
    codebook, // one width for all channels, levels from a table; may keep outliers of each token apart
};
enum class Axis : uint8_t { tokens, channels }; // along which the values that share a scale lie

// How a group's values become scale, offset and codes. Decoding is value = z + s * level(code) under every rule, with
// level(code) = code but for codebooks; what is stored of s and z differs. All are spelled out in docs/numerics.md.
enum class GridRule : uint8_t {
    asym,           // s = (max - min) / (2^b - 1), z = min
    midpoint,       // as asym; with 1 bit the two levels lie at 1/4 and 3/4 of the range (PN-Mix, Eq. 7)
    integer,        // z is a whole number of steps, and that number is stored (KVTuner, RotateKV)
    symmetric,      // levels -m .. m of s = max|x| / m, m = 2^(b-1) - 1; no offsets (InnerQ; llama.cpp's q8_0)
    extreme,        // 2^b levels of s = x / -2^(b-1), x the value of largest magnitude; no offsets (llama.cpp's q4_0)
    hybrid_1bit,    // the better of symmetric and two levels {min, max}; the scale's sign bit says which (InnerQ)
    hybrid_4level,  // the better of symmetric and asym with 2^b levels; likewise
    codebook_norm,  // s = |x| / |levels of x|, no offsets: a vector of the codebook with the norm of x (TurboQuant)
    codebook_range, // s, z map the group's range to [-1, 1] (KVQuant values)
    codebook_fixed, // s = 1, z = 0, neither stored: the transform has scaled each channel (KVQuant keys)
    searched,       // half range h and middle c of the best of seven shrunken ranges by the sum of |error|^4; h is an
                    // 8-bit logarithm under the page's largest, c an 8-bit number of h / 16 (mosaic keys)
    fitted,         // levels at odd halves of s, s by least squares, an 8-bit logarithm under the page's largest; each
                    // channel minus its mean over the page, 8 bits (mosaic values)
};

// One step of a ladder: `channels` live channels (depth) stored with `bits` each.
struct Tier {
    uint8_t bits = 0; // 0, 1, 2, 3, 4, 6, 8 or 16 (16: raw f16 channels)
    uint16_t channels = 0;
    bool operator==(const Tier&) const = default;
};

// Tiers of a page, widest first, at most one of each width. Under `searched` in the order 8, 4, 6, 2, 3, 1, 0, in which
// the planes that tiers share are runs.
struct Ladder {
    std::array<Tier, kMaxTiers> tiers{};
    uint8_t count = 0;
    static Ladder uniform(uint8_t bits, uint16_t channels);
    void push(uint8_t bits, uint16_t channels); // a tier without channels is left out
    bool operator==(const Ladder&) const = default;
};

// All that is needed to read a page, nothing about why.
struct StoreSpec {
    StoreKind kind = StoreKind::raw;
    RawType raw = RawType::f16;        // raw store: type of the elements
    uint8_t bits = 0;                  // grid: the width
    Axis axis = Axis::tokens;          // where a group runs; key tokens / value channels (along the lanes)
    uint16_t group = 32;               // values per scale; a multiple of 8; the last group may be shorter
    ParamType params = ParamType::f16; // type of scales and offsets
    GridRule rule = GridRule::asym;
    uint8_t levels = 0;   // 0: 2^bits; 3: three levels in codes 0..2, five codes a byte ("1.5 bit"; bits = 2, grid)
    float clip = 1.0f;    // range of a group is multiplied by this before it is divided into steps; 0 < clip <= 1
    bool page_map = true; // tiered: each page holds its channel map; false: the ladder order is that of the transform
    uint8_t outliers = 0; // codebook: values of each token kept apart in f16, largest |level| first
    uint16_t vectors = 0; // searched: most 32-byte vectors of a lane block that a ladder may need; 0: no limit
    uint16_t wide = 0;    // fitted: the first channels, a multiple of 8, have one bit more
    uint8_t shrinks = 7;  // searched: ranges that are tried, 1 to 7; 1: the whole range
    const float* book = nullptr; // codebook: [2^bits] levels, ascending; owned by the method
    // Groups of channels of unequal size: [edge_groups + 1] first channel of each group, then D; owned by the method.
    const uint16_t* edges = nullptr;
    uint8_t edge_groups = 0; // 0: runs of `group`
    bool operator==(const StoreSpec&) const = default;
};

bool has_offsets(GridRule rule); // whether offsets are stored; no: z follows from s and the width
bool has_scales(GridRule rule);
// Rules whose codes lie in shared planes, with parameters of 8 bits under one f16 number of the page.
constexpr bool in_planes(GridRule rule) { return rule == GridRule::searched || rule == GridRule::fitted; }

bool is_width(int bits);   // 1, 2, 3, 4, 6, 8
int32_t granule(int bits); // depth that a tier of this width is padded to: 32, 16, 32, 8, 16, 8

// One coded tier inside a lane block.
struct TierLayout {
    uint8_t bits = 0;
    uint16_t live = 0;        // channels with data
    uint16_t padded = 0;      // live rounded up to granule(bits); the rest are dead, s = z = 0
    uint16_t first = 0;       // position of its first channel in the ladder order (index into the channel map)
    uint16_t param_first = 0; // column of its first scale in the [groups][coded] arrays
    uint32_t offset = 0;      // of its codes, bytes from the start of a lane block
    uint32_t bytes = 0;       // of its codes in a lane block: padded * bits, or 8 * padded / 5 for three levels
    bool operator==(const TierLayout&) const = default;
};

// Stores in planes: one bit plane of all the tiers that have it. Tiers of 8, 4, 6, 2, 3 and 1 bits have the planes
// {low4, high4}, {low4}, {low4, two}, {two}, {two, one}, {one}; 5 bits, on the value side, {low4, one}. So only a
// plane's end is padded, never a tier's.
enum class PlaneRole : uint8_t { low4, high4, two, one };
inline constexpr int kMaxPlanes = 4;
struct PlaneLayout {
    PlaneRole role = PlaneRole::low4;
    uint16_t first = 0, live = 0, padded = 0;  // depth: its first position in ladder order, with data, with padding
    uint16_t block_first = 0, block_count = 0; // lane blocks that have it
    uint32_t offset = 0;                       // of its first lane block, bytes from the start of the page
    uint32_t stride = 0;                       // bytes of a lane block: padded * width
    bool operator==(const PlaneLayout&) const = default;
};
constexpr int width_of(PlaneRole role) { return role == PlaneRole::two ? 2 : role == PlaneRole::one ? 1 : 4; }
// Bit of a code of `bits` bits at which the plane's lowest bit lies, or -1: such codes have no such plane.
int plane_shift(PlaneRole role, int bits);

struct PageLayout {
    StoreKind kind = StoreKind::raw;
    Side side = Side::key;
    RawType raw = RawType::f16;
    ParamType params = ParamType::f16;
    uint16_t dim = 0;              // D
    uint16_t tokens = kPageTokens; // rows the page can hold (fewer only for the front segment)
    uint16_t lanes = 0, depth = 0; // live extents of the matrix
    uint16_t lane_blocks = 0;      // ceil(lanes / 8)
    GridRule rule = GridRule::asym;
    uint8_t levels = 0; // 0, or 3
    float clip = 1.0f;
    bool along_depth = false;        // groups run along the depth; otherwise along the lanes
    uint16_t group = 0, groups = 0;  // lanes (or depth) per scale, number of groups
    const uint16_t* edges = nullptr; // [groups + 1] or null: groups of unequal size
    const float* book = nullptr;     // [2^bits], codebook stores
    uint8_t tier_count = 0;          // coded tiers
    std::array<TierLayout, kMaxTiers> tiers{};
    uint16_t coded = 0;                     // padded depth that has scales
    uint16_t columns = 0;                   // stride of a group in the parameter arrays: coded, or lanes if along_depth
    uint16_t zero_bits = 0;                 // channels in a 0-bit tier: not in `tiers`, no codes, the last columns
    uint16_t raw_depth = 0;                 // channels in the 16-bit tier: the first raw_depth of the ladder order
    uint32_t lane_block_bytes = 0;          // stride of a lane block
    uint32_t raw_offset = 0;                // [raw_depth][lanes] f16
    uint32_t scale_offset = 0;              // [groups][columns] of params
    uint32_t zero_offset = 0;               // [groups][columns] of params, if the rule stores offsets
    uint16_t outliers = 0;                  // a token
    uint32_t outlier_offset = 0;            // [tokens][outliers] {u16 channel, f16 value}
    uint32_t map_offset = 0, map_bytes = 0; // [D] channel at each ladder position; u8, or u16 from D 257 on
    // Stores in planes. Scales: [columns] u8 logarithms. Offsets: [D] i8, of the middle (searched) or the mean
    // (fitted).
    uint8_t plane_count = 0;
    std::array<PlaneLayout, kMaxPlanes> planes{};
    uint8_t shrinks = 0;      // searched: ranges that an encoder tries
    uint16_t wide = 0;        // fitted: the first channels have a bit more than tiers[0].bits
    uint32_t unit_offset = 0; // f16: what the logarithms are under; fitted: then f16, the unit of the mean
    uint32_t bytes = 0;       // the whole page, a multiple of kPageAlign

    bool operator==(const PageLayout&) const = default;
    bool has_scales() const { return kind != StoreKind::raw && kvmosaic::has_scales(rule); }
    bool has_offsets() const { return kind != StoreKind::raw && kvmosaic::has_offsets(rule); }
    int32_t group_at(int32_t i) const { // of a lane, or of a depth position where groups run along the depth
        if (!edges) return i / group;
        int32_t g = 0;
        while (i >= edges[g + 1])
            ++g;
        return g;
    }
    int32_t group_first(int32_t g) const { return edges ? edges[g] : g * group; }
    double true_bits() const { return 8.0 * bytes / (double(tokens) * dim); } // all of it, padding included
};
inline constexpr uint32_t kPageAlign = 32;

// Layout of a page of `spec` with this ladder (grid stores ignore the ladder).
// Preconditions (checked by `validate`): 1 <= dim <= kMaxHeadDim, the ladder's channels add up to dim.
PageLayout layout(const StoreSpec& spec, Side side, int32_t dim, const Ladder& ladder = {});
// Raw rows [tokens][dim]: the front segment (tokens = front) and the pages of the recent region.
PageLayout raw_layout(RawType type, Side side, int32_t dim, int32_t tokens = kPageTokens);
// Largest page that `spec` can need for this head size over all ladders drawn from `widths` (tiered), in bytes.
uint32_t worst_page_bytes(const StoreSpec& spec, Side side, int32_t dim, const std::vector<uint8_t>& widths);

// ok, or the field and its allowed range.
Status validate(const StoreSpec& spec, Side side, int32_t dim);
Status validate(const Ladder& ladder, int32_t dim, const StoreSpec& spec = {});

// Where the code of (lane, depth position in the tier) lies: byte and shift of each plane. For the reference
// kernels, `inspect` and the format documentation; fast kernels walk vectors instead.
struct CodeSite {
    uint32_t byte = 0;  // from the start of the page
    uint8_t shift = 0;  // bit position in the byte
    uint8_t width = 0;  // bits of this plane
    uint8_t weight = 0; // bit position of the plane's lowest bit in the code
};
// Fills up to 2 sites and returns how many. lane < lanes, 0 <= pos < tier.padded. Not for pages of three levels: there
// the code is digit pos % 5, lowest first, of the base-3 number in byte
// lane / 8 * lane_block_bytes + tier.offset + pos / 5 * 8 + lane % 8.
int code_sites(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, CodeSite out[2]);

} // namespace kvmosaic
