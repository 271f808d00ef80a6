// kvmosaic run: text from a model on our cache, streamed, then one line on what the cache cost.
#include <chrono>
#include <csignal>
#include <iostream>
#include <memory>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "kvmosaic/app.h"
#include "kvmosaic/chat.h"
#include "llama.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::string model, prompt, file, spec = "mixkvq", system, json;
    int count = 256, ctx = 0;
    double temp = 0.7, top_p = 0.95;
    uint32_t seed = 1;
    bool chat = false, raw = false, require_fused = false, force = false;
    Common common;
};

volatile std::sig_atomic_t interrupted = 0;

// The first interrupt ends the answer, and the summary is still printed; a second one ends the program.
void on_interrupt(int) {
    interrupted = 1;
    std::signal(SIGINT, SIG_DFL);
}

class Sampler {
public:
    explicit Sampler(const Options& o) : chain_(llama_sampler_chain_init(llama_sampler_chain_default_params())) {
        if (o.temp <= 0) {
            llama_sampler_chain_add(chain_, llama_sampler_init_greedy());
            return;
        }
        llama_sampler_chain_add(chain_, llama_sampler_init_top_k(40));
        llama_sampler_chain_add(chain_, llama_sampler_init_top_p(float(o.top_p), 1));
        llama_sampler_chain_add(chain_, llama_sampler_init_temp(float(o.temp)));
        llama_sampler_chain_add(chain_, llama_sampler_init_dist(o.seed));
    }
    ~Sampler() { llama_sampler_free(chain_); }
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;
    int32_t next(const eval::Context& context) { return llama_sampler_sample(chain_, context.get(), -1); }

private:
    llama_sampler* chain_;
};

struct Totals {
    int64_t prompt_tokens = 0, new_tokens = 0;
    double prompt_seconds = 0, new_seconds = 0;
    std::string stop; // "end", "count", "context", "interrupt"
    std::string text;
    int64_t decoded = 0; // generated tokens that went through the model, which new_seconds is for
};

double rate(int64_t tokens, double seconds) { return seconds > 0 ? double(tokens) / seconds : 0; }

class Runner {
public:
    Runner(const Options& o, const eval::Model& model, eval::Context context)
        : o_(o), model_(model), context_(std::move(context)), sampler_(o) {}

    void read(const std::string& text, bool first, bool parse) {
        const std::vector<int32_t> tokens = model_.tokenize(text, first, parse);
        if (tokens.empty()) bad_usage("the text has no tokens");
        const double before = context_.seconds();
        {
            ProgressBar bar;
            check(context_.prefill(tokens, bar.receiver()));
        }
        totals_.prompt_tokens += int64_t(tokens.size());
        totals_.prompt_seconds += context_.seconds() - before;
    }

    // Streams an answer and returns its text.
    std::string answer() {
        std::string text;
        const double before = context_.seconds();
        totals_.stop = "count";
        interrupted = 0;
        const auto old = std::signal(SIGINT, on_interrupt);
        for (int i = 0; o_.count < 0 || i < o_.count; ++i) {
            const int32_t token = sampler_.next(context_);
            if (model_.ends_generation(token)) {
                totals_.stop = "end";
                break;
            }
            ++totals_.new_tokens;
            const std::string piece = model_.piece(token);
            text += piece;
            if (o_.json != "-") {
                std::fwrite(piece.data(), 1, piece.size(), stdout);
                std::fflush(stdout);
            }
            if (interrupted) {
                totals_.stop = "interrupt";
                break;
            }
            if (i + 1 == o_.count) break; // its successor is not wanted, so the model need not see it
            if (context_.length() + 1 > context_.size()) {
                totals_.stop = "context";
                break;
            }
            const int32_t one[] = {token};
            check(context_.decode(one));
            ++totals_.decoded;
        }
        std::signal(SIGINT, old);
        totals_.new_seconds += context_.seconds() - before;
        totals_.text += text;
        if (o_.json != "-") fmt::print("\n");
        if (totals_.stop == "context") {
            notice(fmt::format("stopped: the context of {} tokens is full (--ctx)", context_.size()));
        }
        return text;
    }

