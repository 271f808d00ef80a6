#include "eval/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <fmt/format.h>

#include "core/parallel.h"
#include "eval/lengths.h"
#include "eval/metrics.h"
#include "eval/one_layer.h"

namespace kvmosaic::eval {

namespace {

// Logits of one step of one cache, row by row, with their sums.
struct StepLogits {
    std::vector<const float*> rows; // [scored], null where not scored
    std::vector<LogSum> sums;
    std::vector<float> own; // rows that are kept nowhere else
};

struct Step {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> wanted;  // whether the prediction made at this token is scored
    std::vector<int32_t> targets; // the token that follows
};

class Runner {
public:
    Runner(const Model& model, const CompareOptions& options) : model_(model), options_(options) {}

    Status open(const std::string& spec, int32_t layer, Context* out) const {
        ContextOptions wish;
        wish.spec = spec;
        if (layer >= 0) wish.method = [spec, layer] { return only_layer(spec, layer); };
        wish.context = options_.window;
        wish.ubatch = options_.ubatch;
        wish.threads = options_.threads;
        wish.cache.step = options_.step;
        Result<Context> made = Context::make(model_, wish);
        if (!made) return made.status();
        *out = std::move(*made);
        return {};
    }

    Status advance(Context& context, const Step& step, StepLogits* out) const {
        if (Status bad = context.decode(step.tokens, step.wanted); !bad) return bad;
        const int32_t n = int32_t(step.tokens.size());
        out->rows.assign(size_t(n), nullptr);
        out->sums.assign(size_t(n), {});
        for (int32_t i = 0; i < n; ++i) {
            if (step.wanted[size_t(i)]) out->rows[size_t(i)] = context.logits(i);
        }
        return sum(out);
    }

    // The same from a window of kept logits, whose scored positions before this step are `first`.
    Status recall(const KeptLogits& kept, int32_t window, int64_t first, const Step& step, StepLogits* out) const {
        const size_t n = step.tokens.size(), vocabulary = size_t(model_.vocab_size());
        out->rows.assign(n, nullptr);
        out->sums.assign(n, {});
        out->own.resize(n * vocabulary);
        std::vector<int64_t> position(n);
        for (size_t i = 0; i < n; ++i) {
            position[i] = first;
            if (!step.wanted[i]) continue;
            out->rows[i] = out->own.data() + i * vocabulary;
            ++first;
        }
        parallel(thread_count(options_.threads), n, [&](size_t i) {
            if (out->rows[i]) kept.read(window, position[i], out->own.data() + i * vocabulary);
        });
        return sum(out);
    }

    Status sum(StepLogits* out) const {
        const size_t n = out->rows.size();
        parallel(thread_count(options_.threads), n, [&](size_t i) {
            if (out->rows[i]) out->sums[i] = log_sum(out->rows[i], model_.vocab_size());
        });
        for (size_t i = 0; i < n; ++i) {
            if (out->rows[i] && !out->sums[i].finite) {
                return {StatusCode::corrupt, "the model's output is not finite"};
            }
        }
        return {};
    }

