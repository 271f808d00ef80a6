// SKVQ: channels with similar ranges share a scale: they are sorted into clusters by a calibration, and each token is
// packed cluster by cluster on a clipped grid once it leaves a window of 128 (arXiv 2405.06219, COLM 2024; released
// code github.com/cat538/SKVQ, MIT, read for facts at fdfc7ec).
//
// What differs from paper and released code:
// - Clusters are made within one KV head, D / group of them, so that a head can be read by itself. across=1 is the
//   released form: clusters over the channels of all KV heads of a layer, cut where a head's page ends, so that a scale
//   is never shared between pages.
// - Clusters differ in size; sizes and orders come from a calibration file and are the same for all tokens.
// - The range is clipped by 0.92 as in the released code, which has the factor fixed; the paper searches it per group.
// - Scales and offsets are 8-bit floats (E4M3) by default, as published; a constant cluster gets scale 0 (released: a
//   smallest scale of 1e-5). Codes are made with the stored parameters.
// - 1.5 bits are three levels, five codes a byte (1.6 bits). One released path stores a scale where the offset belongs;
//   not here. Keys are post-RoPE; the released option for keys before it is left out.
// - Window and front of the paper (128 and 5) are `keep` + 128 and `front`. Rows see what they would see in decoding.
#include <algorithm>
#include <array>
#include <cmath>

#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& skvq_method();

namespace {

using Numbers = std::vector<uint16_t>;

// Of one layer and side. Without joined heads each head has its own order.
struct Clusters {
    std::vector<Numbers> order; // [G][D], or [1][G * D]
    std::vector<Numbers> edges; // [G][groups + 1], channels of the head's page
};

class Skvq final : public Method {
public:
    Skvq(const OptionValues& values, Calibration file)
        : values_(values), file_(std::move(file)), across_(values.integer("across") == 1),
          group_(values.integer("group")) {}
    const MethodInfo& info() const override { return skvq_method().info; }

    SidePlan initial(Side side, int32_t layer, int32_t kv_head, int32_t dim) const override {
        const double width = values_.real(side == Side::key ? "k" : "v");
        const Clusters& clusters = clusters_[size_t(layer)][size_t(side)];
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep") + kPageTokens, .flush = 1};
        plan.store =
            token_store(StoreKind::grid, GridRule::asym, uint8_t(std::lround(width)), group_, dim, params_of(values_));
        if (width == 1.5) plan.store.levels = 3;
        plan.store.clip = float(values_.real("clip"));
        plan.store.edges = clusters.edges[size_t(kv_head)].data();
        plan.store.edge_groups = uint8_t(clusters.edges[size_t(kv_head)].size() - 1);
        plan.transform.order = clusters.order[across_ ? 0 : size_t(kv_head)];
        if (across_) plan.transform.joined = file_.layers[size_t(layer)].kv_heads;
        return plan;
    }

    Status accept(const ModelShape& shape) override {
        if (Status s = file_.fits(shape); !s) return s;
        return accept_stores(*this, shape);
    }

    Status load() {
        clusters_.resize(file_.layers.size());
        for (size_t layer = 0; layer < clusters_.size(); ++layer) {
            const LayerShape& l = file_.layers[layer];
            for (const Side side : {Side::key, Side::value})
                for (int32_t head = 0; head < (across_ ? std::min(l.kv_heads, 1) : l.kv_heads); ++head)
                    if (Status s = load(int32_t(layer), across_ ? -1 : head, side, l.kv_heads, l.dim(side)); !s)
                        return s;
        }
        return Status();
    }

private:
    Status load(int32_t layer, int32_t head, Side side, int32_t kv_heads, int32_t dim) {
        const std::string suffix = std::to_string(group_) + (across_ ? "x" : ""), name = "edges" + suffix;
        const int32_t channels = across_ ? kv_heads * dim : dim;
        auto order = read_order(file_, "order" + suffix, layer, head, side, channels);
        if (!order) return order.status();
        const std::vector<float>* edges = file_.find(name, layer, head, side);
        if (edges == nullptr) return file_.wrong(name, layer, head, side, "is missing");
        const size_t most = size_t(std::max(1, channels / group_)) + 1;
        if (edges->size() < 2 || edges->size() > most || edges->front() != 0.0f || edges->back() != float(channels))
            return file_.wrong(name, layer, head, side,
                               "must be 2 to " + std::to_string(most) + " numbers from 0 to " +
                                   std::to_string(channels));
        for (size_t i = 1; i < edges->size(); ++i)
            if (!((*edges)[i] > (*edges)[i - 1]) || (*edges)[i] != float(int32_t((*edges)[i])))
                return file_.wrong(name, layer, head, side, "must ascend in whole numbers");
        Clusters& clusters = clusters_[size_t(layer)][size_t(side)];
        clusters.order.push_back(std::move(*order));
        for (int32_t first = 0; first < channels; first += dim) { // one page after the other
            Numbers own = {0};
            for (const float edge : *edges)
                if (int32_t(edge) > first && int32_t(edge) < first + dim)
                    own.push_back(uint16_t(int32_t(edge) - first));
            own.push_back(uint16_t(dim));
            if (own.size() > 256) return file_.wrong(name, layer, head, side, "cuts a page into more than 255 groups");
            clusters.edges.push_back(std::move(own));
        }
        return Status();
    }

    OptionValues values_;
    Calibration file_;
    bool across_;
    int32_t group_;
    std::vector<std::array<Clusters, 2>> clusters_; // [L][side]
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    Result<Calibration> file = open_calibration(values, skvq_method().info);
    if (!file) return file.status();
    auto method = std::make_unique<Skvq>(values, std::move(*file));
    if (Status s = method->load(); !s) return s;
    return std::unique_ptr<Method>(std::move(method));
}

OptionInfo width_option(const char* name, const char* help) {
    return {
        .name = name, .kind = OptionInfo::Kind::real, .fallback = "2", .choices = {"1.5", "2", "3", "4"}, .help = help};
}

} // namespace

const MethodEntry& skvq_method() {
    static const MethodEntry entry{
        {.name = "skvq",
         .summary = "channels of similar range share a scale, clipped, behind a window of 128 tokens",
         .paper = "SKVQ: Sliding-window Key and Value Cache Quantization for Large Language Models, 2024, arXiv "
                  "2405.06219",
         .options = {calib_option(),
                     width_option("k", "bits of a key code; 1.5 is three levels"),
                     width_option("v", "bits of a value code"),
                     {.name = "group",
                      .fallback = "128",
                      .choices = {"32", "64", "128"},
                      .help = "mean size of a cluster: D / group of them, at least one"},
                     switch_option("across", "0", "1: clusters over the channels of all KV heads"),
                     {.name = "clip",
                      .kind = OptionInfo::Kind::real,
                      .fallback = "0.92",
                      .min = 0.5,
                      .max = 1,
                      .help = "the range of a cluster times this is divided into steps"},
                     front_option("5"),
                     keep_option(),
                     choice_option("params", {"f8e4m3", "f16", "bf16"}, "type of scales and offsets")},
         .calibrated = true},
        make};
    return entry;
}

} // namespace kvmosaic
