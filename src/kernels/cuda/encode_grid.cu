// Encoding of uniform grids, a page a block.
#include "kernels/cuda/encode_grid.cuh"

namespace kvmosaic::cuda {

extern template cudaError_t launch_encode_dim<HalfRows, 128>(const DevicePage&, const EncodeParams&, cudaStream_t);
extern template cudaError_t launch_encode_dim<Bf16Rows, 128>(const DevicePage&, const EncodeParams&, cudaStream_t);
#ifndef KVMOSAIC_CUDA_SMOKE
extern template cudaError_t launch_encode_dim<HalfRows, 64>(const DevicePage&, const EncodeParams&, cudaStream_t);
extern template cudaError_t launch_encode_dim<Bf16Rows, 64>(const DevicePage&, const EncodeParams&, cudaStream_t);
extern template cudaError_t launch_encode_dim<HalfRows, 256>(const DevicePage&, const EncodeParams&, cudaStream_t);
extern template cudaError_t launch_encode_dim<Bf16Rows, 256>(const DevicePage&, const EncodeParams&, cudaStream_t);
#endif

namespace {

template <class T>
cudaError_t launch_dim(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    switch (page.dim) {
    case 128:
        return launch_encode_dim<T, 128>(page, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    case 64:
        return launch_encode_dim<T, 64>(page, p, stream);
    case 256:
        return launch_encode_dim<T, 256>(page, p, stream);
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
    if (page.dim != 64 && page.dim != 128 && page.dim != 256) return cudaErrorNotSupported;
    if (p.count == 0) return cudaSuccess;
    return p.type == ElementType::bf16 ? launch_dim<Bf16Rows>(page, p, stream) : launch_dim<HalfRows>(page, p, stream);
}

} // namespace kvmosaic::cuda
