// Pages as operand B of wgmma, in shared memory: how the codes get there (warps that unpack) and how the scores are
// taken from them (warps that multiply).
//
// A tile is [k / 8][n / 8][8 n][8 k] fp16: k channels and n tokens of keys, k tokens and n channels of values. A
// thread's words of a pair of steps and one row are eight k: the neighbours 4t .. 4t + 3 of the even step and of the
// odd one. They are stored as they come, so a *core* is eight such k, and four of them are a pair. The tokens of a key
// tile lie in the order of the cores of the value tile.
#pragma once

#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/score_tiers.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace kvmosaic::cuda {

// Bytes from a core to the next, of n rows: not a multiple of 128, which spreads the four cores that a quarter of a
// warp writes over the banks.
__host__ __device__ constexpr uint32_t core_bytes(uint32_t n) { return n * 16 + 32; }
inline constexpr uint32_t kKeyCore = core_bytes(128);
inline constexpr int kUnpackers = 4; // warps of a team that unpack; each takes a part of every page

// Field position of tile f of a quad: 2 f whatever the width, so that tiers of several widths share their sums; wider
// fields would leave the subnormal numbers there and are brought to 0.
__host__ __device__ constexpr int wide_position(int bits, int tile) { return bits > 4 ? 0 : 2 * (tile & 3); }

__device__ __forceinline__ uint4 masked(const uint4& w, uint32_t mask) {
    return make_uint4(w.x & mask, w.y & mask, w.z & mask, w.w & mask);
}

// Codes of the four tiles of a quad for the steps of a pair (ONE: for one step, widths of 4 and 8 bits).
template <int BITS, bool ONE, class Words>
__device__ __forceinline__ void quad_codes(const Words& words, uint32_t offset, uint32_t plane, int pair, int quads,
                                           int quad, int lane, uint4 (&a)[ONE ? 1 : 2][4]) {
    constexpr int kSteps = ONE ? 1 : 2;
    const auto set = [&](uint32_t from, int s) {
        return words.get(from + uint32_t(s * quads + quad) * kSetBytes + uint32_t(lane) * 16);
    };
    if constexpr (BITS == 1 || BITS == 2) {
        const uint4 w = BITS == 2 ? set(offset, pair) : shift_right(set(offset, pair >> 1), 8 * (pair & 1));
        const uint4 s = shift_right(w, BITS == 2 ? 8 : 1);
        constexpr uint32_t kMask = BITS == 2 ? 0x00030003u : 0x00010001u;
#pragma unroll
        for (int f = 0; f < 4; ++f)
            a[0][f] = masked(w, kMask << (2 * f)), a[1][f] = masked(s, kMask << (2 * f));
    } else if constexpr (BITS == 3) {
        const uint4 w = set(offset, pair), h = shift_right(set(offset + plane, pair >> 1), 8 * (pair & 1));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint4 low = shift_right(w, 8 * e);
            const auto put = [&](uint32_t l, uint32_t high, int f) {
                return (l & 0x00030003u << (2 * f)) | (high << (2 - e) & 0x00040004u << (2 * f));
            };
#pragma unroll
            for (int f = 0; f < 4; ++f)
                a[e][f] = make_uint4(put(low.x, h.x, f), put(low.y, h.y, f), put(low.z, h.z, f), put(low.w, h.w, f));
        }
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int e = 0; e < kSteps; ++e) {
            const uint4 w = set(offset, kSteps * pair + e);
#pragma unroll
            for (int f = 0; f < 4; ++f)
                a[e][f] = masked(shift_right(w, 2 * f), 0x000F000Fu << (2 * f));
        }
    } else {
#pragma unroll
        for (int e = 0; e < kSteps; ++e)
#pragma unroll
            for (int f = 0; f < 4; ++f)
                a[e][f] = tile_codes<BITS>(words, offset, plane, kSteps * pair + e, quads, 4 * quad + f, lane);
    }
}

// Codes at the position of tile f become plain numbers: 1024 + code * 2^position is a number of 11 bits.
__device__ __forceinline__ uint32_t plain_code(uint32_t w, int position) {
    return hfma2(w | 0x64006400u, half2_power(-position), half2_power(10 - position) ^ 0x80008000u);
}
__device__ __forceinline__ uint4 plain_codes(const uint4& w, int position) {
    return make_uint4(plain_code(w.x, position), plain_code(w.y, position), plain_code(w.z, position),
                      plain_code(w.w, position));
}

