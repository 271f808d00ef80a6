#include "eval/results.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

constexpr const char* kProgressKind = "kvmosaic compare progress 2";

const char* name_of(StepMode step) { return step == StepMode::decode ? "decode" : "chunk"; }

// One text as its checksum; several with the windows of all but the last, since those say which window is which.
std::string identity_of_texts(const CompareHead& head) {
    std::string out;
    for (size_t i = 0; i < head.texts_sha256.size(); ++i) {
        out += (i ? "+" : "") + head.texts_sha256[i];
        if (i + 1 < head.texts_sha256.size()) out += fmt::format(":{}", head.options.windows[i]);
    }
    return out;
}

// The fields that must be equal for windows of two runs to belong together.
ordered_json identity(const CompareHead& head) {
    ordered_json out{{"model_sha256", head.model_sha256}, {"text_sha256", identity_of_texts(head)},
                     {"weights", head.weights},           {"version", head.version},
                     {"window", head.options.window},     {"score_from", head.options.score_from},
                     {"ubatch", head.options.ubatch},     {"step", name_of(head.options.step)},
                     {"attend", attend_setting()}};
    if (head.options.context > 0) out["match_ctx"] = head.options.context;
    return out;
}

// {"512": bits, "1024": ...}; lengths that nothing tells are left out.
ordered_json curve_json(const BitsCurve& curve) {
    ordered_json out = ordered_json::object();
    for (size_t i = 0; i < curve.size(); ++i)
        if (std::isfinite(curve[i])) out[std::to_string(kCurve[i])] = curve[i];
    return out;
}

ordered_json window_json(const WindowResult& w) {
    return {{"nll", w.nll},
            {"kl", w.kl},
            {"agree", w.agree},
            {"tokens", w.tokens},
            {"seconds", w.seconds},
            {"cache_bytes", w.cache_bytes},
            {"bits", w.bits},
            {"bits_key", w.bits_key},
            {"bits_value", w.bits_value},
            {"curve", curve_json(w.curve)},
            {"bits_context", number_json(w.bits_context)},
            {"non_finite", w.non_finite},
            {"path", w.path},
            {"isa", w.isa}};
}

WindowResult window_from(const ordered_json& j) {
    WindowResult w;
    j.at("nll").get_to(w.nll);
    j.at("kl").get_to(w.kl);
    j.at("agree").get_to(w.agree);
    j.at("tokens").get_to(w.tokens);
    j.at("seconds").get_to(w.seconds);
    j.at("cache_bytes").get_to(w.cache_bytes);
    j.at("bits").get_to(w.bits);
    j.at("bits_key").get_to(w.bits_key);
    j.at("bits_value").get_to(w.bits_value);
    for (size_t i = 0; i < w.curve.size(); ++i) {
        const auto told = j.at("curve").find(std::to_string(kCurve[i]));
        if (told != j.at("curve").end()) told->get_to(w.curve[i]);
    }
    if (const auto bits = j.find("bits_context"); bits != j.end() && bits->is_number()) bits->get_to(w.bits_context);
    j.at("non_finite").get_to(w.non_finite);
    j.at("path").get_to(w.path);
    j.at("isa").get_to(w.isa);
    return w;
}

bool same_row(const ordered_json& a, const ordered_json& b) {
    return (a.at("spec") == "floor") == (b.at("spec") == "floor") && a.at("canonical") == b.at("canonical") &&
           a.value("layer", -1) == b.value("layer", -1);
}

// A later run may ask for fewer specs or windows than the file holds; what it holds is not thrown away.
void keep_others(const std::string& path, ordered_json* out) {
    const Result<std::string> text = exists(path) ? read_file(path) : Status(StatusCode::not_found, path);
    const ordered_json old = text ? ordered_json::parse(*text, nullptr, false) : ordered_json();
    if (!old.is_object() || !old.contains("rows")) return; // load_progress has refused what is no progress
    for (const ordered_json& entry : old["rows"]) {
        bool found = false;
        for (ordered_json& row : (*out)["rows"]) {
            if (!same_row(row, entry)) continue;
            found = true;
            if (entry.at("windows").size() > row.at("windows").size()) row = entry;
        }
        if (!found) (*out)["rows"].push_back(entry);
    }
}

// KL with three digits over its whole range, 0 as 0.
std::string kl_text(double kl) {
    return kl == 0 ? "0" : kl < 1e-3 ? fmt::format("{:.2e}", kl) : fmt::format("{:.5f}", kl);
}

} // namespace

