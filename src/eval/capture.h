// q, k and v of a model's layers over a text, as its attention gets them.
#pragma once

#include <vector>

#include "eval/engine.h"

namespace kvmosaic::eval {

struct CaptureOptions {
    int64_t tokens = 4096; // of the text, in windows that start anew
    int32_t window = 2048;
    int32_t skip = 0; // rows at a window's start that are not kept
    int32_t threads = 0;
    bool query = false;          // keep q too
    std::vector<int32_t> layers; // to keep; empty: all that store K/V
};

// Rows of one layer, one window after the other.
struct CapturedLayer {
    std::vector<float> q; // [rows][H * Dk] after RoPE, or empty
    std::vector<float> k; // [rows][G * Dk] after RoPE
    std::vector<float> v; // [rows][G * Dv]
};

struct Capture {
    ModelShape shape; // with rotations and fingerprint
    int64_t rows = 0;
    std::vector<int32_t> positions;    // [rows]
    std::vector<CapturedLayer> layers; // [L]; empty vectors where nothing was kept

    // k of a layer before the rotation, [rows][G * Dk]. The rotation must be known.
    std::vector<float> keys_before_rotation(int32_t layer) const;
};

Result<Capture> capture(const Model& model, const std::vector<int32_t>& text, const CaptureOptions& options,
                        const Progress& progress);

} // namespace kvmosaic::eval
