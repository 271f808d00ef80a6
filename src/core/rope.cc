// Rotary embedding as llama.cpp's rope operation computes it (ggml), in double where that uses float.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kvmosaic/shape.h"

namespace kvmosaic {

namespace {

constexpr double kTwoPi = 2.0 * std::numbers::pi;

// The pair (as a fraction) that turns `turns` times over the original context (YaRN, 2309.00071, section 3.2). In
// float like ggml, because floor and ceil of it follow.
float pair_of_turns(const Rope& rope, float turns) {
    const float context = float(rope.original_context);
    return float(rope.rotary) * std::log(context / (turns * float(kTwoPi))) / (2.0f * std::log(rope.base));
}

// 1 where the frequency is kept (fast pairs), 0 where it is interpolated (slow pairs).
double yarn_ramp(const Rope& rope, int32_t i) {
    const float first = std::max(0.0f, std::floor(pair_of_turns(rope, rope.beta_fast)));
    const float last = std::min(float(rope.rotary - 1), std::ceil(pair_of_turns(rope, rope.beta_slow)));
    const double y = (double(i) - double(first)) / double(std::max(0.001f, last - first));
    return 1.0 - std::clamp(y, 0.0, 1.0);
}

} // namespace

std::pair<int32_t, int32_t> Rope::pair(int32_t i) const {
    return halves ? std::pair(i, i + rotary / 2) : std::pair(2 * i, 2 * i + 1);
}

double Rope::angle(int32_t i) const {
    const double kept =
        std::pow(double(base), -2.0 * i / rotary) / (factors.empty() ? 1.0 : double(factors[size_t(i)]));
    const double interpolated = kept * double(freq_scale);
    if (ext_factor == 0.0f) return interpolated;
    const double mix = yarn_ramp(*this, i) * double(ext_factor);
    return interpolated * (1.0 - mix) + kept * mix;
}

double Rope::magnitude() const {
    if (ext_factor == 0.0f) return double(attn_factor);
    return double(attn_factor) * (1.0 + 0.1 * std::log(1.0 / double(freq_scale)));
}

void Rope::turn(float* x, double delta) const {
    for (int32_t i = 0; i < rotary / 2; ++i) {
        const auto [a, b] = pair(i);
        const double t = delta * angle(i), c = std::cos(t), s = std::sin(t);
        const double xa = double(x[a]), xb = double(x[b]);
        x[a] = float(xa * c - xb * s);
        x[b] = float(xa * s + xb * c);
    }
}

// Rule of the Llama 3.1 reference code: wavelengths above original / low are stretched by `factor`, those below
// original / high stay, those between are blended.
std::vector<float> llama3_factors(int32_t rotary, float base, float factor, float low, float high,
                                  int32_t original_context) {
    std::vector<float> factors(size_t(std::max(rotary, 0) / 2), 1.0f);
    for (size_t i = 0; i < factors.size(); ++i) {
        const double wavelength = kTwoPi * std::pow(double(base), 2.0 * double(i) / rotary);
        const double turns = double(original_context) / wavelength; // over the original context
        if (turns < double(low)) {
            factors[i] = factor;
        } else if (turns < double(high)) {
            const double smooth = (turns - double(low)) / (double(high) - double(low));
            factors[i] = float(1.0 / ((1.0 - smooth) / double(factor) + smooth));
        }
    }
    return factors;
}

} // namespace kvmosaic
