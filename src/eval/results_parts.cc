// JSON of what a comparison may have beside its rows: KL by layer, channels of a head.
#include <string>

#include <fmt/format.h>

#include "eval/results.h"

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

// Plots need no more digits, and matrices are long.
ordered_json short_json(const HeatMap::Matrix& rows) {
    ordered_json out = ordered_json::array();
    for (const std::vector<double>& row : rows) {
        ordered_json line = ordered_json::array();
        for (const double x : row)
            line.push_back(std::stod(fmt::format("{:.4g}", x)));
        out.push_back(std::move(line));
    }
    return out;
}

} // namespace

ordered_json layers_json(const CompareOptions& options, const std::vector<Row>& rows) {
    ordered_json out{{"window", options.window}, {"windows", options.all_windows()}, {"rows", ordered_json::array()}};
    for (const Row& row : rows) {
        ordered_json& list = out["rows"];
        if (list.empty() || list.back()["canonical"] != row.canonical) {
            list.push_back({{"spec", row.spec},
                            {"canonical", row.canonical},
                            {"layers", ordered_json::array()},
                            {"kl", ordered_json::array()},
                            {"kl_error", ordered_json::array()}});
        }
        const RowSummary s = summarize(row, row);
        list.back()["layers"].push_back(row.layer);
        list.back()["kl"].push_back(s.kl_mean);
        list.back()["kl_error"].push_back(s.kl_error);
    }
    return out;
}

ordered_json heat_json(const HeatMap& map, const HeadChannels& head) {
    ordered_json caches = ordered_json::array();
    for (const HeatMap::Tiers& tiers : map.caches)
        caches.push_back({{"spec", tiers.spec}, {"bits", short_json(tiers.bits)}});
    return {{"layer", map.layer},
            {"kv_head", map.kv_head},
            {"tokens", map.rows},
            {"pearson", number_json(head.pearson)},
            {"spearman", number_json(head.spearman)},
            {"range", short_json(map.range)},
            {"query", short_json(map.query)},
            {"salience", short_json(map.salience)},
            {"caches", std::move(caches)}};
}

} // namespace kvmosaic::eval
