#include "kernels/cuda/encode_lines.cuh"

namespace kvmosaic::cuda {

template cudaError_t launch_lines<Bf16Rows, 128>(const DevicePage&, const EncodeParams&, cudaStream_t);
#ifndef KVMOSAIC_CUDA_SMOKE
template cudaError_t launch_lines<Bf16Rows, 64>(const DevicePage&, const EncodeParams&, cudaStream_t);
#endif

} // namespace kvmosaic::cuda
