// Scores and mixes of pages in planes (mosaic): keys of 0 to 8 bits a channel whose mean turns with the position,
// values in a rotated basis at fitted steps.
//
// Bound: instructions, as KeyGrid. A plane of a key page is a run of steps like those of a tier, so 2 bits a value cost
// what 2 bits of one width cost; in addition a page takes about 70 warp instructions to turn logarithms into fp16
// scales, which wait in the warp's scratch, a gather of q for each step, and some 190 for the mean: 16 pairs a lane
// turned back to the page's first position, one product that takes slow pairs to 16 polynomials, and 8 tiles times
// three or four steps of features that all heads share (src/cache/mean.h has the algebra). A value page takes 90 more
// than ValueGrid for scales and means. The rotation of values is undone on the sums, 7 rounds of additions each time
// that a warp leaves the packed rows of a head.
#pragma once

#include "kernels/cuda/depth.cuh"

namespace kvmosaic::cuda {

__device__ __forceinline__ uint32_t scratch_scales(const KeySpot& spot, int plane, int dim) {
    return spot.scratch + uint32_t(plane * dim * 2);
}

template <int D_>
struct KeyPlanes {
    static constexpr int D = D_;
    static constexpr bool kTiered = true, kBasis = false, kMean = true;
    static_assert(D <= 256, "byte maps");
    static constexpr int kFastSteps = D / 64 + 1, kSlowSteps = D / 16; // at most, of 8 pairs
    static constexpr int kPairSlots = 8 * (kFastSteps + kSlowSteps);
    // Scales of the four planes, offsets by channel, scales of values, the mean's share of each query.
    static constexpr uint32_t kValueScales = 5 * D * 2, kMeanTable = kValueScales + 256;
    static constexpr uint32_t kScratch = kMeanTable + kPairSlots * 32;         // of a warp
    static constexpr uint32_t kTurnBytes = (kPairSlots * 8 + 127) / 128 * 128; // cosines and sines beside a page
    // Features [tile][step], then slow pairs to polynomials [step]: operands of 512 bytes; then the channels of each
    // pair.
    static constexpr uint32_t kFeatureBytes = 8 * (kFastSteps + 1) * 512;
    static constexpr uint32_t kPairTable = kFeatureBytes + kSlowSteps * 512;
    static constexpr uint32_t kTables = kPairTable + kPairSlots * 4; // of the block

    __host__ __device__ static uint32_t bytes(uint32_t units) { return units * kUnit; }
    static StoreSpec spec() {
        StoreSpec s = grid_spec(0, Axis::tokens, 128, GridRule::searched);
        s.kind = StoreKind::tiered;
        s.shrinks = 7;
        return s;
    }
    static std::vector<uint8_t> widths() { return {8, 6, 4, 3, 2, 1, 0}; }

    struct Plane {
        int first, depth; // ladder position, padded
        uint32_t offset;
    };
    struct Sizes {
        Plane plane[4]; // low4, high4, two, one
        int live[4];
        int end[6]; // of the tiers of 8, 4, 6, 2, 3, 1 bits
        uint32_t scales, map;
    };
    // counts: the ladder behind the page, channels of 8, 4, 6, 2, 3, 1 bits.
    __device__ static Sizes sizes(const uint4& counts) {
        Sizes s;
        const uint32_t n[6] = {counts.x & 0xFFFFu, counts.x >> 16,     counts.y & 0xFFFFu,
                               counts.y >> 16,     counts.z & 0xFFFFu, counts.z >> 16};
        int at = 0;
#pragma unroll
        for (int i = 0; i < 6; ++i)
            s.end[i] = at += int(n[i]);
        s.plane[0].first = 0, s.live[0] = s.end[2];
        s.plane[1].first = 0, s.live[1] = s.end[0];
        s.plane[2].first = s.end[1], s.live[2] = s.end[4] - s.end[1];
        s.plane[3].first = s.end[3], s.live[3] = s.end[5] - s.end[3];
        uint32_t offset = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int granule = i < 2 ? 8 : i == 2 ? 16 : 32;
            s.plane[i].depth = (s.live[i] + granule - 1) & ~(granule - 1);
            s.plane[i].offset = offset;
            offset += uint32_t(s.plane[i].depth) * (i < 2 ? 64u : i == 2 ? 32u : 16u);
        }
        s.scales = offset;
        s.map = offset + 2 * D + 2;
        return s;
    }

