// Narrow float types and their conversions: the scalar reference that every backend must equal bit for bit.
// All narrowing conversions round half to even. Policy on overflow: finite values saturate to the largest finite
// value, infinities saturate likewise in the `_sat` forms, NaN stays NaN (docs/numerics.md).
#pragma once

#include <bit>
#include <cstdint>

namespace kvmosaic {

using f16_bits = uint16_t;  // IEEE binary16
using bf16_bits = uint16_t; // upper half of binary32
using f8_bits = uint8_t;    // E4M3: bias 7, no infinities, 0x7F/0xFF NaN, largest 448

float f16_to_f32(f16_bits h);
f16_bits f32_to_f16(float x);     // IEEE: overflow gives infinity
f16_bits f32_to_f16_sat(float x); // overflow and infinities give +-65504, NaN stays NaN

inline float bf16_to_f32(bf16_bits h) { return std::bit_cast<float>(uint32_t(h) << 16); }
bf16_bits f32_to_bf16(float x);     // IEEE: overflow gives infinity
bf16_bits f32_to_bf16_sat(float x); // overflow and infinities give the largest finite, NaN stays NaN

float f8e4m3_to_f32(f8_bits b);
f8_bits f32_to_f8e4m3_sat(float x); // |x| above 448 and infinities give +-448, NaN gives 0x7F with the sign
float f8e5m2_to_f32(f8_bits b);
f8_bits f32_to_f8e5m2_sat(float x); // |x| above 57344 and infinities give +-57344, NaN stays NaN

// Types in which metadata and raw elements may be stored.
enum class ParamType : uint8_t { f16, bf16, f8e4m3 }; // scales and offsets of a page
enum class RawType : uint8_t { f32, f16, bf16 };      // elements of raw rows and raw channels

constexpr uint32_t bytes_of(ParamType t) { return t == ParamType::f8e4m3 ? 1u : 2u; }
constexpr uint32_t bytes_of(RawType t) { return t == RawType::f32 ? 4u : 2u; }
const char* name_of(ParamType t); // "f16", "bf16", "f8e4m3"
const char* name_of(RawType t);   // "f32", "f16", "bf16"

// Reads or writes element i of an array of the type. Stores saturate.
float load(ParamType t, const uint8_t* base, uint32_t i);
void store(ParamType t, uint8_t* base, uint32_t i, float x);
float load(RawType t, const uint8_t* base, uint32_t i);
void store(RawType t, uint8_t* base, uint32_t i, float x);

} // namespace kvmosaic
