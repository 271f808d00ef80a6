// 32 rows that are not part of a full packed page: raw on one side or both, or in an open page. Read straight from
// global memory into operands; a warp has few of them.
#pragma once

#include "kernels/cuda/attend.h"
#include "kernels/cuda/mix.cuh"
#include "kernels/cuda/score.cuh"

namespace kvmosaic::cuda {

struct QuarterPlace {
    int start = 0;         // first row of the 32, counted from the start of the sequence
    int low = 0, high = 0; // rows of it that belong to this item
    bool key_raw = true, value_raw = true, front = false;
    int page = 0, quarter = 0; // of packed sides
};

__device__ __forceinline__ QuarterPlace quarter_place(const SequencePlan& plan, int index) {
    const SequenceState& s = plan.state;
    QuarterPlace at;
    const int in_front = (s.front + kQuarter - 1) / kQuarter;
    if (index < in_front) {
        at.start = kQuarter * index;
        at.high = min(kQuarter, s.front - at.start);
        at.front = true;
        return at;
    }
    index -= in_front;
    const int end = max(s.rows - s.front, 0);
    const int both = min(min(s.key_packed, s.value_packed), end), one = min(max(s.key_packed, s.value_packed), end);
    int low = plan.pages * kPageTokens;
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        const int high = part == 0 ? both : part == 1 ? one : end;
        if (high > low) {
            const int first = low / kQuarter, count = (high + kQuarter - 1) / kQuarter - first;
            if (index < count) {
                const int block = kQuarter * (first + index);
                at.start = s.front + block;
                at.low = max(low - block, 0);
                at.high = min(high - block, kQuarter);
                at.key_raw = part == 2 || (part == 1 && s.key_packed < s.value_packed);
                at.value_raw = part == 2 || (part == 1 && s.key_packed > s.value_packed);
                at.page = block / kPageTokens;
                at.quarter = block % kPageTokens / kQuarter;
                return at;
            }
            index -= count;
            low = high;
        }
    }
    return at; // a sequence without rows: nothing
}

// Address of the first of 32 raw rows, of one head; they never wrap.
__device__ __forceinline__ const uint8_t* raw_block(const RawRows& rows, int64_t head, const SequenceState& state,
                                                    const QuarterPlace& at, int row_bytes) {
    const int first = at.front ? at.start : (at.start - state.front) % rows.capacity;
    return static_cast<const uint8_t*>(rows.base) + (head * rows.capacity + first) * row_bytes;
}

// Two bf16 become two fp16; what does not fit saturates.
__device__ __forceinline__ uint32_t bf16_to_half2(uint32_t v) {
    const float2 f = unpack_bf162(v);
    return pack_half2(fminf(fmaxf(f.x, -65504.0f), 65504.0f), fminf(fmaxf(f.y, -65504.0f), 65504.0f));
}

// Sums q . k of 32 raw keys.
template <int D, int NT>
__device__ __forceinline__ void score_raw(const uint8_t* block, const QuarterPlace& at, bool bf16, uint32_t q, int lane,
                                          float (&x)[2][NT][4]) {
    const int g = lane >> 2, t = lane & 3, matrix = lane >> 3, r = lane & 7;
    // Lane t reads 8 neighbours; their order among the k of two steps is that of the gather below.
    const uint32_t q_row = q + uint32_t((8 * (r >> 1) + (r & 1) + 2 * matrix) * 16 * NT);
    const uint8_t* row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int token = 16 * (i >> 1) + place_of_row(g + 8 * (i & 1));
        row[i] = block + min(token, at.high - 1) * (D * 2) + t * 16;
    }
#pragma unroll
    for (int p = 0; p < D / 32; ++p) {
        uint32_t qe[NT][2], qo[NT][2];
        load_q_pair<NT>(qe, qo, q_row + uint32_t(p * 32 * 16 * NT));
        uint4 k[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            k[i] = *reinterpret_cast<const uint4*>(row[i] + p * 64);
            if (bf16)
                k[i] = make_uint4(bf16_to_half2(k[i].x), bf16_to_half2(k[i].y), bf16_to_half2(k[i].z),
                                  bf16_to_half2(k[i].w));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mma16(x[j][n], k[2 * j].x, k[2 * j + 1].x, k[2 * j].y, k[2 * j + 1].y, qe[n][0], qe[n][1]);
                mma16(x[j][n], k[2 * j].z, k[2 * j + 1].z, k[2 * j].w, k[2 * j + 1].w, qo[n][0], qo[n][1]);
            }
    }
}

// o += p V for 32 raw values. The sums of a packed store carry powers of two, which are exact to take off and put back.
template <class V, int NT>
__device__ __forceinline__ void mix_raw(const uint8_t* block, const QuarterPlace& at, bool bf16, int lane,
                                        const uint32_t (&p)[2][NT][2], MixState<V::D, NT>& state) {
    const int g = lane >> 2, t = lane & 3;
    const uint32_t one = g == 7 ? kOne2 : 0u;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        mma16(state.zero.even[n], one, 0u, one, 0u, p[0][n][0], p[0][n][1]);
        mma16(state.zero.even[n], one, 0u, one, 0u, p[1][n][0], p[1][n][1]);
    }
    const uint8_t* row[8];
    bool live[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int token = 16 * (i >> 2) + 4 * t + (i & 3);
        live[i] = token >= at.low && token < at.high; // others may hold anything, NaN too
        row[i] = block + min(token, at.high - 1) * (V::D * 2) + g * 8;
    }
#pragma unroll
    for (int c = 0; c < V::D / 32; ++c) { // 32 channels: tiles 2c and 2c + 1
        uint2 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = live[i] ? *reinterpret_cast<const uint2*>(row[i] + c * 64) : make_uint2(0u, 0u);
            if (bf16) v[i] = make_uint2(bf16_to_half2(v[i].x), bf16_to_half2(v[i].y));
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float f = V::scale_of(2 * c + j);
            const float back = __uint_as_float((254u << 23) - __float_as_uint(f)); // 1 / f of a power of two
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float(&o)[4] = state.o[2 * c + j][n];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    o[i] *= f;
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    uint32_t w[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        w[i] = j ? v[4 * s + i].y : v[4 * s + i].x;
                    mma16(o, __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                          __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632), p[s][n][0], p[s][n][1]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    o[i] *= back;
            }
        }
    }
}

} // namespace kvmosaic::cuda
