#include "eval/channels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>

#include "kvmosaic/store.h"

namespace kvmosaic::eval {

namespace {

double mean(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0) / double(x.size()); }

// 1 for the smallest; equal values share their mean rank.
std::vector<double> ranks(const std::vector<double>& x) {
    std::vector<size_t> order(x.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] < x[b]; });
    std::vector<double> out(x.size());
    for (size_t first = 0; first < order.size();) {
        size_t last = first;
        while (last < order.size() && x[order[last]] == x[order[first]])
            ++last;
        for (size_t i = first; i < last; ++i)
            out[order[i]] = double(first + 1 + last) / 2;
        first = last;
    }
    return out;
}

// Largest minus smallest key of each channel in rows [first, first + kPageTokens).
std::vector<double> ranges(const Capture& seen, int32_t layer, int32_t head, int64_t first) {
    const LayerShape& l = seen.shape.layers[size_t(layer)];
    const int64_t stride = int64_t(l.kv_heads) * l.key_dim;
    std::vector<double> out;
    for (int32_t c = 0; c < l.key_dim; ++c) {
        const float* k = seen.layers[size_t(layer)].k.data() + first * stride + int64_t(head) * l.key_dim + c;
        float low = *k, high = *k;
        for (int32_t t = 1; t < kPageTokens; ++t)
            low = std::min(low, k[t * stride]), high = std::max(high, k[t * stride]);
        out.push_back(double(high) - double(low));
    }
    return out;
}

// Adds |q| of rows [first, last) and the head's query heads; returns how many vectors that were.
int64_t add_queries(const Capture& seen, int32_t layer, int32_t head, int64_t first, int64_t last,
                    std::vector<double>* sums) {
    const LayerShape& l = seen.shape.layers[size_t(layer)];
    const int32_t group = l.heads / l.kv_heads;
    for (int64_t row = first; row < last; ++row) {
        const float* q = seen.layers[size_t(layer)].q.data() + (row * l.heads + int64_t(head) * group) * l.key_dim;
        for (int32_t h = 0; h < group; ++h)
            for (int32_t c = 0; c < l.key_dim; ++c)
                (*sums)[size_t(c)] += std::fabs(double(q[h * l.key_dim + c]));
    }
    return (last - first) * group;
}

// First rows of the whole pages of all windows.
std::vector<int64_t> pages_of(const Capture& seen) {
    std::vector<int64_t> out;
    for (int64_t begin = 0; begin < seen.rows;) {
        int64_t end = begin + 1;
        while (end < seen.rows && seen.positions[size_t(end)] > seen.positions[size_t(end - 1)])
            ++end;
        for (int64_t at = begin; at + kPageTokens <= end; at += kPageTokens)
            out.push_back(at);
        begin = end;
    }
    return out;
}

// From mean range and mean |q| of each channel.
HeadChannels head_channels(std::vector<double> range, std::vector<double> query) {
    const size_t dim = range.size();
    HeadChannels out;
    out.range = std::move(range), out.query = std::move(query);
    out.pearson = pearson(out.range, out.query);
    out.spearman = spearman(out.range, out.query);
    std::vector<double> sorted = out.range, salience(dim);
    std::sort(sorted.begin(), sorted.end());
    const double median = (sorted[(dim - 1) / 2] + sorted[dim / 2]) / 2;
    out.range_ratio = median > 0 ? sorted.back() / median : std::numeric_limits<double>::quiet_NaN();
    for (size_t c = 0; c < dim; ++c)
        salience[c] = out.range[c] * out.query[c];
    std::sort(salience.rbegin(), salience.rend());
    const double all = std::accumulate(salience.begin(), salience.end(), 0.0);
    const size_t top = std::min(dim, size_t(kTopChannels));
    out.top_share = all > 0 ? std::accumulate(salience.begin(), salience.begin() + int64_t(top), 0.0) / all : 0;
    return out;
}

