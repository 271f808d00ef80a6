// Makes one row of the instance table out of template arguments. Included by the small files that CMake writes from
// instances.def.
#pragma once

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/book.cuh"
#include "kernels/cuda/depth.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/planes.cuh"
#include "kernels/cuda/planes_values.cuh"
#include "kernels/cuda/score_tiers.cuh"

namespace kvmosaic::cuda {

// What is read, without the kernel.
template <class K, class V>
AttendInstance make_attend_row(const char* name) {
    static_assert(K::D == V::D);
    AttendInstance row{};
    row.name = name;
    row.key = K::spec();
    row.value = V::spec();
    row.widths = K::widths();
    row.dim = K::D;
    row.value_bytes = V::kBytes;
    row.key_bytes = [](uint32_t tiers) { return K::bytes(tiers); };
    return row;
}

template <class K, class V, int NT, int THREADS, bool LIMBS = false>
AttendInstance make_attend_instance(const char* name) {
    AttendInstance row = make_attend_row<K, V>(name);
    row.basis = K::kBasis;
    row.columns = (LIMBS ? 4 : 8) * NT;
    row.unit = 32;
    row.threads = THREADS;
    row.kernel = reinterpret_cast<const void*>(&attend_kernel<K, V, NT, THREADS, LIMBS>);
    row.shared = &shared_plan<K, V, NT>;
    return row;
}

} // namespace kvmosaic::cuda
