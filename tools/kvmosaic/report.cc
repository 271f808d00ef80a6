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
    std::string html, plot;
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

void report(const Options& o) {
    if (o.html.empty() && o.plot.empty()) bad_usage("--html FILE or --plot FILE: where the page or the plot goes");
    check(eval::check_gnuplot());
    check_new_file("--html", o.html, o.force);
    check_new_file("--plot", o.plot, o.force);
    const std::vector<eval::Json> results = read_results(o.results);
    if (!o.html.empty()) write_report(o.html, results, o.force);
    if (o.plot.empty()) return;
    const std::vector<eval::Json> joined = eval::join_results(results);
    std::vector<std::string> names;
    for (const eval::Json& r : joined)
        names.push_back(eval::result_name(r));
    const std::string svg = take(eval::pareto_plot("pareto", joined, names));
    if (svg.empty()) fail("--plot {}: the results have no cache but f16", o.plot);
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
    verb->add_option("--plot", o->plot, "only the plot of true bits against KL, as SVG");
    verb->add_flag("--force", o->force, "replace existing files");
    verb->footer("Examples\n"
                 "  kvmosaic report result.json --html report.html\n"
                 "  kvmosaic report tiny.json small.json base.json --html models.html\n"
                 "  kvmosaic report methods.json mosaic.json --plot pareto.svg\n"
                 "Results of the same model, weights, texts and windows share one table and its plots; others get a\n"
                 "section each. Plots are drawn with gnuplot (Debian: gnuplot-nox). How to read them: docs/report.md.");
    verb->callback([o] { report(*o); });
}

} // namespace kvmosaic::tool
