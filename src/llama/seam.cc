// The functions that patched libllama calls, and what it is told it cannot have. Refusals are exceptions here, thrown
// only below llama_init_from_model, which turns them into a message and a null context.
#include "llama/seam.h"

#include <cstdio>
#include <set>
#include <stdexcept>
#include <string>

#include "llama-impl.h"
#include "llama/request.h"
#include "llama/rope.h"
#include "llama/step.h"

namespace kvmosaic::seam {
namespace {

// Once per text: tools make several contexts, and some of them silence llama.cpp's log, so a tool that runs on our
// cache because of its environment is told so on its standard error.
void say_once(const std::string& text) {
    static std::set<std::string> said;
    if (said.insert(text).second) std::fprintf(stderr, "kvmosaic: %s\n", text.c_str());
}

[[noreturn]] void fail(Status status) {
    const std::string message = "kvmosaic: " + status.message();
    if (Request* request = current_request()) {
        request->failure = std::move(status);
    } else {
        say_once(status.message());
    }
    throw std::runtime_error(message);
}

[[noreturn]] void cannot(llm_arch arch, const std::string& why) {
    fail({StatusCode::unsupported, std::string("cannot serve architecture '") + llm_arch_name(arch) + "': " + why});
}

bool asked_for() { return current_request() || environment_options().has_value(); }

MemoryOptions requested_options() {
    if (const Request* request = current_request()) return request->options;
    const auto options = environment_options();
    if (!*options) fail(options->status());
    return **options;
}

void refuse_model(const llama_model& model, const llama_memory_params& params, const llama_cparams& cparams) {
    const llama_hparams& hparams = model.hparams;
    if (hparams.is_mla()) cannot(model.arch, "multi-head latent attention (MLA)");
    if (hparams.use_alibi) cannot(model.arch, "ALiBi, a bias on attention scores");
    if (hparams.n_rel_attn_bkts > 0) cannot(model.arch, "relative position buckets, a bias on attention scores");
    if (hparams.hrm_prefix_lm) cannot(model.arch, "prefix attention masks");
    if (model.arch == LLM_ARCH_GROK) cannot(model.arch, "its own form of logit soft-capping");
    if (model.arch == LLM_ARCH_DFLASH) cannot(model.arch, "its graph writes to llama.cpp's cache itself");
    if (hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED) cannot(model.arch, "chunked attention windows");
    if (hparams.swa_type == LLAMA_SWA_TYPE_SYMMETRIC) cannot(model.arch, "symmetric attention windows");
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE && !cparams.causal_attn) {
        cannot(model.arch, "non-causal attention with a sliding window");
    }
    if (params.mem_other || cparams.ctx_other) cannot(model.arch, "it reads the cache of another context");
    if (params.ctx_type == LLAMA_CONTEXT_TYPE_MTP)
        cannot(model.arch, "multi-token prediction has a context of its own");
    if (cparams.training) cannot(model.arch, "training");
    if (params.type_k != GGML_TYPE_F16 || params.type_v != GGML_TYPE_F16) {
        cannot(model.arch, "a cache type was chosen with --cache-type-k/v, which a kvmosaic cache would ignore");
    }
}

// In a context that has another memory although ours was asked for: attention that is called there is part of a
// hybrid or of a cache of its own.
[[noreturn]] void refuse_foreign(llm_arch arch, const char* what) {
    cannot(arch, std::string("its memory is not a plain or sliding-window K/V cache (it builds ") + what + ")");
}

void expect(const llm_graph_context& g, int32_t layer, const char* field, int64_t graph, int64_t model) {
    if (graph == model) return;
    cannot(g.arch, "layer " + std::to_string(layer) + ": " + field + " is " + std::to_string(graph) +
                       " in the graph, " + std::to_string(model) + " in the model's parameters");
}

// Rows as the cache reads them: f32, the channels of a head one after the other.
ggml_tensor* as_rows(const llm_graph_context& g, ggml_tensor* t) {
    if (t->type != GGML_TYPE_F32) return ggml_cast(g.ctx0, t, GGML_TYPE_F32);
    if (t->nb[0] != sizeof(float) || t->nb[1] % sizeof(float) != 0 || t->nb[2] % sizeof(float) != 0) {
        return ggml_cont(g.ctx0, t);
    }
    return t;
}

// Adds the write of a layer; its result orders attend behind it.
ggml_tensor* add_write(const llm_graph_context& g, StepInput& input, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v,
                       LayerOp& op) {
    Memory& memory = input.memory();
    const LayerShape& shape = memory.cache().shape().layers[size_t(op.layer)];
    expect(g, op.layer, "the number of K heads", k->ne[1], shape.kv_heads);
    expect(g, op.layer, "the number of V heads", v->ne[1], shape.kv_heads);
    expect(g, op.layer, "the size of a K head", k->ne[0], shape.key_dim);
    expect(g, op.layer, "the size of a V head", v->ne[0], shape.value_dim);
    expect(g, op.layer, "the number of K rows", k->ne[2], q->ne[2]);
    expect(g, op.layer, "the number of V rows", v->ne[2], q->ne[2]);

    Rope rope = rope_from(k);
    ggml_tensor* plain = k->src[0];
    ggml_tensor* positions = k->src[1];
    op.check_rope = memory.check_rope() && rope.known &&
                    (plain->type == GGML_TYPE_F32 || plain->type == GGML_TYPE_F16) &&
                    plain->nb[0] == ggml_type_size(plain->type);
    // Within make_context a promise that does not hold is noted, and the context is made anew.
    if (!memory.state_rope(op.layer, std::move(rope)) && !current_request() && !g.hparams.no_alloc) {
        cannot(g.arch, "layer " + std::to_string(op.layer) +
                           ": its keys are not rotated as the model's parameters say, " + "which the method '" +
                           memory.cache().method().info().name + "' counts on");
    }

    ggml_tensor* args[5] = {as_rows(g, k), as_rows(g, v), q, plain, positions};
    ggml_tensor* marker =
        ggml_custom_4d(g.ctx0, GGML_TYPE_F32, 1, 1, 1, 1, args, op.check_rope ? 5 : 3, op_write, GGML_N_TASKS_MAX, &op);
    g.cb(marker, "kvmosaic_write", op.layer);
    ggml_build_forward_expand(g.gf, marker);
    return marker;
}

// As llama.cpp's own builder does it behind the attention.
ggml_tensor* project(const llm_graph_context& g, ggml_tensor* cur, ggml_tensor* wo, ggml_tensor* wo_b,
                     ggml_tensor* wo_s) {
    if (wo) {
        // half-precision accumulators are not enough for these
        const bool wide = g.arch == LLM_ARCH_GLM4 || g.arch == LLM_ARCH_GLM4_MOE || g.arch == LLM_ARCH_JAIS2;
        cur = g.build_lora_mm(wo, cur, wide ? nullptr : wo_s);
        if (wide) {
            ggml_prec_set_acc(cur, GGML_PREC_F32);
            if (wo_s) cur = ggml_mul(g.ctx0, cur, wo_s);
        }
    }
    if (wo_b) cur = ggml_add(g.ctx0, cur, wo_b);
    return cur;
}

} // namespace

