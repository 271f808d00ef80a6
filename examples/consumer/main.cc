// kvmosaic in an engine of one's own: no llama.cpp, no model file. Decodes made-up queries, keys and values through
// a cache and compares what attention returns with exact attention over the same numbers.
//
//   consumer [SPEC ...]          for example: consumer f16 kivi:bits=2 mixkvq
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"

namespace {

constexpr int kHeads = 6, kKvHeads = 2, kDim = 64, kTokens = 1000; // 3 query heads share a KV head
constexpr float kScale = 0.125f;                                   // 1 / sqrt(kDim)

struct Stream {
    std::vector<float> q, k, v; // [T, H, D], [T, G, D], [T, G, D]
};

// Keys with a few loud channels that keep their sign, values with a mean per channel, as real models have them.
Stream make_stream() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    Stream s;
    for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < kHeads * kDim; ++i)
            s.q.push_back(normal(random));
        for (int i = 0; i < kKvHeads * kDim; ++i)
            s.k.push_back(i % 16 == 3 ? 4.0f + normal(random) : normal(random));
        for (int i = 0; i < kKvHeads * kDim; ++i)
            s.v.push_back(std::sin(0.1f * float(i)) + 0.5f * normal(random));
    }
    return s;
}

// Attention of the last token over all tokens, in double. out: [H, D]
std::vector<double> exact(const Stream& s) {
    std::vector<double> out(kHeads * kDim, 0.0);
    for (int h = 0; h < kHeads; ++h) {
        const int g = h / (kHeads / kKvHeads);
        const float* q = &s.q[((kTokens - 1) * kHeads + h) * kDim];
        double sum = 0.0;
        for (int t = 0; t < kTokens; ++t) {
            double dot = 0.0;
            for (int d = 0; d < kDim; ++d)
                dot += double(q[d]) * s.k[(t * kKvHeads + g) * kDim + d];
            const double weight = std::exp(dot * kScale);
            sum += weight;
            for (int d = 0; d < kDim; ++d)
                out[h * kDim + d] += weight * s.v[(t * kKvHeads + g) * kDim + d];
        }
        for (int d = 0; d < kDim; ++d)
            out[h * kDim + d] /= sum;
    }
    return out;
}

kvmosaic::Status run(const std::string& spec, const Stream& s, const std::vector<double>& want) {
    kvmosaic::ModelShape shape;
    shape.name = "made up";
    shape.layers = {{.heads = kHeads, .kv_heads = kKvHeads, .key_dim = kDim, .value_dim = kDim}};
    auto cache = kvmosaic::Cache::create(shape, spec);
    if (!cache) return cache.status();

    const kvmosaic::SeqId sequence = 0;
    kvmosaic::AttendArgs args;
    args.scale = kScale;
    std::vector<float> out(kHeads * kDim); // [H, D]
    for (int t = 0; t < kTokens; ++t) {
        const kvmosaic::StepRow row{t, {&sequence, 1}};
        const kvmosaic::RowsF32 q{&s.q[t * kHeads * kDim], kHeads * kDim, kDim};
        const kvmosaic::RowsF32 k{&s.k[t * kKvHeads * kDim], kKvHeads * kDim, kDim};
        const kvmosaic::RowsF32 v{&s.v[t * kKvHeads * kDim], kKvHeads * kDim, kDim};
        const kvmosaic::Status status = (*cache)->append_and_attend(0, {&row, 1}, q, k, v, args, out.data());
        if (!status) return status;
    }

    double error = 0.0, norm = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
        error += (out[i] - want[i]) * (out[i] - want[i]);
        norm += want[i] * want[i];
    }
    const kvmosaic::Footprint weight = (*cache)->footprint();
    std::printf("%-16s %10lld %9.3f %9.1fx %11.2e\n", spec.c_str(), static_cast<long long>(weight.cache_bytes()),
                weight.true_bits(), weight.times_smaller(), std::sqrt(error / norm));
    return {};
}

} // namespace

int main(int argc, char** argv) {
    std::vector<std::string> specs(argv + 1, argv + argc);
    if (specs.empty()) specs = {"f32", "f16", "kivi:bits=4", "kivi:bits=2", "mixkvq"};
    const Stream stream = make_stream();
    const std::vector<double> want = exact(stream);
    std::printf("%-16s %10s %9s %10s %11s\n", "spec", "bytes", "true bits", "smaller", "error");
    for (const std::string& spec : specs) {
        if (const kvmosaic::Status status = run(spec, stream, want); !status) {
            std::fprintf(stderr, "consumer: %s\n", status.message().c_str());
            return 1;
        }
    }
    return 0;
}
