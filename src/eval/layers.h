// KL by layer: each cache in one layer at a time, an f16 cache in the others.
#pragma once

#include <string>
#include <vector>

#include "eval/compare.h"

namespace kvmosaic::eval {

// A row for each spec and each layer that keeps K/V, spec by spec; f16 has none.
std::vector<Row> plan_layers(const std::vector<std::string>& specs, const ModelShape& shape);

// Fills the windows that `rows` do not have yet. A few rows run together beside the reference, which is run again for
// each such handful; so the cost is 9/8 of a pass over the windows for each row.
Status compare_layers(const Model& model, const std::vector<std::vector<int32_t>>& texts, const CompareOptions& options,
                      std::vector<Row>* rows, const std::function<Status()>& landed, const Progress& progress);

} // namespace kvmosaic::eval
