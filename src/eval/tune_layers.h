// KVTuner's search space (arXiv 2502.04420): inside each layer the pairs of widths that no other beats in bits and
// error, then clusters of layers with the same pairs and similar errors, which take one pair together.
#pragma once

#include <string>
#include <vector>

#include "eval/calibrate.h"
#include "eval/tunables.h"

namespace kvmosaic::eval {

struct LayerSpace {
    ModelShape shape;
    std::vector<Tunable> space;
    std::vector<WidthPair> descent; // of the layers with K/V: what `calibrate` chooses at its default cap
};

// About `groups` clusters: at least one for each set of pairs.
LayerSpace layer_space(const Capture& seen, int32_t groups, bool token_base, const Progress& progress);
// The clusters alone: numbers of layers (indices into `layers`), ordered by their first layer.
std::vector<std::vector<size_t>> clusters_of_layers(const std::vector<LayerSensitivity>& layers, int32_t groups);

// Widths of the layers with K/V, in their order.
std::vector<WidthPair> widths_of(const std::vector<Tunable>& space, const std::vector<std::string>& values);
std::string text_of(const WidthPair& pair); // "8/4": keys, values
// "8/4 x3, 4/4 x5": runs of equal layers
std::string text_of(const std::vector<WidthPair>& widths);

// The file that kvtuner reads.
Calibration calibration_of(const ModelShape& shape, const std::vector<WidthPair>& widths, bool token_base);

} // namespace kvmosaic::eval
