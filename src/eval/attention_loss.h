// What caches do to a model's attention, layer by layer on its own queries, keys and values: a pass of the model once,
// then a fraction of a second a spec. It ranks caches before the few best are measured on the whole model (compare.h).
#pragma once

#include <string>
#include <vector>

#include "eval/component.h"

namespace kvmosaic::eval {

class AttentionLoss {
public:
    static constexpr int32_t kRows = 640; // tokens of the text that are looked at

    // At least kRows tokens; of larger models the first layers, where keys are most uneven, and some others.
    static Result<AttentionLoss> make(const Model& model, const std::vector<int32_t>& text, int32_t threads,
                                      const Progress& progress);

    // Mean over layers of KL(exact weights || weights through the cache) + 1 - cosine of the outputs, on the last rows.
    Result<double> of(const std::string& spec);

    const ModelShape& shape() const { return input_.seen.shape; }
    double seconds() const { return seconds_; } // that the model took

private:
    ComponentInput input_;
    std::vector<int32_t> layers_;
    double seconds_ = 0;
};

} // namespace kvmosaic::eval
