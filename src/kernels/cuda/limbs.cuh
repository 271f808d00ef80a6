// Scores and mix of packed pages by 8-bit integer products, for KV heads with few query columns.
//
// One product (m16n8k32) takes twice the depth of one of fp16, and one AND makes four codes of its operand instead of
// two: half the instructions a code. In exchange a query column takes two of the eight columns, for the two limbs of
// its numbers: scaled queries or probabilities of a page, relative to their largest, as high + low / 254 with |high| up
// to 64 and |low| up to 127, that is 14 bits and a sign; sums are exact. Column 2h + i of a tile is limb i of query
// column h.
//
// The codes' byte order serves both: a word's bytes are steps (even, odd) of depths (2t, 2t + 1), so a masked word is
// four neighbours in k of the wider product, and the other operand is put in the same order by one byte permute.
#pragma once

#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/score.cuh"

namespace kvmosaic::cuda {

// Keys whose scores are made here too; those of others stay with fp16 products, on doubled columns.
template <class K>
inline constexpr bool kScoresByLimbs = requires {
    requires K::kLimbs;
};

__device__ __forceinline__ void imma_tile(int (&d)[4], const uint4& w, uint32_t mask, const uint32_t (&b)[2],
                                          bool first) {
    const uint32_t a0 = w.x & mask, a1 = w.y & mask, a2 = w.z & mask, a3 = w.w & mask;
    if (first)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]), "r"(0));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ uint32_t hmax2_magnitude(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("{.reg .b32 m;\nabs.f16x2 m,%2;\nmax.f16x2 %0,%1,m;}" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Sums of b * offset for a pair of steps by one product: the two columns of a query column take the two steps, and the
// halves of the operand's rows their offsets (ZeroSums), so of `sum` [0] and [3] count, both of this lane's column.
__device__ __forceinline__ void add_offsets(float (&sum)[4], const uint4& z, const uint32_t (&even)[2],
                                            const uint32_t (&odd)[2], int lane) {
    const bool second = lane & 4;
    mma16(sum, z.x, z.y, z.z, z.w, second ? odd[0] : even[0], second ? odd[1] : even[1]);
}

// Operands of a pair of steps times their scales, in the order of pair_params.
__device__ __forceinline__ void scale_pair(uint32_t (&v)[4], const uint32_t (&even)[2], const uint32_t (&odd)[2],
                                           const uint4& s) {
    v[0] = hmul2(even[0], s.x), v[1] = hmul2(even[1], s.z);
    v[2] = hmul2(odd[0], s.y), v[3] = hmul2(odd[1], s.w);
}

__device__ __forceinline__ float limb_sum(int high, int low) { return float(254 * high + low); }

// Numbers of STEPS pairs of steps of one column as limbs. v: fp16 operands of the even step {0, 1} and the odd {2, 3}.
// Returns what a sum of limbs (limb_sum) is to be multiplied with, for the column that this lane's *sums* are
// of (2t and 2t + 1, that is query column t).
template <int STEPS>
__device__ __forceinline__ float to_limbs(const uint32_t (&v)[STEPS][4], uint32_t (&b)[STEPS][2], int lane) {
    constexpr uint32_t kMagic = 0x66006600u; // 1536: an integer beside it lies in the low byte, as two's complement
    uint32_t tops[4] = {}, top;
#pragma unroll
    for (int p = 0; p < STEPS; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            tops[i] = hmax2_magnitude(tops[i], v[p][i]);
    top = hmax2(hmax2(tops[0], tops[1]), hmax2(tops[2], tops[3]));
    top = hmax2(top, __shfl_xor_sync(~0u, top, 1));
    top = hmax2(top, __shfl_xor_sync(~0u, top, 2));
    const uint32_t largest = max(top & 0xFFFFu, top >> 16);
    const uint32_t exponent = 35u - min(max(largest >> 10, 5u), 30u); // biased; brings the largest below 64
    const uint32_t up = exponent * 0x04000400u;
    const bool low = lane & 4; // this lane's column is that of the low limb
    const uint32_t minus_one = low ? 0xBC00BC00u : 0u, magic = low ? kMagic : 0u;
    const uint32_t step = low ? 0x5BF05BF0u : half2_power(0); // 254
    const auto limb = [&](uint32_t x) {
        const uint32_t high = hfma2(hfma2(x, up, kMagic), minus_one, magic); // minus the high limb, or 0
        return hfma2(hfma2(x, up, high), step, kMagic);
    };
#pragma unroll
    for (int p = 0; p < STEPS; ++p) {
        b[p][0] = __byte_perm(limb(v[p][0]), limb(v[p][2]), 0x6240);
        b[p][1] = __byte_perm(limb(v[p][1]), limb(v[p][3]), 0x6240);
    }
    return __uint_as_float((142u - __shfl_sync(~0u, exponent, 8 * (lane & 3))) << 23) * (1.0f / 254.0f);
}

// Four tiles of a quad times a pair of steps.
template <int BITS, class Words>
__device__ __forceinline__ void imma_pair(int (*d)[4], const Words& words, int pair, int quads, int quad, int lane,
                                          const uint32_t (&b)[2], bool first) {
    static_assert(BITS == 2 || BITS == 4);
    const uint32_t at = uint32_t(lane) * 16;
    if constexpr (BITS == 2) {
        const uint4 w = words.get(uint32_t(pair * quads + quad) * kSetBytes + at);
#pragma unroll
        for (int f = 0; f < 4; ++f)
            imma_tile(d[f], w, 0x03030303u << (2 * f), b, first);
    } else {
        const uint4 e = words.get(uint32_t(2 * pair * quads + quad) * kSetBytes + at);
        const uint4 o = words.get(uint32_t((2 * pair + 1) * quads + quad) * kSetBytes + at);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t pick = half ? 0x7351 : 0x6240;
            const uint4 w = make_uint4(__byte_perm(e.x, o.x, pick), __byte_perm(e.y, o.y, pick),
                                       __byte_perm(e.z, o.z, pick), __byte_perm(e.w, o.w, pick));
            imma_tile(d[2 * half], w, 0x0F0F0F0Fu, b, first);
            imma_tile(d[2 * half + 1], w, 0xF0F0F0F0u, b, first);
        }
    }
}

// As KeyGrid::score, of query columns: x[j][n][0] and [2] are rows g and g + 8 of tile j, column 4n + t. q: table whose
// columns 2h and 2h + 1 are query column h.
template <class K, int NT>
__device__ __forceinline__ void score_limbs(uint32_t page, uint32_t q, int lane, const Columns<NT>& col,
                                            float (&x)[8][NT][4]) {
    static_assert(K::NG == 1);
    constexpr int kPairs = K::D / 32;
    const SharedWords words{page};
    const int t = lane & 3;
    const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT);
    uint32_t v[NT][kPairs][4], b[NT][kPairs][2];
    float zero[NT][4] = {};
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        uint32_t qe[NT][2], qo[NT][2];
        load_q_pair<NT>(qe, qo, q_row + uint32_t(p * 32 * 16 * NT));
        const uint4 z = pair_params<K::BITS>(words, K::kZeros, p, t);
        const uint4 s = pair_params<K::BITS>(words, K::kScales, p, t);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            scale_pair(v[n][p], qe[n], qo[n], s);
            add_offsets(zero[n], z, qe[n], qo[n], lane);
        }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float unit = to_limbs<kPairs>(v[n], b[n], lane) * col.scale[n][0];
        int d[8][4];
#pragma unroll
        for (int p = 0; p < kPairs; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                imma_pair<K::BITS>(d + 4 * h, words, p, 2, h, lane, b[n][p], p == 0);
        const float add = fmaf(zero[n][0] + zero[n][3], col.scale[n][0], -col.max[n][0]);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float c = unit * exp2_of(-field_position(K::BITS, j));
            x[j][n][0] = fmaf(limb_sum(d[j][0], d[j][1]), c, add);
            x[j][n][2] = fmaf(limb_sum(d[j][2], d[j][3]), c, add);
        }
    }
}

