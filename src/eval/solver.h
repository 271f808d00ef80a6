// How good a cache is by what it lets the model answer: word problems behind solved ones, the number that is right.
#pragma once

#include "eval/answers.h"
#include "eval/gsm8k.h"

namespace kvmosaic::eval {

struct SolverOptions {
    std::vector<MathProblem> solved, problems;
    std::string name, id; // what the problems are for people, and which they are to the bit
    int32_t max_tokens = 256, batch = 8, threads = 0;
};

// On a model loaded without LoadOptions::repack an answer is the same at any batch.
class Solver {
public:
    Solver(const Model& model, SolverOptions options);
    const std::string& id() const { return options_.id; }

    // One a problem, in order: 1 where the answer through this cache has the right number.
    Result<std::vector<uint8_t>> solve(const std::string& spec, const Progress& progress) const;

private:
    const Model& model_;
    SolverOptions options_;
    std::vector<Prompt> prompts_;
};

} // namespace kvmosaic::eval
