// kvmosaic compare: what each cache costs and loses over a text, teacher-forced, all on one loaded model.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "eval/build.h"
#include "eval/channels.h"
#include "eval/compare.h"
#include "eval/gnuplot.h"
#include "eval/layers.h"
#include "eval/match.h"
#include "eval/results.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"
#include "kvmosaic/method.h"
#include "llama/adapter.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::string model, weights, step = "decode", json, resume, html, heat;
    std::vector<std::string> specs, texts;
    std::vector<int> windows;
    int window = 2048, score_from = 256, ubatch = 0;
    int64_t tokens = 0;
    eval::MatchWish match;
    bool force = false, layers = false;
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

// LAYER:HEAD; nothing for `auto`.
std::optional<std::pair<int32_t, int32_t>> head_of(const std::string& wish) {
    int layer = 0, head = 0, end = 0;
    if (wish == "auto") return {};
    if (std::sscanf(wish.c_str(), "%6d:%6d%n", &layer, &head, &end) < 2 || size_t(end) != wish.size() || layer < 0 ||
        head < 0)
        bad_usage("--heat {}: auto, off or LAYER:HEAD, as in 3:0", wish);
    return std::pair<int32_t, int32_t>(layer, head);
}

// Channels of a head over the first window of the first text.
nlohmann::ordered_json heat(const Options& o, const eval::Model& model, const std::vector<int32_t>& text,
                            int32_t window, const std::optional<std::pair<int32_t, int32_t>>& wish) {
    eval::CaptureOptions capture;
    capture.tokens = capture.window = window;
    capture.threads = o.common.threads;
    capture.query = true;
    if (wish) {
        const auto layers = shape_of(model.get()).layers;
        if (size_t(wish->first) >= layers.size()) bad_usage("--heat {}: layer 0 to {}", o.heat, layers.size() - 1);
        const int32_t heads = layers[size_t(wish->first)].kv_heads;
        if (heads == 0) bad_usage("--heat {}: the layer keeps no K/V of its own", o.heat);
        if (wish->second >= heads) bad_usage("--heat {}: KV head 0 to {}", o.heat, heads - 1);
        capture.layers = {wish->first};
    }
    ProgressBar bar;
    const eval::Capture seen = take(eval::capture(model, text, capture, bar.receiver()));
    bar.finish();
    eval::ChannelSums sums;
    sums.add(seen);
    const std::vector<eval::LayerChannels> all = sums.means();
    const auto [layer, head] = wish ? *wish : eval::telling_head(all);
    const auto own = std::find_if(all.begin(), all.end(), [l = layer](const auto& x) { return x.layer == l; });
    return eval::heat_json(take(eval::heat_map(seen, layer, head, o.specs)), own->heads[size_t(head)]);
}

