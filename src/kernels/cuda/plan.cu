#include "kernels/cuda/plan.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) plan_kernel(const PlanParams p) {
    __shared__ int32_t sums[kThreads];
    wait_for_previous_kernel();
    const int32_t each = (p.sequences + kThreads - 1) / kThreads;
    const int32_t from = min(int32_t(threadIdx.x) * each, p.sequences), to = min(from + each, p.sequences);
    int32_t mine = 0;
    for (int32_t s = from; s < to; ++s) {
        const SequencePlan plan = plan_sequence(p.states[s], p.rows);
        p.plans[s] = plan;
        mine += plan.items;
    }
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (int32_t step = 1; step < kThreads; step *= 2) {
        const int32_t before = int32_t(threadIdx.x) >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += before;
        __syncthreads();
    }
    int32_t at = threadIdx.x > 0 ? sums[threadIdx.x - 1] : 0;
    if (threadIdx.x == 0) p.prefix[0] = 0;
    for (int32_t s = from; s < to; ++s) {
        at += p.plans[s].items;
        p.prefix[s + 1] = at;
    }
    __syncthreads();
    const int64_t total = int64_t(p.prefix[p.sequences]) * p.kv_heads;
    for (int32_t i = threadIdx.x; i < p.blocks * p.teams; i += kThreads)
        p.teams_plan[i] = plan_team(p.plans, p.prefix, p.sequences, p.kv_heads,
                                    team_range(block_range(total, p.blocks, i / p.teams), p.teams, i % p.teams));
    for (int32_t i = threadIdx.x; i < p.blocks; i += kThreads)
        p.blocks_plan[i] = plan_block(p.prefix, p.sequences, p.kv_heads, p.blocks, p.teams, i);
}

} // namespace

cudaError_t launch_plan(const PlanParams& params, cudaStream_t stream) {
    plan_kernel<<<1, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
}

} // namespace kvmosaic::cuda