    void converse(const std::string& first) {
        Chat chat = take(Chat::open(model_.get()));
        if (!o_.system.empty()) chat.add("system", o_.system);
        const bool terminal = ::isatty(STDIN_FILENO) != 0;
        if (terminal) notice("end with /exit or Ctrl-D; Ctrl-C ends an answer");
        std::string said, line = first; // said: the part of the conversation that the cache holds
        while (true) {
            if (line.empty()) {
                if (terminal) fmt::print("\n> "), std::fflush(stdout);
                if (!std::getline(std::cin, line) || line == "/exit") break;
                if (line.empty()) continue;
            }
            chat.add("user", line);
            line.clear();
            const std::string all = take(chat.render());
            // Templates may rewrite earlier turns (trimmed text, for one); then the cache starts anew.
            const bool continues = !said.empty() && all.compare(0, said.size(), said) == 0;
            if (!continues) context_.clear();
            read(continues ? all.substr(said.size()) : all, !continues, true);
            const std::string text = answer();
            chat.add("assistant", text);
            said = all + text;
            // The last token of an answer is known but not in the cache; the next turn must bring it along.
            if (totals_.stop != "end") said.clear();
            if (totals_.stop == "context") break;
        }
    }

    void finish() const {
        const eval::CacheReport now = eval::report(context_);
        const Footprint& f = now.footprint;
        std::fflush(stdout); // the text stands before the summary, wherever both go
        const double speed = rate(totals_.decoded, totals_.new_seconds);
        const int64_t rows = context_.cache()->rows(0), packed = packed_rows();
        if (!o_.json.empty()) {
            const nlohmann::ordered_json out{{"model", o_.model},
                                             {"spec", o_.spec},
                                             {"version", KVMOSAIC_VERSION},
                                             {"prompt_tokens", totals_.prompt_tokens},
                                             {"tokens", totals_.new_tokens},
                                             {"prefill_tok_s", rate(totals_.prompt_tokens, totals_.prompt_seconds)},
                                             {"decode_tok_s", speed},
                                             {"cache_tokens", rows},
                                             {"packed_tokens", packed},
                                             {"true_bits", f.true_bits()},
                                             {"true_bits_k", f.true_bits(0)},
                                             {"true_bits_v", f.true_bits(1)},
                                             {"cache_bytes", f.cache_bytes()},
                                             {"times_smaller", f.times_smaller()},
                                             {"pages_raised", f.raised},
                                             {"path", now.path},
                                             {"isa", now.isa},
                                             {"stop", totals_.stop},
                                             {"text", totals_.text}};
            write_json(o_.json, out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace), o_.force);
        }
        const std::string guard =
            f.raised > 0 ? fmt::format(", guard: {} of {} key pages at more bits", f.raised, f.ladders) : "";
        fmt::print(
            stderr,
            "[{}] {} tokens at {:.1f} tok/s (prompt {} at {:.1f}) | cache {:.2f} MiB, {:.2f} true bits per value, "
            "{:.2f}x smaller than 16 bit ({} of {} tokens packed{}) | {} path ({})\n",
            o_.spec, totals_.new_tokens, speed, totals_.prompt_tokens,
            rate(totals_.prompt_tokens, totals_.prompt_seconds), double(f.cache_bytes()) / (1 << 20), f.true_bits(),
            f.times_smaller(), packed, rows, guard, now.path, now.isa);
    }

