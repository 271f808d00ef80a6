// The tables that src/kernels/cpu/CMakeLists.txt compiles for this machine's family.
#pragma once

#include "kernels/kernels.h"

namespace kvmosaic::kernels {

namespace scalar {
extern const Table kTable; // no instruction beyond the family's base
}
#if defined(__x86_64__)
namespace avx2 {
extern const Table kTable; // AVX2, FMA, F16C
}
namespace avx512 {
extern const Table kTable; // AVX-512 F, BW, VL, DQ besides
}
#endif

} // namespace kvmosaic::kernels
