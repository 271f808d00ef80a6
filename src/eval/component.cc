#include "eval/component.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/metrics.h"
#include "kvmosaic/method.h"

namespace kvmosaic::eval {

namespace {

constexpr SeqId kSequence = 0;

// Normal numbers that are the same on every machine whose cos and log are right to the last float digit.
class Normal {
public:
    explicit Normal(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}
    float next() {
        const double radius = std::sqrt(-2 * std::log(uniform()));
        return float(radius * std::cos(6.283185307179586 * uniform()));
    }

private:
    double uniform() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return (double(state_ >> 11) + 0.5) * 0x1p-53;
    }
    uint64_t state_;
};

bool same_decision(const SidePlan& a, const SidePlan& b) {
    return a.ladder == b.ladder && a.channels == b.channels && a.pinned == b.pinned &&
           a.transform.order == b.transform.order && a.transform.scale == b.transform.scale &&
           a.transform.shift == b.transform.shift && a.transform.hadamard == b.transform.hadamard;
}

// The cache of all layers, of which one is looked at.
class Bench {
public:
    Bench(const ComponentInput& input, bool alone, Cache& cache)
        : input_(input), alone_(alone), cache_(cache), shape_(input.seen.shape.layers[size_t(input.layer)]) {}

    // Rows [first, first + count), each layer's own; out: [count][H * Dv] of the measured layer.
    Status append(int32_t first, int32_t count, std::vector<float>* out) {
        const SeqId names[] = {kSequence};
        std::vector<StepRow> rows(static_cast<size_t>(count));
        for (int32_t i = 0; i < count; ++i)
            rows[size_t(i)] = {input_.seen.positions[size_t(first + i)], names};
        if (Status bad = cache_.begin_step(rows); !bad) return bad;
        const auto view = [first](const std::vector<float>& x, int32_t heads, int32_t dim) {
            return RowsF32{x.data() + int64_t(first) * heads * dim, int64_t(heads) * dim, dim};
        };
        for (size_t il = 0; il < input_.seen.layers.size(); ++il) {
            const LayerShape& l = input_.seen.shape.layers[il];
            const CapturedLayer& x = input_.seen.layers[il];
            if (!l.has_kv() || (alone_ && int32_t(il) != input_.layer)) continue;
            const RowsF32 q = view(x.q, l.heads, l.key_dim);
            cache_.write(int32_t(il), q, view(x.k, l.kv_heads, l.key_dim), view(x.v, l.kv_heads, l.value_dim));
            if (int32_t(il) != input_.layer) continue;
            out->resize(size_t(count) * size_t(l.heads * l.value_dim));
            AttendArgs args;
            args.scale = float(1 / std::sqrt(double(l.key_dim)));
            cache_.attend(int32_t(il), q, args, out->data());
        }
        cache_.end_step();
        return {};
    }

    void measure(int32_t row, const std::vector<float>& out, ComponentResult* sums) const {
        const CapturedLayer& x = input_.seen.layers[size_t(input_.layer)];
        const int32_t dim = shape_.key_dim, vdim = shape_.value_dim, group = shape_.heads / shape_.kv_heads;
        const int64_t n = row + 1, kstride = int64_t(shape_.kv_heads) * dim, vstride = int64_t(shape_.kv_heads) * vdim;
        std::vector<float> keys(size_t(n * dim));
        for (int32_t h = 0; h < shape_.heads; ++h) {
            const int32_t g = h / group;
            if (h % group == 0) cache_.decode(kSequence, input_.layer, g, Side::key, 0, n, keys.data());
            const float* q = x.q.data() + (int64_t(row) * shape_.heads + h) * dim;
            const double scale = 1 / std::sqrt(double(dim));
            const std::vector<double> exact = attention_weights(q, x.k.data() + g * dim, kstride, dim, n, scale);
            const std::vector<double> seen = attention_weights(q, keys.data(), dim, dim, n, scale);
            double sinks = 0;
            for (int64_t t = 0; t < n; ++t) {
                const double p = exact[size_t(t)], r = seen[size_t(t)];
                if (p > 0) sums->kl += p * (std::log(p) - std::log(std::max(r, 1e-300)));
                if (t < kSinkRows) sinks += r - p;
            }
            sums->sink_error += std::fabs(sinks);
            double dot = 0, mine = 0, theirs = 0, squares = 0;
            for (int32_t c = 0; c < vdim; ++c) {
                double o = 0;
                for (int64_t t = 0; t < n; ++t)
                    o += exact[size_t(t)] * double(x.v[size_t(t * vstride + g * vdim + c)]);
                const double got = double(out[size_t(h * vdim + c)]);
                dot += o * got, mine += got * got, theirs += o * o, squares += (o - got) * (o - got);
            }
            sums->mse += squares / vdim;
            sums->cosine += dot / std::max(std::sqrt(mine * theirs), 1e-300);
        }
    }

