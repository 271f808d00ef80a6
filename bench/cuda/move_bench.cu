// Sequences to the device and back: the whole move, its host work included.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>

#include "core/parallel.h"
#include "kvmosaic/device_cache.h"
#include "rows.h"
#include "support.cuh"

namespace kvmosaic::cuda::bench {
namespace {

constexpr int kLayers = 32, kHeads = 32, kKvHeads = 8, kDim = 128, kRows = 8192, kStep = 128;

std::unique_ptr<Cache> filled(const ModelShape& shape, const std::string& spec) {
    auto cache = Cache::create(shape, spec);
    if (!cache) return nullptr;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> q(size_t(kStep) * kHeads * kDim), k(size_t(kStep) * kKvHeads * kDim), v(k.size());
    for (auto* x : {&q, &k, &v})
        for (float& y : *x)
            y = normal(random);
    const auto rows = [](const std::vector<float>& x, int heads) {
        return RowsF32{x.data(), int64_t(heads) * kDim, kDim};
    };
    const int32_t threads = thread_count(0);
    const SeqId seq = 0;
    for (int at = 0; at < kRows; at += kStep) {
        std::vector<StepRow> step;
        for (int t = 0; t < kStep; ++t)
            step.push_back({at + t, {&seq, 1}});
        if (!(*cache)->begin_step(step)) return nullptr;
        for (int32_t l = 0; l < kLayers; ++l) {
            on_threads(threads, [&](int32_t t) {
                (*cache)->write(l, rows(q, kHeads), rows(k, kKvHeads), rows(v, kKvHeads), {t, threads});
            });
        }
        (*cache)->end_step();
    }
    return std::move(*cache);
}

} // namespace

void move_bench(const Options& options) {
    ModelShape shape;
    shape.layers.assign(kLayers, {kHeads, kKvHeads, kDim, kDim, {}});
    for (const std::string spec : {"kivi:bits=2,group=128", "mixkvq:group=128"}) {
        if (spec.find(options.filter) == std::string::npos) continue;
        const std::unique_ptr<Cache> cache = filled(shape, spec);
        if (!cache) continue;
        const int all = thread_count(0);
        for (const int threads : {1, all}) {
            auto moved = device::DeviceCache::create(shape, spec, {1, kRows, 0.0, kPageTokens, threads});
            if (!moved) {
                std::fprintf(stderr, "move %s: %s\n", spec.c_str(), moved.status().message().c_str());
                continue;
            }
            std::vector<double> times[2];
            for (int i = 0; i < (options.quick ? 2 : 5); ++i)
                for (int back = 0; back < 2; ++back) {
                    const auto start = std::chrono::steady_clock::now();
                    const Status done = back ? (*moved)->download(0, cache.get(), 1) : (*moved)->upload(0, *cache, 0);
                    if (!done) std::fprintf(stderr, "move %s: %s\n", spec.c_str(), done.message().c_str());
                    times[back].push_back(
                        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
                }
            for (int back = 0; back < 2; ++back) {
                std::sort(times[back].begin(), times[back].end());
                Row row;
                row.spec = std::string(back ? "move from the device, " : "move to the device, ") + spec;
                row.heads = kHeads, row.kv_heads = kKvHeads, row.head_dim = kDim, row.batch = 1, row.context = kRows;
                row.threads = threads;
                row.median_us = times[back][times[back].size() / 2], row.min_us = times[back][0];
                const Footprint f = cache->footprint();
                row.bytes = (f.packed[0] + f.packed[1] + f.raw[0] + f.raw[1]) / int64_t(cache->sequences().size());
                row.note = "32 layers";
                print(row);
            }
        }
    }
}

} // namespace kvmosaic::cuda::bench
