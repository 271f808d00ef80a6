#include "eval/tune.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>
#include <unistd.h>

#include "eval/tune_layers.h"

namespace kvmosaic::eval {

namespace {

constexpr int64_t kMostKept = int64_t(4) << 30; // bytes of logits

} // namespace

std::string text_id(const TuneText& text) { return fmt::format("{}:{}", text.sha256, text.windows); }

Result<ModelShape> shape_of(const Model& model) {
    ContextOptions wish;
    wish.context = std::min(256, model.trained_context());
    wish.ubatch = 32;
    Result<Context> context = Context::make(model, wish);
    if (!context) return context.status();
    return context->cache()->shape();
}

// ---- one text ----

Measurer::Measurer(const Model& model, TuneText text, CompareOptions options)
    : model_(model), text_(std::move(text)), id_(text_id(text_)), options_(std::move(options)) {
    options_.windows = {text_.windows};
}

int64_t Measurer::kept_bytes() const {
    return KeptLogits::bytes(int64_t(text_.windows) * (options_.window - options_.score_from), model_.vocab_size());
}

Status Measurer::validate(const std::string& option) const {
    if (Status bad = eval::validate(options_, {text_.name}, {text_.tokens}, model_.trained_context()); !bad) return bad;
    if (kept_bytes() <= kMostKept) return {};
    return {StatusCode::invalid_argument,
            fmt::format("{} {}: the reference's logits at {} positions would take {:.1f} GiB of memory, at most {} GiB "
                        "are kept; use fewer or smaller windows, or a later --score-from",
                        option, text_.name, text_.windows * (options_.window - options_.score_from),
                        double(kept_bytes()) / double(1 << 30), kMostKept >> 30)};
}

Result<Measured> Measurer::measure(const std::string& spec, const Progress& progress) {
    const auto nothing = [] { return Status(); };
    if (reference_.empty()) {
        std::vector<Row> rows{{"f16", "f16", "f16", {}}};
        if (Status bad = compare(model_, {text_.tokens}, options_, &rows, nothing, progress, &kept_); !bad) return bad;
        reference_ = std::move(rows);
    }
    std::vector<Row> rows{reference_.front(), {spec, spec, "f16", {}}};
    if (Status bad = compare(model_, {text_.tokens}, options_, &rows, nothing, progress, &kept_); !bad) return bad;
    const RowSummary s = summarize(rows[1], rows[0]);
    Measured out;
    out.text = id_;
    out.tokens = s.tokens;
    out.bits = s.bits_context, out.bits_window = s.bits;
    out.kl = s.kl_mean, out.kl_error = s.kl_error, out.kl_p99 = s.kl_p99;
    out.ppl_ratio = s.ppl_ratio, out.ppl_ratio_error = s.ppl_ratio_error, out.top1 = s.top1;
    for (const WindowResult& w : rows[1].windows)
        out.kl_each.insert(out.kl_each.end(), w.kl.begin(), w.kl.end());
    out.path = s.path, out.isa = s.isa;
    return out;
}

// ---- specs ----

TrialSpecs::TrialSpecs(TunedMethod method, ModelShape shape) : method_(std::move(method)), shape_(std::move(shape)) {
    const char* folder = std::getenv("TMPDIR");
    file_ = fmt::format("{}/kvmosaic-tune-{}.calib", folder && *folder ? folder : "/tmp", ::getpid());
}

TrialSpecs::~TrialSpecs() { std::remove(file_.c_str()); }

Result<std::string> TrialSpecs::spec(const Trial& trial) {
    if (trial.widths.empty()) return trial.spec;
    const bool token_base = method_.fixed.text("base") == "token";
    if (Status bad = write_calibration(file_, calibration_of(shape_, trial.widths, token_base)); !bad) return bad;
    OptionValues values = method_.fixed;
    values.set("calib", file_);
    return "kvtuner:" + print_options(method_.info->options, values);
}

// ---- the search ----

Search::Search(const Model& model, const Options& options)
    : method_(options.method), measurer_(model, options.text, options.measure) {
    if (options.solver) solver_.emplace(model, *options.solver);
}

Status Search::find_space(const Model& model, const Options& options, const Progress& progress) {
    if (!method_.by_layer()) {
        const Result<ModelShape> shape = shape_of(model);
        if (!shape) return shape.status();
        for (const LayerShape& l : shape->layers) {
            if (!l.has_kv()) continue;
            method_.fit_to(l.key_dim);
            break;
        }
        return {};
    }
    CaptureOptions wish;
    wish.tokens = int64_t(options.text.windows) * options.measure.window;
    wish.window = options.measure.window;
    wish.threads = options.measure.threads;
    wish.query = true;
    const Result<Capture> seen = capture(model, options.text.tokens, wish, progress);
    if (!seen) return seen.status();
    LayerSpace found = layer_space(*seen, options.groups, method_.fixed.text("base") == "token", progress);
    method_.space = std::move(found.space);
    descent_ = std::move(found.descent);
    return {};
}

Result<std::unique_ptr<Search>> Search::open(const Model& model, const Options& options, const Progress& progress) {
    std::unique_ptr<Search> out(new Search(model, options));
    if (Status bad = out->measurer_.validate("-f"); !bad) return bad;
    nlohmann::ordered_json head = options.head;
    Result<Study> study = open_study(options.path, head, options.fields);
    if (!study) return study.status();
    if (!study->trials.empty()) {
        try {
            out->method_.space = space_from(study->head.at("space"));
            out->descent_ = widths_from(study->head.at("descent"));
        } catch (const nlohmann::json::exception& bad) {
            return Status(StatusCode::corrupt,
                          fmt::format("--study {}: contradicts itself: {}", options.path, bad.what()));
        }
    } else {
        if (Status bad = out->find_space(model, options, progress); !bad) return bad;
        study->head["space"] = to_json(out->method_.space);
        study->head["descent"] = to_json(out->descent_);
    }
    out->study_ = std::move(*study);
    const Result<ModelShape> shape = shape_of(model);
    if (!shape) return shape.status();
    out->specs_ = std::make_unique<TrialSpecs>(out->method_, *shape);
    if (Status bad = out->add_defaults(progress); !bad) return bad;
    return out;
}

Status Search::add_defaults(const Progress& progress) {
    std::vector<Trial> wanted;
    if (method_.by_layer()) {
        size_t layers = 0;
        for (const Tunable& t : method_.space)
            layers += t.layers.size();
        const auto uniform = [&](WidthPair pair) {
            Trial t;
            t.label = fmt::format("all layers {}", text_of(pair));
            t.widths.assign(layers, pair);
            const bool inside = std::all_of(method_.space.begin(), method_.space.end(),
                                            [&](const Tunable& one) { return one.has(text_of(pair)); });
            if (inside) t.values.assign(method_.space.size(), text_of(pair));
            return t;
        };
        wanted = {uniform({4, 4}), uniform({2, 2})};
        if (!descent_.empty()) {
            Trial t;
            t.label = fmt::format("calibrate --bits {:g}", CalibrateOptions().bits);
            t.widths = descent_;
            wanted.push_back(std::move(t));
        }
    } else {
        Trial t;
        t.label = t.spec = method_.spec();
        t.values = method_.defaults();
        wanted.push_back(std::move(t));
    }
    const auto fixed = [&](const char* label, const char* spec) {
        wanted.emplace_back();
        wanted.back().label = label, wanted.back().spec = spec;
    };
    fixed(kFloorLabel, "f32");
    if (solver_) fixed(kReferenceLabel, "f16");
    for (Trial& trial : wanted) {
        const bool known = std::any_of(study_.trials.begin(), study_.trials.end(),
                                       [&](const Trial& t) { return t.label == trial.label; });
        if (known) continue;
        if (Status bad = add(std::move(trial), progress); !bad) return bad;
    }
    return {};
}

Status Search::add(Trial trial, const Progress& progress) {
    const Result<std::string> spec = specs_->spec(trial);
    if (!spec) return spec.status();
    Result<Measured> measured = measurer_.measure(*spec, progress);
    if (!measured) return measured.status();
    trial.search = std::move(*measured);
    if (solver_) {
        Result<std::vector<uint8_t>> right = solver_->solve(*spec, progress);
        if (!right) return right.status();
        trial.search.right = std::move(*right);
    }
    if (trial.spec.empty()) trial.spec = method_.spec();
    study_.trials.push_back(std::move(trial));
    return study_.save();
}

bool Search::knows(const std::vector<std::string>& values) const {
    return std::any_of(study_.trials.begin(), study_.trials.end(), [&](const Trial& t) { return t.values == values; });
}

Result<const Trial*> Search::evaluate(const std::vector<std::string>& values, const Progress& progress) {
    for (const Trial& t : study_.trials)
        if (t.values == values) return &t;
    Trial trial;
    trial.values = values;
    if (method_.by_layer())
        trial.widths = widths_of(method_.space, values);
    else
        trial.spec = method_.spec(method_.space, values);
    if (Status bad = add(std::move(trial), progress); !bad) return bad;
    return &study_.trials.back();
}

} // namespace kvmosaic::eval
