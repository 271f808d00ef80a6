// kvmosaic inspect: the plan of every layer and head after a text, and pages drawn byte by byte.
#include <cmath>
#include <memory>

#include "kvmosaic/app.h"
#include "kvmosaic/layout.h"
#include "kvmosaic/method.h"
#include "kvmosaic/saved.h"
#include "llama/adapter.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    std::string model, prompt, file, spec = "mixkvq", side, ladder, saved;
    int layer = -1, head = -1, head_dim = 0, ctx = 0;
    bool json = false;
    Common common;
};

std::vector<Side> sides_of(const Options& o) {
    if (o.side == "k") return {Side::key};
    if (o.side == "v") return {Side::value};
    return {Side::key, Side::value};
}

// "16:12,4:44,2:72" for a drawing without a model.
Ladder parse_ladder(const std::string& text, int dim, const StoreSpec& store) {
    Ladder ladder;
    for (const std::string& step : CLI::detail::split(text, ',')) {
        int bits = -1, channels = -1, used = 0;
        const int n = std::sscanf(step.c_str(), "%d:%d%n", &bits, &channels, &used);
        if (n != 2 || used != int(step.size()) || bits < 0 || bits > 16 || channels < 1 || channels > kMaxHeadDim) {
            bad_usage("--ladder {}: BITS:CHANNELS,... widest first, as in 16:12,4:44,2:72", text);
        }
        ladder.push(uint8_t(bits), uint16_t(channels));
    }
    check(validate(ladder, dim, store));
    return ladder;
}

std::string window_text(const Window& w) {
    if (w.flush == 0) return "everything stays raw";
    const std::string text = fmt::format("front {}, keep {}, flush {}", w.front, w.keep, w.flush);
    return w.first == 0 ? text : fmt::format("{}, first {}", text, w.first);
}

// Layouts alone, from the spec and a head size.
void without_model(const Options& o) {
    const auto method = take(open_method(o.spec));
    ordered_json out{
        {"spec", o.spec}, {"version", KVMOSAIC_VERSION}, {"head_dim", o.head_dim}, {"sides", ordered_json::array()}};
    std::string text = fmt::format("{} ({}), head size {}\n", o.spec, method->spec(), o.head_dim);
    for (const Side side : sides_of(o)) {
        SidePlan plan = method->initial(side, 0, 0, o.head_dim);
        if (plan.window.flush > 0) check(validate(plan.store, side, o.head_dim));
        const bool tiered = plan.window.flush > 0 && plan.store.kind == StoreKind::tiered;
        if (tiered && !o.ladder.empty()) plan.ladder = parse_ladder(o.ladder, o.head_dim, plan.store);
        const PageLayout page = plan.window.flush == 0 ? raw_layout(plan.raw, side, o.head_dim)
                                                       : layout(plan.store, side, o.head_dim, plan.ladder);
        if (o.json) {
            ordered_json entry = to_json(page);
            entry["front"] = plan.window.front, entry["keep"] = plan.window.keep, entry["flush"] = plan.window.flush;
            out["sides"].push_back(std::move(entry));
            continue;
        }
        text += fmt::format("\n{} side: {}\n{}", name_of(side), window_text(plan.window), draw(page));
        if (tiered) {
            text += fmt::format("  (the ladder is decided block by block; drawn for {}{})\n", ladder_text(page),
                                o.ladder.empty() ? ", another one with --ladder BITS:CHANNELS,..." : "");
        }
    }
    fmt::print("{}", o.json ? out.dump(2) + "\n" : text);
}

// One layer, head and side of a cache, as it is now.
struct Plan {
    int32_t layer = 0, head = 0;
    Side side = Side::key;
    Window window;
    int64_t rows = 0, front = 0, packed = 0, recent = 0;
    std::vector<PageView> pages;
    double page_bits = 0;     // mean over the pages
    double channels[17] = {}; // mean channels by width
    std::vector<float> mean;  // of centred keys, once it is decided
};

Plan plan_of(const Cache& cache, int32_t layer, int32_t head, Side side) {
    Plan out;
    out.layer = layer, out.head = head, out.side = side;
    const SidePlan& plan = cache.plan(0, layer, head, side);
    out.window = plan.window;
    out.mean = plan.mean;
    out.rows = cache.rows(0);
    out.front = out.window.flush == 0 ? 0 : std::min<int64_t>(out.rows, out.window.front);
    out.packed = cache.packed_rows(0, layer, side);
    out.recent = out.rows - out.front - out.packed;
    for (int64_t i = 0; i < cache.pages(0, layer, side); ++i) {
        out.pages.push_back(cache.page(0, layer, head, side, i));
        const PageLayout& page = *out.pages.back().layout;
        out.page_bits += page.true_bits();
        out.channels[16] += page.raw_depth;
        out.channels[0] += page.zero_bits;
        for (int t = 0; t < page.tier_count; ++t) {
            const TierLayout& tier = page.tiers[size_t(t)];
            out.channels[tier.bits] += page.kind != StoreKind::tiered ? page.dim - page.wide : tier.live;
            out.channels[tier.bits + 1] += page.wide;
        }
    }
    const double n = double(std::max<size_t>(1, out.pages.size()));
    out.page_bits /= n;
    for (double& c : out.channels)
        c /= n;
    return out;
}

