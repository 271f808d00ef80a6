// Code words of a page as operands of the tensor cores.
//
// A masked field of a 16-bit half is a subnormal fp16 number: code * 2^(position - 24). The multiplication of the
// tensor cores is exact for subnormals, so a code needs one AND for two of them and no conversion; the power of two of
// a tile is the same for all its codes and leaves with the sums.
#pragma once

#include "kernels/cuda/order.h"
#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {

// Bit position of tile f's field in its byte (2-bit and 1-bit planes) or in its byte pair (4-bit planes).
__host__ __device__ constexpr int field_position(int bits, int tile) {
    return bits == 4 || bits == 8 ? 4 * (tile & 1) : 2 * (tile & 3);
}
__device__ __forceinline__ float field_scale(int bits, int tile) { return exp2_of(24 - field_position(bits, tile)); }

__device__ __forceinline__ uint4 shift_right(const uint4& w, int by) {
    return make_uint4(w.x >> by, w.y >> by, w.z >> by, w.w >> by);
}

// Words from shared memory (address of the page's byte 0 in .base) or from global memory.
struct SharedWords {
    uint32_t base;
    __device__ __forceinline__ uint4 get(uint32_t offset) const { return load_shared16(base + offset); }
    __device__ __forceinline__ uint2 get8(uint32_t offset) const { return load_shared8(base + offset); }
    __device__ __forceinline__ uint32_t get4(uint32_t offset) const { return load_shared4(base + offset); }
    __device__ __forceinline__ uint32_t byte(uint32_t offset) const { return load_shared_byte(base + offset); }
    __device__ __forceinline__ float half(uint32_t offset) const {
        return __half2float(__ushort_as_half(uint16_t(load_shared_half(base + offset))));
    }
};
struct GlobalWords {
    const uint8_t* base;
    __device__ __forceinline__ uint4 get(uint32_t offset) const {
        return *reinterpret_cast<const uint4*>(base + offset);
    }
    __device__ __forceinline__ uint2 get8(uint32_t offset) const {
        return *reinterpret_cast<const uint2*>(base + offset);
    }
    __device__ __forceinline__ uint32_t get4(uint32_t offset) const {
        return *reinterpret_cast<const uint32_t*>(base + offset);
    }
    __device__ __forceinline__ uint32_t byte(uint32_t offset) const { return base[offset]; }
    __device__ __forceinline__ float half(uint32_t offset) const {
        return __half2float(*reinterpret_cast<const __half*>(base + offset));
    }
};

template <int TILES, int NT>
__device__ __forceinline__ void clear(float (&x)[TILES][NT][4]) {
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[j][n][i] = 0.0f;
}

// What sums begin with: nothing, or a number for each column, given for field position 0.
struct FromZero {};
template <int NT>
struct FromColumns {
    float at[NT][2];
};

template <int NT>
__device__ __forceinline__ void mma_tile(float (&x)[NT][4], const uint4& w, uint32_t mask, const uint32_t (&b)[NT][2],
                                         bool first = false) {
    const uint32_t a0 = w.x & mask, a1 = w.y & mask, a2 = w.z & mask, a3 = w.w & mask;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (first)
            mma16_first(x[n], a0, a1, a2, a3, b[n][0], b[n][1]);
        else
            mma16(x[n], a0, a1, a2, a3, b[n][0], b[n][1]);
    }
}
// position: of the tile's field.
template <int NT>
__device__ __forceinline__ void mma_tile(float (&x)[NT][4], const uint4& w, uint32_t mask, const uint32_t (&b)[NT][2],
                                         bool first, FromZero, int) {
    mma_tile<NT>(x, w, mask, b, first);
}
template <int NT>
__device__ __forceinline__ void mma_tile(float (&x)[NT][4], const uint4& w, uint32_t mask, const uint32_t (&b)[NT][2],
                                         bool first, const FromColumns<NT>& from, int position) {
    if (!first) return mma_tile<NT>(x, w, mask, b);
    const float f = exp2_of(position);
#pragma unroll
    for (int n = 0; n < NT; ++n)
        mma16_from(x[n], w.x & mask, w.y & mask, w.z & mask, w.w & mask, b[n][0], b[n][1], from.at[n][0] * f,
                   from.at[n][1] * f);
}

