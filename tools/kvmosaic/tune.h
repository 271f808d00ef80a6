// kvmosaic tune in three parts: options, search and results (tune.cc); right answers as what is searched for
// (tune_problems.cc); Optuna and the server it drives (tune_optuna.cc).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "eval/tune.h"
#include "eval/tune_report.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

struct TuneOptions {
    std::string model, weights, text, objective = "kl", sampler = "tpe", study, out, json, plot, holdout, serve;
    std::string problems, train; // files, of --objective gsm8k
    eval::TuneWish wish;
    int trials = 30, seed = 1, window = 2048, windows = 1, score_from = 256, ubatch = 128, groups = 8;
    int holdout_windows = 0; // 0: as many as the text has
    int questions = 50, shots = 4, max_tokens = 256, batch = 8, holdout_questions = 0;
    int64_t context = 0; // 0: 32768, or what the model was trained for
    std::optional<double> bits, kl;
    bool force = false;
    Common common;
};

// Problems by which settings are judged: those of the search, and those behind them that it does not see.
struct Problems {
    eval::MathProblems all, train;
    int32_t searched = 0, unseen = 0;
    eval::SolverOptions options(const TuneOptions& o, int32_t first, int32_t count) const;
};
void add_objective(CLI::App* verb, TuneOptions* o);
// Options that belong to one objective are not passed over in silence under the other.
void check_objective(const TuneOptions& o, const CLI::App& verb);
Problems read_problems(const TuneOptions& o);
// Trials again, on what the search did not see: those that have no result of this id yet, each kept at once. what: for
// the progress bar.
void measure_again(eval::Study* study, const std::vector<size_t>& trials, const std::string& id, const char* what,
                   const std::function<eval::Measured(const eval::Trial&, const eval::Progress&)>& measure);
// Front, defaults and the f16 cache again, on the problems that the search did not see.
eval::Elsewhere solve_elsewhere(const TuneOptions& o, const eval::TunedMethod& method, const Prepared& prepared,
                                const Problems& problems, const eval::TuneResult& result, eval::Study* study);

// Version of Optuna that a search would use; ends the verb where there is none.
std::string find_optuna(const TuneOptions& o);
// Runs the whole search in processes of its own; its results are then in the study.
void run_optuna(const TuneOptions& o);

// What the server of that search does: answers on standard output until standard input ends.
void serve_search(eval::Search& search, const eval::Progress& progress);

} // namespace kvmosaic::tool