// Rows g and g + 8 of a tile, a pair of steps: `even`, `odd` are its words. to: of core 0 and the thread's rows.
__device__ __forceinline__ void store_pair(uint32_t to, uint32_t core, uint32_t next_row, int t, const uint4& even,
                                           const uint4& odd) {
    store_shared16(to + uint32_t(t) * core, make_uint4(even.x, even.z, odd.x, odd.z));
    store_shared16(to + uint32_t(t) * core + next_row, make_uint4(even.y, even.w, odd.y, odd.w));
}
// Token (tile f, row g) of a key tile; row g + 8 lies two rows behind.
__device__ __forceinline__ uint32_t key_row(int tile, int g) {
    return uint32_t((tile >> 1) * 512 + (g >> 1) * 128 + (4 * (tile & 1) + (g & 1)) * 16);
}
__device__ __forceinline__ void store_key_quad(uint32_t tile, int pair, int quad, int lane, const uint4 (&a)[2][4]) {
#pragma unroll
    for (int f = 0; f < 4; ++f)
        store_pair(tile + uint32_t(pair) * 4 * kKeyCore + key_row(4 * quad + f, lane >> 2), kKeyCore, 32, lane & 3,
                   a[0][f], a[1][f]);
}
// Token of score n = 8 i + 2 t + u.
__device__ __forceinline__ int token_of_score(int i, int t, int u) {
    return 32 * (i >> 2) + 16 * (t >> 1) + 4 * (i & 3) + 2 * (t & 1) + u;
}

// Parameters of a pair of steps in the order of the operands: word 4 t + c are the two that thread t multiplies core c
// with. Word of the page's columns that belongs there.
__device__ __forceinline__ int param_word(int bits, int i) {
    const int t = i >> 2, c = i & 3;
    return bits == 4 || bits == 8 ? 8 * (t >> 1) + 2 * c + (t & 1) : 4 * c + 2 * (t & 1) + (t >> 1);
}

// q of a team in shared memory: [channel][64 columns] fp16, the eight 16-byte parts of a channel in an order that puts
// the rows of an operand into different banks.
__device__ __forceinline__ uint32_t query_place(uint32_t q, uint32_t channel, uint32_t part) {
    return q + channel * 128 + ((part ^ ((channel & 3) | (channel >> 2 & 4))) * 16);
}
// Operand A of 8 H columns (where H is 1 its other rows are 0). channel: of k index query_k(lane).
template <int H>
__device__ __forceinline__ int query_k(int lane) {
    return (lane & 7) + 8 * (H == 2 ? lane >> 4 : lane >> 3 & 1);
}
template <int H>
__device__ __forceinline__ uint4 load_query(uint32_t q, uint32_t channel, int warp, int lane) {
    if constexpr (H == 2) {
        uint32_t d[4];
        ldmatrix4_trans(d, query_place(q, channel, uint32_t(2 * warp + (lane >> 3 & 1))));
        return make_uint4(d[0], d[1], d[2], d[3]);
    } else {
        uint4 a = make_uint4(0u, 0u, 0u, 0u);
        ldmatrix2_trans(a.x, a.z, query_place(q, channel, uint32_t(warp)));
        return a;
    }
}
// Of 32: the channel that belongs to that k index in the first step of a pair; in the second it is 8 further.
template <int H>
__device__ __forceinline__ int query_lane_place(int lane) {
    const int k = query_k<H>(lane), e = k & 7;
    return 4 * (k >> 3) + (e & 3) + 16 * (e >> 2);
}
template <int H>
__device__ __forceinline__ uint4 times(const uint4& a, uint32_t low, uint32_t high) {
    return make_uint4(hmul2(a.x, low), H == 2 ? hmul2(a.y, low) : 0u, hmul2(a.z, high), H == 2 ? hmul2(a.w, high) : 0u);
}

// What the multiplying warps need to turn sums into logits: x[i][..] are 8 tokens 8 i .., rows g and g + 8.
template <int TILES>
struct WideScores {
    float x[TILES][4];
    float zero[4]; // q times offsets: column k of the sums is that of token group k
};

template <class K>
struct WideKeys;

template <int D_, int BITS_, int NG_>
struct WideKeys<KeyGrid<D_, BITS_, NG_>> {
    using K = KeyGrid<D_, BITS_, NG_>;
    static constexpr int D = D_, BITS = BITS_, NG = NG_;
    static constexpr int kSteps = D / 16;                      // of the tile
    static constexpr uint32_t kParams = K::kBytes - K::kCodes; // bytes that lie beside the tile
    static constexpr int kPairs = D / 32;
    // What makes plain sums of those of token tile f of a quad; of a quarter.
    static __device__ __forceinline__ float scale(int f) { return exp2_of(24 - wide_position(BITS, f)); }
    static __device__ __forceinline__ float quarter_scale() { return exp2_of(24); }

