// kvmosaic fetch: hands over to the script that gets models from Python packages.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include <unistd.h>

#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

[[noreturn]] void become(std::vector<std::string> words) {
    std::vector<char*> arguments;
    for (std::string& word : words)
        arguments.push_back(word.data());
    arguments.push_back(nullptr);
    std::fflush(nullptr);
    ::execvp(arguments[0], arguments.data());
    fail("fetch: cannot start {}: {}", words[0], std::strerror(errno));
}

} // namespace

void add_fetch(CLI::App& app) {
    struct Options {
        std::string name;
        bool list = false, json = false;
    };
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("fetch", "get a test model into the user's cache folder, checked by SHA-256");
    verb->add_option("name", o->name, fmt::format("which model: {}", fmt::join(model_names(), ", ")));
    verb->add_flag("--list", o->list, "all models with size, licence and whether they are there");
    verb->add_flag("--json", o->json, "as JSON");
    verb->footer("Examples\n  kvmosaic fetch tiny     SmolLM2-135M-Instruct, 94 MiB\n"
                 "  kvmosaic fetch small    Qwen2.5-Coder-0.5B-Instruct, 469 MiB\n"
                 "  kvmosaic fetch --list\n"
                 "An interrupted download goes on where it stopped. Your own model needs no fetch: -m file.gguf.");
    verb->callback([o] {
        const auto& names = model_names();
        if (!o->list && std::find(names.begin(), names.end(), o->name) == names.end()) {
            bad_usage("fetch {}: no such model; one of {}", o->name, fmt::join(names, ", "));
        }
        std::vector<std::string> words{"python3", find_script("fetch", "scripts/fetch_model.py")};
        if (o->list)
            words.push_back("--list");
        else
            words.push_back(o->name);
        if (o->json) words.push_back("--json");
        become(std::move(words));
    });
}

} // namespace kvmosaic::tool
