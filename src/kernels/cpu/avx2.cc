// AVX2, FMA and F16C: vectors of eight lanes, a lane block each.
#include <immintrin.h>

#include "kernels/cpu/tables.h"
#include "kernels/planes.h"
#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::avx2 {

constexpr const char* kName = "avx2";
constexpr int kLanes = 8, kWide = 8, kRows = 3;
typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef float Quad __attribute__((vector_size(16)));
using V = F;
using WideBits = U;

inline F fmax(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
inline F fmin(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
inline F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline Quad sum_lanes(V a, V b, V c, V d) {
    const V ac = __builtin_shufflevector(a, c, 0, 1, 2, 3, 8, 9, 10, 11) +
                 __builtin_shufflevector(a, c, 4, 5, 6, 7, 12, 13, 14, 15);
    const V bd = __builtin_shufflevector(b, d, 0, 1, 2, 3, 8, 9, 10, 11) +
                 __builtin_shufflevector(b, d, 4, 5, 6, 7, 12, 13, 14, 15);
    const V pairs = __builtin_shufflevector(ac, bd, 0, 2, 8, 10, 4, 6, 12, 14) +
                    __builtin_shufflevector(ac, bd, 1, 3, 9, 11, 5, 7, 13, 15); // a a b b c c d d
    const Quad ab = __builtin_shufflevector(pairs, pairs, 0, 1, 2, 3);
    const Quad cd = __builtin_shufflevector(pairs, pairs, 4, 5, 6, 7);
    return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}
inline I first_lanes(int32_t n) { return (I){0, 1, 2, 3, 4, 5, 6, 7} < n; }
inline F load_part_lanes(const float* from, int32_t n) { return (F)_mm256_maskload_ps(from, (__m256i)first_lanes(n)); }
inline V load_part_wide(const float* from, int32_t n) { return load_part_lanes(from, n); }
inline void store_part(float* to, F v, int32_t n) { _mm256_maskstore_ps(to, (__m256i)first_lanes(n), (__m256)v); }
inline bool any_lane(I mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
inline float least_lane(F x) {
    __m128 a = _mm_min_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    a = _mm_min_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_min_ss(a, _mm_movehdup_ps(a)));
}
inline F load_f16(const uint8_t* from) {
    return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_f16(uint8_t* to, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}

template <bool WIDE>
inline F look_up(const F* part, U code) {
    const F low = (F)_mm256_permutevar8x32_ps((__m256)part[0], (__m256i)code);
    if constexpr (!WIDE) return low;
    const F high = (F)_mm256_permutevar8x32_ps((__m256)part[1], (__m256i)code);
    return (F)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(code << 28));
}

inline void in_register(V& x) { asm("" : "+x"(x)); }

#include "kernels/cpu/table.inc"

} // namespace kvmosaic::kernels::avx2
