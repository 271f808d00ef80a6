// kvmosaic tune in two parts: options, search and results (tune.cc); Optuna and the server it drives (tune_optuna.cc).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "eval/tune.h"
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

// Version of Optuna that a search would use; ends the verb where there is none.
std::string find_optuna(const TuneOptions& o);
// Runs the whole search in processes of its own; its results are then in the study.
void run_optuna(const TuneOptions& o);

// What the server of that search does: answers on standard output until standard input ends.
void serve_search(eval::Search& search, const eval::Progress& progress);

} // namespace kvmosaic::tool
