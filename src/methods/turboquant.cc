// TurboQuant: each key is rotated and becomes a vector of a fixed codebook times its norm; values on a plain grid
// (arXiv 2504.19874, ICLR 2026; no author code is public; vLLM's implementation, Apache-2.0, read for facts).
//
// What differs from the paper and from vLLM's implementation:
// - The rotation is a Walsh-Hadamard transform of each head, without random signs, as in vLLM; the paper draws a random
//   orthogonal matrix. A head size that is no power of two is cut into powers of two, each transformed alone.
// - The scale is the norm of the key over the norm of its chosen levels (vLLM's norm correction): the decoded vector
// has
//   the key's norm. The paper stores the norm alone.
// - Levels are the Lloyd-Max ones of N(0, 1), computed for this file by iterating the conditions of Lloyd (1957, 1982)
//   and Max (1960) in double precision.
// - Values are an asymmetric grid per token and head without rotation, as vLLM ships it; the paper rotates them too.
// - The sign sketch of the residual (the paper's variant for inner products) is left out: those who tried it in serving
//   saw it hurt. So are the mixed widths with outlier channels, and vLLM's 8-bit float keys.
// - The first and last `skip` layers that keep K/V stay raw, as in vLLM (2), and are counted. vLLM attends a prompt to
//   raw keys and values; here every row sees what it would see in decoding (DESIGN.md). `front`, `keep` are additions.
#include <algorithm>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& turboquant_method();

namespace {

// Optimal levels of a standard normal variable for 1, 2, 3 and 4 bits. Mean squared errors: 0.36338, 0.11748, 0.034548,
// 0.0095010.
constexpr float kLevels1[2] = {-0.797884560803f, 0.797884560803f};
constexpr float kLevels2[4] = {-1.5104176085f, -0.452780034636f, 0.452780034636f, 1.5104176085f};
constexpr float kLevels3[8] = {-2.15194570454f, -1.34390927851f, -0.756005281206f, -0.245094178944f,
                               0.245094178944f, 0.756005281206f, 1.34390927851f,   2.15194570454f};
constexpr float kLevels4[16] = {-2.732589571f,    -2.06901722653f,  -1.61804638602f, -1.25623119735f,
                                -0.942340456487f, -0.656759118532f, -0.38804829949f, -0.128395029851f,
                                0.128395029851f,  0.38804829949f,   0.656759118532f, 0.942340456487f,
                                1.25623119735f,   1.61804638602f,   2.06901722653f,  2.732589571f};
constexpr const float* kLevels[5] = {nullptr, kLevels1, kLevels2, kLevels3, kLevels4};

class TurboQuant final : public Method {
public:
    explicit TurboQuant(const OptionValues& values) : values_(values) {}
    const MethodInfo& info() const override { return turboquant_method().info; }

    SidePlan initial(Side side, int32_t layer, int32_t, int32_t dim) const override {
        SidePlan plan;
        if (stays_raw(layer)) {
            plan.store = raw_store(plan.raw);
            return plan; // the window of a plan that packs nothing
        }
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        if (side == Side::key) {
            const int32_t bits = values_.integer("k");
            plan.transform.hadamard = dim;
            plan.store =
                token_store(StoreKind::codebook, GridRule::codebook_norm, uint8_t(bits), dim, dim, params_of(values_));
            plan.store.book = kLevels[bits];
        } else {
            plan.store = token_store(StoreKind::grid, GridRule::asym, uint8_t(values_.integer("v")), dim, dim,
                                     params_of(values_));
        }
        return plan;
    }

    Status accept(const ModelShape& shape) override {
        layers_.clear();
        for (size_t i = 0; i < shape.layers.size(); ++i)
            if (shape.layers[i].has_kv()) layers_.push_back(int32_t(i));
        return accept_stores(*this, shape);
    }

private:
    // Among the first or last `skip` of the layers that keep K/V. Before the shape is known, all layers count and only
    // the first can be told.
    bool stays_raw(int32_t layer) const {
        const int32_t skip = values_.integer("skip");
        if (layers_.empty()) return layer < skip;
        const auto at = std::lower_bound(layers_.begin(), layers_.end(), layer) - layers_.begin();
        return at < skip || at >= int64_t(layers_.size()) - skip;
    }

    OptionValues values_;
    std::vector<int32_t> layers_; // those that keep K/V, ascending
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    return std::unique_ptr<Method>(new TurboQuant(values));
}

} // namespace

const MethodEntry& turboquant_method() {
    static const MethodEntry entry{
        {.name = "turboquant",
         .summary = "rotated keys as vectors of a fixed codebook with their norm, values on a plain grid",
         .paper = "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, 2025, arXiv 2504.19874",
         .options = {{.name = "k", .fallback = "4", .choices = {"1", "2", "3", "4"}, .help = "bits of a key code"},
                     bits_option("v", "bits of a value code", "4"),
                     {.name = "skip",
                      .fallback = "2",
                      .min = 0,
                      .max = 64,
                      .help = "layers that stay raw at either end of the model"},
                     front_option("0"),
                     keep_option(),
                     params_option()}},
        make};
    return entry;
}

} // namespace kvmosaic
