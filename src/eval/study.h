// The file of a search: what it is of, and every setting that was measured, so that a search that was stopped goes on.
// JSON lines; the first is the head. Written anew as each result lands.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval/calibrate.h"
#include "eval/compare.h"

namespace kvmosaic::eval {

// What one cache did on one text.
struct Measured {
    std::string text;                 // which text and windows (text_id)
    int64_t tokens = 0;               // scored; 0 where there are answers only
    double bits = 0, bits_window = 0; // true bits at the study's context, and at the end of a window
    double kl = 0, kl_error = 0, kl_p99 = 0, ppl_ratio = 0, ppl_ratio_error = 0, top1 = 0;
    std::vector<float> kl_each; // of each scored position: two settings are compared by pairs
    std::vector<uint8_t> right; // of each problem, where the search is for right answers: whether its answer is
    double accuracy() const;    // share of right answers
    std::string path, isa;
};
nlohmann::ordered_json to_json(const Measured& m); // without the positions

nlohmann::ordered_json to_json(const std::vector<WidthPair>& widths);
std::vector<WidthPair> widths_from(const nlohmann::ordered_json& j); // throws what the JSON library throws

struct Trial {
    std::string label;               // of a default; empty for what the search tried
    std::vector<std::string> values; // of the study's space; empty for a default outside of it
    std::vector<WidthPair> widths;   // kvtuner: of the layers with K/V
    std::string spec;                // kvtuner: without its file
    Measured search;
    std::vector<Measured> elsewhere; // on texts that the search did not see
    const Measured* on(const std::string& text) const;
};

// Rows that are no settings: the rounding of the model (the f32 cache against the f16 one), and where answers count the
// f16 cache itself.
inline constexpr const char* kFloorLabel = "floor";
inline constexpr const char* kReferenceLabel = "f16";
inline bool is_setting(const Trial& t) { return t.label != kFloorLabel && t.label != kReferenceLabel; }

// What a search makes small beside the bits: KL, or the share of problems whose answer is wrong.
enum class Objective : uint8_t { kl, gsm8k };

struct Study {
    std::string path;
    nlohmann::ordered_json head;
    std::vector<Trial> trials;
    Objective objective() const;
    double loss(const Measured& m) const;
    Status save() const;
};

// What a trial looks like where people read it: "hi=9.3,mid=1.2", or widths.
std::string name_of(const Trial& trial, const nlohmann::ordered_json& head);

// A file that exists is continued if its head agrees with `head` in each of `fields`; a file of something else is
// refused by the field. Otherwise the study begins with this head; nothing is written yet.
Result<Study> open_study(const std::string& path, const nlohmann::ordered_json& head,
                         const std::vector<std::string>& fields);

} // namespace kvmosaic::eval
