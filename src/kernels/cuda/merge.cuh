// From the sums of warps to results: write-out, partial sums, and their merge in a fixed order.
//
// Bound: latency. A block adds at most `teams` partial sums of a head from shared memory; a head that several blocks
// share costs one round trip to global memory more, an arrival counter, and the reads of the block that comes last.
#pragma once

#include "kernels/cuda/attend.h"
#include "kernels/cuda/mix.cuh"

namespace kvmosaic::cuda {

// Query row of a column: column / group, exact for the columns that a launch can have.
__device__ __forceinline__ int row_of_column(const AttendParams& p, int column) {
    return int(uint32_t(column) * uint32_t(p.group_inverse) >> 16);
}

__device__ __forceinline__ void store_out(const AttendParams& p, int64_t at, float4 v) {
    if (p.out_type == ElementType::f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = v;
    } else if (p.out_type == ElementType::f16) {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
            make_uint2(pack_half2(v.x, v.y), pack_half2(v.z, v.w));
    } else {
        __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
            make_uint2(*reinterpret_cast<uint32_t*>(&a), *reinterpret_cast<uint32_t*>(&b));
    }
}

__device__ __forceinline__ void store_out2(const AttendParams& p, int64_t at, float a, float b) {
    if (p.out_type == ElementType::f32) {
        *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = make_float2(a, b);
    } else if (p.out_type == ElementType::f16) {
        *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at) = pack_half2(a, b);
    } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<uint16_t*>(p.out) + at) = __floats2bfloat162_rn(a, b);
    }
}

// Row of q and out of a column of one KV head.
__device__ __forceinline__ int64_t result_row(const AttendParams& p, int head, int column) {
    const int sequence = head / p.kv_heads, row = row_of_column(p, column);
    return (int64_t(sequence) * p.rows + row) * p.heads + (head - sequence * p.kv_heads) * p.group + column -
           row * p.group;
}

__device__ __forceinline__ float log_sum_of(float m, float l) { return 0.69314718056f * (m + __log2f(l)); }
__device__ __forceinline__ float inverse_or_zero(float l) { return l > 0.0f ? __frcp_rn(l) : 0.0f; }

// Where the sums of a head go: results, or the partial sums [8 * NT][D] of a warp with their {m, l}.
struct Target {
    float* partial = nullptr;
    float2* ml = nullptr;
};

// One piece of code for both, as cold code costs microseconds at the end of a short launch.
template <class V, int NT>
__device__ __forceinline__ void emit(const AttendParams& p, const Target& to, int head, int first_column,
                                     const Columns<NT>& col, const MixState<V::D, NT>& state, int lane) {
    const int g = lane >> 2, t = lane & 3, columns = p.rows * p.group;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = 8 * n + 2 * t + i, column = first_column + own;
            const float l = __shfl_sync(~0u, state.zero.get(n, i), 28 + t), m = col.max[n][i];
            const int64_t row = to.partial ? own : column < columns ? result_row(p, head, column) : -1;
            const float r = to.partial ? 1.0f : inverse_or_zero(l);
            if (g == 0 && row >= 0) {
                if (to.partial)
                    to.ml[own] = make_float2(l > 0.0f ? m : -1e30f, l); // nothing seen: m means nothing
                else if (p.log_sum)
                    p.log_sum[row] = log_sum_of(m, l);
            }
#pragma unroll
            for (int k = 0; k < V::NG; ++k) { // a group of channels has one offset sum
                const float z = V::zero_of(state, n, i, k, lane);
#pragma unroll
                for (int c = k * (V::D / 32) / V::NG; c < (k + 1) * (V::D / 32) / V::NG; ++c) {
                    const float fa = V::scale_of(2 * c), fb = V::scale_of(2 * c + 1);
                    const auto& a = state.o[2 * c][n];
                    const auto& b = state.o[2 * c + 1][n];
                    const float4 v = make_float4(r * fmaf(a[i], fa, z), r * fmaf(a[i + 2], fa, z),
                                                 r * fmaf(b[i], fb, z), r * fmaf(b[i + 2], fb, z));
                    const int64_t at = row * V::D + 32 * c + 4 * g;
                    if (to.partial)
                        *reinterpret_cast<float4*>(to.partial + at) = v;
                    else if (row >= 0)
                        store_out(p, at, v);
                }
            }
        }
}

struct Merged {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float m = -1e30f, l = 0.0f;
    __device__ __forceinline__ void add(float4 v, float2 ml) {
        const float top = fmaxf(m, ml.x), old = fast_exp2(m - top), f = fast_exp2(ml.x - top);
        sum.x = fmaf(v.x, f, sum.x * old), sum.y = fmaf(v.y, f, sum.y * old);
        sum.z = fmaf(v.z, f, sum.z * old), sum.w = fmaf(v.w, f, sum.w * old);
        l = fmaf(ml.y, f, l * old);
        m = top;
    }
};

template <class V>
__device__ __forceinline__ void store_merged(const AttendParams& p, int head, int column, int channel,
                                             const Merged& a) {
    const int64_t row = result_row(p, head, column);
    const float r = inverse_or_zero(a.l);
    store_out(p, row * V::D + channel, make_float4(a.sum.x * r, a.sum.y * r, a.sum.z * r, a.sum.w * r));
    if (p.log_sum && channel == 0) p.log_sum[row] = log_sum_of(a.m, a.l);
}

