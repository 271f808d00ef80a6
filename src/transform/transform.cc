#include "kvmosaic/transform.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvmosaic {

namespace {

// Butterflies on vectors of W floats: the stages inside a vector by shuffles, the others two at a time, so that a row
// is loaded and stored half as often. Every sum and difference is the one that the plain loop makes.
template <int W>
struct Lanes {
    typedef float F __attribute__((vector_size(W * 4), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(W * 4)));
};

template <int W, typename V, typename I>
[[gnu::always_inline]] inline void shuffle(const V& v, const I& lanes, V* out) {
#if defined(__clang__) // which has no shuffle by a vector of lanes
    for (int k = 0; k < W; ++k)
        (*out)[k] = v[lanes[k]];
#else
    *out = __builtin_shuffle(v, lanes);
#endif
}

template <int W>
[[gnu::always_inline]] inline void butterflies(float* x, int32_t n) { // n: a power of two, at least W
    using F = typename Lanes<W>::F;
    using I = typename Lanes<W>::I;
    typedef float Whole __attribute__((vector_size(W * 4)));
    for (int32_t i = 0; i < n; i += W) {
        Whole v = *reinterpret_cast<const F*>(x + i);
#pragma GCC unroll 3
        for (int h = 1; h < W; h *= 2) {
            I other = {}, minus = {};
            for (int k = 0; k < W; ++k) {
                other[k] = k ^ h;
                minus[k] = (k & h) != 0 ? INT32_MIN : 0;
            }
            Whole turned;
            shuffle<W>(v, other, &turned);
            v = turned + Whole(I(v) ^ minus); // a + b, and in the upper lane of a pair a - b
        }
        *reinterpret_cast<F*>(x + i) = v;
    }
    int32_t h = W;
    for (; 2 * h < n; h *= 4) {
        for (int32_t base = 0; base < n; base += 4 * h) {
            for (int32_t i = base; i < base + h; i += W) {
                F *pa = reinterpret_cast<F*>(x + i), *pb = reinterpret_cast<F*>(x + i + h);
                F *pc = reinterpret_cast<F*>(x + i + 2 * h), *pd = reinterpret_cast<F*>(x + i + 3 * h);
                const Whole a = *pa + *pb, b = *pa - *pb, c = *pc + *pd, d = *pc - *pd;
                *pa = a + c;
                *pb = b + d;
                *pc = a - c;
                *pd = b - d;
            }
        }
    }
    for (; h < n; h *= 2) {
        for (int32_t i = 0; i < h; i += W) { // the last stage: one pair of halves
            F *pa = reinterpret_cast<F*>(x + i), *pb = reinterpret_cast<F*>(x + i + h);
            const Whole a = *pa, b = *pb;
            *pa = a + b;
            *pb = a - b;
        }
    }
}

void butterflies_base(float* x, int32_t n) { butterflies<4>(x, n); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) void butterflies_avx2(float* x, int32_t n) { butterflies<8>(x, n); }
const bool kAvx2 = __builtin_cpu_supports("avx2");
#endif

void hadamard_block(float* x, int32_t n) {
    if (n == 2) {
        const float a = x[0], b = x[1];
        x[0] = a + b;
        x[1] = a - b;
#if defined(__x86_64__)
    } else if (n >= 8 && kAvx2) {
        butterflies_avx2(x, n);
#endif
    } else if (n >= 4) {
        butterflies_base(x, n);
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

namespace {

// In runs of `run` values. Orthonormal and symmetric, so its own inverse.
void hadamard_runs(int32_t run, float* row, int32_t n) {
    for (int32_t i = 0; run > 0 && i < n; i += run)
        hadamard(row + i, std::min(run, n - i));
}

} // namespace

void Transform::forward(float* row, int32_t n, float* scratch) const {
    hadamard_runs(hadamard, row, n);
    if (!scale.empty())
        for (int32_t i = 0; i < n; ++i)
            row[i] = shift.empty() ? row[i] / scale[size_t(i)] : (row[i] - shift[size_t(i)]) / scale[size_t(i)];
    if (order.empty()) return;
    std::copy_n(row, n, scratch);
    for (int32_t i = 0; i < n; ++i)
        row[i] = scratch[order[size_t(i)]];
}

void Transform::inverse(float* row, int32_t n, float* scratch) const { unfold(row, n, 1.0f, scratch); }

float Transform::fold(const float* q, int32_t n, float* folded, float* scratch) const {
    std::copy_n(q, n, scratch);
    hadamard_runs(hadamard, scratch, n);
    float constant = 0.0f;
    for (size_t i = 0; i < shift.size(); ++i)
        constant += scratch[i] * shift[i];
    for (size_t i = 0; i < scale.size(); ++i)
        scratch[i] *= scale[i];
    for (int32_t i = 0; i < n; ++i)
        folded[i] = scratch[order.empty() ? i : order[size_t(i)]];
    return constant;
}

void Transform::unfold(float* row, int32_t n, float weight, float* scratch) const {
    if (!order.empty()) {
        std::copy_n(row, n, scratch);
        for (int32_t i = 0; i < n; ++i)
            row[order[size_t(i)]] = scratch[i];
    }
    for (size_t i = 0; i < scale.size(); ++i)
        row[i] *= scale[i];
    for (size_t i = 0; i < shift.size(); ++i)
        row[i] += weight * shift[i];
    hadamard_runs(hadamard, row, n);
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