ordered_json number_json(double x) { return std::isfinite(x) ? ordered_json(x) : ordered_json(); }

ordered_json to_json(const CompareHead& head, const std::vector<Row>& rows) {
    const CompareOptions& o = head.options;
    ordered_json out{{"model", head.model},
                     {"model_sha256", head.model_sha256},
                     {"text", fmt::format("{}", fmt::join(head.texts, ", "))},
                     {"machine", head.machine},
                     {"version", head.version},
                     {"commit", head.commit},
                     {"command", head.command},
                     {"text_sha256", fmt::format("{}", fmt::join(head.texts_sha256, ", "))},
                     {"weights", head.weights},
                     {"window", o.window},
                     {"windows", o.all_windows()},
                     {"score_from", o.score_from},
                     {"ubatch", o.ubatch},
                     {"step", name_of(o.step)},
                     {"attend", attend_setting()},
                     {"warnings", warnings(rows)},
                     {"rows", ordered_json::array()},
                     {"texts", ordered_json::array()}};
    const std::vector<int32_t> edges = position_edges(o, kPositionParts);
    out["position_edges"] = edges;
    out["curve_tokens"] = kCurve;
    for (size_t i = 0; i < head.texts.size(); ++i) {
        out["texts"].push_back({{"text", head.texts[i]}, {"sha256", head.texts_sha256[i]}, {"windows", o.windows[i]}});
    }
    for (const Row& row : rows) {
        const RowSummary s = summarize(row, rows.front());
        const bool floor = row.spec == "floor"; // its own perplexity was not kept, only its distance
        const double values = s.bits > 0 ? 8.0 * double(s.cache_bytes) / s.bits / o.window : 0; // values of a token
        const double far = s.curve[kAt32K] / 8 * values * double(kCurve[kAt32K]);
        ordered_json curve = ordered_json::array(), parts = ordered_json::array();
        for (const double bits : s.curve)
            curve.push_back(number_json(bits));
        for (const double kl : kl_by_position(row, edges))
            parts.push_back(number_json(kl));
        out["rows"].push_back(
            {{"spec", row.spec},
             {"tokens", s.tokens},
             {"true_bits", s.bits},
             {"true_bits_k", s.bits_key},
             {"true_bits_v", s.bits_value},
             {"cache_bytes", s.cache_bytes},
             {"ppl", s.ppl},
             {"kl_mean", s.kl_mean},
             {"kl_p99", s.kl_p99},
             {"top1", s.top1},
             {"prefill_tok_s", s.tokens_per_second},
             {"path", s.path},
             {"isa", s.isa},
             {"reference", row.reference},
             {"canonical", row.canonical},
             {"ppl_error", s.ppl_error},
             {"kl_error", s.kl_error},
             {"non_finite", s.non_finite},
             {"true_bits_2k", number_json(s.curve[kAt2K])},
             {"true_bits_8k", number_json(s.curve[kAt8K])},
             {"ppl_ratio", floor ? ordered_json() : number_json(s.ppl_ratio)},
             {"ppl_ratio_error", floor ? ordered_json() : number_json(s.ppl_ratio_error)},
             {"true_bits_32k", number_json(s.curve[kAt32K])},
             {"cache_bytes_32k", std::isfinite(far) ? ordered_json(std::llround(far)) : ordered_json()},
             {"true_bits_curve", std::move(curve)},
             {"kl_by_position", std::move(parts)}});
    }
    return out;
}

std::string to_table(const std::vector<Row>& rows) {
    size_t wide = 24;
    for (const Row& row : rows)
        wide = std::max(wide, row.spec.size());
    std::string out = fmt::format("{:<{}}  {:>6} {:>6} {:>6} {:>6} {:>6}  {:>8}  {:>9} {:>7} {:>8}  {:>9} {:>9} {:>9}  "
                                  "{:>7}  {:>7}  {}\n",
                                  "cache", wide, "bits", "key", "value", "at 2K", "at 8K", "MiB", "ppl", "+-", "ratio",
                                  "KL mean", "+-", "KL p99", "top-1 %", "tok/s", "path");
    const auto bits_text = [](double bits) { return std::isfinite(bits) ? fmt::format("{:.2f}", bits) : "?"; };
    for (const Row& row : rows) {
        const RowSummary s = summarize(row, rows.front());
        const bool floor = row.spec == "floor";
        const std::string path = s.path == "raw" ? s.path : fmt::format("{} ({})", s.path, s.isa);
        if (floor) {
            out += fmt::format("{:<{}}  {:>34}  {:>8}  {:>26}  ", "floor (f16 against f32)", wide, "", "", "");
        } else {
            out += fmt::format("{:<{}}  {:>6.2f} {:>6.2f} {:>6.2f} {:>6} {:>6}  {:>8.2f}  {:>9.4f} {:>7.3f} {:>8.4f}  ",
                               row.spec, wide, s.bits, s.bits_key, s.bits_value, bits_text(s.curve[kAt2K]),
                               bits_text(s.curve[kAt8K]), double(s.cache_bytes) / (1 << 20), s.ppl, s.ppl_error,
                               s.ppl_ratio);
        }
        if (row.spec == row.reference)
            out += fmt::format("{:>9} {:>9} {:>9}  {:>7}", "reference", "", "", "");
        else {
            out += fmt::format("{:>9} {:>9} {:>9}  {:>7.2f}", kl_text(s.kl_mean), kl_text(s.kl_error),
                               kl_text(s.kl_p99), 100 * s.top1);
        }
        out += floor ? "\n" : fmt::format("  {:>7.1f}  {}\n", s.tokens_per_second, path);
    }
    return out;
}

