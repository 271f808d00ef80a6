#include "eval/bench.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <unistd.h>

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

constexpr int32_t kMinSets = 2;
constexpr int32_t kMinCalls = 10, kMaxCalls = 2000;
constexpr double kSecondsPerRow = 2.0;
constexpr int32_t kCallsPerRound = 8; // of a fast row, so that slow ones do not keep it from its share

Status out_of_range(const char* option, int64_t value, const std::string& range) {
    return {StatusCode::invalid_argument, fmt::format("{} {}: {}", option, value, range)};
}

// Calls that a row of this length gets.
int32_t calls_for(double us) {
    return std::clamp(int32_t(kSecondsPerRow * 1e6 / std::max(us, 1.0)), kMinCalls, kMaxCalls);
}

} // namespace

float BenchShape::scale() const { return 1.0f / std::sqrt(float(head_dim)); }

const char* name_of(Segment segment) {
    switch (segment) {
    case Segment::packed:
        return "packed";
    case Segment::windows:
        return "windows";
    case Segment::raw:
        return "raw";
    }
    return "?";
}

Status validate(const BenchShape& s) {
    if (s.heads < 1 || s.heads > 1024) return out_of_range("--heads", s.heads, "1 to 1024");
    if (s.kv_heads < 1 || s.kv_heads > s.heads)
        return out_of_range("--kv-heads", s.kv_heads, fmt::format("1 to {} (--heads)", s.heads));
    if (s.heads % s.kv_heads != 0)
        return out_of_range("--heads", s.heads, fmt::format("a multiple of --kv-heads {}", s.kv_heads));
    if (s.head_dim < 1 || s.head_dim > kMaxHeadDim)
        return out_of_range("--head-dim", s.head_dim, fmt::format("1 to {}", kMaxHeadDim));
    if (s.batch < 1 || s.batch > 1024) return out_of_range("--batch", s.batch, "1 to 1024");
    if (s.context < 1 || s.context > (int64_t(1) << 24))
        return out_of_range("--context", s.context, fmt::format("1 to {}", int64_t(1) << 24));
    if (s.query_rows < 1 || s.query_rows > std::min<int64_t>(s.context, 4096))
        return out_of_range("--query-rows", s.query_rows, fmt::format("1 to {}", std::min<int64_t>(s.context, 4096)));
    if (s.threads < 1 || s.threads > 512) return out_of_range("--threads", s.threads, "1 to 512");
    const double layer = 4.0 * s.kv_heads * s.head_dim * double(s.batch) * double(s.context);
    const double memory = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
    if (layer > memory / 4)
        return {StatusCode::invalid_argument,
                fmt::format("--context {}: K and V of one layer at 16 bit are {:.1f} GiB, at most a quarter of this "
                            "machine's memory ({:.1f} GiB) can be used",
                            s.context, layer / (1 << 30), memory / (1 << 30))};
    return {};
}

ModelShape bench_model(const BenchShape& s, int32_t layers) {
    ModelShape model;
    model.name = "bench";
    LayerShape layer{.heads = s.heads, .kv_heads = s.kv_heads, .key_dim = s.head_dim, .value_dim = s.head_dim};
    layer.rope.known = layer.rope.halves = s.head_dim % 2 == 0;
    layer.rope.rotary = layer.rope.known ? s.head_dim : 0;
    model.layers.assign(size_t(layers), layer);
    return model;
}

int32_t bench_sets(double bytes, const BenchShape& shape) {
    return std::max(kMinSets, int32_t(std::ceil(double(shape.working_set) / std::max(bytes, 1.0))));
}

