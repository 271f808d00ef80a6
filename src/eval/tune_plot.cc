#include "eval/tune_plot.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/gnuplot.h"
#include "eval/labels.h"

namespace kvmosaic::eval {

namespace {

constexpr double kWidth = 880, kHeight = 520, kLeft = 0.1, kRight = 0.97, kBottom = 0.12, kTop = 0.97;

// What is drawn: bits by ratios; KL by ratios, or right answers in percent.
struct Axes {
    Objective objective;
    double x0 = INFINITY, x1 = 0, y0 = INFINITY, y1 = 0;
    double y_of(const Measured& m) const { return objective == Objective::kl ? m.kl : 100 * m.accuracy(); }
    bool has(const Measured& m) const {
        return m.bits > 0 && (objective == Objective::kl ? m.kl > 0 : !m.right.empty());
    }
    void add(const Measured& m) {
        if (!has(m)) return;
        x0 = std::min(x0, m.bits), x1 = std::max(x1, m.bits), y0 = std::min(y0, y_of(m)), y1 = std::max(y1, y_of(m));
    }
    void widen() {
        x0 *= 0.95, x1 *= 1.06;
        if (objective == Objective::kl)
            y0 /= 1.8, y1 *= 1.8;
        else
            y0 -= 3, y1 += 5;
    }
    double px(const Measured& m) const { return std::log(m.bits / x0) / std::log(x1 / x0) * (kRight - kLeft) * kWidth; }
    double py(const Measured& m) const {
        const double share =
            objective == Objective::kl ? std::log(m.kl / y0) / std::log(y1 / y0) : (y_of(m) - y0) / (y1 - y0);
        return share * (kTop - kBottom) * kHeight;
    }
    std::string block(const std::string& name, const std::vector<const Measured*>& points) const {
        std::string out = fmt::format("${} << EOD\n", name);
        for (const Measured* m : points)
            if (has(*m)) out += fmt::format("{:.8g} {:.8g}\n", m->bits, y_of(*m));
        return out + "EOD\n";
    }
};

constexpr const char* kLogTicks =
    "set logscale y\nset ytics (0.00001,0.00002,0.00005,0.0001,0.0002,0.0005,0.001,0.002,0.005,0.01,0.02,0.05,0.1,0.2,"
    "0.5,1,2,5)\n";

} // namespace

Result<std::string> tune_plot(const Study& study, const TuneResult& result, const Elsewhere& elsewhere) {
    std::vector<const Measured*> all, front, defaults, there, theirs;
    Axes r{study.objective()};
    const bool kl = r.objective == Objective::kl;
    for (const size_t i : result.trials) {
        const Trial& t = study.trials[i];
        const bool on_front = std::find(result.front.begin(), result.front.end(), i) != result.front.end();
        if (!t.label.empty())
            defaults.push_back(&t.search);
        else if (!on_front)
            all.push_back(&t.search);
        r.add(t.search);
    }
    for (const size_t i : result.front)
        front.push_back(&study.trials[i].search);
    for (const auto& [indices, into] : {std::pair(&result.front, &there), std::pair(&result.defaults, &theirs)}) {
        for (const size_t i : *indices) {
            const Measured* m = study.trials[i].on(elsewhere.id);
            if (!m) continue;
            into->push_back(m);
            r.add(*m);
        }
    }
    if (!(r.x1 > 0)) return Status(StatusCode::invalid_argument, "nothing of this search can be drawn");
    r.widen();

    std::vector<Label> labels; // numbers of trials, as in the table; names of defaults
    const auto label = [&](size_t i, std::string text) {
        const Measured& m = study.trials[i].search;
        if (r.has(m)) labels.push_back({r.px(m), r.py(m), std::move(text)});
    };
    for (const size_t i : result.front)
        if (study.trials[i].label.empty()) label(i, fmt::format("{}", i));
    for (const size_t i : result.defaults)
        label(i, fmt::format("{}: {}", i, name_of(study.trials[i], study.head)));
    const double inner_width = (kRight - kLeft) * kWidth, inner_height = (kTop - kBottom) * kHeight;
    place_labels(&labels, inner_width, inner_height, 12,
                 {{0.62 * inner_width, inner_width, kl ? inner_height - 110 : 0, kl ? inner_height : 110}});

    std::string script = "set border 3 lw 0.8 lc rgb '#444444'\nset tics nomirror out scale 0.6\n"
                         "set grid lc rgb '#dddddd' lw 0.6 dt 1\nset format y '%g'\nset logscale x\n"
                         "set xtics (1,1.5,2,2.5,3,3.5,4,4.5,5,6,7,8,9,10,12,14,16)\n";
    script += fmt::format("set key {} right samplen 1.6 width -4\n", kl ? "top" : "bottom"); // where no good point is
    script +=
        fmt::format("set lmargin at screen {}\nset rmargin at screen {}\nset bmargin at screen {}\nset tmargin at "
                    "screen {}\n",
                    kLeft, kRight, kBottom, kTop);
    script += fmt::format("set xrange [{:.6g}:{:.6g}]\nset yrange [{:.6g}:{:.6g}]\n", r.x0, r.x1, r.y0, r.y1);
    script += fmt::format("set xlabel 'true bits per value at {} tokens, windows and all metadata in (log scale)'\nset "
                          "ylabel '{}' offset 1,0\n",
                          study.head.at("context").get<int64_t>(),
                          kl ? "mean KL against the f16 cache, nats (log scale)" : "right answers, %");
    if (kl) script += kLogTicks;
    for (const Label& l : labels)
        script += fmt::format("set label {} at graph {:.5f}, graph {:.5f} center font ',12'\n", gnuplot_text(l.text),
                              l.at_x / inner_width, l.at_y / inner_height);
    script += r.block("all", all) + r.block("front", front) + r.block("defaults", defaults);
    std::string plots = "plot $all using 1:2 with points pt 7 ps 0.45 lc rgb '#999999' title 'settings tried', "
                        "$front using 1:2 with linespoints pt 7 ps 0.7 lw 1.6 lc rgb '#0072B2' title 'front', "
                        "$defaults using 1:2 with points pt 5 ps 0.9 lc rgb '#D55E00' title 'defaults'";
    if (!there.empty()) {
        script += r.block("there", there) + r.block("theirs", theirs);
        plots += fmt::format(
            ", $there using 1:2 with linespoints pt 6 ps 0.7 lw 1.2 dt 2 lc rgb '#009E73' title {0}, "
            "$theirs using 1:2 with points pt 4 ps 0.9 lc rgb '#D55E00' title {1}",
            gnuplot_text(kl ? "the same settings on the other text" : "the same settings on other problems"),
            gnuplot_text(kl ? "defaults on the other text" : "defaults on other problems"));
    }
    return draw_svg("tune", int(kWidth), int(kHeight), script + plots + "\n");
}

} // namespace kvmosaic::eval
