// Values of a page as operand B, and what a multiplying warp of the kernels for many query rows keeps of a head.
#pragma once

#include "kernels/cuda/quarter.cuh"
#include "kernels/cuda/wide_tiles.cuh"

namespace kvmosaic::cuda {

template <class V>
struct WideValues {
    static constexpr int D = V::D, BITS = V::BITS, NG = V::NG;
    static constexpr uint32_t kCore = core_bytes(D);
    static constexpr uint32_t kParams = V::kBytes - V::kCodes;

    // [group][128] scales, then offsets, in the order of the operands.
    template <class Read>
    static __device__ __forceinline__ void params(Read read, uint32_t to, int thread) {
        for (int i = thread; i < NG * 128; i += 32 * kUnpackers)
            store_shared4(to + uint32_t(i) * 4, read(V::kCodes / 4 + uint32_t((i & ~15) + param_word(BITS, i & 15))));
    }
    static __device__ __forceinline__ void unpack(uint32_t page, uint32_t tile, int part, int lane) {
#pragma unroll
        for (int k = 0; k < 4 * V::kQuads / kUnpackers; ++k) {
            const int i = kUnpackers * k + part, p = i / V::kQuads, quad = i % V::kQuads;
            uint4 a[2][4];
            quad_codes<BITS, false>(SharedWords{page}, 0, V::kPlane, p, V::kQuads, quad, lane, a);
#pragma unroll
            for (int f = 0; f < 4; ++f)
                store_pair(tile + uint32_t(p) * 4 * kCore + row(4 * quad + f, lane), kCore, 128, lane & 3, a[0][f],
                           a[1][f]);
        }
    }
    static __device__ __forceinline__ uint32_t row(int j, int lane) { return uint32_t(j * 256 + (lane >> 2) * 16); }
    // 32 tokens of a page in global memory as the first pair of steps.
    static __device__ __forceinline__ void unpack_quarter(const uint8_t* page, uint32_t tile, int part, int lane,
                                                          int quarter) {
#pragma unroll 1
        for (int j = part; j < D / 16; j += kUnpackers) {
            const int up = wide_position(BITS, j);
            uint4 w[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                w[e] = tile_codes<BITS>(GlobalWords{page}, 0, V::kPlane, 2 * quarter + e, V::kQuads, j, lane);
                w[e] = make_uint4(w[e].x << up, w[e].y << up, w[e].z << up, w[e].w << up);
            }
            store_pair(tile + row(j, lane), kCore, 128, lane & 3, w[0], w[1]);
        }
    }
    // 32 raw rows; rows outside of the item become 0.
    static __device__ __forceinline__ void unpack_raw(const uint8_t* block, const QuarterPlace& at, bool bf16,
                                                      uint32_t tile, int part, int lane) {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll 1
        for (int j = part; j < D / 16; j += kUnpackers) {
            const int channel = 32 * (j >> 1) + 4 * g + 2 * (j & 1);
            uint4 v[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                uint32_t w[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = 16 * e + 4 * t + i;
                    const bool live = token >= at.low && token < at.high; // others may hold anything, NaN too
                    w[i] = live ? *reinterpret_cast<const uint32_t*>(block + token * (D * 2) + channel * 2) : 0u;
                    if (bf16) w[i] = bf16_to_half2(w[i]);
                }
                v[e] = make_uint4(__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[0], w[1], 0x7632),
                                  __byte_perm(w[2], w[3], 0x5410), __byte_perm(w[2], w[3], 0x7632));
            }
            store_pair(tile + row(j, lane), kCore, 128, t, v[0], v[1]);
        }
    }
};

// 32 raw keys as operand B.
template <int D>
__device__ __forceinline__ void unpack_raw_keys(const uint8_t* block, const QuarterPlace& at, bool bf16, uint32_t tile,
                                                int part, int lane) {
    const int half = part & 1;
#pragma unroll 1
    for (int i = lane + 32 * (part >> 1); i < D / 2; i += 16 * kUnpackers) { // a token and 32 channels
        const int x = 16 * half + (i & 15), pair = i >> 4, token = min(x, at.high - 1);
        const uint4* from = reinterpret_cast<const uint4*>(block + token * (D * 2) + pair * 64);
        uint32_t w[16];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint4 v = from[k];
            w[4 * k] = v.x, w[4 * k + 1] = v.y, w[4 * k + 2] = v.z, w[4 * k + 3] = v.w;
        }
#pragma unroll
        for (int k = 0; k < 16; ++k)
            if (bf16) w[k] = bf16_to_half2(w[k]);
        const uint32_t row =
            tile + uint32_t(pair) * 4 * kKeyCore + uint32_t((x >> 2 & 3) * 128 + (4 * half + (x & 3)) * 16);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            store_shared16(row + uint32_t(c) * kKeyCore,
                           make_uint4(w[2 * c], w[2 * c + 1], w[8 + 2 * c], w[8 + 2 * c + 1]));
    }
}

