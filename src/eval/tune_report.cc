#include "eval/tune_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/metrics.h"
#include "eval/shares.h"

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

constexpr double kSameBits = 0.01;

bool has(const std::vector<size_t>& all, size_t i) { return std::find(all.begin(), all.end(), i) != all.end(); }

// Front and defaults, by bits; then what is no setting but stands beside them.
std::vector<size_t> shown(const Study& study, const TuneResult& result) {
    std::vector<size_t> out = result.front;
    for (const size_t i : result.defaults)
        if (!has(out, i)) out.push_back(i);
    std::stable_sort(out.begin(), out.end(),
                     [&](size_t a, size_t b) { return study.trials[a].search.bits < study.trials[b].search.bits; });
    for (size_t i = 0; i < study.trials.size(); ++i)
        if (study.trials[i].label == kReferenceLabel) out.push_back(i);
    return out;
}

std::string kl_text(double kl) { return kl < 1e-3 ? fmt::format("{:.2e}", kl) : fmt::format("{:.5f}", kl); }

std::string mark(const TuneResult& result, size_t i) {
    if (i == result.chosen) return "chosen";
    return has(result.defaults, i) ? "default" : i == result.knee ? "knee" : "";
}

std::string numbers(const std::vector<size_t>& all) {
    return all.empty() ? "none" : fmt::format("{}", fmt::join(all, ", "));
}

// Columns that say how good a cache is.
std::string quality_names(Objective objective, bool text) {
    if (objective == Objective::kl)
        return fmt::format("{:>9} {:>9}  {:>8}  {:>7}", "KL mean", "+-", "ratio", "top-1 %");
    return fmt::format("{:>9}  {:>13}", "right %", "95 %") + (text ? fmt::format("  {:>9}", "KL mean") : "");
}

std::string quality(const Measured& m, Objective objective) {
    if (objective == Objective::kl) {
        return fmt::format("{:>9} {:>9}  {:>8.4f}  {:>7.2f}", kl_text(m.kl), kl_text(m.kl_error), m.ppl_ratio,
                           100 * m.top1);
    }
    const int64_t hits = std::count(m.right.begin(), m.right.end(), 1);
    const Interval range = wilson(hits, int64_t(m.right.size()));
    return fmt::format("{:>9.1f}  {:>13}", 100 * m.accuracy(),
                       fmt::format("{:.1f} - {:.1f}", 100 * range.low, 100 * range.high)) +
           (m.tokens > 0 ? fmt::format("  {:>9}", kl_text(m.kl)) : "");
}

ordered_json json_of(const Against& a, const std::string& other, Objective objective) {
    ordered_json out{{"default", other}, {"verdict", name_of(a.verdict)}, {"bits_difference", a.bits}};
    if (objective == Objective::kl)
        out.update(ordered_json{{"kl_difference", a.kl}, {"kl_difference_error", a.kl_error}});
    else
        out.update(ordered_json{{"lost", a.lost}, {"won", a.won}, {"p", a.p}});
    return out;
}

} // namespace

const char* name_of(Verdict verdict) {
    switch (verdict) {
    case Verdict::leads:
        return "leads";
    case Verdict::level:
        return "level";
    case Verdict::trades:
        return "trades";
    case Verdict::trails:
        break;
    }
    return "trails";
}

