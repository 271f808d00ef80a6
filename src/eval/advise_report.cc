#include "eval/advise_report.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/bytes.h"

namespace kvmosaic::eval {

using nlohmann::ordered_json;
using By = AdviseWish::By;

namespace {

// Below this share of unchanged predictions the text says so.
constexpr double kMuch = 0.85;

std::string tokens_text(const AdviceReport& r) {
    const std::string tokens = fmt::format("{} tokens", r.advice.context);
    return r.wish.sequences > 1 ? fmt::format("{} sequences of {}", r.wish.sequences, tokens) : tokens;
}

std::string wish_text(const AdviceReport& r) {
    switch (r.wish.by) {
    case By::bits:
        return fmt::format("at most {:.4g} true bits a value", r.wish.bits);
    case By::cache_memory:
        return fmt::format("at most {}", bytes_text(r.wish.bytes));
    case By::memory:
        break;
    }
    return fmt::format("at most {} with weights and buffers, which leave {}", bytes_text(r.wish.bytes),
                       r.advice.budget > 0 ? bytes_text(r.advice.budget) : "nothing");
}

// "; it changes one prediction in 38"
std::string changes(const AdviceReport& r) {
    const SizedSetting& best = r.advice.picks.front().setting;
    if (!r.measured() || best.spec == r.f16.spec) return "";
    const RowSummary s = r.summary(best.spec);
    if (s.top1 >= 1) return fmt::format("; it changed none of {} predictions", s.tokens);
    return fmt::format("; it changes one prediction in {:.3g}{}", 1 / (1 - s.top1),
                       s.top1 < kMuch ? ", which is much" : "");
}

std::string table(const AdviceReport& r) {
    const bool memory = r.wish.by != By::bits;
    size_t wide = 24;
    for (const AdvicePick& p : r.advice.picks)
        wide = std::max(wide, p.setting.spec.size());
    std::string out = fmt::format("{:<{}}  {:>6} {:>9} {:>9}", "cache", wide, "bits", "cache MiB", "all MiB");
    if (memory) out += fmt::format(" {:>8}", "fit");
    if (r.measured())
        out += fmt::format("  {:>9} {:>8}  {:>7}  {:>9} {:>7}", "KL mean", "+-", "top-1 %", "ppl ratio", "+-");
    out += "\n";
    for (const AdvicePick& p : r.advice.picks) {
        const SizedSetting& s = p.setting;
        out += fmt::format("{:<{}}  {:>6.2f} {:>9.1f} {:>9.1f}", s.spec, wide, s.bits, double(s.bytes) / 0x1p20,
                           double(s.bytes + r.beside.all()) / 0x1p20);
        if (memory) out += fmt::format(" {:>8}", p.tokens > 0 ? fmt::format("{}", p.tokens) : "-");
        if (r.measured() && s.spec == r.f16.spec) {
            out += fmt::format("  {:>9} {:>8}  {:>7}  {:>9} {:>7}", "reference", "", "", "", "");
        } else if (r.measured()) {
            const RowSummary m = r.summary(s.spec);
            out += fmt::format("  {:>9.5f} {:>8.5f}  {:>7.2f}  {:>9.4f} {:>7.4f}", m.kl_mean, m.kl_error, 100 * m.top1,
                               m.ppl_ratio, m.ppl_ratio_error);
        }
        const bool nearest = p.role == AdviceRole::recommended && !p.fits;
        out += fmt::format("  {}{}\n",
                           nearest                           ? "nearest"
                           : p.role == AdviceRole::reference ? "16 bit"
                                                             : name_of(p.role),
                           p.fits ? "" : ", does not fit");
    }
    return out;
}

} // namespace

RowSummary AdviceReport::summary(const std::string& spec) const {
    for (const Row& row : rows)
        if (row.spec != "floor" && row.canonical == spec) return summarize(row, rows.front());
    return {};
}

std::string AdviceReport::run_line() const {
    const std::string& spec = advice.picks.front().setting.spec;
    if (wish.sequences == 1) return fmt::format("kvmosaic run -m {} --cache {} --ctx {}", wanted, spec, advice.context);
    return fmt::format("kvmosaic serve -m {} --cache {} --ctx {} -np {}", wanted, spec, advice.context * wish.sequences,
                       wish.sequences);
}

std::string AdviceReport::measure_line() const {
    std::string out = fmt::format("kvmosaic compare -m {} -f TEXT", wanted);
    for (const AdvicePick& p : advice.picks)
        if (p.setting.spec != f16.spec) out += " --cache " + p.setting.spec;
    return out;
}

std::string to_text(const AdviceReport& r) {
    const SizedSetting& best = r.advice.picks.front().setting;
    std::string out = fmt::format("{} (SHA-256 {}); kvmosaic {}, commit {}\n", r.head.model,
                                  r.head.model_sha256.substr(0, 16), r.head.version, r.head.commit);
    out += fmt::format("Trained for {} tokens; weights {}, buffers of a step {}. ", r.trained,
                       bytes_text(r.beside.weights), bytes_text(r.beside.compute));
    out += fmt::format("A cache of {} takes {} in f16.\nAsked for: {}.\n", tokens_text(r), bytes_text(r.f16.bytes),
                       wish_text(r));
    for (const std::string& reason : r.advice.reasons)
        out += fmt::format("  * {}\n", reason);
    out += fmt::format("\nTake {}: {}, {:.2f} true bits a value", best.spec, bytes_text(best.bytes), best.bits);
    if (best.spec != r.f16.spec) out += fmt::format(", {:.1f} times smaller", double(r.f16.bytes) / double(best.bytes));
    out += fmt::format("{}.\n\n{}", changes(r), table(r));
    if (r.wish.by != By::bits)
        out += fmt::format("\"fit\": tokens{} that the memory holds with this cache. ",
                           r.wish.sequences > 1 ? " of each sequence" : "");
    if (r.measured()) {
        const CompareOptions& o = r.head.options;
        out +=
            fmt::format("Measured on {} of {} tokens of {}, {} weights,\neach token as if decoded alone; KL and top-1 "
                        "against the f16 cache (its floor against f32: {:.1e}).\n",
                        r.summary(best.spec).tokens, int64_t(o.window) * o.windows.front(), r.head.texts.front(),
                        r.head.weights, summarize(r.rows[1], r.rows[0]).kl_mean);
    } else {
        out += "Nothing was measured (--quick).\n";
    }
    out += fmt::format("\nrun it:        {}\nmeasure more:  {}\n", r.run_line(), r.measure_line());
    return out;
}

ordered_json to_json(const AdviceReport& r) {
    const bool by_bits = r.wish.by == By::bits;
    ordered_json out{{"kind", "kvmosaic advise 1"}, {"model", r.head.model},     {"model_sha256", r.head.model_sha256},
                     {"version", r.head.version},   {"machine", r.head.machine}, {"commit", r.head.commit},
                     {"command", r.head.command}};
    out["wish"] = {{"by", by_bits                   ? "bits"
                          : r.wish.by == By::memory ? "memory"
                                                    : "cache_memory"},
                   {"bytes", by_bits ? ordered_json() : ordered_json(r.wish.bytes)},
                   {"bits", by_bits ? ordered_json(r.wish.bits) : ordered_json()},
                   {"context", r.asked_context > 0 ? ordered_json(r.asked_context) : ordered_json()},
                   {"sequences", r.wish.sequences}};
    out["met"] = r.advice.met;
    out["reasons"] = r.advice.reasons;
    out["recommended"] = r.advice.picks.front().setting.spec;
    out["context"] = r.advice.context;
    out["trained_context"] = r.trained;
    out["weights_bytes"] = r.beside.weights;
    out["compute_bytes"] = r.beside.compute;
    out["budget_bytes"] = r.advice.budget;
    out["f16_bytes"] = r.f16.bytes;
    out["run"] = r.run_line();
    out["measure"] = r.measure_line();
    if (r.measured()) {
        const CompareOptions& o = r.head.options;
        out["measured_on"] = {{"text", r.head.texts.front()},
                              {"text_sha256", r.head.texts_sha256.front()},
                              {"weights", r.head.weights},
                              {"window", o.window},
                              {"windows", o.windows.front()},
                              {"score_from", o.score_from},
                              {"floor_kl", summarize(r.rows[1], r.rows[0]).kl_mean},
                              {"warnings", warnings(r.rows)}};
    }
    out["rows"] = ordered_json::array();
    for (const AdvicePick& p : r.advice.picks) {
        ordered_json row{{"spec", p.setting.spec},
                         {"method", p.setting.method},
                         {"role", name_of(p.role)},
                         {"fits", p.fits},
                         {"true_bits", p.setting.bits},
                         {"cache_bytes", p.setting.bytes},
                         {"total_bytes", p.setting.bytes + r.beside.all()},
                         {"tokens_that_fit", p.tokens > 0 ? ordered_json(p.tokens) : ordered_json()}};
        if (r.measured()) {
            const RowSummary m = r.summary(p.setting.spec);
            row.update({{"tokens", m.tokens},
                        {"kl_mean", m.kl_mean},
                        {"kl_error", m.kl_error},
                        {"top1", m.top1},
                        {"ppl", m.ppl},
                        {"ppl_ratio", m.ppl_ratio},
                        {"ppl_ratio_error", m.ppl_ratio_error},
                        {"true_bits_window", m.bits}});
        }
        out["rows"].push_back(std::move(row));
    }
    return out;
}

} // namespace kvmosaic::eval
