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
#elif defined(__aarch64__)
namespace neon {
extern const Table kTable; // the family's base as well, by its own instructions
}
#endif

} // namespace kvmosaic::kernels
