// kvmosaic compare: what each cache costs and loses over a text, teacher-forced, all on one loaded model.
#include <memory>

#include "eval/compare.h"
#include "eval/results.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"
#include "kvmosaic/method.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::string model, weights, step = "decode", json, resume;
    std::vector<std::string> specs, texts;
    std::vector<int> windows;
    int window = 2048, score_from = 256, ubatch = 0;
    int64_t tokens = 0;
    bool force = false;
    Common common;
};

// The texts and how many windows each gives: `--windows N` for all, one --windows a text in their order, or FILE:N.
std::vector<std::string> texts_of(const Options& o, std::vector<int32_t>* windows) {
    constexpr int kDefault = 4;
    if (o.windows.size() > 1 && o.windows.size() != o.texts.size()) {
        bad_usage("--windows is given {} times for {} texts: once for all, or once for each -f in their order",
                  o.windows.size(), o.texts.size());
    }
    std::vector<std::string> texts;
    windows->clear();
    for (size_t i = 0; i < o.texts.size(); ++i) {
        std::string text = o.texts[i];
        int n = o.windows.empty() ? kDefault : o.windows[o.windows.size() > 1 ? i : 0];
        const size_t colon = text.rfind(':');
        const std::string tail = colon == std::string::npos ? "" : text.substr(colon + 1);
        const bool counted = !tail.empty() && tail.find_first_not_of("0123456789") == std::string::npos;
        if (counted && !eval::exists(text)) {
            if (!o.windows.empty()) bad_usage("-f {}: windows are counted there or with --windows, not both", text);
            if (tail.size() > 6) bad_usage("-f {}: 1 to 999999 windows", text);
            n = std::stoi(tail);
            text.resize(colon);
        }
        texts.push_back(std::move(text));
        windows->push_back(n);
    }
    return texts;
}

// --tokens N: N tokens in as many whole windows as that makes, or in one smaller window.
eval::CompareOptions plan(const Options& o, bool score_given, std::vector<std::string>* texts) {
    eval::CompareOptions out;
    out.specs = o.specs;
    *texts = texts_of(o, &out.windows);
    out.window = o.window, out.score_from = o.score_from;
    out.threads = o.common.threads;
    out.step = o.step == "chunk" ? StepMode::chunk : StepMode::decode;
    out.ubatch = o.ubatch > 0 ? o.ubatch : out.step == StepMode::chunk ? 512 : 128;
    if (o.tokens > 0) {
        if (!o.windows.empty()) bad_usage("--tokens and --windows exclude each other");
        if (o.texts.size() > 1) bad_usage("--tokens is for one text; count windows for each with --windows");
        if (o.tokens < 2) bad_usage("--tokens {}: at least 2", o.tokens);
        if (o.tokens < o.window) out.window = int(o.tokens);
        out.windows = {int32_t(o.tokens / out.window)};
    }
    if (!score_given) out.score_from = std::max(1, std::min(out.score_from, out.window / 2));
    return out;
}

// "3 windows of a.txt, 1 window of b.jsonl"
std::string texts_text(const eval::CompareHead& head) {
    std::vector<std::string> parts;
    for (size_t i = 0; i < head.texts.size(); ++i) {
        const int n = head.options.windows[i];
        parts.push_back(fmt::format("{} {} of {}", n, n == 1 ? "window" : "windows", head.texts[i]));
    }
    return fmt::format("{}", fmt::join(parts, ", "));
}

void compare(const Options& o, bool score_given) {
    check_specs(o.specs);
    check_new_file("--json", o.json, o.force);
    check_new_file("--resume", o.resume, true); // may exist, but its folder must
    eval::CompareHead head;
    head.options = plan(o, score_given, &head.texts);
    std::vector<std::string> contents;
    for (const std::string& text : head.texts)
        contents.push_back(take(eval::read_text(text)));
    const Prepared prepared = prepare_model(o.model, o.weights, o.common);
    const eval::Model& model = prepared.model;
    head.model = prepared.source;
    head.model_sha256 = prepared.sha256;
    head.weights = prepared.weights;
    for (const std::string& text : contents)
        head.texts_sha256.push_back(eval::sha256_of(text));
    head.machine = eval::machine_name();
    head.version = KVMOSAIC_VERSION;

    std::vector<std::vector<int32_t>> tokens;
    for (const std::string& text : contents)
        tokens.push_back(model.tokenize(text, true, false));
    check(eval::validate(head.options, head.texts, tokens, model.trained_context()));
    std::vector<eval::Row> rows = eval::plan_rows(o.specs);
    if (!o.resume.empty()) check(eval::load_progress(o.resume, head, &rows));
    const auto landed = [&]() -> Status {
        return o.resume.empty() ? Status() : eval::save_progress(o.resume, head, rows);
    };
    ProgressBar bar;
    check(eval::compare(model, tokens, head.options, &rows, landed, bar.receiver()));
    bar.finish();

    if (o.json != "-") {
        fmt::print("{} ({} weights), {}: {} tokens each, scored from token {}, step {}\n", head.model, head.weights,
                   texts_text(head), head.options.window, head.options.score_from, o.step);
        fmt::print("{}", eval::to_table(rows));
    }
    for (const std::string& words : eval::warnings(rows))
        warn(words);
    if (!o.json.empty()) write_json(o.json, eval::to_json(head, rows).dump(2), o.force);
}

} // namespace

void add_compare(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("compare", "true bits, memory, perplexity and KL of caches over texts");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("-f,--file", o->texts,
                     "text to evaluate on (-: standard input), or .jsonl of question and answer; repeat for more texts")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--cache", o->specs, "cache spec (kvmosaic methods); repeat for more rows (f16 is always there)")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--window", o->window, "tokens a window")->capture_default_str();
    verb->add_option("--windows", o->windows,
                     "windows from a text's start, for all texts or once for each (default 4; or -f FILE:N)")
        ->allow_extra_args(false);
    CLI::Option* score =
        verb->add_option("--score-from", o->score_from,
                         "first token of a window that is scored (by default at most half of the window)")
            ->capture_default_str();
    verb->add_option("--tokens", o->tokens, "in place of --windows: about this many tokens");
    add_weights(verb, &o->weights);
    verb->add_option(
            "--step", o->step,
            "decode: each token sees what it would see decoded one by one; chunk: tokens of a step see each other raw")
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
        "  kvmosaic compare -m tiny -f wiki.txt:4 -f gsm8k.jsonl:2 --cache kivi:bits=2\n"
        "\"bits\" are true bits per value: codes, scales, offsets, maps, padding and raw windows, at the end of a "
        "window.\n"
        "\"at 2K\" and \"at 8K\" are true bits at those contexts, whatever the window. \"ratio\" is the perplexity by\n"
        "that of f16 on the same positions. KL and top-1 are against the f16 cache. The row \"floor\" is the f16\n"
        "cache against an f32 cache on the same weights: differences of that size are rounding, not the cache.\n"
        "JSON: docs/json.md.");
    verb->callback([o, score] { compare(*o, score->count() > 0); });
}

} // namespace kvmosaic::tool
