// What the benchmark and the parity tests of the GPU share: pools of pages with repeatable random content, page tables
// in random order, and attention in double precision over the decoded values, by code that knows the page order from
// DevicePage alone.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cuda/attend.h"
#include "kernels/cuda/order.h"

namespace kvmosaic::cuda::bench {

#define KVMOSAIC_CUDA_CHECK(call)                                                                                      \
    do {                                                                                                               \
        const cudaError_t error_ = (call);                                                                             \
        if (error_ != cudaSuccess) {                                                                                   \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_));            \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

template <class T>
struct DeviceArray {
    T* data = nullptr;
    size_t size = 0;
    DeviceArray() = default;
    explicit DeviceArray(size_t n) : size(n) { KVMOSAIC_CUDA_CHECK(cudaMalloc(&data, (n ? n : 1) * sizeof(T))); }
    explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) { copy_from(from); }
    DeviceArray(DeviceArray&& o) noexcept : data(o.data), size(o.size) { o.data = nullptr; }
    DeviceArray& operator=(DeviceArray&& o) noexcept {
        if (this != &o) cudaFree(data), data = o.data, size = o.size, o.data = nullptr;
        return *this;
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data); }
    void copy_from(const std::vector<T>& from) {
        KVMOSAIC_CUDA_CHECK(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> to_host() const {
        std::vector<T> v(size);
        KVMOSAIC_CUDA_CHECK(cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    void poison() { KVMOSAIC_CUDA_CHECK(cudaMemset(data, 0xFF, size * sizeof(T))); }
};

__host__ __device__ inline uint32_t hash(uint32_t a, uint32_t b) {
    uint32_t x = a * 0x9E3779B1u ^ (b + 0x85EBCA77u) * 0xC2B2AE3Du;
    x ^= x >> 15, x *= 0x2C1B3C6Du, x ^= x >> 12, x *= 0x297A2D39u, x ^= x >> 15;
    return x;
}
__host__ __device__ inline float uniform(uint32_t a, uint32_t b) { return float(hash(a, b) >> 8) * 0x1p-24f; }

__host__ __device__ inline bool is_hybrid(GridRule rule) {
    return rule == GridRule::hybrid_1bit || rule == GridRule::hybrid_4level;
}

// Random codes, scales and offsets that give values of about [-1.2, 1.2]; raw channels likewise; the map a rotation
// that differs from page to page.
__global__ static void fill_pages(DevicePage page, uint8_t* pool, int64_t stride, uint32_t seed) {
    uint8_t* to = pool + int64_t(blockIdx.x) * stride;
    const uint32_t id = seed + blockIdx.x * 7919u;
    for (uint32_t i = threadIdx.x; i < page.bytes / 4; i += blockDim.x)
        reinterpret_cast<uint32_t*>(to)[i] = i * 4 < page.raw_offset ? hash(id, i) : 0u;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < uint32_t(page.raw_live) * page.lanes; i += blockDim.x) {
        const int lane = int(i % page.lanes), position = int(i / page.lanes);
        *reinterpret_cast<__half*>(to + raw_site(page.side, page.raw_offset, page.quads, lane, position)) =
            __float2half(2.4f * uniform(id + 1, i) - 1.2f);
    }
    for (int t = 0; t < page.tier_count; ++t) {
        const DeviceTier& tier = page.tiers[t];
        const float top = float(page.levels ? page.levels - 1 : (1 << tier.bits) - 1);
        const int n = page.along_depth ? page.columns : tier.padded;
        for (int g = 0; g < page.groups; ++g)
            for (int c = threadIdx.x; c < n; c += blockDim.x) {
                const bool dead = !page.along_depth && c >= tier.live;
                const uint32_t i = uint32_t(g) * page.columns +
                                   uint32_t(page.along_depth ? c : tier.column + param_place(tier.bits, c));
                // Rules without offsets: the range of 2.4 around 0.
                float s = dead ? 0.0f : (1.6f + 0.8f * uniform(id + 2, i)) / top;
                const float z = dead ? 0.0f : -1.1f + 0.5f * (uniform(id + 3, i) - 0.5f);
                // The sign says which of two grids a group has.
                if (is_hybrid(page.rule) && hash(id + 4, i) & 1) s = -s;
                if (page.scales) reinterpret_cast<__half*>(to + page.scale_offset)[i] = __float2half(s);
                if (page.offsets) reinterpret_cast<__half*>(to + page.zero_offset)[i] = __float2half(z);
            }
    }
    if (page.map_entries > 0) {
        const auto put = [&](int entry, int position) {
            to[page.map_offset + entry] = uint8_t((position * 5 + id) % uint32_t(page.dim));
        };
        for (int r = threadIdx.x; r < page.raw_live; r += blockDim.x)
            put(r, r);
        for (int t = 0; t < page.tier_count; ++t)
            for (int c = threadIdx.x; c < page.tiers[t].live; c += blockDim.x)
                put(page.raw_padded + page.tiers[t].column + c, page.tiers[t].first + c);
    }
}

__device__ inline float half_at(const uint8_t* base, uint32_t i) {
    return __half2float(reinterpret_cast<const __half*>(base)[i]);
}

__device__ inline float level_of(const BookTable& book, int code) {
    const int shift = 8 * (code % 4);
    const uint32_t bits = (book.low[code / 4] >> shift & 255u) | (book.high[code / 4] >> shift & 255u) << 8;
    return __half2float(__ushort_as_half(uint16_t(bits)));
}

// Value of (token, channel) of a page; slow.
__device__ inline float decode_at(const DevicePage& page, const BookTable& book, const uint8_t* bytes, int token,
                                  int channel) {
    const bool key = page.side == Side::key;
    const int lane = key ? token : channel;
    int position = key ? channel : token;
    const uint8_t* map = bytes + page.map_offset;
    if (page.map_entries > 0) {
        position = -1;
        for (int r = 0; r < page.raw_live; ++r)
            if (map[r] == channel) return half_at(bytes + raw_site(page.side, page.raw_offset, page.quads, lane, r), 0);
    }
    for (int t = 0; t < page.tier_count; ++t) {
        const DeviceTier& tier = page.tiers[t];
        int at = position;
        if (page.map_entries > 0) {
            at = -1;
            for (int c = 0; c < tier.live; ++c)
                if (map[page.raw_padded + tier.column + c] == channel) at = c;
            if (at < 0) continue;
        } else {
            at -= tier.first;
            if (at < 0 || at >= tier.live) continue;
        }
        const int group = (page.along_depth ? position : lane) / page.group;
        const uint32_t i = param_index(page, tier.bits, tier.column, group, page.along_depth ? lane : at);
        float s = page.scales ? half_at(bytes + page.scale_offset, i) : 1.0f;
        float z = page.offsets ? half_at(bytes + page.zero_offset, i) : 0.0f;
        const float middle = float((1 << (tier.bits - 1)) - 1);
        if (page.rule == GridRule::symmetric || (is_hybrid(page.rule) && s > 0.0f)) z = -middle * s;
        if (is_hybrid(page.rule)) s = fabsf(s);
        const int code = device_code(page, tier, lane, at, bytes);
        return z + s * (page.kind == StoreKind::codebook ? level_of(book, code) : float(code));
    }
    return 0.0f;
}

struct ReferenceInput {
    AttendParams attend;
    DevicePage key, value;
    const SequenceState* states; // device
    int dim;
};

__device__ inline float raw_at(const RawRows& rows, int64_t head, int row, int dim, int channel, ElementType type) {
    const uint16_t* p =
        static_cast<const uint16_t*>(rows.base) + (head * rows.capacity + row % rows.capacity) * dim + channel;
    return type == ElementType::bf16 ? __uint_as_float(uint32_t(*p) << 16)
                                     : __half2float(*reinterpret_cast<const __half*>(p));
}
__device__ inline float row_at(const ReferenceInput& in, const SequenceState& s, bool key, int64_t head, int row,
                               int channel) {
    const AttendParams& a = in.attend;
    const int beyond = row - s.front, packed = key ? s.key_packed : s.value_packed;
    if (beyond < 0) return raw_at(key ? a.key_front : a.value_front, head, row, in.dim, channel, a.raw_type);
    if (beyond >= packed) return raw_at(key ? a.key_recent : a.value_recent, head, beyond, in.dim, channel, a.raw_type);
    const PageRef ref = (key ? a.key_pages : a.value_pages)[head * a.table_stride + beyond / kPageTokens];
    return decode_at(key ? in.key : in.value, a.book, (key ? a.key_pool : a.value_pool) + int64_t(ref.unit) * kUnit,
                     beyond % kPageTokens, channel);
}
__device__ inline float q_at(const AttendParams& a, int64_t i) {
    if (a.q_type == ElementType::f32) return static_cast<const float*>(a.q)[i];
    const uint16_t bits = static_cast<const uint16_t*>(a.q)[i];
    return a.q_type == ElementType::bf16 ? __uint_as_float(uint32_t(bits) << 16)
                                         : __half2float(*reinterpret_cast<const __half*>(&bits));
}

// logits[blockIdx.y][row]: one query row and head (heads[blockIdx.y] = (sequence * rows + query row) * H + head).
__global__ static void reference_scores(ReferenceInput in, const int* heads, double* logits, int max_rows) {
    const AttendParams& a = in.attend;
    const int id = heads[blockIdx.y], head = id % a.heads, row = id / a.heads % a.rows,
              sequence = id / a.heads / a.rows;
    const SequenceState s = in.states[sequence];
    const int64_t kv = int64_t(s.slot) * a.kv_heads + head / (a.heads / a.kv_heads);
    const int visible = s.rows - (a.rows - 1 - row);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < visible; i += gridDim.x * blockDim.x) {
        double sum = 0.0;
        for (int c = 0; c < in.dim; ++c)
            sum += double(q_at(a, int64_t(id) * in.dim + c)) * double(row_at(in, s, true, kv, i, c));
        logits[int64_t(blockIdx.y) * max_rows + i] = sum * double(a.scale_log2);
    }
}
// out[blockIdx.x][dim]; one thread a channel and slice.
__global__ static void reference_mix(ReferenceInput in, const int* heads, const double* logits, double* out,
                                     int max_rows) {
    extern __shared__ double shared[];
    const AttendParams& a = in.attend;
    const int id = heads[blockIdx.x], head = id % a.heads, row = id / a.heads % a.rows,
              sequence = id / a.heads / a.rows;
    const SequenceState s = in.states[sequence];
    const int64_t kv = int64_t(s.slot) * a.kv_heads + head / (a.heads / a.kv_heads);
    const int visible = s.rows - (a.rows - 1 - row), slices = blockDim.x / in.dim;
    const int channel = threadIdx.x % in.dim, slice = threadIdx.x / in.dim;
    const double* l = logits + int64_t(blockIdx.x) * max_rows;
    double m = -1e300;
    for (int i = threadIdx.x; i < visible; i += blockDim.x)
        m = fmax(m, l[i]);
    shared[threadIdx.x] = m;
    __syncthreads();
    for (int i = 0; i < blockDim.x; ++i)
        m = fmax(m, shared[i]);
    __syncthreads();
    double sum = 0.0, weight = 0.0;
    for (int i = slice; i < visible && slice < slices; i += slices) {
        const double p = exp2(l[i] - m);
        weight += p;
        sum += p * double(row_at(in, s, false, kv, i, channel));
    }
    shared[threadIdx.x] = sum, shared[blockDim.x + threadIdx.x] = weight;
    __syncthreads();
    if (slice == 0) {
        for (int k = 1; k < slices; ++k)
            sum += shared[k * in.dim + channel], weight += shared[blockDim.x + k * in.dim + channel];
        out[int64_t(blockIdx.x) * in.dim + channel] = weight > 0.0 ? sum / weight : 0.0;
    }
}

} // namespace kvmosaic::cuda::bench
