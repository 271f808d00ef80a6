// KVTuner's sensitivity of layers (arXiv 2502.04420): the error of a layer's attention output under each pair of
// widths, from real q, k and v, and the pruning inside a layer. `calibrate` then chooses pairs by steepest descent
// under the cap; the paper's search over clusters of layers is eval/tune_layers.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "eval/calibrate.h"

namespace kvmosaic::eval {

namespace {

constexpr int32_t kGroup = 32, kQueries = 48; // rows whose attention is looked at, evenly over each window

// A group of n values at this stride, coded with whole-number offsets and decoded.
void round_trip(float* x, int64_t n, int64_t stride, int32_t bits) {
    float low = x[0], high = x[0];
    for (int64_t i = 1; i < n; ++i) {
        low = std::min(low, x[i * stride]);
        high = std::max(high, x[i * stride]);
    }
    const float top = float((1 << bits) - 1), step = (high - low) / top;
    if (!(step > 0)) return;
    const float zero = std::nearbyint(low / step);
    for (int64_t i = 0; i < n; ++i) {
        float& value = x[i * stride];
        value = (std::clamp(std::nearbyint(value / step) - zero, 0.0f, top) + zero) * step;
    }
}

// rows [n][dim] of one head.
std::vector<float> coded(std::vector<float> rows, int64_t dim, int32_t bits, bool per_channel, bool token_base) {
    const int64_t n = int64_t(rows.size()) / dim;
    if (per_channel) {
        for (int64_t first = 0; first < n; first += kGroup) {
            for (int64_t c = 0; c < dim; ++c)
                round_trip(rows.data() + first * dim + c, std::min<int64_t>(kGroup, n - first), dim, bits);
        }
        return rows;
    }
    const int64_t group = token_base ? dim : kGroup;
    for (int64_t row = 0; row < n; ++row) {
        for (int64_t c = 0; c < dim; c += group)
            round_trip(rows.data() + row * dim + c, std::min(group, dim - c), 1, bits);
    }
    return rows;
}

std::vector<float> head_of(const std::vector<float>& rows, int64_t heads, int64_t dim, int64_t head, int64_t first,
                           int64_t count) {
    std::vector<float> out;
    out.reserve(size_t(count * dim));
    for (int64_t row = first; row < first + count; ++row) {
        const auto at = rows.begin() + (row * heads + head) * dim;
        out.insert(out.end(), at, at + dim);
    }
    return out;
}

// Softmax weights of one query over keys [n][dim].
std::vector<double> weights(const float* q, const std::vector<float>& keys, int64_t dim, int64_t n) {
    std::vector<double> out(static_cast<size_t>(n));
    double most = -INFINITY, sum = 0;
    for (int64_t t = 0; t < n; ++t) {
        float dot = 0;
        for (int64_t c = 0; c < dim; ++c)
            dot += q[c] * keys[size_t(t * dim + c)];
        out[size_t(t)] = double(dot) / std::sqrt(double(dim));
        most = std::max(most, out[size_t(t)]);
    }
    for (double& w : out)
        sum += w = std::exp(w - most);
    for (double& w : out)
        w /= sum;
    return out;
}

std::vector<double> mix(const std::vector<double>& w, const std::vector<float>& values, int64_t dim) {
    std::vector<double> out(size_t(dim), 0.0);
    for (size_t t = 0; t < w.size(); ++t) {
        for (int64_t c = 0; c < dim; ++c)
            out[size_t(c)] += w[t] * double(values[t * size_t(dim) + size_t(c)]);
    }
    return out;
}

double norm(const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x)
        sum += v * v;
    return std::sqrt(sum);
}

// Mean over queries and heads of |o - o'| / |o| for each pair.
std::vector<double> errors_of(const Capture& seen, int32_t layer, const std::vector<WidthPair>& pairs,
                              bool token_base) {
    const LayerShape& l = seen.shape.layers[size_t(layer)];
    const CapturedLayer& rows = seen.layers[size_t(layer)];
    const int64_t heads = l.heads / l.kv_heads;
    std::vector<double> sums(pairs.size(), 0.0);
    int64_t count = 0;
    for (int64_t first = 0; first < seen.rows;) {
        int64_t n = 1;
        while (first + n < seen.rows && seen.positions[size_t(first + n)] > seen.positions[size_t(first + n - 1)])
            ++n;
        for (int32_t g = 0; g < l.kv_heads; ++g) {
            const std::vector<float> k = head_of(rows.k, l.kv_heads, l.key_dim, g, first, n);
            const std::vector<float> v = head_of(rows.v, l.kv_heads, l.value_dim, g, first, n);
            std::array<std::vector<float>, 9> keys, values; // by width
            for (const int32_t bits : {2, 4, 8}) {
                keys[size_t(bits)] = coded(k, l.key_dim, bits, !token_base, token_base);
                values[size_t(bits)] = coded(v, l.value_dim, bits, false, token_base);
            }
            for (int64_t i = 0; i < kQueries; ++i) {
                const int64_t row = std::max<int64_t>(n * (i + 1) / kQueries - 1, 0);
                for (int64_t h = g * heads; h < (g + 1) * heads; ++h) {
                    const float* q = rows.q.data() + ((first + row) * l.heads + h) * l.key_dim;
                    const std::vector<double> exact = mix(weights(q, k, l.key_dim, row + 1), v, l.value_dim);
                    std::array<std::vector<double>, 9> seen_by;
                    for (const int32_t bits : {2, 4, 8})
                        seen_by[size_t(bits)] = weights(q, keys[size_t(bits)], l.key_dim, row + 1);
                    for (size_t p = 0; p < pairs.size(); ++p) {
                        std::vector<double> out =
                            mix(seen_by[size_t(pairs[p].key)], values[size_t(pairs[p].value)], l.value_dim);
                        for (size_t c = 0; c < out.size(); ++c)
                            out[c] -= exact[c];
                        sums[p] += norm(out) / std::max(norm(exact), 1e-30);
                    }
                    ++count;
                }
            }
        }
        first += n;
    }
    for (double& sum : sums)
        sum /= double(std::max<int64_t>(1, count));
    return sums;
}

} // namespace

