// MixKVQ: key channels at 16, 4 or 2 bits by how much their rounding would disturb the scores, values at 2 bits
// (arXiv 2512.19206, ACL 2026; no author code is public).
//
// The paper's score of channel d in a block of 128 tokens is A = I * S with I the mean of |q_d| over the queries so far
// and S = (max k_d - min k_d) / (2^B - 1). A > hi: raw, A > mid: 4 bits, else 2 bits.
//
// What differs from the paper, and what it leaves open:
// - B inside S is not stated: 2, so S = range / 3, the step of the lowest tier.
// - I for grouped queries is not stated: mean over the query heads of the KV head, so that thresholds do not grow with
//   their number. Queries and keys are post-RoPE; all queries so far count (`query=window`: those since the last seal).
// - F (first tokens kept raw) is never defined: `front`, default 4; `front=0` is the strict reading.
// - One map per block also inside the prompt; `map=prompt` makes one for all blocks of the prompt's first step.
// - hi=12, mid=1.6 give about 4 key bits on small models. The published pairs (1.44/0.79 ...) would keep half of the
//   channels raw here, so the paper's scores must be scaled differently. hi is tested first; hi < mid is legal, as in
//   one of the published pairs, and leaves the 4-bit tier empty.
// - `raw_share`, `mid_share` (fixed shares of the channels instead of thresholds), `score=scale|query` (for ablation,
//   in units of S and I) and `v` are additions.
// - Metadata, constant groups and who sees a packed block: as in every method here (docs/numerics.md, DESIGN.md).
#include <algorithm>
#include <array>
#include <cmath>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& mixkvq_method();

namespace {

enum class Score : uint8_t { product, scale, query };

class MixKvq final : public Method {
public:
    explicit MixKvq(const OptionValues& values)
        : values_(values), hi_(float(values.real("hi"))), mid_(float(values.real("mid"))),
          shares_(values.text("raw_share") != "off" || values.text("mid_share") != "off"),
          raw_share_(values.real("raw_share")), mid_share_(values.real("mid_share")) {
        const std::string& score = values.text("score");
        score_ = score == "scale" ? Score::scale : score == "query" ? Score::query : Score::product;
    }
    const MethodInfo& info() const override { return mixkvq_method().info; }

    SidePlan initial(Side side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.raw = RawType::f16;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = kPageTokens};
        if (side == Side::key) {
            plan.store = key_store(StoreKind::tiered, 0, values_);
            start_ladder(2, dim, &plan);
        } else {
            plan.store = value_store(uint8_t(values_.integer("v")), values_, dim);
        }
        return plan;
    }

    void plan(const PlanInput& in, SidePlan* plan) const override {
        if (in.side != Side::key) return;
        std::array<float, kMaxHeadDim> scores{}; // no heap: plans are made while a step runs
        score(in, scores.data());
        std::array<uint8_t, kMaxHeadDim> widths;
        if (shares_) {
            by_share(scores.data(), in.dim, widths.data());
        } else {
            for (int32_t d = 0; d < in.dim; ++d)
                widths[d] = scores[d] > hi_ ? 16 : scores[d] > mid_ ? 4 : 2;
        }
        plan->ladder = Ladder();
        plan->channels.clear();
        for (const uint8_t bits : {16, 4, 2}) {
            const size_t before = plan->channels.size();
            for (int32_t d = 0; d < in.dim; ++d) {
                if (widths[d] == bits) plan->channels.push_back(uint16_t(d));
            }
            plan->ladder.push(bits, uint16_t(plan->channels.size() - before));
        }
    }

