// What `tune` may change of a method, and over which range. The one place where that is written is the table in
// tunables.cc; methods know nothing of it.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvmosaic/method.h"

namespace kvmosaic::eval {

// One thing that is tuned. A value of it is text, as it stands in a spec.
struct Tunable {
    std::string name;                   // option of the method; kvtuner: "layers 0,3-5"
    std::vector<std::string> choices;   // or, where there are none, numbers:
    double low = 0, high = 0, step = 0; // step 0: any
    bool log = false;                   // spread by ratios and not by differences
    bool by_head = false;               // low and high are still to be multiplied by the root of the head size
    std::vector<int32_t> layers;        // kvtuner: those that take this pair of widths

    // A number as a spec gets it: within the range, at a step, four digits.
    std::string text(double x) const;
    // From JSON, a number or a choice; an error names the range.
    Result<std::string> value(const nlohmann::ordered_json& j) const;
    std::string allowed() const; // "0.8 to 16", "2, 3 or 4"
    bool has(const std::string& value) const;
};

nlohmann::ordered_json to_json(const std::vector<Tunable>& space);
std::vector<Tunable> space_from(const nlohmann::ordered_json& j); // throws what the JSON library throws

struct TuneWish {
    std::string method;              // a spec; what it fixes is not tuned
    std::vector<std::string> tune;   // names; empty: what the table says is usual, less what is fixed
    std::vector<std::string> ranges; // NAME=LOW..HIGH, or NAME=A,B,C for choices
};

// A method with what is fixed and what is tuned of it.
struct TunedMethod {
    const MethodInfo* info = nullptr;
    OptionValues fixed; // and defaults
    std::vector<Tunable> space;
    bool by_layer() const { return info->name == "kvtuner"; } // then `space` comes from the model (tune_layers.h)

    std::string spec() const; // with what is fixed alone: the method's defaults
    std::string spec(const std::vector<Tunable>& space, const std::vector<std::string>& values) const;
    // The defaults as values of the space; empty where one of them lies outside.
    std::vector<std::string> defaults() const;
    void fit_to(int32_t head_dim); // turns ranges that are by head into numbers
};
Result<TunedMethod> tuned_method(const TuneWish& wish);

// Names of the methods that have something to tune.
std::vector<std::string> tunable_methods();

// At most `most` points, the same number on every side as far as that goes, ends included.
std::vector<std::vector<std::string>> grid_of(const std::vector<Tunable>& space, int32_t most);

} // namespace kvmosaic::eval
