// mosaic: kvmosaic's own method. Key channels get 0 to 8 bits by what their error would do to the scores, page by page;
// values are rotated and cut at steps fitted to each token (docs/mosaic.md says why each part is there).
//
// Keys. A head's mean before rotation, over its first front + 128 rows, is taken from every row: x_t = k_t - R_t mean.
// A channel weighs w_d = mean(q_d^2) * var(x_d) / D, its share of the variance that coding it would add to a score. A
// ladder of widths {0, 1, 2, 3, 4, 6, 8} spends k bits a value, in whole 32-byte vectors, where the weighted error
// falls most (methods/ladder.h); the store finds each channel's range by the sum of fourth powers of the error
// (GridRule::searched).
// Values. A Hadamard rotation, then the page's mean, then 2^v levels at steps fitted to each token
// (GridRule::fitted); half a bit is one bit more for half of the rotated channels.
// Both. The first `front` tokens stay raw, pages are packed whole.
//
// `bits` picks the preset with the most true bits a value of sealed pages, metadata and padding in, that are at most
// what was asked at the model's head sizes. `guard` is a ceiling for the variance that a page's codes add to a scaled
// score: a page above it takes more vectors, up to two bits a value more.
// tiers, query, mean, search, hadamard and fit leave out one part each; they are for ablation.
#include <algorithm>
#include <array>
#include <cmath>

#include "methods/ladder.h"
#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& mosaic_method();

namespace {

struct Preset { // bits of a key value and of a value
    double k, v;
};
constexpr Preset kPresets[] = {{1.5, 2}, {2, 2}, {2, 2.5}, {2.5, 3}, {3, 3}, {3.5, 4}, {4.5, 5}};
constexpr int32_t kVectorBits = 32; // of a lane: 32 bytes for 8 lanes
constexpr double kGuardBits = 2.0;  // a value, what the guard may add

class Mosaic final : public Method {
public:
    explicit Mosaic(const OptionValues& values)
        : values_(values), setting_{values.real("k"), values.real("v")}, guard_(values.real("guard")),
          tiers_(on("tiers")), query_(on("query")) {
        if (by_bits()) setting_ = preset_for(128, 128);
    }
    const MethodInfo& info() const override { return mosaic_method().info; }

    SidePlan initial(Side side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = kPageTokens};
        if (side == Side::key) {
            plan.store = key_pages(setting_.k, dim);
            if (guard_ > 0)
                plan.store.vectors = uint16_t(plan.store.vectors + spare(dim)); // not without tiers, see make
            if (on("mean")) {
                plan.space = KeySpace::centred;
                plan.window.first = kPageTokens;
            }
            start_ladder(0, dim, &plan);
            return plan;
        }
        plan.store = value_pages(setting_.v, dim);
        if (on("hadamard")) plan.transform.hadamard = dim;
        return plan;
    }

    bool freezes(Side side) const override { return side == Side::key && on("mean"); }

    void freeze(const PlanInput& in, SidePlan* plan) const override {
        plan->mean.assign(size_t(in.dim), 0.0f);
        for (int64_t t = 0; t < in.count; ++t)
            for (int32_t d = 0; d < in.dim; ++d)
                plan->mean[size_t(d)] += in.rows[t * in.dim + d];
        for (float& m : plan->mean)
            m = f16_to_f32(f32_to_f16_sat(m / float(in.count)));
    }

    void plan(const PlanInput& in, SidePlan* plan) const override {
        if (in.side != Side::key) return;
        std::array<float, kMaxHeadDim> weights, sorted; // no heap: plans are made while a step runs
        std::array<uint16_t, kMaxHeadDim> order;
        channel_weights(in, query_, weights.data());
        rank(weights.data(), in.dim, order.data());
        for (int32_t i = 0; i < in.dim; ++i)
            sorted[size_t(i)] = weights[order[size_t(i)]];
        int32_t budget = vectors(setting_.k, in.dim);
        LadderChoice choice = choose(sorted.data(), in.dim, budget);
        for (const int32_t most = plan->store.vectors; guard_ > 0 && choice.error > guard_ && budget < most;)
            choice = choose(sorted.data(), in.dim, ++budget);
        plan->ladder = choice.ladder;
        plan->raised = budget > vectors(setting_.k, in.dim);
        plan->channels.resize(size_t(in.dim));
        place_channels(plan->ladder, order.data(), in.dim, plan->channels.data());
    }

    std::vector<uint8_t> widths(Side side) const override {
        return side == Side::key ? std::vector<uint8_t>{8, 6, 4, 3, 2, 1, 0} : std::vector<uint8_t>{};
    }

    Status accept(const ModelShape& shape) override {
        if (Status s = validate(shape); !s) return s;
        for (const LayerShape& l : shape.layers)
            if (by_bits() && l.has_kv()) {
                setting_ = preset_for(l.key_dim, l.value_dim);
                break;
            }
        return accept_stores(*this, shape);
    }

private:
    bool on(const char* option) const { return values_.integer(option) != 0; }
    bool by_bits() const { return values_.text("bits") != "off"; }
    static int32_t vectors(double k, int32_t dim) { return std::max(1, int32_t(k * dim / kVectorBits)); }
    static int32_t spare(int32_t dim) { return int32_t((kGuardBits * dim + kVectorBits - 1) / kVectorBits); }

