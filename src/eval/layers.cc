#include "eval/layers.h"

#include <algorithm>

#include <fmt/format.h>

namespace kvmosaic::eval {

std::vector<Row> plan_layers(const std::vector<std::string>& specs, const ModelShape& shape) {
    std::vector<Row> rows;
    for (const Row& whole : plan_rows(specs)) {
        if (whole.canonical == "f16") continue; // and the floor
        for (size_t layer = 0; layer < shape.layers.size(); ++layer) {
            if (!shape.layers[layer].has_kv()) continue;
            rows.push_back(whole);
            rows.back().layer = int32_t(layer);
        }
    }
    return rows;
}

Status compare_layers(const Model& model, const std::vector<std::vector<int32_t>>& texts, const CompareOptions& options,
                      std::vector<Row>* rows, const std::function<Status()>& landed, const Progress& progress) {
    constexpr size_t kTogether = 8; // each has a context of its own
    std::vector<size_t> open;
    for (size_t r = 0; r < rows->size(); ++r)
        if (int32_t((*rows)[r].windows.size()) < options.all_windows()) open.push_back(r);
    for (size_t first = 0; first < open.size(); first += kTogether) {
        const size_t n = std::min(kTogether, open.size() - first);
        std::vector<Row> handful{plan_rows({}).front()};
        for (size_t i = 0; i < n; ++i)
            handful.push_back((*rows)[open[first + i]]);
        const auto keep = [&]() -> Status {
            for (size_t i = 0; i < n; ++i)
                (*rows)[open[first + i]] = handful[i + 1];
            return landed();
        };
        const auto part = [&](const std::string&, double share) {
            const Row& row = (*rows)[open[first]];
            if (progress) {
                progress(fmt::format("{}, from layer {}", row.spec, row.layer),
                         (double(first) + share * double(n)) / double(open.size()));
            }
        };
        if (Status bad = compare(model, texts, options, &handful, keep, part); !bad) return bad;
    }
    return {};
}

} // namespace kvmosaic::eval
