// A loaded model and contexts on it whose K/V cache is ours; tokens in, logits out. The only place where evaluation
// and the program meet libllama.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "eval/files.h"
#include "kvmosaic/cache.h"
#include "llama/maker.h"
#include "llama/probe.h"

struct llama_context;
struct llama_model;
struct llama_vocab;

namespace kvmosaic::eval {

// Sends libllama's log to stderr when verbose; otherwise keeps it quiet. Either way the first error line is kept.
void set_verbose(bool verbose);
std::string last_log_error(); // and forgets it; empty when there was none

// Receives every log line of libllama while it lives (progress of the quantizer is only told there).
class LogListener {
public:
    explicit LogListener(std::function<void(const std::string&)> on_text);
    ~LogListener();
    LogListener(const LogListener&) = delete;
    LogListener& operator=(const LogListener&) = delete;
};

struct LoadOptions {
    // Lets ggml store weights in an order of its own, where the products of a token are rounded by its place among the
    // others of its step. Without it a token's products do not depend on what is computed beside it.
    bool repack = true;
};

class Model {
public:
    // Checks the file before libllama sees it.
    static Result<Model> load(const std::string& path, const Progress& progress = {}, const LoadOptions& options = {});

    llama_model* get() const { return model_.get(); }
    const llama_vocab* vocab() const;
    int32_t vocab_size() const;
    int32_t trained_context() const;
    std::string description() const;

    // `special`: the model's own begin token where it wants one. `parse`: control tokens written out in the text count
    // as such (templates).
    std::vector<int32_t> tokenize(const std::string& text, bool special, bool parse) const;
    std::string piece(int32_t token) const; // text of a token; empty for control tokens
    bool ends_generation(int32_t token) const;
    bool begins_with_token() const; // whether texts start with a begin token
    int32_t begin_token() const;
    std::string chat_template() const;                                     // empty when the file has none
    const std::vector<std::string>& warnings() const { return warnings_; } // what in the file will hurt

private:
    struct Free {
        void operator()(llama_model* m) const;
    };
    std::unique_ptr<llama_model, Free> model_;
    std::vector<std::string> warnings_;
};

// Tokens that a sequence gets in a step.
struct Piece {
    int32_t sequence = 0;
    std::span<const int32_t> tokens;
    std::span<const uint8_t> logits = {}; // for which of them logits are wanted; empty: for the last one
};

struct ContextOptions {
    std::string spec = "f16";
    MethodMaker method;  // in place of `spec` where it is set
    int32_t context = 0; // tokens; 0: as trained
    int32_t ubatch = 512;
    int32_t threads = 0;   // 0: all of this machine
    int32_t sequences = 1; // that may be alive at once, each of `context` tokens
    CacheOptions cache;
    Probe probe; // sees q, k, v of every layer and step (llama/probe.h)
};

class Context {
public:
    static Result<Context> make(const Model& model, const ContextOptions& options);

    llama_context* get() const { return context_.get(); }
    Cache* cache() const { return cache_; }
    int32_t size() const { return size_; } // tokens that fit
    int32_t length() const;                // tokens of sequence 0
    void clear();

    // Appends tokens to sequences, each of which may stand in one piece only. At most `ubatch` tokens (and a token for
    // each sequence) a call. Refuses, with nothing changed, what does not fit.
    Status step(std::span<const Piece> pieces);
    Status decode(std::span<const int32_t> tokens, std::span<const uint8_t> logits = {}); // step of sequence 0
    Status fork(int32_t from, int32_t to); // `to` becomes equal to `from`
    void remove(int32_t sequence);
    Status truncate(int32_t rows); // of sequence 0
    int32_t length_of(int32_t sequence) const;
    // Any number of tokens, logits of the last one.
    Status prefill(std::span<const int32_t> tokens, const Progress& progress = {});
    const float* logits(int32_t i) const;       // of the i-th token of the last step, [vocabulary]; -1: the last
    double seconds() const { return seconds_; } // spent in decode since clear()

private:
    struct Free {
        void operator()(llama_context* c) const;
    };
    std::unique_ptr<llama_context, Free> context_;
    Cache* cache_ = nullptr;
    int32_t ubatch_ = 0, size_ = 0;
    double seconds_ = 0;
};

// How this process attends packed pages: "exact", "fast" or "restore" (KVMOSAIC_ACCURACY, KVMOSAIC_RESTORE).
std::string attend_setting();

// Bytes and bits of a context's cache now, or those of one sequence as if it were alone.
struct CacheReport {
    Footprint footprint;
    std::string path, isa; // "fused" and "avx2", for example
};
CacheReport report(const Context& context, std::optional<int32_t> sequence = std::nullopt);

} // namespace kvmosaic::eval
