#include "eval/batch.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace kvmosaic::eval {

namespace {

constexpr const char* kStops[] = {"end", "text", "count"};

} // namespace

const char* name_of(Stop stop) { return kStops[size_t(stop)]; }

Result<Stop> parse_stop(const std::string& text) {
    for (size_t i = 0; i < std::size(kStops); ++i)
        if (text == kStops[i]) return Stop(i);
    return Status(StatusCode::invalid_argument, fmt::format("'{}' ends no answer: end, text or count do", text));
}

size_t common_beginning(const std::vector<Prompt>& prompts) {
    if (prompts.size() < 2) return 0;
    const std::vector<int32_t>& first = prompts.front().tokens;
    size_t n = first.size();
    for (const Prompt& p : prompts) {
        n = std::min(n, p.tokens.size());
        n = size_t(std::mismatch(first.begin(), first.begin() + int64_t(n), p.tokens.begin()).first - first.begin());
    }
    for (const Prompt& p : prompts) // the first answer needs the logits of a prompt's last token
        n = std::min(n, p.tokens.size() - 1 - size_t(p.forced));
    return n;
}

Result<Batch> Batch::make(const Model& model, const BatchOptions& options, const std::vector<Prompt>& prompts,
                          std::vector<size_t> order) {
    Batch out;
    out.model_ = &model;
    out.options_ = options;
    out.prompts_ = &prompts;
    out.all_ = order.size();
    int64_t longest = 1;
    for (const Prompt& p : prompts) {
        if (int64_t(p.tokens.size()) <= p.forced) return Status(StatusCode::invalid_argument, "a prompt is empty");
        longest = std::max(longest, need(p));
    }
    if (model.trained_context() > 0 && longest > model.trained_context()) {
        return Status(StatusCode::invalid_argument,
                      fmt::format("a prompt and its answer take {} tokens, and the model was trained for {}", longest,
                                  model.trained_context()));
    }
    out.options_.batch = int32_t(std::clamp<int64_t>(int64_t(order.size()), 1, options.batch));
    ContextOptions wish;
    wish.spec = options.spec;
    wish.context = int32_t(longest);
    wish.sequences = out.options_.batch + 2;
    wish.ubatch = options.chunk + out.options_.batch;
    wish.threads = options.threads;
    Result<Context> made = Context::make(model, wish);
    if (!made) return made.status();
    out.context_ = std::move(*made);
    out.shared_ = common_beginning(prompts);
    out.waiting_.assign(order.begin(), order.end());
    for (int32_t i = out.options_.batch; i-- > 0;)
        out.free_.push_back(i);
    return out;
}

Status Batch::decode(std::vector<Piece> pieces) {
    const bool single = pieces.size() == 1 && pieces[0].tokens.size() == 1;
    static constexpr uint8_t kUnwanted[] = {0};
    if (single) pieces.push_back({spare(), pieces[0].tokens, kUnwanted});
    Status status = context_.step(pieces);
    if (single) context_.remove(spare());
    return status;
}

Status Batch::admit() {
    while (!waiting_.empty() && !free_.empty()) {
        const Prompt& prompt = (*prompts_)[waiting_.front()];
        int64_t held = need(prompt);
        for (const Alive& a : alive_)
            held += need((*prompts_)[a.answer.item]);
        if (!alive_.empty() && held > options_.tokens) return {};
        if (shared_ > 0 && context_.length_of(prefix()) == 0) {
            const std::vector<uint8_t> none(size_t(options_.chunk), 0);
            for (size_t at = 0; at < shared_;) {
                const size_t n = std::min(size_t(options_.chunk), shared_ - at);
                const Piece piece{prefix(), std::span(prompt.tokens).subspan(at, n), std::span(none).first(n)};
                if (Status bad = decode({piece}); !bad) return bad;
                at += n;
            }
        }
        Alive next;
        next.sequence = free_.back();
        next.read = shared_;
        next.answer.item = waiting_.front();
        if (shared_ > 0) {
            if (Status bad = context_.fork(prefix(), next.sequence); !bad) return bad;
        }
        free_.pop_back();
        waiting_.pop_front();
        alive_.push_back(std::move(next));
    }
    return {};
}

Result<int32_t> Batch::best(const float* logits) const {
    const int32_t token = int32_t(std::max_element(logits, logits + model_->vocab_size()) - logits);
    if (!std::isfinite(logits[token])) return Status(StatusCode::corrupt, "the model's output is not finite");
    return token;
}

