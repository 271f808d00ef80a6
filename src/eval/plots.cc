#include "eval/plots.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/gnuplot.h"
#include "eval/labels.h"
#include "eval/pareto.h"

namespace kvmosaic::eval {

namespace {

// Colours that differ for the colour-blind (Okabe and Ito); markers and dashes differ on paper without colour.
constexpr const char* kColours[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                    "#B07D00", "#4FA3D1", "#000000", "#7A6A00"};
constexpr int kMarkers[] = {7, 5, 9, 13, 11, 15, 6, 4, 8, 12, 10, 14, 3, 2, 1};
const char* colour(size_t i) { return kColours[i % std::size(kColours)]; }
int marker(size_t i) { return kMarkers[i % std::size(kMarkers)]; }

std::string family_of(const std::string& spec) { return spec.substr(0, spec.find(':')); }

// What distinguishes a spec from others of its method.
std::string options_of(const std::string& spec) {
    const std::string plain = short_spec(spec, 1000);
    const size_t colon = plain.find(':');
    return colon == std::string::npos ? "" : short_spec(plain.substr(colon + 1), 26);
}

// Where in a plot things lie: pixels, and logarithmic axes.
struct Frame {
    double width = 880, height = 500, left = 84, right = 168, bottom = 62, top = 16;
    double x0 = 1, x1 = 2, y0 = 1, y1 = 2;
    double inner_width() const { return width - left - right; }
    double inner_height() const { return height - top - bottom; }
    double px(double x) const { return std::log(x / x0) / std::log(x1 / x0) * inner_width(); }
    double py(double y) const { return std::log(y / y0) / std::log(y1 / y0) * inner_height(); }
    std::string margins() const { // and the legend to the right of them
        return fmt::format(
            "set key at screen {:.5f}, screen {:.5f} left top vertical Left reverse samplen 1.4 spacing 1 "
            "font ',11'\nset lmargin at screen {:.5f}\nset rmargin at screen {:.5f}\nset bmargin at screen {:.5f}\n"
            "set tmargin at screen {:.5f}\n",
            1 - (right - 6) / width, 1 - top / height, left / width, 1 - right / width, bottom / height,
            1 - top / height);
    }
};

constexpr const char* kStyle = "set border 3 lw 0.8 lc rgb '#444444'\nset tics nomirror out scale 0.6\n"
                               "set grid lc rgb '#dddddd' lw 0.6 dt 1\nset format y '%g'\n";

std::string bit_tics(double from, double to) {
    std::string out;
    for (const double x : {1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0})
        if (x >= from && x <= to) out += fmt::format("{}{}", out.empty() ? "" : ",", x);
    return "set xtics (" + out + ")\n";
}

struct Mark {
    double bits = 0, kl = 0, error = 0;
    std::string series, label;
    bool front = false;
};

std::string data_of(const std::vector<Mark>& points, const std::string& series) {
    std::string out;
    for (const Mark& p : points)
        if (p.series == series)
            out += fmt::format("{:.8g} {:.8g} {:.8g} {:.8g}\n", p.bits, p.kl, std::max(p.kl - p.error, p.kl / 10),
                               p.kl + p.error);
    return out;
}

// The best KL at no more than so many bits: a line to the right and down.
std::vector<std::pair<double, double>> steps_of(std::vector<Mark> points, const std::string& series, double last) {
    std::erase_if(points, [&](const Mark& p) { return !p.front || (!series.empty() && p.series != series); });
    std::sort(points.begin(), points.end(), [](const Mark& a, const Mark& b) { return a.bits < b.bits; });
    std::vector<std::pair<double, double>> out;
    for (const Mark& p : points)
        out.emplace_back(p.bits, p.kl);
    if (!out.empty()) out.emplace_back(last, out.back().second);
    return out;
}

// Lines for the two references where they lie in the frame, else a word on where they are.
std::string references(const Json& result, Frame& f) {
    std::string out;
    for (const Json& row : result.value("rows", Json::array())) {
        const std::string spec = text_of(row, "spec");
        if (spec == "floor" && row.value("kl_mean", 0.0) > 0) {
            const double kl = row["kl_mean"];
            if (kl > f.y0 / 8) {
                f.y0 = std::min(f.y0, kl / 1.5);
                out += fmt::format("set arrow from graph 0, first {0:.6g} to graph 1, first {0:.6g} nohead dt 3 lw 1.2 "
                                   "lc rgb '#444444'\nset label 'floor: f16 against f32' at graph 0.01, first {0:.6g} "
                                   "offset 0,-0.6 font ',11'\n",
                                   kl);
            } else {
                out += fmt::format("set label {} at graph 0.01, graph 0.025 font ',11' tc rgb '#444444'\n",
                                   gnuplot_text(fmt::format("\u2193 floor, f16 against f32: KL {:.1e}", kl)));
            }
        }
        if (spec == "f16" && row.value("true_bits", 0.0) > 0) {
            const double bits = row["true_bits"];
            if (bits < f.x1) {
                out += fmt::format(
                    "set arrow from {0:.6g}, graph 0 to {0:.6g}, graph 1 nohead dt 3 lw 1.2 lc rgb "
                    "'#444444'\nset label 'f16: KL 0' at {0:.6g}, graph 0.97 right offset -0.5,0 font ',11'\n",
                    bits);
            } else {
                out += fmt::format("set label {} at graph 0.99, graph 0.025 right font ',11' tc rgb '#444444'\n",
                                   gnuplot_text(fmt::format("f16: {:.2f} bits, KL 0 \u2192", bits)));
            }
        }
    }
    return out;
}

} // namespace

std::string text_of(const Json& j, const char* field) {
    const auto at = j.find(field);
    return at == j.end() || !at->is_string() ? "" : at->get<std::string>();
}

std::vector<Json> caches_of(const Json& result) {
    std::vector<Json> out;
    for (const Json& row : result.value("rows", Json::array())) {
        const std::string spec = text_of(row, "spec");
        const auto told = [&](const char* field) { return row.contains(field) && row[field].is_number(); };
        if (spec != "f16" && spec != "floor" && told("true_bits") && told("kl_mean")) out.push_back(row);
    }
    return out;
}

std::vector<bool> on_front(const std::vector<Json>& rows) {
    const auto point = [](const Json& row) { return Point{row["true_bits"], row["kl_mean"]}; };
    std::vector<bool> out;
    for (const Json& mine : rows) {
        const auto better = [&](const Json& other) { return dominates(point(other), point(mine)); };
        out.push_back(std::none_of(rows.begin(), rows.end(), better));
    }
    return out;
}

std::string short_spec(const std::string& spec, size_t most) {
    std::string out = spec;
    for (size_t at = out.find("calib="); at != std::string::npos; at = out.find("calib=")) {
        const size_t end = out.find(',', at);
        out.erase(at, end == std::string::npos ? end : end + 1 - at);
    }
    if (!out.empty() && (out.back() == ',' || out.back() == ':')) out.pop_back();
    if (out.size() <= most) return out;
    const size_t head = (most - 1) / 2;
    return out.substr(0, head) + "\u2026" + out.substr(out.size() - (most - 1 - head));
}

Result<std::string> pareto_plot(const std::string& name, const std::vector<Json>& results,
                                const std::vector<std::string>& names) {
    const bool several = results.size() > 1;
    std::vector<Mark> points;
    std::vector<std::string> series;
    for (size_t r = 0; r < results.size(); ++r) {
        const std::vector<Json> rows = caches_of(results[r]);
        const std::vector<bool> front = on_front(rows);
        for (size_t i = 0; i < rows.size(); ++i) {
            const std::string spec = text_of(rows[i], "spec");
            Mark p{rows[i]["true_bits"], rows[i]["kl_mean"], rows[i].value("kl_error", 0.0), "", "", front[i]};
            if (!(p.kl > 0) || !(p.bits > 0)) continue;
            p.series = several ? names[r] : family_of(spec);
            p.label = several ? (p.front ? short_spec(spec, 30) : "") : options_of(spec);
            points.push_back(std::move(p));
            if (std::find(series.begin(), series.end(), points.back().series) == series.end())
                series.push_back(points.back().series);
        }
    }
    if (points.empty()) return std::string();
    const auto [fewest, most] =
        std::minmax_element(points.begin(), points.end(), [](const Mark& a, const Mark& b) { return a.bits < b.bits; });
    const auto [least, worst] =
        std::minmax_element(points.begin(), points.end(), [](const Mark& a, const Mark& b) { return a.kl < b.kl; });
    Frame f;
    f.x0 = fewest->bits * 0.94, f.x1 = most->bits * 1.08;
    f.y0 = least->kl / 2, f.y1 = worst->kl * 1.6;
    std::string script = kStyle;
    if (!several) script += references(results.front(), f);
    std::vector<Label> labels;
    for (const Mark& p : points)
        labels.push_back({f.px(p.bits), f.py(p.kl), p.label});
    std::vector<Box> lines{{0, 0.35 * f.inner_width(), 0, 20},
                           {0.7 * f.inner_width(), f.inner_width(), 0, 20}}; // references
    std::vector<std::string> fronts;
    for (size_t i = 0; i < (several ? series.size() : 1); ++i) {
        const auto front = steps_of(points, several ? series[i] : "", f.x1);
        fronts.emplace_back();
        for (size_t n = 0; n < front.size(); ++n) {
            const auto& [x, y] = front[n];
            fronts.back() += fmt::format("{:.8g} {:.8g}\n", x, y);
            if (n + 1 == front.size()) break;
            const auto& [next_x, next_y] = front[n + 1];
            lines.push_back({f.px(x), f.px(next_x), f.py(y) - 1, f.py(y) + 1});
            lines.push_back({f.px(next_x) - 1, f.px(next_x) + 1, f.py(next_y), f.py(y)});
        }
    }
    constexpr double kSize = 11;
    place_labels(&labels, f.inner_width(), f.inner_height(), kSize, lines);
    for (const Label& l : labels) {
        if (l.text.empty()) continue;
        const double x = l.at_x / f.inner_width(), y = l.at_y / f.inner_height();
        script += fmt::format("set label {} at graph {:.5f}, graph {:.5f} center font ',{}'\n", gnuplot_text(l.text), x,
                              y, kSize);
        if (l.led) {
            script +=
                fmt::format("set arrow from graph {:.5f}, graph {:.5f} to graph {:.5f}, graph {:.5f} nohead lw 0.5 lc "
                            "rgb '#999999' back\n",
                            l.x / f.inner_width(), l.y / f.inner_height(), x,
                            (l.at_y + (l.y > l.at_y ? 6 : -6)) / f.inner_height());
        }
    }
    script += f.margins() + bit_tics(f.x0, f.x1);
    script += fmt::format("set logscale xy\nset xrange [{:.6g}:{:.6g}]\nset yrange [{:.6g}:{:.6g}]\n", f.x0, f.x1, f.y0,
                          f.y1);
    script +=
        "set xlabel 'true bits per value at the end of a window, raw windows and all metadata included (log scale)'\n"
        "set ylabel 'mean KL against the f16 cache, nats (log scale)' offset 1,0\n";
    std::string plots;
    for (size_t i = 0; i < series.size(); ++i) {
        script += fmt::format("$points{} << EOD\n{}EOD\n", i, data_of(points, series[i]));
        if (i < fronts.size()) {
            script += fmt::format("$front{} << EOD\n{}EOD\n", i, fronts[i]);
            plots += fmt::format("{}$front{} using 1:2 with steps lw 1.4 dt 2 lc rgb '{}' title {}",
                                 plots.empty() ? "" : ", ", i, several ? colour(i) : "#888888",
                                 several ? "''" : "'best at so many bits'");
            if (several) plots.replace(plots.rfind("title ''"), 8, "notitle");
        }
        plots += fmt::format(", $points{} using 1:2:3:4 with yerrorbars pt {} ps 0.8 lw 1.2 lc rgb '{}' title {}", i,
                             marker(i), colour(i), gnuplot_text(series[i]));
    }
    return draw_svg(name, int(f.width), int(f.height), script + "plot " + plots + "\n");
}

namespace {

// Line plots: one line a cache.
struct Line {
    std::string name;
    std::vector<std::pair<double, double>> points; // those that are there
};

Result<std::string> line_plot(const std::string& name, const std::string& setup, const std::vector<Line>& lines) {
    Frame f;
    f.height = 400, f.right = 236;
    std::string script = kStyle + f.margins() + setup, plots;
    for (size_t i = 0; i < lines.size(); ++i) {
        script += fmt::format("$line{} << EOD\n", i);
        for (const auto& [x, y] : lines[i].points)
            script += fmt::format("{:.8g} {:.8g}\n", x, y);
        script += "EOD\n";
        plots += fmt::format("{}$line{} using 1:2 with linespoints lw 1.4 dt {} pt {} ps 0.6 lc rgb '{}' title {}",
                             plots.empty() ? "" : ", ", i, i % 4 + 1, marker(i), colour(i),
                             gnuplot_text(short_spec(lines[i].name, 30)));
    }
    return draw_svg(name, int(f.width), int(f.height), script + "plot " + plots + "\n");
}

// The caches of a result that get a line, in their order.
std::vector<Json> chosen(const Json& result) {
    const std::vector<Json> rows = caches_of(result);
    const std::vector<bool> front = on_front(rows);
    std::vector<size_t> order;
    for (const bool first : {true, false})
        for (size_t i = 0; i < rows.size(); ++i)
            if (front[i] == first && order.size() < kMostLines) order.push_back(i);
    std::sort(order.begin(), order.end());
    std::vector<Json> out;
    for (const size_t i : order)
        out.push_back(rows[i]);
    return out;
}

} // namespace

Result<std::string> position_plot(const std::string& name, const Json& result) {
    if (!result.contains("position_edges")) return std::string();
    const auto edges = result["position_edges"].get<std::vector<double>>();
    std::vector<Line> lines;
    for (const Json& row : chosen(result)) {
        Line line{text_of(row, "spec"), {}};
        const Json parts = row.value("kl_by_position", Json::array());
        for (size_t i = 0; i < parts.size() && i + 1 < edges.size(); ++i) {
            if (parts[i].is_number() && parts[i] > 0)
                line.points.emplace_back((edges[i] + edges[i + 1]) / 2, parts[i].get<double>());
        }
        if (!line.points.empty()) lines.push_back(std::move(line));
    }
    if (lines.empty()) return std::string();
    return line_plot(name,
                     fmt::format("set logscale y\nset xrange [{}:{}]\nset xlabel 'position in the window, tokens'\n"
                                 "set ylabel 'mean KL, nats (log scale)' offset 1,0\n",
                                 edges.front(), edges.back()),
                     lines);
}

Result<std::string> layer_plot(const std::string& name, const Json& result) {
    if (!result.contains("layers")) return std::string();
    std::vector<Line> lines;
    double last = 1;
    for (const Json& row : result["layers"].value("rows", Json::array())) {
        if (lines.size() == kMostLines) break;
        Line line{text_of(row, "spec"), {}};
        for (size_t i = 0; i < row["layers"].size() && i < row["kl"].size(); ++i) {
            if (!row["kl"][i].is_number() || row["kl"][i] <= 0) continue;
            line.points.emplace_back(row["layers"][i].get<double>(), row["kl"][i].get<double>());
            last = std::max(last, line.points.back().first);
        }
        if (!line.points.empty()) lines.push_back(std::move(line));
    }
    if (lines.empty()) return std::string();
    return line_plot(name,
                     fmt::format("set logscale y\nset xrange [-0.5:{}]\nset xlabel 'layer that alone is quantized'\n"
                                 "set ylabel 'mean KL, nats (log scale)' offset 1,0\n",
                                 last + 0.5),
                     lines);
}

Result<std::string> length_plot(const std::string& name, const Json& result) {
    if (!result.contains("curve_tokens")) return std::string();
    const auto tokens = result["curve_tokens"].get<std::vector<double>>();
    std::vector<Line> lines;
    for (const Json& row : chosen(result)) {
        Line line{text_of(row, "spec"), {}};
        const Json bits = row.value("true_bits_curve", Json::array());
        for (size_t i = 0; i < bits.size() && i < tokens.size(); ++i)
            if (bits[i].is_number()) line.points.emplace_back(tokens[i], bits[i].get<double>());
        if (!line.points.empty()) lines.push_back(std::move(line));
    }
    if (lines.empty()) return std::string();
    std::string tics;
    for (const double n : tokens)
        tics += fmt::format("{}'{}' {}", tics.empty() ? "" : ",",
                            n < 1024 ? fmt::format("{}", n) : fmt::format("{}K", n / 1024), n);
    return line_plot(
        name,
        fmt::format("set logscale x 2\nset xtics ({})\nset xrange [{}:{}]\nset yrange [0:*]\n"
                    "set xlabel 'context, tokens (log scale)'\nset ylabel 'true bits per value' offset 1,0\n",
                    tics, tokens.front() * 0.9, tokens.back() * 1.1),
        lines);
}

} // namespace kvmosaic::eval
