// One `run`: texts into the model, answers out, and what that cost.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvmosaic/app.h"
#include "kvmosaic/chat.h"
#include "kvmosaic/sampler.h"
#include "kvmosaic/saved.h"

namespace kvmosaic::tool {

struct RunOptions {
    std::string model, prompt, file, spec = "mixkvq", system, json, save, load;
    int count = 256, ctx = 0, samples = 1, rollback = 0;
    Sampling sampling;
    bool chat = false, raw = false, require_fused = false, force = false, against = false, compress = false;
    Common common;
};

// A conversation, and the part of it that the cache holds (or has pending).
struct Talk {
    Chat chat;
    std::string said;
};

class Runner {
public:
    Runner(const RunOptions& o, const eval::Model& model, eval::Context context)
        : o_(o), model_(model), context_(std::move(context)), sampler_(o.sampling) {}

    Saved load(const SavedFile& file); // takes the rows of a file in place of a prompt
    // `first`: the text stands at the beginning; what the cache holds of it already stays. `parse`: it has control
    // tokens. A token that is known but not in the cache goes before it.
    void read(const std::string& text, bool first, bool parse);
    std::string answer();                                                // streams it, and returns its text
    void answer_all();                                                   // --samples
    void compare_with_separate_runs(const std::vector<int32_t>& prompt); // and prints how they compare
    const std::vector<int32_t>& tokens() const { return tokens_; }

    Talk open_talk(const Saved* saved);
    void turn(Talk* talk, const std::string& line); // reads it and everything before it that is new; answers
    void converse(Talk* talk, std::string line);
    void resume(Talk* talk); // goes on with an answer that had not ended; null: plain text

    void save(const Talk* talk) const;
    void finish() const; // summary and JSON

private:
    struct Totals {
        int64_t prompt_tokens = 0, new_tokens = 0;
        double prompt_seconds = 0, new_seconds = 0;
        std::string stop; // "end", "count", "context", "interrupt"
        std::string text;
        int64_t decoded = 0;            // generated tokens that went through the model, which new_seconds is for
        int64_t reused = 0;             // of prompt_tokens: found in the cache
        int64_t loaded = 0;             // rows that came from a file and are still there
        std::vector<std::string> texts; // of --samples
    };
    struct Sample {
        std::unique_ptr<Sampler> sampler;
        std::string text;
        int32_t token = 0;
        int count = 0;
        bool done = false;
    };

    bool pending() const { return int64_t(tokens_.size()) > context_.length(); }
    void read_pending();
    void take_token(Sample& s, int32_t item);
    std::string sharing() const;
    int64_t packed_rows() const;

    const RunOptions& o_;
    const eval::Model& model_;
    eval::Context context_;
    Sampler sampler_;
    Totals totals_;
    std::vector<int32_t> tokens_; // of the rows of sequence 0, then what it does not hold yet (an answer's last)
    bool untold_ = false;         // a file brought rows without tokens; what stands in their places says nothing
};

} // namespace kvmosaic::tool
