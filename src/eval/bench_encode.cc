#include "eval/bench_encode.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include <fmt/format.h>

#include "eval/bench_cpu.h"

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

constexpr int32_t kOtherDim = 32;      // head size of the side that is not measured
constexpr int32_t kMostRows = 1 << 18; // a cache begins anew above

struct Place {
    int32_t layers, layer;
};

// One layer, or as many as it takes until the method packs one of them, and which.
Result<Place> packing_layer(const std::string& spec, const BenchShape& shape) {
    for (int32_t layers = 1; layers <= 64; layers *= 2) {
        auto method = open_method(spec);
        if (!method) return method.status();
        if (Status st = (*method)->accept(bench_model(shape, layers)); !st) return st;
        for (int32_t layer = 0; layer < layers; ++layer)
            for (const Side side : {Side::key, Side::value})
                if ((*method)->initial(side, layer, 0, shape.head_dim).window.flush > 0) return Place{layers, layer};
    }
    return Status(StatusCode::invalid_argument, spec + ": none of 64 layers packs anything");
}

// Writes 128 rows a call to one layer of a cache with one KV head. The side that is not measured packs nothing and has
// narrow heads, so that it costs next to nothing.
class WriteSubject final : public BenchSubject {
public:
    WriteSubject(const BenchShape& shape, const BenchData& data, std::optional<Side> only)
        : shape_(shape), data_(data), only_(only) {}

    Status prepare(const std::string& spec) {
        const auto place = packing_layer(spec, shape_);
        if (!place) return place.status();
        layer_ = place->layer;
        LayerShape layer = bench_model(shape_, 1).layers[0];
        if (only_ == Side::key) layer.value_dim = std::min(kOtherDim, shape_.head_dim);
        if (only_ == Side::value) layer.key_dim = std::min(kOtherDim, shape_.head_dim), layer.rope = Rope();
        ModelShape model = bench_model(shape_, place->layers);
        model.layers.assign(size_t(place->layers), layer);
        const auto keep_one = [only = only_](Side side, SidePlan* plan) {
            if (side == *only) return;
            plan->window.flush = plan->window.first = 0;
            plan->space = KeySpace::post_rope;
        };
        auto method = only_ ? open_edited(spec, "one side", keep_one) : open_method(spec);
        if (!method) return method.status();
        auto made = Cache::create(model, std::move(*method), bench_cache_options(shape_));
        if (!made) return made.status();
        cache_ = std::move(*made);
        // From here on every 128 rows pack 128.
        for (const Side side : sides()) {
            const Window& w = cache_->plan(0, layer_, 0, side).window;
            start_ = std::max<int64_t>(start_, w.front + w.keep + w.flush + kPageTokens);
        }
        start_ = (start_ + kPageTokens - 1) / kPageTokens * kPageTokens;
        if (Status st = fill(*cache_, data_, 1, 0, 0, start_); !st) return st;
        q_ = data_.queries(kBenchBlock, 3);
        for (const Side side : {Side::key, Side::value}) {
            rows_[size_t(side)].resize(size_t(kBenchBlock) * size_t(shape_.head_dim));
            data_.rows(side, 0, 0, rows_[size_t(side)].data());
        }
        row.spec = spec;
        row.device = "cpu";
        row.isa = cache_->isa();
        for (const Side side : sides())
            row.bytes += cache_->page(0, layer_, 0, side, 0).layout->bytes;
        return {};
    }

    double call() override {
        using Clock = std::chrono::steady_clock;
        if (cache_->rows(0) >= start_ + kMostRows) {
            cache_->clear();
            status_ = fill(*cache_, data_, 1, 0, 0, start_);
        }
        int64_t before[2], after[2];
        packed(before);
        if (status_) status_ = begin_rows(*cache_, 0, cache_->rows(0), kBenchBlock);
        if (!status_) return 0;
        const RowsF32 q = of(q_, shape_.heads), k = of(rows_[0], 1), v = of(rows_[1], 1);
        for (int32_t other = 0; other < int32_t(cache_->shape().layers.size()); ++other)
            if (other != layer_) cache_->write(other, q, k, v);
        const auto start = Clock::now();
        cache_->write(layer_, q, k, v);
        const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
        cache_->end_step();
        packed(after);
        for (const Side side : sides())
            if (after[size_t(side)] != before[size_t(side)] + kPageTokens)
                status_ = {StatusCode::unsupported, row.spec + ": 128 rows did not fill a page"};
        return us;
    }

