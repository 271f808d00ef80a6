// Encoding of uniform grids, a page a block.
#include "kernels/cuda/encode_page.cuh"

namespace kvmosaic::cuda {
namespace {

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
cudaError_t launch(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
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
cudaError_t launch_bits(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    switch (page.tiers[0].bits) {
    case 2:
        return launch<T, D, 2>(page, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    case 1:
        return launch<T, D, 1>(page, p, stream);
    case 3:
        return launch<T, D, 3>(page, p, stream);
    case 4:
        return launch<T, D, 4>(page, p, stream);
    case 6:
        return launch<T, D, 6>(page, p, stream);
    case 8:
        return launch<T, D, 8>(page, p, stream);
#endif
    default:
        return cudaErrorNotSupported;
    }
}

template <class T>
cudaError_t launch_dim(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    switch (page.dim) {
    case 128:
        return launch_bits<T, 128>(page, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    case 64:
        return launch_bits<T, 64>(page, p, stream);
    case 256:
        return launch_bits<T, 256>(page, p, stream);
#endif
    default:
        return cudaErrorNotSupported;
    }
}

} // namespace

cudaError_t launch_encode_grid(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    const int extent = page.side == Side::key ? kPageTokens : page.dim;
    const bool even = page.group * page.groups == extent && (page.groups == 1 || page.groups == 2 || page.groups == 4);
    if (page.kind != StoreKind::grid || page.rule != GridRule::asym || page.levels != 0 || page.along_depth || !even ||
        page.params != ParamType::f16 || page.clip != 1.0f)
        return cudaErrorNotSupported;
    if (p.count == 0) return cudaSuccess;
    return p.type == ElementType::bf16 ? launch_dim<Bf16Rows>(page, p, stream) : launch_dim<HalfRows>(page, p, stream);
}

} // namespace kvmosaic::cuda
