// New rows of a step: stored raw, and what falls out of the windows packed. One block for a (sequence, KV head).
//
// Bound: latency. A block reads and writes a few hundred bytes; once in 128 steps of a sequence it also encodes a page
// of keys. Codes of one token own whole bytes of the 2- and 4-bit planes of an open value page, so nothing is read
// back but the bytes of a 1-bit plane, which two tokens share.
#include "kernels/cuda/encode_page.cuh"

namespace kvmosaic::cuda {
namespace {

template <class T>
struct Raw;
template <>
struct Raw<HalfRows> {
    static __device__ __forceinline__ float get(uint16_t x) { return __half2float(__ushort_as_half(x)); }
    static __device__ __forceinline__ uint16_t put(float x) { return __half_as_ushort(half_saturated(x)); }
};
template <>
struct Raw<Bf16Rows> {
    static __device__ __forceinline__ float get(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
    static __device__ __forceinline__ uint16_t put(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }
};

// NaN becomes 0 and infinities +-65504, as in store_raw of the CPU.
__device__ __forceinline__ float contained(float x) {
    if (x != x) return 0.0f;
    return fabsf(x) == INFINITY ? copysignf(65504.0f, x) : x;
}

// Packs one token of a value page: thread c has channel c. smem: codes [D], {min, max} [D / 32].
template <class T, int D>
__device__ void pack_value(const AppendParams& p, float x, int token, uint8_t* page, uint8_t* codes, float2* ranges) {
    const int c = threadIdx.x, warp = c >> 5, lane = c & 31;
    if (token == 0) { // opens the page
        for (uint32_t i = c; i < p.value_bytes / 16; i += D)
            reinterpret_cast<uint4*>(page)[i] = make_uint4(0, 0, 0, 0);
    }
    float low = x, high = x;
#pragma unroll
    for (int s = 16; s >= 1; s >>= 1) {
        low = fminf(low, __shfl_xor_sync(~0u, low, s));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, s));
    }
    if (lane == 0) ranges[warp] = make_float2(low, high);
    __syncthreads();
    const int warps = D / 32 / p.value_groups, group = warp / warps; // warps of a group
    for (int w = group * warps; w < (group + 1) * warps; ++w)
        low = fminf(low, ranges[w].x), high = fmaxf(high, ranges[w].y);
    const float top = float((1 << p.value_bits) - 1);
    const DeviceGrid grid = make_device_grid(low, high, top);
    codes[c] = uint8_t(device_code_of(x, grid.z, grid.inverse, top));
    if (c == group * warps * 32) {
        const int at = group * 128 + param_place(p.value_bits, token);
        reinterpret_cast<__half*>(page + p.value_scales)[at] = grid.stored_s;
        reinterpret_cast<__half*>(page + p.value_zeros)[at] = grid.stored_z;
    }
    __syncthreads();
    if (c < D / 4) {
        constexpr int kQuads = D / 64;
        const int quad = c >> 4, row = c & 15, step = token >> 4, k = row_of_place(token & 15);
        uint32_t code[4];
#pragma unroll
        for (int f = 0; f < 4; ++f)
            code[f] = codes[64 * quad + 32 * (f >> 1) + 4 * (row & 7) + 2 * (f & 1) + (row >> 3)];
        const uint32_t in_set =
            uint32_t(((row & 7) * 4 + ((k & 7) >> 1)) * 16 + ((row >> 3) + 2 * (k >> 3)) * 4 + 2 * (k & 1));
        const auto pick = [&](int shift, uint32_t mask, int by) {
            uint32_t v = 0;
#pragma unroll
            for (int f = 0; f < 4; ++f)
                v |= ((code[f] >> shift) & mask) << (by * f);
            return v;
        };
        const auto two = [&](uint32_t base, int shift) {
            page[base + uint32_t((step >> 1) * kQuads + quad) * kSetBytes + in_set + uint32_t(step & 1)] =
                uint8_t(pick(shift, 3u, 2));
        };
        const auto four = [&](uint32_t base, int shift) {
            *reinterpret_cast<uint16_t*>(page + base + uint32_t(step * kQuads + quad) * kSetBytes + in_set) =
                uint16_t(pick(shift, 15u, 4));
        };
        const auto one = [&](uint32_t base, int shift) {
            uint8_t& to =
                page[base + uint32_t((step >> 2) * kQuads + quad) * kSetBytes + in_set + uint32_t((step >> 1) & 1)];
            to = uint8_t(to | pick(shift, 1u, 2) << (step & 1));
        };
        switch (p.value_bits) {
        case 1:
            one(0, 0);
            break;
        case 2:
            two(0, 0);
            break;
        case 3:
            two(0, 0), one(p.value_plane, 2);
            break;
        case 4:
            four(0, 0);
            break;
        case 6:
            two(0, 0), two(p.value_plane, 2), two(2 * p.value_plane, 4);
            break;
        default:
            four(0, 0), four(2 * p.value_plane, 4);
        }
    }
    __syncthreads();
}

// T: raw rows. BITS, NG: the key grid; BITS = 0: keys are sealed by another kernel.
template <class T, int D, int BITS, int NG>
__global__ void __launch_bounds__(D) append_rows(const AppendParams p) {
    __shared__ uint8_t codes[D];
    __shared__ float2 ranges[D / 32];
    // The states are older than the kernel before (device.h): what attention reads before its wait is older still.
    let_next_kernel_start();
    const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x - sequence * p.kv_heads, c = threadIdx.x;
    const SequenceState s = p.states[sequence];
    const int64_t head = int64_t(s.slot) * p.kv_heads + kv_head;
    const device::LayerMemory& m = p.memory;
    const auto place = [&](const device::SideMemory& side, int row) {
        uint16_t* base = static_cast<uint16_t*>(row < s.front ? side.front.base : side.recent.base);
        const int capacity = row < s.front ? side.front.capacity : side.recent.capacity;
        return base + (head * capacity + (row < s.front ? row : (row - s.front) % capacity)) * D;
    };
    // Values of earlier rows, then the new rows, then what is due of those.
    const int old = min(max(s.rows - p.new_rows - s.front, s.value_before), s.value_packed);
    const auto pack_values = [&](int from, int to) {
        for (int at = from; at < to; ++at) {
            const PageRef ref = m.value.pages[head * m.table_stride + at / kPageTokens];
            pack_value<T, D>(p, Raw<T>::get(place(m.value, s.front + at)[c]), at % kPageTokens,
                             m.value.pool + int64_t(ref.unit) * kUnit, codes, ranges);
        }
    };
    // Pages that are packed whole are left to their own call.
    const int packed = p.value_bits > 0 ? s.value_packed : s.value_before;
    int from_value = s.value_before, to_value = min(old, packed);
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        pack_values(from_value, to_value);
        if (pass == 1) break;
        from_value = to_value, to_value = packed;
        wait_for_previous_kernel();
        for (int r = 0; r < p.new_rows; ++r) {
            const int row = s.rows - p.new_rows + r;
            const int64_t from = ((int64_t(sequence) * p.new_rows + r) * p.kv_heads + kv_head) * D + c;
            const uint16_t k = static_cast<const uint16_t*>(p.k)[from], v = static_cast<const uint16_t*>(p.v)[from];
            const bool bf16 = p.type == ElementType::bf16;
            place(m.key, row)[c] = Raw<T>::put(contained(bf16 ? Raw<Bf16Rows>::get(k) : Raw<HalfRows>::get(k)));
            place(m.value, row)[c] = Raw<T>::put(contained(bf16 ? Raw<Bf16Rows>::get(v) : Raw<HalfRows>::get(v)));
        }
        __syncthreads();
    }
    if constexpr (BITS > 0) {
        for (int at = s.key_before / kPageTokens * kPageTokens; at + kPageTokens <= s.key_packed; at += kPageTokens) {
            const PageRef ref = m.key.pages[head * m.table_stride + at / kPageTokens];
            encode_key_page<T, D, BITS, NG>(GlobalRows{place(m.key, s.front + at), D},
                                            m.key.pool + int64_t(ref.unit) * kUnit, p.key_scales, p.key_zeros);
        }
    }
}

