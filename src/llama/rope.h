// The rotation of a layer's keys: from the model's parameters before any graph exists, and read from the graph that
// rotates them. Internal to src/llama.
#pragma once

#include "ggml.h"
#include "kvmosaic/shape.h"

struct llama_cparams;
struct llama_model;

namespace kvmosaic::seam {

// `known` stays false when `keys` is not the direct result of a plain rotation (normalised afterwards, put together
// from parts, several positions per token) or when its frequency factors are not at hand yet.
Rope rope_from(const ggml_tensor* keys);

// What llama.cpp's graphs do where nothing is special about the architecture: `known` is false where the parameters say
// that keys do not turn, or not plainly (several positions per token). The graph has the last word.
Rope rope_of_parameters(const llama_model& model, const llama_cparams& cparams, int32_t layer);

// Whether both turn every pair by the same angle and multiply by the same magnitude; two unknown ones are the same.
bool same_turn(const Rope& a, const Rope& b);

// Largest difference between row `row` of a head in `keys` and the same row of `plain` turned to `position`.
float rope_difference(const Rope& rope, const ggml_tensor* keys, const ggml_tensor* plain, int64_t head, int64_t row,
                      int32_t position);

} // namespace kvmosaic::seam
