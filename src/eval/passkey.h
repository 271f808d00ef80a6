// Can a model still find what it read? A five-digit key is hidden in filler text at a chosen depth, the question stands
// at the end, and the answer is decoded greedily. The text is made here, so nothing of it was in a training set.
#pragma once

#include <string>
#include <vector>

#include "eval/engine.h"

namespace kvmosaic::eval {

struct PasskeyOptions {
    std::vector<std::string> specs;                // f16 is always measured beside them
    std::vector<int32_t> lengths{512, 1024, 2048}; // tokens of a prompt, question included
    std::vector<double> depths{0.1, 0.5, 0.9};     // 0: at the start of the filler, 1: just before the question
    int32_t trials = 5;                            // keys and texts for each length and depth
    uint32_t seed = 1;
    int32_t batch = 4; // prompts under way at once
    int32_t ubatch = 128;
    int32_t threads = 0;
};

// One prompt and what is hidden in it. The same for every cache.
struct PasskeyTask {
    int32_t length = 0, trial = 0;
    double depth = 0;
    std::string key; // five digits, the first not 0
    std::vector<int32_t> tokens;
};
// Fails where `length` has no room for key and question.
Result<PasskeyTask> make_passkey(const Model& model, int32_t length, double depth, int32_t trial, uint32_t seed);

// Whether a run of digits in `answer` is the key, digit for digit: "123456" does not hold "12345".
bool holds_key(const std::string& answer, const std::string& key);

struct PasskeyResult {
    std::string spec, canonical; // as asked for, and without defaults
    int32_t length = 0, trial = 0, tokens = 0;
    double depth = 0;
    std::string key, answer;
    bool hit = false;
    double bits = 0; // true bits when the answer was there
    int64_t cache_bytes = 0;
    std::string path, isa;
};

Status validate(const PasskeyOptions& options, int32_t trained_context);

// Fills in what `results` does not have yet; `landed` is called for each new one, and may store it.
Status passkey(const Model& model, const PasskeyOptions& options, std::vector<PasskeyResult>* results,
               const std::function<Status(const PasskeyResult&)>& landed, const Progress& progress);

} // namespace kvmosaic::eval
