#include "kernels/cuda/encode_grid.cuh"

namespace kvmosaic::cuda {

#ifndef KVMOSAIC_CUDA_SMOKE
template cudaError_t launch_encode_dim<HalfRows, 64>(const DevicePage&, const EncodeParams&, cudaStream_t);
#endif

} // namespace kvmosaic::cuda
