// How one group of values gets its scale, offset and codes: the numerics contract (docs/numerics.md) in one place, for
// the encoders of every backend. Vector code must reproduce each step with the same fp32 operations in this order.
// Functions are static: a shared copy compiled for one instruction set must not end up in another's table.
#pragma once

#include <cmath>

#include "kvmosaic/numeric.h"
#include "kvmosaic/store.h"

namespace kvmosaic::kernels {

// min and max beyond this are cut to it before they become metadata. Then max - min, s * code and z + s * code stay
// finite in fp32 for every width and metadata type; values beyond saturate.
inline constexpr float kGridLimit = 0x1p125f;
// A stored scale below the smallest normal fp32 number counts as 0: its inverse would not be finite.
inline constexpr float kSmallestScale = 0x1p-126f;

// What decides the grid of a group, beside its values.
struct GridForm {
    GridRule rule = GridRule::asym;
    ParamType params = ParamType::f16;
    int bits = 0;   // 0: the offset alone
    int levels = 0; // 0: 2^bits
    float clip = 1.0f;
};

struct Grid {
    float s = 0.0f, z = 0.0f;               // decoding is z + s * code
    float inverse = 0.0f;                   // 1 / s, or 0 when s is 0
    float top = 0.0f;                       // largest code
    float middle = 0.0f;                    // code of 0 under the rules without offsets
    float stored_s = 0.0f, stored_z = 0.0f; // as they lie in the page: exactly representable in the metadata type
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

static inline float largest_of(ParamType type) {
    return type == ParamType::f16 ? 65504.0f : type == ParamType::bf16 ? 0x1.FEp127f : 448.0f;
}

static inline float magnitude(float x) { return x < 0.0f ? -x : x; }
static inline float largest_code(int bits, int levels) { return float(levels > 0 ? levels - 1 : (1 << bits) - 1); }
// Steps from 0 to the outermost level of a symmetric grid.
static inline float symmetric_steps(int bits, int levels) {
    return float(levels > 0 ? levels / 2 : (1 << (bits - 1)) - 1);
}

// Scale and offset as the decoder uses them, from what is stored. z is 0 where the rule stores no offsets.
static inline void open_grid(GridRule rule, int bits, int levels, float* s, float* z) {
    switch (rule) {
    case GridRule::integer:
        if (*s != 0.0f) *z = *s * *z;
        return;
    case GridRule::symmetric:
        *z = -symmetric_steps(bits, levels) * *s;
        return;
    case GridRule::extreme:
        *z = -float(1 << (bits - 1)) * *s;
        return;
    case GridRule::hybrid_1bit:
    case GridRule::hybrid_4level:
        if (std::signbit(*s))
            *s = -*s;
        else
            *z = -symmetric_steps(bits, levels) * *s;
        return;
    default:
        return;
    }
}

// min <= max, finite, over the live values of the group. For the rules that need no more than the range: all but the
// hybrids and the codebooks.
static inline Grid make_grid(const GridForm& form, float min, float max) {
    // Adding +0 turns -0 into +0, so that the sign of a zero minimum does not depend on the order of comparisons.
    min = std::fmin(std::fmax(min, -kGridLimit), kGridLimit) + 0.0f;
    max = std::fmin(std::fmax(max, -kGridLimit), kGridLimit) + 0.0f;
    const float middle = min == max ? min : 0.5f * min + 0.5f * max; // of a group with one level: not clipped
    if (form.clip != 1.0f) min *= form.clip, max *= form.clip;
    Grid grid;
    grid.top = largest_code(form.bits, form.levels);
    const bool midpoint = form.rule == GridRule::midpoint && form.bits == 1;
    if (form.rule == GridRule::symmetric) {
        const float m = symmetric_steps(form.bits, form.levels), most = std::fmax(magnitude(min), magnitude(max));
        grid.s = rounded(form.params, most / m);
        grid.top = 2.0f * m;
        grid.middle = m;
    } else if (form.rule == GridRule::extreme) {
        grid.middle = float(1 << (form.bits - 1));
        grid.s = rounded(form.params, (-min > max ? min : max) / -grid.middle);
    } else if (form.bits > 0) {
        grid.s = rounded(form.params, (max - min) / (midpoint ? 2.0f : grid.top));
    }
    const bool flat = magnitude(grid.s) < kSmallestScale;
    if (flat) grid.s = 0.0f;
    // A narrow range far from 0 would lie more steps away than the type of the offset can count: wider steps then.
    // Half of the largest, so that the step may round down.
    if (form.rule == GridRule::integer && !flat)
        grid.s = std::fmax(grid.s, rounded(form.params, magnitude(min) / (0.5f * largest_of(form.params))));
    grid.stored_s = grid.s;
    if (!has_offsets(form.rule)) {
        open_grid(form.rule, form.bits, form.levels, &grid.s, &grid.z);
    } else if (flat) {
        // One level for all: the constant itself, or the middle where the scale underflowed.
        grid.stored_z = grid.z = rounded(form.params, middle);
    } else if (midpoint) {
        const float low = 0.75f * min, high = 0.25f * max;
        grid.stored_z = grid.z = rounded(form.params, low + high);
    } else if (form.rule == GridRule::integer) {
        grid.stored_z = rounded(form.params, std::nearbyint(min / grid.s) + 0.0f);
        grid.z = grid.s * grid.stored_z;
    } else {
        grid.stored_z = grid.z = rounded(form.params, min);
    }
    grid.inverse = flat ? 0.0f : 1.0f / grid.s;
    return grid;
}
static inline Grid make_grid(ParamType type, int bits, float min, float max) {
    return make_grid(GridForm{.params = type, .bits = bits}, min, max);
}

// Half to even; two roundings, never fused. Rules without offsets round x / s itself, so that x and -x get opposite
// levels.
static inline int code_of(const Grid& grid, float x) {
    if (grid.middle != 0.0f) {
        const float c = std::nearbyint(x * grid.inverse) + grid.middle;
        return int(std::fmin(std::fmax(c, 0.0f), grid.top));
    }
    const float t = x - grid.z;
    const float c = std::nearbyint(t * grid.inverse);
    return int(std::fmin(std::fmax(c, 0.0f), grid.top));
}

static inline float decode(float s, float z, float level) {
    const float product = s * level;
    return z + product;
}

// The sum of n terms in an order that vectors of eight, GPUs and plain loops can all follow: eight partial sums over
// x[i], x[i + 8], ..., then halves onto each other.
template <class At>
static inline float sum_in_eights(int32_t n, At at) {
    float part[8] = {};
    for (int32_t i = 0; i < n; ++i)
        part[i % 8] += at(i);
    for (int half = 4; half >= 1; half /= 2)
        for (int i = 0; i < half; ++i)
            part[i] += part[i + half];
    return part[0];
}
template <class At>
static inline float sum_squares(int32_t n, At at) {
    return sum_in_eights(n, [&](int32_t i) {
        const float x = at(i);
        return x * x;
    });
}

// Nearest of 2^bits ascending levels; a value in the middle of two gets the lower.
static inline int book_code(const float* book, int bits, float y) {
    int code = 0;
    for (int i = 0; i + 1 < (1 << bits); ++i)
        code += y > 0.5f * (book[i] + book[i + 1]);
    return code;
}

} // namespace kvmosaic::kernels
