// One layer's attention through a cache against full precision: what a method does to scores, weights and outputs,
// apart from everything else that a model adds.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval/capture.h"

namespace kvmosaic::eval {

// Rows of all layers that a cache is filled with: of a model over a text, or of a random network of one layer.
struct ComponentInput {
    Capture seen;
    int32_t layer = 0; // the one that is measured
};

struct RandomNetwork {
    int32_t heads = 8, kv_heads = 2, dim = 64, hidden = 256;
    uint32_t seed = 1;
};
// Gaussian hidden states through Gaussian projections, q and k rotated (half-split pairs over all of D, base 10000).
ComponentInput random_input(const RandomNetwork& network, int32_t rows);

struct ComponentOptions {
    int32_t prefill = 384; // rows of the first step
    int32_t decode = 64;   // rows that follow one at a time; the measured ones
    bool alone = false;    // fill only the measured layer; sizes are then of a cache whose others are empty
};

inline constexpr int32_t kSinkRows = 4;

struct ComponentResult {
    std::string spec, canonical;
    // Means over decoded rows and query heads, all in double from the same q, k and v.
    double kl = 0;         // KL(exact weights || weights on the keys as the cache returns them), nats
    double mse = 0;        // of the output's elements
    double cosine = 0;     // between the outputs of a head
    double sink_error = 0; // |difference of the weight on the first kSinkRows rows|
    // Plans that the method made for the layer, over heads and sides: one per packed block where tiers are chosen block
    // by block, one a sequence where the choice is frozen.
    int64_t plans = 0;
    std::optional<bool>
        mask_unchanged;          // what was decided at the end of the prefill is in force at the end; none: nothing was
    bool pages_unchanged = true; // bytes of pages that were full at the end of the prefill
    int64_t cache_bytes = 0;     // of all layers, at the end
    int64_t layers = 0;          // that they are for
    double bits = 0, bits_key = 0, bits_value = 0;
    std::string path, isa;
};

Status validate(const ComponentOptions& options);
Result<ComponentResult> component(const ComponentInput& input, const std::string& spec,
                                  const ComponentOptions& options);

} // namespace kvmosaic::eval
