#include "eval/one_layer.h"

#include <string>

namespace kvmosaic::eval {

namespace {

class OneLayer final : public Method {
public:
    OneLayer(std::unique_ptr<Method> inner, std::unique_ptr<Method> others, int32_t layer)
        : inner_(std::move(inner)), others_(std::move(others)), layer_(layer) {
        set_spec(inner_->spec() + " in layer " + std::to_string(layer));
    }
    const MethodInfo& info() const override { return inner_->info(); }
    SidePlan initial(Side side, int32_t layer, int32_t kv_head, int32_t dim) const override {
        return (layer == layer_ ? *inner_ : *others_).initial(side, layer, kv_head, dim);
    }
    // The rest is only asked where rows are packed, which they are in the one layer.
    bool freezes(Side side) const override { return inner_->freezes(side); }
    void freeze(const PlanInput& in, SidePlan* plan) const override { inner_->freeze(in, plan); }
    void plan(const PlanInput& in, SidePlan* plan) const override { inner_->plan(in, plan); }
    std::vector<uint8_t> widths(Side side) const override { return inner_->widths(side); }
    QueryScope query_scope() const override { return inner_->query_scope(); }
    MapScope map_scope() const override { return inner_->map_scope(); }
    Status accept(const ModelShape& shape) override { return inner_->accept(shape); }

private:
    std::unique_ptr<Method> inner_, others_;
    int32_t layer_;
};

} // namespace

Result<std::unique_ptr<Method>> only_layer(const std::string& spec, int32_t layer) {
    auto inner = open_method(spec);
    if (!inner) return inner.status();
    auto others = open_method("f16");
    if (!others) return others.status();
    return std::unique_ptr<Method>(new OneLayer(std::move(*inner), std::move(*others), layer));
}

} // namespace kvmosaic::eval