// As ValueGrid::mix. p: operands in which columns 2h and 2h + 1 are query column h; of the sums o[.][.][0] and [2]
// count, zero.even[.][0] and [3].
template <class V, int NT>
__device__ __forceinline__ void mix_limbs(uint32_t page, uint32_t ones, int lane, const uint32_t (&p)[8][NT][2],
                                          MixState<V::D, NT>& state) {
    static_assert(V::NG == 1);
    const SharedWords words{page};
    const int t = lane & 3, g = lane >> 2;
    const SharedWords zeros{g == 7 ? ones : page + V::kZeros};
    uint32_t v[NT][4][4], b[NT][4][2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint4 z = pair_params<V::BITS>(zeros, 0, k, t);
        const uint4 s = pair_params<V::BITS>(words, V::kScales, k, t);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            scale_pair(v[n][k], p[2 * k][n], p[2 * k + 1][n], s);
            add_offsets(state.zero.even[n], z, p[2 * k][n], p[2 * k + 1][n], lane);
        }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        // The sums hold codes as fp16 operands see them, 2^-24 of their fields.
        const float unit = to_limbs<4>(v[n], b[n], lane) * exp2_of(-24);
        int d[V::D / 16][4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int h = 0; h < V::kQuads; ++h)
                imma_pair<V::BITS>(d + 4 * h, words, k, V::kQuads, h, lane, b[n][k], k == 0);
#pragma unroll
        for (int j = 0; j < V::D / 16; ++j) {
            auto& o = state.o[j][n];
            o[0] = fmaf(limb_sum(d[j][0], d[j][1]), unit, o[0]);
            o[2] = fmaf(limb_sum(d[j][2], d[j][3]), unit, o[2]);
        }
    }
}

// Around fp16 products, which take all columns and both sets of offset sums.
template <int D, int NT>
__device__ __forceinline__ void open_columns(MixState<D, NT>& state, float (&zero)[NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        zero[n][0] = state.zero.even[n][0], zero[n][1] = state.zero.even[n][3];
#pragma unroll
        for (int j = 0; j < D / 16; ++j)
            state.o[j][n][1] = state.o[j][n][0], state.o[j][n][3] = state.o[j][n][2];
    }
    state.zero.clear();
}
template <int D, int NT>
__device__ __forceinline__ void close_columns(MixState<D, NT>& state, const float (&zero)[NT][2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
        state.zero.even[n][0] = zero[n][0] + state.zero.get(n, 0), state.zero.even[n][3] = zero[n][1];
}

// Before results are taken: the offset sums of both steps where ZeroSums::get looks for them.
template <int D, int NT>
__device__ __forceinline__ void finish_offsets(MixState<D, NT>& state) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
        state.zero.odd[n][2] = state.zero.even[n][3];
}

} // namespace kvmosaic::cuda
