// Comparisons at matched bits: of every method the setting that is nearest to a budget of true bits at a stated
// context, and how far from it each of them lies.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval/compare.h"
#include "eval/settings.h"

namespace kvmosaic::eval {

struct MatchWish {
    std::vector<double> budgets;      // true bits a value
    std::vector<std::string> methods; // names, or specs whose options hold in all settings; empty: free_methods()
    int64_t context = 0;              // tokens; 0: kMatchContext, or what the model was trained for where that is less
};
inline constexpr int64_t kMatchContext = 32768;
inline constexpr double kMatchWithin = 0.25; // bits; a setting farther from the budget is named, and not compared

struct MatchedSetting {
    SizedSetting setting;
    double budget = 0;
    double residual() const { return setting.bits - budget; }
    bool near() const;
};
// The setting whose bits are nearest to the budget; of those that are equally near, by two hundredths, the first of the
// table. `sized` are those of one method, at least one.
MatchedSetting nearest_setting(const std::vector<SizedSetting>& sized, double budget);

struct Matched {
    int64_t context = 0;
    std::vector<MatchedSetting> settings;   // by budgets, then methods; also those that are not near
    std::vector<std::string> specs() const; // of those that are, each once
};
// Appends those of `more` that mean what none of `specs` means.
void add_specs(const std::vector<std::string>& more, std::vector<std::string>* specs);

// Before anything is loaded: ok, or what is wrong.
Status validate(const MatchWish& wish);
Result<Matched> match_bits(const Model& model, const MatchWish& wish, int32_t threads, const Progress& progress);

// What was measured beside the budgets: bits as the rows' own pages have them, where these were seen.
std::string to_table(const Matched& matched, const std::vector<Row>& rows);
nlohmann::ordered_json to_json(const Matched& matched, const std::vector<Row>& rows);

} // namespace kvmosaic::eval
