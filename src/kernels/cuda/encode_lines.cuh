// Pages whose groups are 32 neighbours along the depth (InnerQ): channels of a key token, tokens of a value channel.
//
// Bound: bytes for one rule, instructions for hybrids. A warp owns a pair of steps, which is one group of every lane of
// the page; the lane's share of a group lies in four threads, which divide the arithmetic of the grids among them. A
// hybrid's choice depends on the order of a sum, so there a thread walks along two groups alone: twenty instructions a
// value for both errors, three times those of the codes.
#pragma once

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/row_ring.cuh"

namespace kvmosaic::cuda {

// How x becomes a code: round((x - z) * inverse) within [low, low + top], above `low`. Rules with a middle have z = 0.
struct LineGrid {
    float z = 0.0f, inverse = 0.0f, low = 0.0f, top = 0.0f;
    uint32_t up = 0; // -low
    __half stored_s, stored_z;
    // The code and its base.
    __device__ __forceinline__ uint32_t code(float x) const {
        const float t = __fmul_rn(__fsub_rn(x, z), inverse);
        return __float_as_uint(__fadd_rn(fminf(fmaxf(t, low), low + top), 12582912.0f)) + up;
    }
    // |x - what its code stands for|; zero: the value of code 0.
    __device__ __forceinline__ float error(float x, float s, float zero) const {
        const float t = __fmul_rn(__fsub_rn(x, z), inverse);
        const float code = __fadd_rn(__fadd_rn(fminf(fmaxf(t, low), low + top), 12582912.0f), -12582912.0f - low);
        return fabsf(__fsub_rn(__fadd_rn(zero, __fmul_rn(s, code)), x));
    }
};

__device__ __forceinline__ LineGrid symmetric_line(float min, float max, int bits) {
    constexpr float kLimit = 0x1p125f; // kGridLimit
    const float m = float((1 << (bits - 1)) - 1);
    LineGrid grid;
    grid.stored_s = half_saturated(__fdiv_rn(fminf(fmaxf(fabsf(min), fabsf(max)), kLimit), m));
    grid.stored_z = __ushort_as_half(0);
    const float s = __half2float(grid.stored_s);
    grid.inverse = s == 0.0f ? 0.0f : __frcp_rn(s);
    grid.low = -m, grid.top = 2.0f * m, grid.up = (1u << (bits - 1)) - 1;
    return grid;
}
__device__ __forceinline__ LineGrid asym_line(float min, float max, int bits) {
    LineGrid grid;
    grid.top = float((1 << bits) - 1);
    const DeviceGrid g = make_device_grid(min, max, grid.top);
    grid.z = g.z, grid.inverse = g.inverse, grid.stored_s = g.stored_s, grid.stored_z = g.stored_z;
    return grid;
}

// The better of two by the sum of errors in the order of `x`; equal sums go to the asymmetric one, whose flag is the
// sign of its scale, of a scale of 0 too. OTHER: its bits.
template <int BITS, int OTHER, class At>
__device__ __forceinline__ LineGrid hybrid_line(float min, float max, At x) {
    LineGrid mine = symmetric_line(min, max, BITS), other = asym_line(min, max, OTHER);
    const float s = __half2float(mine.stored_s), its_s = __half2float(other.stored_s);
    const float zero = __fmul_rn(mine.low, s);
    float sum = 0.0f, its = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        sum = __fadd_rn(sum, mine.error(x(i), s, zero));
        its = __fadd_rn(its, other.error(x(i), its_s, other.z));
    }
    if (sum < its) return mine;
    other.stored_s = __hneg(other.stored_s);
    return other;
}

// RULE: asym, symmetric; of values also the hybrids.
template <class T, int D, bool KEYS, int BITS, GridRule RULE>
struct LineEncoder {
    static constexpr bool kHybrid = RULE == GridRule::hybrid_1bit || RULE == GridRule::hybrid_4level;
    static_assert(!kHybrid || !KEYS);
    static constexpr int kLanes = KEYS ? 128 : D;
    static constexpr int kMine = kLanes / 8; // lanes of the page that a thread has a quarter of
    static constexpr int kBlocks = D / 32;
    static constexpr int kOther = RULE == GridRule::hybrid_1bit ? 1 : BITS; // bits of a hybrid's asymmetric grid
    using Rows = StagedRows<D, KEYS>;