// Bits of each channel in a page; empty where its channels are not the model's own (a rotated basis, joined heads).
std::vector<double> bits_of(const PageView& page, const SidePlan& plan) {
    const PageLayout& l = *page.layout;
    if (plan.transform.hadamard != 0 || plan.transform.joined != 1) return {};
    std::vector<double> by_position(l.dim, 0.0), out(l.dim, 0.0);
    for (int32_t i = 0; i < l.raw_depth; ++i)
        by_position[size_t(i)] = 16;
    for (int32_t t = 0; t < l.tier_count; ++t)
        for (int32_t i = 0; i < l.tiers[size_t(t)].live; ++i)
            by_position[size_t(l.tiers[size_t(t)].first + i)] = l.tiers[size_t(t)].bits;
    for (int32_t i = 0; i < l.dim; ++i) {
        const uint8_t* at = page.bytes + l.map_offset;
        const size_t stored = l.map_bytes == 0       ? size_t(i)
                              : l.map_bytes == l.dim ? size_t(at[i])
                                                     : size_t(at[2 * i]) | size_t(at[2 * i + 1]) << 8;
        const size_t channel = plan.transform.order.empty() ? stored : plan.transform.order[stored];
        if (channel < out.size()) out[channel] = by_position[size_t(i)];
    }
    return out;
}

// The rows of one layer through a cache of all layers, the others filled with nothing.
Status fill(Cache& cache, const Capture& seen, int32_t layer) {
    constexpr int64_t kStep = 256;
    const SeqId names[] = {0};
    const std::vector<float> nothing(size_t(kMaxHeadDim), 0.0f);
    for (int64_t first = 0; first < seen.rows; first += kStep) {
        std::vector<StepRow> rows;
        for (int64_t row = first; row < std::min(seen.rows, first + kStep); ++row)
            rows.push_back({seen.positions[size_t(row)], names});
        if (Status bad = cache.begin_step(rows); !bad) return bad;
        for (int32_t il = 0; il < int32_t(seen.shape.layers.size()); ++il) {
            const LayerShape& l = seen.shape.layers[size_t(il)];
            if (!l.has_kv()) continue;
            const CapturedLayer& x = seen.layers[size_t(il)];
            const auto view = [&](const std::vector<float>& from, int32_t heads, int32_t dim) {
                if (il != layer) return RowsF32{nothing.data(), 0, 0};
                return RowsF32{from.data() + first * heads * dim, int64_t(heads) * dim, dim};
            };
            cache.write(il, view(x.q, l.heads, l.key_dim), view(x.k, l.kv_heads, l.key_dim),
                        view(x.v, l.kv_heads, l.value_dim));
        }
        cache.end_step();
    }
    return {};
}

} // namespace

double pearson(const std::vector<double>& x, const std::vector<double>& y) {
    if (x.size() != y.size() || x.size() < 2) return std::numeric_limits<double>::quiet_NaN();
    const double mx = mean(x), my = mean(y);
    double xx = 0, yy = 0, xy = 0;
    for (size_t i = 0; i < x.size(); ++i)
        xx += (x[i] - mx) * (x[i] - mx), yy += (y[i] - my) * (y[i] - my), xy += (x[i] - mx) * (y[i] - my);
    return xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : std::numeric_limits<double>::quiet_NaN();
}

double spearman(const std::vector<double>& x, const std::vector<double>& y) { return pearson(ranks(x), ranks(y)); }

Status validate(const ChannelOptions& o) {
    if (o.tokens < kPageTokens)
        return {StatusCode::invalid_argument, fmt::format("--tokens {}: at least {}, a page", o.tokens, kPageTokens)};
    if (o.window < kPageTokens)
        return {StatusCode::invalid_argument, fmt::format("--window {}: at least {}, a page", o.window, kPageTokens)};
    return {};
}

void ChannelSums::add(const Capture& seen) {
    const std::vector<int64_t> pages = pages_of(seen);
    for (size_t il = 0; il < seen.layers.size(); ++il) {
        if (seen.layers[il].k.empty() || pages.empty()) continue;
        const int32_t layer = int32_t(il);
        const LayerShape& l = seen.shape.layers[il];
        auto at = std::find_if(layers_.begin(), layers_.end(), [&](const auto& own) { return own.first == layer; });
        if (at == layers_.end()) {
            layers_.emplace_back(layer, std::vector<Head>(size_t(l.kv_heads)));
            at = layers_.end() - 1;
        }
        for (int32_t head = 0; head < l.kv_heads; ++head) {
            Head& sums = at->second[size_t(head)];
            sums.range.resize(size_t(l.key_dim), 0), sums.query.resize(size_t(l.key_dim), 0);
            for (const int64_t page : pages) {
                const std::vector<double> own = ranges(seen, layer, head, page);
                for (size_t c = 0; c < own.size(); ++c)
                    sums.range[c] += own[c];
                sums.queries += add_queries(seen, layer, head, page, page + kPageTokens, &sums.query);
                ++sums.pages;
            }
        }
    }
}

