// Parameters of 8 bits of pages in planes: src/kernels/planes.h in the same fp32 operations.
#pragma once

#include "kernels/cuda/encode.cuh"

namespace kvmosaic::cuda {

// 2^(-i/16), see planes.h.
__device__ __constant__ static const float kDeviceSixteenths[16] = {
    0x1p+0f,        0x1.ea4afap-1f, 0x1.d5818ep-1f, 0x1.c199bep-1f, 0x1.ae89fap-1f, 0x1.9c4918p-1f,
    0x1.8ace54p-1f, 0x1.7a1148p-1f, 0x1.6a09e6p-1f, 0x1.5ab07ep-1f, 0x1.4bfdaep-1f, 0x1.3dea64p-1f,
    0x1.306fep-1f,  0x1.2387a6p-1f, 0x1.172b84p-1f, 0x1.0b5586p-1f,
};

// unit * 2^(-i / 16). powers: kDeviceSixteenths in shared memory, where lanes may read different ones at once.
__device__ __forceinline__ float device_log_decode(const float* powers, float unit, int i) {
    return __fmul_rn(unit, powers[i & 15] * exp2_of(-(i >> 4))); // the inner product is exact
}
// The largest code whose value is at least x; FINE: in sixteenths of an octave, else in eighths.
template <bool FINE>
__device__ __forceinline__ int device_log_code(const float* powers, float unit, float x) {
    int code = 0;
#pragma unroll
    for (int bit = 128; bit > 0; bit >>= 1)
        if (device_log_decode(powers, unit, (code + bit) << (FINE ? 0 : 1)) >= x) code += bit;
    return code;
}
__device__ __forceinline__ int device_offset_code(float x, float inverse) {
    return __float2int_rn(fminf(fmaxf(__fmul_rn(x, inverse), -127.0f), 127.0f));
}

// Eight partial sums onto each other: the end of sum_in_eights of grid.h.
__device__ __forceinline__ float join_eights(float (&part)[8]) {
#pragma unroll
    for (int half = 4; half >= 1; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i)
            part[i] = __fadd_rn(part[i], part[i + half]);
    return part[0];
}

// Where the fields of one depth position lie: the byte (4 bits: the half) of row r of quad q's tile 0 is at
// base + (r % 8) * 64 + (r / 8) * 4 + q * quad; see plane_site of order.h.
struct PlanePlace {
    uint32_t base = 0, quad = 0;
    int bit = 0; // of one-bit planes: the field's place beside that of another step
    template <int WIDTH>
    static __device__ __forceinline__ PlanePlace of(uint32_t plane, int depth, int quads, int pos) {
        constexpr int kSpan = 64 / WIDTH;
        const int whole = depth / kSpan * kSpan, k = row_of_place(pos & 15), step = pos >> 4;
        const uint32_t in_word = uint32_t(((k & 7) >> 1) * 16 + (k >> 3) * 8 + (k & 1) * 2);
        PlanePlace p;
        if (pos < whole) {
            const int set = step / (kSpan / 16) * quads;
            p.base = plane + uint32_t(set) * kSetBytes + in_word;
            p.quad = kSetBytes;
            if constexpr (WIDTH == 2) p.base += uint32_t(step & 1);
            if constexpr (WIDTH == 1) p.base += uint32_t(step >> 1 & 1), p.bit = step & 1;
            return p;
        }
        const int rest = pos - whole, set = whole / kSpan * quads;
        p.base = plane + uint32_t(set) * kSetBytes;
        if constexpr (WIDTH == 4) {
            p.base += uint32_t((rest >> 1) * 16 + (rest & 1) * 2), p.quad = 8;
        } else {
            p.base += in_word, p.quad = 1;
            if constexpr (WIDTH == 1) p.bit = rest >> 4;
        }
        return p;
    }
    __device__ __forceinline__ uint32_t at(int quad_index, int row) const {
        return base + uint32_t((row & 7) * 64 + (row >> 3) * 4) + uint32_t(quad_index) * quad;
    }
};

} // namespace kvmosaic::cuda
