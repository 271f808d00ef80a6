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

// Where the sums of a head go: results, or the partial sums [columns][D] of a warp with their {m, l}.
struct Target {
    float* partial = nullptr;
    float2* ml = nullptr;
};

// One piece of code for both, as cold code costs microseconds at the end of a short launch.
template <class V, int NT, bool LIMBS>
__device__ __forceinline__ void emit(const AttendParams& p, const Target& to, int head, int first_column,
                                     const Columns<NT>& col, const MixState<V::D, NT>& state, int lane) {
    const int g = lane >> 2, t = lane & 3, columns = p.rows * p.group;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < (LIMBS ? 1 : 2); ++i) {
            const int own = LIMBS ? 4 * n + t : 8 * n + 2 * t + i, column = first_column + own;
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
};

// One column of a head, four channels in a lane: joins `count` sums. state(i): {m, l} of the i-th, in any lane;
// from(i, u): this lane's part of it; u is 0 where i may be. GROUPS times 6 of them are on their way at once. Sums with
// l = 0 (idle teams, rows that saw nothing) are not used. Order: as they are numbered.
template <int GROUPS, class State, class From>
__device__ __forceinline__ Merged merge_column(int count, int lane, State state, From from) {
    constexpr int kGroup = 6, kBatch = kGroup * GROUPS;
    Merged a;
#pragma unroll 1
    for (int first = 0; first < count; first += 32) { // lane i holds what belongs to sum first + i
        const int n = min(32, count - first);
        const float2 ml = lane < n ? state(first + lane) : make_float2(-1e30f, 0.0f);
        float weight = 0.0f;
#pragma unroll 1
        for (int i0 = 0; i0 < n; i0 += kBatch) {
            float4 v[kBatch];
#pragma unroll
            for (int g = 0; g < kBatch; g += kGroup) {
                if (i0 + g >= n) break;
#pragma unroll
                for (int u = g; u < g + kGroup; ++u)
                    if (i0 + u < n) v[u] = from(first + i0 + u, u);
            }
            if (i0 == 0) { // while they are on their way
                float m = ml.x;
#pragma unroll
                for (int s = 16; s >= 1; s >>= 1)
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, s));
                m = fmaxf(m, a.m);
                weight = ml.y > 0.0f ? fast_exp2(ml.x - m) : 0.0f;
                float l = weight * ml.y;
#pragma unroll
                for (int s = 16; s >= 1; s >>= 1)
                    l += __shfl_xor_sync(~0u, l, s);
                const float old = fast_exp2(a.m - m);
                a.sum.x *= old, a.sum.y *= old, a.sum.z *= old, a.sum.w *= old;
                a.l = fmaf(a.l, old, l), a.m = m;
            }
#pragma unroll
            for (int g = 0; g < kBatch; g += kGroup) {
                if (i0 + g >= n) break;
#pragma unroll
                for (int u = g; u < g + kGroup; ++u) {
                    const float f = __shfl_sync(~0u, weight, i0 + u);
                    if (i0 + u >= n || f == 0.0f) continue; // what is there may never have been written
                    a.sum.x = fmaf(v[u].x, f, a.sum.x), a.sum.y = fmaf(v[u].y, f, a.sum.y);
                    a.sum.z = fmaf(v[u].z, f, a.sum.z), a.sum.w = fmaf(v[u].w, f, a.sum.w);
                }
            }
        }
    }
    return a;
}

template <class V>
__device__ __forceinline__ void store_merged(const AttendParams& p, int head, int column, int channel,
                                             const Merged& a) {
    const int64_t row = result_row(p, head, column);
    const float r = inverse_or_zero(a.l);
    store_out(p, row * V::D + channel, make_float4(a.sum.x * r, a.sum.y * r, a.sum.z * r, a.sum.w * r));
    if (p.log_sum && channel == 0) p.log_sum[row] = log_sum_of(a.m, a.l);
}

// Who merges. A warp takes whole columns of heads, from the sums of teams to the result or to what other blocks wait
// for, and meets other warps nowhere: the next kernel waits for this.
struct Merger {
    int index, workers; // columns index, index + workers, ..
    // Goes through the motions and leaves no trace: a warp that is early brings the code into the instruction cache.
    // Not measured apart from what came with it (bench/ladder/cuda-attend.md).
    bool rehearses;
};

