// Key pages in tiers that are given and whose order lies outside of the page (PN-Mix).
//
// Bound: bytes read; besides, a load of two bytes from shared memory for each code, since the order of channels is any,
// whose conflicts of banks cost about as much as the arithmetic.
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/order.h"
#include "kernels/cuda/row_ring.cuh"

namespace kvmosaic::cuda {
namespace {

template <class T, int D>
struct TierEncoder {
    using Ring = RowRing<D, true>;
    using Rows = typename Ring::Rows;
    static constexpr int kColumns = D + 224; // most channels of all tiers with their padding
    struct Shared {
        uint32_t range[D]; // of a channel: min, max
        __half s[kColumns], z[kColumns];
        uint8_t channel[kColumns];
    };

    // A pair of steps from `column` on; the second may be missing.
    template <int BITS>
    __device__ static void pair(const Shared& sm, const Rows& from, uint8_t* codes, const DeviceTier& tier, int pair,
                                int lane) {
        const int g = lane >> 2, t = lane & 3, steps = min(2, (tier.padded - 32 * pair) / 16);
        const Rows rows = from.from(4 * (g >> 1) + (g & 1), 0);
        PairWords<BITS, 2> words;
        words.clear();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (e >= steps) break;
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const int at = tier.column + 32 * pair + 16 * e + 4 * t + y, c = sm.channel[at];
                const float s = __half2float(sm.s[at]), z = __half2float(sm.z[at]);
                const float inverse = s == 0.0f ? 0.0f : __frcp_rn(s);
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        words.put(e, y & 1, j & 3, j >> 2, half + 2 * (y >> 1),
                                  based_code_of(T::unpack(rows.one(16 * j + 2 * half, c)).x, z, inverse,
                                                float((1 << BITS) - 1)));
            }
        }
        words.store(codes, uint32_t(tier.padded) * 32, pair, 2, 0, lane, steps);
    }

    __device__ static void encode(Shared& sm, const Rows& rows, const EncodeParams& p, const EncodeJob& job,
                                  const DevicePage& page) {
        const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        uint8_t* to = p.pool + int64_t(job.unit) * kUnit;
        for (int i = tid; i < page.columns; i += D) {
            sm.s[i] = sm.z[i] = __ushort_as_half(0), sm.channel[i] = 0;
            reinterpret_cast<uint16_t*>(to + page.scale_offset)[i] = 0;
            reinterpret_cast<uint16_t*>(to + page.zero_offset)[i] = 0;
        }
        for (uint32_t i = page.zero_offset + page.columns * 2u + uint32_t(tid); i < page.bytes; i += D)
            to[i] = 0;
        { // two threads a pair of channels
            const Rows mine = rows.from(tid & 1, tid & ~1);
            uint32_t low = mine.pair(0, 0), high = low;
#pragma unroll 16
            for (int r = 1; r < 64; ++r) {
                const uint32_t x = mine.pair(2 * r, 0);
                low = T::min2(low, x), high = T::max2(high, x);
            }
            low = T::min2(low, __shfl_xor_sync(~0u, low, 1)), high = T::max2(high, __shfl_xor_sync(~0u, high, 1));
            sm.range[tid] = __byte_perm(low, high, tid & 1 ? 0x7632 : 0x5410);
        }
        __syncthreads();
        { // thread c: ladder position c
            int t = 0;
            while (t + 1 < page.tier_count && tid >= page.tiers[t + 1].first)
                ++t;
            const DeviceTier& tier = page.tiers[t];
            const int c = p.order ? p.order[int64_t(job.head) * D + tid] : tid;
            const float2 range = T::unpack(sm.range[c]);
            const DeviceGrid grid = make_device_grid(range.x, range.y, float((1 << tier.bits) - 1),
                                                     page.rule == GridRule::midpoint && tier.bits == 1);
            const int pos = tid - tier.first, column = tier.column + pos;
            sm.s[column] = grid.stored_s, sm.z[column] = grid.stored_z, sm.channel[column] = uint8_t(c);
            const int at = tier.column + param_place(tier.bits, pos);
            reinterpret_cast<__half*>(to + page.scale_offset)[at] = grid.stored_s;
            reinterpret_cast<__half*>(to + page.zero_offset)[at] = grid.stored_z;
        }
        __syncthreads();
        int task = warp; // pairs of all tiers, in turn
        for (int t = 0; t < page.tier_count; ++t) {
            const DeviceTier& tier = page.tiers[t];
            const int pairs = (tier.padded + 31) / 32;
            for (; task < pairs; task += D / 32) {
                uint8_t* codes = to + tier.offset;
                switch (tier.bits) {
                case 1:
                    pair<1>(sm, rows, codes, tier, task, lane);
                    break;
                case 2:
                    pair<2>(sm, rows, codes, tier, task, lane);
                    break;
                case 3:
                    pair<3>(sm, rows, codes, tier, task, lane);
                    break;
                case 4:
                    pair<4>(sm, rows, codes, tier, task, lane);
                    break;
                case 6:
                    pair<6>(sm, rows, codes, tier, task, lane);
                    break;
                default:
                    pair<8>(sm, rows, codes, tier, task, lane);
                }
            }
            task -= pairs;
        }
    }
};

template <class T, int D>
__global__ void __launch_bounds__(D, RowRing<D, true>::kBlocks)
    encode_tiers(const __grid_constant__ EncodeParams p, const __grid_constant__ DevicePage page) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ typename TierEncoder<T, D>::Shared sm;
    wait_for_previous_kernel();
    TierEncoder<T, D>::Ring::walk(
        p, memory, [&](const auto& rows, const EncodeJob& job) { TierEncoder<T, D>::encode(sm, rows, p, job, page); });
}

} // namespace

cudaError_t launch_encode_tiers(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    if (page.kind != StoreKind::tiered || page.side != Side::key || page.map_entries > 0 || page.raw_live > 0 ||
        page.zero_bits > 0 || page.groups != 1 || page.along_depth || page.params != ParamType::f16 ||
        page.clip != 1.0f || page.columns > page.dim + 224 ||
        (page.rule != GridRule::asym && page.rule != GridRule::midpoint))
        return cudaErrorNotSupported;
    if (p.count == 0) return cudaSuccess;
    return with_rows(p.type, page.dim, [&](auto rows, auto dim) {
        constexpr int kD = decltype(dim)::value;
        return RowRing<kD, true>::launch(encode_tiers<typename decltype(rows)::Type, kD>, p, stream, page);
    });
}

} // namespace kvmosaic::cuda
