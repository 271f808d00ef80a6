#include "kvmosaic/runner.h"

#include <algorithm>
#include <csignal>
#include <iostream>

#include <nlohmann/json.hpp>
#include <unistd.h>

namespace kvmosaic::tool {

namespace {

volatile std::sig_atomic_t interrupted = 0;

// The first interrupt ends the answer, and the summary is still printed; a second one ends the program.
void on_interrupt(int) {
    interrupted = 1;
    std::signal(SIGINT, SIG_DFL);
}

double rate(int64_t tokens, double seconds) { return seconds > 0 ? double(tokens) / seconds : 0; }

} // namespace

Saved Runner::load(const SavedFile& file) {
    Saved saved = take(load_saved(file, context_));
    totals_.loaded = context_.cache()->rows(0);
    untold_ = saved.tokens.empty() && totals_.loaded > 0;
    tokens_ = saved.tokens;
    if (untold_) tokens_.resize(size_t(totals_.loaded), -1);
    return saved;
}

void Runner::read(const std::string& text, bool first, bool parse) {
    const std::vector<int32_t> tokens = model_.tokenize(text, first, parse);
    if (tokens.empty()) bad_usage("the text has no tokens");
    size_t known = 0;
    if (first) {
        const size_t rows = std::min(tokens_.size(), size_t(context_.length()));
        while (known + 1 < tokens.size() && known < rows && tokens_[known] == tokens[known])
            ++known;
        if (known < rows) check(context_.truncate(int32_t(known)));
        tokens_.resize(known);
        totals_.loaded = std::min(totals_.loaded, int64_t(known));
        totals_.reused += int64_t(known);
        totals_.prompt_tokens += int64_t(known);
    }
    tokens_.insert(tokens_.end(), tokens.begin() + int64_t(known), tokens.end());
    read_pending();
}

void Runner::read_pending() {
    const auto fresh = std::span<const int32_t>(tokens_).subspan(size_t(context_.length()));
    const double before = context_.seconds();
    {
        ProgressBar bar;
        check(context_.prefill(fresh, bar.receiver()));
    }
    totals_.prompt_tokens += int64_t(fresh.size());
    totals_.prompt_seconds += context_.seconds() - before;
}

std::string Runner::answer() {
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
        tokens_.push_back(token);
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

// N answers to one prompt, a token of each a step. All begin from the prompt's rows, which are stored once.
void Runner::answer_all() {
    const size_t n = size_t(o_.samples);
    std::vector<Sample> live(n);
    totals_.stop = "count";
    interrupted = 0;
    const auto old = std::signal(SIGINT, on_interrupt);
    const double before = context_.seconds();
    for (size_t i = 0; i < n; ++i) {
        if (i > 0) check(context_.fork(0, int32_t(i)));
        live[i].sampler = std::make_unique<Sampler>(o_.sampling, uint32_t(i));
        take_token(live[i], -1); // all from the prompt's last logits
    }
    while (!interrupted) {
        std::vector<eval::Piece> pieces; // a token for each answer that goes on
        for (size_t i = 0; i < n; ++i)
            if (!live[i].done) pieces.push_back({int32_t(i), std::span(&live[i].token, 1)});
        if (pieces.empty()) break;
        if (context_.length_of(pieces.front().sequence) + 1 > context_.size()) {
            totals_.stop = "context";
            break;
        }
        check(context_.step(pieces));
        totals_.decoded += int64_t(pieces.size());
        for (size_t j = 0; j < pieces.size(); ++j)
            take_token(live[size_t(pieces[j].sequence)], int32_t(j));
    }
    if (interrupted) totals_.stop = "interrupt";
    std::signal(SIGINT, old);
    totals_.new_seconds += context_.seconds() - before;
    for (size_t i = 0; i < n; ++i) {
        totals_.texts.push_back(live[i].text);
        if (o_.json != "-") fmt::print("[sample {}]\n{}\n", i + 1, live[i].text);
    }
}

// The same answers one run after the other, each reading the prompt itself; seconds of all.
void Runner::compare_with_separate_runs(const std::vector<int32_t>& prompt) {
    const double together = totals_.prompt_seconds + totals_.new_seconds;
    const int64_t tokens = totals_.new_tokens;
    double apart = 0;
    int64_t made = 0;
    for (int32_t i = 0; i < o_.samples; ++i) {
        context_.clear();
        check(context_.prefill(prompt));
        Sample one;
        one.sampler = std::make_unique<Sampler>(o_.sampling, uint32_t(i));
        const Totals kept = totals_;
        for (take_token(one, -1); !one.done; take_token(one, -1)) {
            if (context_.length() + 1 > context_.size()) break;
            check(context_.decode(std::span(&one.token, 1)));
        }
        totals_ = kept;
        made += one.count;
        apart += context_.seconds();
    }
    fmt::print(stderr,
               "[{}] {} samples together: {} tokens in {:.2f} s, {:.1f} tok/s | one after the other: {} tokens in "
               "{:.2f} s, {:.1f} tok/s | {:.2f}x\n",
               o_.spec, o_.samples, tokens, together, rate(tokens, together), made, apart, rate(made, apart),
               rate(tokens, together) / std::max(1e-9, rate(made, apart)));
}

Talk Runner::open_talk(const Saved* saved) {
    Talk talk{take(Chat::open(model_.get())), ""};
    if (saved) {
        talk.said = saved->text;
        for (const auto& [role, content] : saved->messages)
            talk.chat.add(role, content);
    }
    if (!o_.system.empty() && talk.said.empty()) talk.chat.add("system", o_.system);
    return talk;
}

void Runner::turn(Talk* talk, const std::string& line) {
    talk->chat.add("user", line);
    const std::string all = take(talk->chat.render());
    // Templates may rewrite earlier turns (trimmed text, for one); then the cache keeps the common beginning.
    const bool continues = !talk->said.empty() && all.compare(0, talk->said.size(), talk->said) == 0;
    read(continues ? all.substr(talk->said.size()) : all, !continues, true);
    if (o_.samples > 1) return answer_all();
    const std::string text = answer();
    talk->chat.add("assistant", text);
    talk->said = all + text;
}

void Runner::resume(Talk* talk) {
    if (!pending()) bad_usage("--load {}: its last answer had ended; say something with -p TEXT", o_.load);
    read_pending();
    if (o_.samples > 1) return answer_all();
    const std::string text = answer();
    if (!talk) return;
    talk->chat.extend(text);
    talk->said += text;
}

void Runner::converse(Talk* talk, std::string line) {
    const bool terminal = ::isatty(STDIN_FILENO) != 0;
    if (terminal) notice("end with /exit or Ctrl-D; Ctrl-C ends an answer");
    while (true) {
        if (line.empty()) {
            if (terminal) fmt::print("\n> "), std::fflush(stdout);
            if (!std::getline(std::cin, line) || line == "/exit") break;
            if (line.empty()) continue;
        }
        turn(talk, line);
        line.clear();
        if (totals_.stop == "context") break;
    }
}

void Runner::save(const Talk* talk) const {
    if (o_.save.empty()) return;
    const int64_t rows = context_.cache()->rows(0);
    if (rows == 0) fail("--save {}: nothing was said, so there is nothing to save", o_.save);
    Saved what;
    if (!untold_) what.tokens = tokens_;
    if (talk) {
        what.shaped = true;
        what.text = talk->said;
        what.messages = talk->chat.messages();
    }
    const int64_t bytes = take(write_saved(o_.save, context_, what, o_.compress));
    std::fflush(stdout);
    notice(fmt::format("saved {} rows to {} ({:.2f} MiB)", rows, o_.save, double(bytes) / (1 << 20)));
}

void Runner::finish() const {
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
                                         {"loaded_tokens", totals_.loaded},
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
                                         {"reused_tokens", totals_.reused},
                                         {"samples", totals_.texts},
                                         {"text", totals_.text}};
        write_json(o_.json, out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace), o_.force);
    }
    const std::string guard =
        f.raised > 0 ? fmt::format(", guard: {} of {} key pages at more bits", f.raised, f.ladders) : "";
    fmt::print(stderr,
               "[{}] {} tokens at {:.1f} tok/s (prompt {} at {:.1f}) | cache {:.2f} MiB, {:.2f} true bits per value, "
               "{:.2f}x smaller than 16 bit ({} of {} tokens packed{}) | {} path ({}){}\n",
               o_.spec, totals_.new_tokens, speed, totals_.prompt_tokens,
               rate(totals_.prompt_tokens, totals_.prompt_seconds), double(f.cache_bytes()) / (1 << 20), f.true_bits(),
               f.times_smaller(), packed, rows, guard, now.path, now.isa, sharing());
}

