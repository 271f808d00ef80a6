// What the cache must know of a model: sizes of every layer and the rotation of its keys.
// Words and letters as in DESIGN.md: L layers, H query heads, G KV heads, T tokens, D head size.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic {

enum class Side : uint8_t { key = 0, value = 1 };
inline const char* name_of(Side s) { return s == Side::key ? "key" : "value"; }

// Rotary embedding of one layer, as the model's own graph states it (RoFormer, arXiv 2104.09864; YaRN, 2309.00071).
// Channels at and past `rotary` pass through and are nobody's pair.
struct Rope {
    bool known = false;
    bool halves = false; // pairs are (i, i + rotary/2); otherwise (2i, 2i + 1)
    int32_t rotary = 0;  // channels that turn, even, at most D
    int32_t original_context = 0;
    float base = 10000.0f, freq_scale = 1.0f;
    float ext_factor = 0.0f, attn_factor = 1.0f, beta_fast = 32.0f, beta_slow = 1.0f; // YaRN
    std::vector<float> factors; // [rotary/2] divisors of the frequencies, or empty

    bool operator==(const Rope&) const = default;
    // Channels (a, b) of pair i, 0 <= i < rotary/2.
    std::pair<int32_t, int32_t> pair(int32_t i) const;
    // Angle in radians that pair i turns per position, factors and YaRN ramp included.
    double angle(int32_t i) const;
    // Magnitude that rotating multiplies a vector with (YaRN); applied once, when a key is first rotated.
    double magnitude() const;
    // Turns x [D] in place by `delta` positions (any sign); does not apply the magnitude.
    void turn(float* x, double delta) const;
};

// Frequency divisors of the "llama3" scaling rule from a model's published parameters; [rotary/2].
std::vector<float> llama3_factors(int32_t rotary, float base, float factor, float low, float high,
                                  int32_t original_context);

struct LayerShape {
    int32_t heads = 0;     // H, query heads
    int32_t kv_heads = 0;  // G; H is a multiple of G. 0: the layer keeps no K/V
    int32_t key_dim = 0;   // D of the key side, 1..512
    int32_t value_dim = 0; // D of the value side, 1..512
    Rope rope = {};        // rotation of its keys; `known` is false where nobody told
    int32_t dim(Side s) const { return s == Side::key ? key_dim : value_dim; }
    bool has_kv() const { return kv_heads > 0; }
    bool same_sizes(const LayerShape& o) const {
        return heads == o.heads && kv_heads == o.kv_heads && key_dim == o.key_dim && value_dim == o.value_dim;
    }
};

struct ModelShape {
    std::vector<LayerShape> layers; // [L]; a layer that borrows another's K/V has kv_heads = 0
    std::string name = {};          // for messages
    std::string fingerprint = {};   // of the weights, hexadecimal; empty: unknown. Calibration files are bound to it
};

// ok, or the layer, field and range that is wrong. No layer with K/V at all is an error.
Status validate(const ModelShape& shape);

} // namespace kvmosaic
