// Results of `compare` as one page for people: tables and plots, nothing from elsewhere, readable on paper.
#pragma once

#include <string>
#include <vector>

#include "eval/plots.h"

namespace kvmosaic::eval {

// A result as it was read from a file: ok, or what a page would need and this is without.
Status check_result(const Json& result);

// Results that were measured alike (model, weights, texts, windows, steps) become one: the rows of all, the first where
// two mean the same cache. The order of results and rows stays.
std::vector<Json> join_results(const std::vector<Json>& results);

// Model and texts in a few words.
std::string result_name(const Json& result);

// Of joined results. Draws with gnuplot.
Result<std::string> html_report(const std::vector<Json>& results);

} // namespace kvmosaic::eval
