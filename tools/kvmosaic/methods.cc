// kvmosaic methods: every method with its options, defaults, ranges and paper, straight from the registry.
#include <memory>

#include <nlohmann/json.hpp>

#include "kvmosaic/app.h"
#include "kvmosaic/method.h"

namespace kvmosaic::tool {

namespace {

nlohmann::ordered_json to_json(const MethodInfo& info) {
    nlohmann::ordered_json options = nlohmann::ordered_json::array();
    for (const OptionInfo& option : info.options) {
        nlohmann::ordered_json entry{
            {"name", option.name}, {"kind", name_of(option.kind)}, {"default", option.fallback}};
        if (!option.choices.empty())
            entry["choices"] = option.choices;
        else if (option.kind != OptionInfo::Kind::text)
            entry["min"] = option.min, entry["max"] = option.max;
        if (!option.word.empty()) entry["word"] = option.word;
        entry["help"] = option.help;
        options.push_back(std::move(entry));
    }
    return {{"method", info.name},           {"summary", info.summary},       {"paper", info.paper},
            {"uses_query", info.uses_query}, {"calibrated", info.calibrated}, {"options", std::move(options)}};
}

void print_one(const MethodInfo& info) {
    fmt::print("{}  {}\n", info.name, info.summary);
    if (info.paper != "-") fmt::print("  paper: {}\n", info.paper);
    if (info.uses_query) fmt::print("  looks at the queries: running statistics are kept and counted\n");
    if (info.calibrated) fmt::print("  needs a file of `kvmosaic calibrate --method {}`\n", info.name);
    for (const OptionInfo& option : info.options) {
        fmt::print("  {:<22} {:<24} {}\n", fmt::format("{}={}", option.name, option.fallback), allowed_text(option),
                   option.help);
    }
}

void methods_verb(const std::string& name, bool json) {
    std::vector<const MethodInfo*> chosen;
    std::vector<std::string> names;
    for (const MethodInfo* info : methods()) {
        names.push_back(info->name);
        if (name.empty() || name == info->name) chosen.push_back(info);
    }
    if (chosen.empty()) bad_usage("methods {}: no such method; one of {}", name, fmt::join(names, ", "));
    if (json) {
        nlohmann::ordered_json out{{"version", KVMOSAIC_VERSION}, {"methods", nlohmann::ordered_json::array()}};
        for (const MethodInfo* info : chosen)
            out["methods"].push_back(to_json(*info));
        fmt::print("{}\n", out.dump(2));
        return;
    }
    for (size_t i = 0; i < chosen.size(); ++i) {
        if (i) fmt::print("\n");
        print_one(*chosen[i]);
    }
    if (name.empty())
        fmt::print("\nA spec is NAME[:OPTION=VALUE,...], as in --cache {}:{}\n", "kivi", "bits=2,group=32");
}

} // namespace

void add_methods(CLI::App& app) {
    auto name = std::make_shared<std::string>();
    auto json = std::make_shared<bool>(false);
    CLI::App* verb = app.add_subcommand("methods", "every method with its options, defaults, ranges and paper");
    verb->add_option("name", *name, "only this method");
    verb->add_flag("--json", *json, "as JSON");
    verb->footer("Examples\n  kvmosaic methods\n  kvmosaic methods mixkvq\n  kvmosaic methods --json");
    verb->callback([name, json] { methods_verb(*name, *json); });
}

} // namespace kvmosaic::tool
