// AVX-512: attention on vectors of sixteen lanes with twice the registers; pages on vectors of eight lanes, because a
// lane block has no more.
#include <immintrin.h>

#include "kernels/cpu/tables.h"
#include "kernels/planes.h"
#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::avx512 {

constexpr const char* kName = "avx512";
constexpr int kLanes = 8, kWide = 16, kRows = 6;
typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef float V __attribute__((vector_size(64)));
typedef uint32_t WideBits __attribute__((vector_size(64)));
typedef float Quad __attribute__((vector_size(16)));

inline F fmax(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
inline F fmin(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Quad sum_lanes(V a, V b, V c, V d) { // by shuffles: g++ 12 warns inside its own intrinsics for them
    const V ac = __builtin_shufflevector(a, c, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(a, c, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const V bd = __builtin_shufflevector(b, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(b, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    // Four lanes each of a, c, b, d.
    V x = __builtin_shufflevector(ac, bd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
          __builtin_shufflevector(ac, bd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    x += __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return __builtin_shufflevector(x, x, 0, 8, 4, 12);
}
inline F load_part_lanes(const float* from, int32_t n) {
    return (F)_mm256_maskz_loadu_ps(__mmask8((1u << n) - 1), from);
}
inline V load_part_wide(const float* from, int32_t n) {
    return (V)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from);
}
inline void store_part(float* to, F v, int32_t n) { _mm256_mask_storeu_ps(to, __mmask8((1u << n) - 1), (__m256)v); }
inline void store_part(float* to, V v, int32_t n) { _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), (__m512)v); }
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

inline void in_register(V& x) { asm("" : "+v"(x)); }

#include "kernels/cpu/table.inc"

} // namespace kvmosaic::kernels::avx512
