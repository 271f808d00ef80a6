// Scores and mixes of pages whose groups run along the depth: channels of a key token, tokens of a value channel
// (InnerQ; TurboQuant's values are along the lanes). A scale belongs to a row of the A operand and not to a column of
// it, so the sums of a group come first and are scaled into the total.
//
// Bound: as KeyGrid and ValueGrid; in addition for each group of each side 32 multiply-adds and 16 conversions of a
// warp, twice that where the grid has offsets. Symmetric grids have theirs for nothing: sums of a group begin at
// -m * (sum of the other operand), the same for all rows.
#pragma once

#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/score.cuh"

namespace kvmosaic::cuda {

// What a rule adds to a code: nothing stored (symmetric), an offset, or one of the two by the sign of the scale.
__host__ __device__ constexpr bool has_stored_offset(GridRule rule) { return rule != GridRule::symmetric; }
__host__ __device__ constexpr float middle_code(int bits) { return float((1 << (bits - 1)) - 1); }

// Sums of an operand over the steps that are added, the same in every row.
template <int NT>
struct OperandSums {
    float s[NT][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s[n][i] = 0.0f;
    }
    __device__ __forceinline__ void add(const uint32_t (&b)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
            mma16(s[n], kOne2, kOne2, kOne2, kOne2, b[n][0], b[n][1]);
    }
    // Where the sums of a group begin.
    template <int BITS, GridRule RULE>
    __device__ __forceinline__ FromColumns<NT> begin() const {
        FromColumns<NT> from;
        const float m = has_stored_offset(RULE) ? 0.0f : -middle_code(BITS) * exp2_of(-24);
#pragma unroll
        for (int n = 0; n < NT; ++n)
            from.at[n][0] = m * s[n][0], from.at[n][1] = m * s[n][1];
        return from;
    }
};

// total += scale * part of one tile (field position P), with the offsets of the rule. scale, offset: rows g and g + 8.
template <int BITS, GridRule RULE, int NT>
__device__ __forceinline__ void add_group(float (&total)[NT][4], const float (&part)[NT][4], uint32_t scale,
                                          uint32_t offset, const OperandSums<NT>& sums, int position) {
    float2 s = unpack_half2(scale), z = make_float2(0.0f, 0.0f);
    if constexpr (has_stored_offset(RULE)) {
        z = unpack_half2(offset);
        if constexpr (RULE == GridRule::hybrid_1bit || RULE == GridRule::hybrid_4level) {
            constexpr float m = middle_code(BITS);
            if (!(scale & 0x8000u)) z.x = -m * s.x;
            if (!(scale & 0x80000000u)) z.y = -m * s.y;
            s.x = fabsf(s.x), s.y = fabsf(s.y);
        }
        const float f = exp2_of(position - 24);
        z.x *= f, z.y *= f;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (has_stored_offset(RULE)) total[n][i] = fmaf(i < 2 ? z.x : z.y, sums.s[n][i & 1], total[n][i]);
            total[n][i] = fmaf(i < 2 ? s.x : s.y, part[n][i], total[n][i]);
        }
}

// Word f of four: rows g and g + 8 of tile f of a quad.
__device__ __forceinline__ uint32_t word_of(const uint4& w, int f) {
    return f == 0 ? w.x : f == 1 ? w.y : f == 2 ? w.z : w.w;
}

// One width, groups of D / GROUPS channels of a token.
template <int D_, int BITS_, int GROUPS_, GridRule RULE>
struct KeyDepth {
    static constexpr int D = D_, BITS = BITS_, GROUPS = GROUPS_;
    static constexpr bool kTiered = false, kBasis = true, kMean = false;
    static constexpr int kPairs = D / 32 / GROUPS;       // of steps in a group
    static constexpr int kUnroll = D > 128 ? 1 : GROUPS; // more would not stay in registers
    static_assert(D % (32 * GROUPS) == 0, "a group is a whole number of pairs of steps");
    static constexpr uint32_t kCodes = D * 128 * BITS / 8, kPlane = D * 128 * 2 / 8;
    static constexpr uint32_t kScales = kCodes, kParams = GROUPS * 256, kZeros = kScales + kParams;
    static constexpr uint32_t kBytes = kZeros + (has_stored_offset(RULE) ? kParams : 0);
    __host__ __device__ static uint32_t bytes(uint32_t) { return kBytes; }
    static StoreSpec spec() { return grid_spec(BITS, Axis::channels, D / GROUPS, RULE); }
    static constexpr uint32_t kScratch = 0, kTables = 0, kValueScales = 0, kTurnBytes = 0; // see KeyPlanes
    static std::vector<uint8_t> widths() { return {}; }

