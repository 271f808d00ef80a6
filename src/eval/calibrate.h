// Finds what the calibrated methods need to know of a model, from a text: the arrays of include/kvmosaic/calibration.h.
#pragma once

#include <string>

#include "eval/capture.h"
#include "kvmosaic/calibration.h"

namespace kvmosaic::eval {

struct CalibrateOptions {
    std::string method; // one of calibrated_methods()
    int64_t tokens = 4096;
    int32_t window = 2048;
    int32_t threads = 0;
    double bits = 4;              // kvtuner: most bits per value, mean over layers and sides
    bool token_base = false;      // kvtuner: for base=token
    std::string text = "unknown"; // which text it is, for the file
};

const std::vector<std::string>& calibrated_methods();
Status validate(const CalibrateOptions& options);
Result<Calibration> calibrate(const Model& model, const std::vector<int32_t>& text, const CalibrateOptions& options,
                              const Progress& progress);

// Widths of a layer's keys and values.
struct WidthPair {
    int32_t key = 0, value = 0;
    double bits() const { return (key + value) / 2.0; }
    bool operator==(const WidthPair&) const = default;
};

// What pairs do to one layer: the error of its attention's output under each, and those that no other beats in both
// bits and error, cheapest first.
struct LayerSensitivity {
    int32_t layer = 0;
    std::vector<double> errors; // of each pair
    std::vector<size_t> front;  // into the pairs
};
// Widths are 2, 4 and 8. One for each layer with K/V.
std::vector<LayerSensitivity> sensitivity(const Capture& seen, const std::vector<WidthPair>& pairs, bool token_base,
                                          const Progress& progress);
// Index into its front for each layer: steepest descent of the errors under a cap on the mean bits.
std::vector<size_t> widths_under(const std::vector<LayerSensitivity>& layers, const std::vector<WidthPair>& pairs,
                                 double bits);
// The five pairs that KVTuner's released search begins with.
const std::vector<WidthPair>& published_pairs();

// The parts, each adding the arrays of one method (docs/methods.md).
Status calibrate_kvquant(const Capture& seen, const Progress& progress, Calibration* out);
Status calibrate_rotatekv(const Capture& seen, const Progress& progress, Calibration* out);
Status calibrate_skvq(const Capture& seen, const Progress& progress, Calibration* out);
Status calibrate_kvtuner(const Capture& seen, const CalibrateOptions& options, const Progress& progress,
                         Calibration* out);

} // namespace kvmosaic::eval