bool Batch::take(Alive* alive, int32_t token) const {
    const Prompt& prompt = (*prompts_)[alive->answer.item];
    Answer& answer = alive->answer;
    alive->next = token;
    if (model_->ends_generation(token)) {
        answer.stop = Stop::end;
        return true;
    }
    answer.tokens.push_back(alive->next);
    const std::string piece = model_->piece(alive->next);
    const size_t old = answer.text.size();
    answer.text += piece;
    size_t cut = std::string::npos;
    for (const std::string& stop : options_.stops) {
        const size_t from = old >= stop.size() ? old - stop.size() + 1 : 0;
        cut = std::min(cut, answer.text.find(stop, from));
    }
    if (cut != std::string::npos) {
        answer.text.resize(cut);
        answer.stop = Stop::text;
        return true;
    }
    answer.stop = Stop::count;
    return int64_t(answer.tokens.size()) >= prompt.max_tokens;
}

Status Batch::step(const std::function<Status(const Answer&)>& done, size_t* count) {
    std::vector<std::vector<uint8_t>> wanted; // logits of prompts
    wanted.reserve(alive_.size());
    std::vector<Piece> pieces;
    std::vector<Alive*> whose;
    int32_t total = 0;
    size_t room = size_t(options_.chunk);
    for (Alive& a : alive_) {
        const Prompt& prompt = (*prompts_)[a.answer.item];
        const size_t size = prompt.tokens.size();
        Piece piece{a.sequence, {&a.next, 1}, {}};
        if (a.read < size) {
            const size_t n = std::min(room, size - a.read);
            if (n == 0) continue;
            // The token before the first forced one is the first whose successor is asked for, the last one that of an
            // answer that begins. What follows a forced answer is asked by nobody.
            const size_t first = size - 1 - size_t(prompt.forced), last = prompt.forced > 0 ? size - 1 : size;
            wanted.emplace_back();
            for (size_t i = a.read; i < a.read + n; ++i)
                wanted.back().push_back(i >= first && i < last);
            piece.tokens = std::span(prompt.tokens).subspan(a.read, n);
            piece.logits = wanted.back();
            room -= n;
            a.read += n;
        }
        total += int32_t(piece.tokens.size());
        pieces.push_back(piece);
        whose.push_back(&a);
    }
    const double before = context_.seconds();
    if (Status bad = decode(pieces); !bad) return bad;
    const double each = (context_.seconds() - before) / total;
    int32_t at = 0; // of the step's tokens
    for (size_t i = 0; i < pieces.size(); ++i) {
        Alive& a = *whose[i];
        const Prompt& prompt = (*prompts_)[a.answer.item];
        a.answer.seconds += each * double(pieces[i].tokens.size());
        for (size_t t = 0; t < pieces[i].tokens.size(); ++t, ++at) {
            if (!pieces[i].logits.empty() && !pieces[i].logits[t]) continue;
            const Result<int32_t> token = best(context_.logits(at));
            if (!token) return token.status();
            if (prompt.forced > 0)
                a.answer.tokens.push_back(*token);
            else
                a.ended = take(&a, *token);
        }
        a.ended = a.ended || (prompt.forced > 0 && a.read == prompt.tokens.size());
    }
    for (Alive& a : alive_) {
        if (!a.ended) continue;
        Answer& answer = a.answer;
        const CacheReport now = report(context_, a.sequence);
        answer.rows = now.footprint.tokens;
        answer.bits = now.footprint.true_bits();
        answer.cache_bytes = now.footprint.cache_bytes();
        answer.path = now.path, answer.isa = now.isa;
        context_.remove(a.sequence);
        free_.push_back(a.sequence);
        ++landed_, ++*count;
        if (Status bad = done(answer); !bad) return bad;
    }
    std::erase_if(alive_, [](const Alive& a) { return a.ended; });
    return {};
}

Status Batch::run(size_t count, const std::function<Status(const Answer&)>& done, const std::function<void()>& tick) {
    for (size_t landed = 0; landed < count && !finished();) {
        if (Status bad = admit(); !bad) return bad;
        if (Status bad = step(done, &landed); !bad) return bad;
        if (tick) tick();
    }
    return {};
}

double Batch::share() const {
    if (all_ == 0) return 1;
    double sum = double(landed_);
    for (const Alive& a : alive_) {
        const Prompt& p = (*prompts_)[a.answer.item];
        sum += double(a.read + a.answer.tokens.size()) / double(need(p));
    }
    return sum / double(all_);
}

} // namespace kvmosaic::eval
