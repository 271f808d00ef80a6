// KIVI: keys per channel along tokens, values per token along channels, both on one asymmetric grid (arXiv 2402.02750,
// ICML 2024; released code github.com/jy-yuan/KIVI, MIT, read for facts at 876b4d2).
//
// What differs from paper and released code:
// - A constant group gets scale 0 and decodes to its value; the released code divides by zero there.
// - Codes are made with the stored (rounded) scale and offset, so that they decode within half a step of them.
// - The row that completes a key block already sees it packed, as in every method here, also inside a prompt: a row
//   sees what it would see in decoding. The released code attends a whole prompt to raw keys and values.
// - The released code packs a prompt's keys up to the last multiple of R and all values but the last R. Windows give
//   the same result for any way of splitting the prompt: key {front, keep, R}, value {front, R + keep, 1}.
// - `front` and `keep` are additions, off by default; widths 1, 3, 6 and 8 too (released: 2 and 4).
// - The 128 of the paper's runs is the default of `residual` (the released examples use 32).
// - Query heads that share a KV head are no matter of this file: codes and scales are per KV head.
#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& kivi_method();

namespace {

class Kivi final : public Method {
public:
    explicit Kivi(const OptionValues& values) : values_(values) {}
    const MethodInfo& info() const override { return kivi_method().info; }

    SidePlan initial(Side side, int32_t, int32_t, int32_t dim) const override {
        const uint8_t bits = uint8_t(values_.integer("bits"));
        const int32_t residual = values_.integer("residual");
        SidePlan plan;
        plan.raw = RawType::f16;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = residual};
        if (side == Side::key) {
            plan.store = key_store(StoreKind::grid, bits, values_);
        } else {
            plan.store = value_store(bits, values_, dim);
            plan.window.keep += residual; // a sliding window: each new token pushes one old one out
            plan.window.flush = 1;
        }
        return plan;
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    OptionValues values_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    if (values.integer("residual") % values.integer("group") != 0) {
        return bad_options(
            "kivi: group must divide residual (key groups run along the tokens that are packed at once), "
            "not group=" +
            values.text("group") + " with residual=" + values.text("residual"));
    }
    return std::unique_ptr<Method>(new Kivi(values));
}

} // namespace

const MethodEntry& kivi_method() {
    static const MethodEntry entry{
        {.name = "kivi",
         .summary = "keys per channel, values per token, one width for all",
         .paper = "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, 2024, arXiv 2402.02750",
         .options = {bits_option("bits", "bits of a key or value code"),
                     group_option(),
                     {.name = "residual",
                      .fallback = "128",
                      .choices = {"32", "64", "128"},
                      .help = "R: keys are packed R at once, the newest R values stay raw"},
                     front_option("0"),
                     keep_option(),
                     params_option()},
         .uses_query = false},
        make};
    return entry;
}

} // namespace kvmosaic