Against against(const Measured& one, const Measured& other, Objective objective) {
    Against out;
    out.bits = one.bits - other.bits;
    const auto sign = [](double x, double least) { return x > least ? 1 : x < -least ? -1 : 0; };
    int loss = 0;
    if (objective == Objective::kl) {
        std::vector<float> pairs(std::min(one.kl_each.size(), other.kl_each.size()));
        for (size_t i = 0; i < pairs.size(); ++i)
            pairs[i] = one.kl_each[i] - other.kl_each[i];
        const Summary difference = summarize(pairs);
        out.kl = difference.mean, out.kl_error = difference.error;
        loss = sign(out.kl, 2 * out.kl_error);
    } else {
        for (size_t i = 0; i < std::min(one.right.size(), other.right.size()); ++i)
            out.lost += other.right[i] && !one.right[i], out.won += one.right[i] && !other.right[i];
        out.p = mcnemar(out.lost, out.won);
        loss = sign(double(out.lost - out.won), 0);
    }
    const int bits = sign(out.bits, kSameBits);
    out.verdict = loss == 0 && bits == 0   ? Verdict::level
                  : loss <= 0 && bits <= 0 ? Verdict::leads
                  : loss >= 0 && bits >= 0 ? Verdict::trails
                                           : Verdict::trades;
    return out;
}

TuneResult result_of(const Study& study, std::optional<double> bits, std::optional<double> kl) {
    TuneResult out;
    std::vector<Point> points;
    for (size_t i = 0; i < study.trials.size(); ++i) {
        const Trial& t = study.trials[i];
        if (!is_setting(t)) continue;
        out.trials.push_back(i);
        if (!t.label.empty()) out.defaults.push_back(i);
        points.push_back({t.search.bits, study.loss(t.search)});
    }
    const std::vector<size_t> front = front_of(points);
    if (front.empty()) return out;
    const size_t knee = knee_of(points, front);
    const Chosen chosen = bits ? choose_by_bits(points, front, *bits)
                          : kl ? choose_by_loss(points, front, *kl)
                               : Chosen{knee, true};
    for (const size_t i : front)
        out.front.push_back(out.trials[i]);
    out.knee = out.front[knee];
    out.chosen = out.front[chosen.index];
    out.kept = chosen.kept;
    return out;
}

ordered_json to_json(const Study& study, const TuneResult& result, const Elsewhere& elsewhere) {
    ordered_json out = study.head;
    const Objective objective = study.objective();
    out.erase("descent");
    out["holdout"] = nullptr;
    if (!elsewhere.id.empty() && objective == Objective::kl)
        out["holdout"] = {{"text", elsewhere.name}, {"sha256", elsewhere.sha256}, {"windows", elsewhere.windows}};
    else if (!elsewhere.id.empty())
        out["holdout"] = {
            {"problems_sha256", elsewhere.sha256}, {"first", elsewhere.first}, {"questions", elsewhere.questions}};
    out["warnings"] = warnings(study, result);
    out["rows"] = ordered_json::array();
    for (const Trial& t : study.trials) {
        const size_t i = size_t(&t - study.trials.data());
        ordered_json row{{"trial", i}, {"label", t.label}, {"setting", name_of(t, study.head)}, {"spec", t.spec}};
        row["values"] = ordered_json::object();
        for (size_t v = 0; v < t.values.size(); ++v)
            row["values"][study.head["space"][v]["name"].get<std::string>()] = t.values[v];
        if (!t.widths.empty()) row["widths"] = to_json(t.widths);
        row["front"] = has(result.front, i), row["knee"] = i == result.knee, row["chosen"] = i == result.chosen;
        row.update(to_json(t.search));
        const Measured* other = t.on(elsewhere.id);
        if (other) row["holdout"] = to_json(*other);
        for (const size_t d : result.defaults) {
            if (!has(result.front, i) || i == d) continue;
            const std::string name = name_of(study.trials[d], study.head);
            row["against"].push_back(json_of(against(t.search, study.trials[d].search, objective), name, objective));
            const Measured* theirs = study.trials[d].on(elsewhere.id);
            if (other && theirs)
                row["holdout"]["against"].push_back(json_of(against(*other, *theirs, objective), name, objective));
        }
        out["rows"].push_back(std::move(row));
    }
    return out;
}

