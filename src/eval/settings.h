// Settings of every method that a budget may choose from: their published knobs, in one table (settings.cc), and what
// each of them weighs. Methods know nothing of it.
#pragma once

#include <string>
#include <vector>

#include "eval/files.h"
#include "kvmosaic/method.h"

namespace kvmosaic::eval {

struct Setting {
    std::string method, spec; // the spec in canonical form
};

// All settings of a method, each once, in the order of the table. `wish` is its name or a spec, and what a spec fixes
// holds in all of them: "kvquant:calib=FILE", "kivi:group=128".
Result<std::vector<Setting>> settings_of(const std::string& wish);

// Names of the methods that pack and need no calibration file.
std::vector<std::string> free_methods();

// A setting on a model at a context.
struct SizedSetting {
    std::string method, spec;
    double bits = 0;    // true bits per value
    int64_t bytes = 0;  // of the cache, all sequences
    int64_t growth = 0; // of kPageTokens more tokens in each
};

struct SizeOptions {
    int64_t context = 0;   // tokens of each sequence
    int32_t sequences = 1; // that share nothing
    int32_t threads = 0;
};

// Sizes of caches with these settings, from the layouts, without running a model. Settings that this model's shape does
// not allow are left out; `refused` gets a sentence for each of them.
std::vector<SizedSetting> size_settings(const ModelShape& shape, const std::vector<Setting>& settings,
                                        const SizeOptions& options, std::vector<std::string>* refused,
                                        const Progress& progress);

} // namespace kvmosaic::eval
