// Results as people and programs read them: the table, the JSON of docs/json.md, and the file that lets an interrupted
// comparison go on.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval/channels.h"
#include "eval/compare.h"

namespace kvmosaic::eval {

// What a comparison was made of; two results with equal heads may be joined.
struct CompareHead {
    std::string model, model_sha256, weights, machine, version, commit, command;
    std::vector<std::string> texts, texts_sha256; // windows of each: options.windows
    CompareOptions options;
};

// Parts of a window for which the KL of each row is told.
inline constexpr int32_t kPositionParts = 16;
nlohmann::ordered_json number_json(double x); // null for what has no form in JSON
nlohmann::ordered_json to_json(const CompareHead& head, const std::vector<Row>& rows);
// Fields `layers` and `heat` of the same document. `rows` as plan_layers orders them; `head`: what the map is of.
nlohmann::ordered_json layers_json(const CompareOptions& options, const std::vector<Row>& rows);
nlohmann::ordered_json heat_json(const HeatMap& map, const HeadChannels& head);
std::string to_table(const std::vector<Row>& rows);

// Sentences on what the reader must know: a floor too high to trust a row, non-finite values.
std::vector<std::string> warnings(const std::vector<Row>& rows);

// ---- progress of an interrupted comparison ----
Status save_progress(const std::string& path, const CompareHead& head, const std::vector<Row>& rows);
// Puts finished windows of rows that have the same meaning into `rows`. A file of another comparison is refused by
// the field that differs; no file is no progress.
Status load_progress(const std::string& path, const CompareHead& head, std::vector<Row>* rows);

} // namespace kvmosaic::eval
