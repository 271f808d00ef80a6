// The merge of merge.cuh for kernels of many columns: an element a thread, the block in step. Its serial chains cost
// more than whole warps a column do (up to 8 columns), and less than columns that wait for a warp (measured: 16 columns
// and up).
#pragma once

#include "kernels/cuda/merge.cuh"

namespace kvmosaic::cuda {

struct RunningSum : Merged {
    __device__ __forceinline__ void add(float4 v, float2 ml) {
        const float top = fmaxf(m, ml.x), old = fast_exp2(m - top), f = fast_exp2(ml.x - top);
        sum.x = fmaf(v.x, f, sum.x * old), sum.y = fmaf(v.y, f, sum.y * old);
        sum.z = fmaf(v.z, f, sum.z * old), sum.w = fmaf(v.w, f, sum.w * old);
        l = fmaf(ml.y, f, l * old);
        m = top;
    }
};

// The last block of a head: adds the sums of all its blocks. Order: first to last within a thread group, then groups.
template <class V>
__device__ __forceinline__ void merge_blocks_by_threads(const AttendParams& p, uint8_t* memory, int head,
                                                        const HeadPlan& plan, int columns) {
    constexpr int kVectors = V::D / 4, kBatch = 4;
    const int elements = columns * kVectors, threads = blockDim.x;
    const int groups = elements < threads ? threads / elements : 1;
    const int group = elements < threads ? int(threadIdx.x) / elements : 0;
    float4* sums = reinterpret_cast<float4*>(memory);
    float2* states = reinterpret_cast<float2*>(memory + threads * 16);
#pragma unroll 1
    for (int e0 = 0; e0 < elements; e0 += threads) {
        const int e = e0 + int(threadIdx.x) - group * elements, column = e / kVectors, vector = e % kVectors;
        const bool live = group < groups && e < elements;
        RunningSum a;
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
template <class V, int COLUMNS>
__device__ __forceinline__ void merge_block_by_threads(const AttendParams& p, uint8_t* memory, const BlockPlan& plan,
                                                       int width) {
    constexpr int kVectors = V::D / 4;
    const int columns = p.rows * p.group, elements = columns * kVectors, tasks = plan.tasks;
    const float2* states = reinterpret_cast<const float2*>(memory + p.shared.ml);
    int k = 0;
#pragma unroll 1
    for (int i = threadIdx.x; k < tasks; i += blockDim.x) {
        while (i >= elements && k < tasks)
            i -= elements, ++k;
        if (k >= tasks) break;
        const MergeTask task = plan.task[k];
        const int column = i / kVectors, vector = i % kVectors, part = column / COLUMNS, own = column % COLUMNS;
        const uint8_t* sums = memory + p.shared.partial + uint32_t(part) * p.shared.partial_stride +
                              uint32_t(own * V::D + 4 * vector) * 4;
        RunningSum a;
        if (task.stop_is_first) {
            const int64_t w = (int64_t(blockIdx.x) * p.warps_per_block + task.stop * width + part) * COLUMNS + own;
            a.add(reinterpret_cast<const float4*>(p.warp_partial)[w * kVectors + vector], p.warp_ml[w]);
        }
        const int stop = task.stop - task.stop_is_first; // the last whose sums are in shared memory
#pragma unroll 1
        for (int t = task.start; t <= stop; ++t) {
            const float2 ml = states[(t * width + part) * COLUMNS + own];
            const float4 v = *reinterpret_cast<const float4*>(sums + uint32_t(t * width) * p.shared.partial_stride);
            if (ml.y > 0.0f) a.add(v, ml); // idle teams, and rows that saw nothing, have l = 0
        }
        if (task.to == MergeTask::result) {
            store_merged<V>(p, task.head, column, 4 * vector, a);
        } else {
            const int64_t at = (int64_t(blockIdx.x) * 2 + task.side()) * columns + column;
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
        if (head >= 0 && add_acq_rel(p.arrivals + head * columns, 1) + 1 == plan.shares[threadIdx.x].blocks) {
            p.arrivals[head * columns] = 0;
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
        if (last >> k2 & 1) merge_blocks_by_threads<V>(p, memory, k2 == 0 ? before : after, plan.shares[k2], columns);
}

} // namespace kvmosaic::cuda
