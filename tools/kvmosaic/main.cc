// kvmosaic: the program. One file a verb; this one only joins them and turns every failure into one sentence.
#include <algorithm>
#include <cstdio>
#include <exception>

#include "eval/build.h"
#include "kvmosaic/app.h"

namespace {

constexpr const char* kFooter = R"(Examples
  kvmosaic fetch tiny                                      a small chat model, once
  kvmosaic run -m tiny -p "What is a cache?"               answer through a MixKVQ cache
  kvmosaic run -m tiny --chat --cache kivi:bits=2          talk to it
  kvmosaic compare -m tiny -f text.txt --cache mixkvq --cache kivi:bits=4
                                                           bits, memory and quality of caches, side by side
  kvmosaic methods mixkvq                                  what a method can do
  kvmosaic COMMAND --help                                  options and examples of a command)";

int say(int code, const std::string& message) {
    std::fprintf(stderr, "kvmosaic: error: %s\n", message.c_str());
    return code;
}

int program(int argc, char** argv) {
    using namespace kvmosaic::tool;
    set_command_line(argc, argv);
    CLI::App app{"kvmosaic: large language models on a key/value cache of 2 to 4 true bits per value", "kvmosaic"};
    app.set_version_flag("--version",
                         fmt::format("kvmosaic {} (commit {})", KVMOSAIC_VERSION, kvmosaic::eval::build_commit()));
    app.footer(kFooter);
    app.require_subcommand(1);
    app.get_formatter()->column_width(34);
    add_run(app);
    add_compare(app);
    add_advise(app);
    add_report(app);
    add_eval(app);
    add_calibrate(app);
    add_tune(app);
    add_bench(app);
    add_inspect(app);
    add_methods(app);
    add_fetch(app);
    add_serve(app);
    add_devices(app);
    const std::string verb = argc > 1 ? argv[1] : "";
    std::vector<std::string> verbs;
    for (const CLI::App* known : app.get_subcommands({}))
        verbs.push_back(known->get_name());
    if (!verb.empty() && verb[0] != '-' && std::find(verbs.begin(), verbs.end(), verb) == verbs.end()) {
        return say(kBadUsage, fmt::format("{}: no such command; one of {}", verb, fmt::join(verbs, ", ")));
    }
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& bad) {
        if (bad.get_exit_code() == 0) return app.exit(bad); // --help, --version
        return say(kBadUsage, std::string(bad.what()) + " (see kvmosaic --help)");
    } catch (const Failure& bad) {
        std::fflush(stdout);
        return bad.message.empty() ? bad.code : say(bad.code, bad.message); // empty: a process of ours has said it
    } catch (const std::exception& bad) {
        std::fflush(stdout);
        return say(kFailed, bad.what());
    }
    if (std::fflush(stdout) != 0) return say(kFailed, "standard output cannot be written");
    return 0;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return program(argc, argv);
    } catch (...) { // what goes wrong before or after a verb: no memory, no standard output
        std::fputs("kvmosaic: error: the program could not start or end properly\n", stderr);
        return kvmosaic::tool::kFailed;
    }
}
