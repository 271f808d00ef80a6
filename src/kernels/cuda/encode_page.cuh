// A page of a uniform grid from 128 raw rows, by D threads (keys) or 128 (values), everything in registers.
//
// Bound: bytes. A page reads 32 KiB (D = 128) and writes 4.6 KiB at 2 bits; 16384 codes cost about six instructions
// each, a third of what an SM can issue while the bytes pass. A warp owns a pair of steps, and the page's order makes
// every word that lane's own: no shuffles but those of the range. ROWS: GlobalRows or StagedRows (row_ring.cuh).
#pragma once

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/row_ring.cuh"

namespace kvmosaic::cuda {

// Keys: the warp's pair of steps is 32 channels; NG groups of 128 / NG tokens.
template <class T, int D, int BITS, int NG, class ROWS>
__device__ __forceinline__ void encode_key_page(const ROWS& from, uint8_t* page, uint32_t scales, uint32_t zeros) {
    constexpr float kTop = float((1 << BITS) - 1);
    constexpr uint32_t kPlane = D * 32;
    const int pair = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const ROWS rows = from.from(4 * (g >> 1) + (g & 1), pair * 32 + 4 * t);
    PairWords<BITS, 2> words;
    words.clear();
    uint2 v[8][2][2]; // [tile][row half][step]
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                v[j][half][e] = rows.get(16 * j + 2 * half, 16 * e);
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
                                  based_code_of(x[c], grid[c].z, grid[c].inverse, kTop));
                }
        }
    }
    words.store(page, kPlane, pair, 2, 0, lane);
}

// Values: the warp's pair of steps is 32 tokens; NG groups of D / NG channels.
template <class T, int D, int BITS, int NG, class ROWS>
__device__ __forceinline__ void encode_value_page(const ROWS& from, uint8_t* page, uint32_t scales, uint32_t zeros) {
    constexpr float kTop = float((1 << BITS) - 1);
    constexpr uint32_t kPlane = D * 32;
    constexpr int kBlocks = D / 32; // of 32 channels
    const int pair = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const ROWS rows = from.from(pair * 32 + 4 * t, 4 * g);
    float z[2][4][NG], inverse[2][4][NG];
    uint2 v[2][4][kBlocks];
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int c = 0; c < kBlocks; ++c)
                v[e][k][c] = rows.get(16 * e + k, 32 * c);
                // Eight tokens, whose parts lie in eight threads: each thread ends with the range of one, and makes its
                // grid for all.
#pragma unroll
    for (int n = 0; n < NG; ++n) {
        uint32_t range[8];
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            const auto& token = v[m >> 2][m & 3];
            uint32_t low = token[n * kBlocks / NG].x, high = low;
#pragma unroll
            for (int c = n * kBlocks / NG; c < (n + 1) * kBlocks / NG; ++c) {
                low = T::min2(low, T::min2(token[c].x, token[c].y));
                high = T::max2(high, T::max2(token[c].x, token[c].y));
            }
            range[m] = range_of<T>(low, high);
        }
#pragma unroll
        for (int s = 4; s >= 1; s >>= 1)
#pragma unroll
            for (int m = 0; m < s; ++m) {
                const bool upper = (g & s) != 0;
                const uint32_t other = __shfl_xor_sync(~0u, upper ? range[m] : range[m + s], 4 * s);
                range[m] = T::max2(upper ? range[m + s] : range[m], other);
            }
        const float2 ends = T::unpack(range[0]); // max, -min
        const DeviceGrid grid = make_device_grid(-ends.y, ends.x, kTop);
        const int at = param_place(BITS, pair * 32 + 16 * (g >> 2) + 4 * t + (g & 3));
        reinterpret_cast<__half*>(page + scales + n * 256)[at] = grid.stored_s;
        reinterpret_cast<__half*>(page + zeros + n * 256)[at] = grid.stored_z;
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            z[m >> 2][m & 3][n] = __shfl_sync(~0u, grid.z, 4 * m + t);
            inverse[m >> 2][m & 3][n] = __shfl_sync(~0u, grid.inverse, 4 * m + t);
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
                                  based_code_of(x[y], z[e][k][n], inverse[e][k][n], kTop));
                }
        words.store(page, kPlane, pair, D / 64, h, lane);
    }
}

} // namespace kvmosaic::cuda
