// The search by Optuna: a small Python script chooses settings and asks this program, started again as a server, what
// they do.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvmosaic/tune.h"

extern char** environ;

namespace kvmosaic::tool {

using nlohmann::ordered_json;

namespace {

constexpr int kNoOptuna = 3, kNoProgram = 127; // exit codes

// Runs a command to its end; its exit code. `out` gets what it prints where that is asked for.
int run_to_end(std::vector<std::string> words, std::string* out) {
    int ends[2] = {-1, -1};
    if (out && ::pipe(ends) != 0) fail("tune: no pipe could be made: {}", std::strerror(errno));
    std::vector<char*> arguments;
    for (std::string& word : words)
        arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    if (out) {
        ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
        ::posix_spawn_file_actions_addclose(&actions, ends[0]);
    }
    std::fflush(nullptr);
    pid_t child = 0;
    const int bad = ::posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    if (out) ::close(ends[1]);
    if (bad == 0 && out) {
        char block[4096];
        for (ssize_t n = 0; (n = ::read(ends[0], block, sizeof block)) > 0;)
            out->append(block, size_t(n));
    }
    if (out) ::close(ends[0]);
    if (bad != 0) return kNoProgram;
    int state = 0;
    while (::waitpid(child, &state, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

struct Python {
    std::string program, version; // of Optuna
};

Python find_python(const std::string& sampler) {
    std::vector<std::string> places{"python3", "/usr/bin/python3"}; // a second one may have what the first has not
    if (const char* named = std::getenv("KVMOSAIC_PYTHON"); named && *named) places = {named};
    const std::string script = find_script("tune", "tools/tune/tune_optuna.py");
    bool some = false;
    for (const std::string& place : places) {
        std::string said;
        const int code = run_to_end({place, script, "--check"}, &said);
        some = some || code == kNoOptuna;
        if (code == 0) return {place, said.substr(0, said.find('\n'))};
    }
    if (!some) fail("--sampler {}: needs Python 3, tried {}", sampler, fmt::join(places, " and "));
    fail("--sampler {}: needs Python's package optuna, which {} lacks: pip install optuna (Debian: apt-get install "
         "python3-optuna); KVMOSAIC_PYTHON names another Python, and --sampler grid needs none",
         sampler, fmt::join(places, " and "));
}

// How this program was started.
std::vector<std::string> own_command() {
    const std::string line = take(eval::read_file("/proc/self/cmdline"));
    std::vector<std::string> words;
    for (size_t at = 0; at < line.size(); at = line.find('\0', at) + 1)
        words.emplace_back(line.c_str() + at);
    words[0] = std::filesystem::read_symlink("/proc/self/exe").string();
    return words;
}

} // namespace

std::string find_optuna(const TuneOptions& o) { return find_python(o.sampler).version; }

void run_optuna(const TuneOptions& o) {
    const Python python = find_python(o.sampler);
    std::vector<std::string> words{python.program,
                                   find_script("tune", "tools/tune/tune_optuna.py"),
                                   "--sampler",
                                   o.sampler,
                                   "--seed",
                                   std::to_string(o.seed),
                                   "--trials",
                                   std::to_string(o.trials),
                                   "--"};
    for (std::string& word : own_command())
        words.push_back(std::move(word));
    words.push_back("--serve");
    words.push_back(python.version);
    const int code = run_to_end(std::move(words), nullptr);
    if (code != 0) throw Failure{code, ""}; // the server or the script has said why
}

void serve_search(eval::Search& search, const eval::Progress& progress) {
    const auto answer = [](const ordered_json& j) {
        fmt::print("{}\n", j.dump());
        std::fflush(stdout);
    };
    ordered_json opened{{"space", eval::to_json(search.space())}, {"defaults", ordered_json::array()}};
    for (const eval::Trial& t : search.study().trials)
        if (!t.label.empty() && !t.values.empty()) opened["defaults"].push_back(t.values);
    answer(opened);
    for (std::string line; std::getline(std::cin, line);) {
        const ordered_json request = ordered_json::parse(line, nullptr, false);
        std::vector<std::string> values;
        std::string wrong;
        for (const eval::Tunable& t : search.space()) {
            if (!request.is_object() || !request.contains("values") || !request["values"].contains(t.name)) {
                wrong = fmt::format("a request names a value for each of the {} that are tuned; {} has none",
                                    search.space().size(), t.name);
                break;
            }
            const Result<std::string> value = t.value(request["values"][t.name]);
            if (!value) {
                wrong = value.status().message();
                break;
            }
            values.push_back(*value);
        }
        if (!wrong.empty()) {
            answer({{"error", wrong}});
            continue;
        }
        const bool known = search.knows(values);
        const eval::Trial& trial = *take(search.evaluate(values, progress));
        ordered_json out{{"trial", &trial - search.study().trials.data()}, {"known", known}, {"spec", trial.spec}};
        out.update(eval::to_json(trial.search));
        out["loss"] = search.study().loss(trial.search);
        answer(out);
    }
}

} // namespace kvmosaic::tool
