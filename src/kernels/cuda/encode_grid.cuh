// Launch of the page encoders of one row type and head size; each pair is compiled in a file of its own.
#pragma once

#include "kernels/cuda/encode_page.cuh"

namespace kvmosaic::cuda {

template <class T, int D, int BITS, int NG>
__global__ void __launch_bounds__(D) encode_keys(const EncodeParams p, uint32_t scales, uint32_t zeros) {
    wait_for_previous_kernel();
    const EncodeJob job = p.jobs[blockIdx.x];
    encode_key_page<T, D, BITS, NG>(static_cast<const uint16_t*>(p.rows) + job.row, p.row_stride,
                                    p.pool + int64_t(job.unit) * kUnit, scales, zeros);
}
template <class T, int D, int BITS, int NG>
__global__ void __launch_bounds__(128) encode_values(const EncodeParams p, uint32_t scales, uint32_t zeros) {
    wait_for_previous_kernel();
    const EncodeJob job = p.jobs[blockIdx.x];
    encode_value_page<T, D, BITS, NG>(static_cast<const uint16_t*>(p.rows) + job.row, p.row_stride,
                                      p.pool + int64_t(job.unit) * kUnit, scales, zeros);
}

template <class T, int D, int BITS>
cudaError_t launch_encode_width(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    const dim3 grid{unsigned(p.count)};
    const uint32_t s = page.scale_offset, z = page.zero_offset;
    if (page.side == Side::key) {
        if (page.groups == 1)
            encode_keys<T, D, BITS, 1><<<grid, D, 0, stream>>>(p, s, z);
        else if (page.groups == 2)
            encode_keys<T, D, BITS, 2><<<grid, D, 0, stream>>>(p, s, z);
        else
            encode_keys<T, D, BITS, 4><<<grid, D, 0, stream>>>(p, s, z);
    } else {
        if (page.groups == 1)
            encode_values<T, D, BITS, 1><<<grid, 128, 0, stream>>>(p, s, z);
        else if (page.groups == 2)
            encode_values<T, D, BITS, 2><<<grid, 128, 0, stream>>>(p, s, z);
        else if constexpr (D >= 128)
            encode_values<T, D, BITS, 4><<<grid, 128, 0, stream>>>(p, s, z);
        else
            return cudaErrorNotSupported;
    }
    return cudaGetLastError();
}

template <class T, int D>
cudaError_t launch_encode_dim(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    switch (page.tiers[0].bits) {
    case 2:
        return launch_encode_width<T, D, 2>(page, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    case 1:
        return launch_encode_width<T, D, 1>(page, p, stream);
    case 3:
        return launch_encode_width<T, D, 3>(page, p, stream);
    case 4:
        return launch_encode_width<T, D, 4>(page, p, stream);
    case 6:
        return launch_encode_width<T, D, 6>(page, p, stream);
    case 8:
        return launch_encode_width<T, D, 8>(page, p, stream);
#endif
    default:
        return cudaErrorNotSupported;
    }
}

} // namespace kvmosaic::cuda
