// InnerQ: groups along the dimension that attention sums over: keys 32 channels of a token, values 32 tokens of a
// channel, on symmetric grids (arXiv 2602.23200; released code github.com/mthcom/innerq, Apache-2.0, read for facts at
// edfb965).
//
// What differs from paper and released code:
// - Windows as intended: at least 96 recent tokens stay raw, keys leave one by one, values 32 at a time. In the
//   released code the raw window of the values falls to 0 .. 31 within a few steps, because it flushes at a full flush
//   size instead of beyond the window.
// - Key normalization (divide channel c by sqrt(max |k_c|)) is on in every use; a misspelt argument turns it off in one
//   of the released scripts. Norms are taken once a sequence from the 128 tokens after the front, whatever the prompt's
//   length; released: from the prompt's packed tokens, or from the first one that is ever packed. A channel of zeros
//   has norm 1 (released: 0 / 0).
// - Grids are the Python reference's: 3 bits are levels -3 .. 3, 2 bits are -1, 0, 1. The released CUDA benchmark has
//   other ones (-4 .. 3) that do not round-trip. A group of zeros gets scale 0 (released: 0 / 0).
// - variant=hybrid, asym=1bit: the better of ternary and {min, max}, by the sum of errors, equal sums to the second, as
//   in the Python reference. asym=4level is an improvement at the same bits: four levels instead of two, which never
//   loses to two. The choice is the sign bit of the stored scale; the offset is stored for every group.
// - `front`, `keep`, `group`, `norm` are options. The norms lie in the sequence's plan and are counted there.
#include <algorithm>
#include <cmath>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& innerq_method();

namespace {

class InnerQ final : public Method {
public:
    explicit InnerQ(const OptionValues& values) : values_(values), norm_(values.text("norm") == "on") {
        const std::string& variant = values.text("variant");
        value_bits_ = variant == "base" ? 3 : 2;
        if (variant == "hybrid")
            value_rule_ = values.text("asym") == "1bit" ? GridRule::hybrid_1bit : GridRule::hybrid_4level;
    }
    const MethodInfo& info() const override { return innerq_method().info; }

    SidePlan initial(Side side, int32_t, int32_t, int32_t dim) const override {
        const int32_t group = values_.integer("group");
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        if (side == Side::key) {
            plan.window.first = kPageTokens;
            plan.store = token_store(StoreKind::grid, GridRule::symmetric, 3, group, dim, params_of(values_));
        } else {
            plan.window.flush = 32;
            plan.store = key_store(StoreKind::grid, value_bits_, values_); // groups along tokens
            plan.store.rule = value_rule_;
        }
        return plan;
    }

    bool freezes(Side side) const override { return side == Side::key && norm_; }

    void freeze(const PlanInput& in, SidePlan* plan) const override {
        if (!freezes(in.side)) return;
        plan->transform.scale.assign(size_t(in.dim), 0.0f);
        for (int64_t t = in.front; t < in.count; ++t)
            for (int32_t d = 0; d < in.dim; ++d) {
                float& most = plan->transform.scale[size_t(d)];
                most = std::max(most, std::abs(in.rows[t * in.dim + d]));
            }
        for (float& most : plan->transform.scale)
            most = most > 0.0f ? std::sqrt(most) : 1.0f;
    }

    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    OptionValues values_;
    bool norm_;
    uint8_t value_bits_ = 3;
    GridRule value_rule_ = GridRule::symmetric;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    if (values.text("variant") == "hybrid" && values.text("params") == "f8e4m3") {
        return bad_options("innerq: variant=hybrid keeps a flag in the sign of each scale, so params must be f16 or "
                           "bf16, not params=f8e4m3");
    }
    if (values.text("variant") != "hybrid" && values.text("asym") != "1bit") {
        return bad_options("innerq: asym is a choice of variant=hybrid, not asym=" + values.text("asym") +
                           " with variant=" + values.text("variant"));
    }
    return std::unique_ptr<Method>(new InnerQ(values));
}

} // namespace

const MethodEntry& innerq_method() {
    static const MethodEntry entry{
        {.name = "innerq",
         .summary = "groups along the inner dimension: keys 32 channels of a token, values 32 tokens of a channel",
         .paper = "InnerQ: Hardware-aware Tuning-free Quantization of KV Cache for Large Language Models, 2026, arXiv "
                  "2602.23200",
         .options = {choice_option(
                         "variant", {"base", "small", "hybrid"},
                         "values: 3 bits symmetric, 2 bits symmetric, or 2 bits with the better of two grids"),
                     choice_option("asym", {"1bit", "4level"}, "hybrid: levels of the asymmetric grid, 2 or 4"),
                     choice_option("norm", {"on", "off"}, "divide key channels by the root of their largest value"),
                     {.name = "group",
                      .fallback = "32",
                      .choices = {"8", "16", "32"},
                      .help = "values that share a scale: channels of a key, tokens of a value channel"},
                     front_option("32"),
                     keep_option("96"),
                     params_option()}},
        make};
    return entry;
}

} // namespace kvmosaic
