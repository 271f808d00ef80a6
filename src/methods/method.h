// What a method's file needs: its row's form, the options that methods share, and small helpers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvmosaic/calibration.h"
#include "kvmosaic/method.h"

namespace kvmosaic {

// One registered method. The function that a row of methods.def names returns it.
struct MethodEntry {
    MethodInfo info;
    // Makes the method from values that are each in range; refuses pairs that cannot work together.
    Result<std::unique_ptr<Method>> (*make)(const OptionValues& values);
};

// Options that every method with packed pages has, so that they mean the same everywhere.
OptionInfo front_option(const char* fallback);
OptionInfo keep_option(const char* fallback = "0");
OptionInfo group_option(const char* fallback = "32"); // where groups are channels: min(group, head size)
OptionInfo params_option();
OptionInfo choice_option(const char* name, std::vector<std::string> choices, const char* help); // default: the first
OptionInfo bits_option(const char* name, const char* help, const char* fallback = "2");         // 1, 2, 3, 4, 6, 8
OptionInfo switch_option(const char* name, const char* fallback, const char* help);             // 0, 1

OptionInfo calib_option(); // for methods whose info says `calibrated`

// The file of the option calib; refused if it is damaged or of another method.
Result<Calibration> open_calibration(const OptionValues& values, const MethodInfo& info);
// An array of whole numbers: `count` of them that are a permutation of 0 .. count - 1.
Result<std::vector<uint16_t>> read_order(const Calibration& file, const std::string& name, int32_t layer, int32_t head,
                                         Side side, int64_t count);

ParamType params_of(const OptionValues& values);
StoreSpec raw_store(RawType type);
// Groups along tokens of each channel, flushes in whole groups.
StoreSpec key_store(StoreKind kind, uint8_t bits, const OptionValues& values);
// Groups of at most `dim` channels in each token, either side; a group is a multiple of 8.
StoreSpec token_store(StoreKind kind, GridRule rule, uint8_t bits, int32_t group, int32_t dim, ParamType params);
// The same, asymmetric, with the group and params of the options.
StoreSpec value_store(uint8_t bits, const OptionValues& values, int32_t dim);
// order: [n] 0 .. n - 1 by score, best first; equal scores in ascending order. n: at most kMaxHeadDim
void rank(const float* scores, int32_t n, uint16_t* order);
// The ladder {bits, dim} over channels 0, 1, ...: what a tiered plan holds before its first decision.
void start_ladder(uint8_t bits, int32_t dim, SidePlan* plan);

// Checks the shape and each layer's stores; the default answer of Method::accept for a method with packed pages.
Status accept_stores(const Method& method, const ModelShape& shape);

inline Status bad_options(std::string message) { return Status(StatusCode::invalid_argument, std::move(message)); }

} // namespace kvmosaic