std::string mean_ladder(const Plan& plan) {
    std::string text;
    for (int bits = 16; bits >= 0; --bits) {
        if (plan.channels[bits] > 0)
            text += fmt::format("{}{}:{:.4g}", text.empty() ? "" : " ", bits, plan.channels[bits]);
    }
    if (!plan.mean.empty()) {
        double squares = 0, most = 0;
        for (const float m : plan.mean)
            squares += double(m) * m, most = std::max(most, std::abs(double(m)));
        text += fmt::format("  (mean: norm {:.4g}, largest {:.4g})", std::sqrt(squares), most);
    }
    return text.empty() ? "-" : text;
}

std::string rope_text(const Rope* rope) {
    if (!rope || !rope->known) return "keys are not the direct result of a plain rotation";
    std::string text = fmt::format("{} pairs over {} channels, base {:g}", rope->halves ? "half-split" : "adjacent",
                                   rope->rotary, rope->base);
    if (rope->freq_scale != 1) text += fmt::format(", scale {:g}", rope->freq_scale);
    if (rope->ext_factor != 0)
        text += fmt::format(", YaRN {:g} from {} tokens", rope->ext_factor, rope->original_context);
    if (!rope->factors.empty()) text += ", frequency factors";
    return text;
}

ordered_json to_json(const Rope* rope) {
    if (!rope || !rope->known) return nullptr;
    return {{"pairs", rope->halves ? "halves" : "adjacent"},
            {"rotary", rope->rotary},
            {"base", rope->base},
            {"freq_scale", rope->freq_scale},
            {"ext_factor", rope->ext_factor},
            {"attn_factor", rope->attn_factor},
            {"factors", !rope->factors.empty()}};
}

ordered_json to_json(const Plan& plan) {
    ordered_json pages = ordered_json::array();
    for (const PageView& view : plan.pages) {
        pages.push_back({{"rows", view.rows},
                         {"bytes", view.layout->bytes},
                         {"true_bits", view.layout->true_bits()},
                         {"ladder", ladder_text(*view.layout)}});
    }
    return {{"layer", plan.layer},
            {"kv_head", plan.head},
            {"side", name_of(plan.side)},
            {"window_front", plan.window.front},
            {"window_keep", plan.window.keep},
            {"window_flush", plan.window.flush},
            {"front", plan.front},
            {"packed", plan.packed},
            {"recent", plan.recent},
            {"mean", plan.mean},
            {"pages", std::move(pages)}};
}

void check_range(const char* option, int value, size_t count) {
    if (value >= 0 && size_t(value) >= count) bad_usage("{} {}: 0 to {} in this model", option, value, count - 1);
}

