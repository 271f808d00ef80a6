// kvmosaic report: saved results of compare as one page or one plot; nothing is measured again.
#include <memory>

#include "eval/files.h"
#include "eval/gnuplot.h"
#include "eval/report.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::vector<std::string> results;
    std::string html, plot, part = "pareto";
    bool force = false;
};

std::vector<eval::Json> read_results(const std::vector<std::string>& files) {
    std::vector<eval::Json> out;
    for (const std::string& file : files) {
        eval::Json result = eval::Json::parse(take(eval::read_file(file)), nullptr, false);
        if (result.is_discarded()) bad_usage("{}: is not JSON; results of `kvmosaic compare --json` are read", file);
        if (const Status bad = eval::check_result(result); !bad) bad_usage("{}: {}", file, bad.message());
        out.push_back(std::move(result));
    }
    return out;
}

constexpr const char* kParts[] = {"pareto", "position", "layers", "length", "memory", "heat"};

// One plot of the page. Those of parts other than the first are of one section.
std::string plot_of(const Options& o, const std::vector<eval::Json>& joined) {
    if (o.part == "pareto") {
        std::vector<std::string> names;
        for (const eval::Json& r : joined)
            names.push_back(eval::result_name(r));
        return take(eval::pareto_plot(o.part, joined, names));
    }
    if (joined.size() > 1)
        bad_usage("--part {}: the results are {} comparisons that share no model, text or window; draw one at a time",
                  o.part, joined.size());
    const eval::Json& r = joined.front();
    if (o.part == "position") return take(eval::position_plot(o.part, r));
    if (o.part == "layers") return take(eval::layer_plot(o.part, r));
    if (o.part == "length") return take(eval::length_plot(o.part, r));
    if (o.part == "memory") return take(eval::memory_plot(o.part, r));
    return take(eval::heat_plot(o.part, r.value("heat", eval::Json::object())));
}

void report(const Options& o) {
    if (o.html.empty() && o.plot.empty()) bad_usage("--html FILE or --plot FILE: where the page or the plot goes");
    if (o.plot.empty() && o.part != kParts[0])
        bad_usage("--part {}: says what --plot FILE draws, and there is none", o.part);
    check(eval::check_gnuplot());
    check_new_file("--html", o.html, o.force);
    check_new_file("--plot", o.plot, o.force);
    const std::vector<eval::Json> results = read_results(o.results);
    if (!o.html.empty()) write_report(o.html, results, o.force);
    if (o.plot.empty()) return;
    std::string svg;
    try {
        svg = plot_of(o, eval::join_results(results));
    } catch (const nlohmann::json::exception& bad) { // a field of another type than compare writes
        fail("the results contradict themselves: {}", bad.what());
    }
    if (svg.empty() && o.part == "pareto") fail("--plot {}: the results have no cache but f16", o.plot);
    if (svg.empty())
        fail("--plot {}: the results say nothing of {}{}", o.plot, o.part,
             o.part == "layers" || o.part == "heat" ? fmt::format("; `compare --{}` measures it", o.part) : "");
    check(eval::write_file(o.plot, svg + "\n"));
}

} // namespace

void write_report(const std::string& target, const std::vector<nlohmann::ordered_json>& results, bool force) {
    check_new_file("--html", target, force);
    try {
        check(eval::write_file(target, take(eval::html_report(eval::join_results(results)))));
    } catch (const nlohmann::json::exception& bad) { // a field of another type than compare writes
        fail("the results contradict themselves: {}", bad.what());
    }
}

void add_report(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("report", "saved results of compare as a page with plots");
    verb->add_option("results", o->results, "files that compare --json wrote")->required()->type_name("RESULT.json");
    verb->add_option("--html", o->html, "the page, complete in one file");
    verb->add_option("--plot", o->plot, "one plot alone, as SVG");
    verb->add_option("--part", o->part, "which one: pareto (true bits against KL), or another part of the page")
        ->check(CLI::IsMember(std::vector<std::string>(std::begin(kParts), std::end(kParts))))
        ->capture_default_str();
    verb->add_flag("--force", o->force, "replace existing files");
    verb->footer("Examples\n"
                 "  kvmosaic report result.json --html report.html\n"
                 "  kvmosaic report tiny.json small.json base.json --html models.html\n"
                 "  kvmosaic report methods.json mosaic.json --plot pareto.svg\n"
                 "  kvmosaic report result.json --plot layers.svg --part layers\n"
                 "Results of the same model, weights, texts and windows share one table and its plots; others get a\n"
                 "section each. Plots are drawn with gnuplot (Debian: gnuplot-nox). How to read them: docs/report.md.");
    verb->callback([o] { report(*o); });
}

} // namespace kvmosaic::tool
