// kvmosaic eval component: one layer's attention through each cache against full precision.
#include <memory>

#include <nlohmann/json.hpp>

#include "eval/build.h"
#include "eval/component.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    std::string model, file, weights, json;
    std::vector<std::string> specs;
    int layer = 0;
    eval::RandomNetwork network;
    eval::ComponentOptions task;
    bool force = false;
    Common common;
};

ordered_json to_json(const eval::ComponentResult& r) {
    return {{"spec", r.spec},
            {"canonical", r.canonical},
            {"attention_kl", r.kl},
            {"output_mse", r.mse},
            {"output_cosine", r.cosine},
            {"sink_error", r.sink_error},
            {"plans", r.plans},
            {"mask_unchanged", r.mask_unchanged ? ordered_json(*r.mask_unchanged) : ordered_json()},
            {"pages_unchanged", r.pages_unchanged},
            {"persistent_bytes", r.cache_bytes},
            {"layers", r.layers},
            {"true_bits", r.bits},
            {"true_bits_k", r.bits_key},
            {"true_bits_v", r.bits_value},
            {"path", r.path},
            {"isa", r.isa}};
}

std::string row_text(const eval::ComponentResult& r) {
    const char* mask = !r.mask_unchanged ? "-" : *r.mask_unchanged ? "kept" : "CHANGED";
    return fmt::format("{:<24}  {:>6.2f}  {:>10.3e}  {:>10.3e}  {:>9.6f}  {:>10.3e}  {:>6}  {:>8}  {:>10}  {}\n",
                       r.spec, r.bits, r.kl, r.mse, r.cosine, r.sink_error, r.plans, mask, r.cache_bytes, r.path);
}

// `said`: the same for the table's head.
eval::ComponentInput input_of(const Options& o, ordered_json* head, std::string* said) {
    const int32_t rows = o.task.prefill + o.task.decode;
    if (o.model.empty()) {
        const eval::RandomNetwork& n = o.network;
        if (n.kv_heads < 1 || n.heads % n.kv_heads != 0)
            bad_usage("--heads {}: a multiple of --kv-heads {}", n.heads, n.kv_heads);
        if (n.dim % 2 != 0) bad_usage("--head-dim {}: even, since channels turn in pairs", n.dim);
        *head = {{"network", {{"heads", n.heads}, {"kv_heads", n.kv_heads}, {"head_dim", n.dim}, {"seed", n.seed}}}};
        *said = fmt::format("random network\n{}\n", build_text());
        return eval::random_input(n, rows);
    }
    const std::string text = take(eval::read_text(o.file));
    const Prepared prepared = prepare_model(o.model, o.weights, o.common);
    eval::CaptureOptions wish;
    wish.tokens = wish.window = rows;
    wish.threads = o.common.threads;
    wish.query = true;
    ProgressBar bar;
    eval::ComponentInput input;
    input.seen = take(eval::capture(prepared.model, prepared.model.tokenize(text, true, false), wish, bar.receiver()));
    bar.finish();
    input.layer = o.layer;
    const auto& layers = input.seen.shape.layers;
    if (size_t(o.layer) >= layers.size()) bad_usage("--layer {}: 0 to {} in this model", o.layer, layers.size() - 1);
    if (!layers[size_t(o.layer)].has_kv()) bad_usage("--layer {}: keeps no K/V of its own", o.layer);
    *said = fmt::format("{}\nlayer {} over {}, ", origin_text(prepared), o.layer, o.file);
    *head = {{"model", prepared.source}, {"model_sha256", prepared.sha256},      {"weights", prepared.weights},
             {"text", o.file},           {"text_sha256", eval::sha256_of(text)}, {"layer", o.layer}};
    return input;
}

void component(const Options& o) {
    check_specs(o.specs);
    check_new_file("--json", o.json, o.force);
    check(eval::validate(o.task));
    if (!o.model.empty() && o.file.empty()) bad_usage("-f: a text is needed to see a model's activations");
    ordered_json out{{"kind", "kvmosaic component 1"},  {"version", KVMOSAIC_VERSION}, {"commit", eval::build_commit()},
                     {"machine", eval::machine_name()}, {"command", command_line()},   {"prefill", o.task.prefill},
                     {"decode", o.task.decode}};
    ordered_json source;
    std::string head;
    const eval::ComponentInput input = input_of(o, &source, &head);
    out.update(source);
    out["rows"] = ordered_json::array();
    std::string table =
        fmt::format("{:<24}  {:>6}  {:>10}  {:>10}  {:>9}  {:>10}  {:>6}  {:>8}  {:>10}  {}\n", "cache", "bits",
                    "attn KL", "out MSE", "cosine", "sink error", "plans", "mask", "bytes", "path");
    std::vector<std::string> specs{"f16"};
    for (const std::string& spec : o.specs)
        if (spec != "f16") specs.push_back(spec);
    for (const std::string& spec : specs) {
        const eval::ComponentResult r = take(eval::component(input, spec, o.task));
        table += row_text(r);
        out["rows"].push_back(to_json(r));
    }
    if (o.json != "-")
        fmt::print("{}{} rows, the last {} measured\n{}", head, o.task.prefill + o.task.decode, o.task.decode, table);
    if (!o.json.empty()) write_json(o.json, out.dump(2), o.force);
}

} // namespace

void add_component(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    CLI::App* verb =
        eval.add_subcommand("component", "one layer's attention through each cache, against full precision");
    CLI::Option* model = verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name");
    verb->add_option("-f,--file", o->file, "text whose activations are used (with -m)")->needs(model);
    verb->add_option("--layer", o->layer, "which layer (with -m)")
        ->needs(model)
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    verb->add_option("--cache", o->specs, "cache spec (kvmosaic methods); repeat for more rows (f16 is always there)")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--prefill", o->task.prefill, "rows of the first step")->capture_default_str();
    verb->add_option("--decode", o->task.decode, "rows that follow one by one, and are measured")
        ->capture_default_str();
    const auto random = [&](CLI::Option* option) { option->excludes(model)->capture_default_str(); };
    random(verb->add_option("--heads", o->network.heads, "without a model: query heads")->check(CLI::Range(1, 256)));
    random(verb->add_option("--kv-heads", o->network.kv_heads, "without a model: KV heads")->check(CLI::Range(1, 256)));
    random(verb->add_option("--head-dim", o->network.dim, "without a model: head size")
               ->check(CLI::Range(2, kMaxHeadDim)));
    random(verb->add_option("--seed", o->network.seed, "without a model: of the random network"));
    add_weights(verb, &o->weights);
    add_json(verb, &o->json, &o->force);
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic eval component --cache pnmix --cache mixkvq\n"
        "  kvmosaic eval component -m tiny -f text.txt --layer 3 --cache pnmix --cache kivi:bits=2 --json r.json\n"
        "Without -m, rows come from a random network of the given sizes. Means over the decoded rows and query\n"
        "heads: KL of the attention weights, squared error and cosine of the output; sink error: of the weight\n"
        "on the first 4 rows. bits: true bits at the end. plans: how often the method decided for this layer;\n"
        "mask: whether what it had decided after the prefill was still in force at the end. bytes: of all\n"
        "layers. JSON: docs/json.md.");
    verb->callback([o] { component(*o); });
}

} // namespace kvmosaic::tool
