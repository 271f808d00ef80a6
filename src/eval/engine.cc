#include "eval/engine.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string_view>

#include <fmt/format.h>

#include "core/parallel.h"
#include "llama.h"
#include "llama/adapter.h"
#include "llama/gguf_check.h"

namespace kvmosaic::eval {

namespace {

std::mutex log_lock;
bool log_verbose = false;
std::string log_error, log_line;
ggml_log_level log_level = GGML_LOG_LEVEL_NONE;
std::function<void(const std::string&)> log_listener;

std::string trim(std::string text) {
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '.'))
        text.pop_back();
    return text;
}

void on_log(ggml_log_level level, const char* text, void*) {
    const std::lock_guard guard(log_lock);
    if (log_verbose) std::fputs(text, stderr);
    if (log_listener) log_listener(text);
    if (level != GGML_LOG_LEVEL_CONT) log_level = level, log_line.clear();
    log_line += text;
    if (log_level != GGML_LOG_LEVEL_ERROR || trim(log_line).empty()) return;
    // The first error names the cause; what follows only says that the caller failed too.
    const bool continued = level == GGML_LOG_LEVEL_CONT && log_line.starts_with(log_error);
    if (log_error.empty() || continued) log_error = trim(log_line);
}

// " (reason)" from the log, or nothing.
std::string because() {
    const std::string why = last_log_error();
    return why.empty() ? "" : fmt::format(": {}", why);
}

} // namespace

void set_verbose(bool verbose) {
    {
        const std::lock_guard guard(log_lock);
        log_verbose = verbose;
    }
    llama_log_set(on_log, nullptr);
}

std::string last_log_error() {
    const std::lock_guard guard(log_lock);
    return std::exchange(log_error, "");
}

LogListener::LogListener(std::function<void(const std::string&)> on_text) {
    const std::lock_guard guard(log_lock);
    log_listener = std::move(on_text);
}

LogListener::~LogListener() {
    const std::lock_guard guard(log_lock);
    log_listener = nullptr;
}

// ---- model ----

void Model::Free::operator()(llama_model* m) const { llama_model_free(m); }

Result<Model> Model::load(const std::string& path, const Progress& progress, const LoadOptions& options) {
    GgufInfo info;
    if (Status bad = check_gguf(path, &info); !bad) return bad;
    last_log_error();
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    params.use_extra_bufts = options.repack;
    params.load_mode = info.mappable ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    struct Tell {
        const Progress& progress;
    } tell{progress};
    params.progress_callback_user_data = &tell;
    params.progress_callback = [](float share, void* user) {
        if (const auto& to = static_cast<Tell*>(user)->progress) to("loading the model", double(share));
        return true;
    };
    Model out;
    out.warnings_ = std::move(info.warnings);
    out.model_.reset(llama_model_load_from_file(path.c_str(), params));
    if (!out.model_) {
        return Status(StatusCode::invalid_argument, fmt::format("{}: cannot be loaded as a model{}", path, because()));
    }
    if (!llama_model_has_decoder(out.get())) {
        return Status(StatusCode::unsupported, fmt::format("{}: has no decoder, so it cannot generate text", path));
    }
    return out;
}

const llama_vocab* Model::vocab() const { return llama_model_get_vocab(get()); }
int32_t Model::vocab_size() const { return llama_vocab_n_tokens(vocab()); }
int32_t Model::trained_context() const { return llama_model_n_ctx_train(get()); }

std::string Model::description() const {
    char text[256] = {};
    llama_model_desc(get(), text, sizeof text);
    return text;
}

std::vector<int32_t> Model::tokenize(const std::string& text, bool special, bool parse) const {
    std::vector<int32_t> tokens(text.size() + 8);
    int32_t n = llama_tokenize(vocab(), text.data(), int32_t(text.size()), tokens.data(), int32_t(tokens.size()),
                               special, parse);
    if (n < 0) {
        tokens.resize(size_t(-int64_t(n)));
        n = llama_tokenize(vocab(), text.data(), int32_t(text.size()), tokens.data(), int32_t(tokens.size()), special,
                           parse);
    }
    tokens.resize(size_t(std::max(0, n)));
    return tokens;
}

std::string Model::piece(int32_t token) const {
    std::string text(64, '\0');
    int32_t n = llama_token_to_piece(vocab(), token, text.data(), int32_t(text.size()), 0, false);
    if (n < 0) {
        text.resize(size_t(-n));
        n = llama_token_to_piece(vocab(), token, text.data(), int32_t(text.size()), 0, false);
    }
    text.resize(size_t(std::max(0, n)));
    return text;
}

bool Model::ends_generation(int32_t token) const { return llama_vocab_is_eog(vocab(), token); }
bool Model::begins_with_token() const { return llama_vocab_get_add_bos(vocab()); }
int32_t Model::begin_token() const { return llama_vocab_bos(vocab()); }

std::string Model::chat_template() const {
    const char* text = llama_model_chat_template(get(), nullptr);
    return text ? text : "";
}

// ---- context ----

void Context::Free::operator()(llama_context* c) const { llama_free(c); }

