// The two operations of a layer. They run on the threads of ggml's pool and must neither throw nor allocate.
// Tensors are always read through dst->src: the scheduler may have put copies there.
#include "llama/rope.h"
#include "llama/step.h"

namespace kvmosaic::seam {
namespace {

// [D, heads, rows] in ggml's order, D contiguous.
RowsF32 rows_of(const ggml_tensor* t) {
    constexpr size_t kElement = sizeof(float);
    return {static_cast<const float*>(t->data), int64_t(t->nb[2] / kElement), int64_t(t->nb[1] / kElement)};
}

void check_rope(const LayerOp& op, const ggml_tensor* dst, int ith, int nth) {
    const ggml_tensor* keys = dst->src[0];
    const ggml_tensor* plain = dst->src[3];
    const int32_t* positions = static_cast<const int32_t*>(dst->src[4]->data);
    const Rope& rope = op.memory->rope(op.layer);
    float gap = 0.0f;
    for (int64_t row = ith; row < keys->ne[2]; row += nth) {
        for (int64_t head = 0; head < keys->ne[1]; ++head) {
            const float here = rope_difference(rope, keys, plain, head, row, positions[row]);
            gap = here > gap ? here : gap;
        }
    }
    op.memory->note_gap(gap);
}

} // namespace

void op_write(ggml_tensor* dst, int ith, int nth, void* data) {
    const LayerOp& op = *static_cast<const LayerOp*>(data);
    if (const Probe& probe = op.memory->probe(); probe && ith == 0) {
        probe(op.layer, dst->src[2]->ne[2], rows_of(dst->src[2]), rows_of(dst->src[0]), rows_of(dst->src[1]));
    }
    op.memory->cache().write(op.layer, rows_of(dst->src[2]), rows_of(dst->src[0]), rows_of(dst->src[1]),
                             Thread{ith, nth});
    if (op.check_rope) check_rope(op, dst, ith, nth);
    if (ith == 0) *static_cast<float*>(dst->data) = 0.0f;
}

void op_attend(ggml_tensor* dst, int ith, int nth, void* data) {
    const LayerOp& op = *static_cast<const LayerOp*>(data);
    AttendArgs args = op.args;
    if (op.has_sinks) args.sinks = static_cast<const float*>(dst->src[2]->data);
    op.memory->cache().attend(op.layer, rows_of(dst->src[0]), args, static_cast<float*>(dst->data), Thread{ith, nth});
}

} // namespace kvmosaic::seam
