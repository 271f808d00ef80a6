#include "eval/calibrate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "eval/cluster.h"
#include "eval/metrics.h"
#include "kvmosaic/transform.h"

namespace kvmosaic::eval {

namespace {

// Percentiles beyond which a key is an outlier, each side (released code of KVQuant: 1 - (1 - 0.99) / 2).
constexpr double kUpper = 0.995, kLower = 1.0 - kUpper;
constexpr double kOutliers = 0.01; // share of a token's values that are left out of its range

// The layers with K/V, with a progress report for each.
template <typename F>
Status each_layer(const Capture& seen, const Progress& progress, const F& f) {
    for (int32_t layer = 0; layer < int32_t(seen.shape.layers.size()); ++layer) {
        if (progress) progress(fmt::format("layer {}", layer), double(layer) / double(seen.shape.layers.size()));
        if (!seen.shape.layers[size_t(layer)].has_kv()) continue;
        if (Status bad = f(layer, seen.shape.layers[size_t(layer)], seen.layers[size_t(layer)]); !bad) return bad;
    }
    return {};
}

Status needs_rotation(const Capture& seen, const std::string& method) {
    for (size_t il = 0; il < seen.shape.layers.size(); ++il) {
        const LayerShape& l = seen.shape.layers[il];
        if (!l.has_kv() || l.rope.known) continue;
        return {StatusCode::unsupported,
                fmt::format("{} packs keys from before their rotation, and the keys of layer {} "
                            "of this model ('{}') are not plainly rotated",
                            method, il, seen.shape.name)};
    }
    return {};
}

// rows [n][width]: the values of one channel.
std::vector<float> channel(const std::vector<float>& rows, int64_t width, int64_t c) {
    std::vector<float> out(rows.size() / size_t(width));
    for (size_t i = 0; i < out.size(); ++i)
        out[i] = rows[i * size_t(width) + size_t(c)];
    return out;
}

void add_books(std::vector<float> values, int32_t layer, Side side, Calibration* out) {
    for (const int32_t bits : {2, 3, 4})
        out->add(fmt::format("book{}", bits), layer, -1, side, levels_of(values, 1 << bits));
}

// Values of each token and head scaled to [-1, 1] as the store does it, the extremes in turn left out.
std::vector<float> scaled_values(const std::vector<float>& rows, int64_t dim) {
    std::vector<float> out;
    out.reserve(rows.size());
    const int64_t left_out = std::max(1L, std::lround(kOutliers * double(dim)));
    std::vector<float> token(static_cast<size_t>(dim));
    for (size_t at = 0; at < rows.size(); at += size_t(dim)) {
        std::copy_n(rows.begin() + int64_t(at), dim, token.begin());
        std::sort(token.begin(), token.end());
        const int64_t high = (left_out + 1) / 2, low = left_out - high; // the largest first
        if (dim - high <= low) continue;
        const float bottom = token[size_t(low)], top = token[size_t(dim - high - 1)];
        const float middle = 0.5f * top + 0.5f * bottom, half = 0.5f * top - 0.5f * bottom;
        if (!(half > 0)) continue;
        for (int64_t i = low; i < dim - high; ++i)
            out.push_back((token[size_t(i)] - middle) / half);
    }
    return out;
}

// Channels ordered cluster by cluster, narrow ranges first, and where each cluster begins.
void add_clusters(const std::vector<float>& rows, int64_t width, int64_t first, int64_t count, int32_t group,
                  const std::string& suffix, int32_t layer, int32_t head, Side side, Calibration* out) {
    std::vector<float> low(size_t(count), INFINITY), high(size_t(count), -INFINITY);
    for (size_t at = 0; at < rows.size(); at += size_t(width)) {
        for (int64_t c = 0; c < count; ++c) {
            const float x = rows[at + size_t(first + c)];
            low[size_t(c)] = std::min(low[size_t(c)], x);
            high[size_t(c)] = std::max(high[size_t(c)], x);
        }
    }
    const int32_t clusters = std::max<int32_t>(1, int32_t(count / group));
    const std::vector<int32_t> own = clusters_of(low, high, clusters);
    std::vector<double> range(size_t(clusters), 0), size(size_t(clusters), 0);
    for (size_t c = 0; c < own.size(); ++c) {
        range[size_t(own[c])] += double(high[c]) - double(low[c]);
        size[size_t(own[c])] += 1;
    }
    std::vector<int32_t> by_range(static_cast<size_t>(clusters));
    std::iota(by_range.begin(), by_range.end(), 0);
    const auto mean = [&](int32_t k) { return range[size_t(k)] / size[size_t(k)]; };
    std::stable_sort(by_range.begin(), by_range.end(), [&](int32_t a, int32_t b) { return mean(a) < mean(b); });
    std::vector<float> order, edges{0};
    for (const int32_t k : by_range) {
        for (size_t c = 0; c < own.size(); ++c) {
            if (own[c] == k) order.push_back(float(c));
        }
        edges.push_back(float(order.size()));
    }
    out->add("order" + suffix, layer, head, side, std::move(order));
    out->add("edges" + suffix, layer, head, side, std::move(edges));
}

} // namespace

Status calibrate_kvquant(const Capture& seen, const Progress& progress, Calibration* out) {
    if (Status bad = needs_rotation(seen, "kvquant"); !bad) return bad;
    return each_layer(seen, progress, [&](int32_t layer, const LayerShape& l, const CapturedLayer& rows) -> Status {
        const std::vector<float> keys = seen.keys_before_rotation(layer);
        std::vector<float> inside; // normalized keys of all heads, without outliers
        inside.reserve(keys.size());
        for (int32_t head = 0; head < l.kv_heads; ++head) {
            std::vector<float> shift, scale;
            for (int32_t c = 0; c < l.key_dim; ++c) {
                const std::vector<float> own =
                    channel(keys, int64_t(l.kv_heads) * l.key_dim, int64_t(head) * l.key_dim + c);
                const double upper = quantile(own, kUpper), lower = quantile(own, kLower);
                shift.push_back(float((upper + lower) / 2));
                scale.push_back(upper > lower ? float((upper - lower) / 2) : 1.0f);
                for (const float x : own) {
                    const float y = (x - shift.back()) / scale.back();
                    if (std::fabs(y) <= 1) inside.push_back(y);
                }
            }
            out->add("shift", layer, head, Side::key, std::move(shift));
            out->add("scale", layer, head, Side::key, std::move(scale));
        }
        add_books(std::move(inside), layer, Side::key, out);
        add_books(scaled_values(rows.v, l.value_dim), layer, Side::value, out);
        return {};
    });
}

Status calibrate_rotatekv(const Capture& seen, const Progress& progress, Calibration* out) {
    if (Status bad = needs_rotation(seen, "rotatekv"); !bad) return bad;
    return each_layer(seen, progress, [&](int32_t layer, const LayerShape& l, const CapturedLayer&) -> Status {
        const int32_t width = l.kv_heads * l.key_dim;
        Transform rotation;
        rotation.joined = l.kv_heads;
        rotation.hadamard = l.key_dim * (l.kv_heads % 4 == 0 ? 4 : l.kv_heads % 2 == 0 ? 2 : 1);
        std::vector<float> keys = seen.keys_before_rotation(layer), scratch(static_cast<size_t>(width));
        std::vector<double> sums(size_t(width), 0.0);
        for (int64_t row = 0; row < seen.rows; ++row) {
            float* key = keys.data() + row * width;
            rotation.forward(key, width, scratch.data());
            for (int32_t c = 0; c < width; ++c)
                sums[size_t(c)] += double(key[c]);
        }
        std::vector<int32_t> order(static_cast<size_t>(width));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return sums[size_t(a)] < sums[size_t(b)]; });
        out->add("order", layer, -1, Side::key, std::vector<float>(order.begin(), order.end()));
        return {};
    });
}

