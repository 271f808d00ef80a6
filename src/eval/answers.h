// The same prompts answered through several caches, and what their answers tell about the caches beside f16's.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval/batch.h"

namespace kvmosaic::eval {

struct CacheName {
    std::string spec, canonical; // as asked for, and without defaults
};
// f16 first, then the others in their order.
Result<std::vector<CacheName>> beside_f16(const std::vector<std::string>& specs);

struct AnswersOptions {
    BatchOptions batch; // but for the spec
    size_t block = 25;  // prompts that one cache answers before the next one does, so that all get on together
};

// Answers what `has` says is not there yet. Every cache is an index into `caches`.
Status answer_all(const Model& model, const std::vector<CacheName>& caches, const std::vector<Prompt>& prompts,
                  const AnswersOptions& options, const std::function<bool(size_t cache, size_t item)>& has,
                  const std::function<Status(size_t cache, const Answer&)>& landed, const Progress& progress);

// ---- what answers tell ----
// Tokens that both begin with.
int64_t common_tokens(const std::vector<int32_t>& a, const std::vector<int32_t>& b);
// Share of the runs of four tokens that stood in the answer before; 0 for less than five tokens.
double repetition(const std::vector<int32_t>& tokens);

// One a cache; `reference`: f16's answers to the same prompts.
struct AnswersSummary {
    int64_t answers = 0;
    double common_mean = 0, common_median = 0; // tokens shared with the reference's answer from its start
    double identical = 0;                      // share of answers with the reference's tokens to the end
    double tokens_mean = 0, cut = 0;           // cut: share that ended at the most tokens allowed
    double repetition = 0, bits = 0, cache_bytes = 0;
    double tokens_per_second = 0; // generated, by the time of prompts and answers in their batch
    std::string path, isa;
};
AnswersSummary summarize(const std::vector<const Answer*>& answers, const std::vector<const Answer*>& reference);

} // namespace kvmosaic::eval
