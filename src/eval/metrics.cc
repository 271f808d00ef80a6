#include "eval/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvmosaic::eval {

namespace {

// exp(-d) - 1. Most d of a comparison are small, where a few terms of the series are exact and far cheaper.
double minus_exp(double d) {
    if (std::fabs(d) > 0x1p-5) return std::expm1(-d);
    return -d * (1 - d / 2 * (1 - d / 3 * (1 - d / 4 * (1 - d / 5 * (1 - d / 6 * (1 - d / 7))))));
}

} // namespace

LogSum log_sum(const float* logits, int32_t n) {
    LogSum out;
    float max = logits[0];
    for (int32_t i = 1; i < n; ++i) {
        if (logits[i] > max) max = logits[i], out.best = i;
    }
    double sum = 0;
    for (int32_t i = 0; i < n; ++i)
        sum += double(std::exp(logits[i] - max));
    out.max = max;
    out.log_sum = std::log(sum);
    out.finite = std::isfinite(max) && std::isfinite(out.log_sum);
    return out;
}

double log_probability(const float* logits, const LogSum& sum, int32_t i) {
    return (double(logits[i]) - double(sum.max)) - sum.log_sum;
}

double kl_divergence(const float* reference, const LogSum& rsum, const float* other, const LogSum& osum, int32_t n) {
    // With d = log p - log q, the sum of q being 1 means that p (exp(-d) - 1) adds up to 0, so KL = sum p d is also
    // sum p (d + exp(-d) - 1): no term below 0, and of second order in d. An error of float's exp() in p then counts
    // for as little as the terms do, where in sum p d it would drown the small KL that the floor of a comparison is
    // made of. The log sums only centre d; what they leave over is taken out at the end.
    const double shift = double(osum.max) + osum.log_sum - double(rsum.max) - rsum.log_sum;
    double weights = 0, terms = 0, rest = 0;
    for (int32_t i = 0; i < n; ++i) {
        const double w = double(std::exp(reference[i] - rsum.max));
        if (w == 0) continue;
        const double d = double(reference[i]) - double(other[i]) + shift;
        const double e = minus_exp(d);
        weights += w;
        rest += w * e;
        terms += w * (d + e);
    }
    rest /= weights;
    return std::max(0.0, terms / weights + (std::log1p(rest) - rest));
}

Summary summarize(const std::vector<float>& values) {
    Summary out;
    if (values.empty()) return out;
    const double n = double(values.size());
    double sum = 0, squares = 0;
    for (const float v : values)
        sum += v;
    out.mean = sum / n;
    for (const float v : values)
        squares += (v - out.mean) * (v - out.mean);
    if (values.size() > 1) out.error = std::sqrt(squares / (n - 1) / n);
    return out;
}

Summary summarize(const std::vector<std::vector<float>>& blocks) {
    Summary out;
    double n = 0, sum = 0, squares = 0;
    for (const std::vector<float>& block : blocks) {
        n += double(block.size());
        sum = std::accumulate(block.begin(), block.end(), sum);
    }
    if (n == 0) return out;
    out.mean = sum / n;
    for (const std::vector<float>& block : blocks) {
        const double off = std::accumulate(block.begin(), block.end(), 0.0) - double(block.size()) * out.mean;
        squares += off * off;
    }
    const double count = double(blocks.size());
    out.error = blocks.size() > 1 ? std::sqrt(squares * count / (count - 1)) / n : NAN;
    return out;
}

std::vector<double> attention_weights(const float* q, const float* keys, int64_t stride, int64_t dim, int64_t n,
                                      double scale) {
    std::vector<double> w(static_cast<size_t>(n));
    double most = -INFINITY, sum = 0;
    for (int64_t t = 0; t < n; ++t) {
        double dot = 0;
        for (int64_t c = 0; c < dim; ++c)
            dot += double(q[c]) * double(keys[t * stride + c]);
        w[size_t(t)] = dot * scale;
        most = std::max(most, w[size_t(t)]);
    }
    for (double& x : w)
        sum += x = std::exp(x - most);
    for (double& x : w)
        x /= sum;
    return w;
}

double quantile(std::vector<float> values, double q) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    const double at = q * double(values.size() - 1);
    const size_t low = size_t(at), high = std::min(low + 1, values.size() - 1);
    return values[low] + (at - double(low)) * (double(values[high]) - double(values[low]));
}

} // namespace kvmosaic::eval
