// NEON as every 64-bit ARM processor has it: fused multiply-add, conversions of halves, look-up in tables of bytes.
// Vectors of four lanes, half a lane block: g++ keeps vectors of 32 bytes in memory here, not in pairs of registers.
#include <arm_neon.h>

#include "kernels/cpu/tables.h"
#include "kernels/planes.h"
#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::neon {

constexpr const char* kName = "neon";
constexpr int kLanes = 4, kWide = 4, kRows = 4;
typedef float F __attribute__((vector_size(16)));
typedef int32_t I __attribute__((vector_size(16)));
typedef uint32_t U __attribute__((vector_size(16)));
using V = F;
using WideBits = U;
using Quad = F;

// By comparison: FMAX and FMAXNM have rules of their own for NaN and for zeros of both signs.
inline F fmax(F a, F b) { return a > b ? a : b; }
inline F fmin(F a, F b) { return a < b ? a : b; }
inline F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline Quad sum_lanes(V a, V b, V c, V d) {
    const float32x4_t ab = vpaddq_f32((float32x4_t)a, (float32x4_t)b);
    const float32x4_t cd = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    return (Quad)vpaddq_f32(ab, cd);
}
inline F load_part_lanes(const float* from, int32_t n) {
    if (n >= 4) return (F)vld1q_f32(from);
    float32x2_t low = vdup_n_f32(0.0f), high = low;
    if (n & 2) {
        low = vld1_f32(from);
        if (n & 1) high = vld1_lane_f32(from + 2, high, 0);
    } else if (n & 1) {
        low = vld1_lane_f32(from, low, 0);
    }
    return (F)vcombine_f32(low, high);
}
inline V load_part_wide(const float* from, int32_t n) { return load_part_lanes(from, n); }
inline void store_part(float* to, F v, int32_t n) {
    const float32x4_t x = (float32x4_t)v;
    if (n >= 4) return vst1q_f32(to, x);
    if (n & 2) {
        vst1_f32(to, vget_low_f32(x));
        if (n & 1) vst1q_lane_f32(to + 2, x, 2);
    } else if (n & 1) {
        vst1q_lane_f32(to, x, 0);
    }
}
inline bool any_lane(I mask) { return vmaxvq_u32((uint32x4_t)mask) != 0; }
inline float least_lane(F x) { return vminvq_f32((float32x4_t)x); }
inline F load_f16(const uint8_t* from) {
    float16x4_t half;
    __builtin_memcpy(&half, from, sizeof(half));
    return (F)vcvt_f32_f16(half);
}
inline void store_f16(uint8_t* to, F x) {
    const float16x4_t half = vcvt_f16_f32((float32x4_t)x);
    __builtin_memcpy(to, &half, sizeof(half));
}

template <bool WIDE>
inline F look_up(const F* part, U code) { // the four bytes of a level
    const uint8x16_t at = (uint8x16_t)(code * 0x04040404u + 0x03020100u);
    if constexpr (WIDE) {
        const uint8x16x4_t levels = {(uint8x16_t)part[0], (uint8x16_t)part[1], (uint8x16_t)part[2],
                                     (uint8x16_t)part[3]};
        return (F)vqtbl4q_u8(levels, at);
    }
    const uint8x16x2_t levels = {(uint8x16_t)part[0], (uint8x16_t)part[1]};
    return (F)vqtbl2q_u8(levels, at);
}

inline void in_register(V& x) { asm("" : "+w"(x)); }

#define KVMOSAIC_NEON_TABLE
#include "kernels/cpu/table.inc"

} // namespace kvmosaic::kernels::neon
