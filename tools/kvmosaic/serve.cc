// kvmosaic serve: llama.cpp's OpenAI-compatible server on our cache. The server is a program of its own, built from
// the same patched tree; the environment tells it which cache to use.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <unistd.h>

#include "eval/files.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

struct Options {
    std::string model, spec = "mixkvq";
    int ctx = 0, port = 8080, rollback = 0, budget = 0;
    std::string host = "127.0.0.1";
};

void serve(const Options& o, const std::vector<std::string>& rest) {
    check_spec(o.spec);
    const std::string model = find_model(o.model);
    const std::string server = program_folder() + "llama-server";
    if (!eval::exists(server)) {
        fail("serve: the server is not built yet ({} is missing); build it with `make server`", server);
    }
    std::vector<std::string> words{server, "-m", model, "--host", o.host, "--port", std::to_string(o.port)};
    if (o.ctx > 0) words.insert(words.end(), {"-c", std::to_string(o.ctx)});
    words.insert(words.end(), rest.begin(), rest.end());
    std::vector<char*> arguments;
    for (std::string& word : words)
        arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ::setenv("KVMOSAIC_CACHE", o.spec.c_str(), 1);
    if (o.rollback > 0) ::setenv("KVMOSAIC_ROLLBACK", std::to_string(o.rollback).c_str(), 1);
    if (o.budget > 0) ::setenv("KVMOSAIC_BUDGET", std::to_string(o.budget).c_str(), 1);
    notice(fmt::format("serving {} on a cache '{}' at http://{}:{}", model, o.spec, o.host, o.port));
    std::fflush(nullptr);
    ::execv(server.c_str(), arguments.data());
    fail("serve: cannot start {}: {}", server, std::strerror(errno));
}

} // namespace

void add_serve(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("serve", "llama.cpp's OpenAI-compatible server on our cache");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("--cache", o->spec, "cache spec (kvmosaic methods)")->capture_default_str();
    verb->add_option("--ctx", o->ctx, "context in tokens over all slots (0: as trained)")
        ->check(CLI::Range(0, 1 << 24));
    verb->add_option("--rollback", o->rollback,
                     "dropping up to this many newest tokens of a conversation leaves the cache exactly as it was "
                     "before them (their 16-bit rows are kept, and counted)")
        ->check(CLI::Range(0, 65536));
    verb->add_option("--budget", o->budget, "most MiB of the cache, over all slots; a full one refuses (0: no limit)")
        ->check(CLI::Range(0, 1 << 24));
    verb->add_option("--host", o->host, "address to listen on")->capture_default_str();
    verb->add_option("--port", o->port, "port to listen on")->check(CLI::Range(0, 65535))->capture_default_str();
    verb->allow_extras();
    verb->footer("Further options go to llama-server as they are.\n"
                 "Examples\n  kvmosaic serve -m tiny --cache mixkvq\n"
                 "  kvmosaic serve -m small --cache kivi:bits=4 --ctx 8192 -np 4 --port 9000");
    verb->callback([o, verb] { serve(*o, verb->remaining()); });
}

} // namespace kvmosaic::tool