template <int NT>
__device__ __forceinline__ void scaled(uint32_t (&to)[NT][2], const uint32_t (&b)[NT][2], uint32_t s0, uint32_t s1) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
        to[n][0] = hmul2(b[n][0], s0), to[n][1] = hmul2(b[n][1], s1);
}

// fp16 2^e twice in a word.
__host__ __device__ constexpr uint32_t half2_power(int e) { return uint32_t((15 + e) << 10) * 0x10001u; }

// Tiles F0 .. F1 - 1 of one quad times a pair of steps. `offset` is that of the tier's codes, `plane` the bytes of a
// 2-bit plane of the tier; `even`, `odd` are the operands of the two steps. first: x holds nothing yet, and begins with
// `begin`.
template <int BITS, int F0, int F1, int NT, class Words, class From = FromZero>
__device__ __forceinline__ void mma_pair(float (*x)[NT][4], const Words& words, uint32_t offset, uint32_t plane,
                                         int pair, int quads, int quad, int lane, const uint32_t (&even)[NT][2],
                                         const uint32_t (&odd)[NT][2], bool first = false, const From& begin = {}) {
    const uint32_t at = uint32_t(lane) * 16;
    const auto two = [&](uint32_t from, const uint32_t(&be)[NT][2], const uint32_t(&bo)[NT][2], bool start = false) {
        const uint4 w = words.get(from + uint32_t(pair * quads + quad) * kSetBytes + at);
        const uint4 s = shift_right(w, 8);
#pragma unroll
        for (int f = F0; f < F1; ++f)
            mma_tile<NT>(x[f], w, 0x00030003u << (2 * f), be, start, begin, 2 * f);
#pragma unroll
        for (int f = F0; f < F1; ++f)
            mma_tile<NT>(x[f], s, 0x00030003u << (2 * f), bo);
    };
    const auto one = [&](uint32_t from, const uint32_t(&be)[NT][2], const uint32_t(&bo)[NT][2], bool start = false) {
        const uint4 w =
            shift_right(words.get(from + uint32_t((pair >> 1) * quads + quad) * kSetBytes + at), 8 * (pair & 1));
#pragma unroll
        for (int f = F0; f < F1; ++f)
            mma_tile<NT>(x[f], w, 0x00010001u << (2 * f), be, start, begin, 2 * f);
#pragma unroll
        for (int f = F0; f < F1; ++f)
            mma_tile<NT>(x[f], w, 0x00020002u << (2 * f), bo);
    };
    const auto four = [&](uint32_t from, int step, const uint32_t(&b)[NT][2], bool start = false) {
        const uint4 w = words.get(from + uint32_t(step * quads + quad) * kSetBytes + at);
        const uint4 s = shift_right(w, 8);
#pragma unroll
        for (int f = F0; f < F1; ++f)
            mma_tile<NT>(x[f], f < 2 ? w : s, f & 1 ? 0x00F000F0u : 0x000F000Fu, b, start, begin, 4 * (f & 1));
    };
    uint32_t e[NT][2], o[NT][2];
    if constexpr (BITS == 1) {
        scaled<NT>(o, odd, half2_power(-1), half2_power(-1)); // its field lies one bit higher
        one(offset, even, o, first);
    } else if constexpr (BITS == 2) {
        two(offset, even, odd, first);
    } else if constexpr (BITS == 3) {
        two(offset, even, odd, first);
        scaled<NT>(e, even, half2_power(2), half2_power(2));
        scaled<NT>(o, odd, half2_power(1), half2_power(1));
        one(offset + plane, e, o);
    } else if constexpr (BITS == 4) {
        four(offset, 2 * pair, even, first);
        four(offset, 2 * pair + 1, odd);
    } else if constexpr (BITS == 6) {
        two(offset, even, odd, first);
#pragma unroll
        for (int p = 1; p < 3; ++p) {
            scaled<NT>(e, even, half2_power(2 * p), half2_power(2 * p));
            scaled<NT>(o, odd, half2_power(2 * p), half2_power(2 * p));
            two(offset + uint32_t(p) * plane, e, o);
        }
    } else {
        static_assert(BITS == 8);
        four(offset, 2 * pair, even, first);
        four(offset, 2 * pair + 1, odd);
        scaled<NT>(e, even, half2_power(4), half2_power(4));
        scaled<NT>(o, odd, half2_power(4), half2_power(4));
        four(offset + 2 * plane, 2 * pair, e);
        four(offset + 2 * plane, 2 * pair + 1, o);
    }
}

