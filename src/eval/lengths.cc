#include "eval/lengths.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>

namespace kvmosaic::eval {

namespace {

constexpr int64_t kChunk = 512;

// Calls f(layer, head, side) for all that a shape keeps, in a fixed order.
template <typename F>
void each_side(const ModelShape& shape, const F& f) {
    for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
        for (int32_t head = 0; head < shape.layers[size_t(layer)].kv_heads; ++head) {
            f(layer, head, Side::key);
            f(layer, head, Side::value);
        }
    }
}

// Values without structure, the same on every machine.
std::vector<float> made_up(size_t n) {
    std::vector<float> out(n);
    uint32_t state = 1;
    for (float& x : out) {
        state = state * 1664525u + 1013904223u;
        x = float(state >> 8) / float(1u << 23) - 1.0f;
    }
    return out;
}

// Whether every layer has the sizes and fixed plans of the first, so that each adds the same.
bool layers_alike(const ModelShape& shape, const std::string& spec) {
    const Result<std::unique_ptr<Method>> method = open_method(spec);
    if (!method || !(*method)->accept(shape)) return false; // for Cache::create to say
    const LayerShape& first = shape.layers.front();
    for (size_t i = 0; i < shape.layers.size(); ++i) {
        const LayerShape& l = shape.layers[i];
        if (!l.has_kv() || !l.same_sizes(first)) return false;
        for (int32_t head = 0; head < l.kv_heads; ++head) {
            for (const Side side : {Side::key, Side::value}) {
                const SidePlan a = (*method)->initial(side, 0, head, l.dim(side));
                const SidePlan b = (*method)->initial(side, int32_t(i), head, l.dim(side));
                const auto sizes = [](const Transform& t) {
                    return std::array{size_t(t.hadamard), t.order.size(), t.scale.size(), t.shift.size()};
                };
                const bool same = a.store == b.store && a.raw == b.raw && a.window == b.window && a.space == b.space &&
                                  a.pins == b.pins && a.ladder == b.ladder && sizes(a.transform) == sizes(b.transform);
                if (!same) return false;
            }
        }
    }
    return true;
}

} // namespace

int64_t LengthBits::Entry::bytes() const {
    return std::accumulate(pages.begin(), pages.end(), fixed, [](int64_t n, const Pages& p) { return n + p.bytes; });
}

LengthBits::Entry LengthBits::entry_of(const Cache& cache) {
    const Footprint f = cache.footprint();
    Entry entry;
    entry.fixed = f.cache_bytes() - f.packed[0] - f.packed[1];
    entry.values = f.values[0] + f.values[1];
    each_side(cache.shape(), [&](int32_t layer, int32_t head, Side side) {
        Pages pages;
        pages.count = cache.pages(0, layer, side);
        for (int64_t i = 0; i < pages.count; ++i)
            pages.bytes += cache.page(0, layer, head, side, i).layout->bytes;
        const int32_t dim = cache.shape().layers[size_t(layer)].dim(side);
        const StoreSpec store = cache.method().initial(side, layer, head, dim).store;
        pages.varies = store.kind == StoreKind::tiered && store.page_map;
        entry.pages.push_back(pages);
    });
    return entry;
}

// `times` steps of second - first behind `second`.
LengthBits::Entry LengthBits::beyond(const Entry& first, const Entry& second, int64_t times) {
    const auto grown = [times](int64_t a, int64_t b) { return b + (b - a) * times; };
    Entry out = second;
    out.fixed = grown(first.fixed, second.fixed);
    out.values = grown(first.values, second.values);
    for (size_t i = 0; i < out.pages.size(); ++i) {
        out.pages[i].count = grown(first.pages[i].count, second.pages[i].count);
        out.pages[i].bytes = grown(first.pages[i].bytes, second.pages[i].bytes);
    }
    return out;
}

Result<LengthBits> LengthBits::make(const ModelShape& shape, const std::string& spec,
                                    const std::vector<int64_t>& lengths) {
    const int64_t n = int64_t(shape.layers.size());
    if (n <= 3 || !layers_alike(shape, spec)) return whole(shape, spec, lengths);
    ModelShape fewer = shape;
    fewer.layers.resize(1);
    Result<LengthBits> one = whole(fewer, spec, lengths);
    fewer.layers.push_back(shape.layers[1]);
    const Result<LengthBits> two = whole(fewer, spec, lengths);
    if (!one || !two) return whole(shape, spec, lengths); // a method that serves the whole model alone
    const auto spread = [n](int64_t a, int64_t b) { return a + (b - a) * (n - 1); };
    for (size_t i = 0; i < one->entries_.size(); ++i) {
        Entry& entry = one->entries_[i];
        entry.fixed = spread(entry.fixed, two->entries_[i].fixed);
        entry.values = spread(entry.values, two->entries_[i].values);
        const std::vector<Pages> layer = entry.pages;
        for (int64_t copy = 1; copy < n; ++copy)
            entry.pages.insert(entry.pages.end(), layer.begin(), layer.end());
    }
    one->growth_ = spread(one->growth_, two->growth_);
    return one;
}

