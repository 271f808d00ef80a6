#include "eval/bench_data.h"

#include <algorithm>
#include <cmath>

#include "eval/metrics.h"

namespace kvmosaic::eval {

namespace {

// xorshift64* (Vigna, arXiv 1402.6246); a Gaussian as the sum of four uniforms of 16 bits.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull | 1) {
        for (int i = 0; i < 4; ++i)
            next();
    }
    float gaussian() {
        const uint64_t x = next();
        const auto sum = float((x & 0xFFFF) + (x >> 16 & 0xFFFF) + (x >> 32 & 0xFFFF) + (x >> 48));
        return (sum - 131070.0f) / 37837.0f;
    }

private:
    uint64_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return state_ * 0x2545F4914F6CDD1Dull;
    }
    uint64_t state_;
};

constexpr int32_t kKeyOutliers = 6, kValueOutliers = 2;

} // namespace

void BenchData::rows(Side side, int32_t sequence, int64_t block, float* out) const {
    const int32_t heads = shape_.kv_heads, dim = shape_.head_dim;
    Random random((uint64_t(sequence) << 40) + (uint64_t(block) << 1) + uint64_t(side) + 7);
    for (int64_t i = 0; i < int64_t(kBenchBlock) * heads * dim; ++i)
        out[i] = random.gaussian();
    for (int32_t t = 0; t < kBenchBlock; ++t)
        for (int32_t h = 0; h < heads; ++h) {
            float* x = out + (int64_t(t) * heads + h) * dim;
            for (int32_t i = 0; side == Side::key && i < std::min(kKeyOutliers, dim); ++i) {
                float& at = x[(h * 31 + i * 21 + 122) % dim];
                at = (i % 2 ? 6.0f : -6.0f) + at * float(2 + i);
            }
            for (int32_t i = 0; side == Side::value && i < std::min(kValueOutliers, dim); ++i)
                x[(h * 13 + i * 40) % dim] *= 5.0f;
        }
}

std::vector<float> BenchData::queries(int64_t rows, uint64_t seed) const {
    std::vector<float> q(size_t(rows) * size_t(shape_.heads) * size_t(shape_.head_dim));
    Random random(seed + (uint64_t(1) << 60));
    for (float& x : q)
        x = random.gaussian();
    return q;
}

void attend_exactly(const float* q, int32_t group, const float* k, const float* v, int64_t rows, int32_t dim,
                    double scale, double* out) {
    for (int32_t g = 0; g < group; ++g) {
        const std::vector<double> weight = attention_weights(q + int64_t(g) * dim, k, dim, dim, rows, scale);
        double* o = out + int64_t(g) * dim;
        std::fill(o, o + dim, 0.0);
        for (int64_t t = 0; t < rows; ++t)
            for (int32_t d = 0; d < dim; ++d)
                o[d] += weight[size_t(t)] * double(v[t * dim + d]);
    }
}

void ErrorSum::add(const float* got, const double* want, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const double e = double(got[i]) - want[i];
        wrong += e * e;
        right += want[i] * want[i];
    }
}

double ErrorSum::relative() const { return right > 0 ? std::sqrt(wrong / right) : std::sqrt(wrong); }

} // namespace kvmosaic::eval