double BenchRow::median_us() const {
    if (us.empty()) return 0;
    std::vector<double> sorted = us;
    std::sort(sorted.begin(), sorted.end());
    const size_t n = sorted.size();
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

double BenchRow::min_us() const { return us.empty() ? 0 : *std::min_element(us.begin(), us.end()); }

Result<std::vector<Segment>> segments_of(const std::string& spec, const BenchShape& shape) {
    auto method = open_method(spec);
    if (!method) return method.status();
    // A layer in the middle: some methods keep the outer ones raw.
    const ModelShape model = bench_model(shape, 32);
    if (Status st = (*method)->accept(model); !st) return st;
    for (const Side side : {Side::key, Side::value})
        if ((*method)->initial(side, 16, 0, shape.head_dim).window.flush > 0)
            return std::vector<Segment>{Segment::packed, Segment::windows};
    return std::vector<Segment>{Segment::raw};
}

void time_in_turn(const std::vector<std::unique_ptr<BenchSubject>>& subjects, int32_t rounds,
                  const Progress& progress) {
    std::vector<int32_t> left; // calls of each subject
    int32_t fewest = kMaxCalls;
    for (const auto& s : subjects) {
        const double warm = s->call(); // not counted
        left.push_back(rounds > 0 ? rounds : calls_for(warm));
        fewest = std::min(fewest, left.back());
    }
    int64_t all = 0, done = 0;
    std::vector<int32_t> per_round;
    for (int32_t& n : left) {
        per_round.push_back(std::clamp(n / fewest, 1, kCallsPerRound));
        n = fewest * per_round.back();
        all += n;
    }
    for (int32_t round = 0; round < fewest; ++round)
        for (int32_t turn = 0; turn < kCallsPerRound; ++turn)
            for (size_t i = 0; i < subjects.size(); ++i) {
                if (turn >= per_round[i]) continue;
                subjects[i]->row.us.push_back(subjects[i]->call());
                if (progress) progress("timing", double(++done) / double(all));
            }
}

Result<BenchReport> bench_attend(BenchDevice& device, const BenchShape& shape, const std::vector<std::string>& specs,
                                 const std::vector<std::string>& baselines, int32_t rounds, const Progress& progress) {
    if (Status st = validate(shape); !st) return st;
    std::vector<std::unique_ptr<BenchSubject>> subjects;
    const size_t all = baselines.size() + 2 * specs.size();
    const auto add = [&](Result<std::unique_ptr<BenchSubject>> made) {
        if (made) subjects.push_back(std::move(*made));
        if (progress) progress("filling caches", double(subjects.size()) / double(all));
        return made.status();
    };
    for (const std::string& name : baselines)
        if (Status st = add(device.baseline(name)); !st) return st;
    for (const std::string& spec : specs) {
        const auto segments = segments_of(spec, shape);
        if (!segments) return segments.status();
        for (const Segment segment : *segments)
            if (Status st = add(device.cache(spec, segment)); !st) return st;
    }
    BenchReport report;
    report.shape = shape;
    report.read_bandwidth = device.read_bandwidth();
    time_in_turn(subjects, rounds, progress);
    for (size_t i = 0; i < subjects.size(); ++i) {
        subjects[i]->row.error = subjects[i]->error();
        report.rows.push_back(subjects[i]->row);
        if (progress) progress("checking", double(i + 1) / double(subjects.size()));
    }
    return report;
}

std::string to_table(const BenchReport& report) {
    size_t wide = 24;
    std::vector<const BenchRow*> baselines;
    for (const BenchRow& row : report.rows) {
        wide = std::max(wide, row.spec.size());
        if (!row.baseline.empty()) baselines.push_back(&row);
    }
    const BenchShape& s = report.shape;
    std::string out = fmt::format("{} query heads, {} KV heads, D {}, context {}, batch {}, query rows {}, threads {}; "
                                  "read bandwidth {:.1f} GB/s\n",
                                  s.heads, s.kv_heads, s.head_dim, s.context, s.batch, s.query_rows, s.threads,
                                  report.read_bandwidth / 1e9);
    out += fmt::format("{:<{}}  {:<7}  {:>9} {:>9}  {:>6} {:>6}", "cache", wide, "segment", "median ms", "min ms",
                       "GB/s", "of bw");
    for (const BenchRow* b : baselines)
        out += fmt::format("  {:>10}", "x " + b->baseline);
    out += fmt::format("  {:>8}  {}\n", "error", "path");
    for (const BenchRow& row : report.rows) {
        const double rate = row.bytes_per_second();
        out += fmt::format("{:<{}}  {:<7}  {:>9.3f} {:>9.3f}  {:>6.2f} {:>5.0f}%", row.spec, wide,
                           row.segment.empty() ? "-" : row.segment, row.median_us() / 1e3, row.min_us() / 1e3,
                           rate / 1e9, report.read_bandwidth > 0 ? 100 * rate / report.read_bandwidth : 0.0);
        for (const BenchRow* b : baselines)
            out += fmt::format("  {:>10.2f}", b->median_us() / row.median_us());
        out += fmt::format("  {:>8.1e}  {}\n", row.error,
                           row.isa.empty()
                               ? row.path
                               : row.path + " (" + row.isa + (row.accuracy.empty() ? "" : ", " + row.accuracy) + ")");
    }
    return out;
}

ordered_json to_json(const BenchReport& report) {
    const auto text = [](const std::string& s) { return s.empty() ? ordered_json() : ordered_json(s); };
    const BenchShape& s = report.shape;
    ordered_json rows = ordered_json::array();
    for (const BenchRow& row : report.rows) {
        ordered_json ratios = ordered_json::object();
        for (const BenchRow& b : report.rows)
            if (!b.baseline.empty()) ratios[b.baseline] = b.median_us() / row.median_us();
        rows.push_back({{"spec", row.spec},
                        {"segment", text(row.segment)},
                        {"baseline", text(row.baseline)},
                        {"device", row.device},
                        {"isa", text(row.isa)},
                        {"heads", s.heads},
                        {"kv_heads", s.kv_heads},
                        {"head_dim", s.head_dim},
                        {"batch", s.batch},
                        {"context", s.context},
                        {"query_rows", s.query_rows},
                        {"threads", s.threads},
                        {"median_us", row.median_us()},
                        {"min_us", row.min_us()},
                        {"calls", row.us.size()},
                        {"bytes", row.bytes},
                        {"tb_s", row.bytes_per_second() / 1e12},
                        {"bandwidth_share", report.read_bandwidth > 0
                                                ? ordered_json(row.bytes_per_second() / report.read_bandwidth)
                                                : ordered_json()},
                        {"error", std::isfinite(row.error) ? ordered_json(row.error) : ordered_json()},
                        {"path", row.path},
                        {"accuracy", text(row.accuracy)},
                        {"ratios", std::move(ratios)}});
    }
    return rows;
}

} // namespace kvmosaic::eval
