// Pages of any store back to rows: the way to attention for what no fused kernel reads.
//
// Bound: instructions, about forty for a value (the place of a code, its parameters, the rule), not bytes. A block
// takes a page, 16 tokens at a time through shared memory, so that rows leave in one piece whatever the order of
// channels.
#include "kernels/cuda/restore.h"

#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {
namespace {

constexpr int kThreads = 256, kTokens = 16;

__device__ float f8e4m3_value(uint32_t b) {
    const uint32_t e = b >> 3 & 15, m = b & 7;
    float x = e == 0 ? float(m) * 0x1p-9f : __uint_as_float((e + 120) << 23 | m << 20);
    if ((b & 127) == 127) x = __uint_as_float(0x7FC00000u);
    return b & 128 ? -x : x;
}
__device__ float param(const DevicePage& page, const uint8_t* bytes, uint32_t offset, uint32_t i) {
    const uint8_t* base = bytes + offset;
    switch (page.params) {
    case ParamType::f16:
        return __half2float(reinterpret_cast<const __half*>(base)[i]);
    case ParamType::bf16:
        return __uint_as_float(uint32_t(reinterpret_cast<const uint16_t*>(base)[i]) << 16);
    default:
        return f8e4m3_value(base[i]);
    }
}

// open_grid of src/kernels/grid.h.
__device__ void open_grid(GridRule rule, int bits, int levels, float* s, float* z) {
    const float steps = float(levels > 0 ? levels / 2 : (1 << (bits - 1)) - 1);
    switch (rule) {
    case GridRule::integer:
        if (*s != 0.0f) *z = __fmul_rn(*s, *z);
        return;
    case GridRule::symmetric:
        *z = __fmul_rn(-steps, *s);
        return;
    case GridRule::extreme:
        *z = __fmul_rn(-float(1 << (bits - 1)), *s);
        return;
    case GridRule::hybrid_1bit:
    case GridRule::hybrid_4level:
        if (signbit(*s))
            *s = -*s;
        else
            *z = __fmul_rn(-steps, *s);
        return;
    default:
        return;
    }
}

// The page that a ladder code stands for: every tier is full, and what is not live is 0.
__device__ void set_tiers(const RestoreParams& p, uint32_t code, DevicePage& page) {
    uint32_t at = 0, column = 0;
    page.tier_count = 0, page.raw_live = page.raw_padded = 0;
    for (int i = 0; i < p.width_count; ++i) {
        const int bits = p.widths[i];
        const uint32_t granule = bits == 16 ? 8 : bits == 1 || bits == 3 ? 64 : bits == 2 || bits == 6 ? 32 : 16;
        const uint32_t padded = (code >> (8 * i) & 255u) * granule;
        if (bits == 16) {
            page.raw_live = page.raw_padded = uint16_t(padded);
        } else if (padded > 0) {
            DeviceTier& tier = page.tiers[page.tier_count++];
            tier.bits = uint8_t(bits), tier.live = tier.padded = uint16_t(padded), tier.column = uint16_t(column);
            tier.offset = at;
            at += padded * page.quads * kQuadLanes * uint32_t(bits) / 8, column += padded;
        }
    }
    const uint32_t size = page.params == ParamType::f8e4m3 ? 1 : 2;
    page.columns = uint16_t(column);
    page.raw_offset = at;
    at += uint32_t(page.raw_padded) * page.quads * kQuadLanes * 2;
    const uint32_t params = (uint32_t(page.groups) * column * size + 15) / 16 * 16;
    page.scale_offset = at, page.zero_offset = at + params;
    page.map_offset = at + 2 * params;
}

__device__ int group_of(const RestoreParams& p, const DevicePage& page, int i) {
    if (page.group > 0) return i / page.group;
    int g = 0;
    while (i >= p.edges[g + 1])
        ++g;
    return g;
}

__global__ void __launch_bounds__(kThreads) restore_pages(const __grid_constant__ RestoreParams p) {
    extern __shared__ float rows[]; // [kTokens][dim]
    __shared__ DevicePage page;
    wait_for_previous_kernel();
    const device::RestoreJob job = p.jobs[blockIdx.x];
    const uint8_t* bytes = p.pool + int64_t(job.unit) * kUnit;
    if (threadIdx.x == 0) {
        page = p.page;
        if (p.width_count > 0) set_tiers(p, job.tiers, page);
    }
    __syncthreads();
    const int dim = page.dim;
    const bool key = page.side == Side::key;
    const auto channel_at = [&](int ladder, int entry) {
        if (page.map_entries == 0) return ladder;
        return page.map_element == 2 ? int(reinterpret_cast<const uint16_t*>(bytes + page.map_offset)[entry])
                                     : int(bytes[page.map_offset + uint32_t(entry)]);
    };
    for (int first = 0; first < kPageTokens; first += kTokens) {
        for (int i = threadIdx.x; i < kTokens * dim; i += kThreads)
            rows[i] = 0.0f;
        __syncthreads();
        for (int t = 0; t < page.tier_count; ++t) {
            const DeviceTier& tier = page.tiers[t];
            const int width = key ? tier.live : dim;
            for (int i = threadIdx.x; i < kTokens * width; i += kThreads) {
                // Neighbouring threads read neighbouring places: tokens of a key page, channels of a value page.
                const int token = key ? i % kTokens : i / width, at = key ? i / kTokens : i % width;
                const int lane = key ? first + token : at, pos = key ? at : first + token;
                const int ladder = tier.first + at;
                const int group = group_of(p, page, page.along_depth ? (key ? ladder : pos) : lane);
                const uint32_t index = param_index(page, tier.bits, tier.column, group, page.along_depth ? lane : pos);
                float s = page.scales ? param(page, bytes, page.scale_offset, index) : 1.0f;
                float z = page.offsets ? param(page, bytes, page.zero_offset, index) : 0.0f;
                if (p.width_count > 0 && s == 0.0f && z == 0.0f) continue; // dead, or a channel of zeros
                open_grid(page.rule, tier.bits, page.levels, &s, &z);
                const int code = device_code(page, tier, lane, pos, bytes);
                const float level = page.kind == StoreKind::codebook ? p.book[code] : float(code);
                const int channel = key ? channel_at(ladder, page.raw_padded + tier.column + at) : at;
                rows[token * dim + channel] = __fadd_rn(z, __fmul_rn(s, level));
            }
        }
        for (int i = threadIdx.x; i < kTokens * page.raw_live; i += kThreads) {
            const int token = i % kTokens, r = i / kTokens;
            const __half x = *reinterpret_cast<const __half*>(
                bytes + raw_site(page.side, page.raw_offset, page.quads, first + token, r));
            if (p.width_count == 0 || __half2float(x) != 0.0f) rows[token * dim + channel_at(r, r)] = __half2float(x);
        }
        for (int i = threadIdx.x; i < kTokens * page.zero_bits; i += kThreads) {
            const int token = i % kTokens, at = i / kTokens;
            const uint32_t index = uint32_t(group_of(p, page, first + token)) * page.columns + page.zero_column + at;
            const int channel = channel_at(dim - page.zero_bits + at, page.raw_padded + page.zero_column + at);
            rows[token * dim + channel] = param(page, bytes, page.zero_offset, index);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < kTokens * page.outliers; i += kThreads) {
            const int token = i / page.outliers;
            const uint16_t* slot = reinterpret_cast<const uint16_t*>(
                bytes + page.outlier_offset +
                (uint32_t(first + token) * page.outliers + uint32_t(i % page.outliers)) * 4);
            if (slot[0] < dim) rows[token * dim + slot[0]] = __half2float(__ushort_as_half(slot[1]));
        }
        if (page.outliers > 0) __syncthreads();
        for (int i = threadIdx.x; i < kTokens * dim; i += kThreads) {
            const int64_t at = job.row + int64_t(first + i / dim) * p.row_stride + i % dim;
            const float x = rows[i];
            if (p.type == ElementType::f32)
                static_cast<float*>(p.rows)[at] = x;
            else if (p.type == ElementType::f16)
                static_cast<__half*>(p.rows)[at] = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
            else
                static_cast<__nv_bfloat16*>(p.rows)[at] = __float2bfloat16_rn(x);
        }
        __syncthreads();
    }
}

} // namespace

RestoreParams restore_params(const PageLayout& page) {
    RestoreParams p;
    p.page = device_page(page);
    if (page.book && page.tier_count > 0)
        for (int i = 0; i < 1 << page.tiers[0].bits; ++i)
            p.book[i] = page.book[i];
    if (page.edges)
        for (int i = 0; i <= page.groups && i <= kMostEdges; ++i)
            p.edges[i] = page.edges[i];
    return p;
}

cudaError_t launch_restore(const RestoreParams& p, cudaStream_t stream) {
    if (p.page.kind == StoreKind::raw) return cudaErrorNotSupported;
    if (p.count == 0) return cudaSuccess;
    restore_pages<<<unsigned(p.count), kThreads, size_t(kTokens) * p.page.dim * 4, stream>>>(p);
    return cudaGetLastError();
}

} // namespace kvmosaic::cuda
