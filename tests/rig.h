// A cache with one or more layers, random q, k, v, and the attention that ought to come out: double precision over the
// values that Cache::decode shows. Splits the two questions "is the kernel right" and "what did quantizing lose".
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"
#include "unit/methods_calibration.h"

namespace kvmosaic::test {

struct Tensor { // [rows][heads][dim]
    int32_t heads = 0, dim = 0;
    std::vector<float> x;
    Tensor(int64_t rows, int32_t h, int32_t d) : heads(h), dim(d), x(size_t(rows) * size_t(h) * size_t(d)) {}
    float* at(int64_t row, int32_t head) { return x.data() + (row * heads + head) * dim; }
    const float* at(int64_t row, int32_t head) const { return x.data() + (row * heads + head) * dim; }
    RowsF32 rows(int64_t from = 0) const { return {x.data() + from * heads * dim, int64_t(heads) * dim, dim}; }
};

inline ModelShape one_layer(int32_t heads, int32_t kv_heads, int32_t dk, int32_t dv = 0, int32_t layers = 1) {
    ModelShape shape;
    shape.name = "test";
    Rope rope;
    rope.known = rope.halves = true;
    rope.rotary = dk / 2 * 2;
    for (int32_t i = 0; i < layers; ++i)
        shape.layers.push_back({heads, kv_heads, dk, dv ? dv : dk, rope});
    return shape;
}

// Gaussian rows with a few channels of large mean, as keys of real models have them.
struct Text {
    Tensor q, k, v;
    Text(const LayerShape& l, int64_t rows, uint32_t seed = 1)
        : q(rows, l.heads, l.key_dim), k(rows, l.kv_heads, l.key_dim), v(rows, l.kv_heads, l.value_dim) {
        std::mt19937 rng(seed);
        std::normal_distribution<float> n;
        for (float& x : q.x)
            x = n(rng);
        for (float& x : v.x)
            x = n(rng);
        for (int64_t t = 0; t < rows; ++t)
            for (int32_t h = 0; h < l.kv_heads; ++h)
                for (int32_t d = 0; d < l.key_dim; ++d)
                    k.at(t, h)[d] = n(rng) * (d % 17 == 3 ? 4.0f : 1.0f) + (d % 23 == 5 ? 9.0f : 0.0f);
    }
};

inline std::unique_ptr<Cache> make(const ModelShape& shape, const std::string& spec, CacheOptions options = {}) {
    options.poison = true;
    auto cache = Cache::create(shape, calibrations::with_file(spec, shape), options);
    EXPECT_TRUE(cache.ok()) << spec << ": " << cache.status().message();
    return cache.ok() ? std::move(*cache) : nullptr;
}

inline float default_scale(const LayerShape& l) { return 1.0f / std::sqrt(float(l.key_dim)); }

// Appends rows [from, from + n) of the text as positions from, from + 1, ... to `seq` on layer 0 and returns the
// attention output, [n][H][Dv].
inline std::vector<float> feed(Cache& cache, const Text& text, int64_t from, int64_t n, SeqId seq = 0,
                               AttendArgs args = {}) {
    const LayerShape& l = cache.shape().layers[0];
    if (args.scale == 1.0f) args.scale = default_scale(l);
    std::vector<StepRow> rows;
    for (int64_t t = 0; t < n; ++t)
        rows.push_back({int32_t(from + t), std::span<const SeqId>(&seq, 1)});
    std::vector<float> out(size_t(n) * size_t(l.heads) * size_t(l.value_dim), std::nanf(""));
    const Status st =
        cache.append_and_attend(0, rows, text.q.rows(from), text.k.rows(from), text.v.rows(from), args, out.data());
    EXPECT_TRUE(st.ok()) << st.message();
    return out;
}

// Begins a step of n rows of sequence `seq` and writes its first `layers` layers; it is left open, and nothing attends.
inline void write_layers(Cache& cache, const Text& text, int64_t from, int64_t n, int32_t layers, SeqId seq = 0) {
    std::vector<StepRow> rows;
    for (int64_t t = 0; t < n; ++t)
        rows.push_back({int32_t(from + t), {&seq, 1}});
    ASSERT_TRUE(cache.begin_step(rows).ok());
    for (int32_t l = 0; l < layers; ++l)
        cache.write(l, text.q.rows(from), text.k.rows(from), text.v.rows(from));
}

// Feeds rows [0, total) in pieces; sizes are taken in turn, the last one repeats.
inline std::vector<float> feed_split(Cache& cache, const Text& text, int64_t total, const std::vector<int64_t>& sizes,
                                     SeqId seq = 0, AttendArgs args = {}) {
    std::vector<float> out;
    size_t i = 0;
    for (int64_t at = 0; at < total;) {
        const int64_t n = std::min(total - at, sizes[std::min(i++, sizes.size() - 1)]);
        const auto part = feed(cache, text, at, n, seq, args);
        out.insert(out.end(), part.begin(), part.end());
        at += n;
    }
    return out;
}

// Attention of query row `row` over rows [lo, hi) of what the cache holds now. [H][Dv], double.
inline std::vector<double> expected(const Cache& cache, const Text& text, int64_t row, int64_t lo, int64_t hi,
                                    SeqId seq = 0, AttendArgs args = {}) {
    const LayerShape& l = cache.shape().layers[0];
    const double scale = args.scale == 1.0f ? double(default_scale(l)) : double(args.scale);
    std::vector<double> out(size_t(l.heads) * size_t(l.value_dim), 0.0);
    const int64_t n = hi - lo;
    if (n <= 0) return out;
    std::vector<float> k(size_t(n) * size_t(l.key_dim)), v(size_t(n) * size_t(l.value_dim));
    for (int32_t g = 0; g < l.kv_heads; ++g) {
        cache.decode(seq, 0, g, Side::key, lo, n, k.data());
        cache.decode(seq, 0, g, Side::value, lo, n, v.data());
        const int32_t group = l.heads / l.kv_heads;
        for (int32_t h = g * group; h < (g + 1) * group; ++h) {
            std::vector<double> s(static_cast<size_t>(n));
            double m = args.sinks ? double(args.sinks[h]) : -INFINITY;
            for (int64_t t = 0; t < n; ++t) {
                double dot = 0;
                for (int32_t d = 0; d < l.key_dim; ++d)
                    dot += double(text.q.at(row, h)[d]) * double(k[size_t(t * l.key_dim + d)]);
                dot *= scale;
                if (args.soft_cap > 0) dot = args.soft_cap * std::tanh(dot / args.soft_cap);
                s[size_t(t)] = dot;
                m = std::max(m, dot);
            }
            double sum = args.sinks ? std::exp(double(args.sinks[h]) - m) : 0.0;
            for (double& x : s)
                sum += x = std::exp(x - m);
            for (int64_t t = 0; t < n; ++t)
                for (int32_t d = 0; d < l.value_dim; ++d)
                    out[size_t(h * l.value_dim + d)] += s[size_t(t)] / sum * double(v[size_t(t * l.value_dim + d)]);
        }
    }
    return out;
}

// Largest difference relative to the rms of the expected vector.
inline double error_of(const float* got, const std::vector<double>& want) {
    double worst = 0, rms = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        if (!std::isfinite(got[i])) return INFINITY;
        worst = std::max(worst, std::fabs(double(got[i]) - want[i]));
        rms += want[i] * want[i];
    }
    return worst / std::max(1e-6, std::sqrt(rms / double(want.size())));
}