    __device__ static void put_params(uint8_t* page, uint32_t scales, uint32_t zeros, int index, const LineGrid& grid) {
        reinterpret_cast<__half*>(page + scales)[index] = grid.stored_s;
        if constexpr (RULE != GridRule::symmetric) reinterpret_cast<__half*>(page + zeros)[index] = grid.stored_z;
    }
    __device__ static void encode(const Rows& from, uint8_t* page, uint32_t scales, uint32_t zeros) {
        const int pair = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const Rows rows =
            KEYS ? from.from(4 * (g >> 1) + (g & 1), pair * 32 + 4 * t) : from.from(pair * 32 + 4 * t, 4 * g);
        scales += uint32_t(pair) * kLanes * 2, zeros += uint32_t(pair) * kLanes * 2;
        // Keys: [tile][row half][step], values: [step][token][block of 32 channels].
        constexpr int kA = KEYS ? 8 : 2, kB = KEYS ? 2 : 4, kC = KEYS ? 2 : kBlocks;
        uint2 v[kA][kB][kC];
        LineGrid own[kMine / 4]; // of every fourth lane of those, or of hybrids: of channels 64 u + 2 lane + y
        if constexpr (kHybrid) {
#pragma unroll
            for (int u = 0; u < D / 64; ++u) {
                const Rows line = from.from(pair * 32, 64 * u + 2 * lane);
                uint32_t x[32];
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    x[i] = line.pair(i, 0);
                uint32_t low = x[0], high = x[0];
#pragma unroll
                for (int i = 1; i < 32; ++i)
                    low = T::min2(low, x[i]), high = T::max2(high, x[i]);
#pragma unroll
                for (int y = 0; y < 2; ++y) {
                    const auto half = [&](uint32_t w) { return y ? T::unpack(w).y : T::unpack(w).x; };
                    own[2 * u + y] =
                        hybrid_line<BITS, kOther>(half(low), half(high), [&](int i) { return half(x[i]); });
                    const int index =
                        64 * u + (lane >> 1 & 7) * 8 + (lane >> 4) * 4 + 2 * (lane & 1) + y; // param_index
                    put_params(page, scales, zeros, index, own[2 * u + y]);
                }
            }
        }
#pragma unroll
        for (int a = 0; a < kA; ++a)
#pragma unroll
            for (int b = 0; b < kB; ++b)
#pragma unroll
                for (int c = 0; c < kC; ++c)
                    v[a][b][c] = KEYS ? rows.get(16 * a + 2 * b, 16 * c) : rows.get(16 * a + b, 32 * c);
        if constexpr (!kHybrid) {
            uint32_t range[kMine];
            if constexpr (KEYS) {
#pragma unroll
                for (int n = 0; n < kMine; ++n) {
                    const uint2 p = v[n >> 1][n & 1][0], q = v[n >> 1][n & 1][1];
                    range[n] = range_of<T>(T::min2(T::min2(p.x, p.y), T::min2(q.x, q.y)),
                                           T::max2(T::max2(p.x, p.y), T::max2(q.x, q.y)));
                }
            } else {
#pragma unroll
                for (int c = 0; c < kBlocks; ++c) {
                    uint2 low = v[0][0][c], high = low;
#pragma unroll
                    for (int k = 1; k < 8; ++k) {
                        const uint2 x = v[k >> 2][k & 3][c];
                        low.x = T::min2(low.x, x.x), low.y = T::min2(low.y, x.y);
                        high.x = T::max2(high.x, x.x), high.y = T::max2(high.y, x.y);
                    }
                    low.x ^= 0x80008000u, low.y ^= 0x80008000u;
                    range[4 * c] = __byte_perm(high.x, low.x, 0x5410),
                              range[4 * c + 1] = __byte_perm(high.x, low.x, 0x7632);
                    range[4 * c + 2] = __byte_perm(high.y, low.y, 0x5410);
                    range[4 * c + 3] = __byte_perm(high.y, low.y, 0x7632);
                }
            }
#pragma unroll
            for (int n = 0; n < kMine; ++n) {
                range[n] = T::max2(range[n], __shfl_xor_sync(~0u, range[n], 1));
                range[n] = T::max2(range[n], __shfl_xor_sync(~0u, range[n], 2));
            }
#pragma unroll
            for (int i = 0; i < kMine / 4; ++i) {
                const uint32_t r =
                    t & 2 ? (t & 1 ? range[4 * i + 3] : range[4 * i + 2]) : (t & 1 ? range[4 * i + 1] : range[4 * i]);
                const float2 ends = T::unpack(r); // max, -min
                own[i] = RULE == GridRule::symmetric ? symmetric_line(-ends.y, ends.x, BITS)
                                                     : asym_line(-ends.y, ends.x, BITS);
                put_params(page, scales, zeros, 64 * (i >> 1) + 8 * g + 4 * (i & 1) + t, own[i]); // param_index
            }
        }
        const auto grid_of = [&](int n) {
            LineGrid grid = own[kHybrid ? 2 * (n >> 3) + (n & 1) : n >> 2];
            const int owner = kHybrid ? 16 * (n >> 2 & 1) + 2 * g + (n >> 1 & 1) : (lane & ~3) | (n & 3);
            grid.inverse = __shfl_sync(~0u, grid.inverse, owner);
            if constexpr (RULE != GridRule::symmetric) grid.z = __shfl_sync(~0u, grid.z, owner);
            if constexpr (kHybrid) {
                grid.low = __shfl_sync(~0u, grid.low, owner);
                grid.top = grid.low == 0.0f ? float((1 << kOther) - 1) : float((1 << BITS) - 2);
                grid.up = grid.low == 0.0f ? 0u : (1u << (BITS - 1)) - 1;
            }
            return grid;
        };
        constexpr uint32_t kPlane = D * 32;
        if constexpr (KEYS) {
            PairWords<BITS, 2> words;
            words.clear();
#pragma unroll
            for (int n = 0; n < kMine; ++n) {
                const LineGrid grid = grid_of(n);
                const int j = n >> 1, half = n & 1;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float2 a = T::unpack(v[j][half][e].x), b = T::unpack(v[j][half][e].y);
                    const float x[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        words.put(e, c & 1, j & 3, j >> 2, half + 2 * (c >> 1), grid.code(x[c]));
                }
            }
            words.store(page, kPlane, pair, 2, 0, lane);
        } else {
#pragma unroll
            for (int h = 0; h < D / 64; ++h) {
                PairWords<BITS, 1> words;
                words.clear();
#pragma unroll
                for (int b = 0; b < 2; ++b)
#pragma unroll
                    for (int y = 0; y < 4; ++y) {
                        const int c = 2 * h + b;
                        const LineGrid grid = grid_of(4 * c + y);
#pragma unroll
                        for (int e = 0; e < 2; ++e)
#pragma unroll
                            for (int k = 0; k < 4; ++k) {
                                const float2 x = T::unpack(y & 2 ? v[e][k][c].y : v[e][k][c].x);
                                words.put(e, k & 1, 2 * b + (y >> 1), 0, (y & 1) + 2 * (k >> 1),
                                          grid.code(y & 1 ? x.y : x.x));
                            }
                    }
                words.store(page, kPlane, pair, D / 64, h, lane);
            }
        }
    }
};

