// What every verb shares: how it joins the command line, fails, finds models and shows progress.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "eval/engine.h"
#include "kvmosaic/progress.h"
#include "kvmosaic/status.h"

namespace kvmosaic::tool {

inline constexpr int kFailed = 1;
inline constexpr int kBadUsage = 2;

// Ends a verb: one sentence on stderr, then the exit code. Used inside the program only; the library returns Status.
struct Failure {
    int code;
    std::string message;
};

template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
    throw Failure{kFailed, fmt::format(text, std::forward<Args>(args)...)};
}
template <typename... Args>
[[noreturn]] void bad_usage(fmt::format_string<Args...> text, Args&&... args) {
    throw Failure{kBadUsage, fmt::format(text, std::forward<Args>(args)...)};
}

// Options that several verbs have.
struct Common {
    bool verbose = false;
    int threads = 0;
};

// Turns a bad status into a Failure; arguments out of range are bad usage.
void check(const Status& status);
template <typename T>
T take(Result<T> result) {
    check(result.status());
    return std::move(*result);
}

// A sentence on stderr, `kvmosaic: ...`, also when output is not a terminal.
void notice(const std::string& text);
void warn(const std::string& text);

// A spec that names no method or breaks a range ends the verb here, before any model is loaded.
void check_spec(const std::string& spec);
void check_specs(const std::vector<std::string>& specs); // nor may one mean the same as another

// A path as it is, or a fetched model's name ("tiny"). Ends the verb when there is neither.
std::string find_model(const std::string& wish);
const std::vector<std::string>& model_names();

// Loads with a progress bar; says what in the file will hurt.
eval::Model load_model(const std::string& path, const eval::LoadOptions& options = {});

// A model whose weights are dequantized for an honest comparison where that was asked for (empty: by default).
struct Prepared {
    std::string source, sha256; // the file that was named
    std::string weights;        // "f16", "f32", "as-is": what is loaded
    eval::Model model;
};
Prepared prepare_model(const std::string& wish, const std::string& weights, const Common& common,
                       const eval::LoadOptions& options = {});
void add_weights(CLI::App* app, std::string* weights);

// Loads the model that was named and makes a context on it.
struct Opened {
    std::string path;
    eval::Model model;
    eval::Context context;
};
Opened open_model(const std::string& wish, const std::string& spec, int ctx, const Common& common, int sequences = 1,
                  int rollback = 0);

// What stands above every table: which model and weights, and on a second line which program on which machine.
std::string origin_text(const Prepared& prepared);
std::string build_text();

// The command line of this process as a shell would take it again; main sets it.
void set_command_line(int argc, const char* const* argv);
const std::string& command_line();

// Text from -p or -f ("-": standard input), exactly one of them.
std::string take_text(const std::string& prompt, bool has_prompt, const std::string& file);

// Folder of the running program, with a slash at its end.
std::string program_folder();

// A script that a verb runs: beside an installed program, or at `path` of the source tree that it was built from.
std::string find_script(const std::string& verb, const std::string& path);

// Prints JSON to standard output for "-", else writes a file that did not exist (or may be replaced with `force`).
void write_json(const std::string& target, const std::string& text, bool force);
// The refusal alone, before work begins.
void check_new_file(const std::string& option, const std::string& target, bool force);

// One page of these results (eval/report.h) into a new file.
void write_report(const std::string& target, const std::vector<nlohmann::ordered_json>& results, bool force);

// --json and --force of the verbs that print a table.
void add_json(CLI::App* app, std::string* json, bool* force);
void add_common(CLI::App* app, Common* common);

// One a verb, in its own file: registers options and help and sets the callback.
void add_run(CLI::App& app);
void add_serve(CLI::App& app);
void add_compare(CLI::App& app);
void add_advise(CLI::App& app);
void add_report(CLI::App& app);
void add_methods(CLI::App& app);
void add_inspect(CLI::App& app);
void add_fetch(CLI::App& app);
void add_devices(CLI::App& app);
void add_eval(CLI::App& app);
void add_bench(CLI::App& app);
void add_calibrate(CLI::App& app);
void add_tune(CLI::App& app);
void add_passkey(CLI::App& eval);
void add_component(CLI::App& eval);
void add_channels(CLI::App& eval);
void add_gsm8k(CLI::App& eval);
void add_generate(CLI::App& eval);
void add_longbench(CLI::App& eval);
void add_ifeval(CLI::App& eval);
void add_perplexity(CLI::App& eval); // ppl, kl, humaneval

} // namespace kvmosaic::tool