llama_memory_i* memory(const llama_model& model, const llama_memory_params& params, const llama_cparams& cparams,
                       std::function<int32_t(int32_t)> share_from) {
    if (!asked_for()) return nullptr;
    const MemoryOptions options = requested_options();
    refuse_model(model, params, cparams);
    auto made = Memory::create(model, cparams, options, share_from);
    if (!made) fail(made.status());
    if (!current_request()) {
        say_once("this process runs on the cache " + options.spec + " (KVMOSAIC_CACHE), kernels " +
                 (*made)->cache().isa() + ", rows of a batch in " +
                 (options.cache.step == StepMode::chunk ? "chunk" : "decode") + " order");
    }
    return made->release();
}

llm_graph_input_attn_kv* input_kv(const llm_graph_context& g) { return make_input<llm_graph_input_attn_kv>(g); }

llm_graph_input_attn_kv_iswa* input_kv_iswa(const llm_graph_context& g) {
    return make_input<llm_graph_input_attn_kv_iswa>(g);
}

void refuse(const llm_graph_context& g, const char* what) {
    if (own_context(g.mctx)) cannot(g.arch, std::string("it builds ") + what + "()");
    if (asked_for() && g.mctx) refuse_foreign(g.arch, what);
}

ggml_tensor* attend(const llm_graph_context& g, llm_graph_input_i* inp, ggml_tensor* wo, ggml_tensor* wo_b,
                    ggml_tensor* wo_s, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v, ggml_tensor* kq_b,
                    ggml_tensor* sinks, ggml_tensor* v_mla, float scale, int il) {
    auto* input = dynamic_cast<StepInput*>(inp);
    if (!input) {
        if (asked_for()) refuse_foreign(g.arch, "attention on another cache");
        return nullptr;
    }
    if (kq_b) cannot(g.arch, "a bias on attention scores (kq_b)");
    if (v_mla) cannot(g.arch, "an absorbed projection of V (v_mla)");
    if (!k != !v) cannot(g.arch, "layer " + std::to_string(il) + " stores only one of K and V");
    if (sinks && sinks->type != GGML_TYPE_F32) cannot(g.arch, "attention sinks that are not f32");

    Memory& memory = input->memory();
    const int32_t owner = memory.owner_of(il);
    if (owner < 0 || (k && owner != il)) {
        cannot(g.arch, "layer " + std::to_string(il) +
                           (k ? " stores K/V that its parameters do not announce" : " has no K/V and shares none"));
    }
    // a layer that borrows K/V keeps its own number of query heads
    const LayerShape& shape = memory.cache().shape().layers[size_t(owner)];
    const int32_t heads = memory.cache().shape().layers[size_t(il)].heads;
    expect(g, il, "the number of Q heads", q->ne[1], heads);
    expect(g, il, "the size of a Q head", q->ne[0], shape.key_dim);
    if (heads % shape.kv_heads != 0)
        cannot(g.arch, "layer " + std::to_string(il) + ": K/V heads do not divide Q heads");

    LayerOp& op = input->add_op(owner);
    op.args.scale = scale;
    op.args.soft_cap = memory.hparams().attn_soft_cap ? memory.hparams().f_attn_logit_softcapping : 0.0f;
    op.args.causal = g.cparams.causal_attn;
    if (owner != il) op.args.heads = heads;
    if (memory.hparams().swa_type == LLAMA_SWA_TYPE_STANDARD && memory.hparams().is_swa(uint32_t(il))) {
        op.args.window = int32_t(memory.hparams().n_swa);
    }
    op.has_sinks = sinks != nullptr;

    // keep the three producers together, as llama.cpp's own builder does
    q = as_rows(g, q);
    ggml_build_forward_expand(g.gf, q);
    ggml_tensor* marker = q;
    if (k) {
        ggml_build_forward_expand(g.gf, v);
        ggml_build_forward_expand(g.gf, k);
        marker = add_write(g, *input, q, k, v, op);
    }
    ggml_tensor* args[3] = {q, marker, sinks};
    ggml_tensor* cur = ggml_custom_4d(g.ctx0, GGML_TYPE_F32, int64_t(shape.value_dim) * heads, q->ne[2], 1, 1, args,
                                      sinks ? 3 : 2, op_attend, GGML_N_TASKS_MAX, &op);
    g.cb(cur, "kqv_out", il);
    ggml_build_forward_expand(g.gf, cur);
    return project(g, cur, wo, wo_b, wo_s);
}

} // namespace kvmosaic::seam
