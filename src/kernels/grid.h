// How one group of values gets its scale, offset and codes: the numerics contract (docs/numerics.md) in one place, for
// the encoders of every backend. Vector code must reproduce each step with the same fp32 operations in this order.
// Functions are static: a shared copy compiled for one instruction set must not end up in another's table.
#pragma once

#include <cmath>

#include "kvmosaic/numeric.h"

namespace kvmosaic::kernels {

// min and max beyond this are cut to it before they become metadata. Then max - min, s * code and z + s * code stay
// finite in fp32 for every width and metadata type; values beyond saturate.
inline constexpr float kGridLimit = 0x1p125f;
// A stored scale below the smallest normal fp32 number counts as 0: its inverse would not be finite.
inline constexpr float kSmallestScale = 0x1p-126f;

struct Grid {
    float s = 0.0f, z = 0.0f; // as stored: exactly representable in the metadata type
    float inverse = 0.0f;     // 1 / s, or 0 when s is 0
    float top = 0.0f;         // 2^bits - 1
};

static inline float rounded(ParamType type, float x) {
    switch (type) {
    case ParamType::f16:
        return f16_to_f32(f32_to_f16_sat(x));
    case ParamType::bf16:
        return bf16_to_f32(f32_to_bf16_sat(x));
    case ParamType::f8e4m3:
        return f8e4m3_to_f32(f32_to_f8e4m3_sat(x));
    }
    return x;
}

// min <= max, finite, over the live values of the group. bits 0: the offset alone, in the middle of the range.
static inline Grid make_grid(ParamType type, int bits, float min, float max) {
    // Adding +0 turns -0 into +0, so that the sign of a zero minimum does not depend on the order of comparisons.
    min = std::fmin(std::fmax(min, -kGridLimit), kGridLimit) + 0.0f;
    max = std::fmin(std::fmax(max, -kGridLimit), kGridLimit) + 0.0f;
    Grid grid;
    grid.top = float((1 << bits) - 1);
    if (bits > 0) grid.s = rounded(type, (max - min) / grid.top);
    if (grid.s < kSmallestScale) {
        // One level for all: the constant itself, or the middle where the scale underflowed.
        grid.s = 0.0f;
        grid.z = rounded(type, min == max ? min : 0.5f * min + 0.5f * max);
        return grid;
    }
    grid.z = rounded(type, min);
    grid.inverse = 1.0f / grid.s;
    return grid;
}

static inline int code_of(const Grid& grid, float x) {
    const float t = x - grid.z;
    const float c = std::nearbyint(t * grid.inverse); // half to even; two roundings, never fused
    return int(std::fmin(std::fmax(c, 0.0f), grid.top));
}

static inline float decode(float s, float z, int code) {
    const float product = s * float(code);
    return z + product;
}

} // namespace kvmosaic::kernels