void compare(Options o, bool score_given) {
    check_specs(o.specs);
    const bool matching = !o.match.budgets.empty();
    if (o.specs.empty() && !matching) bad_usage("--cache SPEC is needed (kvmosaic methods), or --match-bits");
    if (!matching && (!o.match.methods.empty() || o.match.context != 0))
        bad_usage("--method and --match-ctx go with --match-bits");
    check(eval::validate(o.match));
    const std::string heat_wish = o.heat.empty() ? (o.html.empty() ? "off" : "auto") : o.heat;
    const auto heat_head = heat_wish == "off" ? std::nullopt : head_of(heat_wish);
    if (!o.html.empty()) check(eval::check_gnuplot());
    check_new_file("--json", o.json, o.force);
    check_new_file("--html", o.html, o.force);
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
    head.commit = eval::build_commit();
    head.command = command_line();

    std::vector<std::vector<int32_t>> tokens;
    for (const std::string& text : contents)
        tokens.push_back(model.tokenize(text, true, false));
    check(eval::validate(head.options, head.texts, tokens, model.trained_context()));
    ProgressBar bar;
    eval::Matched matched;
    if (matching) {
        matched = take(eval::match_bits(model, o.match, o.common.threads, bar.receiver()));
        bar.finish();
        head.options.context = matched.context;
        eval::add_specs(matched.specs(), &o.specs);
        head.options.specs = o.specs;
    }
    std::vector<eval::Row> rows = eval::plan_rows(o.specs);
    const bool with_heat = heat_wish != "off" && head.options.window >= kPageTokens;
    if (!o.heat.empty() && o.heat != "off" && !with_heat)
        bad_usage("--heat {}: a window of {} tokens has no page, which are {}", o.heat, head.options.window,
                  kPageTokens);
    const size_t whole = rows.size();
    eval::CompareOptions one = head.options; // for layers
    one.windows = {1};
    if (o.layers) {
        std::vector<eval::Row> layers = eval::plan_layers(o.specs, shape_of(model.get()));
        rows.insert(rows.end(), layers.begin(), layers.end());
        notice(fmt::format("--layers: {} passes over a window of {} tokens, one for each layer and cache",
                           layers.size(), one.window));
    }
    if (!o.resume.empty()) check(eval::load_progress(o.resume, head, &rows));
    std::vector<eval::Row> layers(rows.begin() + int64_t(whole), rows.end());
    rows.resize(whole);
    const auto landed = [&]() -> Status {
        if (o.resume.empty()) return {};
        std::vector<eval::Row> all = rows;
        all.insert(all.end(), layers.begin(), layers.end());
        return eval::save_progress(o.resume, head, all);
    };
    nlohmann::ordered_json heat_map;
    if (with_heat) heat_map = heat(o, model, tokens.front(), head.options.window, heat_head);
    check(eval::compare(model, tokens, head.options, &rows, landed, bar.receiver()));
    if (o.layers) check(eval::compare_layers(model, {tokens.front()}, one, &layers, landed, bar.receiver()));
    bar.finish();
    nlohmann::ordered_json result = eval::to_json(head, rows);
    if (matching) result["match"] = eval::to_json(matched, rows);
    if (o.layers) result["layers"] = eval::layers_json(one, layers);
    if (with_heat) result["heat"] = std::move(heat_map);

    if (o.json != "-") {
        fmt::print("{}\n{}: {} tokens each, scored from token {}, step {}\n", origin_text(prepared), texts_text(head),
                   head.options.window, head.options.score_from, o.step);
        fmt::print("{}", eval::to_table(rows));
        if (matching) fmt::print("\n{}", eval::to_table(matched, rows));
    }
    for (const std::string& words : eval::warnings(rows))
        warn(words);
    const std::string text = result.dump(2);
    if (!o.json.empty()) write_json(o.json, text, o.force);
    if (!o.html.empty())
        write_report(o.html, {nlohmann::ordered_json::parse(text)}, o.force); // as `report` would read it
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
        ->allow_extra_args(false);
    verb->add_option("--match-bits", o->match.budgets,
                     "true bits a value, separated by commas: of each --method the setting nearest to them")
        ->delimiter(',');
    verb->add_option("--method", o->match.methods,
                     "with --match-bits: a method, or a spec whose options all settings keep (kvquant:calib=FILE); "
                     "repeat for more; default: all that need no file")
        ->allow_extra_args(false);
    verb->add_option("--match-ctx", o->match.context,
                     "with --match-bits: tokens at which bits are matched (default 32768, or as trained where that is "
                     "less)");
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
    verb->add_option(
        "--html", o->html,
        "a page with the table and plots, complete in one file; drawn with gnuplot (see also kvmosaic report)");
    verb->add_option(
            "--heat", o->heat,
            "channels of one KV head, page by page: LAYER:HEAD, auto (the head whose key ranges say least about its "
            "queries; default with --html) or off. Costs one pass of f16 over a window")
        ->type_name("LAYER:HEAD");
    verb->add_flag(
        "--layers", o->layers,
        "also KL by layer: each cache in one layer at a time, f16 in the others. Costs a pass over a window for each "
        "layer and cache; kept by --resume");
    verb->add_flag("--force", o->force, "replace existing --json and --html files");
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic compare -m tiny -f text.txt --cache mixkvq --cache kivi:bits=4 --cache kivi:bits=2\n"
        "  kvmosaic compare -m tiny -f text.txt --cache mixkvq --tokens 1024 --json result.json\n"
        "  kvmosaic compare -m small -f long.txt --cache mixkvq --resume run.progress\n"
        "  kvmosaic compare -m tiny -f text.txt --cache mixkvq --cache kivi:bits=2 --layers --html report.html\n"
        "  kvmosaic compare -m small -f text.txt --match-bits 2.5,3.3 --method kivi --method mixkvq --method mosaic\n"
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
