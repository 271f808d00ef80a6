// A page of a uniform grid from 128 raw rows, by D threads (keys) or 128 (values), everything in registers.
//
// Bound: bytes. A page reads 32 KiB (D = 128) and writes 4.6 KiB at 2 bits; 16384 codes cost about seven instructions
// each, a third of what an SM can issue while the bytes pass. A warp owns a pair of steps, and the page's order makes
// every word that lane's own: no shuffles but those of the range.
#pragma once

#include "kernels/cuda/encode.cuh"

namespace kvmosaic::cuda {

// Keys: the warp's pair of steps is 32 channels; NG groups of 128 / NG tokens.
template <class T, int D, int BITS, int NG>
__device__ __forceinline__ void encode_key_page(const uint16_t* from, int64_t row_stride, uint8_t* page,
                                                uint32_t scales, uint32_t zeros) {
    constexpr float kTop = float((1 << BITS) - 1);
    constexpr uint32_t kPlane = D * 32;
    const int pair = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint16_t* rows = from + pair * 32 + 4 * t;
    PairWords<BITS, 2> words;
    words.clear();
    uint2 v[8][2][2]; // [tile][row half][step]
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int token = 16 * j + 4 * (g >> 1) + (g & 1) + 2 * half;
                v[j][half][e] = __ldcs(reinterpret_cast<const uint2*>(rows + token * row_stride + 16 * e));
            }
#pragma unroll
    for (int k = 0; k < NG; ++k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            uint2 low = v[k * 8 / NG][0][e], high = low;
#pragma unroll
            for (int j = k * 8 / NG; j < (k + 1) * 8 / NG; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint2 x = v[j][half][e];
                    low.x = T::min2(low.x, x.x), low.y = T::min2(low.y, x.y);
                    high.x = T::max2(high.x, x.x), high.y = T::max2(high.y, x.y);
                }
#pragma unroll
            for (int s = 4; s < 32; s <<= 1) {
                low.x = T::min2(low.x, __shfl_xor_sync(~0u, low.x, s)),
                low.y = T::min2(low.y, __shfl_xor_sync(~0u, low.y, s));
                high.x = T::max2(high.x, __shfl_xor_sync(~0u, high.x, s));
                high.y = T::max2(high.y, __shfl_xor_sync(~0u, high.y, s));
            }
            const float2 l0 = T::unpack(low.x), l1 = T::unpack(low.y), h0 = T::unpack(high.x), h1 = T::unpack(high.y);
            const DeviceGrid grid[4] = {make_device_grid(l0.x, h0.x, kTop), make_device_grid(l0.y, h0.y, kTop),
                                        make_device_grid(l1.x, h1.x, kTop), make_device_grid(l1.y, h1.y, kTop)};
            if (g == 0) {
                const int at = pair * 32 + 16 * e + 4 * t;
                __half s[4], z[4];
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    s[c] = grid[c].stored_s, z[c] = grid[c].stored_z;
                store_params<BITS>(page + scales + k * D * 2, at, s);
                store_params<BITS>(page + zeros + k * D * 2, at, z);
            }
#pragma unroll
            for (int j = k * 8 / NG; j < (k + 1) * 8 / NG; ++j)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 a = T::unpack(v[j][half][e].x), b = T::unpack(v[j][half][e].y);
                    const float x[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        words.put(e, c & 1, j & 3, j >> 2, half + 2 * (c >> 1),
                                  device_code_of(x[c], grid[c].z, grid[c].inverse, kTop));
                }
        }
    }
    words.store(page, kPlane, pair, 2, 0, lane);
}

// Values: the warp's pair of steps is 32 tokens; NG groups of D / NG channels.
template <class T, int D, int BITS, int NG>
__device__ __forceinline__ void encode_value_page(const uint16_t* from, int64_t row_stride, uint8_t* page,
                                                  uint32_t scales, uint32_t zeros) {
    constexpr float kTop = float((1 << BITS) - 1);
    constexpr uint32_t kPlane = D * 32;
    constexpr int kBlocks = D / 32; // of 32 channels
    const int pair = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint16_t* rows = from + 4 * g;
    const auto load = [&](int e, int k, int c) {
        return __ldcs(reinterpret_cast<const uint2*>(rows + (pair * 32 + 16 * e + 4 * t + k) * row_stride + 32 * c));
    };
    float z[2][4][NG], inverse[2][4][NG];
    uint2 v[2][4][kBlocks];
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int c = 0; c < kBlocks; ++c)
                v[e][k][c] = load(e, k, c);
#pragma unroll
    for (int n = 0; n < NG; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            __half s4[4], z4[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                uint32_t low = v[e][k][n * kBlocks / NG].x, high = low;
#pragma unroll
                for (int c = n * kBlocks / NG; c < (n + 1) * kBlocks / NG; ++c) {
                    low = T::min2(low, T::min2(v[e][k][c].x, v[e][k][c].y));
                    high = T::max2(high, T::max2(v[e][k][c].x, v[e][k][c].y));
                }
#pragma unroll
                for (int s = 4; s < 32; s <<= 1) {
                    low = T::min2(low, __shfl_xor_sync(~0u, low, s));
                    high = T::max2(high, __shfl_xor_sync(~0u, high, s));
                }
                const float2 l = T::unpack(low), h = T::unpack(high);
                const DeviceGrid grid = make_device_grid(fminf(l.x, l.y), fmaxf(h.x, h.y), kTop);
                z[e][k][n] = grid.z, inverse[e][k][n] = grid.inverse;
                s4[k] = grid.stored_s, z4[k] = grid.stored_z;
            }
            if (g == 0) {
                const int at = pair * 32 + 16 * e + 4 * t;
                store_params<BITS>(page + scales + n * 256, at, s4);
                store_params<BITS>(page + zeros + n * 256, at, z4);
            }
        }
#pragma unroll
    for (int h = 0; h < D / 64; ++h) {
        PairWords<BITS, 1> words;
        words.clear();
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    const int c = 2 * h + b, n = c * NG / kBlocks;
                    const float2 lo = T::unpack(v[e][k][c].x), hi = T::unpack(v[e][k][c].y);
                    const float x[4] = {lo.x, lo.y, hi.x, hi.y};
#pragma unroll
                    for (int y = 0; y < 4; ++y)
                        words.put(e, k & 1, 2 * b + (y >> 1), 0, (y & 1) + 2 * (k >> 1),
                                  device_code_of(x[y], z[e][k][n], inverse[e][k][n], kTop));
                }
        words.store(page, kPlane, pair, D / 64, h, lane);
    }
}

} // namespace kvmosaic::cuda
