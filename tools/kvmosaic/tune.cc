// kvmosaic tune: settings of a method that are worth having on this model, found by search, checked on another text.
#include "kvmosaic/tune.h"

#include <memory>

#include "eval/build.h"
#include "eval/gnuplot.h"
#include "eval/texts.h"
#include "eval/tune_layers.h"
#include "eval/tune_plot.h"
#include "eval/tune_report.h"

namespace kvmosaic::tool {

using nlohmann::ordered_json;

void measure_again(eval::Study* study, const std::vector<size_t>& trials, const std::string& id, const char* what,
                   const std::function<eval::Measured(const eval::Trial&, const eval::Progress&)>& measure) {
    ProgressBar bar;
    for (size_t i = 0; i < trials.size(); ++i) {
        eval::Trial& trial = study->trials[trials[i]];
        if (trial.on(id)) continue;
        trial.elsewhere.push_back(measure(trial, [&](const std::string& part, double share) {
            bar.show(fmt::format("{}, setting {} of {}, {}", what, i + 1, trials.size(), part),
                     (double(i) + share) / double(trials.size()));
        }));
        check(study->save());
    }
}

namespace {

constexpr int64_t kContext = 32768;

eval::CompareOptions measure_of(const TuneOptions& o, const eval::Model& model) {
    eval::CompareOptions out;
    out.window = o.window, out.ubatch = o.ubatch, out.threads = o.common.threads;
    out.score_from = std::max(1, std::min(o.score_from, o.window / 2));
    out.context = o.context > 0 ? o.context : std::min<int64_t>(kContext, model.trained_context());
    return out;
}

eval::TuneText text_of(const std::string& name, const std::string& content, int windows, const eval::Model& model) {
    return {name, eval::sha256_of(content), model.tokenize(content, true, false), windows};
}

// The part that a study is found by, and what else its results must say.
ordered_json head_of(const TuneOptions& o, const eval::TunedMethod& method, const Prepared& prepared,
                     const eval::CompareOptions& measure, const eval::TuneText& text,
                     const std::optional<Problems>& problems) {
    ordered_json out{{"kind", "kvmosaic study"},         {"model", prepared.source},
                     {"model_sha256", prepared.sha256},  {"weights", prepared.weights},
                     {"machine", eval::machine_name()},  {"version", KVMOSAIC_VERSION},
                     {"commit", eval::build_commit()},   {"text", text.name},
                     {"text_sha256", text.sha256},       {"window", measure.window},
                     {"windows", text.windows},          {"score_from", measure.score_from},
                     {"ubatch", measure.ubatch},         {"step", "decode"},
                     {"attend", eval::attend_setting()}, {"context", measure.context},
                     {"method", method.spec()},          {"tune", o.wish.tune},
                     {"ranges", o.wish.ranges},          {"groups", o.groups},
                     {"objective", o.objective},         {"sampler", o.sampler},
                     {"sampler_version", o.serve},       {"seed", o.seed}};
    if (problems) {
        out.update(ordered_json{{"questions", problems->searched},
                                {"problems_sha256", problems->all.sha256},
                                {"train_sha256", problems->train.sha256},
                                {"shots", o.shots},
                                {"max_tokens", o.max_tokens}});
    }
    return out;
}
std::vector<std::string> identity(bool problems) {
    std::vector<std::string> fields{"model_sha256", "weights", "version",   "text_sha256", "window", "windows",
                                    "score_from",   "ubatch",  "attend",    "context",     "method", "tune",
                                    "ranges",       "groups",  "objective", "sampler",     "seed"};
    if (problems)
        for (const char* field : {"questions", "problems_sha256", "train_sha256", "shots", "max_tokens"})
            fields.emplace_back(field);
    return fields;
}

// Progress over all settings: `measured` of `total` are done.
eval::Progress over_all(ProgressBar& bar, const eval::Search* const* search, int total) {
    return [&bar, search, total](const std::string& what, double share) {
        const size_t measured = *search ? (*search)->study().trials.size() : 0;
        bar.show(fmt::format("setting {} of about {}, {}", measured + 1, total, what),
                 (double(measured) + share) / double(total));
    };
}

void search(const TuneOptions& o, const eval::TunedMethod& method, const Prepared& prepared, const std::string& content,
            const std::optional<Problems>& problems) {
    eval::Search::Options wish;
    wish.method = method;
    wish.groups = o.groups;
    wish.measure = measure_of(o, prepared.model);
    wish.text = text_of(o.text, content, o.windows, prepared.model);
    wish.path = o.study;
    if (problems) wish.solver = problems->options(o, 0, problems->searched);
    wish.head = head_of(o, method, prepared, wish.measure, wish.text, problems);
    wish.fields = identity(problems.has_value());
    ProgressBar bar;
    const eval::Search* known = nullptr;
    const eval::Progress progress = over_all(bar, &known, o.trials + 2);
    const std::unique_ptr<eval::Search> found = take(eval::Search::open(prepared.model, wish, progress));
    known = found.get();
    if (!o.serve.empty()) return serve_search(*found, progress);
    for (const auto& values : eval::grid_of(found->space(), o.trials))
        take(found->evaluate(values, progress));
}

// Front and defaults again, on a text that the search did not see.
eval::Elsewhere measure_elsewhere(const TuneOptions& o, const eval::TunedMethod& method, const Prepared& prepared,
                                  const std::string& content, const eval::TuneResult& result, eval::Study* study) {
    eval::TuneText text = text_of(o.holdout, content, o.holdout_windows, prepared.model);
    if (text.sha256 == study->head.at("text_sha256"))
        bad_usage("--holdout {}: is the text of the search; name one that it did not see", o.holdout);
    const eval::CompareOptions measure = measure_of(o, prepared.model);
    if (text.windows == 0) text.windows = std::clamp(int(text.tokens.size()) / measure.window, 1, o.windows);
    eval::Measurer measurer(prepared.model, text, measure);
    check(measurer.validate("--holdout"));
    eval::TrialSpecs specs(method, take(eval::shape_of(prepared.model)));
    std::vector<size_t> wanted = result.front;
    wanted.insert(wanted.end(), result.defaults.begin(), result.defaults.end());
    measure_again(study, wanted, measurer.id(), "holdout",
                  [&](const eval::Trial& trial, const eval::Progress& progress) {
                      return take(measurer.measure(take(specs.spec(trial)), progress));
                  });
    return {measurer.id(), text.name, text.sha256, text.windows};
}

// The chosen setting as something that `run --cache` takes; kvtuner's needs its file.
std::string write_chosen(const TuneOptions& o, const eval::TunedMethod& method, const Prepared* prepared,
                         const eval::Study& study, const eval::Trial& chosen) {
    if (!method.by_layer()) {
        if (!o.out.empty()) check(eval::write_file(o.out, chosen.spec + "\n"));
        return chosen.spec;
    }
    const ModelShape shape = take(eval::shape_of(prepared->model));
    Calibration file = eval::calibration_of(shape, chosen.widths, method.fixed.text("base") == "token");
    file.tokens = study.head.at("window").get<int64_t>() * study.head.at("windows").get<int64_t>();
    file.text = study.head.at("text_sha256").get<std::string>();
    check(write_calibration(o.out, file));
    OptionValues values = method.fixed;
    values.set("calib", o.out);
    return "kvtuner:" + print_options(method.info->options, values);
}

void say_results(const TuneOptions& o, const eval::Study& study, const eval::TuneResult& result,
                 const eval::Elsewhere& elsewhere, const std::string& spec) {
    const ordered_json& head = study.head;
    const eval::Trial& chosen = study.trials[result.chosen];
    if (o.json != "-") {
        const bool answers = study.objective() == eval::Objective::gsm8k;
        fmt::print("{} (SHA-256 {}, {} weights)\n{}\n{} on {}, {} tokens scored{}: {} settings by {}, {} on the "
                   "front\n{}",
                   head.at("model").get<std::string>(), head.at("model_sha256").get<std::string>().substr(0, 16),
                   head.at("weights").get<std::string>(), build_text(), head.at("method").get<std::string>(),
                   head.at("text").get<std::string>(), chosen.search.tokens,
                   answers ? fmt::format(", {} problems behind {} solved ones", o.questions, o.shots) : "",
                   result.trials.size(), head.at("sampler").get<std::string>(), result.front.size(),
                   eval::to_table(study, result));
        if (!elsewhere.id.empty())
            fmt::print("the same on {}, which the search did not see:\n{}", elsewhere.name,
                       eval::elsewhere_table(study, result, elsewhere));
        const std::string quality = answers ? fmt::format("{:.1f} % right", 100 * chosen.search.accuracy())
                                            : fmt::format("KL {:.5f}", chosen.search.kl);
        fmt::print("chosen: trial {}, {:.3f} bits, {}: {}\nrun it with: kvmosaic run -m {} --cache {} -p TEXT\n",
                   result.chosen, chosen.search.bits, quality, eval::name_of(chosen, head), o.model, spec);
    }
    if (!result.kept)
        warn(o.bits
                 ? fmt::format("--bits {}: no setting has so few; the nearest has {:.3f}", *o.bits, chosen.search.bits)
                 : fmt::format("--kl {}: no setting loses so little; the nearest has {:.5f}", *o.kl, chosen.search.kl));
    for (const std::string& words : eval::warnings(study, result))
        warn(words);
    if (o.json.empty()) return;
    ordered_json out = eval::to_json(study, result, elsewhere);
    out["use"] = spec;
    out["command"] = command_line();
    write_json(o.json, out.dump(2), o.force);
}

Prepared prepare(const TuneOptions& o) {
    // Without ggml's repacked weights answers do not depend on what is answered beside them.
    return prepare_model(o.model, o.weights, o.common, eval::LoadOptions{.repack = o.objective != "gsm8k"});
}

void tune(const TuneOptions& o) {
    const eval::TunedMethod method = take(eval::tuned_method(o.wish));
    const bool server = !o.serve.empty(), python = o.sampler != "grid";
    if (!server) {
        if (o.bits && o.kl) bad_usage("--bits and --kl exclude each other: one of them chooses from the front");
        if (method.by_layer() && o.out.empty())
            bad_usage("-o: what is found for kvtuner is a calibration file; name it");
        check_new_file("-o", o.out, o.force);
        check_new_file("--json", o.json, o.force);
        check_new_file("--plot", o.plot, o.force);
        if (!o.plot.empty()) check(eval::check_gnuplot());
        check_new_file("--study", o.study, true); // may exist, but its folder must
        if (python && o.text == "-") bad_usage("-f -: with --sampler {} the text must be a file", o.sampler);
        if (python) find_optuna(o);
    }
    std::optional<Problems> problems;
    if (o.objective == "gsm8k") problems = read_problems(o);
    const std::string content = take(eval::read_text(o.text));
    std::string other;
    if (!o.holdout.empty() && !server) other = take(eval::read_text(o.holdout));
    std::optional<Prepared> prepared;
    if (python && !server) {
        find_model(o.model);
        run_optuna(o);
    } else {
        prepared = prepare(o);
        search(o, method, *prepared, content, problems);
    }
    if (server) return;
    eval::Study study = take(eval::open_study(o.study, ordered_json::object(), {}));
    const eval::TuneResult result = eval::result_of(study, o.bits, o.kl);
    if (result.front.empty()) fail("--study {}: no setting has a finite KL and bits", o.study);
    const bool unseen = problems && problems->unseen > 0;
    if (!prepared && (method.by_layer() || !o.holdout.empty() || unseen)) prepared = prepare(o);
    eval::Elsewhere elsewhere;
    if (!o.holdout.empty()) elsewhere = measure_elsewhere(o, method, *prepared, other, result, &study);
    if (unseen) elsewhere = solve_elsewhere(o, method, *prepared, *problems, result, &study);
    const std::string spec =
        write_chosen(o, method, prepared ? &*prepared : nullptr, study, study.trials[result.chosen]);
    if (!o.plot.empty()) check(eval::write_file(o.plot, take(eval::tune_plot(study, result, elsewhere)) + "\n"));
    say_results(o, study, result, elsewhere, spec);
}

} // namespace

void add_tune(CLI::App& app) {
    auto o = std::make_shared<TuneOptions>();
    CLI::App* verb = app.add_subcommand("tune", "search settings of a method: quality against true bits");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("-f,--file", o->text, "text to search on, or .jsonl of question and answer")->required();
    verb->add_option("--method", o->wish.method,
                     fmt::format("one of {}; options that it fixes (mixkvq:v=3) are not tuned",
                                 fmt::join(eval::tunable_methods(), ", ")))
        ->required();
    verb->add_option("--study", o->study, "keeps each result, and a search that was stopped goes on from it")
        ->required();
    verb->add_option("--sampler", o->sampler, "tpe, nsga2 (Optuna: Python's package optuna), or grid")
        ->check(CLI::IsMember({"tpe", "nsga2", "grid"}))
        ->capture_default_str();
    verb->add_option("--trials", o->trials, "settings to measure, beside the defaults")
        ->check(CLI::Range(1, 10000))
        ->capture_default_str();
    verb->add_option("--seed", o->seed, "of tpe and nsga2")->check(CLI::Range(0, 1 << 30))->capture_default_str();
    verb->add_option("--tune", o->wish.tune, "what to tune in place of the usual, separated by commas")->delimiter(',');
    verb->add_option("--range", o->wish.ranges, "NAME=LOW..HIGH or NAME=A,B,C in place of the usual; repeat")
        ->allow_extra_args(false);
    verb->add_option("--groups", o->groups, "kvtuner: clusters of layers, about so many")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    verb->add_option("--ctx", o->context, "true bits are those at this context (default 32768, or the model's)")
        ->check(CLI::Range(int64_t(256), int64_t(1) << 20));
    verb->add_option("--window", o->window, "tokens a window")->capture_default_str();
    verb->add_option("--windows", o->windows, "windows from the text's start")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    verb->add_option("--score-from", o->score_from, "first token of a window that is scored (at most half of it)")
        ->capture_default_str();
    verb->add_option("--ubatch", o->ubatch, "tokens a step")->check(CLI::Range(1, 4096))->capture_default_str();
    verb->add_option("--holdout", o->holdout, "another text, on which front and defaults are measured again");
    verb->add_option("--holdout-windows", o->holdout_windows, "of that text (default as --windows)")
        ->check(CLI::Range(1, 1000));
    add_objective(verb, o.get());
    verb->add_option("--bits", o->bits, "choose the best at no more than these true bits (default: the knee)");
    verb->add_option("--kl", o->kl, "choose the fewest bits at no more than this KL");
    verb->add_option("-o,--output", o->out, "the chosen spec; for kvtuner the calibration file");
    verb->add_option("--json", o->json, "all settings into a file (-: standard output, without the table)");
    verb->add_option("--plot", o->plot, "the front as SVG into a file (needs gnuplot)");
    verb->add_flag("--force", o->force, "replace existing files of -o, --json and --plot");
    verb->add_option("--serve", o->serve)->group(""); // for the script that Optuna runs in
    add_weights(verb, &o->weights);
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic tune -m small -f wiki.txt --method mixkvq --study mix.study --holdout other.txt\n"
        "  kvmosaic tune -m tiny -f wiki.txt --method mosaic --sampler grid --trials 12 --study m.study --bits 3\n"
        "  kvmosaic tune -m small -f wiki.txt --method kvtuner --sampler nsga2 --trials 60 --study k.study -o "
        "small.calib\n"
        "  kvmosaic tune -m tiny -f wiki.txt --method mixkvq --tune hi,mid,v --range v=2,3 --study v.study\n"
        "  kvmosaic tune -m base -f wiki.txt --method mixkvq --objective gsm8k --questions 50 --study g.study\n"
        "Two losses: KL to the f16 cache in decoding (or wrong answers), and true bits at --ctx with windows in. What "
        "is on\n"
        "the front has no setting beside it that is better in one and no worse in the other. The same seed tries the "
        "same\n"
        "settings. docs/tuning.md.");
    verb->callback([o, verb] {
        check_objective(*o, *verb);
        tune(*o);
    });
}

} // namespace kvmosaic::tool
