// The CPU as a device of benchmarks: our caches and ggml's attention, both as graphs on the same threads of ggml.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ggml-cpp.h"

#include "eval/bench.h"
#include "eval/bench_data.h"
#include "eval/wrapped.h"

namespace kvmosaic::eval {

// ggml's CPU backend. Work of ours runs in it as llama.cpp runs the adapter's operations: one node of a graph that
// every thread enters.
class GgmlPool {
public:
    explicit GgmlPool(int32_t threads);
    // work(index, count) on each thread; microseconds of the whole graph.
    double run(std::function<void(int32_t, int32_t)> work);
    double run(ggml_cgraph* graph);
    ggml_backend_t backend() const { return backend_.get(); }
    int32_t threads() const { return threads_; }

private:
    int32_t threads_;
    ggml_backend_ptr backend_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    ggml_cgraph* graph_ = nullptr;
    std::function<void(int32_t, int32_t)> work_;
};

// Rows [0, count) of a side as the last of them saw them: (side, sequence, KV head, count) -> [count][D].
using SeenRows = std::function<std::vector<float>(Side, int32_t, int32_t, int64_t)>;
// Relative error of attention over them, for the first and the last query row of the first and the last sequence.
// q, got: [batch][query_rows][H][D].
double error_of(GgmlPool& pool, const BenchShape& shape, const float* q, const float* got, const SeenRows& rows);

// What a benchmark changes in a method's plans: its windows, and which sides pack at all.
class PlanEdit final : public WrappedMethod {
public:
    using Edit = std::function<void(Side, SidePlan*)>;
    PlanEdit(std::unique_ptr<Method> inner, const std::string& what, Edit edit)
        : WrappedMethod(std::move(inner)), edit_(std::move(edit)) {
        set_spec(this->inner().spec() + " (" + what + ")");
    }
    SidePlan initial(Side side, int32_t layer, int32_t head, int32_t dim) const override {
        SidePlan plan = inner().initial(side, layer, head, dim);
        if (plan.window.flush > 0) edit_(side, &plan);
        return plan;
    }

private:
    Edit edit_;
};
// Every window taken away: whole pages, and nothing else where the context is a multiple of them. What a method decides
// once a sequence still waits for its first page.
void only_pages(SidePlan* plan);
Result<std::unique_ptr<Cache>> open_segment(const std::string& spec, Segment segment, const BenchShape& shape,
                                            int32_t layers);
Result<std::unique_ptr<Method>> open_edited(const std::string& spec, const std::string& what, PlanEdit::Edit edit);

// The one place where a benchmark's caches get their options.
CacheOptions bench_cache_options(const BenchShape& shape);

// Begins a step of rows [first, first + count) of one sequence, at positions of the same numbers.
Status begin_rows(Cache& cache, SeqId sequence, int64_t first, int64_t count);
// Appends rows [from, to) of the data to a sequence of every layer, many in a step; `from` is the cache's length. All
// layers get the same rows; a layer whose heads are narrower gets their first channels.
Status fill(Cache& cache, const BenchData& data, int32_t threads, SeqId sequence, int64_t from, int64_t to);

// Layers that a cache of this method needs so that those that pack (all, of segment `raw`) make up the working set, and
// which of `layers` pack.
Result<int32_t> layers_for(const std::string& spec, const BenchShape& shape, Segment segment);
std::vector<int32_t> packing_layers(const Method& method, int32_t layers, const BenchShape& shape);

class CpuDevice final : public BenchDevice {
public:
    explicit CpuDevice(const BenchShape& shape) : shape_(shape), data_(shape), pool_(shape.threads) {}
    Result<std::unique_ptr<BenchSubject>> cache(const std::string& spec, Segment segment) override;
    Result<std::unique_ptr<BenchSubject>> baseline(const std::string& name) override; // "ggml:TYPE"
    double read_bandwidth() override;
    GgmlPool& pool() { return pool_; }
    const BenchData& data() const { return data_; }

private:
    BenchShape shape_;
    BenchData data_;
    GgmlPool pool_;
};
// Names that CpuDevice::baseline knows; ok, or the name and what it may be.
const std::vector<std::string>& cpu_baselines();
Status check_cpu_baseline(const std::string& name, const BenchShape& shape);

} // namespace kvmosaic::eval