    // [group][D] scales, then offsets, a word a step. read: words of the page.
    template <class Read>
    static __device__ __forceinline__ void params(Read read, uint32_t, uint32_t to, int thread) {
        for (int i = thread; i < NG * D; i += 32 * kUnpackers)
            store_shared4(to + uint32_t(i) * 4, read(K::kCodes / 4 + uint32_t((i & ~15) + param_word(BITS, i & 15))));
    }
    static __device__ __forceinline__ void unpack(uint32_t page, uint32_t, uint32_t tile, int part, int lane) {
#pragma unroll
        for (int i = 0; i < 2 * kPairs / kUnpackers; ++i) {
            const int p = (kUnpackers * i + part) >> 1;
            uint4 a[2][4];
            quad_codes<BITS, false>(SharedWords{page}, 0, K::kPlane, p, 2, part & 1, lane, a);
            store_key_quad(tile, p, part & 1, lane, a);
        }
    }
    // Tiles 2 * quarter and the next as the first two, at position 0.
    static __device__ __forceinline__ void unpack_quarter(const uint8_t* page, uint32_t, uint32_t tile, int part,
                                                          int lane, int quarter) {
        const int half = part & 1;
        const auto codes = [&](int s) {
            return tile_codes<BITS>(GlobalWords{page}, 0, K::kPlane, s, 2, 2 * quarter + half, lane);
        };
#pragma unroll 1
        for (int p = part >> 1; p < kPairs; p += kUnpackers / 2)
            store_pair(tile + uint32_t(p) * 4 * kKeyCore + key_row(half, lane >> 2), kKeyCore, 32, lane & 3,
                       codes(2 * p), codes(2 * p + 1));
    }

    // Of 8 * TILES tokens: a page, or those of a quarter.
    template <int H, int TILES>
    static __device__ __forceinline__ void score(uint32_t params, uint32_t, uint32_t q, uint64_t tile, int warp,
                                                 int lane, int quarter, WideScores<TILES>& s) {
        constexpr int kGroups = TILES == 16 ? NG : 1, kTiles = TILES / kGroups;
        const int t = lane & 3, g = lane >> 2, own = TILES == 16 ? 0 : quarter * NG / 4;
        const SharedWords words{params + uint32_t(t) * 16};
        const uint32_t zeros = NG * D * 2 + uint32_t(own + (kGroups > 1 ? g & (kGroups - 1) : 0)) * D * 2;
        const uint32_t place = uint32_t(query_lane_place<H>(lane));
        s.zero[0] = s.zero[1] = s.zero[2] = s.zero[3] = 0.0f;
        // In one go where the registers hold the operands of a page, else a pair of steps at a time.
        constexpr int kAtOnce = kGroups == 1 ? (kPairs < 4 ? kPairs : 4) : 1;
#pragma unroll
        for (int first = 0; first < kPairs; first += kAtOnce) {
            uint4 a[kAtOnce][kGroups][2];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int p = first + i;
                const uint4 z = words.get(zeros + uint32_t(p * 64));
                const uint4 a0 = load_query<H>(q, uint32_t(32 * p) + place, warp, lane),
                            a1 = load_query<H>(q, uint32_t(32 * p + 8) + place, warp, lane);
                mma16(s.zero, a0.x, a0.y, a0.z, a0.w, z.x, z.y);
                mma16(s.zero, a1.x, a1.y, a1.z, a1.w, z.z, z.w);
#pragma unroll
                for (int k = 0; k < kGroups; ++k) {
                    const uint4 w = words.get(uint32_t((own + k) * D * 2 + p * 64));
                    a[i][k][0] = times<H>(a0, w.x, w.y), a[i][k][1] = times<H>(a1, w.z, w.w);
                }
            }
            wgmma_fence();
#pragma unroll
            for (int e = 0; e < 2 * kAtOnce; ++e)
#pragma unroll
                for (int k = 0; k < kGroups; ++k)
                    wgmma<kTiles>(reinterpret_cast<float(&)[kTiles][4]>(s.x[kTiles * k]), a[e >> 1][k][e & 1],
                                  tile + uint64_t((2 * first + e) * 2 * int(kKeyCore) + k * kTiles * 128) / 16,
                                  first + e > 0);
            wgmma_commit();
            wgmma_wait<0>();
        }
    }
};

