// The mix of values in planes (mosaic): a Hadamard basis, one step a token, a mean a channel. Bound: planes.cuh.
#pragma once

#include "kernels/cuda/depth.cuh"

namespace kvmosaic::cuda {

// Values of one width.
template <int D_, int BITS_>
struct ValuePlanes {
    static constexpr int D = D_, BITS = BITS_, NG = 1;
    static constexpr bool kRotated = true;
    static_assert(BITS >= 2 && BITS <= 4);
    static constexpr int kQuads = D / 64;
    static constexpr uint32_t kPlane = D * 128 * 2 / 8;
    static constexpr uint32_t kScales = D * 128 * BITS / 8, kMeans = kScales + 128, kUnits = kMeans + D;
    static constexpr uint32_t kBytes = (kUnits + 4 + kUnit - 1) / kUnit * kUnit;
    static constexpr float kStep = BITS == 2 ? 0.9957f : BITS == 3 ? 0.5860f : 0.3352f;
    __host__ __device__ static uint32_t bytes(uint32_t) { return kBytes; }
    static StoreSpec spec() { return grid_spec(BITS, Axis::channels, D, GridRule::fitted); }

    // Steps of all tokens into the scratch.
    template <class Words>
    __device__ static void prepare(const Words& words, uint32_t scratch, int lane) {
        __syncwarp();
        const float unit = words.half(kUnits) * kStep;
        const uint32_t logs = words.get4(kScales + uint32_t(4 * lane));
        float s[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            s[i] = fminf(unit * fast_exp2(-0.0625f * float(logs >> (8 * i) & 255u)), 65504.0f);
        store_shared4(scratch + uint32_t(lane) * 8, pack_half2(s[0], s[1]));
        store_shared4(scratch + uint32_t(lane) * 8 + 4, pack_half2(s[2], s[3]));
        __syncwarp();
    }
    // Tokens 32 * pair ..; p: operands of the even and odd step.
    template <class Words>
    __device__ static void pair(const Words& words, int k, uint32_t scratch, int lane, const uint32_t (&pe)[1][2],
                                const uint32_t (&po)[1][2], OperandSums<1>& sums, MixState<D, 1>& state) {
        uint32_t e[1][2], o[1][2];
        const uint4 s = pair_params<4>(SharedWords{scratch}, 0, k, lane & 3);
        scaled<1>(e, pe, s.x, s.z);
        scaled<1>(o, po, s.y, s.w);
        sums.add(pe), sums.add(po);
        // Levels lie around the middle of the codes: the same for all channels, in the rows below 7.
        const uint32_t middle =
            lane >> 2 == 7 ? 0u : pack_half2(-0.5f * float((1 << BITS) - 1), -0.5f * float((1 << BITS) - 1));
        mma16(state.zero.even[0], middle, 0u, middle, 0u, e[0][0], e[0][1]);
        mma16(state.zero.even[0], middle, 0u, middle, 0u, o[0][0], o[0][1]);
#pragma unroll
        for (int h = 0; h < kQuads; ++h)
            mma_pair<BITS, 0, 4, 1>(state.o + 4 * h, words, 0, kPlane, k, kQuads, h, lane, e, o);
    }
    // The mean of each channel times the sum of p, and that sum into row 7.
    template <class Words>
    __device__ static void add_means(const Words& words, int lane, const OperandSums<1>& sums, MixState<D, 1>& state) {
        const int g = lane >> 2;
        const float unit = words.half(kUnits + 2);
        if (g == 7) state.zero.even[0][0] += sums.s[0][0], state.zero.even[0][1] += sums.s[0][1];
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            const uint32_t w = words.get4(kMeans + uint32_t(32 * c + 4 * g));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int tile = 2 * c + (i >> 1);
                const float m = float(int8_t(w >> (8 * i))) * unit * exp2_of(field_position(BITS, tile) - 24);
                float(&o)[4] = state.o[tile][0];
                o[2 * (i & 1)] = fmaf(m, sums.s[0][0], o[2 * (i & 1)]);
                o[2 * (i & 1) + 1] = fmaf(m, sums.s[0][1], o[2 * (i & 1) + 1]);
            }
        }
    }

    template <int NT>
    __device__ static void mix(uint32_t page, uint32_t, uint32_t scratch, int lane, const uint32_t (&p)[8][NT][2],
                               MixState<D, NT>& state) {
        static_assert(NT == 1);
        const SharedWords words{page};
        prepare(words, scratch, lane);
        OperandSums<1> sums;
        sums.clear();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            pair(words, k, scratch, lane, p[2 * k], p[2 * k + 1], sums, state);
        add_means(words, lane, sums, state);
    }
    template <int NT>
    __device__ static void mix_quarter(const uint8_t* page, uint32_t scratch, int lane, int quarter,
                                       const uint32_t (&p)[2][NT][2], MixState<D, NT>& state) {
        static_assert(NT == 1);
        const GlobalWords words{page};
        prepare(words, scratch, lane);
        OperandSums<1> sums;
        sums.clear();
        pair(words, quarter, scratch, lane, p[0], p[1], sums, state);
        add_means(words, lane, sums, state);
    }

    // To the other basis: the Hadamard transform is its own inverse. Channel bits: 0 picks the row half, 1 the tile of
    // a pair, 2 to 4 the row, the rest the pair of tiles (lane_site).
    __device__ static void turn(MixState<D, 1>& state, int lane) {
        float(&o)[D / 16][1][4] = state.o;
        const float normal = rsqrtf(float(D));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float z = zero_of(state, 0, i, 0, lane);
#pragma unroll
            for (int j = 0; j < D / 16; ++j) {
                const float f = scale_of(j);
                o[j][0][i] = fmaf(o[j][0][i], f, z), o[j][0][i + 2] = fmaf(o[j][0][i + 2], f, z);
            }
        }
        if (lane >> 2 != 7) state.zero.even[0][0] = state.zero.even[0][1] = 0.0f;
        const auto cross = [](float& a, float& b) {
            const float sum = a + b;
            b = a - b, a = sum;
        };
#pragma unroll
        for (int j = 0; j < D / 16; ++j)
            cross(o[j][0][0], o[j][0][2]), cross(o[j][0][1], o[j][0][3]);
#pragma unroll
        for (int step = 1; step < D / 16; step *= 2)
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!(j & step)) cross(o[j][0][i], o[j | step][0][i]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float other = __shfl_xor_sync(~0u, o[j][0][i], step);
                    o[j][0][i] = lane & step ? other - o[j][0][i] : o[j][0][i] + other;
                }
#pragma unroll
        for (int j = 0; j < D / 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                o[j][0][i] *= normal * exp2_of(field_position(BITS, j) - 24);
    }

    template <int NT>
    __device__ static float zero_of(const MixState<D, NT>& state, int n, int i, int k, int lane) {
        return __shfl_sync(~0u, state.zero.get(n, i), 4 * k + (lane & 3));
    }
    __device__ static float scale_of(int tile) { return field_scale(BITS, tile); }
};

} // namespace kvmosaic::cuda
