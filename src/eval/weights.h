// Weights for honest comparisons. With quantized weights the products of a model round activations to 8 bits, which
// alone moves the output by KL 5e-4 to 1e-2; so compare evaluates on weights dequantized once.
#pragma once

#include <string>

#include "eval/files.h"

namespace kvmosaic::eval {

enum class WeightType { as_is, f16, f32 };
Result<WeightType> parse_weights(const std::string& text);
const char* name_of(WeightType type);

struct Weights {
    std::string path; // the file to load
    WeightType type = WeightType::as_is;
    std::string warning; // a sentence, when the wish was not met
};

struct WeightsRequest {
    std::string model;  // path of the source
    std::string sha256; // of the source; names the result
    WeightType type = WeightType::f16;
    bool by_default = false; // then results above `limit` bytes are not made, and as-is is used with a warning
    int64_t limit = int64_t(4) << 30;
    int32_t threads = 0;
};

// Finds or makes the file. `notice` gets one sentence with the size before anything is written.
Result<Weights> prepare_weights(const WeightsRequest& request, const std::function<void(const std::string&)>& notice,
                                const Progress& progress);

} // namespace kvmosaic::eval