// The same for one step of a tier of 4 or 8 bits, whose granule is one step.
template <int BITS, int NT, class Words>
__device__ __forceinline__ void mma_step(float (*x)[NT][4], const Words& words, uint32_t offset, uint32_t plane,
                                         int step, int quads, int quad, int lane, const uint32_t (&b)[NT][2]) {
    static_assert(BITS == 4 || BITS == 8);
#pragma unroll
    for (int p = 0; p < BITS / 4; ++p) {
        uint32_t c[NT][2];
        scaled<NT>(c, b, half2_power(4 * p), half2_power(4 * p));
        const uint4 w = words.get(offset + uint32_t(2 * p) * plane + uint32_t(step * quads + quad) * kSetBytes +
                                  uint32_t(lane) * 16);
        const uint4 s = shift_right(w, 8);
#pragma unroll
        for (int f = 0; f < 4; ++f)
            mma_tile<NT>(x[f], f < 2 ? w : s, f & 1 ? 0x00F000F0u : 0x000F000Fu, c);
    }
}

// Codes of one tile and step as whole numbers in the low bits of each half (position 0): the slow form for any tile.
template <int BITS, class Words>
__device__ __forceinline__ uint4 tile_codes(const Words& words, uint32_t offset, uint32_t plane, int step, int quads,
                                            int tile, int lane) {
    const int quad = tile >> 2, f = tile & 3;
    const uint32_t at = uint32_t(lane) * 16;
    const auto field = [&](uint32_t from, int set, int shift, uint32_t mask) {
        uint4 w = shift_right(words.get(from + uint32_t(set * quads + quad) * kSetBytes + at), shift);
        w.x &= mask, w.y &= mask, w.z &= mask, w.w &= mask;
        return w;
    };
    const auto two = [&](uint32_t from) { return field(from, step >> 1, 8 * (step & 1) + 2 * f, 0x00030003u); };
    const auto one = [&](uint32_t from) {
        return field(from, step >> 2, 8 * ((step >> 1) & 1) + 2 * f + (step & 1), 0x00010001u);
    };
    const auto four = [&](uint32_t from) { return field(from, step, 4 * f, 0x000F000Fu); };
    const auto join = [](uint4 low, const uint4& high, int by) {
        low.x |= high.x << by, low.y |= high.y << by, low.z |= high.z << by, low.w |= high.w << by;
        return low;
    };
    if constexpr (BITS == 1)
        return one(offset);
    else if constexpr (BITS == 2)
        return two(offset);
    else if constexpr (BITS == 3)
        return join(two(offset), one(offset + plane), 2);
    else if constexpr (BITS == 4)
        return four(offset);
    else if constexpr (BITS == 6)
        return join(join(two(offset), two(offset + plane), 2), two(offset + 2 * plane), 4);
    else
        return join(four(offset), four(offset + 2 * plane), 4);
}

} // namespace kvmosaic::cuda
