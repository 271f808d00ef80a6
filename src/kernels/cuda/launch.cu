#include "kernels/cuda/launch.h"

namespace kvmosaic::cuda {

uint32_t shared_limit(const AttendInstance& instance) {
    int device = 0, limit = 0;
    cudaFuncAttributes own;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess ||
        cudaFuncGetAttributes(&own, instance.kernel) != cudaSuccess)
        return 0;
    return uint32_t(limit) - uint32_t(own.sharedSizeBytes);
}

cudaError_t launch_attend(const AttendInstance& instance, const AttendParams& params, int32_t blocks, bool early,
                          cudaStream_t stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(instance.unit == 32 ? params.warps_per_block * 32 : instance.threads));
    config.dynamicSmemBytes = params.shared.bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute[1];
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute;
    config.numAttrs = early ? 1 : 0;
    AttendParams p = params;
    void* args[] = {&p};
    return cudaLaunchKernelExC(&config, instance.kernel, args);
}

} // namespace kvmosaic::cuda
