#include "eval/tune_layers.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "eval/cluster.h"

namespace kvmosaic::eval {

namespace {

// All pairs of the published widths; pruning leaves those worth having.
const std::vector<WidthPair>& all_pairs() {
    static const std::vector<WidthPair> pairs{{8, 8}, {8, 4}, {4, 8}, {8, 2}, {2, 8}, {4, 4}, {4, 2}, {2, 4}, {2, 2}};
    return pairs;
}

// "0-2,5"
std::string numbers_text(const std::vector<int32_t>& numbers) {
    std::string out;
    for (size_t i = 0; i < numbers.size();) {
        size_t end = i;
        while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1)
            ++end;
        out += out.empty() ? "" : ",";
        out += i == end ? fmt::format("{}", numbers[i]) : fmt::format("{}-{}", numbers[i], numbers[end]);
        i = end + 1;
    }
    return out;
}

} // namespace

std::vector<std::vector<size_t>> clusters_of_layers(const std::vector<LayerSensitivity>& layers, int32_t groups) {
    std::map<std::vector<size_t>, std::vector<size_t>> sets; // layers by their pairs
    for (size_t i = 0; i < layers.size(); ++i)
        sets[layers[i].front].push_back(i);
    std::map<std::vector<size_t>, int32_t> counts;
    int32_t all = 0;
    for (const auto& [front, members] : sets)
        counts[front] = 1, ++all;
    while (all < groups) { // one more for the set with the most layers a cluster
        const std::vector<size_t>* most = nullptr;
        double size = 1;
        for (const auto& [front, members] : sets) {
            const double own = double(members.size()) / counts[front];
            if (own > size) most = &front, size = own;
        }
        if (!most) break;
        ++counts[*most], ++all;
    }
    std::vector<std::vector<size_t>> out;
    for (const auto& [front, members] : sets) {
        std::vector<float> a, b;
        for (const size_t i : members) {
            const auto height = [&](size_t p) { return float(std::log(std::max(layers[i].errors[p], 1e-30))); };
            a.push_back(height(front.front()));
            b.push_back(height(front[front.size() / 2]));
        }
        const std::vector<int32_t> own = clusters_of(a, b, counts[front]);
        const size_t first = out.size();
        out.resize(first + size_t(counts[front]));
        for (size_t i = 0; i < members.size(); ++i)
            out[first + size_t(own[i])].push_back(members[i]);
    }
    std::sort(out.begin(), out.end());
    return out;
}

LayerSpace layer_space(const Capture& seen, int32_t groups, bool token_base, const Progress& progress) {
    const std::vector<WidthPair>& pairs = all_pairs();
    const std::vector<LayerSensitivity> layers = sensitivity(seen, pairs, token_base, progress);
    LayerSpace out;
    out.shape = seen.shape;
    for (const std::vector<size_t>& cluster : clusters_of_layers(layers, groups)) {
        Tunable t;
        for (const size_t i : cluster)
            t.layers.push_back(layers[i].layer);
        t.name = fmt::format("{} {}", t.layers.size() == 1 ? "layer" : "layers", numbers_text(t.layers));
        for (const size_t p : layers[cluster.front()].front)
            t.choices.push_back(text_of(pairs[p]));
        out.space.push_back(std::move(t));
    }
    // As `calibrate` does it: the same errors, of the published pairs alone.
    std::vector<LayerSensitivity> few = layers;
    const std::vector<WidthPair>& published = published_pairs();
    for (LayerSensitivity& l : few) {
        const std::vector<double> errors = std::exchange(l.errors, {});
        l.front.clear();
        for (const WidthPair& pair : published)
            l.errors.push_back(errors[size_t(std::find(pairs.begin(), pairs.end(), pair) - pairs.begin())]);
        for (size_t p = published.size(); p-- > 0;)
            if (l.front.empty() || l.errors[p] < l.errors[l.front.back()]) l.front.push_back(p);
    }
    const std::vector<size_t> at = widths_under(few, published, CalibrateOptions().bits);
    for (size_t i = 0; i < few.size(); ++i)
        out.descent.push_back(published[few[i].front[at[i]]]);
    return out;
}

std::vector<WidthPair> widths_of(const std::vector<Tunable>& space, const std::vector<std::string>& values) {
    std::map<int32_t, WidthPair> by_layer;
    for (size_t i = 0; i < space.size(); ++i) {
        const WidthPair pair{values[i][0] - '0', values[i][2] - '0'};
        for (const int32_t layer : space[i].layers)
            by_layer[layer] = pair;
    }
    std::vector<WidthPair> out;
    for (const auto& [layer, pair] : by_layer)
        out.push_back(pair);
    return out;
}

std::string text_of(const WidthPair& pair) { return fmt::format("{}/{}", pair.key, pair.value); }

std::string text_of(const std::vector<WidthPair>& widths) {
    std::string out;
    for (size_t i = 0; i < widths.size();) {
        size_t end = i;
        while (end < widths.size() && widths[end] == widths[i])
            ++end;
        out += out.empty() ? "" : ", ";
        out += end - i == 1 ? text_of(widths[i]) : fmt::format("{} x{}", text_of(widths[i]), end - i);
        i = end;
    }
    return out;
}

Calibration calibration_of(const ModelShape& shape, const std::vector<WidthPair>& widths, bool token_base) {
    Calibration out;
    out.method = "kvtuner";
    out.describe(shape);
    out.add("base", -1, -1, Side::key, {token_base ? 1.0f : 0.0f});
    size_t at = 0;
    for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
        if (!shape.layers[size_t(layer)].has_kv()) continue;
        const WidthPair& pair = widths[at++];
        out.add("bits", layer, -1, Side::key, {float(pair.key), float(pair.value)});
    }
    return out;
}

} // namespace kvmosaic::eval
