#include "eval/metrics.h"

#include <algorithm>
#include <cmath>

namespace kvmosaic::eval {

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
    // log p - log q of every entry differs from (reference - other) by one constant, which stays in double; the small
    // differences that the floor of a comparison is made of would drown in float.
    const double shift = double(osum.max) + osum.log_sum - double(rsum.max) - rsum.log_sum;
    const double scale = std::exp(-rsum.log_sum);
    double sum = 0;
    for (int32_t i = 0; i < n; ++i) {
        const double p = double(std::exp(reference[i] - rsum.max));
        if (p > 0) sum += p * (double(reference[i]) - double(other[i]) + shift);
    }
    return std::max(0.0, sum * scale);
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

double quantile(std::vector<float> values, double q) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    const double at = q * double(values.size() - 1);
    const size_t low = size_t(at), high = std::min(low + 1, values.size() - 1);
    return values[low] + (at - double(low)) * (double(values[high]) - double(values[low]));
}

} // namespace kvmosaic::eval