// The next token of a sample from the logits of an item of the last step.
void Runner::take_token(Sample& s, int32_t item) {
    s.token = s.sampler->next(context_, item);
    if (model_.ends_generation(s.token)) {
        s.done = true;
        return;
    }
    s.text += model_.piece(s.token);
    ++s.count;
    ++totals_.new_tokens;
    s.done = s.count == o_.count;
}

// What was read once and used several times, and what was not read at all.
std::string Runner::sharing() const {
    std::string text;
    if (o_.samples > 1) text += fmt::format(" | {} samples share {} tokens", o_.samples, totals_.prompt_tokens);
    if (totals_.reused > 0)
        text += fmt::format(" | {} of {} prompt tokens reused", totals_.reused, totals_.prompt_tokens);
    if (totals_.loaded > 0)
        text += fmt::format(" | {} of {} rows from {}", totals_.loaded, context_.cache()->rows(0), o_.load);
    return text;
}

// Tokens that lie packed on both sides of the first layer that keeps any.
int64_t Runner::packed_rows() const {
    const Cache* cache = context_.cache();
    for (int32_t layer = 0; layer < int32_t(cache->shape().layers.size()); ++layer) {
        if (!cache->shape().layers[size_t(layer)].has_kv()) continue;
        return std::min(cache->packed_rows(0, layer, Side::key), cache->packed_rows(0, layer, Side::value));
    }
    return 0;
}

} // namespace kvmosaic::tool
