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
// (docs/performance.md). Warps side by side take time for every four, eight or sixteen columns, a team of the kernels
// for many rows the same for any number.
inline int32_t instance_rank(const AttendInstance& row, int32_t columns) {
    const int32_t teams = (columns + row.columns - 1) / row.columns;
    if (row.unit == 32) return teams * (row.columns == 4 ? 7 : row.columns == 8 ? 8 : 15);
    if (teams > 1) return 1000;
    return row.columns == 32 ? 28 : 33;
}

// Units of a block where a caller does not say. Up to two pages a warp the start of a wide block costs more than its
// width brings, except with integer products. pages: of all KV heads, or 0 where that is not known.
inline int32_t instance_units(const AttendInstance& row, int64_t pages, int32_t multiprocessors) {
    const bool small = pages > 0 && pages < int64_t(multiprocessors) * 24;
    return small && row.unit == 32 && row.columns > 4 ? 8 : row.threads / row.unit;
}

// Dynamic shared memory that a block of the kernel may have on the current device; 0 where it cannot be told.
uint32_t shared_limit(const AttendInstance& instance);

cudaError_t launch_plan(const PlanParams& params, cudaStream_t stream);
// early: the kernel may start before its predecessor in the stream has ended (programmatic dependent launch).
cudaError_t launch_attend(const AttendInstance& instance, const AttendParams& params, int32_t blocks, bool early,
                          cudaStream_t stream);

} // namespace kvmosaic::cuda
