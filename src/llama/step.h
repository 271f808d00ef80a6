// Graph inputs that carry a step's operations, and the two operations of a layer. Internal to src/llama.
#pragma once

#include <deque>
#include <memory>

#include "ggml.h"
#include "llama-graph.h"
#include "llama/memory.h"

namespace kvmosaic::seam {

// What the operations of one layer need; lives as long as the graph that points at it.
struct LayerOp {
    Memory* memory = nullptr;
    int32_t layer = 0; // whose K/V is written or read
    AttendArgs args;   // sinks are filled in from the tensor
    bool has_sinks = false;
    bool check_rope = false;
};

// Every thread of the pool calls them. Sources of write: k, v, q [, un-rotated k, positions]; its result is a marker
// that orders attend behind it. Sources of attend: q, marker (or q again) [, sinks].
void op_write(ggml_tensor* dst, int ith, int nth, void* data);
void op_attend(ggml_tensor* dst, int ith, int nth, void* data);

// Our part of a graph input. The rows of a step are placed by StepContext::apply, so no tensor has to be filled.
class StepInput {
public:
    StepInput(const llm_graph_context& graph, Memory* memory) : memory_(memory), tokens_(graph.n_tokens) {}
    virtual ~StepInput() = default;

    Memory& memory() const { return *memory_; }
    LayerOp& add_op(int32_t layer);
    bool serves(const llm_graph_params& params) const;

private:
    Memory* memory_;
    int64_t tokens_;
    std::deque<LayerOp> ops_; // addresses stay
};

// Stands where the model's graph code expects its own input type.
template <typename Base>
class OwnInput final : public Base, public StepInput {
public:
    OwnInput(const llm_graph_context& graph, Memory* memory)
        : Base(graph.hparams, graph.cparams, nullptr), StepInput(graph, memory) {}
    void set_input(const llama_ubatch* /*ubatch*/) override {}
    bool can_reuse(const llm_graph_params& params) override { return serves(params); }
};

// Null when the graph's memory context is not ours.
const StepContext* own_context(const llama_memory_context_i* context);

template <typename Base>
Base* make_input(const llm_graph_context& graph) {
    const StepContext* context = own_context(graph.mctx);
    if (!context) return nullptr;
    auto input = std::make_unique<OwnInput<Base>>(graph, context->memory());
    Base* raw = input.get();
    graph.res->add_input(std::move(input));
    return raw;
}

} // namespace kvmosaic::seam
