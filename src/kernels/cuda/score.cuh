// Scores of 128 packed keys, straight from their codes.
//
// q lies in shared memory as [channel][8 * NT columns] fp16, scaled by a power of two for each column so that the
// largest |q| of a column is in [1, 2): products with scales neither overflow nor, where they matter, underflow.
// ldmatrix.trans gathers an operand of 8 channels by 8 row addresses, so channels may come in any order: the map of a
// tiered page costs a byte load and an address for 32 channels.
#pragma once

#include "kernels/cuda/attend.h"
#include "kernels/cuda/codes.cuh"

namespace kvmosaic::cuda {

// Where a key page stands and what its warp may write to.
struct KeySpot {
    int page = 0;         // of the sequence, where its turn is in global memory
    uint32_t turn = 0;    // else where its turn is
    uint32_t scratch = 0; // the warp's
    uint32_t tables = 0;  // the block's
};

// Channel, of 32, whose q row this lane addresses for ldmatrix4_trans; then matrices 0, 1 are the operand of the even
// step and 2, 3 of the odd one, in the order of place_of_row.
__device__ __forceinline__ int gather_place(int lane) {
    const int matrix = lane >> 3, r = lane & 7;
    return 16 * (matrix >> 1) + 2 * (matrix & 1) + 4 * (r >> 1) + (r & 1);
}

template <int NT>
__device__ __forceinline__ void load_q_pair(uint32_t (&even)[NT][2], uint32_t (&odd)[NT][2], uint32_t address) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint32_t b[4];
        ldmatrix4_trans(b, address + uint32_t(16 * n));
        even[n][0] = b[0], even[n][1] = b[1], odd[n][0] = b[2], odd[n][1] = b[3];
    }
}
template <int NT>
__device__ __forceinline__ void load_q_step(uint32_t (&q)[NT][2], uint32_t address) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
        ldmatrix2_trans(q[n][0], q[n][1], address + uint32_t(16 * n));
}

// Sums of q * offset. Rows of the A operand are free, so the rows 8 and up carry the odd step: of `even` sums the
// first half is wanted, of `odd` sums the second.
template <int NT>
struct ZeroSums {
    float even[NT][4], odd[NT][4];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                even[n][i] = odd[n][i] = 0.0f;
    }
    // z: offsets of a pair of steps, in the order of param_place.
    __device__ __forceinline__ void add(const uint4& z, const uint32_t (&qe)[NT][2], const uint32_t (&qo)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mma16(even[n], z.x, z.y, z.z, z.w, qe[n][0], qe[n][1]);
            mma16(odd[n], z.x, z.y, z.z, z.w, qo[n][0], qo[n][1]);
        }
    }
    // Of column 2t + i in row g.
    __device__ __forceinline__ float get(int n, int i) const { return even[n][i] + odd[n][i + 2]; }
};

// Parameters of the pair of steps `pair` for thread t of four: even, odd, even, odd, as an operand.
template <int BITS, class Words>
__device__ __forceinline__ uint4 pair_params(const Words& words, uint32_t base, int pair, int t) {
    if constexpr (BITS == 4 || BITS == 8) {
        const uint2 even = words.get8(base + uint32_t(pair * 64 + t * 8));
        const uint2 odd = words.get8(base + uint32_t(pair * 64 + t * 8 + 32));
        return make_uint4(even.x, odd.x, even.y, odd.y);
    } else {
        return words.get(base + uint32_t(pair * 64 + t * 16));
    }
}

// What turns sums into base-2 logits: column scales (softmax scale, q's power of two) and the running maximum.
template <int NT>
struct Columns {
    float scale[NT][2];
    float max[NT][2];
};

// x = (sum * 2^k) * scale + zero: NG groups of tiles have their own zero terms.
template <int BITS, int NG, int NT>
__device__ __forceinline__ void finish_scores(float (&x)[8][NT][4], const ZeroSums<NT>& zero, const Columns<NT>& col,
                                              int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float mine = zero.get(n, i);
#pragma unroll
            for (int g = 0; g < NG; ++g) {
                // Row g of the zero sums holds group g.
                const float z = NG == 1 ? mine : __shfl_sync(~0u, mine, 4 * g + (lane & 3));
                const float add = fmaf(z, col.scale[n][i], -col.max[n][i]);
#pragma unroll
                for (int j = g * 8 / NG; j < (g + 1) * 8 / NG; ++j) {
                    const float c = field_scale(BITS, j) * col.scale[n][i];
                    x[j][n][i] = fmaf(x[j][n][i], c, add);
                    x[j][n][i + 2] = fmaf(x[j][n][i + 2], c, add);
                }
            }
        }
}

// The same without zero terms. BITS of 16: the sums are plain.
template <int BITS, int NT>
__device__ __forceinline__ void finish_scores(float (&x)[8][NT][4], const Columns<NT>& col) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float c = (BITS == 16 ? 1.0f : field_scale(BITS, j)) * col.scale[n][i & 1];
                x[j][n][i] = fmaf(x[j][n][i], c, -col.max[n][i & 1]);
            }
}