    template <int NT>
    __device__ static void score(const AttendParams&, uint32_t page, uint32_t, uint32_t q, int lane,
                                 const Columns<NT>& col, float (&x)[8][NT][4], const KeySpot&) {
        const SharedWords words{page};
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT), at = uint32_t(lane >> 2) * 16;
        cuda::clear(x);
#pragma unroll kUnroll
        for (int k = 0; k < GROUPS; ++k) {
            uint32_t qe[kPairs][NT][2], qo[kPairs][NT][2];
            OperandSums<NT> sums;
            sums.clear();
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                load_q_pair<NT>(qe[p], qo[p], q_row + uint32_t((k * kPairs + p) * 32 * 16 * NT));
                sums.add(qe[p]), sums.add(qo[p]);
            }
            const FromColumns<NT> from = sums.template begin<BITS, RULE>();
#pragma unroll
            for (int quad = 0; quad < 2; ++quad) {
                float y[4][NT][4];
#pragma unroll
                for (int p = 0; p < kPairs; ++p)
                    mma_pair<BITS, 0, 4, NT>(y, words, 0, kPlane, k * kPairs + p, 2, quad, lane, qe[p], qo[p], p == 0,
                                             from);
                const uint32_t param = uint32_t(k * 256 + quad * 128) + at;
                const uint4 s = words.get(kScales + param);
                const uint4 z = has_stored_offset(RULE) ? words.get(kZeros + param) : s;
#pragma unroll
                for (int f = 0; f < 4; ++f)
                    add_group<BITS, RULE, NT>(x[4 * quad + f], y[f], word_of(s, f), word_of(z, f), sums,
                                              field_position(BITS, f));
            }
        }
        finish_scores<BITS, NT>(x, col);
    }

    // Tiles 2 * quarter and the next, from global memory, as plain sums q . k (not yet scaled).
    template <int NT>
    __device__ static void score_quarter(const AttendParams&, const uint8_t* page, uint32_t, uint32_t q, int lane,
                                         int quarter, float (&x)[2][NT][4], const KeySpot&) {
        const GlobalWords words{page};
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT), at = uint32_t(lane >> 2) * 16;
#pragma unroll 1
        for (int k = 0; k < GROUPS; ++k) {
            float y[2][NT][4] = {};
            OperandSums<NT> sums;
            sums.clear();
#pragma unroll 1
            for (int p = k * kPairs; p < (k + 1) * kPairs; ++p) {
                uint32_t qs[2][NT][2];
                load_q_pair<NT>(qs[0], qs[1], q_row + uint32_t(p * 32 * 16 * NT));
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    sums.add(qs[e]);
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        mma_tile<NT>(y[j], tile_codes<BITS>(words, 0, kPlane, 2 * p + e, 2, 2 * quarter + j, lane), ~0u,
                                     qs[e]);
                }
            }
            const FromColumns<NT> from = sums.template begin<BITS, RULE>();
            const uint32_t param = uint32_t(k * 256 + quarter / 2 * 128) + at;
            const uint4 s = words.get(kScales + param);
            const uint4 z = has_stored_offset(RULE) ? words.get(kZeros + param) : s;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        y[j][n][i] += from.at[n][i & 1];
                const bool high = quarter & 1;
                const uint32_t sw = high ? word_of(s, 2 + j) : word_of(s, j);
                const uint32_t zw = high ? word_of(z, 2 + j) : word_of(z, j);
                add_group<BITS, RULE, NT>(x[j], y[j], sw, zw, sums, 0);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[j][n][i] *= exp2_of(24);
    }
};