    // Adds the positions of one step to the result of `other` measured against `reference`.
    void score(const Step& step, const StepLogits& reference, const StepLogits& other, WindowResult* result) const {
        const size_t n = step.tokens.size(), first = result->nll.size();
        std::vector<size_t> positions;
        for (size_t i = 0; i < n; ++i) {
            if (other.rows[i]) positions.push_back(i);
        }
        result->nll.resize(first + positions.size());
        result->kl.resize(first + positions.size());
        parallel(thread_count(options_.threads), positions.size(), [&](size_t p) {
            const size_t i = positions[p];
            result->nll[first + p] = float(-log_probability(other.rows[i], other.sums[i], step.targets[i]));
            result->kl[first + p] = &reference == &other
                                        ? 0.0f
                                        : float(kl_divergence(reference.rows[i], reference.sums[i], other.rows[i],
                                                              other.sums[i], model_.vocab_size()));
        });
        for (const size_t i : positions)
            result->agree += reference.sums[i].best == other.sums[i].best;
    }

private:
    const Model& model_;
    const CompareOptions& options_;
};

// The steps of window `w` of all, counted through the texts. As llama.cpp's perplexity tool does, a window starts with
// the begin token where the model wants one.
std::vector<Step> steps_of(const Model& model, const std::vector<std::vector<int32_t>>& texts,
                           const CompareOptions& options, int32_t w) {
    size_t text = 0;
    while (w >= options.windows[text])
        w -= options.windows[text++];
    const int32_t* begin = texts[text].data() + int64_t(w) * options.window;
    std::vector<Step> steps;
    for (int32_t at = 0; at < options.window; at += options.ubatch) {
        Step step;
        for (int32_t i = at; i < std::min(options.window, at + options.ubatch); ++i) {
            const bool last = i + 1 == options.window;
            step.tokens.push_back(i == 0 && model.begins_with_token() ? model.begin_token() : begin[i]);
            step.wanted.push_back(!last && i + 1 >= options.score_from);
            step.targets.push_back(last ? 0 : begin[i + 1]);
        }
        steps.push_back(std::move(step));
    }
    return steps;
}

// Contexts whose true bits are worked out.
std::vector<int64_t> lengths_of(const CompareOptions& options) {
    std::vector<int64_t> out(std::begin(kCurve), std::end(kCurve));
    if (options.context > 0) out.push_back(options.context);
    return out;
}

void finish(const Context& context, const CompareOptions& options, const std::optional<LengthBits>& lengths,
            WindowResult* result) {
    const CacheReport now = report(context);
    result->tokens = options.window;
    result->seconds = context.seconds();
    result->cache_bytes = now.footprint.cache_bytes();
    result->bits = now.footprint.true_bits();
    result->bits_key = now.footprint.true_bits(0);
    result->bits_value = now.footprint.true_bits(1);
    for (size_t i = 0; lengths && i < std::size(kCurve); ++i)
        result->curve[i] = lengths->bits(i, *context.cache());
    if (lengths && options.context > 0) result->bits_context = lengths->bits(std::size(kCurve), *context.cache());
    result->non_finite = now.footprint.non_finite;
    result->path = now.path;
    result->isa = now.isa;
}

Status named(const std::string& spec, const Status& bad) {
    return {bad.code(), fmt::format("cache '{}': {}", spec, bad.message())};
}

} // namespace

std::vector<Row> plan_rows(const std::vector<std::string>& specs) {
    std::vector<Row> rows{{"f16", "f16", "f16", {}}, {"floor", "f16", "f32", {}}};
    for (const std::string& spec : specs) {
        const auto method = open_method(spec);
        const std::string canonical = method ? (*method)->spec() : spec;
        if (canonical != "f16") rows.push_back({spec, canonical, "f16", {}});
    }
    return rows;
}

Status validate(const CompareOptions& o, const std::vector<std::string>& names,
                const std::vector<std::vector<int32_t>>& texts, int32_t trained) {
    const auto wrong = [](const std::string& text) { return Status(StatusCode::invalid_argument, text); };
    if (o.window < 2 || (trained > 0 && o.window > trained)) {
        return wrong(fmt::format("--window {}: 2 to {} tokens are possible with this model", o.window, trained));
    }
    for (const int32_t n : o.windows)
        if (n < 1) return wrong(fmt::format("--windows {}: at least 1", n));
    if (o.score_from < 1 || o.score_from >= o.window) {
        return wrong(fmt::format("--score-from {}: 1 to {} (the window has {} tokens, and the first of them is not "
                                 "predicted)",
                                 o.score_from, o.window - 1, o.window));
    }
    if (o.ubatch < 1) return wrong(fmt::format("--ubatch {}: at least 1", o.ubatch));
    for (size_t i = 0; i < texts.size(); ++i) {
        const int64_t need = int64_t(o.window) * o.windows[i];
        if (need <= int64_t(texts[i].size())) continue;
        return wrong(fmt::format("{} {} of {} tokens need {} tokens, the text {} has {}: use fewer or smaller windows "
                                 "(--windows, --window) or a longer text",
                                 o.windows[i], o.windows[i] == 1 ? "window" : "windows", o.window, need, names[i],
                                 texts[i].size()));
    }
    return {};
}

Status compare(const Model& model, const std::vector<std::vector<int32_t>>& texts, const CompareOptions& options,
               std::vector<Row>* rows, const std::function<Status()>& landed, const Progress& progress,
               KeptLogits* kept) {
    const Runner runner(model, options);
    const int32_t all = options.all_windows();
    std::vector<int32_t> open_windows;
    for (int32_t w = 0; w < all; ++w) {
        const auto lacks = [w](const Row& row) { return int32_t(row.windows.size()) <= w; };
        if (std::any_of(rows->begin(), rows->end(), lacks)) open_windows.push_back(w);
    }
    if (open_windows.empty()) return {};

    // Whether the reference itself goes through the model in window w.
    const bool floor_asked = std::any_of(rows->begin(), rows->end(), [](const Row& r) { return r.spec == "floor"; });
    const auto runs = [&](int32_t w) {
        return floor_asked || !kept || !kept->has(w) || int32_t(rows->front().windows.size()) <= w;
    };
    const bool reference_runs = std::any_of(open_windows.begin(), open_windows.end(), runs);
    Context exact; // the f32 cache, for the floor
    std::vector<Context> contexts(rows->size());
    std::vector<std::optional<LengthBits>> lengths(rows->size());
    for (size_t r = 0; r < rows->size(); ++r) {
        const bool floor = (*rows)[r].spec == "floor";
        const std::string& spec = floor ? (*rows)[r].reference : (*rows)[r].spec;
        if (r > 0 ? int32_t((*rows)[r].windows.size()) >= all : !reference_runs) continue;
        const int32_t layer = (*rows)[r].layer;
        if (Status bad = runner.open(spec, layer, floor ? &exact : &contexts[r]); !bad) return named(spec, bad);
        if (floor || layer >= 0) continue; // the same cache as row 0; of no use
        Result<LengthBits> made = LengthBits::make(contexts[r].cache()->shape(), spec, lengths_of(options));
        if (!made) return named(spec, made.status());
        lengths[r] = std::move(*made);
    }

    const double total = double(open_windows.size()) * double(rows->size()) * options.window;
    double done = 0;
    for (size_t number = 0; number < open_windows.size(); ++number) {
        const int32_t w = open_windows[number];
        std::vector<WindowResult> results(rows->size());
        for (Context& c : contexts) {
            if (c.get()) c.clear();
        }
        if (exact.get()) exact.clear();
        const auto is_open = [&](size_t r) { return int32_t((*rows)[r].windows.size()) <= w; };
        const auto tick = [&](const Step& step) {
            done += double(step.tokens.size());
            if (progress) progress(fmt::format("window {} of {}", w + 1, all), done / total);
        };
        const bool keep = kept && !kept->has(w);
        if (keep) kept->begin(options.window - options.score_from, model.vocab_size());
        int64_t scored = 0;
        for (const Step& step : steps_of(model, texts, options, w)) {
            StepLogits reference, other;
            for (size_t r = 0; r < rows->size(); ++r) {
                const Row& row = (*rows)[r];
                const bool floor = row.spec == "floor";
                if (r > 0 && !is_open(r)) {
                    tick(step);
                    continue;
                }
                StepLogits& into = r == 0 ? reference : other;
                if (r == 0 && !runs(w)) {
                    if (Status bad = runner.recall(*kept, w, scored, step, &into); !bad) return bad;
                    scored += std::count(step.wanted.begin(), step.wanted.end(), uint8_t(1));
                    tick(step);
                    continue;
                }
                if (Status bad = runner.advance(floor ? exact : contexts[r], step, &into); !bad) {
                    return named(floor ? row.reference : row.spec, bad);
                }
                if (r == 0) {
                    runner.score(step, reference, reference, &results[r]);
                    for (const float* logits : into.rows)
                        if (keep && logits) kept->add(logits);
                } else if (floor) {
                    runner.score(step, other, reference, &results[r]);
                } else {
                    runner.score(step, reference, other, &results[r]);
                }
                tick(step);
            }
        }
        for (size_t r = 0; r < rows->size(); ++r) {
            if (!is_open(r)) continue;
            const size_t own = (*rows)[r].spec == "floor" ? 0 : r;
            finish(contexts[own], options, lengths[own], &results[r]);
            (*rows)[r].windows.push_back(std::move(results[r]));
        }
        if (keep) kept->finish();
        if (Status bad = landed(); !bad) return bad;
    }
    return {};
}

std::vector<int32_t> position_edges(const CompareOptions& options, int32_t most) {
    const int32_t n = options.window - options.score_from, parts = std::clamp(n, 1, most);
    std::vector<int32_t> edges;
    for (int32_t i = 0; i <= parts; ++i)
        edges.push_back(options.score_from + int32_t(int64_t(n) * i / parts));
    return edges;
}

std::vector<double> kl_by_position(const Row& row, const std::vector<int32_t>& edges) {
    std::vector<double> sums(edges.size() - 1, 0), counts(edges.size() - 1, 0);
    for (const WindowResult& w : row.windows) {
        size_t part = 0;
        for (size_t i = 0; i < w.kl.size(); ++i) {
            while (part + 2 < edges.size() && edges.front() + int32_t(i) >= edges[part + 1])
                ++part;
            sums[part] += double(w.kl[i]), counts[part] += 1;
        }
    }
    for (size_t i = 0; i < sums.size(); ++i)
        sums[i] /= counts[i];
    return sums;
}

RowSummary summarize(const Row& row, const Row& base) {
    RowSummary out;
    std::vector<float> nll, kl;
    double bytes = 0, seconds = 0;
    int64_t tokens = 0, agree = 0;
    for (const WindowResult& w : row.windows) {
        nll.insert(nll.end(), w.nll.begin(), w.nll.end());
        kl.insert(kl.end(), w.kl.begin(), w.kl.end());
        agree += w.agree, tokens += w.tokens, seconds += w.seconds, bytes += double(w.cache_bytes);
        out.bits += w.bits, out.bits_key += w.bits_key, out.bits_value += w.bits_value;
        for (size_t i = 0; i < out.curve.size(); ++i)
            out.curve[i] += w.curve[i];
        out.bits_context += w.bits_context;
        out.non_finite += w.non_finite;
        out.path = w.path, out.isa = w.isa;
    }
    if (row.windows.empty() || nll.empty()) return out;
    const double n = double(row.windows.size());
    out.tokens = int64_t(nll.size());
    out.bits /= n, out.bits_key /= n, out.bits_value /= n;
    for (double& bits : out.curve)
        bits /= n;
    out.bits_context /= n;
    out.cache_bytes = int64_t(std::llround(bytes / n));
    const Summary loss = summarize(nll), divergence = summarize(kl);
    out.ppl = std::exp(loss.mean);
    out.ppl_error = out.ppl * loss.error;
    std::vector<float> pairs; // differences on the same positions
    for (size_t w = 0; w < std::min(row.windows.size(), base.windows.size()); ++w) {
        const std::vector<float>&mine = row.windows[w].nll, &theirs = base.windows[w].nll;
        for (size_t i = 0; i < std::min(mine.size(), theirs.size()); ++i)
            pairs.push_back(mine[i] - theirs[i]);
    }
    const Summary difference = summarize(pairs);
    out.ppl_ratio = pairs.size() == nll.size() ? std::exp(difference.mean) : std::numeric_limits<double>::quiet_NaN();
    out.ppl_ratio_error = out.ppl_ratio * difference.error;
    out.kl_mean = divergence.mean, out.kl_error = divergence.error;
    out.kl_p99 = quantile(std::move(kl), 0.99);
    out.top1 = double(agree) / double(out.tokens);
    out.tokens_per_second = seconds > 0 ? double(tokens) / seconds : 0;
    return out;
}

} // namespace kvmosaic::eval
