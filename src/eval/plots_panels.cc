// Plots of several panels: memory and speed, channels of a head.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/gnuplot.h"
#include "eval/plots.h"

namespace kvmosaic::eval {

namespace {

// Edges of a panel, pixels from the left and the bottom.
std::string panel(double width, double height, double left, double right, double bottom, double top) {
    return fmt::format("set lmargin at screen {:.5f}\nset rmargin at screen {:.5f}\nset bmargin at screen {:.5f}\n"
                       "set tmargin at screen {:.5f}\n",
                       left / width, right / width, bottom / height, top / height);
}

std::string value_text(double x) { return x >= 100 ? fmt::format("{:.0f}", x) : fmt::format("{:.3g}", x); }

// 1, 2 or 5 times a power of ten, at least x.
double step_of(double x) {
    const double ten = std::pow(10.0, std::floor(std::log10(x)));
    for (const double n : {1.0, 2.0, 5.0})
        if (n * ten >= x) return n * ten;
    return 10 * ten;
}

struct Bars {
    const char* title;
    std::vector<double> values; // one a row, NaN: not known
};

} // namespace

Result<std::string> memory_plot(const std::string& name, const Json& result) {
    constexpr double kMiB = 1 << 20, kRow = 20, kNames = 230, kGap = 34, kWidth = 860;
    std::vector<std::string> names;
    Bars end{"MiB at the end of a window", {}}, far{"MiB at 32K tokens", {}}, speed{"tokens a second, reading", {}};
    const auto number = [](const Json& row, const char* field) {
        return row.contains(field) && row[field].is_number() ? row[field].get<double>() : std::nan("");
    };
    for (const Json& row : result.value("rows", Json::array())) {
        const std::string spec = row.value("spec", std::string());
        if (spec == "floor") continue;
        names.push_back(short_spec(spec, 34));
        end.values.push_back(number(row, "cache_bytes") / kMiB);
        far.values.push_back(number(row, "cache_bytes_32k") / kMiB);
        speed.values.push_back(number(row, "prefill_tok_s"));
    }
    std::vector<Bars> panels;
    for (const Bars& bars : {end, far, speed}) {
        const auto known = std::count_if(bars.values.begin(), bars.values.end(), [](double x) { return x > 0; });
        if (2 * known > int64_t(bars.values.size())) panels.push_back(bars);
    }
    if (names.empty() || panels.empty()) return std::string();
    const double height = kRow * double(names.size()) + 42, wide = (kWidth - kNames) / double(panels.size());
    std::string script = fmt::format(
        "set multiplot\nset border 1 lw 0.8 lc rgb '#444444'\nunset key\nunset ytics\nset xtics "
        "nomirror out scale 0.5 font ',10' offset 0,0.4\nset style fill solid 0.55 border lc rgb '#333333'\n"
        "set yrange [{}:-0.5]\n",
        double(names.size()) - 0.5);
    for (size_t p = 0; p < panels.size(); ++p) {
        const double left = kNames + double(p) * wide;
        double most = 0;
        for (const double x : panels[p].values)
            if (x > most) most = x;
        script += panel(kWidth, height, left, left + wide - kGap, 24, height - 18) + "unset label\n";
        script += fmt::format(
            "set xrange [0:{:.6g}]\nset xtics {:.6g}\nset label {} at graph 0, screen {:.5f} left font ',11'\n",
            most * 1.22, step_of(most * 1.22 / 4), gnuplot_text(panels[p].title), 1 - 9 / height);
        if (p == 0) {
            for (size_t i = 0; i < names.size(); ++i)
                script += fmt::format("set label {} at graph 0, first {} right offset -0.6,0 font ',11'\n",
                                      gnuplot_text(names[i]), i);
        }
        script += fmt::format("$bars{} << EOD\n", p);
        std::string texts;
        for (size_t i = 0; i < panels[p].values.size(); ++i) {
            const double x = panels[p].values[i];
            if (!std::isfinite(x)) continue;
            script += fmt::format("{0:.6g} {1} 0 {0:.6g} {2} {3}\n", x, i, double(i) - 0.34, double(i) + 0.34);
            texts += fmt::format("set label {} at {:.6g}, {} left offset 0.3,0 font ',10'\n",
                                 gnuplot_text(value_text(x)), x, i);
        }
        script += "EOD\n" + texts;
        script += fmt::format("plot $bars{} using 1:2:3:4:5:6 with boxxyerror lc rgb '#4C86B0'\n", p);
        script += "unset label\n";
    }
    return draw_svg(name, int(kWidth), int(height), script + "unset multiplot\n");
}

Result<std::string> heat_plot(const std::string& name, const Json& heat) {
    struct Map {
        std::string title;
        Json rows;
        bool bits;
    };
    std::vector<Map> maps{
        {"range of keys in a page, largest minus smallest (log scale)", heat.value("range", Json::array()), false},
        {"mean |q| of all rows so far (log scale)", heat.value("query", Json::array()), false},
        {"salience: range times mean |q| (log scale)", heat.value("salience", Json::array()), false}};
    if (!maps[0].rows.is_array() || maps[0].rows.empty()) return std::string();
    for (const Json& cache : heat.value("caches", Json::array()))
        maps.push_back({fmt::format("bits that {} chose", short_spec(cache.value("spec", std::string()), 60)),
                        cache["bits"], true});
    const size_t dim = maps[0].rows[0].size(), pages = maps[0].rows.size();
    const double inner = std::clamp(9.0 * double(pages), 64.0, 150.0), step = inner + 46, kWidth = 860;
    const double height = step * double(maps.size()) + 40;
    constexpr int kWidths[] = {0, 1, 2, 3, 4, 6, 8, 16};
    std::string script =
        "set multiplot\nunset key\nset border lw 0.6 lc rgb '#444444'\nset tics nomirror out scale 0.4 font ',10' "
        "\nset xtics offset 0,0.4\nset ytics offset 0.4,0\nset cbtics font ',9'\n"
        "set ylabel 'page' font ',11' offset 1,0\nset palette defined (0 '#ffffff', 1 '#c9d8e6', 2 '#7fa3c4', "
        "3 '#3c6590', 4 '#0b1f3a')\n";
    script += fmt::format("set xrange [-0.5:{}]\nset yrange [{}:-0.5]\nset xtics {}\nset ytics {}\n", double(dim) - 0.5,
                          double(pages) - 0.5, dim > 64 ? 16 : 8, std::max<size_t>(1, (pages + 3) / 4));
    for (size_t m = 0; m < maps.size(); ++m) {
        const double top = height - 20 - double(m) * step;
        script += panel(kWidth, height, 56, kWidth - 90, top - inner, top) + "unset label\n";
        script += fmt::format("set label {} at graph 0, screen {:.5f} left font ',12'\n", gnuplot_text(maps[m].title),
                              (top + 10) / height);
        script += fmt::format("$map{} << EOD\n", m);
        double low = INFINITY, high = 0;
        std::vector<bool> used(std::size(kWidths), false);
        for (const Json& row : maps[m].rows) {
            for (const Json& x : row) {
                double v = x.is_number() ? x.get<double>() : 0;
                if (maps[m].bits) { // shown by their place among the widths
                    const size_t place =
                        size_t(std::find(std::begin(kWidths), std::end(kWidths), int(v)) - std::begin(kWidths));
                    if (place < used.size()) used[place] = true;
                    v = double(place);
                }
                if (v > 0) low = std::min(low, v), high = std::max(high, v);
                script += fmt::format("{:.5g} ", maps[m].bits ? v : std::max(v, 1e-30));
            }
            script += "\n";
        }
        script += "EOD\n";
        if (maps[m].bits) {
            std::string widths;
            for (size_t i = 0; i < used.size(); ++i)
                if (used[i]) widths += fmt::format("{}'{}' {}", widths.empty() ? "" : ",", kWidths[i], i);
            script += fmt::format("unset logscale cb\nset cbrange [0:7]\nset cbtics ({})\n", widths);
        } else {
            script +=
                fmt::format("set logscale cb\nset cbrange [{:.5g}:{:.5g}]\nset cbtics autofreq\nset format cb '%g'\n",
                            high > 0 ? low : 1, high > 0 ? high * 1.0001 : 2);
        }
        script += m + 1 == maps.size() ? "set xlabel 'key channel (a head after RoPE)' font ',11' offset 0,0.3\n"
                                       : "unset xlabel\n";
        script += fmt::format("plot $map{} matrix with image\n", m);
    }
    return draw_svg(name, int(kWidth), int(height), script + "unset multiplot\n");
}

} // namespace kvmosaic::eval