// Tiers: raw channels, then each tier, every one from a whole pair of steps on. Codes are plain numbers in the tile, as
// raw channels are. Where a tier ends in the middle of a pair, tile and parameters are 0.
template <int D_, bool WITH_MAP, int... WIDTHS>
struct WideKeys<KeyTiers<D_, WITH_MAP, WIDTHS...>> {
    using K = KeyTiers<D_, WITH_MAP, WIDTHS...>;
    using Sizes = typename K::Sizes;
    static constexpr int D = D_, NG = 1, kCount = K::kCount;
    static constexpr int kWidth[kCount] = {WIDTHS...};
    static_assert(((WIDTHS == 16 || WIDTHS <= 4) && ...), "fields of one half");
    static constexpr int kPairs = (D + ((tier_granule(WIDTHS) < 32 ? 31 : tier_granule(WIDTHS) - 1) + ...)) / 32;
    static constexpr int kSteps = 2 * kPairs;
    // Scales and offsets [kPairs][16] words each, then a channel for each k [kPairs * 32], a byte.
    static constexpr uint32_t kZeros = kPairs * 64, kChannels = 2 * kZeros, kParams = kChannels + kPairs * 32;
    static __device__ __forceinline__ float scale(int) { return 1.0f; }
    static __device__ __forceinline__ float quarter_scale() { return 1.0f; }
    static __device__ __forceinline__ int pairs(const Sizes& s, int i) { return int(s.padded[i] + 31) / 32; }

    template <class Read>
    static __device__ __forceinline__ void params(Read read, uint32_t tiers, uint32_t to, int thread) {
        params_from<0>(read, K::sizes(tiers), to, 0, thread);
    }
    template <int I, class Read>
    static __device__ __forceinline__ void params_from(Read read, const Sizes& s, uint32_t to, int first, int thread) {
        constexpr int W = kWidth[I];
        const int count = pairs(s, I);
        for (int i = thread; i < 16 * count; i += 32 * kUnpackers) { // two k
            const int x = 2 * i, word = (i & ~15) + param_word(W, i & 15);
            const bool live = W == 16 || uint32_t(2 * word) < s.padded[I];
            const uint32_t at = s.column[I] / 2 + uint32_t(word), slot = to + uint32_t(first * 64 + i * 4);
            store_shared4(slot, W == 16 ? kOne2 : live ? read(s.scales / 4 + at) : 0u);
            store_shared4(slot + kZeros, W == 16 || !live ? 0u : read(s.zeros / 4 + at));
            uint32_t channels = 0;
            const uint32_t entry = W == 16 ? uint32_t(x) : s.raw_padded + s.column[I] + uint32_t(x);
            if (uint32_t(x) < s.padded[I]) {
                const uint32_t byte = s.map + entry;
                channels = WITH_MAP ? read(byte / 4) >> (8 * (byte & 3)) & 0xFFFFu : entry | (entry + 1) << 8;
            }
            store_shared2(to + kChannels + uint32_t(first * 32 + x), channels);
        }
        if constexpr (I + 1 < kCount) params_from<I + 1>(read, s, to, first + count, thread);
    }