std::vector<LayerChannels> ChannelSums::means() const {
    std::vector<LayerChannels> out;
    for (const auto& [number, heads] : layers_) {
        LayerChannels layer;
        layer.layer = number;
        for (const Head& sums : heads) {
            std::vector<double> range = sums.range, query = sums.query;
            for (double& x : range)
                x /= double(sums.pages);
            for (double& x : query)
                x /= double(sums.queries);
            layer.heads.push_back(head_channels(std::move(range), std::move(query)));
            const HeadChannels& h = layer.heads.back();
            const double n = double(heads.size());
            layer.pearson += h.pearson / n, layer.spearman += h.spearman / n;
            layer.range_ratio += h.range_ratio / n, layer.top_share += h.top_share / n;
        }
        out.push_back(std::move(layer));
    }
    return out;
}

Result<std::vector<LayerChannels>> channels(const Model& model, const std::vector<int32_t>& text,
                                            const ChannelOptions& options, const Progress& progress) {
    if (Status bad = validate(options); !bad) return bad;
    if (options.tokens > int64_t(text.size())) {
        return Status(StatusCode::invalid_argument, fmt::format("--tokens {}: {} to {}, which the text has",
                                                                options.tokens, kPageTokens, text.size()));
    }
    CaptureOptions wish;
    wish.window = int32_t(std::min<int64_t>(options.window, options.tokens));
    wish.threads = options.threads;
    wish.query = true;
    if (options.layer >= 0) wish.layers = {options.layer};
    ChannelSums sums;
    for (int64_t first = 0; first + kPageTokens <= options.tokens;
         first += wish.window) { // one window's rows at a time
        wish.tokens = std::min<int64_t>(wish.window, options.tokens - first);
        const auto part = [&](const std::string& what, double share) {
            if (progress) progress(what, (double(first) + share * double(wish.tokens)) / double(options.tokens));
        };
        const auto begin = text.begin() + first;
        Result<Capture> seen = capture(model, {begin, begin + wish.tokens}, wish, part);
        if (!seen) return seen.status();
        sums.add(*seen);
    }
    return sums.means();
}

Result<HeatMap> heat_map(const Capture& seen, int32_t layer, int32_t kv_head, const std::vector<std::string>& specs) {
    const std::vector<int64_t> pages = pages_of(seen);
    HeatMap out;
    out.layer = layer, out.kv_head = kv_head, out.rows = seen.rows;
    std::vector<double> sums(size_t(seen.shape.layers[size_t(layer)].key_dim), 0.0);
    int64_t count = 0;
    for (const int64_t page : pages) {
        out.range.push_back(ranges(seen, layer, kv_head, page));
        count += add_queries(seen, layer, kv_head, page, page + kPageTokens, &sums);
        out.query.push_back(sums);
        for (double& q : out.query.back())
            q /= double(count);
        out.salience.push_back(out.range.back());
        for (size_t c = 0; c < sums.size(); ++c)
            out.salience.back()[c] *= out.query.back()[c];
    }
    for (const std::string& spec : specs) {
        Result<std::unique_ptr<Cache>> made = Cache::create(seen.shape, spec);
        if (!made) return made.status();
        Cache& cache = **made;
        if (Status bad = fill(cache, seen, layer); !bad) return bad;
        HeatMap::Tiers tiers{spec, {}};
        bool differ = false;
        for (int64_t i = 0; i < cache.packed_rows(0, layer, Side::key) / kPageTokens; ++i) {
            std::vector<double> bits =
                bits_of(cache.page(0, layer, kv_head, Side::key, i), cache.plan(0, layer, kv_head, Side::key));
            if (bits.empty()) break;
            differ = differ || std::any_of(bits.begin(), bits.end(), [&](double b) { return b != bits[0]; });
            tiers.bits.push_back(std::move(bits));
        }
        if (differ) out.caches.push_back(std::move(tiers));
    }
    return out;
}

std::pair<int32_t, int32_t> telling_head(const std::vector<LayerChannels>& layers) {
    std::pair<int32_t, int32_t> out{0, 0};
    double lowest = std::numeric_limits<double>::infinity();
    for (const LayerChannels& layer : layers) {
        for (size_t h = 0; h < layer.heads.size(); ++h) {
            if (!(layer.heads[h].spearman < lowest)) continue;
            lowest = layer.heads[h].spearman;
            out = {layer.layer, int32_t(h)};
        }
    }
    return out;
}

} // namespace kvmosaic::eval
