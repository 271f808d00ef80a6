// Queries in the basis of packed keys. A warp takes a head of a query row.
//
// Bound: a launch. 32 heads of 8 sequences are 64 KB; the kernel runs beside nothing else and takes what a small kernel
// takes, a few microseconds; it may start before its predecessor has ended.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/encode.h"
#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {
namespace {

constexpr int kWarps = 4;

template <int D>
__global__ void to_key_basis_kernel(const __grid_constant__ device::BasisCall call) {
    constexpr int kEach = D / 32; // channels of a lane: lane, lane + 32, ...
    __shared__ float rows[kWarps][D];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int64_t row = int64_t(blockIdx.x) * kWarps + warp; // (sequence, query row, head)
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (row >= int64_t(call.sequences) * call.rows * call.heads) return;
    const int head = int(row % call.heads), sequence = int(row / call.heads / call.rows);
    const int64_t kv = int64_t(call.states[sequence].slot) * call.kv_heads + head / (call.heads / call.kv_heads);
    const uint16_t* q = static_cast<const uint16_t*>(call.q) + row * D;
    float x[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const uint16_t bits = q[lane + 32 * i];
        x[i] = call.type == ElementType::bf16 ? __uint_as_float(uint32_t(bits) << 16)
                                              : __half2float(__ushort_as_half(bits));
    }
    const int run = call.basis.hadamard;
    for (int step = 1; step < run; step *= 2) {
        if (step < 32) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const float other = __shfl_xor_sync(~0u, x[i], step);
                x[i] = lane & step ? other - x[i] : x[i] + other;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                rows[warp][lane + 32 * i] = x[i];
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int at = lane + 32 * i;
                const float other = rows[warp][at ^ step];
                x[i] = at & step ? other - x[i] : x[i] + other;
            }
            __syncwarp();
        }
    }
    const float normal = run > 1 ? rsqrtf(float(run)) : 1.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const float f = call.basis.factor ? call.basis.factor[kv * D + lane + 32 * i] : 1.0f;
        rows[warp][lane + 32 * i] = x[i] * normal * f;
    }
    __syncwarp();
    uint16_t* out = static_cast<uint16_t*>(call.out) + row * D;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int at = lane + 32 * i, channel = call.basis.order ? call.basis.order[kv * D + at] : at;
        const float v = fminf(fmaxf(rows[warp][channel], -65504.0f), 65504.0f);
        out[at] = __half_as_ushort(__float2half_rn(v));
    }
}

} // namespace

cudaError_t launch_to_key_basis(const device::BasisCall& call, cudaStream_t stream) {
    const int64_t rows = int64_t(call.sequences) * call.rows * call.heads;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned((rows + kWarps - 1) / kWarps));
    config.blockDim = dim3(kWarps * 32);
    config.stream = stream;
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = 1;
    const auto kernel = call.dim == 64    ? &to_key_basis_kernel<64>
                        : call.dim == 128 ? &to_key_basis_kernel<128>
                                          : &to_key_basis_kernel<256>;
    return cudaLaunchKernelEx(&config, kernel, call);
}

} // namespace kvmosaic::cuda
