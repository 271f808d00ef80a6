// Kitty: in each page of 128 tokens the key channels with the largest mean |k| get 4 bits, the others 2; values 2 bits
// (arXiv 2511.18643, MLSys 2026; released code github.com/Summer-Summer/Kitty, MIT, read for facts at dfd2c07).
//
// What differs from paper and released code:
// - What is followed is the deployed runtime, not the accuracy simulation of the same repository: pages of 128, and
//   values that wait in a ring of 128 and then in a second buffer until 128 of them fill a page (128 to 255 raw).
// - The released page is two planes of 2 bits, an index byte for each channel and (s, min) pairs. Here a page is a
//   ladder {4 bits, 2 bits} with a channel map: the same bits, in the order that the kernels of this project read.
// - Codes are made with the stored f16 scale and offset; the released code makes them with the fp32 scale, decodes with
//   the f16 one, rounds half up and guards constant pages by a smallest scale of 1e-6. Here a constant gets scale 0.
// - The row that completes a page already sees it packed, also inside a prompt (DESIGN.md); released: after the step,
//   and a prompt attends to raw keys and values.
// - The released front of 32 is filled in decoding too, as here. `ratio`, `v`, `group` other than 128, `keep` are
//   options; the random and variance rankings of the released ablation are left out.
#include <algorithm>
#include <array>
#include <cmath>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& kitty_method();

namespace {

class Kitty final : public Method {
public:
    explicit Kitty(const OptionValues& values) : values_(values) {
        const bool pro = values.text("variant") == "pro";
        ratio_ = values.text("ratio") == "auto" ? (pro ? 0.25 : 0.125) : values.real("ratio");
    }
    const MethodInfo& info() const override { return kitty_method().info; }

    SidePlan initial(Side side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = kPageTokens};
        if (side == Side::key) {
            plan.store = key_store(StoreKind::tiered, 0, values_);
            start_ladder(2, dim, &plan);
        } else {
            plan.store = value_store(uint8_t(values_.integer("v")), values_, dim);
            plan.window.keep += kPageTokens; // the ring
        }
        return plan;
    }

    void plan(const PlanInput& in, SidePlan* plan) const override {
        if (in.side != Side::key) return;
        std::array<float, kMaxHeadDim> sums{}; // of |k|; ranks as the mean does
        for (int64_t t = 0; t < in.count; ++t)
            for (int32_t d = 0; d < in.dim; ++d)
                sums[size_t(d)] += std::abs(in.rows[t * in.dim + d]);
        plan->channels.resize(size_t(in.dim));
        rank(sums.data(), in.dim, plan->channels.data());
        const int32_t top = std::min(in.dim, int32_t(ratio_ * in.dim));
        std::sort(plan->channels.begin(), plan->channels.begin() + top);
        std::sort(plan->channels.begin() + top, plan->channels.end());
        plan->ladder = Ladder();
        plan->ladder.push(4, uint16_t(top));
        plan->ladder.push(2, uint16_t(in.dim - top));
    }

    std::vector<uint8_t> widths(Side side) const override {
        return side == Side::key ? std::vector<uint8_t>{4, 2} : std::vector<uint8_t>{};
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    OptionValues values_;
    double ratio_ = 0;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    if (values.text("variant") == "pro" && values.text("ratio") != "auto") {
        return bad_options("kitty: variant=pro is a ratio of 0.25; give variant or ratio, not variant=pro with ratio=" +
                           values.text("ratio"));
    }
    return std::unique_ptr<Method>(new Kitty(values));
}

} // namespace

const MethodEntry& kitty_method() {
    static const MethodEntry entry{
        {.name = "kitty",
         .summary = "in each page the loudest key channels at 4 bits, the others and the values at 2",
         .paper = "Kitty: Accurate and Efficient 2-bit KV Cache Quantization with Dynamic Channel-wise Precision "
                  "Boost, 2025, arXiv 2511.18643",
         .options = {choice_option("variant", {"base", "pro"}, "share of 4-bit key channels: 0.125, or 0.25 for pro"),
                     {.name = "ratio",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "auto",
                      .min = 0,
                      .max = 1,
                      .help = "that share, freely",
                      .word = "auto"},
                     bits_option("v", "bits of a value code"),
                     group_option("128"),
                     front_option("32"),
                     keep_option(),
                     params_option()}},
        make};
    return entry;
}

} // namespace kvmosaic
