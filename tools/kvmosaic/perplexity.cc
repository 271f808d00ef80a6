// kvmosaic eval ppl, kl and humaneval: teacher-forced over a whole text, as llama.cpp's perplexity tool goes through
// it.
#include <algorithm>
#include <cmath>
#include <memory>

#include "eval/build.h"
#include "eval/compare.h"
#include "eval/metrics.h"
#include "eval/results.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"
#include "kvmosaic/free_run.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

enum class Ask : uint8_t { ppl, kl, humaneval };

struct Options {
    Ask ask = Ask::ppl;
    std::string model, file, weights, json, resume;
    std::vector<std::string> specs;
    int window = 512, chunks = 0;
    bool force = false;
    Common common;
};

eval::Summary blocks_of(const std::vector<std::vector<float>>& blocks) {
    eval::Summary s = eval::summarize(blocks);
    if (blocks.size() == 1) s.error = eval::summarize(blocks.front()).error; // nothing better is known
    return s;
}

struct Line {
    eval::Summary loss, ratio, kl; // nats; ratio: differences to f16
};

Line line_of(const eval::Row& row, const eval::Row& base) {
    std::vector<std::vector<float>> loss, pairs, kl;
    for (size_t w = 0; w < row.windows.size(); ++w) {
        loss.push_back(row.windows[w].nll);
        kl.push_back(row.windows[w].kl);
        pairs.emplace_back();
        for (size_t i = 0; i < loss.back().size(); ++i)
            pairs.back().push_back(loss.back()[i] - base.windows[w].nll[i]);
    }
    return {blocks_of(loss), blocks_of(pairs), blocks_of(kl)};
}

std::string table_of(const Options& o, const std::vector<eval::Row>& rows) {
    const bool kl = o.ask == Ask::kl;
    std::string out = fmt::format("{:<24}  {:>6}", "cache", "bits");
    out += kl ? fmt::format("  {:>10} {:>9}  {:>9}  {:>7}\n", "KL mean", "+-", "KL p99", "top-1 %")
              : fmt::format("  {:>9} {:>8}  {:>8} {:>8}\n", "ppl", "+-", "ratio", "+-");
    for (const eval::Row& row : rows) {
        const eval::RowSummary s = summarize(row, rows.front());
        const Line line = line_of(row, rows.front());
        const bool floor = row.spec == "floor";
        out += fmt::format("{:<24}  {:>6}", floor ? "floor (f16 against f32)" : row.spec,
                           floor ? "" : fmt::format("{:.2f}", s.bits));
        if (!kl) {
            const double ppl = std::exp(line.loss.mean), ratio = std::exp(line.ratio.mean);
            out += fmt::format("  {:>9.4f} {:>8.4f}  {:>8.4f} {:>8.4f}\n", ppl, ppl * line.loss.error, ratio,
                               ratio * line.ratio.error);
        } else if (row.spec == row.reference) {
            out += fmt::format("  {:>10}\n", "reference");
        } else {
            out += fmt::format("  {:>10.3e} {:>9.1e}  {:>9.2e}  {:>7.2f}\n", line.kl.mean, line.kl.error, s.kl_p99,
                               100 * s.top1);
        }
    }
    return out;
}