private:
    // Tokens that lie packed on both sides of the first layer that keeps any.
    int64_t packed_rows() const {
        const Cache* cache = context_.cache();
        for (int32_t layer = 0; layer < int32_t(cache->shape().layers.size()); ++layer) {
            if (!cache->shape().layers[size_t(layer)].has_kv()) continue;
            return std::min(cache->packed_rows(0, layer, Side::key), cache->packed_rows(0, layer, Side::value));
        }
        return 0;
    }

    const Options& o_;
    const eval::Model& model_;
    eval::Context context_;
    Sampler sampler_;
    Totals totals_;
};

void run(const Options& o, bool has_prompt) {
    check_spec(o.spec);
    check_new_file("--json", o.json, o.force);
    if (o.count < -1) bad_usage("-n {}: -1 (until the model ends) or more", o.count);
    const bool has_text = has_prompt || !o.file.empty();
    if (!has_text && !o.chat) bad_usage("run: give a text with -p TEXT or -f FILE, or talk with --chat");
    if (o.chat && o.raw) bad_usage("--chat and --raw exclude each other");
    std::string text = has_text ? take_text(o.prompt, has_prompt, o.file) : "";
    Opened opened = open_model(o.model, o.spec, o.ctx, o.common);
    const eval::Model& model = opened.model;
    const Path way = opened.context.cache()->path();
    if (o.require_fused && way != Path::fused && way != Path::raw) {
        fail("--require-fused: '{}' runs on the {} path here", o.spec, name_of(way));
    }
    Runner runner(o, model, std::move(opened.context));
    if (o.chat) {
        runner.converse(text);
    } else {
        const bool shaped = !o.raw && !model.chat_template().empty();
        if (shaped) {
            Chat chat = take(Chat::open(model.get()));
            if (!o.system.empty()) chat.add("system", o.system);
            chat.add("user", text);
            text = take(chat.render());
        }
        runner.read(text, true, shaped);
        runner.answer();
    }
    runner.finish();
}

} // namespace

void add_run(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("run", "generate text on a quantized cache, or chat");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    CLI::Option* prompt = verb->add_option("-p,--prompt", o->prompt, "the text, or what you say to a chat model");
    verb->add_option("-f,--file", o->file, "the text from a file (-: standard input)");
    verb->add_option("--cache", o->spec, "cache spec (kvmosaic methods)")->capture_default_str();
    verb->add_option("-n", o->count, "most tokens to generate (-1: until the model ends)")->capture_default_str();
    verb->add_flag("--chat", o->chat, "interactive conversation with the model's template");
    verb->add_option("--system", o->system, "system message of the conversation");
    verb->add_flag("--raw", o->raw, "take the text as it is, without the chat template");
    verb->add_option("--ctx", o->ctx, "context in tokens (0: as trained)")->check(CLI::Range(0, 1 << 24));
    verb->add_option("--temp", o->temp, "temperature (0: always the most likely token)")
        ->check(CLI::Range(0.0, 10.0))
        ->capture_default_str();
    verb->add_option("--top-p", o->top_p, "sample from the most likely tokens of this total probability")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    verb->add_option("--seed", o->seed, "of the sampling; the same seed repeats a text")->capture_default_str();
    verb->add_flag("--require-fused", o->require_fused, "fail when attention cannot run on the packed codes");
    verb->add_option("--json", o->json, "summary and text as JSON into a file (-: standard output)");
    verb->add_flag("--force", o->force, "replace an existing --json file");
    add_common(verb, &o->common);
    verb->footer("Examples\n"
                 "  kvmosaic run -m tiny -p \"What is the capital of France?\"\n"
                 "  kvmosaic run -m tiny --chat --cache kivi:bits=4\n"
                 "  kvmosaic run -m model.gguf -f story.txt --raw -n 100 --temp 0 --cache mixkvq:hi=12,mid=1.6\n"
                 "The last line tells tokens per second, the cache's MiB and true bits per value now (raw windows and\n"
                 "metadata included, so a short text stands near 16), and the path that attention took.");
    verb->callback([o, prompt] { run(*o, prompt->count() > 0); });
}

} // namespace kvmosaic::tool
