#include "kvmosaic/free_run.h"

#include <cstdlib>
#include <map>
#include <optional>

#include "eval/build.h"

namespace kvmosaic::tool {

using nlohmann::ordered_json;

void add_free(CLI::App* verb, FreeOptions* o) {
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option(
            "--cache", o->specs,
            "cache spec (kvmosaic methods); repeat for more rows (f16 is always there, f32 shows what rounding "
            "alone does)")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--batch", o->batch, "answers under way at once")
        ->check(CLI::Range(1, 128))
        ->capture_default_str();
    verb->add_option("--max-tokens", o->max_tokens, "of an answer")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb->add_option("--weights", o->weights, "as-is; f16, f32: dequantized once and kept in the cache folder (slower)")
        ->check(CLI::IsMember({"f16", "f32", "as-is"}))
        ->capture_default_str();
    add_json(verb, &o->json, &o->force);
    verb->add_option("--resume", o->resume, "keep each answer as a JSON line in this file, and go on from it");
    add_common(verb, &o->common);
}

void check_free(const FreeOptions& o) {
    check_specs(o.specs);
    check_new_file("--json", o.json, o.force);
    check_new_file("--resume", o.resume, true); // may exist, but its folder must
}

Prepared prepare_free(const FreeOptions& o) {
    return prepare_model(o.model, o.weights, o.common, eval::LoadOptions{.repack = false});
}

ordered_json to_json(const eval::CacheName& cache, const eval::Answer& a) {
    return {{"spec", cache.spec},
            {"canonical", cache.canonical},
            {"answer", a.text},
            {"token_ids", a.tokens},
            {"tokens", a.tokens.size()},
            {"stop", eval::name_of(a.stop)},
            {"seconds", a.seconds},
            {"true_bits", a.bits},
            {"rows", a.rows},
            {"cache_bytes", a.cache_bytes},
            {"path", a.path},
            {"isa", a.isa}};
}

eval::Answer answer_from(const ordered_json& line) {
    eval::Answer a;
    line.at("answer").get_to(a.text);
    line.at("token_ids").get_to(a.tokens);
    a.stop = take(eval::parse_stop(line.at("stop").get<std::string>()));
    line.at("seconds").get_to(a.seconds);
    line.at("true_bits").get_to(a.bits);
    line.at("rows").get_to(a.rows);
    line.at("cache_bytes").get_to(a.cache_bytes);
    line.at("path").get_to(a.path);
    line.at("isa").get_to(a.isa);
    return a;
}

std::vector<const eval::Answer*> FreeResults::of(size_t cache) const {
    std::vector<const eval::Answer*> out;
    for (const eval::Answer& a : answers[cache])
        out.push_back(&a);
    return out;
}

eval::AnswersSummary FreeResults::summary(size_t cache) const { return eval::summarize(of(cache), of(0)); }

namespace {

ordered_json with_run(ordered_json head, const Prepared& prepared) {
    head["model_sha256"] = prepared.sha256;
    head["weights"] = prepared.weights;
    head["version"] = KVMOSAIC_VERSION;
    head["attend"] = eval::attend_setting();
    return head;
}

} // namespace

FreeRun::FreeRun(const FreeOptions& o, const Prepared& prepared, ordered_json head, const std::string& what)
    : o_(o), prepared_(prepared), head_(with_run(std::move(head), prepared)), lines_(o.resume, head_, what) {}

ordered_json FreeRun::line_of(const FreeTask& task, size_t prompt, const eval::CacheName& cache,
                              const eval::Answer& answer) const {
    ordered_json line{{"item", task.items[prompt]}};
    if (!task.pass.empty()) line["pass"] = task.pass;
    if (task.judge) line.update(task.judge(prompt, answer));
    line.update(to_json(cache, answer));
    return line;
}

FreeResults FreeRun::answer(const FreeTask& task) {
    FreeResults out;
    out.caches = take(eval::beside_f16(o_.specs));
    std::vector<std::vector<std::optional<eval::Answer>>> answers(
        out.caches.size(), std::vector<std::optional<eval::Answer>>(task.prompts.size()));
    std::map<int64_t, size_t> places;
    for (size_t i = 0; i < task.items.size(); ++i)
        places[task.items[i]] = i;
    lines_.each([&](const ordered_json& line) {
        const auto place = places.find(line.at("item").get<int64_t>());
        eval::Answer answer = answer_from(line);
        if (line.value("pass", "") != task.pass || place == places.end()) return; // of another pass or a larger run
        answer.item = place->second;
        for (size_t c = 0; c < out.caches.size(); ++c)
            if (out.caches[c].canonical == line.at("canonical")) answers[c][place->second] = answer;
    });
    eval::AnswersOptions options;
    options.batch.batch = o_.batch;
    options.batch.threads = o_.common.threads;
    options.batch.stops = task.stops;
    ProgressBar bar;
    const auto has = [&](size_t c, size_t i) { return answers[c][i].has_value(); };
    const auto landed = [&](size_t c, const eval::Answer& answer) {
        answers[c][answer.item] = answer;
        lines_.add(line_of(task, answer.item, out.caches[c], answer));
        return Status();
    };
    check(eval::answer_all(prepared_.model, out.caches, task.prompts, options, has, landed, bar.receiver()));
    bar.finish();
    for (size_t c = 0; c < out.caches.size(); ++c) {
        out.answers.emplace_back();
        for (size_t i = 0; i < task.prompts.size(); ++i) {
            results_.push_back(line_of(task, i, out.caches[c], *answers[c][i]));
            out.answers.back().push_back(std::move(*answers[c][i]));
        }
    }
    return out;
}

void FreeRun::finish(const ordered_json& rows, const std::string& table) {
    if (o_.json != "-") fmt::print("{}\n{}", origin_text(prepared_), table);
    if (o_.json.empty()) return;
    ordered_json out = head_;
    out["model"] = prepared_.source;
    out["commit"] = eval::build_commit();
    out["machine"] = eval::machine_name();
    out["command"] = command_line();
    out["batch"] = o_.batch;
    out["rows"] = rows;
    out["results"] = std::move(results_);
    write_json(o_.json, dump(out, 2), o_.force);
}

std::string free_columns() {
    return fmt::format("  {:>6}  {:>6}  {:>8}  {:>6}  {:>5}  {:>6}  {:>7}\n", "common", "same", "tokens", "cut", "rep",
                       "bits", "tok/s");
}

std::string free_cells(const eval::AnswersSummary& s) {
    return fmt::format("  {:>6.0f}  {:>4.0f} %  {:>8.1f}  {:>4.0f} %  {:>5.2f}  {:>6.2f}  {:>7.1f}\n", s.common_median,
                       100 * s.identical, s.tokens_mean, 100 * s.cut, s.repetition, s.bits, s.tokens_per_second);
}

ordered_json to_json(const eval::CacheName& cache, const eval::AnswersSummary& s) {
    return {{"spec", cache.spec},
            {"canonical", cache.canonical},
            {"answers", s.answers},
            {"common_tokens_median", s.common_median},
            {"common_tokens_mean", s.common_mean},
            {"identical", s.identical},
            {"tokens_mean", s.tokens_mean},
            {"cut", s.cut},
            {"repetition", s.repetition},
            {"true_bits", s.bits},
            {"cache_bytes", s.cache_bytes},
            {"tokens_per_second", s.tokens_per_second},
            {"path", s.path},
            {"isa", s.isa}};
}

std::string find_data(const std::string& option, const std::string& wish, const std::string& name) {
    if (!wish.empty()) return wish;
    const char* folder = std::getenv("KVMOSAIC_DATA");
    if (folder && *folder) {
        const std::string path = std::string(folder) + "/" + name;
        if (eval::exists(path)) return path;
        bad_usage("{}: there is no {} (folder of KVMOSAIC_DATA); name the file", option, path);
    }
    bad_usage("{}: name the file, or set KVMOSAIC_DATA to a folder with {} (docs/eval.md says where it comes from)",
              option, name);
}

} // namespace kvmosaic::tool