    double error() override { return 0; } // bytes are what the tests of encoders check
    const Status& status() const { return status_; }
    std::vector<Side> sides() const {
        std::vector<Side> out;
        for (const Side side : {Side::key, Side::value})
            if ((!only_ || side == *only_) && cache_->plan(0, layer_, 0, side).window.flush > 0) out.push_back(side);
        return out;
    }

private:
    RowsF32 of(const std::vector<float>& x, int32_t heads) const {
        return {x.data(), int64_t(heads) * shape_.head_dim, shape_.head_dim};
    }
    void packed(int64_t out[2]) const {
        for (const Side side : {Side::key, Side::value})
            out[size_t(side)] = cache_->packed_rows(0, layer_, side);
    }

    BenchShape shape_;
    const BenchData& data_;
    std::optional<Side> only_;
    std::unique_ptr<Cache> cache_;
    int32_t layer_ = 0;
    int64_t start_ = 0;
    std::vector<float> q_, rows_[2]; // [128][group][D], [128][D]
    Status status_;
};

} // namespace

Result<EncodeReport> bench_encode(const BenchShape& wish, const std::vector<std::string>& specs, int32_t rounds,
                                  const Progress& progress) {
    if (Status st = validate(wish); !st) return st;
    BenchShape shape = wish;
    shape.heads = wish.group(), shape.kv_heads = shape.batch = shape.query_rows = shape.threads = 1;
    CpuDevice device(shape);
    EncodeReport report{wish, {}};
    for (const std::string& spec : specs) {
        const auto segments = segments_of(spec, shape);
        if (!segments) return segments.status();
        if (segments->front() == Segment::raw)
            return Status(StatusCode::invalid_argument,
                          "--cache " + spec + ": packs nothing, so there is no page to encode");
        std::vector<std::unique_ptr<BenchSubject>> subjects;
        std::vector<const WriteSubject*> writes;
        for (const std::optional<Side> only :
             {std::optional(Side::key), std::optional(Side::value), std::optional<Side>()}) {
            auto subject = std::make_unique<WriteSubject>(shape, device.data(), only);
            if (Status st = subject->prepare(spec); !st) return st;
            if (subject->sides().empty()) continue;
            writes.push_back(subject.get());
            subject->row.segment = only ? name_of(*only) : "both";
            subjects.push_back(std::move(subject));
        }
        auto attend = device.cache(spec, Segment::windows);
        if (!attend) return attend.status();
        subjects.push_back(std::move(*attend));
        time_in_turn(subjects, rounds, progress);
        for (const WriteSubject* write : writes) {
            if (!write->status()) return write->status();
            const BenchRow& row = write->row;
            EncodeRow out{row.spec, row.segment, row.device,      row.isa,     row.bytes,
                          0,        row.us,      row.median_us(), row.min_us()};
            out.values = int64_t(write->sides().size()) * kPageTokens * shape.head_dim;
            out.attend_us = kPageTokens * subjects.back()->row.median_us();
            report.rows.push_back(std::move(out));
        }
    }
    return report;
}

std::string to_table(const EncodeReport& report) {
    size_t wide = 24;
    for (const EncodeRow& row : report.rows)
        wide = std::max(wide, row.spec.size());
    std::string out = fmt::format("{} query heads of a KV head, D {}, context {}, one thread\n", report.shape.group(),
                                  report.shape.head_dim, report.shape.context);
    out += fmt::format("{:<{}}  {:<5}  {:>9} {:>9}  {:>9}  {:>12}  {:>7}  {}\n", "cache", wide, "side", "median us",
                       "min us", "ns/value", "attend us", "share", "isa");
    for (const EncodeRow& r : report.rows)
        out += fmt::format("{:<{}}  {:<5}  {:>9.2f} {:>9.2f}  {:>9.3f}  {:>12.1f}  {:>6.2f}%  {}\n", r.spec, wide,
                           r.side, r.median_us, r.min_us, r.ns_per_value(), r.attend_us, 100 * r.share(), r.isa);
    return out;
}

ordered_json to_json(const EncodeReport& report) {
    const BenchShape& s = report.shape;
    ordered_json rows = ordered_json::array();
    for (const EncodeRow& r : report.rows)
        rows.push_back({{"spec", r.spec},
                        {"side", r.side},
                        {"baseline", nullptr},
                        {"device", r.device},
                        {"isa", r.isa},
                        {"heads", s.group()},
                        {"kv_heads", 1},
                        {"head_dim", s.head_dim},
                        {"batch", 1},
                        {"context", s.context},
                        {"query_rows", nullptr},
                        {"threads", 1},
                        {"median_us", r.median_us},
                        {"min_us", r.min_us},
                        {"calls", r.us.size()},
                        {"bytes", r.bytes},
                        {"tb_s", nullptr},
                        {"ns_value", r.ns_per_value()},
                        {"attend_us", r.attend_us},
                        {"share", r.share()}});
    return rows;
}

} // namespace kvmosaic::eval
