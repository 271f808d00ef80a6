// What the verbs that let a model answer freely have in common: options, lines, the run, and columns of the table.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval/answers.h"
#include "kvmosaic/app.h"
#include "kvmosaic/lines.h"

namespace kvmosaic::tool {

struct FreeOptions {
    std::string model, weights = "as-is", json, resume;
    std::vector<std::string> specs;
    int batch = 8, max_tokens = 256;
    bool force = false;
    Common common;
};
void add_free(CLI::App* verb, FreeOptions* o);
// Refusals that need no model.
void check_free(const FreeOptions& o);

// The model, in the form in which no answer depends on those beside it.
Prepared prepare_free(const FreeOptions& o);

// Fields that answers of every verb have, and back.
nlohmann::ordered_json to_json(const eval::CacheName& cache, const eval::Answer& answer);
eval::Answer answer_from(const nlohmann::ordered_json& line);

struct FreeTask {
    std::string pass; // where a verb has several: tells their lines apart
    std::vector<eval::Prompt> prompts;
    std::vector<int64_t> items; // what each is called in the file: numbers, none twice
    std::vector<std::string> stops;
    // What the verb has to say of an answer: fields of its line.
    std::function<nlohmann::ordered_json(size_t prompt, const eval::Answer&)> judge;
};

struct FreeResults {
    std::vector<eval::CacheName> caches;
    std::vector<std::vector<eval::Answer>> answers; // [cache][prompt]
    std::vector<const eval::Answer*> of(size_t cache) const;
    eval::AnswersSummary summary(size_t cache) const; // beside f16
};

class FreeRun {
public:
    // `head`: what the verb's answers depend on, `kind` first; `what`: "gsm8k results".
    FreeRun(const FreeOptions& o, const Prepared& prepared, nlohmann::ordered_json head, const std::string& what);
    // Answers what the lines do not have yet.
    FreeResults answer(const FreeTask& task);
    // Prints and writes: the document is the head, then `rows`, then every answer.
    void finish(const nlohmann::ordered_json& rows, const std::string& table);

private:
    nlohmann::ordered_json line_of(const FreeTask& task, size_t prompt, const eval::CacheName& cache,
                                   const eval::Answer& answer) const;
    const FreeOptions& o_;
    const Prepared& prepared_;
    nlohmann::ordered_json head_;
    Lines lines_;
    nlohmann::ordered_json results_ = nlohmann::ordered_json::array();
};

// Columns that every table has, and fields that every row has.
std::string free_columns();
std::string free_cells(const eval::AnswersSummary& s);
nlohmann::ordered_json to_json(const eval::CacheName& cache, const eval::AnswersSummary& s);
// A data file that was named, or `name` in the folder of the environment variable KVMOSAIC_DATA.
std::string find_data(const std::string& option, const std::string& wish, const std::string& name);

} // namespace kvmosaic::tool
