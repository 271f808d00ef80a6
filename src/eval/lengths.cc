#include "eval/lengths.h"

#include <algorithm>
#include <limits>

namespace kvmosaic::eval {

namespace {

constexpr int64_t kChunk = 512;
// From kFirst rows on a cache grows by whole pages alone: what it adds from kFirst to kSecond it adds every time.
constexpr int64_t kFirst = 4096, kSecond = 8192;

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

} // namespace

Result<LengthBits> LengthBits::make(const ModelShape& shape, const std::string& spec, std::vector<int64_t> lengths) {
    CacheOptions options;
    options.step = StepMode::chunk;
    Result<std::unique_ptr<Cache>> made = Cache::create(shape, spec, options);
    if (!made) return made.status();
    Cache& cache = **made;
    int64_t widest = 0;
    for (const LayerShape& l : shape.layers) {
        widest = std::max<int64_t>({widest, int64_t(l.heads) * l.key_dim, int64_t(l.kv_heads) * l.value_dim});
    }
    const std::vector<float> rows = made_up(size_t(widest * kChunk));
    const SeqId names[] = {0};

    bool straight = true;
    each_side(shape, [&](int32_t layer, int32_t head, Side side) {
        const Window w = cache.method().initial(side, layer, head, shape.layers[size_t(layer)].dim(side)).window;
        straight = straight && w.front + w.keep + w.flush + w.first <= kFirst - kPageTokens;
    });
    const auto follows = [&](int64_t n) { return straight && n > kSecond && (n - kSecond) % kPageTokens == 0; };
    std::vector<int64_t> filled;
    for (const int64_t n : lengths)
        if (!follows(n)) filled.push_back(n);
    if (filled.size() < lengths.size()) filled.insert(filled.end(), {kFirst, kSecond});
    std::sort(filled.begin(), filled.end());
    filled.erase(std::unique(filled.begin(), filled.end()), filled.end());

    std::vector<Entry> entries; // of `filled`
    int64_t at = 0;
    for (const int64_t length : filled) {
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
        const Footprint f = cache.footprint();
        Entry entry;
        entry.fixed = f.cache_bytes() - f.packed[0] - f.packed[1];
        entry.values = f.values[0] + f.values[1];
        each_side(shape, [&](int32_t layer, int32_t head, Side side) {
            Pages pages;
            pages.count = cache.pages(0, layer, side);
            for (int64_t i = 0; i < pages.count; ++i)
                pages.bytes += cache.page(0, layer, head, side, i).layout->bytes;
            const StoreSpec store =
                cache.method().initial(side, layer, head, shape.layers[size_t(layer)].dim(side)).store;
            pages.varies = store.kind == StoreKind::tiered && store.page_map;
            entry.pages.push_back(pages);
        });
        entries.push_back(std::move(entry));
    }
    const auto entry_of = [&](int64_t n) -> const Entry& {
        return entries[size_t(std::find(filled.begin(), filled.end(), n) - filled.begin())];
    };
    LengthBits out;
    for (const int64_t n : lengths)
        out.entries_.push_back(follows(n) ? beyond(entry_of(kFirst), entry_of(kSecond), n) : entry_of(n));
    return out;
}

LengthBits::Entry LengthBits::beyond(const Entry& first, const Entry& second, int64_t length) {
    const auto grown = [&](int64_t a, int64_t b) { return b + (b - a) * (length - kSecond) / (kSecond - kFirst); };
    Entry out = second;
    out.fixed = grown(first.fixed, second.fixed);
    out.values = grown(first.values, second.values);
    for (size_t i = 0; i < out.pages.size(); ++i) {
        out.pages[i].count = grown(first.pages[i].count, second.pages[i].count);
        out.pages[i].bytes = grown(first.pages[i].bytes, second.pages[i].bytes);
    }
    return out;
}

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
