// What the benchmarks share: repeatable numbers and counters.
#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "kvmosaic/store.h"

namespace kvmosaic::bench {

// xorshift64* (Vigna, arXiv 1402.6246), uniform in [-1, 1).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
    float next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return float(int64_t((state_ * 0x2545F4914F6CDD1Dull) >> 40) - (1 << 23)) * 0x1p-23f;
    }

private:
    uint64_t state_;
};

inline std::vector<float> numbers(size_t n, uint64_t seed) {
    Random random(seed);
    std::vector<float> x(n);
    for (float& v : x)
        v = random.next();
    return x;
}

// Nanoseconds per value (the column's unit says s, the number is ns) and bytes per second of what the format counts,
// not of what happens to move.
inline void report(benchmark::State& state, double values, double bytes) {
    const double n = double(state.iterations());
    state.counters["ns/value"] =
        benchmark::Counter(values * n * 1e-9, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
    state.counters["bytes"] = benchmark::Counter(bytes * n, benchmark::Counter::kIsRate);
}

void register_codecs(const kernels::Table& table);
void register_attention(const kernels::Table& table);

} // namespace kvmosaic::bench
