// Key pages in tiers that are given and whose order lies outside of the page (PN-Mix), a page a block.
//
// Bound: as encode_mix: bytes read, and a load from shared memory and about eight instructions for each code; the two
// planes of 3 bits compute their codes twice.
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/order.h"

namespace kvmosaic::cuda {
namespace {

constexpr int kMostColumns = 512; // padded channels of all tiers

template <class T, int D>
struct PageEncoder {
    static constexpr int kRowBytes = 2 * D + 8; // the padding spreads the rows of a tile over the banks
    struct Shared {
        uint8_t rows[128 * kRowBytes];
        float z[kMostColumns], inverse[kMostColumns]; // of each column
        uint16_t channel[kMostColumns];
    };
    Shared& sm;

    __device__ float value(int token, int c) const {
        return T::unpack(*reinterpret_cast<const uint16_t*>(sm.rows + token * kRowBytes + 2 * c)).x;
    }
    // One set of a plane: STEPS steps from `column` on, a quad of tokens. place(e): lowest bit of step e's fields in a
    // half, which are BY apart; code bits: (code >> shift) & mask.
    template <int STEPS, int BY, class Place>
    __device__ void set(uint8_t* to, int column, int quad, int lane, float top, int shift, uint32_t mask,
                        Place place) const {
        const int g = lane >> 2, t = lane & 3, token0 = 64 * quad + 4 * (g >> 1) + (g & 1);
        uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < STEPS; ++e)
#pragma unroll
            for (int y = 0; y < 4; ++y) {
                const int at = column + 16 * e + 4 * t + y, c = sm.channel[at];
                const float z = sm.z[at], inverse = sm.inverse[at];
                if (inverse == 0.0f) continue; // dead, or one level for all: code 0
#pragma unroll
                for (int f = 0; f < 4; ++f)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t code = device_code_of(value(token0 + 16 * f + 2 * half, c), z, inverse, top);
                        w[half + 2 * (y >> 1)] |= (code >> shift & mask) << (16 * (y & 1) + place(e) + BY * f);
                    }
            }
        *reinterpret_cast<uint4*>(to + lane * 16) = make_uint4(w[0], w[1], w[2], w[3]);
    }
};

template <class T, int D>
__global__ void __launch_bounds__(D) encode_tiers(const EncodeParams p, const DevicePage page) {
    extern __shared__ __align__(16) uint8_t memory[];
    using Encoder = PageEncoder<T, D>;
    auto& sm = *reinterpret_cast<typename Encoder::Shared*>(memory);
    const Encoder encoder{sm};
    wait_for_previous_kernel();
    const EncodeJob job = p.jobs[blockIdx.x];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const uint16_t* rows = static_cast<const uint16_t*>(p.rows) + job.row;
    uint8_t* to = p.pool + int64_t(job.unit) * kUnit;
    constexpr int kParts = D / 8; // of a row, 16 bytes each
    for (int i = tid; i < 128 * kParts; i += D) {
        const int row = i / kParts, part = i % kParts;
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(rows + row * p.row_stride) + part);
        uint2* at = reinterpret_cast<uint2*>(sm.rows + row * Encoder::kRowBytes + part * 16);
        at[0] = make_uint2(x.x, x.y), at[1] = make_uint2(x.z, x.w);
    }
    for (int i = tid; i < page.columns; i += D) {
        sm.z[i] = sm.inverse[i] = 0.0f, sm.channel[i] = 0;
        reinterpret_cast<uint16_t*>(to + page.scale_offset)[i] = 0;
        reinterpret_cast<uint16_t*>(to + page.zero_offset)[i] = 0;
    }
    for (uint32_t i = page.zero_offset + page.columns * 2u + uint32_t(tid); i < page.bytes; i += D)
        to[i] = 0;
    __syncthreads();
    { // thread c: ladder position c
        int t = 0;
        while (t + 1 < page.tier_count && tid >= page.tiers[t + 1].first)
            ++t;
        const DeviceTier& tier = page.tiers[t];
        const int c = p.order ? p.order[int64_t(job.head) * D + tid] : tid;
        float low = encoder.value(0, c), high = low;
#pragma unroll 8
        for (int r = 1; r < 128; ++r) {
            const float x = encoder.value(r, c);
            low = fminf(low, x), high = fmaxf(high, x);
        }
        const DeviceGrid grid =
            make_device_grid(low, high, float((1 << tier.bits) - 1), page.rule == GridRule::midpoint && tier.bits == 1);
        const int pos = tid - tier.first, column = tier.column + pos;
        sm.z[column] = grid.z, sm.inverse[column] = grid.inverse, sm.channel[column] = uint16_t(c);
        const int at = tier.column + param_place(tier.bits, pos);
        reinterpret_cast<__half*>(to + page.scale_offset)[at] = grid.stored_s;
        reinterpret_cast<__half*>(to + page.zero_offset)[at] = grid.stored_z;
    }
    __syncthreads();
    for (int t = 0; t < page.tier_count; ++t) {
        const DeviceTier& tier = page.tiers[t];
        const int bits = tier.bits;
        const float top = float((1 << bits) - 1);
        uint32_t offset = tier.offset;
        for (int weight = 0; weight < bits;) { // plane by plane
            const int width = bits == 4 || bits == 8 ? 4 : bits - weight == 1 ? 1 : 2;
            const int steps = width == 4 ? 1 : width == 2 ? 2 : 4, sets = tier.padded / (16 * steps) * 2;
            for (int s = warp; s < sets; s += D / 32) {
                const int column = tier.column + (s >> 1) * 16 * steps, quad = s & 1;
                uint8_t* set = to + offset + uint32_t(s) * kSetBytes;
                if (width == 4)
                    encoder.template set<1, 4>(set, column, quad, lane, top, weight, 15u, [](int) { return 0; });
                else if (width == 2)
                    encoder.template set<2, 2>(set, column, quad, lane, top, weight, 3u, [](int e) { return 8 * e; });
                else
                    encoder.template set<4, 2>(set, column, quad, lane, top, weight, 1u,
                                               [](int e) { return 8 * (e >> 1) + (e & 1); });
            }
            offset += uint32_t(tier.padded) * 16u * uint32_t(width);
            weight += width;
        }
    }
}

template <class T, int D>
cudaError_t launch(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    constexpr int kBytes = int(sizeof(typename PageEncoder<T, D>::Shared));
    const cudaError_t error =
        cudaFuncSetAttribute(encode_tiers<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    encode_tiers<T, D><<<unsigned(p.count), D, kBytes, stream>>>(p, page);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_encode_tiers(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    if (page.kind != StoreKind::tiered || page.side != Side::key || page.map_entries > 0 || page.raw_live > 0 ||
        page.zero_bits > 0 || page.groups != 1 || page.along_depth || page.params != ParamType::f16 ||
        page.clip != 1.0f || page.columns > kMostColumns ||
        (page.rule != GridRule::asym && page.rule != GridRule::midpoint))
        return cudaErrorNotSupported;
    if (p.count == 0) return cudaSuccess;
    return with_rows(p.type, page.dim, [&](auto rows, auto dim) {
        return launch<typename decltype(rows)::Type, decltype(dim)::value>(page, p, stream);
    });
}

} // namespace kvmosaic::cuda
