// The rotation of a layer's keys, read from the graph that rotates them. Internal to src/llama.
#pragma once

#include "ggml.h"
#include "kvmosaic/shape.h"

namespace kvmosaic::seam {

// `known` stays false when `keys` is not the direct result of a plain rotation (normalised afterwards, put together
// from parts, several positions per token) or when its frequency factors are not at hand yet.
Rope rope_from(const ggml_tensor* keys);

// Largest difference between row `row` of a head in `keys` and the same row of `plain` turned to `position`.
float rope_difference(const Rope& rope, const ggml_tensor* keys, const ggml_tensor* plain, int64_t head, int64_t row,
                      int32_t position);

} // namespace kvmosaic::seam
