// Host side of the kernels: the table of fused instances and the launches. For src/kernels/cuda only; engines use
// include/kvmosaic/device.h.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/cuda/attend.h"
#include "kernels/cuda/plan.h"

namespace kvmosaic::cuda {

// One fused kernel: what it reads and how it is launched. A row of instances.def.
struct AttendInstance {
    const char* name;
    StoreSpec key, value;        // kind, bits, axis, group, rule; tiered: see widths
    std::vector<uint8_t> widths; // of a tiered key store, widest first; the bytes of PageRef::tiers follow it
    int32_t dim;
    bool basis;      // reads q_packed
    int32_t columns; // of a unit: a warp, or a team of four of the kernels for many query rows
    int32_t unit;    // its threads
    int32_t threads; // largest block
    const void* kernel;
    uint32_t value_bytes;
    uint32_t (*key_bytes)(uint32_t tiers);
    SharedPlan (*shared)(uint32_t key_bytes, int32_t warps, int32_t team, int32_t slots);
};

const std::vector<const AttendInstance*>& attend_instances();

// Of instances that read the same pages: the lower, the faster for this many columns, as measured
// (docs/performance.md). Warps side by side take time for every eight columns, or sixteen, a team of the kernels for
// many rows the same for any number.
inline int32_t instance_rank(const AttendInstance& row, int32_t columns) {
    if (row.unit == 32) return (columns + row.columns - 1) / row.columns * (row.columns == 8 ? 8 : 15);
    if (columns > row.columns) return 1000;
    return row.columns == 32 ? 28 : 33;
}

// Dynamic shared memory that a block of the kernel may have on the current device; 0 where it cannot be told.
uint32_t shared_limit(const AttendInstance& instance);

cudaError_t launch_plan(const PlanParams& params, cudaStream_t stream);
// early: the kernel may start before its predecessor in the stream has ended (programmatic dependent launch).
cudaError_t launch_attend(const AttendInstance& instance, const AttendParams& params, int32_t blocks, bool early,
                          cudaStream_t stream);

} // namespace kvmosaic::cuda