template <class T, int D, bool KEYS, int BITS, GridRule RULE>
__global__ void __launch_bounds__((RowRing<D, KEYS>::kThreads), (RowRing<D, KEYS>::kBlocks))
    encode_lines(const EncodeParams p, uint32_t scales, uint32_t zeros) {
    extern __shared__ __align__(128) uint8_t memory[];
    using Encoder = LineEncoder<T, D, KEYS, BITS, RULE>;
    wait_for_previous_kernel();
    RowRing<D, KEYS>::walk(p, memory, [&](const typename Encoder::Rows& rows, const EncodeJob& job) {
        Encoder::encode(rows, p.pool + int64_t(job.unit) * kUnit, scales, zeros);
    });
}

// Pages of this form and head size; cudaErrorNotSupported: encode_depth takes them.
template <class T, int D>
cudaError_t launch_lines(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    const auto launch = [&](auto keys, auto bits, auto rule) {
        constexpr bool kKeys = decltype(keys)::value != 0;
        constexpr int kBits = decltype(bits)::value;
        constexpr auto kRule = GridRule(decltype(rule)::value);
        return RowRing<D, kKeys>::launch(encode_lines<T, D, kKeys, kBits, kRule>, p, stream, page.scale_offset,
                                         page.zero_offset);
    };
    const auto ruled = [&](auto keys, auto bits) {
        switch (page.rule) {
        case GridRule::asym:
            return launch(keys, bits, Dim<int(GridRule::asym)>());
        case GridRule::symmetric:
            return launch(keys, bits, Dim<int(GridRule::symmetric)>());
        case GridRule::hybrid_1bit:
            if constexpr (decltype(keys)::value == 0) return launch(keys, bits, Dim<int(GridRule::hybrid_1bit)>());
            break;
        case GridRule::hybrid_4level:
            if constexpr (decltype(keys)::value == 0) return launch(keys, bits, Dim<int(GridRule::hybrid_4level)>());
            break;
        default:
            break;
        }
        return cudaErrorNotSupported;
    };
    const auto sided = [&](auto bits) {
        return page.side == Side::key ? ruled(Dim<1>(), bits) : ruled(Dim<0>(), bits);
    };
    switch (page.group == 32 && page.depth % 32 == 0 ? page.tiers[0].bits : 0) {
    case 2:
        return sided(Dim<2>());
    case 3:
        return sided(Dim<3>());
#ifndef KVMOSAIC_CUDA_SMOKE
    case 4:
        return sided(Dim<4>());
#endif
    default:
        return cudaErrorNotSupported;
    }
}

} // namespace kvmosaic::cuda
