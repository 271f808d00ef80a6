// Scores of 128 packed keys whose channels lie in tiers of several widths; tier sizes differ from page to page.
//
// Bound: as KeyGrid; in addition the gather of q through the map, a byte load, an address and a quarter of an
// ldmatrix for each thread and 32 channels, and where the field positions of two widths differ 24 multiplications.
#pragma once

#include "kernels/cuda/score.cuh"

namespace kvmosaic::cuda {

__host__ __device__ constexpr int tier_granule(int bits) {
    return bits == 16 ? 8 : bits == 1 || bits == 3 ? 64 : bits == 2 || bits == 6 ? 32 : 16;
}
// Position of tile f's field as finish_scores takes it; raw channels have none: their sums are plain.
__host__ __device__ constexpr int tier_position(int bits, int tile) {
    return bits == 16 ? 24 : field_position(bits, tile);
}

// Widths, widest first; one scale per channel for all 128 tokens. WITH_MAP: the page holds its channel map; else ladder
// order is the order of q.
template <int D_, bool WITH_MAP, int... WIDTHS>
struct KeyTiers {
    static constexpr int D = D_, kCount = sizeof...(WIDTHS);
    static constexpr bool kTiered = true;
    static constexpr bool kMean = false;
    static constexpr bool kBasis = !WITH_MAP; // an order of channels, if no other basis
    static_assert(kCount <= 4 && D <= 256, "a byte of PageRef::tiers for each width; byte maps");

    struct Sizes {
        uint32_t padded[kCount], offset[kCount], column[kCount];
        uint32_t raw, raw_padded, scales, zeros, map, bytes;
    };
    __host__ __device__ static Sizes sizes(uint32_t tiers) {
        constexpr int kWidth[] = {WIDTHS...};
        Sizes s{};
        uint32_t codes = 0, columns = 0;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            s.padded[i] = ((tiers >> (8 * i)) & 255u) * uint32_t(tier_granule(kWidth[i]));
            s.offset[i] = codes, s.column[i] = columns;
            if (kWidth[i] == 16) {
                s.raw_padded = s.padded[i];
            } else {
                codes += s.padded[i] * 16u * uint32_t(kWidth[i]);
                columns += s.padded[i];
            }
        }
        s.raw = codes;
        s.scales = s.raw + s.raw_padded * 256u;
        s.zeros = s.scales + columns * 2u;
        s.map = s.zeros + columns * 2u;
        s.bytes = (s.map + (WITH_MAP ? s.raw_padded + columns : 0u) + kUnit - 1) / kUnit * kUnit;
        return s;
    }
    __host__ __device__ static uint32_t bytes(uint32_t tiers) { return sizes(tiers).bytes; }
    static StoreSpec spec() {
        StoreSpec s = grid_spec(0, Axis::tokens, 128);
        s.kind = StoreKind::tiered;
        s.page_map = WITH_MAP;
        return s;
    }
    static constexpr uint32_t kScratch = 0, kTables = 0, kValueScales = 0, kTurnBytes = 0; // see KeyPlanes
    static std::vector<uint8_t> widths() { return {uint8_t(WIDTHS)...}; }

    // Byte `entry` of the tier's part of the map, or the ladder position itself: `first` is that of the tier. What is
    // dead reads some channel, and has codes and scales of 0.
    static __device__ __forceinline__ uint32_t channel(uint32_t map, uint32_t first, uint32_t entry) {
        return WITH_MAP ? load_shared_byte(map + entry) : min(first + entry, uint32_t(D - 1));
    }
    static __device__ __forceinline__ uint32_t channel(const uint8_t* map, uint32_t first, uint32_t entry) {
        return WITH_MAP ? map[entry] : min(first + entry, uint32_t(D - 1));
    }
    static __device__ __forceinline__ uint32_t at(uint32_t base, uint32_t offset) { return base + offset; }
    static __device__ __forceinline__ const uint8_t* at(const uint8_t* base, uint32_t offset) { return base + offset; }

    // TILES tiles from `tile`: all eight, or two of a quarter in the slow form. Leaves sums in the scheme of the last
    // width.
    template <int TILES, int NT, class Words, class Base>
    __device__ static void sums(const AttendParams& params, const Words& words, Base page, const Sizes& s, uint32_t q,
                                int lane, int tile, float (&x)[TILES][NT][4], ZeroSums<NT>& zero) {
        sums_from<0, TILES, NT>(params, words, page, s, q, lane, tile, x, zero);
    }