    // What the layer's sides have packed, and whether each has frozen its plan.
    template <typename F>
    void each_side(const F& f) const {
        for (const Side side : {Side::key, Side::value}) {
            for (int32_t head = 0; head < shape_.kv_heads; ++head)
                f(side, head);
        }
    }

    // Adds the plans made since the last call.
    void count_plans(bool prefill, int64_t* plans) {
        const Method& method = cache_.method();
        each_side([&](Side side, int32_t head) {
            const SidePlan initial = method.initial(side, input_.layer, head, shape_.dim(side));
            const size_t at = size_t(side) * size_t(shape_.kv_heads) + size_t(head);
            const int64_t packed = cache_.packed_rows(kSequence, input_.layer, side);
            if (packed == 0) return;
            if (method.freezes(side) && !frozen_[at]) frozen_[at] = true, ++*plans;
            const bool by_block = initial.store.kind == StoreKind::tiered && initial.store.page_map;
            const int64_t blocks = by_block ? (packed - packed_[at]) / std::max(1, initial.window.flush) : 0;
            const bool one = prefill && blocks > 0 && method.map_scope() == MapScope::first_step;
            *plans += one ? 1 : blocks;
            packed_[at] = packed;
        });
    }

    // Decisions in force and bytes of full pages, to be compared later.
    struct State {
        std::vector<SidePlan> plans;
        std::vector<std::vector<uint8_t>> pages;
        bool decided = false;
    };
    State state() const {
        State out;
        each_side([&](Side side, int32_t head) {
            out.plans.push_back(cache_.plan(kSequence, input_.layer, head, side));
            const bool packed = cache_.packed_rows(kSequence, input_.layer, side) > 0;
            const StoreSpec& store = out.plans.back().store;
            const bool by_block = store.kind == StoreKind::tiered && store.page_map;
            out.decided = out.decided || (packed && (cache_.method().freezes(side) || by_block));
            for (int64_t i = 0; i < cache_.packed_rows(kSequence, input_.layer, side) / kPageTokens; ++i) {
                const PageView page = cache_.page(kSequence, input_.layer, head, side, i);
                out.pages.emplace_back(page.bytes, page.bytes + page.layout->bytes);
            }
        });
        return out;
    }
    void compare(const State& before, ComponentResult* result) const {
        size_t plan = 0, page = 0;
        bool same = true;
        each_side([&](Side side, int32_t head) {
            same = same && same_decision(before.plans[plan], cache_.plan(kSequence, input_.layer, head, side));
            const size_t all = before.pages.size();
            const int64_t full = before_full_[size_t(side)];
            for (int64_t i = 0; i < full && page < all; ++i, ++page) {
                const PageView now = cache_.page(kSequence, input_.layer, head, side, i);
                const std::vector<uint8_t>& old = before.pages[page];
                result->pages_unchanged = result->pages_unchanged && now.layout->bytes == old.size() &&
                                          std::equal(old.begin(), old.end(), now.bytes);
            }
            ++plan;
        });
        // tiers of a page lie in its bytes
        if (before.decided) result->mask_unchanged = same && result->pages_unchanged;
    }
    void remember_full() {
        for (const Side side : {Side::key, Side::value})
            before_full_[size_t(side)] = cache_.packed_rows(kSequence, input_.layer, side) / kPageTokens;
    }

private:
    const ComponentInput& input_;
    const bool alone_;
    Cache& cache_;
    const LayerShape& shape_;
    std::vector<bool> frozen_ = std::vector<bool>(size_t(2 * shape_.kv_heads), false);
    std::vector<int64_t> packed_ = std::vector<int64_t>(size_t(2 * shape_.kv_heads), 0);
    int64_t before_full_[2] = {0, 0};
};

} // namespace

