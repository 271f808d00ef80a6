#include "eval/bench_cpu.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <numeric>
#include <thread>

#include "core/parallel.h"
#include "ggml-cpu.h"

namespace kvmosaic::eval {

namespace {

constexpr int64_t kFillRows = 2 * kBenchBlock; // a step
constexpr uint64_t kFillSeed = 1, kQuerySeed = 2;

int32_t fill_threads(const BenchShape& shape) {
    return std::clamp(int32_t(std::thread::hardware_concurrency()), 1, std::max(1, shape.threads));
}

RowsF32 dense(const float* base, int32_t heads, int32_t dim) { return {base, int64_t(heads) * dim, dim}; }

// Bytes of K and V that attention of a layer reads: whole pages where rows are packed, the raw rows besides.
int64_t bytes_to_read(const Cache& cache, const BenchShape& shape, int32_t layer) {
    int64_t bytes = 0;
    for (SeqId seq = 0; seq < shape.batch; ++seq)
        for (int32_t head = 0; head < shape.kv_heads; ++head)
            for (const Side side : {Side::key, Side::value}) {
                for (int64_t i = 0; i < cache.pages(seq, layer, side); ++i)
                    bytes += cache.page(seq, layer, head, side, i).layout->bytes;
                const int64_t raw = cache.rows(seq) - cache.packed_rows(seq, layer, side);
                bytes += raw * shape.head_dim * bytes_of(cache.plan(seq, layer, head, side).raw);
            }
    return bytes;
}

bool packs(const Method& method, int32_t layer, const BenchShape& shape) {
    return method.initial(Side::key, layer, 0, shape.head_dim).window.flush > 0 ||
           method.initial(Side::value, layer, 0, shape.head_dim).window.flush > 0;
}

// Attention of a step that stays open, over the layers in turn.
class CacheSubject final : public BenchSubject {
public:
    CacheSubject(const BenchShape& shape, const BenchData& data, GgmlPool& pool, std::unique_ptr<Cache> cache)
        : shape_(shape), data_(data), pool_(pool), cache_(std::move(cache)) {
        args_.scale = shape.scale();
        layers_ = packing_layers(cache_->method(), int32_t(cache_->shape().layers.size()), shape);
        if (layers_.empty()) { // a method of raw rows
            layers_.resize(cache_->shape().layers.size());
            std::iota(layers_.begin(), layers_.end(), 0);
        }
    }

    // Fills the sequences up to the rows of the step, then begins it and writes them.
    Status prepare() {
        const int64_t before = shape_.context - shape_.query_rows;
        std::vector<StepRow> rows;
        std::vector<SeqId> names(size_t(shape_.batch));
        const int64_t n = int64_t(shape_.batch) * shape_.query_rows, width = int64_t(shape_.kv_heads) * shape_.head_dim;
        std::vector<float> k(size_t(n * width)), v(k), block(size_t(kBenchBlock * width));
        for (SeqId seq = 0; seq < shape_.batch; ++seq) {
            if (Status st = fill(*cache_, data_, fill_threads(shape_), seq, 0, before); !st) return st;
            names[size_t(seq)] = seq;
            for (int64_t r = 0; r < shape_.query_rows; ++r) {
                rows.push_back({int32_t(before + r), std::span<const SeqId>(&names[size_t(seq)], 1)});
                for (const Side side : {Side::key, Side::value}) {
                    data_.rows(side, seq, (before + r) / kBenchBlock, block.data());
                    float* to = (side == Side::key ? k : v).data() + (int64_t(seq) * shape_.query_rows + r) * width;
                    std::copy_n(block.data() + (before + r) % kBenchBlock * width, width, to);
                }
            }
        }
        for (const Side side : {Side::key, Side::value})
            old_packed_[size_t(side)] = cache_->packed_rows(0, layers_[0], side);
        q_ = data_.queries(n, kQuerySeed);
        out_.resize(q_.size());
        if (Status st = cache_->begin_step(rows); !st) return st;
        const RowsF32 q = query(), key = dense(k.data(), shape_.kv_heads, shape_.head_dim),
                      value = dense(v.data(), shape_.kv_heads, shape_.head_dim);
        for (int32_t layer = 0; layer < int32_t(cache_->shape().layers.size()); ++layer)
            pool_.run([&](int32_t i, int32_t count) { cache_->write(layer, q, key, value, {i, count}); });
        int64_t bytes = 0;
        for (const int32_t layer : layers_)
            bytes += bytes_to_read(*cache_, shape_, layer);
        row.bytes = bytes / int64_t(layers_.size());
        row.path = name_of(cache_->path());
        row.isa = cache_->isa();
        if (cache_->path() == Path::fused || cache_->path() == Path::partly) row.accuracy = name_of(cache_->accuracy());
        return {};
    }

