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

// The parts, each adding the arrays of one method (docs/methods.md).
Status calibrate_kvquant(const Capture& seen, const Progress& progress, Calibration* out);
Status calibrate_rotatekv(const Capture& seen, const Progress& progress, Calibration* out);
Status calibrate_skvq(const Capture& seen, const Progress& progress, Calibration* out);
Status calibrate_kvtuner(const Capture& seen, const CalibrateOptions& options, const Progress& progress,
                         Calibration* out);

} // namespace kvmosaic::eval