// Root of the squared error over that of the expected vector.
inline double l2_error_of(const float* got, const std::vector<double>& want) {
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        error += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        size += want[i] * want[i];
    }
    return std::sqrt(error / std::max(1e-12, size)); // NaN stays NaN, and below no bound
}

// What attention may differ from double over the decoded values, in error_of: fp32 sums where pages are restored,
// weights of 16 bits where codes are attended (one number of a row, so more than the 5e-4 of the whole row).
inline double bound_of(const Cache& cache) {
    return cache.path() == Path::fused || cache.path() == Path::partly ? 1.5e-3 : 5e-5;
}

// Specs that cover every store, window shape and page rule that exists.
inline std::vector<std::string> all_specs() {
    return {"f16",
            "f32",
            "bf16",
            "kivi:bits=2",
            "kivi:bits=4",
            "kivi:bits=3,group=32,residual=32",
            "kivi:bits=8,group=64,residual=64",
            "kivi:bits=2,group=128,front=4",
            "mixkvq",
            "mixkvq:front=0,hi=2,mid=0.3",
            "mixkvq:query=window,v=4,keep=32",
            "kitty",
            "mosaic",
            "mosaic:k=2,v=2.5,front=0,keep=64,mean=0",
            "mosaic:bits=2.3,guard=0.02",
            "pnmix",
            "innerq",
            "innerq:variant=hybrid,asym=4level,front=0,keep=100",
            "turboquant:skip=0",
            "q8_0",
            "q4_0:hadamard=1,front=4",
            "rotatekv:bits=3,pins=3",
            "kvquant:outliers=0.05",
            "skvq:v=1.5,group=32",
            "kvtuner"};
}

} // namespace kvmosaic::test
