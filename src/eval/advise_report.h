// An advice as people and programs read it.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval/advise.h"
#include "eval/results.h"

namespace kvmosaic::eval {

struct AdviceReport {
    std::string wanted; // the model as it was named
    AdviseWish wish;
    int64_t asked_context = 0; // 0: none was asked for
    int32_t trained = 0;
    ContextMemory beside;
    SizedSetting f16;
    Advice advice;
    CompareHead head;      // of what was measured; its model, version and machine are always there
    std::vector<Row> rows; // f16, floor, then the picks; empty: nothing was measured

    bool measured() const { return !rows.empty(); }
    RowSummary summary(const std::string& spec) const; // of what was measured
    std::string run_line() const;
    std::string measure_line() const;
};

std::string to_text(const AdviceReport& report);
nlohmann::ordered_json to_json(const AdviceReport& report);

} // namespace kvmosaic::eval
