#include "eval/one_layer.h"

#include <string>

#include "eval/wrapped.h"

namespace kvmosaic::eval {

namespace {

// The rest is only asked where rows are packed, which they are in the one layer.
class OneLayer final : public WrappedMethod {
public:
    OneLayer(std::unique_ptr<Method> inner, std::unique_ptr<Method> others, int32_t layer)
        : WrappedMethod(std::move(inner)), others_(std::move(others)), layer_(layer) {
        set_spec(this->inner().spec() + " in layer " + std::to_string(layer));
    }
    SidePlan initial(Side side, int32_t layer, int32_t kv_head, int32_t dim) const override {
        return (layer == layer_ ? inner() : *others_).initial(side, layer, kv_head, dim);
    }

private:
    std::unique_ptr<Method> others_;
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
