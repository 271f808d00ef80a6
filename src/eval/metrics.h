// What a position of teacher-forced text tells about a cache: negative log-likelihood, KL divergence, agreement.
#pragma once

#include <cstdint>
#include <vector>

namespace kvmosaic::eval {

// Of one row of logits: log softmax(x)[i] = (x[i] - max) - log_sum.
struct LogSum {
    float max = 0;
    double log_sum = 0;
    int32_t best = 0; // index of the maximum, the lowest of equals
    bool finite = false;
};
LogSum log_sum(const float* logits, int32_t n);

double log_probability(const float* logits, const LogSum& sum, int32_t i);

// KL(reference || other) in nats, never below 0.
double kl_divergence(const float* reference, const LogSum& rsum, const float* other, const LogSum& osum, int32_t n);

struct Summary {
    double mean = 0;
    double error = 0; // standard error of the mean, positions taken as independent
};
Summary summarize(const std::vector<float>& values);
// Of all values; the error allows for those of a block (a window of a text) being alike, as neighbours in a text are.
// One block alone tells no error: NaN.
Summary summarize(const std::vector<std::vector<float>>& blocks);

// Softmax weights of a query over n rows (row t at keys + t * stride), all of it in double.
std::vector<double> attention_weights(const float* q, const float* keys, int64_t stride, int64_t dim, int64_t n,
                                      double scale);

// The q-quantile, 0 <= q <= 1, linear between order statistics. 0 for no values.
double quantile(std::vector<float> values, double q);

} // namespace kvmosaic::eval
