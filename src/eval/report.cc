#include "eval/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>

#include <fmt/format.h>

namespace kvmosaic::eval {

namespace {

constexpr const char* kStyle = R"(
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, "Liberation Sans", "DejaVu Sans", Arial, sans-serif; color: #1b1b1b; background: #fff;
  margin: 0 auto; padding: 1.5em; max-width: 62em; }
h1 { font-size: 1.6em; margin: 0 0 .2em; } h2 { font-size: 1.3em; margin: 1.6em 0 .3em; border-bottom: 2px solid #1b1b1b; }
h3 { font-size: 1.05em; margin: 1.4em 0 .2em; }
p { margin: .4em 0; max-width: 52em; }
.note, figcaption, caption { color: #444; font-size: .88em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1em 1em; margin: .6em 0; font-size: .92em; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
code { font: .92em "Liberation Mono", "DejaVu Sans Mono", Consolas, monospace; }
dd code, pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: .84em; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .4em 0; caption-side: bottom; }
th, td { padding: .18em .45em; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th { border-bottom: 1.5px solid #1b1b1b; font-weight: 600; }
td { white-space: nowrap; } th.left, td.left { text-align: left; white-space: normal; } td.left code { overflow-wrap: anywhere; }
th.left:first-child { width: 24%; }
tr.front td { font-weight: 600; } tr.reference td { color: #444; background: #f4f4f4; }
.scroll { overflow-x: auto; }
figure { margin: .6em 0 1.2em; } figure svg { width: 100%; height: auto; display: block; }
figure svg g, figure svg text, figure svg tspan { font-family: system-ui, "Liberation Sans", "DejaVu Sans", Arial, sans-serif; }
figure svg image { image-rendering: pixelated; }
.warning { border-left: 4px solid #b00; padding-left: .6em; }
@page { size: A4; margin: 14mm 12mm; }
@media print {
  body { font-size: 9.5pt; padding: 0; max-width: none; } table { font-size: 7.2pt; } .scroll { overflow: visible; }
  th, td { padding: .12em .28em; } h2, h3 { break-after: avoid; } figure, tr, dl { break-inside: avoid; }
  section + section { break-before: page; }
}
)";

std::string html(const std::string& text) {
    std::string out;
    for (const char c : text) {
        switch (c) {
        case '&':
            out += "&amp;";
            break;
        case '<':
            out += "&lt;";
            break;
        case '>':
            out += "&gt;";
            break;
        case '"':
            out += "&quot;";
            break;
        case '\'':
            out += "&#39;";
            break;
        default:
            out += static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' ? ' ' : c;
        }
    }
    return out;
}

// NaN where the field is no number.
double number(const Json& j, const char* field) {
    const auto at = j.find(field);
    return at == j.end() || !at->is_number() ? std::nan("") : at->get<double>();
}
std::string shown(double x, int digits) { return std::isfinite(x) ? fmt::format("{:.{}f}", x, digits) : ""; }
std::string kl_text(double kl) {
    return !std::isfinite(kl) ? "" : kl == 0 ? "0" : kl < 1e-3 ? fmt::format("{:.2e}", kl) : fmt::format("{:.5f}", kl);
}
// "a, b" for fields of joined results, each once.
std::string all_of(const std::vector<Json>& parts, const char* field) {
    std::vector<std::string> seen;
    for (const Json& part : parts) {
        std::string own = text_of(part, field);
        if (!own.empty() && std::find(seen.begin(), seen.end(), own) == seen.end()) seen.push_back(std::move(own));
    }
    return fmt::format("{}", fmt::join(seen, ", "));
}

std::string number_of(int64_t n) {
    const std::string digits = std::to_string(n);
    std::string out;
    for (size_t i = 0; i < digits.size(); ++i) {
        if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
        out += digits[i];
    }
    return out;
}

// Where a table's figures come from.
std::string origin(const Json& r, const std::vector<Json>& parts) {
    int64_t tokens = 0;
    for (const Json& row : r["rows"])
        tokens = std::max(tokens, row.value("tokens", int64_t(0)));
    return fmt::format("{} tokens scored; model {} (SHA-256 {}), {} weights; commit {}; {}", number_of(tokens),
                       std::filesystem::path(text_of(r, "model")).filename().string(),
                       text_of(r, "model_sha256").substr(0, 16), text_of(r, "weights"), all_of(parts, "commit"),
                       all_of(parts, "machine"));
}

std::string head(const Json& r, const std::vector<Json>& parts) {
    std::string out = "<dl>";
    const auto line = [&](const char* name, const std::string& value) {
        if (!value.empty()) out += fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, value);
    };
    const auto code = [](const std::string& text) { return text.empty() ? "" : "<code>" + html(text) + "</code>"; };
    line("model", html(text_of(r, "model")) + " " + code(text_of(r, "model_sha256")));
    line("weights", html(text_of(r, "weights")));
    if (r.contains("texts")) {
        for (const Json& text : r["texts"]) {
            line("text",
                 fmt::format("{}, {} {} <code>{}</code>", html(text_of(text, "text")), text.value("windows", 0),
                             text.value("windows", 0) == 1 ? "window" : "windows", html(text_of(text, "sha256"))));
        }
    } else {
        line("text", html(text_of(r, "text")) + " " + code(text_of(r, "text_sha256")));
    }
    int64_t tokens = 0;
    for (const Json& row : r["rows"])
        tokens = std::max(tokens, row.value("tokens", int64_t(0)));
    line("scored", fmt::format("{} tokens: {} {} of {}, each from token {} on; step {}", number_of(tokens),
                               r.value("windows", 0), r.value("windows", 0) == 1 ? "window" : "windows",
                               number_of(r.value("window", 0)), r.value("score_from", 0), html(text_of(r, "step"))));
    line("machine", html(all_of(parts, "machine")));
    line("program", html(fmt::format("kvmosaic {}, commit {}", all_of(parts, "version"), all_of(parts, "commit"))));
    for (const Json& part : parts)
        line("command", code(text_of(part, "command")));
    return out + "</dl>\n";
}

// One column of the table: its head, and what a row has there; left out where no row has anything.
struct Column {
    std::string head;
    std::function<std::string(const Json& row)> cell;
    bool left = false;
};

const std::vector<Column>& columns() {
    const auto fixed = [](const char* field, int digits, double factor) {
        return [=](const Json& row) {
            return text_of(row, "spec") == "floor" ? "" : shown(number(row, field) * factor, digits);
        };
    };
    const auto kl = [](const char* field, bool error) {
        return [=](const Json& row) -> std::string {
            if (text_of(row, "spec") == "f16") return error ? "reference" : "";
            const double spread = number(row, "kl_error");
            return kl_text(number(row, field)) +
                   (error && std::isfinite(spread) ? fmt::format(" ± {:.1g}", spread) : "");
        };
    };
    static const std::vector<Column> all{
        {"bits", fixed("true_bits", 2, 1)},
        {"key", fixed("true_bits_k", 2, 1)},
        {"value", fixed("true_bits_v", 2, 1)},
        {"at 2K", fixed("true_bits_2k", 2, 1)},
        {"at 8K", fixed("true_bits_8k", 2, 1)},
        {"at 32K", fixed("true_bits_32k", 2, 1)},
        {"MiB", fixed("cache_bytes", 2, 1.0 / (1 << 20))},
        {"PPL", fixed("ppl", 3, 1)},
        {"ratio", fixed("ppl_ratio", 4, 1)},
        {"KL mean", kl("kl_mean", true)},
        {"KL p99", kl("kl_p99", false)},
        {"top-1 %",
         [](const Json& row) { return text_of(row, "spec") == "f16" ? "" : shown(100 * number(row, "top1"), 2); }},
        {"tok/s", fixed("prefill_tok_s", 1, 1)},
        {"read", [](const Json& row) { return text_of(row, "spec") == "floor" ? "" : html(text_of(row, "path")); },
         true}};
    return all;
}

std::string table(const Json& r, const std::vector<Json>& parts) {
    std::vector<const Column*> kept;
    for (const Column& column : columns()) {
        const auto has = [&](const Json& row) { return !column.cell(row).empty(); };
        if (std::any_of(r["rows"].begin(), r["rows"].end(), has)) kept.push_back(&column);
    }
    std::string out = "<div class=\"scroll\"><table>\n<thead><tr><th class=\"left\">cache</th>";
    for (const Column* column : kept)
        out += fmt::format("<th{}>{}</th>", column->left ? " class=\"left\"" : "", column->head);
    out += "</tr></thead>\n<tbody>\n";
    const std::vector<Json> caches = caches_of(r);
    const std::vector<bool> front = on_front(caches);
    size_t next = 0;
    for (const Json& row : r["rows"]) {
        const std::string spec = text_of(row, "spec");
        const bool floor = spec == "floor", cache = next < caches.size() && caches[next] == row;
        const bool best = cache && front[next];
        next += cache;
        out +=
            fmt::format("<tr{}><td class=\"left\">{}</td>",
                        floor || spec == "f16" ? " class=\"reference\""
                        : best                 ? " class=\"front\""
                                               : "",
                        floor ? "floor: f16 against f32" : "<code>" + html(spec) + "</code>" + (best ? " \u25c6" : ""));
        for (const Column* column : kept)
            out += fmt::format("<td{}>{}</td>", column->left ? " class=\"left\"" : "", column->cell(row));
        out += "</tr>\n";
    }
    return out + fmt::format(
                     "</tbody>\n<caption>{}. \u25c6 and bold: no other row has as few bits and as little KL. ± is one "
                     "standard error.</caption></table></div>\n",
                     html(origin(r, parts)));
}

std::string figure(const std::string& title, const std::string& svg, const std::string& caption) {
    return fmt::format("<h3>{}</h3>\n<figure>{}<figcaption>{}</figcaption></figure>\n", html(title), svg,
                       html(caption));
}

std::string left_out(const Json& r) {
    const size_t n = caches_of(r).size();
    return n <= kMostLines ? "" : fmt::format(" {} of {} caches are drawn, those of the front first.", kMostLines, n);
}

// One section of the page, or why a plot could not be drawn.
Result<std::string> section(const Json& r, size_t index) {
    const std::vector<Json> parts = r.contains("parts") ? r["parts"].get<std::vector<Json>>() : std::vector<Json>{r};
    std::string out = fmt::format("<section>\n<h2>{}</h2>\n", html(result_name(r)));
    out += head(r, parts);
    for (const Json& text : r.value("warnings", Json::array()))
        if (text.is_string()) out += fmt::format("<p class=\"warning\">{}</p>\n", html(text.get<std::string>()));
    out += table(r, parts);
    struct Plot {
        const char *id, *title;
        Result<std::string> svg;
        std::string caption;
    };
    const auto name = [&](const char* id) { return fmt::format("r{}_{}", index, id); };
    const Json layers = r.value("layers", Json::object()), heat = r.value("heat", Json::object());
    std::vector<Plot> plots;
    plots.push_back({"pareto", "Quality against size", pareto_plot(name("pareto"), {r}, {result_name(r)}),
                     "Down and to the left is better. Each mark is a cache, its label what of its spec is not default; "
                     "bars are one "
                     "standard error. The dashed line is the best mean KL that any of these caches has at no more than "
                     "so many bits."});
    plots.push_back({"position", "KL by position in the window", position_plot(name("position"), r),
                     "Mean over the windows in equal parts of the scored positions. A cache that gets worse with the "
                     "context rises." +
                         left_out(r)});
    plots.push_back(
        {"layers", "KL by layer", layer_plot(name("layers"), r),
         fmt::format("Each layer alone has the cache, all others f16: {} {} of {} tokens.", layers.value("windows", 0),
                     layers.value("windows", 0) == 1 ? "window" : "windows", number_of(layers.value("window", 0)))});
    plots.push_back({"length", "Bits against context length", length_plot(name("length"), r),
                     "True bits of a sequence of that length, raw windows and tables included. Pages whose tiers "
                     "depend on the data "
                     "have the mean size that they had in the windows measured." +
                         left_out(r)});
    plots.push_back(
        {"memory", "Memory and speed", memory_plot(name("memory"), r),
         "Speed: tokens of the windows by the time the model took for them on this machine, beside other work; ratios "
         "of one run, not absolute claims."});
    plots.push_back(
        {"heat", "Channels of one head", heat_plot(name("heat"), heat),
         heat.empty()
             ? ""
             : fmt::format("Layer {}, KV head {}, keys after RoPE, {} tokens from the start of the first text; a "
                           "row is a page of 128 tokens, empty where a cache has not packed it. Rank correlation of "
                           "range and mean |q| over the channels: "
                           "{:.2f}. Caches with one width for all channels are not drawn.",
                           heat.value("layer", 0), heat.value("kv_head", 0), number_of(heat.value("tokens", 0)),
                           number(heat, "spearman"))});
    std::vector<std::string> missing;
    for (const Plot& plot : plots) {
        if (!plot.svg) return plot.svg.status();
        if (plot.svg->empty())
            missing.push_back(plot.title);
        else
            out += figure(plot.title, *plot.svg, plot.caption);
    }
    if (!missing.empty())
        out += fmt::format("<p class=\"note\">Not in this result: {}.</p>\n",
                           html(fmt::format("{}", fmt::join(missing, ", "))));
    return out + "</section>\n";
}

} // namespace

Result<std::string> html_report(const std::vector<Json>& results) {
    std::vector<std::string> names;
    for (const Json& r : results)
        names.push_back(result_name(r));
    const std::string title = results.size() == 1 ? names.front() : fmt::format("{} results", results.size());
    std::string out = fmt::format(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\" />\n<meta name=\"viewport\" "
        "content=\"width=device-width, initial-scale=1\" />\n<title>kvmosaic: {}</title>\n<style>{}</style>\n"
        "</head>\n<body>\n<h1>What K/V caches cost and lose</h1>\n",
        html(title), kStyle);
    out += "<p>Each cache reads the same text as an f16 cache does and predicts every next token. <b>True bits</b> are "
           "all bytes that "
           "hold the tokens by the values they stand for: codes, scales, offsets, maps, padding and raw windows. "
           "<b>KL</b> is the "
           "divergence, in nats, of a cache's prediction from that of the f16 cache, mean over the tokens scored; "
           "<b>top-1</b> is how "
           "often both name the same token. The <b>floor</b> is the f16 cache against an f32 cache: differences of "
           "that size are "
           "rounding.</p>\n";
    if (results.size() > 1) {
        const Result<std::string> all = pareto_plot("all", results, names);
        if (!all) return all.status();
        if (!all->empty()) {
            out += figure("All results", *all,
                          "A mark for each cache of each result, labelled where it is on its result's front. KL of "
                          "different models or texts have different references; compare shapes, not heights.");
        }
    }
    for (size_t i = 0; i < results.size(); ++i) {
        const Result<std::string> part = section(results[i], i);
        if (!part) return part.status();
        out += *part;
    }
    return out + "</body>\n</html>\n";
}

} // namespace kvmosaic::eval