void measure(const Options& o) {
    check_specs(o.specs);
    check_new_file("--json", o.json, o.force);
    check_new_file("--resume", o.resume, true);
    eval::CompareHead head;
    head.texts = {o.ask == Ask::humaneval ? find_data("--file", o.file, "humaneval.jsonl.gz") : o.file};
    const std::string text = take(eval::read_text(head.texts[0]));
    const Prepared prepared = prepare_model(o.model, o.weights, o.common);
    const std::vector<std::vector<int32_t>> tokens{prepared.model.tokenize(text, true, false)};
    head.model = prepared.source, head.model_sha256 = prepared.sha256, head.weights = prepared.weights;
    head.texts_sha256 = {eval::sha256_of(text)};
    head.machine = eval::machine_name();
    head.version = KVMOSAIC_VERSION, head.commit = eval::build_commit(), head.command = command_line();
    head.options.specs = o.specs;
    head.options.window = o.window;
    head.options.score_from = o.window / 2 + 1; // as llama.cpp's perplexity tool does
    head.options.ubatch = std::min(head.options.ubatch, o.window);
    head.options.threads = o.common.threads;
    const int32_t whole = int32_t(tokens[0].size() / size_t(o.window));
    if (whole < std::max(1, o.chunks)) {
        bad_usage("--window {}, --chunks {}: the text {} has {} tokens, which makes {} windows", o.window, o.chunks,
                  head.texts[0], tokens[0].size(), whole);
    }
    head.options.windows = {o.chunks > 0 ? o.chunks : whole};
    check(eval::validate(head.options, head.texts, tokens, prepared.model.trained_context()));

    std::vector<eval::Row> rows = eval::plan_rows(o.specs);
    if (o.ask != Ask::kl) std::erase_if(rows, [](const eval::Row& row) { return row.spec == "floor"; });
    if (!o.resume.empty()) check(eval::load_progress(o.resume, head, &rows));
    const auto landed = [&]() -> Status {
        return o.resume.empty() ? Status() : eval::save_progress(o.resume, head, rows);
    };
    ProgressBar bar;
    check(eval::compare(prepared.model, tokens, head.options, &rows, landed, bar.receiver()));
    bar.finish();
    if (o.json != "-") {
        fmt::print("{}\n{}: {} of {} windows of {} tokens, the second half of each scored\n{}", origin_text(prepared),
                   head.texts[0], head.options.windows[0], whole, o.window, table_of(o, rows));
    }
    for (const std::string& words : eval::warnings(rows))
        warn(words);
    if (o.json.empty()) return;
    ordered_json out = eval::to_json(head, rows);
    for (size_t r = 0; r < rows.size(); ++r) { // in place of errors that take positions as independent
        const Line line = line_of(rows[r], rows.front());
        ordered_json& row = out["rows"][r];
        row["ppl_error"] = std::exp(line.loss.mean) * line.loss.error;
        row["kl_error"] = line.kl.error;
        if (rows[r].spec != "floor") row["ppl_ratio_error"] = std::exp(line.ratio.mean) * line.ratio.error;
    }
    write_json(o.json, out.dump(2), o.force);
}

void add(CLI::App& eval, Ask ask, const char* name, const char* about, const char* footer) {
    auto o = std::make_shared<Options>();
    o->ask = ask;
    CLI::App* verb = eval.add_subcommand(name, about);
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    if (ask == Ask::humaneval) {
        verb->add_option("--file", o->file,
                         "JSON lines of prompt and canonical_solution (default: $KVMOSAIC_DATA/humaneval.jsonl.gz)");
    } else {
        verb->add_option("-f,--file", o->file, "text (-: standard input), or records (.jsonl, .jsonl.gz)")->required();
    }
    verb->add_option("--cache", o->specs, "cache spec (kvmosaic methods); repeat for more rows (f16 is always there)")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--window", o->window, "tokens a window; the second half of each is scored")
        ->check(CLI::Range(4, 1 << 24))
        ->capture_default_str();
    verb->add_option("--chunks", o->chunks, "windows from the text's start (0: all of the text)")
        ->check(CLI::Range(0, 1 << 24))
        ->capture_default_str();
    add_weights(verb, &o->weights);
    add_json(verb, &o->json, &o->force);
    verb->add_option("--resume", o->resume, "keep finished windows in this file, and go on from it");
    add_common(verb, &o->common);
    verb->footer(std::string(footer) +
                 "Teacher-forced with decoding semantics: each token sees what it would see decoded one by one.\n"
                 "Errors allow for the positions of a window being alike. JSON: docs/json.md. More columns and texts:\n"
                 "kvmosaic compare.");
    verb->callback([o] { measure(*o); });
}

} // namespace

void add_perplexity(CLI::App& eval) {
    add(eval, Ask::ppl, "ppl", "perplexity of a whole text through each cache",
        "Examples\n"
        "  kvmosaic eval ppl -m tiny -f data/sample.txt --cache mixkvq --cache kivi:bits=2 --chunks 4\n"
        "  kvmosaic eval ppl -m small -f wiki.test.raw --cache mixkvq --window 2048 --resume wiki.progress\n"
        "Windows and scored positions are those of llama.cpp's perplexity tool (its -c is --window, its --chunks the\n"
        "same). \"ratio\" is the perplexity by that of f16 on the same positions.\n");
    add(eval, Ask::kl, "kl", "KL divergence of each cache's predictions from f16's, over a whole text",
        "Examples\n"
        "  kvmosaic eval kl -m tiny -f data/sample.txt --cache mixkvq --cache kivi:bits=2 --chunks 4\n"
        "\"floor\" is the f16 cache against an f32 cache on the same weights: differences of that size are "
        "rounding.\n");
    add(eval, Ask::humaneval, "humaneval", "perplexity of code: HumanEval's prompts with their solutions",
        "Examples\n"
        "  kvmosaic eval humaneval -m small --cache mixkvq --cache kivi:bits=2 --window 1024\n"
        "The problems follow each other as one text, each prompt with its canonical solution; nothing is executed.\n");
}

} // namespace kvmosaic::tool
