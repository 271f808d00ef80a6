// Which results a page shows: their checks, and those that belong together.
#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include "eval/report.h"

namespace kvmosaic::eval {

namespace {

// What must be equal for rows of two results to stand in one table.
Json identity(const Json& r) {
    Json out = Json::array();
    for (const char* field :
         {"model_sha256", "weights", "text_sha256", "window", "windows", "score_from", "ubatch", "step"})
        out.push_back(r.value(field, Json()));
    out.push_back(r.value("attend", Json("exact"))); // older results do not say it
    return out;
}

} // namespace

Status check_result(const Json& r) {
    const auto wrong = [](const std::string& text) { return Status(StatusCode::invalid_argument, text); };
    if (!r.is_object()) return wrong("is not a JSON object");
    for (const char* field : {"model", "model_sha256", "text", "weights"})
        if (text_of(r, field).empty())
            return wrong(fmt::format("has no text in the field '{}', as results of compare have", field));
    if (!r.contains("rows") || !r["rows"].is_array()) return wrong("has no list 'rows', as results of compare have");
    for (const Json& row : r["rows"]) {
        if (!row.is_object() || text_of(row, "spec").empty()) return wrong("has a row without 'spec'");
        for (const char* field : {"tokens", "true_bits", "kl_mean"}) {
            if (!row.contains(field) || !row[field].is_number())
                return wrong(fmt::format("row '{}' has no number '{}', as results of compare have",
                                         text_of(row, "spec"), field));
        }
    }
    return {};
}

std::vector<Json> join_results(const std::vector<Json>& results) {
    std::vector<Json> out;
    for (const Json& r : results) {
        const auto same =
            std::find_if(out.begin(), out.end(), [&](const Json& o) { return identity(o) == identity(r); });
        if (same == out.end()) {
            out.push_back(r);
            continue;
        }
        Json& to = *same;
        if (!to.contains("parts")) {
            Json first = to;
            first.erase("rows"), first.erase("layers"), first.erase("heat");
            to["parts"] = Json::array({std::move(first)});
        }
        Json part = r;
        part.erase("rows"), part.erase("layers"), part.erase("heat");
        to["parts"].push_back(std::move(part));
        const auto add = [](Json& rows, const Json& more) {
            const auto name = [](const Json& row) {
                return text_of(row, "spec") == "floor" ? "floor" : row.value("canonical", text_of(row, "spec"));
            };
            for (const Json& row : more) {
                if (std::none_of(rows.begin(), rows.end(), [&](const Json& own) { return name(own) == name(row); }))
                    rows.push_back(row);
            }
        };
        add(to["rows"], r["rows"]);
        for (const Json& text : r.value("warnings", Json::array())) {
            Json& known = to["warnings"];
            if (std::find(known.begin(), known.end(), text) == known.end()) known.push_back(text);
        }
        if (r.contains("layers")) {
            if (to.contains("layers"))
                add(to["layers"]["rows"], r["layers"]["rows"]);
            else
                to["layers"] = r["layers"];
        }
        if (r.contains("heat") && !to.contains("heat")) to["heat"] = r["heat"];
    }
    return out;
}

std::string result_name(const Json& r) {
    std::vector<std::string> texts;
    if (r.contains("texts")) {
        for (const Json& text : r["texts"])
            texts.push_back(std::filesystem::path(text_of(text, "text")).filename().string());
    } else {
        texts.push_back(std::filesystem::path(text_of(r, "text")).filename().string());
    }
    return fmt::format("{} on {}", std::filesystem::path(text_of(r, "model")).stem().string(),
                       fmt::join(texts, " and "));
}

} // namespace kvmosaic::eval
