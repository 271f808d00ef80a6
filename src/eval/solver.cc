#include "eval/solver.h"

namespace kvmosaic::eval {

Solver::Solver(const Model& model, SolverOptions options) : model_(model), options_(std::move(options)) {
    for (const MathProblem& problem : options_.problems) {
        Prompt prompt;
        prompt.tokens = model.tokenize(few_shot(options_.solved, problem), true, false);
        prompt.max_tokens = options_.max_tokens;
        prompts_.push_back(std::move(prompt));
    }
}

Result<std::vector<uint8_t>> Solver::solve(const std::string& spec, const Progress& progress) const {
    AnswersOptions wish;
    wish.batch.batch = options_.batch;
    wish.batch.threads = options_.threads;
    wish.batch.stops = {kNextQuestion};
    std::vector<uint8_t> right(prompts_.size(), 0);
    const auto landed = [&](size_t, const Answer& answer) {
        const std::string number = options_.solved.empty() ? last_number(answer.text) : marked_number(answer.text);
        right[answer.item] = number == options_.problems[answer.item].number;
        return Status();
    };
    const auto none = [](size_t, size_t) { return false; };
    if (Status bad = answer_all(model_, {{spec, spec}}, prompts_, wish, none, landed, progress); !bad) return bad;
    return right;
}

} // namespace kvmosaic::eval
