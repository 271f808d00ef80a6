#include "model/support.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <gtest/gtest.h>
#include <unistd.h>

namespace kvmosaic::testing {

namespace fs = std::filesystem;

namespace {

// Errors only on the terminal, from the first call on.
void start_library() {
    static const bool once = [] {
        llama_log_set(
            [](ggml_log_level level, const char* text, void*) {
                if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
            },
            nullptr);
        llama_backend_init();
        return true;
    }();
    (void)once;
}

} // namespace

fs::path models_folder() {
    const char* cache = std::getenv("XDG_CACHE_HOME");
    const char* home = std::getenv("HOME");
    const fs::path base = cache && *cache ? fs::path(cache) : fs::path(home ? home : ".") / ".cache";
    return base / "kvmosaic" / "models";
}

std::string model_path(const std::string& name) {
    const fs::path path = models_folder() / (name + ".gguf");
    return fs::exists(path) ? path.string() : std::string();
}

std::string f32_model_path(const std::string& name) {
    const fs::path path = models_folder() / (name + "-f32.gguf");
    if (fs::exists(path)) return path.string();
    const std::string source = model_path(name);
    if (source.empty()) return {};
    start_library();
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    params.nthread = 2;
    // its own name until it is whole, so that a test that was ended early leaves no half model
    const fs::path part = models_folder() / (name + "-f32.gguf." + std::to_string(getpid()));
    if (llama_model_quantize(source.c_str(), part.c_str(), &params) != 0) {
        fs::remove(part);
        return {};
    }
    fs::rename(part, path);
    return path.string();
}

ModelPtr load_model(const std::string& path) {
    start_library();
    return ModelPtr(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
}

llama_context_params small_context(uint32_t tokens) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = tokens;
    params.n_batch = 1024;
    params.n_ubatch = 32;
    params.n_seq_max = 8;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = 2;
    return params;
}

ContextPtr stock_context(llama_model* model, llama_context_params params) {
    params.type_k = params.type_v = GGML_TYPE_F32;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    ContextPtr context(llama_init_from_model(model, params));
    EXPECT_TRUE(context) << "llama.cpp made no context on its own cache";
    EXPECT_EQ(cache_of(context.get()), nullptr);
    return context;
}

ContextPtr own_context(llama_model* model, llama_context_params params, const std::string& spec) {
    AdapterOptions options;
    options.spec = spec;
    const Result<llama_context*> made = make_context(model, params, options);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (!made) return nullptr;
    EXPECT_NE(cache_of(*made), nullptr);
    return ContextPtr(*made);
}

std::vector<llama_token> tokenize(const llama_model* model, const std::string& text) {
    const llama_vocab* vocab = llama_model_get_vocab(model);
    std::vector<llama_token> tokens(text.size() + 8);
    const int32_t count =
        llama_tokenize(vocab, text.data(), int32_t(text.size()), tokens.data(), int32_t(tokens.size()), true, false);
    tokens.resize(size_t(std::max(count, 0)));
    return tokens;
}

const std::string& prose() {
    static const std::string text = [] {
        const std::string part =
            "The ferry left the harbour before sunrise with eleven passengers, two bicycles and a crate of oranges "
            "that "
            "nobody had claimed. Halfway across the bay the engine coughed, recovered, and coughed again, so the "
            "captain "
            "sent the cook below to look at the fuel line while the rest of us counted the lights on the far shore. By "
            "the time the mountains turned pink we had learned three card games, the price of barley in each of the "
            "villages behind the cape, and why the bell in the customs house is rung only when the wind comes from the "
            "north. ";
        const std::string other =
            "A lighthouse keeper who writes down the weather every hour for forty years ends up with a book that is "
            "half "
            "numbers and half complaints about gulls. His successor reads it in one winter, underlines the storms, and "
            "discovers that the worst of them always followed a week in which the complaints stopped. ";
        return part + other + part + other + part + other + part + other;
    }();
    return text;
}

int decode(llama_context* context, const std::vector<Item>& items) {
    llama_batch batch = llama_batch_init(int32_t(items.size()), 0, 8);
    for (const Item& item : items) {
        const int32_t i = batch.n_tokens++;
        batch.token[i] = item.token;
        batch.pos[i] = item.position;
        batch.n_seq_id[i] = int32_t(item.sequences.size());
        std::copy(item.sequences.begin(), item.sequences.end(), batch.seq_id[i]);
        batch.logits[i] = item.logits;
    }
    const int code = llama_decode(context, batch);
    llama_batch_free(batch);
    return code;
}

std::vector<float> logits_of(llama_context* context, int32_t item) {
    const int32_t count = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    const float* first = llama_get_logits_ith(context, item);
    return {first, first + count};
}

namespace {

std::vector<double> log_softmax(const std::vector<float>& x) {
    const double top = double(*std::max_element(x.begin(), x.end()));
    double sum = 0.0;
    for (const float v : x)
        sum += std::exp(double(v) - top);
    const double norm = top + std::log(sum);
    std::vector<double> out(x.size());
    for (size_t i = 0; i < x.size(); ++i)
        out[i] = double(x[i]) - norm;
    return out;
}

} // namespace

double divergence(const std::vector<float>& p_logits, const std::vector<float>& q_logits) {
    const std::vector<double> p = log_softmax(p_logits), q = log_softmax(q_logits);
    double kl = 0.0;
    for (size_t i = 0; i < p.size(); ++i)
        kl += std::exp(p[i]) * (p[i] - q[i]);
    return kl;
}

float largest_gap(const std::vector<float>& a, const std::vector<float>& b) {
    float gap = 0.0f;
    for (size_t i = 0; i < a.size(); ++i) {
        const float here = std::fabs(a[i] - b[i]);
        if (!(here <= gap)) gap = here; // NaN stays visible
    }
    return gap;
}

} // namespace kvmosaic::testing
