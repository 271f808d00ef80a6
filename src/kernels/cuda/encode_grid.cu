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

cudaError_t launch_encode_grid(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    const int extent = page.side == Side::key ? kPageTokens : page.dim;
    const bool even = page.group * page.groups == extent && (page.groups == 1 || page.groups == 2 || page.groups == 4);
    if (page.kind != StoreKind::grid || page.rule != GridRule::asym || page.levels != 0 || page.along_depth || !even ||
        page.params != ParamType::f16 || page.clip != 1.0f)
        return cudaErrorNotSupported;
    if (page.dim != 64 && page.dim != 128 && page.dim != 256) return cudaErrorNotSupported;
    if (p.count == 0) return cudaSuccess;
    return with_rows(p.type, page.dim, [&](auto rows, auto dim) {
        return launch_encode_dim<typename decltype(rows)::Type, decltype(dim)::value>(page, p, stream);
    });
}

} // namespace kvmosaic::cuda
