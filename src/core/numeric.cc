#include "kvmosaic/numeric.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace kvmosaic {
namespace {

constexpr uint32_t kF32Inf = 0x7F800000u;

// Magnitude bits of a finite |x| rounded half to even to a float with E exponent and M mantissa bits (bias
// 2^(E-1) - 1). The result is not limited: past the largest finite value the bits simply count on, so that the caller
// can compare with its own largest value and apply its own policy.
template <int E, int M>
uint32_t narrow(uint32_t abs) {
    constexpr int kBias = (1 << (E - 1)) - 1;
    constexpr int kRebias = 127 - kBias; // exponent fields: f32 minus ours
    constexpr int kShift = 23 - M;
    const int exponent = int(abs >> 23);
    if (exponent > kRebias) {
        const uint32_t r = abs - (uint32_t(kRebias) << 23);
        return (r + (1u << (kShift - 1)) - 1 + ((r >> kShift) & 1)) >> kShift;
    }
    const int shift = kShift + kRebias + 1 - exponent; // subnormal in the target
    if (shift > 24) return 0;                          // below half of the smallest subnormal (f32 subnormals too)
    const uint32_t r = (abs & 0x7FFFFFu) | 0x800000u;
    return (r + (1u << (shift - 1)) - 1 + ((r >> shift) & 1)) >> shift;
}

// Value of magnitude bits `abs` (finite) of the same family of types; exact.
template <int E, int M>
float widen(uint32_t abs) {
    constexpr int kBias = (1 << (E - 1)) - 1;
    const uint32_t exponent = abs >> M, mantissa = abs & ((1u << M) - 1);
    if (exponent == 0) return float(mantissa) * std::bit_cast<float>(uint32_t(127 - kBias + 1 - M) << 23);
    return std::bit_cast<float>(((exponent + 127 - kBias) << 23) | (mantissa << (23 - M)));
}

uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }
bool negative(float x) { return (std::bit_cast<uint32_t>(x) >> 31) != 0; }

template <typename T>
T load_as(const uint8_t* base, uint32_t i) {
    T v;
    std::memcpy(&v, base + size_t(i) * sizeof(T), sizeof(T));
    return v;
}
template <typename T>
void store_as(uint8_t* base, uint32_t i, T v) {
    std::memcpy(base + size_t(i) * sizeof(T), &v, sizeof(T));
}

} // namespace

// ---- binary16 ----

float f16_to_f32(f16_bits h) {
    const uint32_t abs = h & 0x7FFFu;
    float value;
    if (abs >= 0x7C00u)
        value = std::bit_cast<float>(kF32Inf | ((abs & 0x3FFu) << 13));
    else
        value = widen<5, 10>(abs);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (uint32_t(h & 0x8000u) << 16));
}

f16_bits f32_to_f16(float x) {
    const uint32_t abs = magnitude(x), sign = negative(x) ? 0x8000u : 0u;
    if (abs > kF32Inf) return f16_bits(sign | 0x7E00u | ((abs >> 13) & 0x3FFu)); // quiet, payload kept
    if (abs == kF32Inf) return f16_bits(sign | 0x7C00u);
    const uint32_t r = narrow<5, 10>(abs);
    return f16_bits(sign | (r > 0x7C00u ? 0x7C00u : r));
}

f16_bits f32_to_f16_sat(float x) {
    const f16_bits h = f32_to_f16(x);
    return (h & 0x7FFFu) == 0x7C00u ? f16_bits(h - 1) : h;
}

// ---- bfloat16 ----

bf16_bits f32_to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (magnitude(x) > kF32Inf) return bf16_bits((bits >> 16) | 0x40u); // quiet, so that no NaN becomes an infinity
    return bf16_bits((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

bf16_bits f32_to_bf16_sat(float x) {
    const bf16_bits h = f32_to_bf16(x);
    return (h & 0x7FFFu) == 0x7F80u ? bf16_bits(h - 1) : h;
}

// ---- 8 bits ----

float f8e4m3_to_f32(f8_bits b) {
    const uint32_t abs = b & 0x7Fu;
    const float value = abs == 0x7Fu ? std::numeric_limits<float>::quiet_NaN() : widen<4, 3>(abs);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | (uint32_t(b & 0x80u) << 24));
}

f8_bits f32_to_f8e4m3_sat(float x) {
    const uint32_t abs = magnitude(x), sign = negative(x) ? 0x80u : 0u;
    if (abs > kF32Inf) return f8_bits(sign | 0x7Fu);
    if (abs == kF32Inf) return f8_bits(sign | 0x7Eu);
    const uint32_t r = narrow<4, 3>(abs);
    return f8_bits(sign | (r > 0x7Eu ? 0x7Eu : r));
}

float f8e5m2_to_f32(f8_bits b) { return f16_to_f32(f16_bits(uint32_t(b) << 8)); }

f8_bits f32_to_f8e5m2_sat(float x) {
    const uint32_t abs = magnitude(x), sign = negative(x) ? 0x80u : 0u;
    if (abs > kF32Inf) return f8_bits(sign | 0x7Eu);
    if (abs == kF32Inf) return f8_bits(sign | 0x7Bu);
    const uint32_t r = narrow<5, 2>(abs);
    return f8_bits(sign | (r > 0x7Bu ? 0x7Bu : r));
}

// ---- by type ----

const char* name_of(ParamType t) {
    switch (t) {
    case ParamType::f16:
        return "f16";
    case ParamType::bf16:
        return "bf16";
    case ParamType::f8e4m3:
        return "f8e4m3";
    }
    return "?";
}

const char* name_of(RawType t) {
    switch (t) {
    case RawType::f32:
        return "f32";
    case RawType::f16:
        return "f16";
    case RawType::bf16:
        return "bf16";
    }
    return "?";
}

float load(ParamType t, const uint8_t* base, uint32_t i) {
    switch (t) {
    case ParamType::f16:
        return f16_to_f32(load_as<uint16_t>(base, i));
    case ParamType::bf16:
        return bf16_to_f32(load_as<uint16_t>(base, i));
    case ParamType::f8e4m3:
        return f8e4m3_to_f32(base[i]);
    }
    return 0.0f;
}

void store(ParamType t, uint8_t* base, uint32_t i, float x) {
    switch (t) {
    case ParamType::f16:
        store_as<uint16_t>(base, i, f32_to_f16_sat(x));
        break;
    case ParamType::bf16:
        store_as<uint16_t>(base, i, f32_to_bf16_sat(x));
        break;
    case ParamType::f8e4m3:
        base[i] = f32_to_f8e4m3_sat(x);
        break;
    }
}

float load(RawType t, const uint8_t* base, uint32_t i) {
    switch (t) {
    case RawType::f32:
        return load_as<float>(base, i);
    case RawType::f16:
        return f16_to_f32(load_as<uint16_t>(base, i));
    case RawType::bf16:
        return bf16_to_f32(load_as<uint16_t>(base, i));
    }
    return 0.0f;
}

void store(RawType t, uint8_t* base, uint32_t i, float x) {
    switch (t) {
    case RawType::f32:
        if (std::isinf(x)) x = std::copysign(std::numeric_limits<float>::max(), x);
        store_as<float>(base, i, x);
        break;
    case RawType::f16:
        store_as<uint16_t>(base, i, f32_to_f16_sat(x));
        break;
    case RawType::bf16:
        store_as<uint16_t>(base, i, f32_to_bf16_sat(x));
        break;
    }
}

} // namespace kvmosaic
