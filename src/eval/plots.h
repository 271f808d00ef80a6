// The plots of a report, as SVG, from results as docs/json.md describes them. A plot whose numbers a result does not
// have comes out empty.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

using Json = nlohmann::ordered_json;

// A field as text, empty where it is none.
std::string text_of(const Json& j, const char* field);
// A result's caches: all rows but `f16` and `floor`, whose numbers are there.
std::vector<Json> caches_of(const Json& result);
// Whether no other of these rows has as few bits and as little KL, and one of the two less.
std::vector<bool> on_front(const std::vector<Json>& rows);
// A spec that fits into `most` characters: without the path of a calibration file, cut in the middle if it must be.
std::string short_spec(const std::string& spec, size_t most);

// True bits against mean KL. `names` of the results where there are several; `name` is that of the element.
Result<std::string> pareto_plot(const std::string& name, const std::vector<Json>& results,
                                const std::vector<std::string>& names);
Result<std::string> position_plot(const std::string& name, const Json& result);
Result<std::string> layer_plot(const std::string& name, const Json& result);
Result<std::string> length_plot(const std::string& name, const Json& result);
Result<std::string> memory_plot(const std::string& name, const Json& result);
Result<std::string> heat_plot(const std::string& name, const Json& heat);

// How many caches the plots with a line for each of them show; those on the front first.
inline constexpr size_t kMostLines = 8;

} // namespace kvmosaic::eval
