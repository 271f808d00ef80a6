// The fixed part of plans in a saved state: enough to read its pages without the method that made them.
#pragma once

#include <string>
#include <vector>

#include "cache/state_io.h"
#include "kvmosaic/method.h"

namespace kvmosaic::state {

// A plan with the arrays that it otherwise borrows from its method.
struct StoredPlan {
    SidePlan plan;
    std::vector<float> book;
    std::vector<uint16_t> edges;
};
StoredPlan stored(const SidePlan& plan);
void put_plan(Writer* w, const SidePlan& plan);
void get_plan(Reader* r, StoredPlan* into);
// "keep is 128 in the state and 0 here", or "" when they are alike.
std::string plan_gap(const StoredPlan& saved, const SidePlan& here);

} // namespace kvmosaic::state