__global__ void advance_states(const AdvanceParams p) {
    wait_for_previous_kernel();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.sequences) return;
    SequenceState s = p.states[i];
    s.stable_pages = min(s.key_packed, s.value_packed) / kPageTokens;
    s.key_before = s.key_packed, s.value_before = s.value_packed;
    s.rows += p.new_rows;
    s.front = min(max(p.key.front, p.value.front), s.rows);
    const auto packed = [&](const device::RowWindow& w, int before) { // Window::packed_after
        const int rows = s.rows - s.front;
        return w.flush == 0 || rows < w.first || rows - before < w.keep + w.flush
                   ? before
                   : before + (rows - before - w.keep) / w.flush * w.flush;
    };
    s.key_packed = packed(p.key, s.key_packed), s.value_packed = packed(p.value, s.value_packed);
    p.states[i] = s;
}

// One block for a (sequence, KV head), a thread a channel: sums in the order of the CPU.
template <class T>
__global__ void add_query_rows(const device::QueryCall p) {
    wait_for_previous_kernel();
    const int sequence = blockIdx.x / p.kv_heads, kv_head = blockIdx.x - sequence * p.kv_heads, c = threadIdx.x;
    const int group = p.heads / p.kv_heads;
    const int64_t head = int64_t(p.states[sequence].slot) * p.kv_heads + kv_head;
    float sum = p.sums[head * p.dim + c];
    for (int r = 0; r < p.new_rows; ++r)
        for (int g = 0; g < group; ++g) {
            const int64_t row = (int64_t(sequence) * p.new_rows + r) * p.heads + kv_head * group + g;
            const uint16_t x = static_cast<const uint16_t*>(p.q)[row * p.dim + c];
            const float q = p.type == ElementType::bf16 ? Raw<Bf16Rows>::get(x) : Raw<HalfRows>::get(x);
            const float kept = fabsf(Raw<T>::get(Raw<T>::put(q)));
            if (isfinite(q)) sum = __fadd_rn(sum, p.squares ? __fmul_rn(kept, kept) : kept);
        }
    p.sums[head * p.dim + c] = sum;
    if (c == 0) p.counts[head] += p.new_rows * group;
}

