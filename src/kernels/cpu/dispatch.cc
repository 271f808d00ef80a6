// Which tables this machine can run. Detection happens once; the compiler's runtime also asks whether the operating
// system saves the wide registers.
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/cpu/tables.h"

namespace kvmosaic::kernels {

#if defined(__x86_64__)
namespace {

// Not every compiler knows the name; that the system saves the registers is asked with AVX2.
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

} // namespace
#endif

const std::vector<const Table*>& available() {
    static const std::vector<const Table*> tables = [] {
        std::vector<const Table*> found = {&scalar::kTable};
#if defined(__x86_64__)
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
        if (avx2) found.push_back(&avx2::kTable);
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            found.push_back(&avx512::kTable);
#elif defined(__aarch64__)
        found.push_back(&neon::kTable);
#endif
        return found;
    }();
    return tables;
}

const Table* find(std::string_view isa) {
    if (isa.empty()) {
        const char* named = std::getenv("KVMOSAIC_ISA");
        if (named == nullptr || *named == 0) return available().back();
        isa = named;
    }
    for (const Table* table : available())
        if (isa == table->isa) return table;
    return nullptr;
}

} // namespace kvmosaic::kernels
