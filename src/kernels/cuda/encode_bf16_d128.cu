#include "kernels/cuda/encode_grid.cuh"

namespace kvmosaic::cuda {

template cudaError_t launch_encode_dim<Bf16Rows, 128>(const DevicePage&, const EncodeParams&, cudaStream_t);

} // namespace kvmosaic::cuda
