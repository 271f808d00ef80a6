#include "kvmosaic/app.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <set>

#include <unistd.h>

#include "eval/build.h"
#include "eval/files.h"
#include "eval/weights.h"
#include "kvmosaic/method.h"
#include "llama/gguf_check.h"

namespace kvmosaic::tool {

void check(const Status& status) {
    if (status) return;
    throw Failure{status.code() == StatusCode::invalid_argument ? kBadUsage : kFailed, status.message()};
}

void notice(const std::string& text) { fmt::print(stderr, "kvmosaic: {}\n", text); }
void warn(const std::string& text) { fmt::print(stderr, "kvmosaic: warning: {}\n", text); }

void check_spec(const std::string& spec) { check(open_method(spec).status()); }

void check_specs(const std::vector<std::string>& specs) {
    std::set<std::string> seen;
    for (const std::string& spec : specs) {
        const std::string canonical = take(open_method(spec))->spec();
        if (!seen.insert(canonical).second) bad_usage("--cache {}: is given twice ({})", spec, canonical);
    }
}

const std::vector<std::string>& model_names() {
    static const std::vector<std::string> names{"tiny", "small", "base", "swa"};
    return names;
}

std::string find_model(const std::string& wish) {
    if (wish.empty()) bad_usage("-m: a model is needed: a GGUF file, or one of the fetched names");
    std::error_code ec;
    if (std::filesystem::is_directory(wish, ec)) bad_usage("-m {}: is a folder, a GGUF file is needed", wish);
    if (eval::exists(wish)) return wish;
    for (const std::string& name : model_names()) {
        if (name != wish) continue;
        std::string path = eval::cache_folder() + "/models/" + name + ".gguf";
        if (!eval::exists(path)) fail("-m {0}: is not fetched yet; run `kvmosaic fetch {0}`", name);
        return path;
    }
    fail("-m {}: no such file; a path of a GGUF file, or one of {} after `kvmosaic fetch NAME`", wish,
         fmt::join(model_names(), ", "));
}

eval::Model load_model(const std::string& path, const eval::LoadOptions& options) {
    ProgressBar bar;
    eval::Model model = take(eval::Model::load(path, bar.receiver(), options));
    bar.finish();
    for (const std::string& text : model.warnings())
        warn(text);
    return model;
}

Prepared prepare_model(const std::string& wish, const std::string& weights, const Common& common,
                       const eval::LoadOptions& options) {
    const auto type = take(eval::parse_weights(weights.empty() ? "f16" : weights));
    Prepared out;
    out.source = find_model(wish);
    eval::set_verbose(common.verbose);
    check(check_gguf(out.source));
    ProgressBar bar;
    out.sha256 = take(eval::sha256_of_file(out.source, bar.receiver()));
    const eval::WeightsRequest request{out.source, out.sha256, type, weights.empty(), int64_t(4) << 30, common.threads};
    const auto say = [&](const std::string& words) {
        bar.finish();
        notice(words);
    };
    const eval::Weights found = take(eval::prepare_weights(request, say, bar.receiver()));
    bar.finish();
    if (!found.warning.empty()) warn(found.warning);
    out.weights = name_of(found.type);
    out.model = load_model(found.path, options);
    return out;
}

void add_weights(CLI::App* app, std::string* weights) {
    app->add_option("--weights", *weights,
                    "f16, f32: dequantized once and kept in the cache folder; as-is (default f16; above 4 GiB as-is)")
        ->check(CLI::IsMember({"f16", "f32", "as-is"}));
}

Opened open_model(const std::string& wish, const std::string& spec, int ctx, const Common& common, int sequences,
                  int rollback) {
    Opened out;
    out.path = find_model(wish);
    eval::set_verbose(common.verbose);
    out.model = load_model(out.path);
    eval::ContextOptions options;
    options.spec = spec;
    options.context = ctx;
    options.threads = common.threads;
    options.sequences = sequences;
    options.cache.rollback = rollback;
    out.context = take(eval::Context::make(out.model, options));
    return out;
}

std::string origin_text(const Prepared& p) {
    return fmt::format("{} (SHA-256 {}, {} weights)\n{}", p.source, p.sha256.substr(0, 16), p.weights, build_text());
}

std::string build_text() {
    return fmt::format("kvmosaic {}, commit {}; {}", KVMOSAIC_VERSION, eval::build_commit(), eval::machine_name());
}

namespace {
std::string line;
}

void set_command_line(int argc, const char* const* argv) {
    line = "kvmosaic";
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        const bool plain =
            !word.empty() && word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                                    "0123456789-_=:,./+@%") == std::string::npos;
        line += ' ';
        if (plain) {
            line += word;
            continue;
        }
        line += '\'';
        for (const char c : word)
            line += c == '\'' ? std::string("'\\''") : std::string(1, c);
        line += '\'';
    }
}