std::vector<std::string> warnings(const std::vector<Row>& rows) {
    std::vector<std::string> out;
    const auto floor = std::find_if(rows.begin(), rows.end(), [](const Row& r) { return r.spec == "floor"; });
    const double level = floor == rows.end() ? 0 : summarize(*floor, rows.front()).kl_mean;
    for (const Row& row : rows) {
        const RowSummary s = summarize(row, rows.front());
        if (row.spec != "floor" && row.spec != row.reference && s.tokens > 0 && level > 0.1 * s.kl_mean) {
            out.push_back(fmt::format("the floor (KL {}: a 16-bit cache against a 32-bit one, same weights) is above a "
                                      "tenth of the KL of {} ({}); that row's KL is partly rounding of the model",
                                      kl_text(level), row.spec, kl_text(s.kl_mean)));
        }
        if (row.spec != "floor" && s.non_finite > 0) {
            out.push_back(fmt::format("{}: {} NaN or infinite values came into the cache", row.spec, s.non_finite));
        }
    }
    return out;
}

Status save_progress(const std::string& path, const CompareHead& head, const std::vector<Row>& rows) {
    ordered_json out{{"kind", kProgressKind}, {"identity", identity(head)}, {"rows", ordered_json::array()}};
    for (const Row& row : rows) {
        ordered_json windows = ordered_json::array();
        for (const WindowResult& w : row.windows)
            windows.push_back(window_json(w));
        ordered_json entry{{"spec", row.spec}, {"canonical", row.canonical}, {"windows", std::move(windows)}};
        if (row.layer >= 0) entry["layer"] = row.layer;
        out["rows"].push_back(std::move(entry));
    }
    keep_others(path, &out);
    return write_file(path, out.dump() + "\n");
}

Status load_progress(const std::string& path, const CompareHead& head, std::vector<Row>* rows) {
    if (!exists(path)) return {};
    const Result<std::string> text = read_file(path);
    if (!text) return text.status();
    const ordered_json file = ordered_json::parse(*text, nullptr, false);
    if (file.is_discarded() || !file.is_object() || !file.contains("kind") || file["kind"] != kProgressKind) {
        return {StatusCode::invalid_argument,
                fmt::format("--resume {}: is not the progress of a comparison; name a new file", path)};
    }
    try {
        const ordered_json want = identity(head);
        for (const auto& [field, value] : want.items()) {
            const ordered_json have = file.at("identity").value(field, ordered_json());
            if (have != value) {
                return {StatusCode::invalid_argument,
                        fmt::format("--resume {}: belongs to another comparison ({} is {} there, {} here); name a new "
                                    "file",
                                    path, field, have.dump(), value.dump())};
            }
        }
        for (const ordered_json& entry : file.at("rows")) {
            for (Row& row : *rows) {
                const bool same = (row.spec == "floor") == (entry.at("spec") == "floor") &&
                                  entry.at("canonical") == row.canonical && entry.value("layer", -1) == row.layer;
                if (!same || !row.windows.empty()) continue;
                for (const ordered_json& w : entry.at("windows")) {
                    if (int32_t(row.windows.size()) < head.options.all_windows()) row.windows.push_back(window_from(w));
                }
            }
        }
    } catch (const nlohmann::json::exception& bad) {
        return {StatusCode::corrupt, fmt::format("--resume {}: contradicts itself: {}", path, bad.what())};
    }
    return {};
}

} // namespace kvmosaic::eval
