// Rows from pages on the device: arguments and launch.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/attend.h"

namespace kvmosaic::cuda {

inline constexpr int kMostEdges = 64; // groups of unequal size

struct RestoreParams {
    DevicePage page;
    const uint8_t* pool = nullptr;
    const device::RestoreJob* jobs = nullptr; // [count]
    int32_t count = 0;
    void* rows = nullptr;
    int64_t row_stride = 0;
    ElementType type = ElementType::bf16;
    int32_t width_count = 0; // above 0: tiers are those of the job's ladder code
    uint8_t widths[4] = {};
    float book[16] = {}; // codebook stores
    uint16_t edges[kMostEdges + 1] = {};
};
// For pages of this layout; edges beyond kMostEdges are not taken.
RestoreParams restore_params(const PageLayout& page);
// Pages of any kind but raw.
cudaError_t launch_restore(const RestoreParams& params, cudaStream_t stream);

} // namespace kvmosaic::cuda
