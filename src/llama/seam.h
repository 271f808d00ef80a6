// The seam between libllama and kvmosaic's cache.
//
// These are the only names that the patched llama.cpp sources know. Every function answers "not mine"
// (a null pointer, or simply returning) unless a kvmosaic cache was asked for, so a patched libllama
// behaves like an unpatched one until then. This file is copied into llama.cpp's source folder by
// cmake/apply_seam.cmake; changing it rebuilds the llama.cpp libraries of the user's cache folder.
#pragma once

#include <cstdint>
#include <functional>

struct ggml_tensor;
struct llama_cparams;
struct llama_memory_i;
struct llama_memory_params;
struct llama_model;
struct llm_graph_context;

class llm_graph_input_i;
class llm_graph_input_attn_kv;
class llm_graph_input_attn_kv_iswa;

namespace kvmosaic::seam {

// Called where llama.cpp is about to create a plain or a sliding-window KV cache.
// `share_from` (may be empty) maps a layer without own K/V to the layer whose K/V it reads.
// Throws std::runtime_error naming the reason when a cache was asked for that cannot serve the model.
llama_memory_i * memory(const llama_model & model, const llama_memory_params & params, const llama_cparams & cparams,
                        std::function<int32_t(int32_t)> share_from);

// Called at the head of the graph's attention-input builders; non-null when the memory context is ours.
llm_graph_input_attn_kv      * input_kv     (const llm_graph_context & g);
llm_graph_input_attn_kv_iswa * input_kv_iswa(const llm_graph_context & g);

// Called at the head of build_attn(); non-null (the projected attention output) when `inp` is ours.
ggml_tensor * attend(const llm_graph_context & g, llm_graph_input_i * inp,
                     ggml_tensor * wo, ggml_tensor * wo_b, ggml_tensor * wo_s,
                     ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                     ggml_tensor * kq_b, ggml_tensor * sinks, ggml_tensor * v_mla,
                     float scale, int il);

// Called at the head of graph builders that would cast the memory context to a type that ours is not.
// Throws when the memory context is ours.
void refuse(const llm_graph_context & g, const char * what);

} // namespace kvmosaic::seam
