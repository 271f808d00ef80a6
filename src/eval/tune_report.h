// What came out of a search, as people and programs read it: the front, the defaults beside it, and whether what led
// on the search's text still leads on another.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval/pareto.h"
#include "eval/study.h"

namespace kvmosaic::eval {

// One setting against another on the same positions or problems. KL counts as different beyond two standard errors of
// the pairs, bits beyond a hundredth; of answers the one with more right ones is better, and p says how sure that is.
enum class Verdict { leads, level, trades, trails };
const char* name_of(Verdict verdict);
struct Against {
    double bits = 0, kl = 0, kl_error = 0; // differences
    int64_t lost = 0, won = 0;             // problems that only the other, only the one has right
    double p = 1;                          // of that split
    Verdict verdict = Verdict::level;
};
Against against(const Measured& one, const Measured& other, Objective objective = Objective::kl);

struct TuneResult {
    std::vector<size_t> trials;   // of the study: all settings, without the floor and the f16 cache
    std::vector<size_t> front;    // of the study, by bits
    std::vector<size_t> defaults; // of the study
    size_t knee = 0, chosen = 0;  // of the study
    bool kept = true;             // whether the chosen one keeps to the wish
};
// At most one of the wishes; without one the knee is chosen.
TuneResult result_of(const Study& study, std::optional<double> bits, std::optional<double> kl);

// `elsewhere`: id of a text or of problems that the front was measured on again and its name; empty for none.
struct Elsewhere {
    std::string id, name, sha256;
    int32_t windows = 0, first = 0, questions = 0; // windows of a text, or which problems of a file
};
nlohmann::ordered_json to_json(const Study& study, const TuneResult& result, const Elsewhere& elsewhere);
std::string to_table(const Study& study, const TuneResult& result);
// Table of the front on the other text, then a sentence for each default.
std::string elsewhere_table(const Study& study, const TuneResult& result, const Elsewhere& elsewhere);
// What a reader must know: a floor too high.
std::vector<std::string> warnings(const Study& study, const TuneResult& result);

} // namespace kvmosaic::eval