    std::vector<uint8_t> widths(Side side) const override {
        return side == Side::key ? std::vector<uint8_t>{16, 4, 2} : std::vector<uint8_t>{};
    }
    QueryScope query_scope() const override {
        return values_.text("query") == "window" ? QueryScope::window : QueryScope::running;
    }
    MapScope map_scope() const override {
        return values_.text("map") == "prompt" ? MapScope::first_step : MapScope::block;
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    // out: [dim]. Without a query so far (a cache filled from outside) the key's range alone decides.
    void score(const PlanInput& in, float* out) const {
        const bool seen = in.query.count > 0 && in.query.abs_sum != nullptr;
        for (int32_t d = 0; d < in.dim; ++d) {
            float low = in.rows[d], high = in.rows[d];
            for (int64_t t = 1; t < in.count; ++t) {
                const float k = in.rows[t * in.dim + d];
                low = std::min(low, k);
                high = std::max(high, k);
            }
            const float scale = (high - low) / 3.0f;
            const float query = seen ? in.query.abs_sum[d] / float(in.query.count) : 0.0f;
            if (!seen || score_ == Score::scale) {
                out[d] = scale;
            } else {
                out[d] = score_ == Score::query ? query : query * scale;
            }
            if (!(out[d] >= 0.0f)) out[d] = 0.0f; // a loaded state may hold any bytes; ranking needs an order
        }
    }

    // The best round(share * dim) channels each; equal scores go to the lower channel.
    void by_share(const float* scores, int32_t dim, uint8_t* widths) const {
        std::array<uint16_t, kMaxHeadDim> order;
        rank(scores, dim, order.data());
        const int32_t raw = std::min(dim, int32_t(std::lround(raw_share_ * dim)));
        const int32_t mid = std::min(dim - raw, int32_t(std::lround(mid_share_ * dim)));
        for (int32_t i = 0; i < dim; ++i)
            widths[order[i]] = i < raw ? 16 : i < raw + mid ? 4 : 2;
    }

    OptionValues values_;
    float hi_, mid_;
    bool shares_;
    double raw_share_, mid_share_; // 0 for "off"
    Score score_ = Score::product;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    const bool shares = values.text("raw_share") != "off" || values.text("mid_share") != "off";
    const auto& options = mixkvq_method().info.options;
    for (const OptionInfo& option : options) {
        if ((option.name == "hi" || option.name == "mid") && shares && values.text(option.name) != option.fallback) {
            return bad_options(
                "mixkvq: tiers are chosen by thresholds (hi, mid) or by shares (raw_share, mid_share), not "
                "by " +
                option.name + "=" + values.text(option.name) + " and shares at once");
        }
    }
    if (values.real("raw_share") + values.real("mid_share") > 1.0) {
        return bad_options("mixkvq: raw_share and mid_share together must be 0 to 1, not " + values.text("raw_share") +
                           " and " + values.text("mid_share"));
    }
    return std::unique_ptr<Method>(new MixKvq(values));
}

OptionInfo threshold(const char* name, const char* fallback, const char* help) {
    return {.name = name, .kind = OptionInfo::Kind::real, .fallback = fallback, .min = 0, .max = 1e9, .help = help};
}

OptionInfo share(const char* name, const char* help) {
    return {.name = name,
            .kind = OptionInfo::Kind::real,
            .fallback = "off",
            .min = 0,
            .max = 1,
            .help = help,
            .word = "off"};
}

} // namespace

const MethodEntry& mixkvq_method() {
    static const MethodEntry entry{
        {.name = "mixkvq",
         .summary = "key channels at 16, 4 or 2 bits by query magnitude times key scale, values at 2 bits",
         .paper = "MixKVQ: Query-Aware Mixed-Precision KV Cache Quantization for Long-Context Reasoning, 2025, arXiv "
                  "2512.19206",
         .options = {threshold("hi", "12", "key channels with a score above this stay raw"),
                     threshold("mid", "1.6", "others with a score above this get 4 bits, the rest 2"),
                     share("raw_share", "instead of hi: share of the channels that stay raw, best scores first"),
                     share("mid_share", "instead of mid: share of the channels with 4 bits, next best scores"),
                     choice_option("score", {"product", "scale", "query"}, "what ranks a key channel"),
                     choice_option("query", {"running", "window"},
                                   "queries that count: all so far, or since the last seal"),
                     choice_option("map", {"block", "prompt"}, "one choice of channels per block, or one for a prompt"),
                     bits_option("v", "bits of a value code"), group_option(), front_option("4"), keep_option(),
                     params_option()},
         .uses_query = true},
        make};
    return entry;
}

} // namespace kvmosaic