// One width, groups of 128 / GROUPS tokens of a channel.
template <int D_, int BITS_, int GROUPS_, GridRule RULE>
struct ValueDepth {
    static constexpr int D = D_, BITS = BITS_, GROUPS = GROUPS_;
    static constexpr bool kRotated = false;
    static constexpr int NG = 1; // of offset sums, which are all 0: offsets go into the sums at once
    static constexpr int kQuads = D / 64, kPairs = 4 / GROUPS;
    static_assert(4 % GROUPS == 0, "a group is a whole number of pairs of steps");
    static constexpr uint32_t kCodes = D * 128 * BITS / 8, kPlane = D * 128 * 2 / 8;
    static constexpr uint32_t kScales = kCodes, kParams = GROUPS * D * 2, kZeros = kScales + kParams;
    static constexpr uint32_t kBytes = kZeros + (has_stored_offset(RULE) ? kParams : 0);
    __host__ __device__ static uint32_t bytes(uint32_t) { return kBytes; }
    static StoreSpec spec() { return grid_spec(BITS, Axis::tokens, 128 / GROUPS, RULE); }

    // Pairs of steps from `first`, of group k.
    template <int PAIRS, int NT, class Words>
    __device__ static void group(const Words& words, int k, int first, int lane, const uint32_t (*p)[NT][2],
                                 MixState<D, NT>& state) {
        OperandSums<NT> sums;
        sums.clear();
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; ++i)
            sums.add(p[i]);
            // All rows of the denominator's product are alike; row 7 is read.
#pragma unroll
        for (int n = 0; n < NT; ++n)
            state.zero.even[n][0] += sums.s[n][0], state.zero.even[n][1] += sums.s[n][1];
        const FromColumns<NT> from = sums.template begin<BITS, RULE>();
#pragma unroll
        for (int h = 0; h < kQuads; ++h) {
            float y[4][NT][4];
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
                mma_pair<BITS, 0, 4, NT>(y, words, 0, kPlane, first + i, kQuads, h, lane, p[2 * i], p[2 * i + 1],
                                         i == 0, from);
            const uint32_t param = uint32_t(k * D * 2 + h * 128) + uint32_t(lane >> 2) * 16;
            const uint4 s = words.get(kScales + param);
            const uint4 z = has_stored_offset(RULE) ? words.get(kZeros + param) : s;
#pragma unroll
            for (int f = 0; f < 4; ++f)
                add_group<BITS, RULE, NT>(state.o[4 * h + f], y[f], word_of(s, f), word_of(z, f), sums,
                                          field_position(BITS, f));
        }
    }

    template <int NT>
    __device__ static void mix(uint32_t page, uint32_t, uint32_t, int lane, const uint32_t (&p)[8][NT][2],
                               MixState<D, NT>& state) {
        const SharedWords words{page};
#pragma unroll
        for (int k = 0; k < GROUPS; ++k)
            group<kPairs, NT>(words, k, k * kPairs, lane, p + 2 * kPairs * k, state);
    }

    // 32 tokens of a page in global memory; p[0], p[1] are their steps.
    template <int NT>
    __device__ static void mix_quarter(const uint8_t* page, uint32_t, int lane, int quarter,
                                       const uint32_t (&p)[2][NT][2], MixState<D, NT>& state) {
        group<1, NT>(GlobalWords{page}, quarter / kPairs, quarter, lane, p, state);
    }

    template <int NT>
    __device__ static float zero_of(const MixState<D, NT>&, int, int, int, int) {
        return 0.0f;
    }
    __device__ static float scale_of(int tile) { return field_scale(BITS, tile); }
};

} // namespace kvmosaic::cuda
