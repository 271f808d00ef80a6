// The objective of right answers: its options, problems, and what they say of a front.
#include "kvmosaic/free_run.h"
#include "kvmosaic/tune.h"

namespace kvmosaic::tool {

void add_objective(CLI::App* verb, TuneOptions* o) {
    verb->add_option("--objective", o->objective,
                     "quality beside the bits: kl (to the f16 cache, on the text), or gsm8k (right answers to word "
                     "problems; KL is measured too)")
        ->check(CLI::IsMember({"kl", "gsm8k"}))
        ->capture_default_str();
    verb->add_option("--questions", o->questions, "gsm8k: problems from the file's start")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb->add_option("--holdout-questions", o->holdout_questions,
                     "gsm8k: front and defaults answer so many more, that the search did not see")
        ->check(CLI::Range(1, 1 << 20));
    verb->add_option("--problems", o->problems, "gsm8k: the file (default: $KVMOSAIC_DATA/gsm8k_test.jsonl)");
    verb->add_option("--train", o->train,
                     "gsm8k: where solved ones come from (default: $KVMOSAIC_DATA/gsm8k_train_200.jsonl)");
    verb->add_option("--shots", o->shots, "gsm8k: solved problems before each")
        ->check(CLI::Range(0, 64))
        ->capture_default_str();
    verb->add_option("--max-tokens", o->max_tokens, "gsm8k: of an answer")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb->add_option("--batch", o->batch, "gsm8k: answers under way at once")
        ->check(CLI::Range(1, 128))
        ->capture_default_str();
}

void check_objective(const TuneOptions& o, const CLI::App& verb) {
    const bool answers = o.objective == "gsm8k";
    for (const char* name :
         {"--questions", "--problems", "--train", "--shots", "--max-tokens", "--batch", "--holdout-questions"})
        if (!answers && verb.count(name) > 0) bad_usage("{}: says something of --objective gsm8k only", name);
    if (!answers) return;
    for (const char* name : {"--holdout", "--holdout-windows"})
        if (verb.count(name) > 0)
            bad_usage("{}: with --objective gsm8k other problems check what was found: --holdout-questions N", name);
    if (o.kl) bad_usage("--kl: with --objective gsm8k the front is one of right answers; choose by --bits");
}

eval::SolverOptions Problems::options(const TuneOptions& o, int32_t first, int32_t count) const {
    eval::SolverOptions out;
    out.solved.assign(train.items.begin(), train.items.begin() + o.shots);
    out.problems.assign(all.items.begin() + first, all.items.begin() + first + count);
    out.name =
        count == 1 ? fmt::format("problem {}", first + 1) : fmt::format("problems {} to {}", first + 1, first + count);
    out.id = fmt::format("{}:{}:{}:{}:{}:{}", all.sha256, train.sha256, first, count, o.shots, o.max_tokens);
    out.max_tokens = o.max_tokens, out.batch = o.batch, out.threads = o.common.threads;
    return out;
}

Problems read_problems(const TuneOptions& o) {
    Problems out;
    out.all = take(eval::read_math(find_data("--problems", o.problems, "gsm8k_test.jsonl")));
    if (o.shots > 0) out.train = take(eval::read_math(find_data("--train", o.train, "gsm8k_train_200.jsonl")));
    if (o.shots > int(out.train.items.size()))
        bad_usage("--shots {}: the training file has {} problems", o.shots, out.train.items.size());
    const int there = int(out.all.items.size());
    if (o.questions > there) bad_usage("--questions {}: the file has {} problems", o.questions, there);
    if (o.holdout_questions > there - o.questions)
        bad_usage("--holdout-questions {}: behind the {} of the search the file has {}", o.holdout_questions,
                  o.questions, there - o.questions);
    out.searched = o.questions, out.unseen = o.holdout_questions;
    return out;
}

eval::Elsewhere solve_elsewhere(const TuneOptions& o, const eval::TunedMethod& method, const Prepared& prepared,
                                const Problems& problems, const eval::TuneResult& result, eval::Study* study) {
    const eval::SolverOptions wish = problems.options(o, problems.searched, problems.unseen);
    const eval::Solver solver(prepared.model, wish);
    eval::TrialSpecs specs(method, take(eval::shape_of(prepared.model)));
    std::vector<size_t> wanted = result.front;
    wanted.insert(wanted.end(), result.defaults.begin(), result.defaults.end());
    for (size_t i = 0; i < study->trials.size(); ++i)
        if (study->trials[i].label == eval::kReferenceLabel) wanted.push_back(i);
    measure_again(study, wanted, solver.id(), "other problems",
                  [&](const eval::Trial& trial, const eval::Progress& progress) {
                      eval::Measured measured;
                      measured.text = solver.id();
                      measured.bits = trial.search.bits;
                      measured.right = take(solver.solve(take(specs.spec(trial)), progress));
                      return measured;
                  });
    return {solver.id(), wish.name, problems.all.sha256, 0, problems.searched, problems.unseen};
}

} // namespace kvmosaic::tool