    static __device__ __forceinline__ void unpack(uint32_t page, uint32_t tiers, uint32_t tile, int part, int lane) {
        unpack_from<0>(SharedWords{page}, K::sizes(tiers), tile, part, lane, -1);
    }
    static __device__ __forceinline__ void unpack_quarter(const uint8_t* page, uint32_t tiers, uint32_t tile, int part,
                                                          int lane, int quarter) {
        unpack_from<0>(GlobalWords{page}, K::sizes(tiers), tile, part, lane, quarter);
    }
    // tile: of the tier's first pair. quarter < 0: a page.
    template <int I, class Words>
    static __device__ __forceinline__ void unpack_from(const Words& words, const Sizes& s, uint32_t tile, int part,
                                                       int lane, int quarter) {
        constexpr int W = kWidth[I];
        const int count = pairs(s, I), g = lane >> 2, t = lane & 3;
        const uint4 none = make_uint4(0u, 0u, 0u, 0u);
#pragma unroll 1
        for (int i = part; i < 2 * count; i += kUnpackers) {
            const int p = i >> 1, half = i & 1;
            const uint32_t to = tile + uint32_t(p) * 4 * kKeyCore;
            if constexpr (W == 16) {
                // Thread t has the channels 2t, 2t + 1 of each unit of 8; a unit is the k of one core.
                const int tiles = quarter < 0 ? 4 : 2;
#pragma unroll
                for (int u = 0; u < 4; ++u)
                    for (int j = 0; j < tiles / 2; ++j) { // two tiles
                        const int from = quarter < 0 ? 2 * half + j : quarter, at = quarter < 0 ? 4 * half + 2 * j : 0;
                        const uint32_t unit = uint32_t(4 * p + u);
                        const uint4 w = unit < s.padded[I] / 8
                                            ? words.get(s.raw + (unit * 4 + uint32_t(from)) * kSetBytes + lane * 16)
                                            : none;
                        const uint32_t row = to + uint32_t(u) * kKeyCore + uint32_t(t) * 4;
                        store_shared4(row + key_row(at, g), w.x), store_shared4(row + key_row(at, g) + 32, w.y);
                        store_shared4(row + key_row(at + 1, g), w.z), store_shared4(row + key_row(at + 1, g) + 32, w.w);
                    }
            } else if (quarter < 0) {
                uint4 a[2][4];
                if constexpr (tier_granule(W) == 16) {
                    const bool both = 32u * uint32_t(p) + 16 < s.padded[I];
                    uint4 b[1][4];
                    quad_codes<W, true>(words, s.offset[I], s.padded[I] * 32u, 2 * p, 2, half, lane, b);
#pragma unroll
                    for (int f = 0; f < 4; ++f)
                        a[0][f] = b[0][f], b[0][f] = none;
                    if (both) quad_codes<W, true>(words, s.offset[I], s.padded[I] * 32u, 2 * p + 1, 2, half, lane, b);
#pragma unroll
                    for (int f = 0; f < 4; ++f)
                        a[1][f] = b[0][f];
                } else {
                    quad_codes<W, false>(words, s.offset[I], s.padded[I] * 32u, p, 2, half, lane, a);
                }
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int f = 0; f < 4; ++f)
                        a[e][f] = plain_codes(a[e][f], 2 * f);
                store_key_quad(tile, p, half, lane, a);
            } else {
                uint4 a[2];
                for (int e = 0; e < 2; ++e)
                    a[e] = uint32_t(32 * p + 16 * e) < s.padded[I]
                               ? plain_codes(tile_codes<W>(words, s.offset[I], s.padded[I] * 32u, 2 * p + e, 2,
                                                           2 * quarter + half, lane),
                                             0)
                               : none;
                store_pair(to + key_row(half, g), kKeyCore, 32, t, a[0], a[1]);
            }
        }
        if constexpr (I + 1 < kCount)
            unpack_from<I + 1>(words, s, tile + uint32_t(count) * 4 * kKeyCore, (part + 2 * count) & 3, lane, quarter);
    }

    template <int H, int TILES>
    static __device__ __forceinline__ void score(uint32_t params, uint32_t tiers, uint32_t q, uint64_t tile, int warp,
                                                 int lane, int, WideScores<TILES>& s) {
        const Sizes sizes = K::sizes(tiers);
        const SharedWords words{params + uint32_t(lane & 3) * 16};
        int total = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            total += pairs(sizes, i);
        s.zero[0] = s.zero[1] = s.zero[2] = s.zero[3] = 0.0f;
        const int raw = kWidth[0] == 16 ? pairs(sizes, 0) : 0;
        // Raw channels lie in the order of the map, a core a unit.
        const int k = query_k<H>(lane), place = query_lane_place<H>(lane);
        const auto operand = [&](int p, uint4& b0, uint4& b1) {
            const uint32_t from = params + kChannels + uint32_t(32 * p + (p < raw ? k : place));
            const uint4 a0 = load_query<H>(q, load_shared_byte(from), warp, lane),
                        a1 = load_query<H>(q, load_shared_byte(from + (p < raw ? 16 : 8)), warp, lane);
            const uint4 z = words.get(kZeros + uint32_t(p * 64)), w = words.get(uint32_t(p * 64));
            mma16(s.zero, a0.x, a0.y, a0.z, a0.w, z.x, z.y);
            mma16(s.zero, a1.x, a1.y, a1.z, a1.w, z.z, z.w);
            b0 = times<H>(a0, w.x, w.y), b1 = times<H>(a1, w.z, w.w);
        };
#pragma unroll 1
        for (int p = 0; p < total; ++p) {
            uint4 a0, a1;
            operand(p, a0, a1);
            wgmma_fence();
            wgmma<TILES>(s.x, a0, tile + uint64_t(p) * (4 * kKeyCore / 16), p > 0);
            wgmma<TILES>(s.x, a1, tile + uint64_t(p) * (4 * kKeyCore / 16) + 2 * kKeyCore / 16, true);
            wgmma_commit();
            wgmma_wait<0>();
            hold(a0), hold(a1); // else the next operands might take their registers while they are read
        }
    }
};

} // namespace kvmosaic::cuda
