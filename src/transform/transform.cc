#include "kvmosaic/transform.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvmosaic {

namespace {

void hadamard_block(float* x, int32_t n) {
    for (int32_t half = 1; half < n; half *= 2)
        for (int32_t base = 0; base < n; base += 2 * half)
            for (int32_t i = base; i < base + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    const float norm = float(1.0 / std::sqrt(double(n)));
    for (int32_t i = 0; i < n; ++i)
        x[i] *= norm;
}

Status bad(const std::string& what) { return {StatusCode::invalid_argument, "transform: " + what}; }

} // namespace

void hadamard(float* row, int32_t n) {
    for (int32_t at = 0; at < n;) {
        int32_t block = 1;
        while (2 * block <= n - at)
            block *= 2;
        hadamard_block(row + at, block);
        at += block;
    }
}

void Transform::forward(float* row, int32_t n, float* scratch) const {
    if (hadamard > 0)
        for (int32_t i = 0; i < n; i += hadamard)
            kvmosaic::hadamard(row + i, std::min(hadamard, n - i));
    if (!scale.empty())
        for (int32_t i = 0; i < n; ++i)
            row[i] = shift.empty() ? row[i] / scale[size_t(i)] : (row[i] - shift[size_t(i)]) / scale[size_t(i)];
    if (order.empty()) return;
    std::copy_n(row, n, scratch);
    for (int32_t i = 0; i < n; ++i)
        row[i] = scratch[order[size_t(i)]];
}

void Transform::inverse(float* row, int32_t n, float* scratch) const {
    if (!order.empty()) {
        std::copy_n(row, n, scratch);
        for (int32_t i = 0; i < n; ++i)
            row[order[size_t(i)]] = scratch[i];
    }
    if (!scale.empty())
        for (int32_t i = 0; i < n; ++i) {
            const float product = row[i] * scale[size_t(i)];
            row[i] = shift.empty() ? product : product + shift[size_t(i)];
        }
    if (hadamard > 0)
        for (int32_t i = 0; i < n; i += hadamard)
            kvmosaic::hadamard(row + i, std::min(hadamard, n - i));
}

Status validate(const Transform& t, int32_t dim, int32_t kv_heads) {
    if (t.joined < 1 || t.joined > kv_heads || kv_heads % t.joined != 0)
        return bad("joined = " + std::to_string(t.joined) + ": must divide the " + std::to_string(kv_heads) +
                   " KV heads");
    const size_t n = size_t(t.joined) * size_t(dim);
    if (t.hadamard < 0 || size_t(t.hadamard) > n)
        return bad("hadamard = " + std::to_string(t.hadamard) + ": must be 0 to " + std::to_string(n));
    for (const auto& [name, size] :
         {std::pair("shift", t.shift.size()), std::pair("scale", t.scale.size()), std::pair("order", t.order.size())})
        if (size != 0 && size != n)
            return bad(std::string(name) + " has " + std::to_string(size) + " channels, must have " +
                       std::to_string(n));
    if (!t.shift.empty() && t.scale.empty()) return bad("shift needs scale");
    for (const float s : t.scale)
        if (!(s > 0.0f) || !std::isfinite(s))
            return bad("scale = " + std::to_string(s) + ": must be above 0 and finite");
    for (const float s : t.shift)
        if (!std::isfinite(s)) return bad("shift must be finite");
    std::vector<bool> seen(n);
    for (const uint16_t c : t.order) {
        if (c >= n || seen[c]) return bad("order is no permutation of 0.." + std::to_string(n - 1));
        seen[c] = true;
    }
    return {};
}

} // namespace kvmosaic
