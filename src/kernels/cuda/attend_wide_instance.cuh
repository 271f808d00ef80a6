// As attend_instance.cuh, for the kernels of many query rows.
#pragma once

#include "kernels/cuda/attend_instance.cuh"
#include "kernels/cuda/attend_wide.cuh"

namespace kvmosaic::cuda {

template <class K, class V, int H>
AttendInstance make_wide_instance(const char* name) {
    AttendInstance row = make_attend_row<K, V>(name);
    row.columns = WideLayout<K, V, H>::kColumns;
    row.unit = kWideTeam;
    row.threads = 2 * kWideTeam;
    row.kernel = reinterpret_cast<const void*>(&attend_wide_kernel<K, V, H>);
    row.shared = &wide_shared_plan<K, V, H>;
    return row;
}

} // namespace kvmosaic::cuda