const std::vector<WidthPair>& published_pairs() {
    static const std::vector<WidthPair> pairs{{8, 8}, {8, 4}, {4, 4}, {4, 2}, {2, 2}};
    return pairs;
}

std::vector<LayerSensitivity> sensitivity(const Capture& seen, const std::vector<WidthPair>& pairs, bool token_base,
                                          const Progress& progress) {
    std::vector<size_t> order(pairs.size()); // from the fewest bits
    std::iota(order.begin(), order.end(), size_t(0));
    std::vector<LayerSensitivity> layers;
    for (int32_t il = 0; il < int32_t(seen.shape.layers.size()); ++il) {
        if (!seen.shape.layers[size_t(il)].has_kv()) continue;
        if (progress) progress(fmt::format("layer {}", il), double(il) / double(seen.shape.layers.size()));
        LayerSensitivity layer{il, errors_of(seen, il, pairs, token_base), {}};
        const auto& errors = layer.errors;
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
            return std::pair(pairs[a].bits(), errors[a]) < std::pair(pairs[b].bits(), errors[b]);
        });
        for (const size_t p : order)
            if (layer.front.empty() || errors[p] < errors[layer.front.back()]) layer.front.push_back(p);
        layers.push_back(std::move(layer));
    }
    return layers;
}

std::vector<size_t> widths_under(const std::vector<LayerSensitivity>& layers, const std::vector<WidthPair>& pairs,
                                 double bits) {
    std::vector<size_t> at(layers.size(), 0);
    double spent = 0;
    const double limit = bits * double(layers.size()) + 1e-9;
    for (const LayerSensitivity& l : layers)
        spent += pairs[l.front[0]].bits();
    while (true) {
        size_t best = layers.size(), best_to = 0;
        double best_gain = 0;
        for (size_t i = 0; i < layers.size(); ++i) {
            const LayerSensitivity& l = layers[i];
            for (size_t to = at[i] + 1; to < l.front.size(); ++to) {
                const double more = pairs[l.front[to]].bits() - pairs[l.front[at[i]]].bits();
                const double gain = (l.errors[l.front[at[i]]] - l.errors[l.front[to]]) / more;
                if (spent + more <= limit && gain > best_gain) best = i, best_gain = gain, best_to = to;
            }
        }
        if (best == layers.size()) return at;
        spent += pairs[layers[best].front[best_to]].bits() - pairs[layers[best].front[at[best]]].bits();
        at[best] = best_to;
    }
}

Status calibrate_kvtuner(const Capture& seen, const CalibrateOptions& options, const Progress& progress,
                         Calibration* out) {
    const std::vector<WidthPair>& pairs = published_pairs();
    const std::vector<LayerSensitivity> layers = sensitivity(seen, pairs, options.token_base, progress);
    const std::vector<size_t> at = widths_under(layers, pairs, options.bits);
    out->add("base", -1, -1, Side::key, {options.token_base ? 1.0f : 0.0f});
    for (size_t i = 0; i < layers.size(); ++i) {
        const LayerSensitivity& l = layers[i];
        const WidthPair& pair = pairs[l.front[at[i]]];
        out->add("bits", l.layer, -1, Side::key, {float(pair.key), float(pair.value)});
        // what was measured, for a reader: the errors of the pairs from 8/8 down to 2/2
        out->add("errors", l.layer, -1, Side::key, std::vector<float>(l.errors.begin(), l.errors.end()));
    }
    return {};
}

} // namespace kvmosaic::eval
