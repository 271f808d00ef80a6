// A search for settings of one method: the model is loaded once, the f16 reference is computed once, and each setting
// costs one pass of its own cache. Who chooses the settings (a grid, a person, Optuna) is not known here.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eval/solver.h"
#include "eval/study.h"
#include "eval/tunables.h"

namespace kvmosaic::eval {

struct TuneText {
    std::string name, sha256;
    std::vector<int32_t> tokens;
    int32_t windows = 1;
};
// Which text and windows a result is of.
std::string text_id(const TuneText& text);

// Measures caches on one text against the f16 cache, whose logits are kept.
class Measurer {
public:
    // `options`: window, score_from, ubatch, threads, context; the windows are the text's.
    Measurer(const Model& model, TuneText text, CompareOptions options);
    // Whether text and memory suffice; sentences name `option` for the text.
    Status validate(const std::string& option) const;
    int64_t kept_bytes() const;
    const std::string& id() const { return id_; }

    // The first call computes the reference.
    Result<Measured> measure(const std::string& spec, const Progress& progress);

private:
    const Model& model_;
    TuneText text_;
    std::string id_;
    CompareOptions options_;
    KeptLogits kept_;
    std::vector<Row> reference_; // one row
};

// Specs of trials as a cache takes them; those of kvtuner have a calibration file, which lives as long as this.
class TrialSpecs {
public:
    TrialSpecs(TunedMethod method, ModelShape shape);
    ~TrialSpecs();
    TrialSpecs(const TrialSpecs&) = delete;
    TrialSpecs& operator=(const TrialSpecs&) = delete;
    Result<std::string> spec(const Trial& trial);

private:
    TunedMethod method_;
    ModelShape shape_;
    std::string file_;
};

class Search {
public:
    struct Options {
        TunedMethod method;
        int32_t groups = 8; // of layers, kvtuner
        CompareOptions measure;
        TuneText text;
        std::optional<SolverOptions> solver; // where right answers count
        std::string path;                    // of the study
        nlohmann::ordered_json head;         // without the space
        std::vector<std::string> fields;     // of the head that must agree
    };
    // Opens the study, or finds the space and begins one; then measures the defaults.
    static Result<std::unique_ptr<Search>> open(const Model& model, const Options& options, const Progress& progress);

    // The trial with these values, measured now unless the study has it.
    Result<const Trial*> evaluate(const std::vector<std::string>& values, const Progress& progress);
    bool knows(const std::vector<std::string>& values) const;

    const std::vector<Tunable>& space() const { return method_.space; }
    const Study& study() const { return study_; }

private:
    Search(const Model& model, const Options& options);
    Status find_space(const Model& model, const Options& options, const Progress& progress);
    Status add_defaults(const Progress& progress);
    Status add(Trial trial, const Progress& progress);

    TunedMethod method_;
    std::unique_ptr<TrialSpecs> specs_;
    Measurer measurer_;
    std::optional<Solver> solver_;
    Study study_;
    std::vector<WidthPair> descent_; // kvtuner
};

// Sizes of a model's cache, with its fingerprint.
Result<ModelShape> shape_of(const Model& model);

} // namespace kvmosaic::eval