inline StoreSpec grid_spec(int bits, Axis axis, int group, GridRule rule = GridRule::asym) {
    StoreSpec spec;
    spec.kind = StoreKind::grid;
    spec.bits = uint8_t(bits);
    spec.axis = axis;
    spec.group = uint16_t(group);
    spec.rule = rule;
    return spec;
}

// One width, groups of 128 / NG tokens.
template <int D_, int BITS_, int NG_>
struct KeyGrid {
    static constexpr int D = D_, BITS = BITS_, NG = NG_;
    static constexpr bool kTiered = false;
    static constexpr bool kLimbs = NG == 1 && (BITS == 2 || BITS == 4); // score_limbs reads them
    static constexpr bool kMean = false;                                // keys lie about a mean
    static constexpr bool kBasis = false; // queries for packed keys may differ from those for raw ones
    static constexpr uint32_t kCodes = D * 128 * BITS / 8, kPlane = D * 128 * 2 / 8;
    static constexpr uint32_t kScales = kCodes, kParams = NG * D * 2, kZeros = kScales + kParams;
    static constexpr uint32_t kBytes = (kZeros + kParams + kUnit - 1) / kUnit * kUnit;
    __host__ __device__ static uint32_t bytes(uint32_t) { return kBytes; }
    static StoreSpec spec() { return grid_spec(BITS, Axis::tokens, 128 / NG); }
    static constexpr uint32_t kScratch = 0, kTables = 0, kValueScales = 0, kTurnBytes = 0; // see KeyPlanes
    static std::vector<uint8_t> widths() { return {}; }

    template <int NT>
    __device__ static void score(const AttendParams&, uint32_t page, uint32_t, uint32_t q, int lane,
                                 const Columns<NT>& col, float (&x)[8][NT][4], const KeySpot&) {
        const SharedWords words{page};
        const int t = lane & 3, g = lane >> 2;
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT);
        const uint32_t zeros = kZeros + uint32_t((g & (NG - 1)) * D * 2);
        ZeroSums<NT> zero;
        zero.clear();
#pragma unroll
        for (int p = 0; p < D / 32; ++p) {
            uint32_t qe[NT][2], qo[NT][2], e[NT][2], o[NT][2];
            load_q_pair<NT>(qe, qo, q_row + uint32_t(p * 32 * 16 * NT));
            zero.add(pair_params<BITS>(words, zeros, p, t), qe, qo);
#pragma unroll
            for (int k = 0; k < NG; ++k) {
                const uint4 s = pair_params<BITS>(words, kScales + uint32_t(k * D * 2), p, t);
                scaled<NT>(e, qe, s.x, s.z);
                scaled<NT>(o, qo, s.y, s.w);
                if constexpr (NG == 1) {
                    mma_pair<BITS, 0, 4, NT>(x, words, 0, kPlane, p, 2, 0, lane, e, o, p == 0);
                    mma_pair<BITS, 0, 4, NT>(x + 4, words, 0, kPlane, p, 2, 1, lane, e, o, p == 0);
                } else if constexpr (NG == 2) {
                    mma_pair<BITS, 0, 4, NT>(x + 4 * k, words, 0, kPlane, p, 2, k, lane, e, o, p == 0);
                } else if (k % 2 == 0) {
                    mma_pair<BITS, 0, 2, NT>(x + 2 * k, words, 0, kPlane, p, 2, k / 2, lane, e, o, p == 0);
                } else {
                    mma_pair<BITS, 2, 4, NT>(x + 2 * (k - 1), words, 0, kPlane, p, 2, k / 2, lane, e, o, p == 0);
                }
            }
        }
        finish_scores<BITS, NG, NT>(x, zero, col, lane);
    }

    // Tiles 2 * quarter and the next, from global memory, as plain sums q . k (not yet scaled).
    template <int NT>
    __device__ static void score_quarter(const AttendParams&, const uint8_t* page, uint32_t, uint32_t q, int lane,
                                         int quarter, float (&x)[2][NT][4], const KeySpot&) {
        const GlobalWords words{page};
        const int t = lane & 3, group = quarter * NG / 4;
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT);
        ZeroSums<NT> zero;
        zero.clear();
#pragma unroll 1
        for (int p = 0; p < D / 32; ++p) {
            uint32_t qs[2][NT][2], s[NT][2];
            load_q_pair<NT>(qs[0], qs[1], q_row + uint32_t(p * 32 * 16 * NT));
            const uint32_t at = uint32_t(group * D * 2);
            zero.add(pair_params<BITS>(words, kZeros + at, p, t), qs[0], qs[1]);
            const uint4 sc = pair_params<BITS>(words, kScales + at, p, t);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                scaled<NT>(s, qs[e], e ? sc.y : sc.x, e ? sc.w : sc.z);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint4 a = tile_codes<BITS>(words, 0, kPlane, 2 * p + e, 2, 2 * quarter + j, lane);
                    mma_tile<NT>(x[j], a, ~0u, s);
                }
            }
        }
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
