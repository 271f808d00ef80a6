// Greedy answers to many prompts at once: some sequences are alive together, each step is one token for every one that
// answers and some prompt tokens for those that still read, and a slot that comes free takes the next prompt. What all
// prompts begin with is read once and forked. On a model loaded without LoadOptions::repack an answer is the same
// whatever was answered beside it.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "eval/engine.h"

namespace kvmosaic::eval {

struct Prompt {
    std::vector<int32_t> tokens;
    int32_t max_tokens = 256; // of the answer
    // Not 0: the last so many of `tokens` are an answer already. Nothing is added; the answer's tokens are then what
    // the model would have said in the place of each.
    int32_t forced = 0;
};

enum class Stop : uint8_t { end, text, count }; // an end token, one of the stop texts, as many tokens as allowed
const char* name_of(Stop stop);
Result<Stop> parse_stop(const std::string& text);

struct Answer {
    size_t item = 0;             // which prompt
    std::vector<int32_t> tokens; // without an end token
    std::string text;            // without what stopped it
    Stop stop = Stop::count;
    double seconds = 0; // its share of the steps it was in, by tokens
    double bits = 0;    // true bits of its sequence at the end, as if it were alone
    int64_t rows = 0, cache_bytes = 0;
    std::string path, isa;
};

struct BatchOptions {
    std::string spec = "f16";
    int32_t batch = 8;        // sequences alive at once
    int32_t chunk = 64;       // prompt tokens a step, of all sequences that read
    int64_t tokens = 1 << 16; // of all that are alive, at the end of their answers; one is always let in
    int32_t threads = 0;
    std::vector<std::string> stops; // texts that end an answer
};

class Batch {
public:
    // Prompts keep their places; `order` names those that are to be answered, first come first.
    static Result<Batch> make(const Model& model, const BatchOptions& options, const std::vector<Prompt>& prompts,
                              std::vector<size_t> order);

    // Steps until `count` more are answered or none is left; `done` for each as it lands. Sequences that are alive
    // then go on with the next call.
    Status run(size_t count, const std::function<Status(const Answer&)>& done, const std::function<void()>& tick);
    bool finished() const { return waiting_.empty() && alive_.empty(); }
    double share() const; // of all answers, those that are under way by their tokens

private:
    struct Alive {
        int32_t sequence = 0;
        size_t read = 0;  // prompt tokens that are in
        int32_t next = 0; // to be put in, once the prompt is
        bool ended = false;
        Answer answer;
    };
    const Model* model_ = nullptr;
    BatchOptions options_;
    const std::vector<Prompt>* prompts_ = nullptr;
    Context context_;
    size_t shared_ = 0; // tokens that all prompts begin with
    std::deque<size_t> waiting_;
    std::deque<Alive> alive_; // in the order in which they came
    std::vector<int32_t> free_;
    size_t landed_ = 0, all_ = 0;

    static int64_t need(const Prompt& p) { return int64_t(p.tokens.size()) + (p.forced > 0 ? 0 : p.max_tokens); }
    Status admit();
    Status step(const std::function<Status(const Answer&)>& done, size_t* count);
    Result<int32_t> best(const float* logits) const;
    // Takes the token that follows; true when the answer has ended.
    bool take(Alive* alive, int32_t token) const;
    // All steps go through here: of one token they get a second, whose results nobody sees, since ggml rounds the
    // products of a single token differently from those of several.
    Status decode(std::vector<Piece> pieces);
    int32_t prefix() const { return options_.batch; } // the sequence that holds what all begin with
    int32_t spare() const { return options_.batch + 1; }
};

// Tokens with which all begin, at least one of each left over.
size_t common_beginning(const std::vector<Prompt>& prompts);

} // namespace kvmosaic::eval