void with_model(const Options& o, bool has_prompt) {
    check_spec(o.spec);
    const bool has_text = has_prompt || !o.file.empty();
    const std::string text = has_text ? take_text(o.prompt, has_prompt, o.file) : "";
    Opened opened = open_model(o.model, o.spec, o.ctx, o.common);
    const std::string& path = opened.path;
    const eval::Model& model = opened.model;
    eval::Context& context = opened.context;
    if (has_text) {
        std::vector<int32_t> tokens = model.tokenize(text, true, false);
        if (int64_t(tokens.size()) > context.size()) {
            notice(fmt::format("the text has {} tokens; the first {}, which the context holds, are used", tokens.size(),
                               context.size()));
            tokens.resize(size_t(context.size()));
        }
        ProgressBar bar;
        check(context.prefill(tokens, bar.receiver()));
    }
    const eval::CacheReport now = eval::report(context);
    const Cache& cache = *context.cache();
    const auto& layers = cache.shape().layers;
    check_range("--layer", o.layer, layers.size());

    ordered_json out{{"model", path},
                     {"spec", o.spec},
                     {"version", KVMOSAIC_VERSION},
                     {"tokens", cache.rows(0)},
                     {"true_bits", now.footprint.true_bits()},
                     {"cache_bytes", now.footprint.cache_bytes()},
                     {"path", now.path},
                     {"isa", now.isa},
                     {"layers", ordered_json::array()},
                     {"plans", ordered_json::array()}};
    if (!o.json) {
        fmt::print("{}: {}, {} layers, cache {} ({})\n", path, model.description(), layers.size(), o.spec,
                   cache.method().spec());
        fmt::print("{} tokens, {:.2f} MiB, {:.3f} true bits per value, {} path ({})\n\n", cache.rows(0),
                   double(now.footprint.cache_bytes()) / (1 << 20), now.footprint.true_bits(), now.path, now.isa);
        fmt::print("{:>5} {:>4} {:<5} {:>6} {:>7} {:>7} {:>6}  {:>9}  {}\n", "layer", "head", "side", "front", "packed",
                   "recent", "pages", "page bits", "channels by width, mean over the pages");
    }
    std::string rotation, drawn;
    for (int32_t layer = 0; layer < int32_t(layers.size()); ++layer) {
        const LayerShape& shape = layers[size_t(layer)];
        const Rope* rope = rope_of(context.get(), layer);
        if (o.json) {
            out["layers"].push_back({{"layer", layer},
                                     {"heads", shape.heads},
                                     {"kv_heads", shape.kv_heads},
                                     {"key_dim", shape.key_dim},
                                     {"value_dim", shape.value_dim},
                                     {"rope", to_json(rope)}});
        }
        if ((o.layer >= 0 && o.layer != layer) || !shape.has_kv()) continue;
        if (o.layer >= 0) check_range("--head", o.head, size_t(shape.kv_heads));
        if (!o.json && rope_text(rope) != rotation) {
            rotation = rope_text(rope);
            fmt::print("from layer {}: {} query heads, {} KV heads, head size {}/{}; rotation: {}\n", layer,
                       shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, rotation);
        }
        for (int32_t head = 0; head < shape.kv_heads; ++head) {
            if (o.head >= 0 && o.head != head) continue;
            for (const Side side : sides_of(o)) {
                const Plan plan = plan_of(cache, layer, head, side);
                if (o.json) {
                    out["plans"].push_back(to_json(plan));
                } else {
                    fmt::print("{:>5} {:>4} {:<5} {:>6} {:>7} {:>7} {:>6}  {:>9.3f}  {}\n", layer, head, name_of(side),
                               plan.front, plan.packed, plan.recent, plan.pages.size(), plan.page_bits,
                               mean_ladder(plan));
                }
                // One drawing a side is enough, unless a head was asked for: then it is that head's newest page.
                const std::string title = fmt::format("layer {}, KV head {}, newest page (page {}), ", layer, head,
                                                      int64_t(plan.pages.size()) - 1);
                const bool wanted = o.json || drawn.find(name_of(side) + std::string(" page")) == std::string::npos;
                if (!plan.pages.empty() && wanted && !o.json) drawn += "\n" + title + draw(*plan.pages.back().layout);
            }
        }
    }
    if (o.json)
        fmt::print("{}\n", out.dump(2));
    else
        fmt::print("{}", drawn.empty() ? "\nnothing is packed yet\n" : drawn);
}

} // namespace

void add_inspect(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb =
        app.add_subcommand("inspect", "the plan of every layer and head, pages drawn with byte offsets, saved files");
    CLI::Option* saved = verb->add_option("FILE", o->saved, "a sequence file (run --save): all that it says of itself");
    CLI::Option* model = verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name");
    CLI::Option* prompt = verb->add_option("-p,--prompt", o->prompt, "text to run through the model first");
    verb->add_option("-f,--file", o->file, "the text from a file (-: standard input)");
    verb->add_option("--cache", o->spec, "cache spec (kvmosaic methods)")->capture_default_str();
    verb->add_option("--ctx", o->ctx, "most tokens of the text (0: as the model was trained)")
        ->check(CLI::Range(0, 1 << 24));
    verb->add_option("--layer", o->layer, "only this layer")->check(CLI::NonNegativeNumber);
    verb->add_option("--head", o->head, "only this KV head")->check(CLI::NonNegativeNumber);
    verb->add_option("--side", o->side, "only keys (k) or values (v)")->check(CLI::IsMember({"k", "v"}));
    CLI::Option* dim = verb->add_option("--head-dim", o->head_dim, "without a model: the head size to draw for")
                           ->check(CLI::Range(1, kMaxHeadDim));
    verb->add_option("--ladder", o->ladder, "without a model: channels by width, as in 16:12,4:44,2:72");
    verb->add_flag("--json", o->json, "as JSON");
    add_common(verb, &o->common);
    verb->footer("Examples\n"
                 "  kvmosaic inspect -m tiny -f text.txt --cache mixkvq --layer 0\n"
                 "  kvmosaic inspect -m tiny -f text.txt --cache kivi:bits=2 --layer 3 --head 1 --side k\n"
                 "  kvmosaic inspect --cache mixkvq --head-dim 128 --ladder 16:12,4:44,2:72\n"
                 "  kvmosaic inspect chat.kv");
    verb->callback([o, model, prompt, dim, saved] {
        if (saved->count() > 0) {
            if (model->count() + dim->count() > 0) bad_usage("FILE excludes -m and --head-dim");
            return inspect_saved(o->saved, o->json);
        }
        if (model->count() > 0 && dim->count() > 0) bad_usage("-m and --head-dim exclude each other");
        if (model->count() > 0) return with_model(*o, prompt->count() > 0);
        if (dim->count() == 0) bad_usage("inspect: name a saved file, a model with -m, or a head size with --head-dim");
        without_model(*o);
    });
}

} // namespace kvmosaic::tool