    template <int I, int TILES, int NT, class Words, class Base>
    __device__ static __forceinline__ void sums_from(const AttendParams& params, const Words& words, Base page,
                                                     const Sizes& s, uint32_t q, int lane, int tile,
                                                     float (&x)[TILES][NT][4], ZeroSums<NT>& zero) {
        constexpr int kWidth[] = {WIDTHS...};
        constexpr int W = kWidth[I];
        constexpr bool kWhole = TILES == 8;
        const int t = lane & 3;
        const uint32_t entry = W == 16 ? 0u : s.raw_padded + s.column[I];
        const uint32_t first = WITH_MAP ? 0u : params.tier_first[I];
        const auto map = at(page, s.map + entry);
        const uint32_t plane = s.padded[I] * 32u;
        if constexpr (W == 16) {
            for (uint32_t u = 0; u < s.padded[I] / 8; ++u) {
                const uint32_t row = q + channel(map, first, 8 * u + uint32_t(lane & 7)) * (16 * NT);
                uint32_t b[NT];
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    ldmatrix1_trans(b[n], row + uint32_t(16 * n));
#pragma unroll
                for (int j = 0; j < TILES / 2; ++j) {
                    const uint4 w =
                        words.get(s.raw + (u * 4 + uint32_t(tile / 2 + j)) * kSetBytes + uint32_t(lane) * 16);
#pragma unroll
                    for (int n = 0; n < NT; ++n)
                        mma8(x[2 * j][n], w.x, w.y, b[n]), mma8(x[2 * j + 1][n], w.z, w.w, b[n]);
                }
            }
        } else if constexpr (tier_granule(W) == 16) {
            for (uint32_t step = 0; step < s.padded[I] / 16; ++step) {
                uint32_t b[NT][2], e[NT][2];
                load_q_step<NT>(b, q + channel(map, first, 16 * step + uint32_t(gather_place(lane & 15))) * (16 * NT));
                const uint32_t c = (s.column[I] + 16 * step) * 2 + uint32_t(t * 8);
                const uint2 z = words.get8(s.zeros + c), sc = words.get8(s.scales + c);
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    mma16(zero.even[n], z.x, 0u, z.y, 0u, b[n][0], b[n][1]);
                scaled<NT>(e, b, sc.x, sc.y);
                if constexpr (kWhole) {
                    mma_step<W, NT>(x, words, s.offset[I], plane, int(step), 2, 0, lane, e);
                    mma_step<W, NT>(x + 4, words, s.offset[I], plane, int(step), 2, 1, lane, e);
                } else {
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
                        mma_tile<NT>(x[j], tile_codes<W>(words, s.offset[I], plane, int(step), 2, tile + j, lane), ~0u,
                                     e);
                }
            }
        } else {
            for (uint32_t p = 0; p < s.padded[I] / 32; ++p) {
                uint32_t qe[NT][2], qo[NT][2], e[NT][2], o[NT][2];
                load_q_pair<NT>(qe, qo, q + channel(map, first, 32 * p + uint32_t(gather_place(lane))) * (16 * NT));
                const uint4 sc = pair_params<W>(words, s.scales + s.column[I] * 2, int(p), t);
                zero.add(pair_params<W>(words, s.zeros + s.column[I] * 2, int(p), t), qe, qo);
                scaled<NT>(e, qe, sc.x, sc.z);
                scaled<NT>(o, qo, sc.y, sc.w);
                if constexpr (kWhole) {
                    mma_pair<W, 0, 4, NT>(x, words, s.offset[I], plane, int(p), 2, 0, lane, e, o);
                    mma_pair<W, 0, 4, NT>(x + 4, words, s.offset[I], plane, int(p), 2, 1, lane, e, o);
                } else {
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        mma_tile<NT>(x[j], tile_codes<W>(words, s.offset[I], plane, int(2 * p), 2, tile + j, lane), ~0u,
                                     e);
                        mma_tile<NT>(x[j], tile_codes<W>(words, s.offset[I], plane, int(2 * p + 1), 2, tile + j, lane),
                                     ~0u, o);
                    }
                }
            }
        }
        if constexpr (I + 1 < kCount) {
            constexpr int kNext = kWidth[I + 1 < kCount ? I + 1 : I];
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                // The slow form has all its fields at position 0.
                const int shift = kWhole ? tier_position(kNext, j) - tier_position(W, j) : W == 16 ? -24 : 0;
                if (shift == 0) continue;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[j][n][i] *= exp2_of(shift);
            }
            sums_from<(I + 1 < kCount ? I + 1 : I), TILES, NT>(params, words, page, s, q, lane, tile, x, zero);
        }
    }

    template <int NT>
    __device__ static void score(const AttendParams& params, uint32_t page, uint32_t tiers, uint32_t q, int lane,
                                 const Columns<NT>& col, float (&x)[8][NT][4], const KeySpot&) {
        constexpr int kWidth[] = {WIDTHS...};
        cuda::clear(x);
        ZeroSums<NT> zero;
        zero.clear();
        sums<8, NT>(params, SharedWords{page}, page, sizes(tiers), q, lane, 0, x, zero);
        finish_scores<kWidth[kCount - 1], 1, NT>(x, zero, col, lane);
    }

    template <int NT>
    __device__ static void score_quarter(const AttendParams& params, const uint8_t* page, uint32_t tiers, uint32_t q,
                                         int lane, int quarter, float (&x)[2][NT][4], const KeySpot&) {
        ZeroSums<NT> zero;
        zero.clear();
        sums<2, NT>(params, GlobalWords{page}, page, sizes(tiers), q, lane, 2 * quarter, x, zero);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[j][n][i] = fmaf(x[j][n][i], exp2_of(24), zero.get(n, i & 1));
    }
};

} // namespace kvmosaic::cuda