    // Without the guard's vectors.
    StoreSpec key_pages(double k, int32_t dim) const {
        StoreSpec spec;
        spec.kind = StoreKind::tiered;
        spec.rule = GridRule::searched;
        spec.group = kPageTokens;
        spec.shrinks = on("search") ? 7 : 1;
        if (tiers_) spec.vectors = uint16_t(vectors(k, dim));
        return spec;
    }
    StoreSpec value_pages(double v, int32_t dim) const {
        if (!on("fit")) return token_store(StoreKind::grid, GridRule::asym, uint8_t(v), dim, dim, ParamType::f16);
        StoreSpec spec = token_store(StoreKind::grid, GridRule::fitted, uint8_t(v), dim, dim, ParamType::f16);
        spec.wide = uint16_t(int32_t((v - std::floor(v)) * dim) / kLaneBlock * kLaneBlock);
        return spec;
    }

    // The preset with the most bits, by the layouts of its pages, that are at most those asked for; the smallest one
    // where none is.
    Preset preset_for(int32_t key_dim, int32_t value_dim) const {
        Preset best = kPresets[0];
        double most = 0.0;
        for (const Preset& preset : kPresets) {
            const uint32_t keys = worst_page_bytes(key_pages(preset.k, key_dim), Side::key, key_dim, {});
            const uint32_t values = layout(value_pages(preset.v, value_dim), Side::value, value_dim).bytes;
            const double bits = 8.0 * (keys + values) / (double(kPageTokens) * (key_dim + value_dim));
            if (bits <= values_.real("bits") && bits >= most) most = bits, best = preset;
        }
        return best;
    }

    LadderChoice choose(const float* sorted, int32_t dim, int32_t budget) const {
        if (tiers_) return choose_ladder(sorted, dim, budget);
        LadderChoice choice; // one width
        const int bits = int(std::floor(setting_.k));
        choice.ladder = Ladder::uniform(uint8_t(bits == 5 || bits == 7 ? bits - 1 : bits), uint16_t(dim));
        return choice;
    }

    OptionValues values_;
    Preset setting_;
    double guard_;
    bool tiers_, query_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    const auto& options = mosaic_method().info.options;
    for (const OptionInfo& option : options) {
        const bool bit_option = option.name == "k" || option.name == "v";
        const double x = bit_option ? values.real(option.name) : 0.0, step = option.name == "k" ? 0.25 : 0.5;
        if (bit_option && x / step != std::floor(x / step))
            return bad_options("mosaic: " + option.name + " = " + values.text(option.name) +
                               ": must be a multiple of " + (option.name == "k" ? "0.25" : "0.5"));
        if (bit_option && values.text("bits") != "off" && values.text(option.name) != option.fallback)
            return bad_options("mosaic: bits are asked for as a whole (bits) or for each side (k, v), not by " +
                               option.name + "=" + values.text(option.name) + " and bits=" + values.text("bits"));
    }
    if (values.integer("fit") == 0 && values.real("v") != std::floor(values.real("v")))
        return bad_options("mosaic: fit=0 needs a whole number of bits, not v=" + values.text("v"));
    if (values.integer("fit") == 0 && values.real("v") == 5.0)
        return bad_options("mosaic: fit=0 has no width of 5 bits (v=5)");
    if (values.integer("tiers") == 0 && values.text("guard") != "0")
        return bad_options("mosaic: tiers=0 leaves nothing to guard; give tiers=0 or guard, not both");
    if ((values.integer("fit") == 0 || values.integer("tiers") == 0) && values.text("bits") != "off")
        return bad_options("mosaic: bits chooses among the method's presets; fit=0 and tiers=0 go with k and v");
    return std::unique_ptr<Method>(new Mosaic(values));
}

} // namespace

const MethodEntry& mosaic_method() {
    static const MethodEntry entry{
        {.name = "mosaic",
         .summary = "key channels at 0 to 8 bits by what they do to the scores, rotated values at fitted steps",
         .paper = "-",
         .options = {{.name = "k",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "2.5",
                      .min = 0.5,
                      .max = 8,
                      .help = "bits a key value, a multiple of 0.25"},
                     {.name = "v",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "3",
                      .min = 1,
                      .max = 6,
                      .help = "bits a value, a multiple of 0.5"},
                     {.name = "bits",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "off",
                      .min = 0.5,
                      .max = 16,
                      .help = "instead of k and v: the best setting of at most so many true bits",
                      .word = "off"},
                     {.name = "guard",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "0",
                      .min = 0,
                      .max = 1000,
                      .help = "variance of a score above which a page takes more bits; 0: never"},
                     front_option("4"),
                     keep_option(),
                     switch_option("tiers", "1", "0: one width for all key channels"),
                     switch_option("query", "1", "0: the ladder follows the keys alone"),
                     switch_option("mean", "1", "0: keys keep their rotary mean"),
                     switch_option("search", "1", "0: ranges from minimum to maximum"),
                     switch_option("hadamard", "1", "0: values are not rotated"),
                     switch_option("fit", "1", "0: values between minimum and maximum, f16 metadata")},
         .uses_query = true,
         .query_sum = QuerySum::square},
        make};
    return entry;
}

} // namespace kvmosaic