// The last block of a head: adds the sums of all its blocks. Order: first to last within a thread group, then groups.
template <class V>
__device__ __forceinline__ void merge_blocks(const AttendParams& p, uint8_t* memory, int head, int columns) {
    constexpr int kVectors = V::D / 4, kBatch = 4;
    const HeadPlan plan = p.heads_plan[head];
    const int elements = columns * kVectors, threads = blockDim.x;
    const int groups = elements < threads ? threads / elements : 1;
    const int group = elements < threads ? int(threadIdx.x) / elements : 0;
    float4* sums = reinterpret_cast<float4*>(memory);
    float2* states = reinterpret_cast<float2*>(memory + threads * 16);
#pragma unroll 1
    for (int e0 = 0; e0 < elements; e0 += threads) {
        const int e = e0 + int(threadIdx.x) - group * elements, column = e / kVectors, vector = e % kVectors;
        const bool live = group < groups && e < elements;
        Merged a;
#pragma unroll 1
        for (int i0 = group; live && i0 < plan.blocks; i0 += groups * kBatch) {
            float4 v[kBatch];
            float2 ml[kBatch];
#pragma unroll
            for (int u = 0; u < kBatch; ++u) {
                const int i = i0 + u * groups;
                v[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), ml[u] = make_float2(-1e30f, 0.0f);
                if (i >= plan.blocks) continue;
                const int64_t at = (int64_t(plan.first_block + i) * 2 + (i == 0 ? 1 : 0)) * columns + column;
                v[u] = __ldcg(reinterpret_cast<const float4*>(p.block_partial) + at * kVectors + vector);
                ml[u] = __ldcg(p.block_ml + at);
            }
#pragma unroll
            for (int u = 0; u < kBatch; ++u)
                a.add(v[u], ml[u]);
        }
        if (groups > 1) {
            sums[threadIdx.x] = a.sum, states[threadIdx.x] = make_float2(a.m, a.l);
            __syncthreads();
            if (group == 0)
#pragma unroll 1
                for (int k = 1; k < groups; ++k)
                    a.add(sums[k * elements + e], states[k * elements + e]);
        }
        if (live && group == 0) store_merged<V>(p, head, column, 4 * vector, a);
    }
    __syncthreads();
}

// After all warps have written their sums. Loops are not unrolled: this runs once, and code that is not in the
// instruction cache costs more than a loop.
template <class V, int NT>
__device__ __forceinline__ void merge_block(const AttendParams& p, uint8_t* memory, const BlockPlan& plan, int width) {
    constexpr int kVectors = V::D / 4, kColumns = 8 * NT;
    const int columns = p.rows * p.group, elements = columns * kVectors, tasks = plan.tasks;
    const float2* states = reinterpret_cast<const float2*>(memory + p.shared.ml);
    int k = 0;
#pragma unroll 1
    for (int i = threadIdx.x; k < tasks; i += blockDim.x) {
        while (i >= elements && k < tasks)
            i -= elements, ++k;
        if (k >= tasks) break;
        const MergeTask task = plan.task[k];
        const int column = i / kVectors, vector = i % kVectors, part = column / kColumns, own = column % kColumns;
        const uint8_t* sums = memory + p.shared.partial + uint32_t(part) * p.shared.partial_stride +
                              uint32_t(own * V::D + 4 * vector) * 4;
        Merged a;
        if (task.stop_is_first) {
            const int64_t w = (int64_t(blockIdx.x) * p.warps_per_block + task.stop * width + part) * kColumns + own;
            a.add(reinterpret_cast<const float4*>(p.warp_partial)[w * kVectors + vector], p.warp_ml[w]);
        }
        const int stop = task.stop - task.stop_is_first; // the last whose sums are in shared memory
#pragma unroll 1
        for (int t = task.start; t <= stop; ++t) {
            const float2 ml = states[(t * width + part) * kColumns + own];
            const float4 v = *reinterpret_cast<const float4*>(sums + uint32_t(t * width) * p.shared.partial_stride);
            if (ml.y > 0.0f) a.add(v, ml); // idle teams, and rows that saw nothing, have l = 0
        }
        if (task.to == MergeTask::result) {
            store_merged<V>(p, task.head, column, 4 * vector, a);
        } else {
            const int64_t at = (int64_t(blockIdx.x) * 2 + (task.to == MergeTask::before ? 0 : 1)) * columns + column;
            reinterpret_cast<float4*>(p.block_partial)[at * kVectors + vector] = a.sum;
            if (vector == 0) p.block_ml[at] = make_float2(a.m, a.l);
        }
    }
    // At most two heads are shared with other blocks.
    const int before = plan.before, after = plan.after;
    if (before < 0 && after < 0) return;
    __syncthreads();
    int is_last = 0; // of threads 0 and 1
    if (threadIdx.x < 2) {
        const int head = threadIdx.x == 0 ? before : after;
        if (head >= 0 && add_acq_rel(p.arrivals + head, 1) + 1 == p.heads_plan[head].blocks) {
            p.arrivals[head] = 0;
            is_last = 1;
        }
    }
    // One thread votes for `before`, two for `after`.
    int vote = 0;
    if (threadIdx.x < 32) {
        const uint32_t found = __ballot_sync(~0u, is_last);
        vote = threadIdx.x == 0 ? int(found & 1u) : threadIdx.x < 3 ? int(found >> 1 & 1u) : 0;
    }
    const int last = __syncthreads_count(vote);
#pragma unroll 1
    for (int k2 = 0; k2 < 2; ++k2)
        if (last >> k2 & 1) merge_blocks<V>(p, memory, k2 == 0 ? before : after, columns);
}

} // namespace kvmosaic::cuda
