// Rows for benchmarks, repeatable and of any position without those before it, and attention over them in double.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "eval/bench.h"

namespace kvmosaic::eval {

inline constexpr int32_t kBenchBlock = 128; // rows that are made at once

// Gaussian rows as keys and values of real models have their outliers: in each KV head 6 key channels with a mean of
// +-6 and a spread of 2 to 7, 2 value channels five times as large; queries of spread 1.
class BenchData {
public:
    explicit BenchData(const BenchShape& shape) : shape_(shape) {}
    const BenchShape& shape() const { return shape_; }
    // out: [kBenchBlock][G][D], rows block * kBenchBlock ... of the sequence.
    void rows(Side side, int32_t sequence, int64_t block, float* out) const;
    std::vector<float> queries(int64_t rows, uint64_t seed) const; // [rows][H][D]

private:
    BenchShape shape_;
};

// Attention of the query vectors that share a KV head. q: [group][D], k, v: [rows][D], out: [group][D].
void attend_exactly(const float* q, int32_t group, const float* k, const float* v, int64_t rows, int32_t dim,
                    double scale, double* out);

// Sums for the relative L2 error of what was computed against what is right.
struct ErrorSum {
    double wrong = 0, right = 0;
    void add(const float* got, const double* want, int64_t n);
    double relative() const;
};

} // namespace kvmosaic::eval
