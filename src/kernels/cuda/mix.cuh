// The mix of 128 packed values: o += p V, straight from the codes. Scales of tokens go into p; offsets and the softmax
// denominator come from one more product, whose row 7 is 1 instead of an offset.
#pragma once

#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/score.cuh"

namespace kvmosaic::cuda {

// Shared memory holds 1.0 twice in each word here: the row of ones for lanes of row 7.
inline constexpr uint32_t kOnesBytes = 288;
inline constexpr uint32_t kOne2 = 0x3C003C00u;

// Sums of one head over the tokens so far. o carries the power of two of its field (field_scale).
template <int D, int NT>
struct MixState {
    float o[D / 16][NT][4];
    ZeroSums<NT> zero; // row < 7: p * offset; row 7: sum of p
    __device__ __forceinline__ void clear() {
        cuda::clear(o);
        zero.clear();
    }
    __device__ __forceinline__ void rescale(int n, float f0, float f1) {
#pragma unroll
        for (int j = 0; j < D / 16; ++j)
            o[j][n][0] *= f0, o[j][n][2] *= f0, o[j][n][1] *= f1, o[j][n][3] *= f1;
        zero.even[n][0] *= f0, zero.even[n][1] *= f1, zero.odd[n][2] *= f0, zero.odd[n][3] *= f1;
        zero.even[n][3] *= f1; // of use by limbs.cuh alone
    }
};

// One width, groups of D / NG channels of a token.
template <int D_, int BITS_, int NG_>
struct ValueGrid {
    static constexpr int D = D_, BITS = BITS_, NG = NG_;
    static constexpr bool kRotated = false; // the basis of packed values is that of raw ones
    static constexpr int kQuads = D / 64;
    static constexpr uint32_t kCodes = D * 128 * BITS / 8, kPlane = D * 128 * 2 / 8;
    static constexpr uint32_t kScales = kCodes, kParams = NG * 128 * 2, kZeros = kScales + kParams;
    static constexpr uint32_t kBytes = (kZeros + kParams + kUnit - 1) / kUnit * kUnit;
    static_assert(NG <= 4, "row 7 of the offsets is the sum of p");
    __host__ __device__ static uint32_t bytes(uint32_t) { return kBytes; }
    static StoreSpec spec() { return grid_spec(BITS, Axis::channels, D / NG); }

    // Tokens 32 * pair ..; p: operands of the even and odd step.
    template <int NT, class Words>
    __device__ static void pair(const Words& words, int p, int lane, const uint4& z, const uint32_t (&pe)[NT][2],
                                const uint32_t (&po)[NT][2], MixState<D, NT>& state) {
        state.zero.add(z, pe, po);
        const int t = lane & 3;
#pragma unroll
        for (int k = 0; k < NG; ++k) {
            uint32_t e[NT][2], o[NT][2];
            const uint4 s = pair_params<BITS>(words, kScales + uint32_t(k * 256), p, t);
            scaled<NT>(e, pe, s.x, s.z);
            scaled<NT>(o, po, s.y, s.w);
            constexpr int kTiles = D / 16 / NG; // of this group
            if constexpr (kTiles >= 4) {
#pragma unroll
                for (int h = k * kTiles / 4; h < (k + 1) * kTiles / 4; ++h)
                    mma_pair<BITS, 0, 4, NT>(state.o + 4 * h, words, 0, kPlane, p, kQuads, h, lane, e, o);
            } else {
                static_assert(kTiles >= 4 || kTiles == 2);
                const int h = k / 2;
                if (k % 2 == 0)
                    mma_pair<BITS, 0, 2, NT>(state.o + 4 * h, words, 0, kPlane, p, kQuads, h, lane, e, o);
                else
                    mma_pair<BITS, 2, 4, NT>(state.o + 4 * h, words, 0, kPlane, p, kQuads, h, lane, e, o);
            }
        }
    }

    template <int NT>
    __device__ static void mix(uint32_t page, uint32_t ones, uint32_t, int lane, const uint32_t (&p)[8][NT][2],
                               MixState<D, NT>& state) {
        const SharedWords words{page};
        const int t = lane & 3, g = lane >> 2;
        const SharedWords zeros{g == 7 ? ones : page + kZeros + uint32_t((g & (NG - 1)) * 256)};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            pair<NT>(words, k, lane, pair_params<BITS>(zeros, 0, k, t), p[2 * k], p[2 * k + 1], state);
    }

    // 32 tokens of a page in global memory; p[0], p[1] are their steps.
    template <int NT>
    __device__ static void mix_quarter(const uint8_t* page, uint32_t, int lane, int quarter,
                                       const uint32_t (&p)[2][NT][2], MixState<D, NT>& state) {
        const GlobalWords words{page};
        const int t = lane & 3, g = lane >> 2;
        uint4 z = pair_params<BITS>(words, kZeros + uint32_t((g & (NG - 1)) * 256), quarter, t);
        if (g == 7) z = make_uint4(kOne2, kOne2, kOne2, kOne2);
        pair<NT>(words, quarter, lane, z, p[0], p[1], state);
    }

    // Offset sum of column 2t + i for the channels of group k, from row k of the zero sums.
    template <int NT>
    __device__ static float zero_of(const MixState<D, NT>& state, int n, int i, int k, int lane) {
        return __shfl_sync(~0u, state.zero.get(n, i), 4 * k + (lane & 3));
    }
    __device__ static float scale_of(int tile) { return field_scale(BITS, tile); }
};

} // namespace kvmosaic::cuda
