// Key pages of 16-, 4- and 2-bit channels: score, tiers, place and codes in one kernel, a page a block of 128 threads.
//
// Bound: bytes read (32 KiB a page) and the gather of 16384 values through the channel order, a shared-memory load and
// about eight instructions each. The page is staged in shared memory once; scores need its ranges first, codes its
// columns in ladder order.
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/score_tiers.cuh"

namespace kvmosaic::cuda {
namespace {

using Tiers = KeyTiers<128, true, 16, 4, 2>;
constexpr int kD = 128, kRowBytes = 2 * kD + 8; // the padding spreads the rows of a tile over the banks

struct Shared {
    uint8_t rows[128 * kRowBytes];
    uint32_t low[2][64], high[2][64];
    uint16_t channel[8 * 16 + 128 + 64]; // of each entry: raw channels, then columns
    float z[192], inverse[192];          // of each column
    __half stored_s[192], stored_z[192];
    int counts[3][4];
    uint32_t unit;
};

template <class T>
__global__ void __launch_bounds__(128) encode_mix(const EncodeParams p) {
    extern __shared__ __align__(16) uint8_t memory[];
    Shared& sm = *reinterpret_cast<Shared*>(memory);
    wait_for_previous_kernel();
    const EncodeJob job = p.jobs[blockIdx.x];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
    const uint16_t* rows = static_cast<const uint16_t*>(p.rows) + job.row;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int row = 8 * i + (tid >> 4), part = tid & 15;
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(rows + row * p.row_stride) + part);
        uint2* to = reinterpret_cast<uint2*>(sm.rows + row * kRowBytes + part * 16);
        to[0] = make_uint2(x.x, x.y), to[1] = make_uint2(x.z, x.w);
    }
    for (int i = tid; i < 192; i += 128)
        sm.z[i] = sm.inverse[i] = 0.0f, sm.stored_s[i] = sm.stored_z[i] = __ushort_as_half(0);
    for (int i = tid; i < int(sizeof(sm.channel) / 2); i += 128)
        sm.channel[i] = 0;
    __syncthreads();
    {
        const int pair = tid & 63, half = tid >> 6;
        const uint8_t* from = sm.rows + half * 64 * kRowBytes + pair * 4;
        uint32_t low = *reinterpret_cast<const uint32_t*>(from), high = low;
#pragma unroll 8
        for (int r = 1; r < 64; ++r) {
            const uint32_t x = *reinterpret_cast<const uint32_t*>(from + r * kRowBytes);
            low = T::min2(low, x), high = T::max2(high, x);
        }
        sm.low[half][pair] = low, sm.high[half][pair] = high;
    }
    __syncthreads();
    // Thread c decides over channel c.
    const float2 lows = T::unpack(T::min2(sm.low[0][tid >> 1], sm.low[1][tid >> 1]));
    const float2 highs = T::unpack(T::max2(sm.high[0][tid >> 1], sm.high[1][tid >> 1]));
    const float low = tid & 1 ? lows.y : lows.x, high = tid & 1 ? highs.y : highs.x;
    float score = __fdiv_rn(__fsub_rn(high, low), 3.0f);
    const int32_t seen = p.query_count ? p.query_count[job.head] : 0;
    if (seen > 0) score = __fmul_rn(__fdiv_rn(p.query_sum[int64_t(job.head) * kD + tid], float(seen)), score);
    if (!(score >= 0.0f)) score = 0.0f;
    const int tier = score > p.raw_above ? 0 : score > p.mid_above ? 1 : 2;
    uint32_t before[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        const uint32_t mine = __ballot_sync(~0u, tier == k);
        before[k] = uint32_t(__popc(mine & ((1u << lane) - 1)));
        if (lane == 0) sm.counts[k][warp] = __popc(mine);
    }
    __syncthreads();
    int total[3] = {0, 0, 0}, rank = int(before[tier]);
#pragma unroll
    for (int k = 0; k < 3; ++k)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            total[k] += sm.counts[k][w];
            if (k == tier && w < warp) rank += sm.counts[k][w];
        }
    const uint32_t tiers =
        uint32_t((total[0] + 7) / 8) | uint32_t((total[1] + 15) / 16) << 8 | uint32_t((total[2] + 31) / 32) << 16;
    const Tiers::Sizes s = Tiers::sizes(tiers);
    if (tid == 0) {
        uint32_t unit = job.unit;
        if (p.pool_used) {
            unit = atomicAdd(p.pool_used, s.bytes / kUnit);
            if (unit + s.bytes / kUnit > p.pool_units) *p.exhausted = 1, unit = ~0u;
        }
        sm.unit = unit;
        if (unit != ~0u && p.table) p.table[int64_t(job.head) * p.table_stride + job.page] = PageRef{unit, tiers};
    }
    const int column = tier == 1 ? rank : int(s.column[2]) + rank;
    sm.channel[tier == 0 ? rank : int(s.raw_padded) + column] = uint16_t(tid);
    if (tier > 0) {
        const DeviceGrid grid = make_device_grid(low, high, tier == 1 ? 15.0f : 3.0f);
        sm.z[column] = grid.z, sm.inverse[column] = grid.inverse;
        sm.stored_s[column] = grid.stored_s, sm.stored_z[column] = grid.stored_z;
    }
    __syncthreads();
    if (sm.unit == ~0u) return;
    uint8_t* page = p.pool + int64_t(sm.unit) * kUnit;
    const uint16_t* channel = sm.channel + s.raw_padded;
    const auto value = [&](int token, int c) {
        const uint32_t bits = *reinterpret_cast<const uint16_t*>(sm.rows + token * kRowBytes + 2 * c);
        return T::unpack(bits).x;
    };
    const int token0 = 4 * (g >> 1) + (g & 1);
    // 4 bits: sets of one step and one quad.
    for (int set = warp; set < int(s.padded[1] / 16) * 2; set += 4) {
        const int quad = set & 1, first = (set >> 1) * 16 + 4 * t;
        uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
        for (int y = 0; y < 4; ++y) {
            const int c = channel[first + y];
            const float z = sm.z[first + y], inverse = sm.inverse[first + y];
#pragma unroll
            for (int f = 0; f < 4; ++f)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    w[half + 2 * (y >> 1)] +=
                        device_code_of(value(64 * quad + 16 * f + token0 + 2 * half, c), z, inverse, 15.0f)
                        << (16 * (y & 1) + 4 * f);
        }
        *reinterpret_cast<uint4*>(page + s.offset[1] + set * kSetBytes + lane * 16) =
            make_uint4(w[0], w[1], w[2], w[3]);
    }
    // 2 bits: a pair of steps and one quad.
    for (int set = warp; set < int(s.padded[2] / 32) * 2; set += 4) {
        const int quad = set & 1;
        uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const int at = int(s.column[2]) + (set >> 1) * 32 + 16 * e + 4 * t + y, c = channel[at];
                const float z = sm.z[at], inverse = sm.inverse[at];
#pragma unroll
                for (int f = 0; f < 4; ++f)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        w[half + 2 * (y >> 1)] +=
                            device_code_of(value(64 * quad + 16 * f + token0 + 2 * half, c), z, inverse, 3.0f)
                            << (16 * (y & 1) + 8 * e + 2 * f);
            }
        *reinterpret_cast<uint4*>(page + s.offset[2] + set * kSetBytes + lane * 16) =
            make_uint4(w[0], w[1], w[2], w[3]);
    }
    // Raw channels: a unit of 8 channels and two tiles.
    for (int set = warp; set < int(s.raw_padded / 8) * 4; set += 4) {
        uint32_t w[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int token = 16 * (2 * (set & 3) + (r >> 1)) + token0 + 2 * (r & 1);
            uint32_t pair = 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int entry = (set >> 2) * 8 + 2 * t + i;
                if (entry >= total[0]) continue;
                const uint32_t bits =
                    *reinterpret_cast<const uint16_t*>(sm.rows + token * kRowBytes + 2 * sm.channel[entry]);
                pair |= uint32_t(T::to_half(bits)) << (16 * i);
            }
            w[r] = pair;
        }
        *reinterpret_cast<uint4*>(page + s.raw + set * kSetBytes + lane * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
    const uint32_t columns = s.column[2] + s.padded[2];
    for (uint32_t i = tid; i < columns; i += 128) {
        const uint32_t at = i < s.column[2] ? i : s.column[2] + uint32_t(param_place(2, int(i - s.column[2])));
        reinterpret_cast<__half*>(page + s.scales)[at] = sm.stored_s[i];
        reinterpret_cast<__half*>(page + s.zeros)[at] = sm.stored_z[i];
    }
    for (uint32_t i = tid; s.map + i < s.bytes; i += 128)
        page[s.map + i] = i < s.raw_padded + columns ? uint8_t(sm.channel[i]) : uint8_t(0);
}

} // namespace

cudaError_t launch_encode_mix(const EncodeParams& p, cudaStream_t stream) {
    if (p.count == 0) return cudaSuccess;
    if (p.type == ElementType::bf16)
        encode_mix<Bf16Rows><<<unsigned(p.count), 128, sizeof(Shared), stream>>>(p);
    else
        encode_mix<HalfRows><<<unsigned(p.count), 128, sizeof(Shared), stream>>>(p);
    return cudaGetLastError();
}

} // namespace kvmosaic::cuda
