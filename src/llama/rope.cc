#include "llama/rope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "ggml-backend.h"
#include "kvmosaic/store.h"

#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-model.h"

namespace kvmosaic::seam {
namespace {

// False when they are there but cannot be read here and now.
bool take_factors(const ggml_tensor* factors, Rope* rope) {
    if (!factors) return true;
    const bool at_hand = factors->op == GGML_OP_NONE && factors->type == GGML_TYPE_F32 && factors->data &&
                         factors->buffer && ggml_backend_buffer_is_host(factors->buffer) &&
                         factors->ne[0] >= rope->rotary / 2;
    if (!at_hand) return false;
    const float* first = static_cast<const float*>(factors->data);
    rope->factors.assign(first, first + rope->rotary / 2);
    return true;
}

} // namespace

Rope rope_from(const ggml_tensor* keys) {
    Rope rope;
    if (!keys || keys->op != GGML_OP_ROPE) return rope;
    // parameters of ggml_rope_ext: -, channels, mode, -, original context, then six floats, sections, first channel
    const int32_t* params = keys->op_params;
    const int32_t mode = params[2], first_channel = params[15];
    if ((mode != GGML_ROPE_TYPE_NORMAL && mode != GGML_ROPE_TYPE_NEOX) || first_channel != 0) return rope;
    rope.halves = mode == GGML_ROPE_TYPE_NEOX;
    rope.rotary = params[1];
    rope.original_context = params[4];
    float values[6];
    std::memcpy(values, params + 5, sizeof(values));
    rope.base = values[0];
    rope.freq_scale = values[1];
    rope.ext_factor = values[2];
    rope.attn_factor = values[3];
    rope.beta_fast = values[4];
    rope.beta_slow = values[5];
    rope.known = take_factors(keys->src[2], &rope);
    return rope;
}

Rope rope_of_parameters(const llama_model& model, const llama_cparams& cparams, int32_t layer) {
    const llama_hparams& hparams = model.hparams;
    Rope rope;
    const bool plain = hparams.rope_type == LLAMA_ROPE_TYPE_NORM || hparams.rope_type == LLAMA_ROPE_TYPE_NEOX;
    if (!plain || !hparams.has_rope(uint32_t(layer))) return rope;
    rope.halves = hparams.rope_type == LLAMA_ROPE_TYPE_NEOX;
    rope.rotary = int32_t(hparams.n_rot(uint32_t(layer)));
    if (rope.rotary < 2 || rope.rotary % 2 != 0 || rope.rotary > int32_t(hparams.n_embd_head_k(uint32_t(layer)))) {
        return rope;
    }
    rope.original_context = int32_t(cparams.n_ctx_orig_yarn);
    rope.base = model.get_rope_freq_base(cparams, layer);
    rope.freq_scale = model.get_rope_freq_scale(cparams, layer);
    rope.ext_factor = cparams.yarn_ext_factor;
    rope.attn_factor = cparams.yarn_attn_factor;
    rope.beta_fast = cparams.yarn_beta_fast;
    rope.beta_slow = cparams.yarn_beta_slow;
    // A model that is only measured has no weights yet: nothing will turn in it.
    rope.known = take_factors(model.get_rope_factors(cparams, layer), &rope) || hparams.no_alloc;
    return rope;
}

bool same_turn(const Rope& a, const Rope& b) {
    if (!a.known || !b.known) return a.known == b.known;
    if (a.halves != b.halves || a.rotary != b.rotary || a.magnitude() != b.magnitude()) return false;
    for (int32_t i = 0; i < a.rotary / 2; ++i) {
        if (a.angle(i) != b.angle(i)) return false;
    }
    return true;
}

namespace {

void load_row(const ggml_tensor* t, int64_t head, int64_t row, float* out) {
    const char* at = static_cast<const char*>(t->data) + size_t(head) * t->nb[1] + size_t(row) * t->nb[2];
    if (t->type == GGML_TYPE_F32) {
        std::memcpy(out, at, size_t(t->ne[0]) * sizeof(float));
    } else {
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(at), out, t->ne[0]);
    }
}

} // namespace

float rope_difference(const Rope& rope, const ggml_tensor* keys, const ggml_tensor* plain, int64_t head, int64_t row,
                      int32_t position) {
    std::array<float, kMaxHeadDim> turned, stored;
    const int64_t dim = keys->ne[0];
    load_row(plain, head, row, turned.data());
    load_row(keys, head, row, stored.data());
    rope.turn(turned.data(), double(position));
    const float magnitude = float(rope.magnitude());
    for (int32_t i = 0; i < rope.rotary; ++i)
        turned[size_t(i)] *= magnitude;
    float gap = 0.0f;
    for (int64_t d = 0; d < dim; ++d)
        gap = std::max(gap, std::fabs(turned[size_t(d)] - stored[size_t(d)]));
    return gap;
}

} // namespace kvmosaic::seam
