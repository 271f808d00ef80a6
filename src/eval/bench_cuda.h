// A GPU as a device of benchmarks: caches of the CPU that were moved there, attended by the fused kernels.
#pragma once

#include <memory>

#include "eval/bench.h"

namespace kvmosaic::eval {

// The first GPU; says why where there is none or the program was built without the backend. Layers are attended one
// after another in a captured graph; a call is one replay, its time that of a layer. The working set is at least 400
// MB, several times the L2. Baselines of a GPU are those of bench/cuda/baseline.py.
Result<std::unique_ptr<BenchDevice>> open_cuda_device(const BenchShape& shape);

} // namespace kvmosaic::eval
