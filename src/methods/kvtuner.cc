// KVTuner: each layer has its own widths of keys and values, found by a search on calibration text (arXiv 2502.04420,
// ICML 2025; released code github.com/cmd2001/KVTuner, no licence: read for facts only, at babe775).
//
// What differs from paper and released code:
// - This file applies a table of widths; the search that fills it is the program's. Any of 1, 2, 3, 4, 6, 8 bits is
//   accepted; the published candidates are 8, 4 and 2.
// - A row is packed once. The released code decodes and packs the whole history anew at each flush, so that its errors
//   add up; and its groups straddle channels where the number of tokens is no multiple of the group. Neither here.
// - Offsets are whole numbers of steps, as released. The range has no floor of 1e-5: a constant group gets scale 0.
//   Codes are unsigned (released: signed, the same levels) and made with the stored f16 scale.
// - base=kivi: keys per channel, values per token, groups of 32, residual 32. base=token: both per token, one group a
//   head, nothing waits. The file says for which base its widths were found; the other is refused.
// - `front` and `keep` are additions. Rows see what they would see in decoding (DESIGN.md).
#include <array>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& kvtuner_method();

namespace {

class KvTuner final : public Method {
public:
    KvTuner(const OptionValues& values, Calibration file, std::vector<std::array<uint8_t, 2>> bits)
        : values_(values), file_(std::move(file)), bits_(std::move(bits)), token_(values.text("base") == "token") {}
    const MethodInfo& info() const override { return kvtuner_method().info; }

    SidePlan initial(Side side, int32_t layer, int32_t, int32_t dim) const override {
        const uint8_t bits = bits_[size_t(layer)][size_t(side)];
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        if (token_) {
            plan.store = token_store(StoreKind::grid, GridRule::integer, bits, dim, dim, params_of(values_));
        } else if (side == Side::key) {
            plan.window.flush = values_.integer("residual");
            plan.store = key_store(StoreKind::grid, bits, values_);
        } else {
            plan.window.keep += values_.integer("residual"); // a sliding window
            plan.store = value_store(bits, values_, dim);
        }
        plan.store.rule = GridRule::integer;
        return plan;
    }

    Status accept(const ModelShape& shape) override {
        if (Status s = file_.fits(shape); !s) return s;
        return accept_stores(*this, shape);
    }

private:
    OptionValues values_;
    Calibration file_;
    std::vector<std::array<uint8_t, 2>> bits_; // [L] of keys and values
    bool token_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    const bool token = values.text("base") == "token";
    for (const OptionInfo& option : kvtuner_method().info.options)
        if ((option.name == "group" || option.name == "residual") && token &&
            values.text(option.name) != option.fallback)
            return bad_options("kvtuner: " + option.name + " belongs to base=kivi, not to base=token: " + option.name +
                               "=" + values.text(option.name));
    if (!token && values.integer("residual") % values.integer("group") != 0)
        return bad_options("kvtuner: group must divide residual, not group=" + values.text("group") +
                           " with residual=" + values.text("residual"));
    Result<Calibration> file = open_calibration(values, kvtuner_method().info);
    if (!file) return file.status();
    const auto base = file->need("base", -1, -1, Side::key, 1);
    if (!base) return base.status();
    if (((**base)[0] != 0.0f) != token)
        return file->wrong("base", -1, -1, Side::key,
                           "says that its widths are those of base=" + std::string(token ? "kivi" : "token") +
                               ", not of base=" + values.text("base"));
    std::vector<std::array<uint8_t, 2>> bits(file->layers.size(), {8, 8});
    for (size_t layer = 0; layer < bits.size(); ++layer) {
        if (!file->layers[layer].has_kv()) continue;
        const auto pair = file->need("bits", int32_t(layer), -1, Side::key, 2);
        if (!pair) return pair.status();
        for (size_t side = 0; side < 2; ++side) {
            const float x = (**pair)[side];
            if (!(x >= 1.0f && x <= 8.0f) || !is_width(int(x)) || x != float(int(x)))
                return file->wrong("bits", int32_t(layer), -1, Side::key, "must be 1, 2, 3, 4, 6 or 8 bits each");
            bits[layer][side] = uint8_t(x);
        }
    }
    return std::unique_ptr<Method>(new KvTuner(values, std::move(*file), std::move(bits)));
}

} // namespace

const MethodEntry& kvtuner_method() {
    static const MethodEntry entry{
        {.name = "kvtuner",
         .summary = "widths of keys and values by layer, from a calibration file",
         .paper =
             "KVTuner: Sensitivity-Aware Layer-Wise Mixed-Precision KV Cache Quantization for Efficient and Nearly "
             "Lossless LLM Inference, 2025, arXiv 2502.04420",
         .options = {calib_option(),
                     choice_option("base", {"kivi", "token"}, "keys per channel as in kivi, or all per token"),
                     group_option(),
                     {.name = "residual",
                      .fallback = "32",
                      .choices = {"32", "64", "128"},
                      .help = "base=kivi: keys are packed so many at once, the newest values stay raw"},
                     front_option("0"),
                     keep_option(),
                     params_option()},
         .calibrated = true},
        make};
    return entry;
}

} // namespace kvmosaic