ComponentInput random_input(const RandomNetwork& network, int32_t rows) {
    ComponentInput out;
    LayerShape l{network.heads, network.kv_heads, network.dim, network.dim};
    l.rope.known = true, l.rope.halves = true, l.rope.rotary = network.dim;
    out.seen.shape.layers = {l};
    out.seen.shape.name = "random";
    out.seen.rows = rows;
    out.seen.layers.resize(1);
    Normal normal(network.seed);
    const auto matrix = [&](int64_t n, double scale) {
        std::vector<float> x(static_cast<size_t>(n));
        for (float& v : x)
            v = float(scale * double(normal.next()));
        return x;
    };
    const double scale = 1 / std::sqrt(double(network.hidden));
    const int64_t hidden = network.hidden;
    const std::vector<float> states = matrix(rows * hidden, 1);
    const auto project = [&](int32_t heads, double gain) {
        const int64_t width = int64_t(heads) * network.dim;
        const std::vector<float> w = matrix(width * hidden, scale * gain);
        std::vector<float> y(size_t(rows * width), 0.0f);
        for (int64_t t = 0; t < rows; ++t) {
            for (int64_t i = 0; i < width; ++i) {
                double sum = 0;
                for (int64_t c = 0; c < hidden; ++c)
                    sum += double(states[size_t(t * hidden + c)]) * double(w[size_t(i * hidden + c)]);
                y[size_t(t * width + i)] = float(sum);
            }
        }
        return y;
    };
    CapturedLayer& x = out.seen.layers[0];
    x.q = project(network.heads, 1), x.k = project(network.kv_heads, 1), x.v = project(network.kv_heads, 1);
    for (int32_t t = 0; t < rows; ++t) {
        out.seen.positions.push_back(t);
        for (int32_t h = 0; h < network.heads; ++h)
            l.rope.turn(x.q.data() + (int64_t(t) * network.heads + h) * network.dim, t);
        for (int32_t h = 0; h < network.kv_heads; ++h)
            l.rope.turn(x.k.data() + (int64_t(t) * network.kv_heads + h) * network.dim, t);
    }
    return out;
}

Status validate(const ComponentOptions& o) {
    if (o.prefill < 1 || o.prefill > 65536)
        return {StatusCode::invalid_argument, fmt::format("--prefill {}: 1 to 65536", o.prefill)};
    if (o.decode < 1 || o.decode > 4096)
        return {StatusCode::invalid_argument, fmt::format("--decode {}: 1 to 4096", o.decode)};
    return {};
}

Result<ComponentResult> component(const ComponentInput& input, const std::string& spec,
                                  const ComponentOptions& options) {
    if (Status bad = validate(options); !bad) return bad;
    Result<std::unique_ptr<Cache>> made = Cache::create(input.seen.shape, spec);
    if (!made) return made.status();
    Cache& cache = **made;
    Bench bench(input, options.alone, cache);
    ComponentResult out;
    out.spec = spec, out.canonical = cache.method().spec();
    std::vector<float> attended;
    if (Status bad = bench.append(0, options.prefill, &attended); !bad) return bad;
    bench.count_plans(true, &out.plans);
    bench.remember_full();
    const Bench::State before = bench.state();
    for (int32_t i = 0; i < options.decode; ++i) {
        if (Status bad = bench.append(options.prefill + i, 1, &attended); !bad) return bad;
        bench.count_plans(false, &out.plans);
        bench.measure(options.prefill + i, attended, &out);
    }
    bench.compare(before, &out);
    const double n = double(options.decode) * input.seen.shape.layers[size_t(input.layer)].heads;
    out.kl = std::max(0.0, out.kl / n);
    out.mse /= n, out.cosine /= n, out.sink_error /= n;
    const Footprint f = cache.footprint();
    out.cache_bytes = f.cache_bytes();
    for (const LayerShape& l : input.seen.shape.layers)
        out.layers += l.has_kv();
    out.bits = f.true_bits(), out.bits_key = f.true_bits(0), out.bits_value = f.true_bits(1);
    out.path = name_of(cache.path()), out.isa = cache.isa();
    return out;
}

} // namespace kvmosaic::eval
