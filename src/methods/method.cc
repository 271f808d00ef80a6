#include "methods/method.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace kvmosaic {

OptionInfo front_option(const char* fallback) {
    return {.name = "front", .fallback = fallback, .min = 0, .max = 4096, .help = "first tokens kept raw for good"};
}

OptionInfo keep_option(const char* fallback) {
    return {.name = "keep",
            .fallback = fallback,
            .min = 0,
            .max = 65536,
            .help = fallback[0] == '0' ? "newest tokens kept raw beyond what the method itself waits for"
                                       : "newest tokens kept raw"};
}

OptionInfo group_option(const char* fallback) {
    return {.name = "group",
            .fallback = fallback,
            .choices = {"8", "16", "32", "64", "128"},
            .help = "values that share a scale and an offset"};
}

OptionInfo choice_option(const char* name, std::vector<std::string> choices, const char* help) {
    return {
        .name = name, .kind = OptionInfo::Kind::choice, .fallback = choices.front(), .choices = choices, .help = help};
}

OptionInfo params_option() { return choice_option("params", {"f16", "bf16", "f8e4m3"}, "type of scales and offsets"); }

OptionInfo switch_option(const char* name, const char* fallback, const char* help) {
    return {.name = name, .fallback = fallback, .choices = {"0", "1"}, .help = help};
}

OptionInfo bits_option(const char* name, const char* help, const char* fallback) {
    return {.name = name, .fallback = fallback, .choices = {"1", "2", "3", "4", "6", "8"}, .help = help};
}

OptionInfo calib_option() {
    return {.name = "calib",
            .kind = OptionInfo::Kind::text,
            .fallback = "",
            .help = "the model's calibration file, as the program's verb calibrate writes it"};
}

Result<Calibration> open_calibration(const OptionValues& values, const MethodInfo& info) {
    Result<Calibration> file = read_calibration(values.text("calib"));
    Status s = file ? file->fits(info.name) : file.status();
    if (!s) return Status(s.code(), info.name + ": calib: " + s.message());
    return file;
}

Result<std::vector<uint16_t>> read_order(const Calibration& file, const std::string& name, int32_t layer, int32_t head,
                                         Side side, int64_t count) {
    const auto values = file.need(name, layer, head, side, count);
    if (!values) return values.status();
    std::vector<uint16_t> order;
    std::vector<bool> seen(static_cast<size_t>(count));
    for (const float x : **values) {
        const bool whole = x >= 0.0f && x < float(count) && x == float(int64_t(x));
        if (!whole || seen[size_t(x)])
            return file.wrong(name, layer, head, side, "is no permutation of 0 to " + std::to_string(count - 1));
        seen[size_t(x)] = true;
        order.push_back(uint16_t(x));
    }
    return order;
}

ParamType params_of(const OptionValues& values) {
    const std::string& name = values.text("params");
    return name == "bf16" ? ParamType::bf16 : name == "f8e4m3" ? ParamType::f8e4m3 : ParamType::f16;
}

StoreSpec raw_store(RawType type) {
    StoreSpec spec;
    spec.kind = StoreKind::raw;
    spec.raw = type;
    return spec;
}

StoreSpec key_store(StoreKind kind, uint8_t bits, const OptionValues& values) {
    StoreSpec spec;
    spec.kind = kind;
    spec.bits = bits;
    spec.axis = Axis::tokens;
    spec.group = uint16_t(values.integer("group"));
    spec.params = params_of(values);
    return spec;
}

StoreSpec token_store(StoreKind kind, GridRule rule, uint8_t bits, int32_t group, int32_t dim, ParamType params) {
    StoreSpec spec;
    spec.kind = kind;
    spec.rule = rule;
    spec.bits = bits;
    spec.axis = Axis::channels;
    // Groups come in lane blocks.
    spec.group = uint16_t((std::min(group, dim) + kLaneBlock - 1) / kLaneBlock * kLaneBlock);
    spec.params = params;
    return spec;
}

StoreSpec value_store(uint8_t bits, const OptionValues& values, int32_t dim) {
    return token_store(StoreKind::grid, GridRule::asym, bits, values.integer("group"), dim, params_of(values));
}

void rank(const float* scores, int32_t n, uint16_t* order) {
    // Whole numbers that ascend as the scores descend, the channel behind: one comparison each.
    std::array<uint64_t, kMaxHeadDim> keys; // no heap: plans are made while a step runs
    for (int32_t i = 0; i < n; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(scores[i] + 0.0f); // -0 is 0
        const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
        keys[size_t(i)] = uint64_t(~ascending) << 16 | uint64_t(i);
    }
    std::sort(keys.begin(), keys.begin() + n);
    for (int32_t i = 0; i < n; ++i)
        order[i] = uint16_t(keys[size_t(i)]);
}

void start_ladder(uint8_t bits, int32_t dim, SidePlan* plan) {
    plan->ladder = Ladder::uniform(bits, uint16_t(dim));
    plan->channels.resize(size_t(dim));
    std::iota(plan->channels.begin(), plan->channels.end(), uint16_t(0));
}

Status accept_stores(const Method& method, const ModelShape& shape) {
    if (Status s = validate(shape); !s) return s;
    for (size_t i = 0; i < shape.layers.size(); ++i) {
        if (!shape.layers[i].has_kv()) continue;
        for (const Side side : {Side::key, Side::value}) {
            const int32_t dim = shape.layers[i].dim(side);
            const SidePlan plan = method.initial(side, int32_t(i), 0, dim);
            const Status s = validate(plan.store, side, dim);
            if (s) continue;
            return Status(s.code(), method.info().name + ": layer " + std::to_string(i) + ", " + name_of(side) +
                                        "_dim " + std::to_string(dim) + ": " + s.message());
        }
    }
    return Status();
}

} // namespace kvmosaic