    double call() override {
        const int32_t layer = layers_[next_++ % layers_.size()];
        return pool_.run([&](int32_t i, int32_t count) {
            cache_->attend(layer, query(), args_, out_.data(), {i, count});
        });
    }

    double error() override {
        const int32_t layer = layers_[0];
        pool_.run([&](int32_t i, int32_t count) { cache_->attend(layer, query(), args_, out_.data(), {i, count}); });
        cache_->end_step();
        return error_of(pool_, shape_, q_.data(), out_.data(),
                        [this, layer](Side side, int32_t seq, int32_t head, int64_t seen) {
                            return seen_rows(seq, layer, head, side, seen);
                        });
    }

private:
    RowsF32 query() const { return dense(q_.data(), shape_.heads, shape_.head_dim); }

    // Rows [0, seen) as the last of them saw them: decoded, but raw where a later row of the step completed the block.
    std::vector<float> seen_rows(SeqId seq, int32_t layer, int32_t head, Side side, int64_t seen) const {
        const int32_t dim = shape_.head_dim, heads = shape_.kv_heads;
        const SidePlan& plan = cache_->plan(seq, layer, head, side);
        std::vector<float> rows(size_t(seen) * size_t(dim));
        cache_->decode(seq, layer, head, side, 0, seen, rows.data());
        const int64_t front = plan.window.front;
        const int64_t packed = plan.window.packed_after(old_packed_[size_t(side)], std::max<int64_t>(0, seen - front));
        std::vector<float> block(size_t(kBenchBlock) * size_t(heads) * size_t(dim));
        uint8_t stored[4] = {};
        for (int64_t r = front + packed, made = -1; r < std::min(seen, front + cache_->packed_rows(seq, layer, side));
             ++r) {
            if (made != r / kBenchBlock) data_.rows(side, seq, made = r / kBenchBlock, block.data());
            const float* from = block.data() + (r % kBenchBlock * heads + head) * dim;
            for (int32_t d = 0; d < dim; ++d) {
                store(plan.raw, stored, 0, from[d]);
                rows[size_t(r * dim + d)] = load(plan.raw, stored, 0);
            }
        }
        return rows;
    }

