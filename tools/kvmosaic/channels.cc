// kvmosaic eval channels: does the size of a key channel say how large the queries are there?
#include <memory>

#include "eval/build.h"
#include "eval/channels.h"
#include "eval/results.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"
#include "llama/adapter.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    std::string model, file, weights, json;
    eval::ChannelOptions task;
    bool force = false;
    Common common;
};

ordered_json to_json(const eval::LayerChannels& layer) {
    const auto measures = [](const auto& x) {
        return ordered_json{{"pearson", eval::number_json(x.pearson)},
                            {"spearman", eval::number_json(x.spearman)},
                            {"range_ratio", eval::number_json(x.range_ratio)},
                            {"top_share", eval::number_json(x.top_share)}};
    };
    ordered_json out{{"layer", layer.layer}};
    out.update(measures(layer));
    out["heads"] = ordered_json::array();
    for (size_t h = 0; h < layer.heads.size(); ++h) {
        ordered_json head{{"kv_head", h}};
        head.update(measures(layer.heads[h]));
        head["range"] = layer.heads[h].range;
        head["query"] = layer.heads[h].query;
        out["heads"].push_back(std::move(head));
    }
    return out;
}

std::string line(const std::string& name, double pearson, double spearman, double ratio, double share) {
    return fmt::format("{:<8}  {:>8.3f}  {:>8.3f}  {:>12.1f}  {:>12.1f}\n", name, pearson, spearman, ratio,
                       100 * share);
}

void channels(const Options& o) {
    check_new_file("--json", o.json, o.force);
    check(eval::validate(o.task));
    const std::string text = take(eval::read_text(o.file));
    const Prepared prepared = prepare_model(o.model, o.weights, o.common);
    const auto layers = shape_of(prepared.model.get()).layers;
    if (o.task.layer >= int32_t(layers.size()))
        bad_usage("--layer {}: 0 to {} in this model", o.task.layer, layers.size() - 1);
    if (o.task.layer >= 0 && !layers[size_t(o.task.layer)].has_kv())
        bad_usage("--layer {}: keeps no K/V of its own", o.task.layer);
    eval::ChannelOptions task = o.task;
    task.threads = o.common.threads;
    ProgressBar bar;
    const std::vector<eval::LayerChannels> found =
        take(eval::channels(prepared.model, prepared.model.tokenize(text, true, false), task, bar.receiver()));
    bar.finish();

    ordered_json out{{"kind", "kvmosaic channels 1"},
                     {"model", prepared.source},
                     {"model_sha256", prepared.sha256},
                     {"weights", prepared.weights},
                     {"text", o.file},
                     {"text_sha256", eval::sha256_of(text)},
                     {"tokens", task.tokens},
                     {"window", std::min<int64_t>(task.window, task.tokens)},
                     {"machine", eval::machine_name()},
                     {"version", KVMOSAIC_VERSION},
                     {"commit", eval::build_commit()},
                     {"command", command_line()},
                     {"layers", ordered_json::array()}};
    std::string table = fmt::format("{:<8}  {:>8}  {:>8}  {:>12}  {:>12}\n", "layer", "Pearson", "Spearman",
                                    "max/median", fmt::format("top {} %", eval::kTopChannels));
    eval::LayerChannels mean;
    for (const eval::LayerChannels& l : found) {
        table += line(std::to_string(l.layer), l.pearson, l.spearman, l.range_ratio, l.top_share);
        out["layers"].push_back(to_json(l));
        const double n = double(found.size());
        mean.pearson += l.pearson / n, mean.spearman += l.spearman / n;
        mean.range_ratio += l.range_ratio / n, mean.top_share += l.top_share / n;
    }
    if (found.size() > 1) table += line("mean", mean.pearson, mean.spearman, mean.range_ratio, mean.top_share);
    out["pearson"] = eval::number_json(mean.pearson);
    out["spearman"] = eval::number_json(mean.spearman);
    if (o.json != "-")
        fmt::print("{}\n{} tokens of {}, f16 cache\n{}", origin_text(prepared), task.tokens, o.file, table);
    if (!o.json.empty()) write_json(o.json, out.dump(2), o.force);
}

} // namespace

void add_channels(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = eval.add_subcommand("channels", "key ranges against query magnitudes, channel by channel");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("-f,--file", o->file, "text whose activations are used")->required();
    verb->add_option("--layer", o->task.layer, "only this layer")->check(CLI::NonNegativeNumber);
    verb->add_option("--tokens", o->task.tokens, "tokens of the text")->capture_default_str();
    verb->add_option("--window", o->task.window, "tokens after which the context starts anew")->capture_default_str();
    add_weights(verb, &o->weights);
    add_json(verb, &o->json, &o->force);
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic eval channels -m tiny -f text.txt\n"
        "  kvmosaic eval channels -m small -f text.txt --layer 0 --json layer0.json\n"
        "For each KV head and channel: the range of the keys (largest minus smallest in a page of 128 rows, mean\n"
        "over the pages), to which a uniform quantizer's step is proportional, and the mean |q| of its query heads,\n"
        "both after RoPE. Pearson and Spearman: correlation of the two over the channels of a head; max/median: of\n"
        "the ranges; top 8 %: share of the 8 largest products of the two in their sum. Rows are means over the KV\n"
        "heads of a layer. A low correlation means that a channel's range does not say how much its error matters.");
    verb->callback([o] { channels(*o); });
}

} // namespace kvmosaic::tool
