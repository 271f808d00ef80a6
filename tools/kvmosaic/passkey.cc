// kvmosaic eval passkey: whether a number hidden in a long text is found again through each cache.
#include <cstdio>
#include <map>
#include <memory>

#include <nlohmann/json.hpp>

#include "eval/build.h"
#include "eval/passkey.h"
#include "kvmosaic/app.h"
#include "kvmosaic/lines.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    std::string model, weights, json, resume;
    eval::PasskeyOptions task;
    bool force = false;
    Common common;
};

constexpr const char* kKind = "kvmosaic passkey 1";

ordered_json to_json(const eval::PasskeyResult& r) {
    return {{"spec", r.spec},
            {"canonical", r.canonical},
            {"length", r.length},
            {"depth", r.depth},
            {"trial", r.trial},
            {"key", r.key},
            {"answer", r.answer},
            {"hit", r.hit},
            {"tokens", r.tokens},
            {"true_bits", r.bits},
            {"path", r.path},
            {"isa", r.isa},
            {"cache_bytes", r.cache_bytes}};
}

eval::PasskeyResult result_from(const ordered_json& j) {
    eval::PasskeyResult r;
    j.at("spec").get_to(r.spec);
    j.at("canonical").get_to(r.canonical);
    j.at("length").get_to(r.length);
    j.at("depth").get_to(r.depth);
    j.at("trial").get_to(r.trial);
    j.at("key").get_to(r.key);
    j.at("answer").get_to(r.answer);
    j.at("tokens").get_to(r.tokens);
    j.at("true_bits").get_to(r.bits);
    j.at("cache_bytes").get_to(r.cache_bytes);
    j.at("path").get_to(r.path);
    j.at("isa").get_to(r.isa);
    r.hit = eval::holds_key(r.answer, r.key); // from what was said, not from what was concluded then
    return r;
}

struct Count {
    int hits = 0, trials = 0;
    double bits = 0;
    void add(const eval::PasskeyResult& r) { hits += r.hit, ++trials, bits += r.bits; }
};

void passkey(const Options& o) {
    check_specs(o.task.specs);
    check_new_file("--json", o.json, o.force);
    check_new_file("--resume", o.resume, true);
    check(eval::validate(o.task, 0));
    const Prepared prepared = prepare_model(o.model, o.weights, o.common, eval::LoadOptions{.repack = false});
    check(eval::validate(o.task, prepared.model.trained_context()));
    const ordered_json head{{"kind", kKind},
                            {"model_sha256", prepared.sha256},
                            {"weights", prepared.weights},
                            {"version", KVMOSAIC_VERSION},
                            {"seed", o.task.seed},
                            {"ubatch", o.task.ubatch},
                            {"attend", eval::attend_setting()}};
    Lines lines(o.resume, head, "passkey results");
    std::vector<eval::PasskeyResult> results;
    lines.each([&](const ordered_json& line) { results.push_back(result_from(line)); });
    eval::PasskeyOptions task = o.task;
    task.threads = o.common.threads;
    ProgressBar bar;
    const auto landed = [&](const eval::PasskeyResult& r) {
        lines.add(to_json(r));
        return Status();
    };
    check(eval::passkey(prepared.model, task, &results, landed, bar.receiver()));
    bar.finish();

    ordered_json out = head;
    out["model"] = prepared.source;
    out["commit"] = eval::build_commit();
    out["machine"] = eval::machine_name();
    out["command"] = command_line();
    out["rows"] = ordered_json::array();
    out["results"] = ordered_json::array();
    std::string table = fmt::format("{:<24}  {:>6}", "cache", "bits");
    for (const int32_t length : o.task.lengths)
        table += fmt::format("  {:>10}", fmt::format("at {}", length));
    table += fmt::format("  {:>10}\n", "all");
    std::vector<std::string> specs{"f16"};
    for (const std::string& spec : o.task.specs)
        if (spec != "f16") specs.push_back(spec);
    for (const std::string& spec : specs) {
        const std::string canonical = take(open_method(spec))->spec();
        Count all;
        std::map<int32_t, Count> by_length;
        for (const int32_t length : o.task.lengths) {
            for (const double depth : o.task.depths) {
                Count cell;
                for (const eval::PasskeyResult& r : results) {
                    if (r.canonical != canonical || r.length != length || r.depth != depth || r.trial >= task.trials)
                        continue;
                    cell.add(r), all.add(r), by_length[length].add(r);
                    out["results"].push_back(to_json(r));
                }
                out["rows"].push_back({{"spec", spec},
                                       {"length", length},
                                       {"depth", depth},
                                       {"hits", cell.hits},
                                       {"trials", cell.trials},
                                       {"true_bits", cell.bits / cell.trials}});
            }
        }
        table += fmt::format("{:<24}  {:>6.2f}", spec, all.bits / all.trials);
        for (const int32_t length : o.task.lengths)
            table += fmt::format("  {:>10}", fmt::format("{}/{}", by_length[length].hits, by_length[length].trials));
        table += fmt::format("  {:>10}\n", fmt::format("{}/{}", all.hits, all.trials));
    }
    if (o.json != "-") fmt::print("{}\nkeys found\n{}", origin_text(prepared), table);
    if (!o.json.empty()) write_json(o.json, dump(out, 2), o.force);
}

} // namespace

void add_passkey(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = eval.add_subcommand("passkey", "find a number hidden in a long text, through each cache");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("--cache", o->task.specs,
                     "cache spec (kvmosaic methods); repeat for more rows (f16 is always there)")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--lengths", o->task.lengths, "tokens of a prompt, separated by commas")
        ->delimiter(',')
        ->capture_default_str();
    verb->add_option("--depths", o->task.depths, "where the key lies, 0 (start) to 1 (end), separated by commas")
        ->delimiter(',')
        ->capture_default_str();
    verb->add_option("--trials", o->task.trials, "keys for each length and depth")->capture_default_str();
    verb->add_option("--seed", o->task.seed, "of keys and texts")->capture_default_str();
    verb->add_option("--batch", o->task.batch, "prompts under way at once")
        ->check(CLI::Range(1, 128))
        ->capture_default_str();
    verb->add_option("--ubatch", o->task.ubatch, "prompt tokens a step")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    add_weights(verb, &o->weights);
    add_json(verb, &o->json, &o->force);
    verb->add_option("--resume", o->resume, "keep each answer as a JSON line in this file, and go on from it");
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic eval passkey -m tiny --cache mixkvq --cache kivi:bits=2\n"
        "  kvmosaic eval passkey -m small --cache mixkvq --lengths 512,1024 --depths 0,0.5,1 --trials 10 "
        "--resume keys.jsonl\n"
        "The text is made by this program; the answer is decoded greedily, each token seeing what it would see\n"
        "alone, and counts when a run of digits in it is the key, digit for digit. Table: keys found / trials. JSON: "
        "docs/json.md.");
    verb->callback([o] { passkey(*o); });
}

} // namespace kvmosaic::tool
