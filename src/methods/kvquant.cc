// KVQuant: keys from before the rotation, each channel scaled by constants of the model to a codebook of its layer;
// values on a codebook scaled to each token; the most extreme values of a token apart (arXiv 2401.18079, NeurIPS 2024;
// released code github.com/SqueezeAILab/KVQuant, no licence file: read for facts only, at 57a2383).
//
// What differs from paper and released code:
// - Codebooks come from a calibration file: k-means on the normalized activations, one for the keys and one for the
//   values of each layer. Weights by Fisher information need gradients; a file made elsewhere may hold such levels.
// - Outliers are counted per token and KV head: k = max(1, round(share * D)), the k largest of a key beyond its scaled
//   range, the extremes of a value in turn from above and below. Released: 21 + 21 over all heads of a token (no heads
//   are known there), fp32 values with int32 indices as differences to a level; here f16 values with 16-bit channels,
//   0.25 bits a value at D = 128, all counted.
// - The nearest level of a value is taken by midpoints on the range without the outliers; scale and offset of each
// token
//   are stored in f16. Released keys clip at their thresholds and so do these.
// - The matching of means and deviations at 2 bits (Q-Norm) is a matter of the file's levels.
// - Keys are turned back by their positions, packed, and turned again when read. Models whose rotation is not known
//   cannot be served. The first token stays raw (front=1; paper: 1 to 5). `keep` is an addition.
#include <algorithm>
#include <cmath>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& kvquant_method();

namespace {

class KvQuant final : public Method {
public:
    KvQuant(const OptionValues& values, Calibration file)
        : values_(values), file_(std::move(file)), bits_(uint8_t(values.integer("bits"))),
          share_(values.real("outliers")) {}
    const MethodInfo& info() const override { return kvquant_method().info; }

    // Every array is there: `check` has seen them.
    SidePlan initial(Side side, int32_t layer, int32_t kv_head, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        const GridRule rule = side == Side::key ? GridRule::codebook_fixed : GridRule::codebook_range;
        plan.store = token_store(StoreKind::codebook, rule, bits_, dim, dim, params_of(values_));
        plan.store.book = file_.find(book(), layer, -1, side)->data();
        plan.store.outliers = share_ > 0 ? uint8_t(std::max(1L, std::lround(share_ * dim))) : uint8_t(0);
        if (side == Side::key) {
            plan.space = KeySpace::pre_rope;
            plan.transform.shift = *file_.find("shift", layer, kv_head, side);
            plan.transform.scale = *file_.find("scale", layer, kv_head, side);
        }
        return plan;
    }

    Status accept(const ModelShape& shape) override {
        if (Status s = file_.fits(shape); !s) return s;
        return accept_stores(*this, shape);
    }

    // What a later plan will read.
    Status check() const {
        for (int32_t layer = 0; layer < int32_t(file_.layers.size()); ++layer) {
            const LayerShape& l = file_.layers[size_t(layer)];
            if (!l.has_kv()) continue;
            for (const Side side : {Side::key, Side::value}) {
                const auto levels = file_.need(book(), layer, -1, side, int64_t(1) << bits_);
                if (!levels) return levels.status();
                for (size_t i = 1; i < (*levels)->size(); ++i)
                    if (!((**levels)[i] > (**levels)[i - 1]))
                        return file_.wrong(book(), layer, -1, side, "must ascend");
            }
            for (int32_t head = 0; head < l.kv_heads; ++head) {
                const auto shift = file_.need("shift", layer, head, Side::key, l.key_dim);
                if (!shift) return shift.status();
                const auto scale = file_.need("scale", layer, head, Side::key, l.key_dim);
                if (!scale) return scale.status();
                for (const float x : **scale)
                    if (!(x > 0.0f)) return file_.wrong("scale", layer, head, Side::key, "must be above 0");
            }
        }
        return Status();
    }

private:
    std::string book() const { return "book" + std::to_string(bits_); }

    OptionValues values_;
    Calibration file_;
    uint8_t bits_;
    double share_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    Result<Calibration> file = open_calibration(values, kvquant_method().info);
    if (!file) return file.status();
    auto method = std::make_unique<KvQuant>(values, std::move(*file));
    if (Status s = method->check(); !s) return s;
    return std::unique_ptr<Method>(std::move(method));
}

} // namespace

const MethodEntry& kvquant_method() {
    static const MethodEntry entry{
        {.name = "kvquant",
         .summary = "keys before the rotation on a codebook per layer, values per token, outliers apart",
         .paper = "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization, 2024, arXiv "
                  "2401.18079",
         .options = {calib_option(),
                     {.name = "bits", .fallback = "3", .choices = {"2", "3", "4"}, .help = "bits of a code"},
                     {.name = "outliers",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "0.01",
                      .min = 0,
                      .max = 0.25,
                      .help = "share of each token's values kept apart in f16, at least one unless 0"},
                     front_option("1"),
                     keep_option(),
                     params_option()},
         .calibrated = true},
        make};
    return entry;
}

} // namespace kvmosaic
