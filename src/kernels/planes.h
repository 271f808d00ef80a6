// Stores in planes (GridRule::searched and fitted): parameters of 8 bits and how they are found, the numerics contract
// (docs/numerics.md) in one place, as kernels/grid.h is for the others. Vector code must reproduce each step with the
// same fp32 operations in this order. Functions are static for the reason given there.
#pragma once

#include <cmath>

#include "kernels/grid.h"

namespace kvmosaic::kernels {

// 2^(-i/16): nearest fp32 numbers, so that no backend needs an exponential of its own.
inline constexpr float kSixteenths[16] = {
    0x1p+0f,        0x1.ea4afap-1f, 0x1.d5818ep-1f, 0x1.c199bep-1f, 0x1.ae89fap-1f, 0x1.9c4918p-1f,
    0x1.8ace54p-1f, 0x1.7a1148p-1f, 0x1.6a09e6p-1f, 0x1.5ab07ep-1f, 0x1.4bfdaep-1f, 0x1.3dea64p-1f,
    0x1.306fep-1f,  0x1.2387a6p-1f, 0x1.172b84p-1f, 0x1.0b5586p-1f,
};

// Steps of the least-squares uniform quantizer of a normal variable with 2^bits levels at odd halves of the step
// (J. Max, "Quantizing for minimum distortion", IRE Trans. IT-6, 1960, Table II), and their inverses.
inline constexpr float kNormalStep[7] = {0.0f, 1.596f, 0.9957f, 0.5860f, 0.3352f, 0.1881f, 0.1041f};
inline constexpr float kNormalInverse[7] = {0.0f,           1.0f / 1.596f,  1.0f / 0.9957f, 1.0f / 0.5860f,
                                            1.0f / 0.3352f, 1.0f / 0.1881f, 1.0f / 0.1041f};

// Shares of the range that an encoder of searched pages may take, and where it begins to look, by bits.
inline constexpr int kShrinks = 7;
inline constexpr float kShrink[kShrinks] = {1.0f, 0.9f, 0.8f, 0.7f, 0.6f, 0.5f, 0.4f};
inline constexpr int kFirstShrink[9] = {0, 5, 4, 3, 2, 0, 0, 0, 0};
inline constexpr float kMostOffset = 7.9f; // |c| / h that an offset of 8 bits in units of h / 16 can say
inline constexpr int kOffsetTop = 127;

// What the logarithms of a page are under (0), and the unit of a fitted page's means (1).
static inline float plane_unit(const PageLayout& page, const uint8_t* bytes, uint32_t i) {
    return load(ParamType::f16, bytes + page.unit_offset, i);
}

// unit * 2^(-code / 8), or / 16 where `fine`.
static inline float log_decode(float unit, int code, bool fine) {
    const int i = fine ? code : 2 * code;
    float power = kSixteenths[i % 16];
    for (int octave = i / 16; octave > 0; --octave)
        power *= 0.5f; // exact
    return unit * power;
}
// The largest code whose value is at least x; 0 where there is none.
static inline int log_code(float unit, float x, bool fine) {
    int code = 0;
    for (int bit = 128; bit > 0; bit >>= 1)
        if (log_decode(unit, code + bit, fine) >= x) code += bit;
    return code;
}

// x / unit as 8 bits and sign, half to even.
static inline int offset_code(float x, float inverse_unit) {
    return int(std::fmin(std::fmax(std::nearbyint(x * inverse_unit), float(-kOffsetTop)), float(kOffsetTop)));
}

// A channel of a searched page: half range h, middle in sixteenths of h, 2^bits levels from c - h to c + h.
static inline Grid open_searched(float h, int offset, int bits) {
    Grid grid;
    const float c = float(offset) * (h * 0.0625f);
    if (bits == 0) {
        grid.z = c;
        return grid;
    }
    grid.top = largest_code(bits, 0);
    grid.s = (2.0f * h) / grid.top;
    grid.z = c - h;
    grid.inverse = grid.s < kSmallestScale ? 0.0f : 1.0f / grid.s;
    return grid;
}

// Where the error stops falling: down from `first` while the next smaller range is better, else up. error(i): of range
// i, 0 <= i < count.
template <class Error>
static inline int walk_ranges(int first, int count, Error error) {
    int best = first;
    float least = error(best);
    for (int step = 1; step >= -1; step -= 2) {
        while (best + step >= 0 && best + step < count) {
            const float next = error(best + step);
            if (!(next < least)) break;
            least = next;
            best += step;
        }
        if (best != first) break;
    }
    return best;
}

// The level of a code of a fitted page in steps of its token: odd halves times the step of a normal variable.
static inline float fitted_middle(int bits) { return 0.5f * float((1 << bits) - 1); }
static inline float fitted_level(int bits, int code) {
    const float steps = float(code) - fitted_middle(bits);
    return steps * kNormalStep[bits];
}
static inline int fitted_bits(const PageLayout& page, int32_t channel) {
    return page.tiers[0].bits + (channel < page.wide ? 1 : 0);
}
static inline int fitted_code(float x, float inverse, int bits) {
    const float y = x * (inverse * kNormalInverse[bits]);
    const float c = std::nearbyint(y + fitted_middle(bits));
    return int(std::fmin(std::fmax(c, 0.0f), largest_code(bits, 0)));
}

} // namespace kvmosaic::kernels