    // Scales of each plane by its position and offsets by channel (in the order of param_place) into the scratch.
    template <class Words>
    __device__ static void prepare(const Words& words, const Sizes& s, const KeySpot& spot, int lane) {
        __syncwarp();
        const float unit = words.half(s.scales + 2 * D);
        const auto put = [&](int plane, int at, float x) {
            store_shared2(scratch_scales(spot, plane, D) + uint32_t(at) * 2, pack_half2(fminf(x, 65504.0f), 0.0f));
        };
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (s.live[i] + lane < s.plane[i].depth) put(i, s.live[i] + lane, 0.0f);
#pragma unroll
        for (int p0 = 0; p0 < D; p0 += 128) {
            const int p = p0 + 4 * lane;
            if (p >= D) break;
            const uint32_t logs = words.get4(s.scales + uint32_t(p)), middles = words.get4(s.scales + uint32_t(D + p));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = p + i;
                const float h = unit * fast_exp2(-0.125f * float(logs >> (8 * i) & 255u));
                const float c = float(int8_t(middles >> (8 * i))) * (h * 0.0625f);
                float step = 0.0f, z = c;
                if (at < s.end[5]) {
                    const float inverse = at < s.end[0]   ? 2.0f / 255.0f
                                          : at < s.end[1] ? 2.0f / 15.0f
                                          : at < s.end[2] ? 2.0f / 63.0f
                                          : at < s.end[3] ? 2.0f / 3.0f
                                          : at < s.end[4] ? 2.0f / 7.0f
                                                          : 2.0f;
                    step = h * inverse, z = c - h;
                    if (at < s.end[2]) put(0, at, step);
                    if (at < s.end[0]) put(1, at, 16.0f * step);
                    if (at >= s.end[1] && at < s.end[4]) put(2, at - s.end[1], at < s.end[2] ? 16.0f * step : step);
                    if (at >= s.end[3]) put(3, at - s.end[3], at < s.end[4] ? 4.0f * step : step);
                }
                const uint32_t channel = words.byte(s.map + uint32_t(at));
                store_shared2(scratch_scales(spot, 4, D) + uint32_t(param_place(2, int(channel))) * 2,
                              pack_half2(fminf(fmaxf(z, -65504.0f), 65504.0f), 0.0f));
            }
        }
        __syncwarp();
    }

    __device__ static void load_tables(const AttendParams& p, uint8_t* to) {
        if (p.mean.mean == nullptr) return;
        const int features = 8 * (p.mean.fast_steps + 1) * 32, slow = p.mean.slow_steps * 32;
        for (int i = threadIdx.x; i < features + slow; i += blockDim.x) {
            const bool first = i < features;
            const uint4* from = static_cast<const uint4*>(first ? p.mean.features : p.mean.slow);
            uint4* into = reinterpret_cast<uint4*>(to + (first ? 0 : kFeatureBytes));
            into[first ? i : i - features] = from[first ? i : i - features];
        }
        for (int i = threadIdx.x; i < p.mean.slots; i += blockDim.x)
            reinterpret_cast<uint32_t*>(to + kPairTable)[i] = static_cast<const uint32_t*>(p.mean.channels)[i];
    }

    // The mean's share of each query: A and B of every pair (mean.h), fast pairs first.
    __device__ static void open(const AttendParams& p, int64_t head, uint32_t q, const KeySpot& spot, int lane) {
        if (p.mean.mean == nullptr) return;
        // Components of the mean wait where scales will be.
        const uint32_t* mean = p.mean.mean + head * p.mean.slots;
        uint32_t own[(kPairSlots + 31) / 32];
#pragma unroll
        for (int i = 0; i < (kPairSlots + 31) / 32; ++i)
            own[i] = lane + 32 * i < p.mean.slots ? __ldg(mean + lane + 32 * i) : 0u;
#pragma unroll
        for (int i = 0; i < (kPairSlots + 31) / 32; ++i)
            if (lane + 32 * i < p.mean.slots) store_shared4(spot.scratch + uint32_t(lane + 32 * i) * 4, own[i]);
        __syncwarp();
        const uint32_t column = q + uint32_t(lane & 7) * 2;
#pragma unroll 4
        for (int slot = lane >> 3; slot < p.mean.slots; slot += 4) {
            const uint32_t pair = load_shared4(spot.tables + kPairTable + uint32_t(slot) * 4);
            const float2 m = unpack_half2(load_shared4(spot.scratch + uint32_t(slot) * 4));
            const float qa = half_of(load_shared_half(column + (pair & 0xFFFFu) * 16)),
                        qb = half_of(load_shared_half(column + (pair >> 16) * 16));
            store_shared4(spot.scratch + kMeanTable + uint32_t(slot * 8 + (lane & 7)) * 4,
                          pack_half2(qa * m.x + qb * m.y, qb * m.x - qa * m.y));
        }
        __syncwarp();
    }
    __device__ static float half_of(uint32_t bits) { return __half2float(__ushort_as_half(uint16_t(bits))); }

    // x[j] += q . (mean, turned) for TILES tiles from `tile`.
    template <int TILES>
    __device__ static void add_mean(const AttendParams& p, const KeySpot& spot, int lane, int tile,
                                    float (&x)[TILES][1][4]) {
        const int g = lane >> 2, t = lane & 3, fast = p.mean.fast_steps, steps = fast + 1;
        const float2* turn = static_cast<const float2*>(p.mean.turns) + int64_t(spot.page) * p.mean.slots;
        const auto turned = [&](int slot) {
            const float2 ab = unpack_half2(load_shared4(spot.scratch + kMeanTable + uint32_t(slot * 8 + g) * 4));
            float2 by;
            if constexpr (TILES == 8) {
                const uint2 w = load_shared8(spot.turn + uint32_t(slot) * 8);
                by = make_float2(__uint_as_float(w.x), __uint_as_float(w.y));
            } else {
                by = __ldg(turn + slot);
            }
            return pack_half2(ab.x * by.x + ab.y * by.y, ab.y * by.x - ab.x * by.y);
        };
        const auto add = [&](int step, uint32_t b0, uint32_t b1) {
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const uint4 a =
                    load_shared16(spot.tables + uint32_t((tile + j) * steps + step) * 512 + uint32_t(lane) * 16);
                mma16(x[j][0], a.x, a.y, a.z, a.w, b0, b1);
            }
        };
        float poly[4] = {};