    BenchShape shape_;
    const BenchData& data_;
    GgmlPool& pool_;
    std::unique_ptr<Cache> cache_;
    std::vector<int32_t> layers_; // that pack
    std::vector<float> q_, out_;  // [rows][H][D]
    int64_t old_packed_[2] = {};
    AttendArgs args_;
    size_t next_ = 0;
};

} // namespace

Result<int32_t> layers_for(const std::string& spec, const BenchShape& shape, Segment segment) {
    double bytes = 0; // of one layer that packs, at least
    int32_t wanted = 0;
    for (int32_t layers = 2;; layers += wanted) {
        auto method = open_method(spec);
        if (!method) return method.status();
        if (Status st = (*method)->accept(bench_model(shape, layers)); !st) return st;
        int32_t found = 0;
        for (int32_t layer = 0; layer < layers; ++layer) {
            if (segment != Segment::raw && !packs(**method, layer, shape)) continue;
            ++found;
            if (found > 1) continue;
            bytes = 0;
            for (const Side side : {Side::key, Side::value}) {
                const SidePlan plan = (*method)->initial(side, layer, 0, shape.head_dim);
                double page = kPageTokens * double(shape.head_dim) * bytes_of(plan.raw);
                if (plan.window.flush > 0) {
                    Ladder ladder = plan.ladder;
                    const std::vector<uint8_t> widths = (*method)->widths(side);
                    if (!widths.empty())
                        ladder =
                            Ladder::uniform(*std::min_element(widths.begin(), widths.end()), uint16_t(shape.head_dim));
                    page = layout(plan.store, side, shape.head_dim, ladder).bytes;
                }
                bytes += page / kPageTokens * double(shape.kv_heads) * double(shape.context) * double(shape.batch);
            }
        }
        const int32_t need = bench_sets(bytes, shape);
        if (found >= need && found > 0) return layers;
        wanted = found > 0 ? need - found : 2;
        if (layers > 1 << 16) return Status(StatusCode::invalid_argument, spec + ": no layer of it packs anything");
    }
}

std::vector<int32_t> packing_layers(const Method& method, int32_t layers, const BenchShape& shape) {
    std::vector<int32_t> found;
    for (int32_t layer = 0; layer < layers; ++layer)
        if (packs(method, layer, shape)) found.push_back(layer);
    return found;
}

GgmlPool::GgmlPool(int32_t threads) : threads_(threads), backend_(ggml_backend_cpu_init()) {
    ggml_backend_cpu_set_n_threads(backend_.get(), threads);
    context_.reset(ggml_init({ggml_tensor_overhead() * 4 + ggml_graph_overhead(), nullptr, true}));
    ggml_tensor* source = ggml_new_tensor_1d(context_.get(), GGML_TYPE_F32, 1);
    const auto enter = [](ggml_tensor* /*dst*/, int ith, int nth, void* data) {
        static_cast<GgmlPool*>(data)->work_(ith, nth);
    };
    ggml_tensor* node =
        ggml_custom_4d(context_.get(), GGML_TYPE_F32, 1, 1, 1, 1, &source, 1, enter, GGML_N_TASKS_MAX, this);
    graph_ = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph_, node);
    buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend_.get()));
}

double GgmlPool::run(ggml_cgraph* graph) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    ggml_backend_graph_compute(backend_.get(), graph);
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double GgmlPool::run(std::function<void(int32_t, int32_t)> work) {
    work_ = std::move(work);
    return run(graph_);
}

double error_of(GgmlPool& pool, const BenchShape& shape, const float* q, const float* got, const SeenRows& rows) {
    const int32_t group = shape.group(), dim = shape.head_dim;
    std::vector<ErrorSum> sums(size_t(shape.kv_heads));
    pool.run([&](int32_t index, int32_t count) {
        std::vector<double> want(size_t(group) * size_t(dim));
        for (int32_t head = index; head < shape.kv_heads; head += count)
            for (int32_t seq = 0; seq < shape.batch; seq += std::max(1, shape.batch - 1))
                for (int32_t r = 0; r < shape.query_rows; r += std::max(1, shape.query_rows - 1)) {
                    const int64_t seen = shape.context - shape.query_rows + r + 1;
                    const std::vector<float> k = rows(Side::key, seq, head, seen);
                    const std::vector<float> v = rows(Side::value, seq, head, seen);
                    const int64_t at =
                        ((int64_t(seq) * shape.query_rows + r) * shape.heads + int64_t(head) * group) * dim;
                    attend_exactly(q + at, group, k.data(), v.data(), seen, dim, shape.scale(), want.data());
                    sums[size_t(head)].add(got + at, want.data(), int64_t(group) * dim);
                }
    });
    ErrorSum all;
    for (const ErrorSum& s : sums)
        all.wrong += s.wrong, all.right += s.right;
    return all.relative();
}

void only_pages(SidePlan* plan) {
    plan->window = {.front = 0, .keep = 0, .flush = kPageTokens, .first = plan->window.first};
}

Result<std::unique_ptr<Method>> open_edited(const std::string& spec, const std::string& what, PlanEdit::Edit edit) {
    auto method = open_method(spec);
    if (!method) return method.status();
    return std::unique_ptr<Method>(new PlanEdit(std::move(*method), what, std::move(edit)));
}

Result<std::unique_ptr<Cache>> open_segment(const std::string& spec, Segment segment, const BenchShape& shape,
                                            int32_t layers) {
    auto method = segment == Segment::packed
                      ? open_edited(spec, "pages only", [](Side, SidePlan* plan) { only_pages(plan); })
                      : open_method(spec);
    if (!method) return method.status();
    return Cache::create(bench_model(shape, layers), std::move(*method), bench_cache_options(shape));
}

