// Scores, softmax and mix of some query rows over one page of decoded rows. A "value" is one multiply-add.
#include <algorithm>
#include <string>

#include "bench_util.h"

namespace kvmosaic::bench {
namespace {

void scores(benchmark::State& state, const kernels::Table& table, int32_t nq, int32_t dim) {
    const std::vector<float> q = numbers(size_t(nq) * size_t(dim), 1), k = numbers(size_t(kPageTokens * dim), 2);
    std::vector<float> s(size_t(nq) * kPageTokens);
    for (auto _ : state) {
        table.scores(q.data(), nq, k.data(), dim, kPageTokens, dim, 0.125f, s.data(), kPageTokens);
        benchmark::DoNotOptimize(s.data());
        benchmark::ClobberMemory();
    }
    report(state, double(nq) * kPageTokens * dim, double(kPageTokens) * dim * 4);
}

void mix(benchmark::State& state, const kernels::Table& table, int32_t nq, int32_t dim, bool causal) {
    const std::vector<float> p = numbers(size_t(nq) * kPageTokens, 1), v = numbers(size_t(kPageTokens * dim), 2);
    std::vector<float> o(size_t(nq) * size_t(dim));
    const std::vector<int32_t> lo(size_t(nq), 0);
    std::vector<int32_t> hi(size_t(nq), kPageTokens);
    double values = 0;
    for (int32_t r = 0; r < nq; ++r) {
        if (causal) hi[size_t(r)] = kPageTokens - nq + 1 + r;
        values += double(hi[size_t(r)]) * dim;
    }
    for (auto _ : state) {
        std::fill(o.begin(), o.end(), 0.0f);
        table.mix(p.data(), kPageTokens, lo.data(), hi.data(), nq, v.data(), dim, dim, o.data(), dim);
        benchmark::DoNotOptimize(o.data());
        benchmark::ClobberMemory();
    }
    report(state, values, double(kPageTokens) * dim * 4);
}

void softmax(benchmark::State& state, const kernels::Table& table, int32_t nq) {
    const std::vector<float> start = numbers(size_t(nq) * kPageTokens, 1);
    std::vector<float> s(start), o(size_t(nq) * 128);
    std::vector<kernels::RowState> rows(static_cast<size_t>(nq));
    for (auto _ : state) {
        for (int32_t r = 0; r < nq; ++r) {
            std::copy_n(start.data() + r * kPageTokens, kPageTokens, s.data() + r * kPageTokens);
            rows[size_t(r)] = {0.0f, 1.0f};
            table.softmax(s.data() + r * kPageTokens, kPageTokens, &rows[size_t(r)], o.data() + r * 128, 128);
        }
        benchmark::DoNotOptimize(s.data());
        benchmark::ClobberMemory();
    }
    report(state, double(s.size()), double(s.size()) * 4);
}

} // namespace

void register_attention(const kernels::Table& table) {
    const std::string isa = table.isa;
    for (int32_t nq : {1, 2, 3, 4, 6, 8, 16, 32, 64, 96}) {
        for (int32_t dim : {64, 96, 100, 128, 256}) {
            if (dim != 64 && dim != 128 && nq != 1 && nq != 64) continue;
            const std::string rest = "/r" + std::to_string(nq) + "/D" + std::to_string(dim);
            benchmark::RegisterBenchmark((isa + "/scores" + rest).c_str(),
                                         [&table, nq, dim](benchmark::State& s) { scores(s, table, nq, dim); });
            benchmark::RegisterBenchmark((isa + "/mix" + rest).c_str(),
                                         [&table, nq, dim](benchmark::State& s) { mix(s, table, nq, dim, false); });
            if (nq >= 32 && nq <= 64)
                benchmark::RegisterBenchmark((isa + "/mix_causal" + rest).c_str(),
                                             [&table, nq, dim](benchmark::State& s) { mix(s, table, nq, dim, true); });
        }
        benchmark::RegisterBenchmark((isa + "/softmax/r" + std::to_string(nq)).c_str(),
                                     [&table, nq](benchmark::State& s) { softmax(s, table, nq); });
    }
}

} // namespace kvmosaic::bench
