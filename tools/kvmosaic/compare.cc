// kvmosaic compare: what each cache costs and loses over a text, teacher-forced, all on one loaded model.
#include <memory>
#include <set>

#include "eval/compare.h"
#include "eval/results.h"
#include "eval/weights.h"
#include "kvmosaic/app.h"
#include "kvmosaic/method.h"
#include "llama/gguf_check.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::string model, text, weights, step = "decode", json, resume;
    std::vector<std::string> specs;
    int window = 2048, windows = 4, score_from = 256, ubatch = 0;
    int64_t tokens = 0;
    bool force = false;
    Common common;
};

void check_specs(const std::vector<std::string>& specs) {
    std::set<std::string> seen;
    for (const std::string& spec : specs) {
        const std::string canonical = take(open_method(spec))->spec();
        if (!seen.insert(canonical).second) bad_usage("--cache {}: is given twice ({})", spec, canonical);
    }
}

// --tokens N: N tokens in as many whole windows as that makes, or in one smaller window.
eval::CompareOptions plan(const Options& o, bool windows_given, bool score_given) {
    eval::CompareOptions out;
    out.specs = o.specs;
    out.window = o.window, out.windows = o.windows, out.score_from = o.score_from;
    out.threads = o.common.threads;
    out.step = o.step == "chunk" ? StepMode::chunk : StepMode::decode;
    out.ubatch = o.ubatch > 0 ? o.ubatch : out.step == StepMode::chunk ? 512 : 128;
    if (o.tokens > 0) {
        if (windows_given) bad_usage("--tokens and --windows exclude each other");
        if (o.tokens < 2) bad_usage("--tokens {}: at least 2", o.tokens);
        if (o.tokens < o.window) out.window = int(o.tokens);
        out.windows = int(o.tokens / out.window);
    }
    if (!score_given) out.score_from = std::max(1, std::min(out.score_from, out.window / 2));
    return out;
}

void compare(const Options& o, bool windows_given, bool score_given) {
    check_specs(o.specs);
    check_new_file("--json", o.json, o.force);
    check_new_file("--resume", o.resume, true); // may exist, but its folder must
    const auto type = take(eval::parse_weights(o.weights.empty() ? "f16" : o.weights));
    eval::CompareHead head;
    head.options = plan(o, windows_given, score_given);
    const std::string text = take(eval::read_file(o.text));
    const std::string source = find_model(o.model);
    eval::set_verbose(o.common.verbose);
    check(check_gguf(source));

    ProgressBar bar;
    head.model = source;
    head.model_sha256 = take(eval::sha256_of_file(source, bar.receiver()));
    head.text = o.text;
    head.text_sha256 = eval::sha256_of(text);
    head.machine = eval::machine_name();
    head.version = KVMOSAIC_VERSION;
    const eval::WeightsRequest request{source,           head.model_sha256, type, o.weights.empty(),
                                       int64_t(4) << 30, o.common.threads};
    const eval::Weights weights = take(eval::prepare_weights(
        request,
        [&](const std::string& words) {
            bar.finish();
            notice(words);
        },
        bar.receiver()));
    bar.finish();
    if (!weights.warning.empty()) warn(weights.warning);
    head.weights = name_of(weights.type);

    const eval::Model model = load_model(weights.path);
    const std::vector<int32_t> tokens = model.tokenize(text, true, false);
    check(eval::validate(head.options, int64_t(tokens.size()), model.trained_context()));
    std::vector<eval::Row> rows = eval::plan_rows(o.specs);
    if (!o.resume.empty()) check(eval::load_progress(o.resume, head, &rows));
    const auto landed = [&]() -> Status {
        return o.resume.empty() ? Status() : eval::save_progress(o.resume, head, rows);
    };
    check(eval::compare(model, tokens, head.options, &rows, landed, bar.receiver()));
    bar.finish();

    if (o.json != "-") {
        fmt::print("{} ({} weights), {}: {} windows of {} tokens, scored from token {}, step {}\n", source,
                   head.weights, o.text, head.options.windows, head.options.window, head.options.score_from, o.step);
        fmt::print("{}", eval::to_table(rows));
    }
    for (const std::string& words : eval::warnings(rows))
        warn(words);
    if (!o.json.empty()) write_json(o.json, eval::to_json(head, rows).dump(2), o.force);
}

} // namespace

void add_compare(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("compare", "true bits, memory, perplexity and KL of caches over a text");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("-f,--file", o->text, "text to evaluate on (-: standard input)")->required();
    verb->add_option("--cache", o->specs, "cache spec; repeat for more rows (f16 is always there)")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--window", o->window, "tokens a window")->capture_default_str();
    CLI::Option* windows =
        verb->add_option("--windows", o->windows, "windows, from the text's start")->capture_default_str();
    CLI::Option* score = verb->add_option("--score-from", o->score_from, "first token of a window that is scored")
                             ->capture_default_str();
    verb->add_option("--tokens", o->tokens, "in place of --windows: about this many tokens");
    verb->add_option("--weights", o->weights,
                     "f16, f32: dequantized once and kept in the cache folder; as-is (default f16, up to 4 GiB)")
        ->check(CLI::IsMember({"f16", "f32", "as-is"}));
    verb->add_option("--step", o->step, "decode: each token sees what it would see alone; chunk: as a serving engine")
        ->check(CLI::IsMember({"decode", "chunk"}))
        ->capture_default_str();
    verb->add_option("--ubatch", o->ubatch, "tokens a step (default 128; 512 with --step chunk)")
        ->check(CLI::Range(1, 4096));
    verb->add_option("--json", o->json, "results into a file (-: standard output, without the table)");
    verb->add_option("--resume", o->resume, "keep finished windows in this file, and go on from it");
    verb->add_flag("--force", o->force, "replace an existing --json file");
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic compare -m tiny -f text.txt --cache mixkvq --cache kivi:bits=4 --cache kivi:bits=2\n"
        "  kvmosaic compare -m tiny -f text.txt --cache mixkvq --tokens 1024 --json result.json\n"
        "  kvmosaic compare -m small -f long.txt --cache mixkvq --resume run.progress\n"
        "KL and top-1 are against the f16 cache. The row \"floor\" is the f16 cache against an f32 cache on the\n"
        "same weights: differences of that size are rounding, not the cache. JSON: docs/json.md.");
    verb->callback([o, windows, score] { compare(*o, windows->count() > 0, score->count() > 0); });
}

} // namespace kvmosaic::tool
