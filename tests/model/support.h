// Models, batches and comparisons for the tests that run a real model.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "llama.h"
#include "llama/adapter.h"

namespace kvmosaic::testing {

// Folder of the fetched models: $XDG_CACHE_HOME or ~/.cache, then kvmosaic/models.
std::filesystem::path models_folder();
// Path of a fetched model, empty when it is not there.
std::string model_path(const std::string& name);
// The same model with all weights as f32, made once by llama.cpp's quantizer and kept beside it. With quantized weights
// ggml rounds activations to 8 bits, so that no two caches agree closely enough to be compared.
std::string f32_model_path(const std::string& name);

struct ModelDeleter {
    void operator()(llama_model* model) const { llama_model_free(model); }
};
using ModelPtr = std::unique_ptr<llama_model, ModelDeleter>;
ModelPtr load_model(const std::string& path);

struct ContextDeleter {
    void operator()(llama_context* context) const { llama_free(context); }
};
using ContextPtr = std::unique_ptr<llama_context, ContextDeleter>;

llama_context_params small_context(uint32_t tokens); // one pool for 8 sequences, ubatches of 32 rows
// llama.cpp's own cache in f32 with plain (not flash) attention.
ContextPtr stock_context(llama_model* model, llama_context_params params);
// A fatal failure, naming the reason, when there is none.
ContextPtr own_context(llama_model* model, llama_context_params params, const std::string& spec);

std::vector<llama_token> tokenize(const llama_model* model, const std::string& text);
const std::string& prose(); // some hundred words in one piece

struct Item {
    llama_token token = 0;
    llama_pos position = 0;
    std::vector<llama_seq_id> sequences;
    bool logits = false;
};
int decode(llama_context* context, const std::vector<Item>& items);
std::vector<float> logits_of(llama_context* context, int32_t item); // [vocabulary]

double divergence(const std::vector<float>& p_logits, const std::vector<float>& q_logits); // KL(p || q), nats
float largest_gap(const std::vector<float>& a, const std::vector<float>& b);

} // namespace kvmosaic::testing
