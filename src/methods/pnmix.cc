// PN-Mix: rotary pairs of key channels at 3 bits or 1 bit, chosen once a sequence by the norms of the pairs in queries
// and keys; values at 2 bits (arXiv 2610.19605; no author code is public).
//
// The score of a pair is the mean norm of its two channels in the queries (over rows, and over the query heads of the
// KV head) times the mean norm in the keys, both post-RoPE. The pairs with the best scores get the wide codes.
//
// What differs from the paper, and what it leaves open:
// - "Once, at prefill" is: from the first front + 128 tokens and their queries, whatever the prompt's length, so that
//   the choice does not depend on how a text is cut into steps. Nothing is packed before they are there.
// - Pairs are those of the model's own rotary embedding (halves or neighbours). Channels that do not turn are units of
//   their own, scored by mean |q| times mean |k|; where the rotation is unknown, all are. The best units are taken as
//   long as the next one fits into the 2 floor(r D / 2) channels.
// - The width of values is not in the accessible text: 2 bits per token, one group a head (at most 128 channels).
// - The mask lies in the sequence's plan, not in each page, and is counted there. The released form has two planes (low
//   bit of all, upper bits of some); here the ladder {3 bits, 1 bit} holds the same codes.
// - One bit is the paper's midpoint grid: levels at 1/4 and 3/4 of the range. Constant groups are guarded.
// - `b_hi`, `b_lo`, `r`, `v`, `group`, `front`, `keep` are options; equal widths make one tier. Without any query the
//   keys alone decide.
#include <algorithm>
#include <array>
#include <cmath>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& pnmix_method();

namespace {

// One rotary pair, or one channel that has none (second < 0).
struct Unit {
    float score;
    int16_t first, second;
};

class PnMix final : public Method {
public:
    explicit PnMix(const OptionValues& values)
        : values_(values), high_(uint8_t(values.integer("b_hi"))), low_(uint8_t(values.integer("b_lo"))),
          share_(values.real("r")) {}
    const MethodInfo& info() const override { return pnmix_method().info; }

    SidePlan initial(Side side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = kPageTokens};
        if (side == Side::key) {
            plan.window.first = kPageTokens;
            plan.store = key_store(StoreKind::tiered, 0, values_);
            plan.store.rule = GridRule::midpoint;
            plan.store.page_map = false;
            set_ladder(wide(dim), dim, &plan);
        } else {
            plan.store = value_store(uint8_t(values_.integer("v")), values_, dim);
        }
        return plan;
    }

    bool freezes(Side side) const override { return side == Side::key; }

    void freeze(const PlanInput& in, SidePlan* plan) const override {
        if (in.side != Side::key) return;
        std::array<Unit, kMaxHeadDim> units; // no heap: a step is running
        const int32_t count = score(in, units.data());
        std::sort(units.begin(), units.begin() + count, [](const Unit& a, const Unit& b) {
            return a.score != b.score ? a.score > b.score : a.first < b.first;
        });
        std::array<bool, kMaxHeadDim> chosen{};
        int32_t left = wide(in.dim), taken = 0;
        for (int32_t i = 0; i < count; ++i) {
            const Unit& unit = units[size_t(i)];
            const int32_t size = unit.second < 0 ? 1 : 2;
            if (size > left) break;
            chosen[size_t(unit.first)] = true;
            if (size == 2) chosen[size_t(unit.second)] = true;
            left -= size;
            taken += size;
        }
        plan->transform.order.clear();
        for (const bool wanted : {true, false})
            for (int32_t d = 0; d < in.dim; ++d)
                if (chosen[size_t(d)] == wanted) plan->transform.order.push_back(uint16_t(d));
        set_ladder(taken, in.dim, plan);
    }

    std::vector<uint8_t> widths(Side side) const override {
        if (side == Side::value) return {};
        return high_ == low_ ? std::vector<uint8_t>{high_} : std::vector<uint8_t>{high_, low_};
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    int32_t wide(int32_t dim) const { return 2 * int32_t(share_ * dim / 2); }

    void set_ladder(int32_t wide, int32_t dim, SidePlan* plan) const {
        plan->ladder = Ladder();
        if (high_ == low_) wide = dim;
        plan->ladder.push(high_, uint16_t(wide));
        plan->ladder.push(low_, uint16_t(dim - wide));
    }

    // Fills `units` and returns how many.
    static int32_t score(const PlanInput& in, Unit* units) {
        int32_t count = 0;
        std::array<bool, kMaxHeadDim> paired{};
        const bool turns = in.rope != nullptr && in.rope->known;
        for (int32_t i = 0; turns && i < in.rope->rotary / 2; ++i) {
            const auto [a, b] = in.rope->pair(i);
            paired[size_t(a)] = paired[size_t(b)] = true;
            units[count++] = {0.0f, int16_t(a), int16_t(b)};
        }
        for (int32_t d = 0; d < in.dim; ++d)
            if (!paired[size_t(d)]) units[count++] = {0.0f, int16_t(d), int16_t(-1)};
        for (int32_t i = 0; i < count; ++i) {
            Unit& unit = units[i];
            float sum = 0.0f;
            for (int64_t t = 0; t < in.count; ++t) {
                const float* k = in.rows + t * in.dim;
                const float a = k[unit.first], b = unit.second < 0 ? 0.0f : k[unit.second];
                const float aa = a * a, bb = b * b;
                sum += unit.second < 0 ? std::abs(a) : std::sqrt(aa + bb);
            }
            unit.score = sum / float(in.count);
            // The statistic of a channel is the norm of its pair, or |q| (MethodInfo::query_sum).
            if (in.query.count > 0) unit.score *= in.query.abs_sum[unit.first] / float(in.query.count);
            if (!(unit.score >= 0.0f)) unit.score = 0.0f; // a loaded state may hold any bytes
        }
        return count;
    }

    OptionValues values_;
    uint8_t high_, low_;
    double share_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) { return std::unique_ptr<Method>(new PnMix(values)); }

} // namespace

const MethodEntry& pnmix_method() {
    static const MethodEntry entry{
        {.name = "pnmix",
         .summary = "rotary pairs of key channels at 3 bits or 1, by their norms in queries and keys; values at 2 bits",
         .paper = "Pair-Norm Guided Mixed-Precision Key Cache Quantization for Efficient Long-Output LLM Inference, "
                  "2026, arXiv 2610.19605",
         .options = {{.name = "b_hi",
                      .fallback = "3",
                      .choices = {"2", "3", "4", "6", "8", "16"},
                      .help = "bits of the chosen key channels"},
                     {.name = "b_lo", .fallback = "1", .choices = {"0", "1", "2"}, .help = "bits of the others"},
                     {.name = "r",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "0.5",
                      .min = 0,
                      .max = 1,
                      .help = "share of the key channels that are chosen, in whole pairs"},
                     bits_option("v", "bits of a value code"),
                     group_option("128"),
                     front_option("32"),
                     keep_option(),
                     params_option()},
         .uses_query = true,
         .query_sum = QuerySum::pair_norm},
        make};
    return entry;
}

} // namespace kvmosaic