CacheOptions bench_cache_options(const BenchShape& shape) {
    CacheOptions options;
    options.accuracy = shape.accuracy;
    return options;
}

// Threads of its own, which sleep where they wait: on a busy machine, thousands of short graphs would spend their time
// in ggml's spinning barriers.
Status fill(Cache& cache, const BenchData& data, int32_t threads, SeqId sequence, int64_t from, int64_t to) {
    const BenchShape& shape = data.shape();
    const int64_t width = int64_t(shape.kv_heads) * shape.head_dim;
    const std::vector<float> q = data.queries(kFillRows, kFillSeed);
    std::vector<float> rows[2] = {std::vector<float>(size_t(kFillRows * width)), {}};
    rows[1] = rows[0];
    std::barrier meet(threads);
    Status status;
    const auto work = [&](int32_t index) {
        for (int64_t at = from; at < to;) {
            const int64_t first = at / kBenchBlock, skip = at % kBenchBlock, n = std::min(to - at, kFillRows - skip);
            for (const Side side : {Side::key, Side::value})
                for (int64_t b = 0; int32_t(side) % threads == index && b * kBenchBlock < skip + n; ++b)
                    data.rows(side, sequence, first + b, rows[size_t(side)].data() + b * kBenchBlock * width);
            if (index == 0) status = begin_rows(cache, sequence, at, n);
            meet.arrive_and_wait();
            if (!status) return;
            const RowsF32 query = dense(q.data(), shape.heads, shape.head_dim);
            const RowsF32 key = dense(rows[0].data() + skip * width, shape.kv_heads, shape.head_dim);
            const RowsF32 value = dense(rows[1].data() + skip * width, shape.kv_heads, shape.head_dim);
            for (int32_t layer = 0; layer < int32_t(cache.shape().layers.size()); ++layer) {
                cache.write(layer, query, key, value, {index, threads});
                meet.arrive_and_wait();
            }
            if (index == 0) cache.end_step();
            at += n;
        }
    };
    on_threads(threads, work);
    return status;
}

Status begin_rows(Cache& cache, SeqId sequence, int64_t first, int64_t count) {
    std::vector<StepRow> rows;
    for (int64_t r = 0; r < count; ++r)
        rows.push_back({int32_t(first + r), std::span<const SeqId>(&sequence, 1)});
    return cache.begin_step(rows);
}

Result<std::unique_ptr<BenchSubject>> CpuDevice::cache(const std::string& spec, Segment segment) {
    const Result<int32_t> layers = layers_for(spec, shape_, segment);
    if (!layers) return layers.status();
    auto made = open_segment(spec, segment, shape_, *layers);
    if (!made) return made.status();
    auto subject = std::make_unique<CacheSubject>(shape_, data_, pool_, std::move(*made));
    subject->row.spec = spec;
    subject->row.segment = name_of(segment);
    subject->row.device = "cpu";
    if (Status st = subject->prepare(); !st) return st;
    return std::unique_ptr<BenchSubject>(std::move(subject));
}

double CpuDevice::read_bandwidth() {
    constexpr size_t kWords = size_t(32) << 20; // 256 MiB
    constexpr int kPasses = 12;
    std::vector<uint64_t> memory(kWords, 1), sink(size_t(pool_.threads()) * 8);
    double best = 0;
    for (int pass = 0; pass < kPasses; ++pass) {
        const double us = pool_.run([&](int32_t index, int32_t count) {
            const size_t first = kWords / size_t(count) * size_t(index) / 16 * 16;
            const size_t last = index + 1 == count ? kWords : kWords / size_t(count) * size_t(index + 1) / 16 * 16;
            uint64_t x[16] = {};
            for (size_t i = first; i < last; i += 16)
                for (size_t j = 0; j < 16; ++j)
                    x[j] ^= memory[i + j];
            for (size_t j = 0; j < 16; ++j)
                sink[size_t(index) * 8] += x[j];
        });
        best = std::max(best, double(kWords * sizeof(uint64_t)) / us * 1e6);
    }
    // What was read must be needed, or the loop would not be there.
    return std::accumulate(sink.begin(), sink.end(), uint64_t(0)) == 1 ? 0 : best;
}

} // namespace kvmosaic::eval
