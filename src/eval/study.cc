#include "eval/study.h"

#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "eval/shares.h"
#include "eval/tune_layers.h"

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

constexpr const char* kKind = "kvmosaic study 1";

ordered_json with_positions(const Measured& m) {
    ordered_json out = to_json(m);
    out["text"] = m.text;
    out["kl_each"] = ordered_json::array();
    for (const float kl : m.kl_each) // short, and the same when read back
        out["kl_each"].push_back(std::stod(fmt::format("{:.6g}", kl)));
    if (!m.right.empty()) out["right"] = m.right;
    return out;
}

Measured measured_from(const ordered_json& j) {
    Measured m;
    j.at("text").get_to(m.text);
    m.bits = j.at("true_bits").is_number() ? j.at("true_bits").get<double>() : NAN;
    if (j.contains("right")) j["right"].get_to(m.right);
    if (!j.contains("tokens")) return m;
    j.at("tokens").get_to(m.tokens);
    j.at("true_bits_window").get_to(m.bits_window);
    j.at("kl_mean").get_to(m.kl);
    j.at("kl_error").get_to(m.kl_error);
    j.at("kl_p99").get_to(m.kl_p99);
    j.at("ppl_ratio").get_to(m.ppl_ratio);
    j.at("ppl_ratio_error").get_to(m.ppl_ratio_error);
    j.at("top1").get_to(m.top1);
    j.at("kl_each").get_to(m.kl_each);
    j.at("path").get_to(m.path);
    j.at("isa").get_to(m.isa);
    return m;
}

ordered_json to_json(const Trial& t) {
    ordered_json out{{"label", t.label}, {"values", t.values}, {"spec", t.spec}, {"widths", to_json(t.widths)}};
    out["search"] = with_positions(t.search);
    out["elsewhere"] = ordered_json::array();
    for (const Measured& m : t.elsewhere)
        out["elsewhere"].push_back(with_positions(m));
    return out;
}

Trial trial_from(const ordered_json& j) {
    Trial t;
    j.at("label").get_to(t.label);
    j.at("values").get_to(t.values);
    j.at("spec").get_to(t.spec);
    t.widths = widths_from(j.at("widths"));
    t.search = measured_from(j.at("search"));
    for (const ordered_json& m : j.at("elsewhere"))
        t.elsewhere.push_back(measured_from(m));
    return t;
}

} // namespace

double Measured::accuracy() const {
    return double(std::accumulate(right.begin(), right.end(), int64_t(0))) / double(right.size());
}

ordered_json to_json(const Measured& m) {
    const ordered_json bits = std::isfinite(m.bits) ? ordered_json(m.bits) : ordered_json();
    ordered_json out{{"true_bits", bits}};
    if (m.tokens > 0 || m.right.empty())
        out = {{"tokens", m.tokens},
               {"true_bits", bits},
               {"true_bits_window", m.bits_window},
               {"kl_mean", m.kl},
               {"kl_error", m.kl_error},
               {"kl_p99", m.kl_p99},
               {"ppl_ratio", m.ppl_ratio},
               {"ppl_ratio_error", m.ppl_ratio_error},
               {"top1", m.top1},
               {"path", m.path},
               {"isa", m.isa}};
    if (m.right.empty()) return out;
    const int64_t hits = std::accumulate(m.right.begin(), m.right.end(), int64_t(0));
    const Interval range = wilson(hits, int64_t(m.right.size()));
    out.update(ordered_json{{"problems", m.right.size()},
                            {"hits", hits},
                            {"accuracy", m.accuracy()},
                            {"accuracy_low", range.low},
                            {"accuracy_high", range.high}});
    return out;
}

ordered_json to_json(const std::vector<WidthPair>& widths) {
    ordered_json out = ordered_json::array();
    for (const WidthPair& pair : widths)
        out.push_back({pair.key, pair.value});
    return out;
}

std::vector<WidthPair> widths_from(const ordered_json& j) {
    std::vector<WidthPair> out;
    for (const ordered_json& pair : j)
        out.push_back({pair.at(0).get<int32_t>(), pair.at(1).get<int32_t>()});
    return out;
}

const Measured* Trial::on(const std::string& text) const {
    for (const Measured& m : elsewhere)
        if (m.text == text) return &m;
    return nullptr;
}

std::string name_of(const Trial& trial, const ordered_json& head) {
    if (!trial.label.empty()) return trial.label;
    if (!trial.widths.empty()) return text_of(trial.widths);
    std::string out;
    for (size_t i = 0; i < trial.values.size(); ++i)
        out +=
            fmt::format("{}{}={}", i ? "," : "", head.at("space").at(i).at("name").get<std::string>(), trial.values[i]);
    return out;
}

Objective Study::objective() const {
    return head.value("objective", std::string("kl")) == "gsm8k" ? Objective::gsm8k : Objective::kl;
}

double Study::loss(const Measured& m) const { return objective() == Objective::kl ? m.kl : 1 - m.accuracy(); }

Status Study::save() const {
    std::string text = head.dump() + "\n";
    for (const Trial& trial : trials)
        text += to_json(trial).dump() + "\n";
    return write_file(path, text);
}

Result<Study> open_study(const std::string& path, const ordered_json& head, const std::vector<std::string>& fields) {
    Study out{path, head, {}};
    out.head["kind"] = kKind;
    if (!exists(path)) return out;
    const Result<std::string> file = read_file(path);
    if (!file) return file.status();
    const auto wrong = [&](StatusCode code, const std::string& why) {
        return Status(code, fmt::format("--study {}{}", path, why));
    };
    size_t at = 0, problems = 0; // problems: whose answers each result has
    for (int number = 1; number == 1 || at < file->size(); ++number) {
        const size_t end = std::min(file->find('\n', at), file->size());
        ordered_json j = ordered_json::parse(file->substr(at, end - at), nullptr, false);
        at = end + 1;
        if (number > 1) {
            try {
                out.trials.push_back(trial_from(j));
            } catch (const nlohmann::json::exception& bad) {
                return wrong(StatusCode::corrupt, fmt::format(", line {}: is not a result: {}", number, bad.what()));
            }
            const size_t values = out.trials.back().values.size(), answers = out.trials.back().search.right.size();
            if (answers != problems) {
                return wrong(StatusCode::corrupt, fmt::format(", line {}: has {} answers, the search is over {}",
                                                              number, answers, problems));
            }
            if (values == 0 || values == out.head["space"].size()) continue;
            return wrong(StatusCode::corrupt, fmt::format(", line {}: has {} values, the search tunes {}", number,
                                                          values, out.head["space"].size()));
        }
        if (!j.is_object() || !j.contains("kind") || j["kind"] != kKind || !j.contains("space"))
            return wrong(StatusCode::invalid_argument, ": is not the file of a search; name a new file");
        if (!j.contains("objective")) j["objective"] = "kl"; // of a time that knew no other
        for (const std::string& field : fields) {
            if (j.contains(field) && j[field] == head.at(field)) continue;
            return wrong(StatusCode::invalid_argument,
                         fmt::format(": belongs to another search ({} is {} there, {} here); name a new file", field,
                                     j.contains(field) ? j[field].dump() : "not", head.at(field).dump()));
        }
        out.head = j;
        if (out.objective() == Objective::gsm8k && j.contains("questions")) problems = j["questions"].get<size_t>();
    }
    return out;
}

} // namespace kvmosaic::eval