template <class T, int D, int BITS>
cudaError_t launch_groups(int groups, const AppendParams& p, cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(p.sequences * p.kv_heads));
    config.blockDim = dim3(D);
    config.stream = stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute;
    config.numAttrs = 1;
    if constexpr (BITS > 0)
        if (groups == 4) return cudaLaunchKernelEx(&config, append_rows<T, D, BITS, 4>, p);
    if (groups != 1) return cudaErrorNotSupported;
    return cudaLaunchKernelEx(&config, append_rows<T, D, BITS, 1>, p);
}

template <class T, int D>
cudaError_t launch_bits(const DevicePage& key, const AppendParams& p, cudaStream_t stream) {
    if (key.kind == StoreKind::tiered) return launch_groups<T, D, 0>(1, p, stream);
    switch (key.tiers[0].bits) {
    case 2:
        return launch_groups<T, D, 2>(key.groups, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    case 3:
        return launch_groups<T, D, 3>(key.groups, p, stream);
    case 4:
        return launch_groups<T, D, 4>(key.groups, p, stream);
#endif
    default:
        return cudaErrorNotSupported;
    }
}

} // namespace

cudaError_t launch_append(const DevicePage& key, const AppendParams& p, cudaStream_t stream) {
    if (p.sequences == 0) return cudaSuccess;
    const bool bf16 = p.memory.raw == ElementType::bf16;
    if (key.dim == 128)
        return bf16 ? launch_bits<Bf16Rows, 128>(key, p, stream) : launch_bits<HalfRows, 128>(key, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    if (key.dim == 64)
        return bf16 ? launch_bits<Bf16Rows, 64>(key, p, stream) : launch_bits<HalfRows, 64>(key, p, stream);
#endif
    return cudaErrorNotSupported;
}

cudaError_t launch_advance(const AdvanceParams& p, cudaStream_t stream) {
    if (p.sequences == 0) return cudaSuccess;
    advance_states<<<unsigned((p.sequences + 127) / 128), 128, 0, stream>>>(p);
    return cudaGetLastError();
}

cudaError_t launch_add_queries(const device::QueryCall& p, cudaStream_t stream) {
    if (p.sequences == 0) return cudaSuccess;
    const auto blocks = unsigned(p.sequences * p.kv_heads), threads = unsigned(p.dim);
    if (p.raw == ElementType::bf16)
        add_query_rows<Bf16Rows><<<blocks, threads, 0, stream>>>(p);
    else
        add_query_rows<HalfRows><<<blocks, threads, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace kvmosaic::cuda
