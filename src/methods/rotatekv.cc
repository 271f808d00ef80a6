// RotateKV: keys from before the rotation are mixed over the KV heads by a Walsh-Hadamard transform, their channels
// sorted by size, and packed per token; values are mixed within each head (arXiv 2501.16383, IJCAI 2025; released code
// github.com/ZunhaiSu/RotateKV, no licence: read for facts only, at 3055e2b).
//
// What differs from paper and released code:
// - Steps are 2^b - 1. The released code has b^2 - 1, which is 8 instead of 7 at 3 bits.
// - The transform joins the largest power of two, at most 4, that divides the number of KV heads (released: always 4,
// so
//   that models with 2 KV heads cannot be served). The channels of all heads of a layer are sorted, as released; the
//   order comes from a calibration file. A head's page holds a run of the sorted channels.
// - Groups are runs of min(128, D) sorted channels, never across pages. Clipping 0.8 at 2 bits, none at 3 and 4, as
//   released.
// - Rows kept raw ("sinks"): released, the 20 tokens with the most massive hidden states of the prompt in each layer.
//   A cache sees no hidden states: here the 20 rows with the widest range (max - min) among the first 128 after the
//   front, for each side and head by itself. Later rows are always packed, as released.
// - Nothing is packed before those 128 rows are there. `front`, `keep` are additions; rows see what they would see in
//   decoding (DESIGN.md).
#include <algorithm>
#include <array>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& rotatekv_method();

namespace {

using Orders = std::vector<std::vector<uint16_t>>; // [L][G * D]

class RotateKv final : public Method {
public:
    RotateKv(const OptionValues& values, Calibration file, Orders orders)
        : values_(values), file_(std::move(file)), orders_(std::move(orders)), pins_(values.integer("pins")) {}
    const MethodInfo& info() const override { return rotatekv_method().info; }

    SidePlan initial(Side side, int32_t layer, int32_t, int32_t dim) const override {
        const auto bits = uint8_t(values_.integer("bits"));
        SidePlan plan;
        plan.window = {
            .front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1, .first = kPageTokens};
        plan.store = token_store(StoreKind::grid, GridRule::integer, bits, side == Side::key ? 128 : dim, dim,
                                 params_of(values_));
        plan.store.clip = bits == 2 ? 0.8f : 1.0f;
        plan.pins = pins_;
        plan.transform.hadamard = dim;
        if (side == Side::key) {
            const int32_t heads = file_.layers[size_t(layer)].kv_heads;
            plan.space = KeySpace::pre_rope;
            plan.transform.joined = heads;
            plan.transform.hadamard = dim * (heads % 4 == 0 ? 4 : heads % 2 == 0 ? 2 : 1);
            plan.transform.order = orders_[size_t(layer)];
        }
        return plan;
    }

    bool freezes(Side) const override { return pins_ > 0; }

    void freeze(const PlanInput& in, SidePlan* plan) const override {
        std::array<float, kPageTokens> ranges{};
        std::array<uint16_t, kPageTokens> rows;
        const auto count = int32_t(std::min<int64_t>(in.count - in.front, kPageTokens));
        for (int32_t t = 0; t < count; ++t) {
            const float* row = in.rows + (in.front + t) * int64_t(in.dim);
            const auto [low, high] = std::minmax_element(row, row + in.dim);
            ranges[size_t(t)] = *high - *low;
        }
        const int32_t pins = std::min(pins_, count);
        rank(ranges.data(), count, rows.data());
        std::sort(rows.begin(), rows.begin() + pins);
        plan->pinned.assign(rows.begin(), rows.begin() + pins);
    }

    Status accept(const ModelShape& shape) override {
        if (Status s = file_.fits(shape); !s) return s;
        return accept_stores(*this, shape);
    }

private:
    OptionValues values_;
    Calibration file_;
    Orders orders_;
    int32_t pins_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    Result<Calibration> file = open_calibration(values, rotatekv_method().info);
    if (!file) return file.status();
    Orders orders;
    for (const LayerShape& l : file->layers) {
        const auto layer = int32_t(orders.size());
        orders.emplace_back();
        if (!l.has_kv()) continue;
        auto order = read_order(*file, "order", layer, -1, Side::key, int64_t(l.kv_heads) * l.key_dim);
        if (!order) return order.status();
        orders.back() = std::move(*order);
    }
    return std::unique_ptr<Method>(new RotateKv(values, std::move(*file), std::move(orders)));
}

} // namespace

const MethodEntry& rotatekv_method() {
    static const MethodEntry entry{
        {.name = "rotatekv",
         .summary = "keys before the rotation, mixed over heads and sorted by channel; the widest early rows stay raw",
         .paper = "RotateKV: Accurate and Robust 2-Bit KV Cache Quantization for LLMs via Outlier-Aware Adaptive "
                  "Rotations, 2025, arXiv 2501.16383",
         .options = {calib_option(),
                     {.name = "bits", .fallback = "2", .choices = {"2", "3", "4"}, .help = "bits of a code"},
                     {.name = "pins",
                      .fallback = "20",
                      .min = 0,
                      .max = 128,
                      .help = "rows of the first 128 that stay raw, those with the widest range"},
                     front_option("0"),
                     keep_option(),
                     params_option()},
         .calibrated = true},
        make};
    return entry;
}

} // namespace kvmosaic