Result<Context> Context::make(const Model& model, const ContextOptions& options) {
    llama_context_params params = llama_context_default_params();
    const int32_t trained = model.trained_context();
    if (options.context < 0 || (trained > 0 && options.context > trained)) {
        return Status(
            StatusCode::invalid_argument,
            fmt::format("context of {} tokens: this model was trained for 1 to {}", options.context, trained));
    }
    const int32_t most = int32_t(llama_max_parallel_sequences());
    if (options.sequences < 1 || options.sequences > most) {
        return Status(StatusCode::invalid_argument,
                      fmt::format("{} sequences, 1 to {} are possible", options.sequences, most));
    }
    const int32_t size = options.context > 0 ? options.context : trained;
    params.n_ctx = uint32_t(size) * uint32_t(options.sequences);
    params.n_ubatch = uint32_t(std::max(std::min(options.ubatch, size * options.sequences), options.sequences));
    params.n_batch = params.n_ubatch;
    params.n_seq_max = uint32_t(options.sequences);
    params.n_threads = params.n_threads_batch = thread_count(options.threads);
    params.no_perf = true;
    last_log_error();

    Context out;
    // libllama rounds a context up to a multiple of 256; the cache refuses what was not asked for.
    CacheOptions cache = options.cache;
    cache.max_rows = size;
    Result<llama_context*> made =
        make_context(model.get(), params, {options.spec, options.method, cache, options.probe});
    if (!made) return made.status();
    out.context_.reset(*made);
    out.cache_ = cache_of(out.get());
    out.ubatch_ = int32_t(params.n_ubatch);
    out.size_ = size;
    if (!out.cache_) {
        return Status(StatusCode::unsupported, fmt::format("the model does not take the cache '{}'", options.spec));
    }
    return out;
}

int32_t Context::length() const { return length_of(0); }
int32_t Context::length_of(int32_t sequence) const {
    return int32_t(llama_memory_seq_pos_max(llama_get_memory(get()), sequence)) + 1;
}

Status Context::fork(int32_t from, int32_t to) { return cache_of(get())->fork(from, to); }
void Context::remove(int32_t sequence) { cache_of(get())->remove(sequence); }
Status Context::truncate(int32_t rows) { return cache_of(get())->truncate(0, rows); }

void Context::clear() {
    llama_memory_clear(llama_get_memory(get()), true);
    seconds_ = 0;
}

namespace {

struct Batch {
    explicit Batch(size_t n) : b(llama_batch_init(int32_t(n), 0, 1)) {}
    ~Batch() { llama_batch_free(b); }
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    void add(int32_t token, int32_t position, int32_t sequence, bool logits) {
        b.token[b.n_tokens] = token;
        b.pos[b.n_tokens] = position;
        b.n_seq_id[b.n_tokens] = 1;
        b.seq_id[b.n_tokens][0] = sequence;
        b.logits[b.n_tokens++] = int8_t(logits);
    }
    llama_batch b;
};

Status run_batch(llama_context* context, const Batch& batch, double* seconds) {
    last_log_error();
    const auto start = std::chrono::steady_clock::now();
    const int32_t code = llama_decode(context, batch.b), n = batch.b.n_tokens;
    llama_synchronize(context);
    *seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (code == 0) return {};
    if (code == 1) {
        return {StatusCode::out_of_capacity, fmt::format("the cache has no room for {} more tokens{}", n, because())};
    }
    return {StatusCode::invalid_argument,
            fmt::format("the model could not process {} tokens (code {}){}", n, code, because())};
}

} // namespace

Status Context::step(std::span<const Piece> pieces) {
    size_t n = 0;
    for (const Piece& piece : pieces) {
        const int32_t at = length_of(piece.sequence), more = int32_t(piece.tokens.size());
        if (int64_t(at) + more > size()) {
            return {
                StatusCode::out_of_capacity,
                fmt::format("the context of {} tokens is full: {} are in it and {} more do not fit", size(), at, more)};
        }
        n += piece.tokens.size();
    }
    if (n == 0) return {};
    if (n > size_t(ubatch_)) {
        return {StatusCode::invalid_argument, fmt::format("{} tokens in one step, 1 to {} are possible", n, ubatch_)};
    }
    Batch batch(n);
    for (const Piece& piece : pieces) {
        const int32_t at = length_of(piece.sequence), count = int32_t(piece.tokens.size());
        for (int32_t i = 0; i < count; ++i) {
            const bool wanted = piece.logits.empty() ? i == count - 1 : piece.logits[size_t(i)] != 0;
            batch.add(piece.tokens[size_t(i)], at + i, piece.sequence, wanted);
        }
    }
    return run_batch(get(), batch, &seconds_);
}

Status Context::decode(std::span<const int32_t> tokens, std::span<const uint8_t> logits) {
    const Piece piece{0, tokens, logits};
    return step({&piece, 1});
}

Status Context::prefill(std::span<const int32_t> tokens, const Progress& progress) {
    if (length() + int64_t(tokens.size()) > size()) {
        return {StatusCode::out_of_capacity,
                fmt::format("{} tokens do not fit into the context of {} tokens ({} are in it); shorten the text or "
                            "raise --ctx",
                            tokens.size(), size(), length())};
    }
    for (size_t first = 0; first < tokens.size(); first += size_t(ubatch_)) {
        const size_t n = std::min(size_t(ubatch_), tokens.size() - first);
        if (Status bad = decode(tokens.subspan(first, n)); !bad) return bad;
        if (progress) progress("reading the prompt", double(first + n) / double(tokens.size()));
    }
    return {};
}

const float* Context::logits(int32_t i) const { return llama_get_logits_ith(get(), i); }

std::string attend_setting() {
    CacheOptions options;
    if (!read_environment(&options)) return "refused"; // as the cache then is, in words
    return options.restore ? "restore" : name_of(options.accuracy);
}

CacheReport report(const Context& context, std::optional<int32_t> sequence) {
    CacheReport out;
    const Cache* cache = cache_of(context.get()); // ends the step under way
    out.footprint = sequence ? cache->footprint(*sequence) : cache->footprint();
    out.path = name_of(cache->path());
    const bool codes = cache->path() == Path::fused || cache->path() == Path::partly;
    if (codes && cache->accuracy() == Accuracy::fast) out.path += ", fast";
    out.isa = cache->isa();
    return out;
}

} // namespace kvmosaic::eval