// After all warps have written their sums, of COLUMNS columns each. GROUPS: of six sums of blocks that are on their way
// at once.
template <class V, int COLUMNS, int GROUPS>
__device__ __forceinline__ void merge_block(const AttendParams& p, uint8_t* memory, const BlockPlan& plan, int width,
                                            const Merger& who) {
    constexpr int kVectors = V::D / 4, kSteps = (kVectors + 31) / 32;
    const int lane = threadIdx.x & 31;
    const int columns = p.rows * p.group, tasks = who.rehearses ? 1 : plan.tasks;
    const float2* states = reinterpret_cast<const float2*>(memory + p.shared.ml);
    int waiting = 0;                // columns of this warp that are shared with other blocks
    int my_task = 0, my_column = 0; // of the one that this lane announces
    int k = 0, column = who.index;
#pragma unroll 1
    while (true) {
        while (column >= columns && k < tasks)
            column -= columns, ++k;
        if (k >= tasks) break;
        const MergeTask task = plan.task[k];
        const int part = column / COLUMNS, own = column % COLUMNS;
        const int count = who.rehearses ? 1 : task.stop - task.start + 1;
        // The last team's sums may lie in global memory: others of its heads came after.
        const int far_at = task.stop_is_first ? count - 1 : -1;
        const int64_t far = (int64_t(blockIdx.x) * p.warps_per_block + task.stop * width + part) * COLUMNS + own;
        const int near_at = task.start * width + part;
        const float2* near_state = states + near_at * COLUMNS + own;
        const uint8_t* near = memory + p.shared.partial + uint32_t(near_at) * p.shared.partial_stride + own * V::D * 4;
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
            const int vector = 32 * step + lane;
            const bool live = vector < kVectors;
            const Merged a = merge_column<1>(
                count, lane, [&](int i) { return i == far_at ? p.warp_ml[far] : near_state[i * width * COLUMNS]; },
                [&](int i, int) {
                    const void* sums = near + uint32_t(i * width) * p.shared.partial_stride;
                    if (i == far_at) sums = p.warp_partial + far * V::D;
                    return live ? static_cast<const float4*>(sums)[vector] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                });
            if (who.rehearses || !live) continue;
            if (task.to == MergeTask::result) {
                store_merged<V>(p, task.head, column, 4 * vector, a);
            } else {
                const int64_t at = (int64_t(blockIdx.x) * 2 + task.side()) * columns + column;
                reinterpret_cast<float4*>(p.block_partial)[at * kVectors + vector] = a.sum;
                if (vector == 0) p.block_ml[at] = make_float2(a.m, a.l);
            }
        }
        if (task.to != MergeTask::result) {
            if (lane == waiting) my_task = k, my_column = column;
            ++waiting;
        }
        column += who.workers;
    }
    // At most two heads are shared with other blocks, so a warp has at most 32 such columns.
    __syncwarp();
    bool is_last = who.rehearses && lane == 0;
    if (lane < waiting && !who.rehearses) {
        const MergeTask task = plan.task[my_task];
        int* arrived = p.arrivals + task.head * columns + my_column;
        is_last = add_acq_rel(arrived, 1) + 1 == plan.shares[task.side()].blocks;
        if (is_last) *arrived = 0;
    }
    uint32_t last = __ballot_sync(~0u, is_last);
    __syncwarp();
#pragma unroll 1
    while (last) {
        const int from = __ffs(int(last)) - 1;
        last &= last - 1;
        const MergeTask task = plan.task[__shfl_sync(~0u, my_task, from)];
        const int mine = __shfl_sync(~0u, my_column, from);
        const HeadPlan share = plan.shares[task.side()];
        // The head goes on behind its first block, and began before the others.
        const int at0 = (2 * share.first_block + 1) * columns + mine, at = 2 * share.first_block * columns + mine;
#pragma unroll 1
        for (int step = 0; step < kSteps; ++step) {
            const int vector = 32 * step + lane;
            const bool live = vector < kVectors;
            const float4* sums = reinterpret_cast<const float4*>(p.block_partial) + vector;
            const Merged a = merge_column<GROUPS>(
                who.rehearses ? 1 : share.blocks, lane,
                [&](int i) { return __ldcg(p.block_ml + (i == 0 ? at0 : at + 2 * columns * i)); },
                [&](int i, int u) {
                    const int place = u == 0 && i == 0 ? at0 : at + 2 * columns * i;
                    return live ? __ldcg(sums + int64_t(place) * kVectors) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                });
            if (live && !who.rehearses) store_merged<V>(p, task.head, mine, 4 * vector, a);
        }
    }
}

} // namespace kvmosaic::cuda