Result<LengthBits> LengthBits::whole(const ModelShape& shape, const std::string& spec,
                                     const std::vector<int64_t>& lengths) {
    CacheOptions options;
    options.step = StepMode::chunk;
    Result<std::unique_ptr<Cache>> made = Cache::create(shape, spec, options);
    if (!made) return made.status();
    Cache& cache = **made;
    int64_t widest = 0, settled = 0;
    for (const LayerShape& l : shape.layers) {
        widest = std::max<int64_t>({widest, int64_t(l.heads) * l.key_dim, int64_t(l.kv_heads) * l.value_dim});
    }
    // From `settled` on every 128 rows add what the 128 before them added.
    each_side(shape, [&](int32_t layer, int32_t head, Side side) {
        const Window w = cache.method().initial(side, layer, head, shape.layers[size_t(layer)].dim(side)).window;
        settled = std::max<int64_t>(settled, w.front + w.keep + w.flush + w.first);
    });
    settled = (settled + kPageTokens - 1) / kPageTokens * kPageTokens + kPageTokens;
    // Where a length's sizes are measured: at itself, or 128 rows apart at the same place in a page, both behind a
    // first stop there, at which the cache's table of layouts grows by what that place needs.
    const auto place = [settled](int64_t n) { return settled + (n - settled) % kPageTokens; };
    const auto start = [&](int64_t n) { return n <= settled + 2 * kPageTokens ? n : place(n) + kPageTokens; };
    std::map<int64_t, Entry> seen;
    std::vector<int64_t> stops = lengths;
    stops.push_back(settled);
    for (const int64_t n : stops) {
        if (n > settled + 2 * kPageTokens || n == settled)
            seen[place(n) + kPageTokens], seen[place(n) + 2 * kPageTokens];
        if (n >= settled) seen[place(n)];
        seen[start(n)];
    }

    const std::vector<float> rows = made_up(size_t(widest * kChunk));
    const SeqId names[] = {0};
    int64_t at = 0;
    for (auto& [length, entry] : seen) {
        while (at < length) {
            const int64_t n = std::min(kChunk, length - at);
            std::vector<StepRow> step(static_cast<size_t>(n));
            for (int64_t i = 0; i < n; ++i)
                step[size_t(i)] = {int32_t(at + i), names};
            if (Status bad = cache.begin_step(step); !bad) return bad;
            for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
                const LayerShape& l = shape.layers[size_t(layer)];
                if (!l.has_kv()) continue;
                const auto as_rows = [&](int64_t heads, int64_t dim) { return RowsF32{rows.data(), heads * dim, dim}; };
                cache.write(layer, as_rows(l.heads, l.key_dim), as_rows(l.kv_heads, l.key_dim),
                            as_rows(l.kv_heads, l.value_dim));
            }
            cache.end_step();
            at += n;
        }
        entry = entry_of(cache);
    }
    LengthBits out;
    for (const int64_t n : lengths) {
        const int64_t first = start(n);
        out.entries_.push_back(
            first == n ? seen[n] : beyond(seen[first], seen[first + kPageTokens], (n - first) / kPageTokens - 1));
    }
    out.growth_ = seen[settled + 2 * kPageTokens].bytes() - seen[settled + kPageTokens].bytes();
    return out;
}

int64_t LengthBits::bytes(size_t i) const { return entries_[i].bytes(); }
double LengthBits::bits(size_t i) const { return 8.0 * double(bytes(i)) / double(entries_[i].values); }

double LengthBits::bits(size_t i, const Cache& measured) const {
    const Entry& entry = entries_[i];
    double bytes = double(entry.fixed);
    size_t index = 0;
    bool known = true;
    each_side(measured.shape(), [&](int32_t layer, int32_t head, Side side) {
        const Pages& pages = entry.pages[index++];
        if (pages.count == 0) return;
        if (!pages.varies) {
            bytes += double(pages.bytes);
            return;
        }
        const int64_t seen = measured.pages(0, layer, side);
        double sum = 0;
        for (int64_t p = 0; p < seen; ++p)
            sum += measured.page(0, layer, head, side, p).layout->bytes;
        known = known && seen > 0;
        bytes += seen > 0 ? sum / double(seen) * double(pages.count) : 0.0;
    });
    return known ? 8.0 * bytes / double(entry.values) : std::numeric_limits<double>::quiet_NaN();
}

} // namespace kvmosaic::eval