Status calibrate_skvq(const Capture& seen, const Progress& progress, Calibration* out) {
    return each_layer(seen, progress, [&](int32_t layer, const LayerShape& l, const CapturedLayer& rows) -> Status {
        for (const Side side : {Side::key, Side::value}) {
            const std::vector<float>& x = side == Side::key ? rows.k : rows.v;
            const int64_t dim = l.dim(side), width = dim * l.kv_heads;
            for (const int32_t group : {32, 64, 128}) {
                const std::string suffix = std::to_string(group);
                for (int32_t head = 0; head < l.kv_heads; ++head)
                    add_clusters(x, width, head * dim, dim, group, suffix, layer, head, side, out);
                add_clusters(x, width, 0, width, group, suffix + "x", layer, -1, side, out);
            }
        }
        return {};
    });
}

const std::vector<std::string>& calibrated_methods() {
    static const std::vector<std::string> names{"kvquant", "rotatekv", "skvq", "kvtuner"};
    return names;
}

Status validate(const CalibrateOptions& o) {
    const auto& names = calibrated_methods();
    if (std::find(names.begin(), names.end(), o.method) == names.end()) {
        return {StatusCode::invalid_argument, fmt::format("--method {}: one of {}; other methods need no calibration",
                                                          o.method, fmt::join(names, ", "))};
    }
    if (!(o.bits >= 2 && o.bits <= 8)) {
        return {StatusCode::invalid_argument, fmt::format("--bits {}: 2 to 8", o.bits)};
    }
    return {};
}

Result<Calibration> calibrate(const Model& model, const std::vector<int32_t>& text, const CalibrateOptions& options,
                              const Progress& progress) {
    if (Status bad = validate(options); !bad) return bad;
    CaptureOptions wish;
    wish.tokens = options.tokens;
    wish.window = options.window;
    wish.threads = options.threads;
    wish.query = options.method == "kvtuner";
    // Rows that a method keeps raw at a sequence's start are never packed; their extremes would widen every range.
    wish.skip = options.method == "skvq" ? 5 : options.method == "kvquant" ? 1 : 0;
    Result<Capture> seen = capture(model, text, wish, progress);
    if (!seen) return seen.status();
    Calibration out;
    out.method = options.method;
    out.describe(seen->shape);
    out.tokens = options.tokens;
    out.text = options.text;
    const Status status = options.method == "kvquant"    ? calibrate_kvquant(*seen, progress, &out)
                          : options.method == "rotatekv" ? calibrate_rotatekv(*seen, progress, &out)
                          : options.method == "skvq"     ? calibrate_skvq(*seen, progress, &out)
                                                         : calibrate_kvtuner(*seen, options, progress, &out);
    if (!status) return status;
    return out;
}

} // namespace kvmosaic::eval