// Of 8 H columns; a thread has the columns g and, where H is 2, g + 8 of the warp, and a quarter of the channels.
template <class V, int H>
struct WideState {
    static constexpr int kTiles = V::D / 8;
    float o[kTiles][4]; // as the words of the value tile; with the power of two of their fields
    float sums[4];      // column k < NG: p times the offsets of group k; column 7: p
    float scale[H], max[H];
    bool fresh[H]; // no maximum yet
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                o[i][r] = 0.0f;
        sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
        for (int h = 0; h < H; ++h)
            max[h] = 0.0f, fresh[h] = true;
    }
    // Of row g + 8 h.
    __device__ __forceinline__ float denominator(int h, int lane) const {
        return __shfl_sync(~0u, sums[2 * h + 1], (lane & ~3) + 3);
    }
    __device__ __forceinline__ float zero(int h, int group, int lane) const {
        return __shfl_sync(~0u, sums[2 * h + (group & 1)], (lane & ~3) + (group >> 1));
    }
};

// Logits x of 8 * TILES tokens, masked, relative to the running maximum, become p as operand A, steps of 16 tokens; the
// maximum moves where p would grow too large.
template <class V, int H, int TILES>
__device__ __forceinline__ void wide_softmax(float (&x)[TILES][4], WideState<V, H>& state, uint4 (&p)[TILES / 2]) {
    float most[H];
    bool move = false;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        most[h] = -INFINITY;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            most[h] = fmaxf(most[h], fmaxf(x[i][2 * h], x[i][2 * h + 1]));
        constexpr float kLargestLogit = 4.0f; // log2(kLargestP)
        move = move || most[h] > kLargestLogit || state.fresh[h];
    }
    if (__any_sync(~0u, move)) {
#pragma unroll
        for (int h = 0; h < H; ++h) {
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
            const bool seen = most[h] > -INFINITY;
            const float by = state.fresh[h] ? (seen ? most[h] : 0.0f) : fmaxf(most[h], 0.0f);
            const float f = state.fresh[h] ? 1.0f : fast_exp2(-by); // without a maximum there are no sums
            if (seen) state.fresh[h] = false;
            state.max[h] += by;
            state.sums[2 * h] *= f, state.sums[2 * h + 1] *= f;
#pragma unroll
            for (int i = 0; i < WideState<V, H>::kTiles; ++i)
                state.o[i][2 * h] *= f, state.o[i][2 * h + 1] *= f;
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                x[i][2 * h] -= by, x[i][2 * h + 1] -= by;
        }
    }
    const auto two = [](const float(&v)[4], int h) { return pack_half2(fast_exp2(v[2 * h]), fast_exp2(v[2 * h + 1])); };
#pragma unroll
    for (int s = 0; s < TILES / 2; ++s)
        p[s] = make_uint4(two(x[2 * s], 0), H == 2 ? two(x[2 * s], 1) : 0u, two(x[2 * s + 1], 0),
                          H == 2 ? two(x[2 * s + 1], 1) : 0u);
}

// o += p V for STEPS steps; first_pair: of the parameters. Raw values have neither scales nor offsets.
template <class V, int H, int STEPS>
__device__ __forceinline__ void wide_mix(uint32_t params, bool raw, int first_pair, uint64_t tile, int lane,
                                         const uint4 (&p)[STEPS], WideState<V, H>& state) {
    constexpr int NG = V::NG, kTiles = WideState<V, H>::kTiles / NG, kAtOnce = NG == 1 ? STEPS / 2 : 1;
    const int t = lane & 3, g = lane >> 2;
    const SharedWords words{params + uint32_t(t) * 16};
#pragma unroll
    for (int first = 0; first < STEPS / 2; first += kAtOnce) {
        uint4 a[kAtOnce][NG][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint32_t from = uint32_t(first_pair + first + i) * 64;
            uint4 z = make_uint4(kOne2, kOne2, kOne2, kOne2);
            if (g != 7)
                z = raw ? make_uint4(0u, 0u, 0u, 0u)
                        : words.get(uint32_t(NG * 256) + uint32_t(g & (NG - 1)) * 256 + from);
            const uint4 a0 = p[2 * (first + i)], a1 = p[2 * (first + i) + 1];
            mma16(state.sums, a0.x, a0.y, a0.z, a0.w, z.x, z.y);
            mma16(state.sums, a1.x, a1.y, a1.z, a1.w, z.z, z.w);
#pragma unroll
            for (int k = 0; k < NG; ++k) {
                const uint4 s = raw ? make_uint4(kOne2, kOne2, kOne2, kOne2) : words.get(uint32_t(k) * 256 + from);
                a[i][k][0] = times<H>(a0, s.x, s.y), a[i][k][1] = times<H>(a1, s.z, s.w);
            }
        }
        wgmma_fence();
#pragma unroll
        for (int e = 0; e < 2 * kAtOnce; ++e)
#pragma unroll
            for (int k = 0; k < NG; ++k)
                wgmma<kTiles>(reinterpret_cast<float(&)[kTiles][4]>(state.o[kTiles * k]), a[e >> 1][k][e & 1],
                              tile + uint64_t((2 * first + e) * 2 * int(WideValues<V>::kCore) + k * kTiles * 128) / 16,
                              true);
        wgmma_commit();
        wgmma_wait<0>();
    }
    hold(state.o);
}

} // namespace kvmosaic::cuda