#pragma unroll 4
        for (int s = 0; s < p.mean.slow_steps; ++s) {
            const int slot = 8 * (fast + s) + t;
            const uint32_t b0 = turned(slot), b1 = turned(slot + 4);
            const uint4 a = load_shared16(spot.tables + kFeatureBytes + uint32_t(s) * 512 + uint32_t(lane) * 16);
            mma16(poly, a.x, a.y, a.z, a.w, b0, b1);
        }
#pragma unroll 2
        for (int s = 0; s < fast; ++s) {
            const uint32_t b0 = turned(8 * s + t), b1 = turned(8 * s + t + 4);
            add(s, b0, b1);
        }
        add(fast, transpose8(pack_half2(poly[0], poly[1])), transpose8(pack_half2(poly[2], poly[3])));
    }

    // Products with the codes of one plane; SLOW: two tiles from `tile`, fields at position 0.
    template <int BITS, bool SLOW, int TILES, class Words>
    __device__ static void plane(const Words& words, const Plane& plane, uint32_t map, uint32_t scales, uint32_t q,
                                 int lane, int tile, float (&x)[TILES][1][4]) {
        constexpr int kUnroll = SLOW ? 1 : 2;
        const int t = lane & 3;
        const uint32_t at = uint32_t(lane) * 16;
        const SharedWords scale{scales};
        const auto channel = [&](int position) {
            return q + words.byte(map + uint32_t(min(plane.first + position, D - 1))) * 16u;
        };
        // A word's fields of one step: `shift` is that of the first tile's. quad: of whole sets.
        const auto quad_products = [&](const uint4& w, int shift, int quad, const uint32_t(&b)[1][2]) {
            if constexpr (SLOW) {
                if (quad != tile >> 2) return;
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    const int f = (tile & 3) + j;
                    const uint4 v = shift_right(w, shift + (BITS == 4 ? 4 : 2) * f);
                    mma_tile<1>(x[j], v, BITS == 4 ? 0x000F000Fu : BITS == 2 ? 0x00030003u : 0x00010001u, b);
                }
            } else if constexpr (BITS == 4) {
                const uint4 s = shift_right(w, 8);
#pragma unroll
                for (int f = 0; f < 4; ++f)
                    mma_tile<1>(x[4 * quad + f], f < 2 ? w : s, f & 1 ? 0x00F000F0u : 0x000F000Fu, b);
            }
        };
        if constexpr (BITS == 4) {
            const int whole = plane.depth >> 4;
#pragma unroll kUnroll
            for (int step = 0; step < whole; ++step) {
                uint32_t b[1][2], e[1][2];
                load_q_step<1>(b, channel(16 * step + gather_place(lane & 15)));
                const uint2 sc = scale.get8(uint32_t(16 * step + 4 * t) * 2);
                scaled<1>(e, b, sc.x, sc.y);
#pragma unroll
                for (int quad = 0; quad < 2; ++quad)
                    quad_products(words.get(plane.offset + uint32_t(step * 2 + quad) * kSetBytes + at), 0, quad, e);
            }
            if (plane.depth & 8) {
                uint32_t b;
                ldmatrix1_trans(b, channel(16 * whole + (lane & 7)));
                b = hmul2(b, load_shared4(scales + uint32_t(16 * whole + 2 * t) * 2));
                const uint4 w = words.get(plane.offset + uint32_t(whole * 2) * kSetBytes + at);
#pragma unroll
                for (int j = 0; j < TILES; ++j) {
                    const int quad = SLOW ? tile >> 2 : j >> 2, f = SLOW ? (tile & 3) + j : j & 3;
                    const uint32_t r0 = quad ? w.z : w.x, r1 = quad ? w.w : w.y;
                    if constexpr (SLOW)
                        mma8(x[j][0], r0 >> (4 * f) & 0x000F000Fu, r1 >> (4 * f) & 0x000F000Fu, b);
                    else
                        mma8(x[j][0], (f < 2 ? r0 : r0 >> 8) & (f & 1 ? 0x00F000F0u : 0x000F000Fu),
                             (f < 2 ? r1 : r1 >> 8) & (f & 1 ? 0x00F000F0u : 0x000F000Fu), b);
                }
            }
        } else {
            // Pairs of steps; the last may be half a set with both quads in it.
            const int pairs = plane.depth >> 5, sets = BITS == 2 ? pairs : pairs & ~1;
#pragma unroll kUnroll
            for (int p = 0; p < (BITS == 2 ? (plane.depth + 16) >> 5 : pairs); ++p) {
                uint32_t qe[1][2], qo[1][2], e[1][2], o[1][2];
                load_q_pair<1>(qe, qo, channel(32 * p + gather_place(lane)));
                const uint4 sc = pair_params<4>(scale, 0, p, t);
                scaled<1>(e, qe, sc.x, sc.z);
                scaled<1>(o, qo, sc.y, sc.w);
                if (BITS == 1) scaled<1>(o, o, half2_power(-1), half2_power(-1)); // its field lies one bit higher
                const bool half_set = p >= sets;
#pragma unroll
                for (int quad = 0; quad < 2; ++quad) {
                    if (SLOW && quad != tile >> 2) continue;
                    const uint32_t set =
                        BITS == 2 ? (half_set ? 2 * p : 2 * p + quad) : (half_set ? p : (p >> 1) * 2 + quad);
                    uint4 w = words.get(plane.offset + set * kSetBytes + at);
                    w = shift_right(w, half_set ? 8 * quad : BITS == 2 ? 0 : 8 * (p & 1));
                    if constexpr (SLOW) {
                        // Fields of the odd step lie 8 bits (two bits wide) or one bit (one) above.
                        if constexpr (BITS == 1) scaled<1>(o, qo, sc.y, sc.w);
                        quad_products(w, 0, quad, e);
                        if (BITS == 1 || !half_set) quad_products(w, BITS == 2 ? 8 : 1, quad, o);
                    } else {
                        constexpr uint32_t kMask = BITS == 2 ? 0x00030003u : 0x00010001u;
#pragma unroll
                        for (int f = 0; f < 4; ++f)
                            mma_tile<1>(x[4 * quad + f], w, kMask << (2 * f), e);
                        if (BITS == 1) {
#pragma unroll
                            for (int f = 0; f < 4; ++f)
                                mma_tile<1>(x[4 * quad + f], w, 0x00020002u << (2 * f), o);
                        } else if (!half_set) {
                            const uint4 v = shift_right(w, 8);
#pragma unroll
                            for (int f = 0; f < 4; ++f)
                                mma_tile<1>(x[4 * quad + f], v, kMask << (2 * f), o);
                        }
                    }
                }
            }
        }
    }

    template <int NT>
    __device__ static void score(const AttendParams& p, uint32_t page, uint32_t units, uint32_t q, int lane,
                                 const Columns<NT>& col, float (&x)[8][NT][4], const KeySpot& spot) {
        static_assert(NT == 1);
        const SharedWords words{page};
        const Sizes s = sizes(words.get(units * kUnit - kUnit));
        prepare(words, s, spot, lane);
        cuda::clear(x);
        if (p.mean.mean) {
            add_mean<8>(p, spot, lane, 0, x);
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[j][0][i] *= exp2_of(field_position(4, j) - 24);
        }
        plane<4, false, 8>(words, s.plane[0], s.map, scratch_scales(spot, 0, D), q, lane, 0, x);
        plane<4, false, 8>(words, s.plane[1], s.map, scratch_scales(spot, 1, D), q, lane, 0, x);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[j][0][i] *= exp2_of(field_position(2, j) - field_position(4, j));
        plane<2, false, 8>(words, s.plane[2], s.map, scratch_scales(spot, 2, D), q, lane, 0, x);
        plane<1, false, 8>(words, s.plane[3], s.map, scratch_scales(spot, 3, D), q, lane, 0, x);
        ZeroSums<1> zero;
        zero.clear();
        add_offsets(spot, q, lane, zero);
        finish_scores<2, 1, 1>(x, zero, col, lane);
    }

    __device__ static void add_offsets(const KeySpot& spot, uint32_t q, int lane, ZeroSums<1>& zero) {
        const SharedWords offsets{scratch_scales(spot, 4, D)};
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16);
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            uint32_t qe[1][2], qo[1][2];
            load_q_pair<1>(qe, qo, q_row + uint32_t(i * 32 * 16));
            zero.add(pair_params<2>(offsets, 0, i, lane & 3), qe, qo);
        }
    }

    template <int NT>
    __device__ static void score_quarter(const AttendParams& p, const uint8_t* page, uint32_t units, uint32_t q,
                                         int lane, int quarter, float (&x)[2][NT][4], const KeySpot& spot) {
        static_assert(NT == 1);
        const GlobalWords words{page};
        const Sizes s = sizes(words.get(units * kUnit - kUnit));
        prepare(words, s, spot, lane);
        const int tile = 2 * quarter;
        plane<4, true, 2>(words, s.plane[0], s.map, scratch_scales(spot, 0, D), q, lane, tile, x);
        plane<4, true, 2>(words, s.plane[1], s.map, scratch_scales(spot, 1, D), q, lane, tile, x);
        plane<2, true, 2>(words, s.plane[2], s.map, scratch_scales(spot, 2, D), q, lane, tile, x);
        plane<1, true, 2>(words, s.plane[3], s.map, scratch_scales(spot, 3, D), q, lane, tile, x);
        ZeroSums<1> zero;
        zero.clear();
        add_offsets(spot, q, lane, zero);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                x[j][0][i] = fmaf(x[j][0][i], exp2_of(24), zero.get(0, i & 1));
        if (p.mean.mean) add_mean<2>(p, spot, lane, tile, x);
    }
};

} // namespace kvmosaic::cuda
