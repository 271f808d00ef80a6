#include "llama/step.h"

namespace kvmosaic::seam {

const StepContext* own_context(const llama_memory_context_i* context) {
    return dynamic_cast<const StepContext*>(context);
}

LayerOp& StepInput::add_op(int32_t layer) {
    LayerOp& op = ops_.emplace_back();
    op.memory = memory_;
    op.layer = layer;
    return op;
}

// Neither masks nor row counts are in the graph: it serves every ubatch of as many tokens on the same cache.
bool StepInput::serves(const llm_graph_params& params) const {
    const StepContext* context = own_context(params.mctx);
    return context && context->memory() == memory_ && int64_t(params.ubatch.n_tokens) == tokens_;
}

} // namespace kvmosaic::seam
