// A method that another one changes: what a subclass does not override is the inner method's answer.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kvmosaic/method.h"

namespace kvmosaic::eval {

class WrappedMethod : public Method {
public:
    explicit WrappedMethod(std::unique_ptr<Method> inner) : inner_(std::move(inner)) {}
    const MethodInfo& info() const override { return inner_->info(); }
    SidePlan initial(Side side, int32_t layer, int32_t kv_head, int32_t dim) const override {
        return inner_->initial(side, layer, kv_head, dim);
    }
    bool freezes(Side side) const override { return inner_->freezes(side); }
    void freeze(const PlanInput& in, SidePlan* plan) const override { inner_->freeze(in, plan); }
    void plan(const PlanInput& in, SidePlan* plan) const override { inner_->plan(in, plan); }
    std::vector<uint8_t> widths(Side side) const override { return inner_->widths(side); }
    QueryScope query_scope() const override { return inner_->query_scope(); }
    MapScope map_scope() const override { return inner_->map_scope(); }
    Status accept(const ModelShape& shape) override { return inner_->accept(shape); }

protected:
    const Method& inner() const { return *inner_; }

private:
    std::unique_ptr<Method> inner_;
};

} // namespace kvmosaic::eval
