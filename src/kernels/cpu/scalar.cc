// The portable table: vectors of four lanes, which every family of processors has or the compiler takes apart, and no
// instruction beyond the family's base.
#include "kernels/cpu/tables.h"
#include "kernels/planes.h"
#include "kernels/ref/ref.h"

#pragma GCC diagnostic ignored "-Wpsabi" // vectors of 32 bytes never cross a call here: all of it is inlined

namespace kvmosaic::kernels::scalar {

constexpr const char* kName = "scalar";
constexpr int kLanes = 4, kWide = 4, kRows = 3;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
using V = F;
using WideBits = U;
using Quad = F;

inline F fmax(F a, F b) { return a > b ? a : b; }
inline F fmin(F a, F b) { return a < b ? a : b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline Quad sum_lanes(V a, V b, V c, V d) {
    const Quad ab = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
    const Quad cd = __builtin_shufflevector(c, d, 0, 2, 4, 6) + __builtin_shufflevector(c, d, 1, 3, 5, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}
inline F load_part_lanes(const float* from, int32_t n) {
    F v = {};
    for (int32_t i = 0; i < n && i < 4; ++i)
        v[i] = from[i];
    return v;
}
inline V load_part_wide(const float* from, int32_t n) { return load_part_lanes(from, n); }
inline void store_part(float* to, F v, int32_t n) {
    for (int32_t i = 0; i < n && i < 4; ++i)
        to[i] = v[i];
}
inline bool any_lane(I mask) { return (mask[0] | mask[1] | mask[2] | mask[3]) != 0; }
inline float least_lane(F x) {
    const float a = x[0] < x[1] ? x[0] : x[1], b = x[2] < x[3] ? x[2] : x[3];
    return a < b ? a : b;
}

// Halves are widened in integer registers; subnormals through a subtraction of normal numbers, which is exact.
inline F load_f16(const uint8_t* from) {
    typedef uint16_t Half __attribute__((vector_size(8)));
    Half half;
    __builtin_memcpy(&half, from, sizeof(half));
    const U h = __builtin_convertvector(half, U), abs = h & 0x7FFFu;
    const U normal = (abs << 13) + 0x38000000u;
    const U small = (U)((F)((abs << 13) + 0x38800000u) - 0x1p-14f);
    const U special = (abs << 13) | 0x7F800000u;
    U bits = (I)abs < 0x400 ? small : normal;
    bits = (I)abs >= 0x7C00 ? special : bits;
    return (F)(bits | ((h & 0x8000u) << 16));
}
inline void store_f16(uint8_t* to, F x) {
    uint16_t half[4];
    for (int i = 0; i < 4; ++i)
        half[i] = f32_to_f16(x[i]);
    __builtin_memcpy(to, half, sizeof(half));
}

template <bool WIDE>
inline F look_up(const F* part, U code) {
    F v = {};
    for (int i = 0; i < kLanes; ++i)
        v[i] = part[code[i] / kLanes][code[i] % kLanes];
    return v;
}

inline void in_register(V&) {}

#include "kernels/cpu/table.inc"

} // namespace kvmosaic::kernels::scalar