std::string to_table(const Study& study, const TuneResult& result) {
    const int64_t context = study.head.at("context").get<int64_t>();
    const Objective objective = study.objective();
    std::string out = fmt::format("{:>5}  {:>13}  {}  {:>7}  {}\n", "trial", fmt::format("bits at {}", context),
                                  quality_names(objective, true), "", "setting");
    for (const size_t i : shown(study, result)) {
        const Trial& t = study.trials[i];
        out += fmt::format("{:>5}  {:>13.3f}  {}  {:>7}  {}\n", i, t.search.bits, quality(t.search, objective),
                           mark(result, i), name_of(t, study.head));
    }
    return out;
}

std::string elsewhere_table(const Study& study, const TuneResult& result, const Elsewhere& elsewhere) {
    const Objective objective = study.objective();
    const char* seen = objective == Objective::kl ? "the search's text" : "the search's problems";
    std::string out = fmt::format("{:>5}  {:>13}  {}", "trial", "bits", quality_names(objective, false));
    const int wide = objective == Objective::kl ? 18 : 28;
    for (const size_t d : result.defaults)
        out += fmt::format("  {:>{}}", "against " + std::to_string(d), wide);
    out += fmt::format("  {:>7}  setting\n", "");
    for (const size_t i : shown(study, result)) {
        const Trial& t = study.trials[i];
        const Measured* m = t.on(elsewhere.id);
        if (!m) continue;
        out += fmt::format("{:>5}  {:>13.3f}  {}", i, m->bits, quality(*m, objective));
        for (const size_t d : result.defaults) {
            std::string words = "-";
            const Measured* theirs = study.trials[d].on(elsewhere.id);
            if (d != i && theirs && is_setting(t)) {
                const Against now = against(*m, *theirs, objective);
                words = fmt::format("{}{} (was {})", name_of(now.verdict),
                                    objective == Objective::kl ? "" : fmt::format(", p {:.2f}", now.p),
                                    name_of(against(t.search, study.trials[d].search, objective).verdict));
            }
            out += fmt::format("  {:>{}}", words, wide);
        }
        out += fmt::format("  {:>7}  {}\n", mark(result, i), name_of(t, study.head));
    }
    for (const size_t d : result.defaults) {
        const Trial& theirs = study.trials[d];
        const Measured* there = theirs.on(elsewhere.id);
        if (!there) continue;
        std::vector<size_t> still, lost, other;
        for (const size_t i : result.front) {
            const Measured* m = study.trials[i].on(elsewhere.id);
            if (i == d || !m) continue;
            const bool leads = against(*m, *there, objective).verdict == Verdict::leads;
            if (against(study.trials[i].search, theirs.search, objective).verdict == Verdict::leads)
                (leads ? still : lost).push_back(i);
            else if (leads)
                other.push_back(i);
        }
        const std::string name = name_of(theirs, study.head);
        if (still.empty() && lost.empty())
            out += fmt::format("no point of the front leads {} (trial {}) on {}", name, d, seen);
        else
            out += fmt::format("of the {} that lead {} (trial {}) on {}, {} still do on {}: {}; no longer: {}",
                               still.size() + lost.size(), name, d, seen, still.size(), elsewhere.name, numbers(still),
                               numbers(lost));
        out += other.empty() ? "\n" : fmt::format("; there lead too: {}\n", numbers(other));
    }
    return out;
}

std::vector<std::string> warnings(const Study& study, const TuneResult& result) {
    std::vector<std::string> out;
    if (study.objective() != Objective::kl) return out;
    for (const Trial& t : study.trials) {
        if (t.label != kFloorLabel) continue;
        double least = INFINITY;
        for (const size_t i : result.front)
            least = std::min(least, study.trials[i].search.kl);
        if (t.search.kl > 0.1 * least)
            out.push_back(fmt::format("the floor (KL {}: a 32-bit cache against the 16-bit one, same weights) is above "
                                      "a tenth of the least KL of the front ({}); that is partly rounding of the model",
                                      kl_text(t.search.kl), kl_text(least)));
    }
    return out;
}

} // namespace kvmosaic::eval