const std::string& command_line() { return line; }

std::string take_text(const std::string& prompt, bool has_prompt, const std::string& file) {
    if (has_prompt && !file.empty()) bad_usage("-p and -f exclude each other: the text comes from one of them");
    std::string text = file.empty() ? prompt : take(eval::read_file(file));
    if (text.empty()) bad_usage("{}: the text is empty", file.empty() ? "-p" : "-f " + file);
    return text;
}

std::string program_folder() {
    std::error_code ec;
    const auto path = std::filesystem::read_symlink("/proc/self/exe", ec);
    return ec ? std::string("./") : path.parent_path().string() + "/";
}

std::string find_script(const std::string& verb, const std::string& path) {
    const std::string name = std::filesystem::path(path).filename().string();
    const std::vector<std::string> places{program_folder() + "../share/kvmosaic/" + name,
                                          std::string(KVMOSAIC_SOURCE_DIR) + "/" + path};
    for (const std::string& place : places) {
        if (eval::exists(place)) return place;
    }
    fail("{}: the script {} is missing; it was looked for at {}", verb, name, fmt::join(places, " and "));
}

void check_new_file(const std::string& option, const std::string& target, bool force) {
    if (target.empty() || target == "-") return;
    const std::filesystem::path folder = std::filesystem::path(target).parent_path();
    std::error_code ec;
    if (!folder.empty() && !std::filesystem::is_directory(folder, ec)) {
        bad_usage("{} {}: the folder {} does not exist", option, target, folder.string());
    }
    if (force || !eval::exists(target)) return;
    bad_usage("{} {}: exists already; name another file, or replace it with --force", option, target);
}

void write_json(const std::string& target, const std::string& text, bool force) {
    if (target == "-") {
        fmt::print("{}\n", text);
        return;
    }
    check_new_file("--json", target, force);
    check(eval::write_file(target, text + "\n"));
}

void add_json(CLI::App* app, std::string* json, bool* force) {
    app->add_option("--json", *json, "results into a file (-: standard output, without the table)");
    app->add_flag("--force", *force, "replace an existing --json file");
}

void add_common(CLI::App* app, Common* common) {
    app->add_option("--threads", common->threads, "threads of the model's work (0: all of this machine)")
        ->check(CLI::Range(0, 1024));
    // Contexts are made in many places, and other tools on our cache need the same two words: the environment.
    app->add_option_function<std::string>(
           "--accuracy", [](const std::string& wish) { ::setenv("KVMOSAIC_ACCURACY", wish.c_str(), 1); },
           "weights of attention on packed codes: exact (16 bits, default) or fast (8 bits)")
        ->check(CLI::IsMember({"exact", "fast"}));
    app->add_flag_callback(
        "--restore", [] { ::setenv("KVMOSAIC_RESTORE", "1", 1); },
        "decode packed pages before attending, instead of reading their codes");
    app->add_flag("--verbose", common->verbose, "show the log of libllama");
}

} // namespace kvmosaic::tool
