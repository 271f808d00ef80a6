// Grids of the encoders: the numerics contract (src/kernels/grid.h) in the same fp32 operations and the same order, so
// that pages equal those of the CPU bit for bit.
#pragma once

#include "kernels/cuda/encode.h"
#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {

struct DeviceGrid {
    float z, inverse;
    __half stored_s, stored_z;
};

__device__ __forceinline__ __half half_saturated(float x) {
    return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

// midpoint: one bit, its levels at 1/4 and 3/4 of the range.
__device__ __forceinline__ DeviceGrid make_device_grid(float min, float max, float top, bool midpoint = false) {
    constexpr float kLimit = 0x1p125f; // kGridLimit
    min = __fadd_rn(fminf(fmaxf(min, -kLimit), kLimit), 0.0f);
    max = __fadd_rn(fminf(fmaxf(max, -kLimit), kLimit), 0.0f);
    DeviceGrid grid;
    grid.stored_s = half_saturated(__fdiv_rn(__fsub_rn(max, min), midpoint ? 2.0f : top));
    const float s = __half2float(grid.stored_s);
    const bool flat = s == 0.0f; // no fp16 number lies between 0 and kSmallestScale
    float z = min;
    if (flat && min != max)
        z = __fadd_rn(__fmul_rn(0.5f, min), __fmul_rn(0.5f, max));
    else if (!flat && midpoint)
        z = __fadd_rn(__fmul_rn(0.75f, min), __fmul_rn(0.25f, max));
    grid.stored_z = half_saturated(z);
    grid.z = __half2float(grid.stored_z);
    grid.inverse = flat ? 0.0f : __frcp_rn(s);
    return grid;
}

// Half to even by the addition of 1.5 * 2^23; clamping first gives the same code, as the limits are whole numbers. The
// code is what is above kCodeBase.
inline constexpr uint32_t kCodeBase = 0x4B400000u;
__device__ __forceinline__ uint32_t based_code_of(float x, float z, float inverse, float top) {
    const float t = __fmul_rn(__fsub_rn(x, z), inverse);
    return __float_as_uint(__fadd_rn(fminf(fmaxf(t, 0.0f), top), 12582912.0f));
}
__device__ __forceinline__ uint32_t device_code_of(float x, float z, float inverse, float top) {
    return based_code_of(x, z, inverse, top) & 0xFFu;
}

// Writes the parameters of four neighbours x .. x + 3 of a column array (x a multiple of 4) at their places.
template <int BITS>
__device__ __forceinline__ void store_params(uint8_t* array, int x, const __half (&v)[4]) {
    const uint32_t low = uint32_t(__half_as_ushort(v[0])) | uint32_t(__half_as_ushort(v[1])) << 16;
    const uint32_t high = uint32_t(__half_as_ushort(v[2])) | uint32_t(__half_as_ushort(v[3])) << 16;
    *reinterpret_cast<uint32_t*>(array + 2 * param_place(BITS, x)) = low;
    *reinterpret_cast<uint32_t*>(array + 2 * param_place(BITS, x + 2)) = high;
}

struct HalfRows {
    static __device__ __forceinline__ uint32_t min2(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("min.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) { return hmax2(a, b); }
    static __device__ __forceinline__ float2 unpack(uint32_t a) { return unpack_half2(a); }
    static __device__ __forceinline__ uint16_t to_half(uint32_t low16) { return uint16_t(low16); }
};
struct Bf16Rows {
    static __device__ __forceinline__ uint32_t min2(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("min.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {
        uint32_t d;
        asm("max.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
    static __device__ __forceinline__ float2 unpack(uint32_t a) { return unpack_bf162(a); }
    static __device__ __forceinline__ uint16_t to_half(uint32_t low16) {
        return __half_as_ushort(half_saturated(__uint_as_float(low16 << 16)));
    }
};

// Of both halves of two registers: the greater of all, and the least with its sign turned, as one register. T: HalfRows
// or Bf16Rows.
template <class T>
__device__ __forceinline__ uint32_t range_of(uint32_t low, uint32_t high) {
    low ^= 0x80008000u;
    return T::max2(__byte_perm(high, low, 0x5410), __byte_perm(high, low, 0x7632));
}

// Words of one pair of steps, two quads at most per 32 registers, filled code by code and written as they lie.
template <int BITS, int QUADS>
struct PairWords {
    static constexpr int kTwo = BITS == 2 || BITS == 3 ? 1 : BITS == 6 ? 3 : 0;
    static constexpr int kOne = BITS == 1 || BITS == 3 ? 1 : 0;
    static constexpr int kFour = BITS == 3 || BITS == 4 ? 1 : BITS == 8 ? 2 : 0; // 3 bits: split when they are stored
    // Codes that go to one word are added with their base, and the sum of the bases is taken off at the start.
    static constexpr bool kSingle = BITS <= 4;
    static constexpr uint32_t kFields = BITS == 1 ? 0x00FF00FFu : BITS == 2 ? 0x55555555u : 0x11111111u;
    static constexpr uint32_t kStart = kSingle ? 0u - kCodeBase * kFields : 0u;
    uint32_t two[kTwo ? kTwo : 1][QUADS][4], one[QUADS][4], four[kFour ? kFour : 1][2][QUADS][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < QUADS; ++h)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                one[h][r] = kStart;
#pragma unroll
                for (int p = 0; p < (kTwo ? kTwo : 1); ++p)
                    two[p][h][r] = kStart;
#pragma unroll
                for (int p = 0; p < (kFour ? kFour : 1); ++p)
                    four[p][0][h][r] = four[p][1][h][r] = kStart;
            }
    }
    // Step e of the pair, half i, tile f of quad h, register r: all constants after unrolling. Every place is filled
    // once, with a code and its base.
    __device__ __forceinline__ void put(int e, int i, int f, int h, int r, uint32_t code) {
        if constexpr (!kSingle) code &= 0xFFu;
        if constexpr (BITS != 3) {
#pragma unroll
            for (int p = 0; p < kTwo; ++p)
                two[p][h][r] += (BITS == 2 ? code : (code >> (2 * p)) & 3u) << (16 * i + 8 * e + 2 * f);
            if (kOne) one[h][r] += code << (16 * i + 2 * f + e);
        }
#pragma unroll
        for (int p = 0; p < kFour; ++p)
            four[p][e][h][r] += (kFour == 1 ? code : (code >> (4 * p)) & 15u) << (16 * i + 4 * f);
    }
    // Fields of 4 bits in each half to fields of 2 in its low byte.
    static __device__ __forceinline__ uint32_t narrow(uint32_t w) {
        w = (w | w >> 2) & 0x0F0F0F0Fu;
        return (w | w >> 4) & 0x00FF00FFu;
    }
    // `quads` of the page; first: first quad of these words. Planes of 4 bits may end after one step.
    __device__ __forceinline__ void store(uint8_t* codes, uint32_t plane, int pair, int quads, int first, int lane,
                                          int steps = 2) const {
#pragma unroll
        for (int h = 0; h < QUADS; ++h) {
            const auto at = [&](uint32_t base, int set) {
                return codes + base + uint32_t(set * quads + first + h) * kSetBytes + uint32_t(lane) * 16;
            };
            uint32_t low[4], high[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                low[r] = two[0][h][r], high[r] = one[h][r];
                if constexpr (BITS == 3) {
                    const uint32_t w0 = four[0][0][h][r], w1 = four[0][1][h][r];
                    low[r] = narrow(w0 & 0x33333333u) | narrow(w1 & 0x33333333u) << 8;
                    high[r] = narrow(w0 >> 2 & 0x11111111u) | narrow(w1 >> 2 & 0x11111111u) << 1;
                }
            }
            if constexpr (kTwo > 0) *reinterpret_cast<uint4*>(at(0, pair)) = make_uint4(low[0], low[1], low[2], low[3]);
#pragma unroll
            for (int p = 1; p < kTwo; ++p)
                *reinterpret_cast<uint4*>(at(uint32_t(p) * plane, pair)) =
                    make_uint4(two[p][h][0], two[p][h][1], two[p][h][2], two[p][h][3]);
            if (kOne) {
                // Two pairs of steps share these words; each owns a byte of every half.
                uint8_t* to = at(uint32_t(kTwo) * plane, pair >> 1) + (pair & 1);
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    to[4 * r] = uint8_t(high[r]), to[4 * r + 2] = uint8_t(high[r] >> 16);
            }
#pragma unroll
            for (int p = 0; p < (BITS == 3 ? 0 : kFour); ++p)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (e < steps)
                        *reinterpret_cast<uint4*>(at(uint32_t(2 * p) * plane, 2 * pair + e)) =
                            make_uint4(four[p][e][h][0], four[p][e][h][1], four[p][e][h][2], four[p][e][h][3]);
        }
    }
};

template <class ROWS>
struct RowsAs {
    using Type = ROWS;
};
template <int VALUE>
struct Dim {
    static constexpr int value = VALUE;
};
// Calls launch(RowsAs<rows>, Dim<head size>) for the head sizes of this build's set.
template <class Launch>
cudaError_t with_rows(ElementType type, int dim, Launch launch) {
    const auto typed = [&](auto size) {
        return type == ElementType::bf16 ? launch(RowsAs<Bf16Rows>(), size) : launch(RowsAs<HalfRows>(), size);
    };
    switch (dim) {
    case 128:
        return typed(Dim<128>());
#ifndef KVMOSAIC_CUDA_SMOKE
    case 64:
        return typed(Dim<64>());
    case 256:
        return typed(Dim<256>());
#endif
    default:
        return cudaErrorNotSupported;
    }
}

} // namespace kvmosaic::cuda
