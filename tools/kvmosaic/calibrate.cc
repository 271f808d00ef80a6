// kvmosaic calibrate: what a calibrated method must know of a model, found on a text, into a file.
#include <memory>

#include "eval/calibrate.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::string model, file, weights, out, base = "kivi";
    eval::CalibrateOptions task;
    bool force = false;
    Common common;
};

void calibrate(const Options& o, bool bits_given, bool base_given) {
    eval::CalibrateOptions task = o.task;
    check(eval::validate(task));
    if (task.method != "kvtuner" && bits_given) bad_usage("--bits: only for --method kvtuner, not for {}", task.method);
    if (task.method != "kvtuner" && base_given) bad_usage("--base: only for --method kvtuner, not for {}", task.method);
    check_new_file("-o", o.out, o.force);
    const std::string text = take(eval::read_text(o.file));
    task.text = eval::sha256_of(text);
    task.threads = o.common.threads;
    task.token_base = o.base == "token";
    const Prepared prepared = prepare_model(o.model, o.weights, o.common);
    ProgressBar bar;
    const std::vector<int32_t> tokens = prepared.model.tokenize(text, true, false);
    const Calibration found = take(eval::calibrate(prepared.model, tokens, task, bar.receiver()));
    bar.finish();
    check(write_calibration(o.out, found));
    fmt::print("{}: {} of {} ({} weights, fingerprint {}), {} layers, {} tokens, {} arrays\nuse it with --cache "
               "{}:calib={}\n",
               o.out, task.method, prepared.source, prepared.weights, found.fingerprint, found.layers.size(),
               found.tokens, found.arrays.size(), task.method, o.out);
}

} // namespace

void add_calibrate(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("calibrate", "find what a calibrated method must know of a model");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("-f,--file", o->file, "text to look at (-: standard input), or .jsonl of question and answer")
        ->required();
    verb->add_option("--method", o->task.method, fmt::format("one of {}", fmt::join(eval::calibrated_methods(), ", ")))
        ->required();
    verb->add_option("-o,--output", o->out, "the calibration file")->required();
    verb->add_option("--tokens", o->task.tokens,
                     "tokens to look at, from the text's start; their keys and values are held in memory")
        ->capture_default_str();
    verb->add_option("--window", o->task.window, "tokens after which the model starts anew")->capture_default_str();
    CLI::Option* bits =
        verb->add_option("--bits", o->task.bits, "kvtuner: cap on the mean bits of a code over layers and sides")
            ->capture_default_str();
    CLI::Option* base = verb->add_option("--base", o->base, "kvtuner: kivi (keys per channel) or token")
                            ->check(CLI::IsMember({"kivi", "token"}))
                            ->capture_default_str();
    add_weights(verb, &o->weights);
    verb->add_flag("--force", o->force, "replace an existing file");
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic calibrate -m tiny -f train.txt --method kvquant -o tiny.kvquant\n"
        "  kvmosaic calibrate -m tiny -f train.txt --method kvtuner --tokens 1024 --bits 4 -o tiny.kvtuner\n"
        "  kvmosaic compare -m tiny -f text.txt --cache kvquant:calib=tiny.kvquant\n"
        "The same text and model give the same file. Calibrate on another text than the one you evaluate on.\n"
        "kvtuner: widths are chosen by the error of each layer's attention output, steepest descent under the\n"
        "cap; the search over clusters of layers is kvmosaic tune --method kvtuner.");
    verb->callback([o, bits, base] { calibrate(*o, bits->count() > 0, base->count() > 0); });
}

} // namespace kvmosaic::tool
