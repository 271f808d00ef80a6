#include "eval/gnuplot.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>

#include "eval/files.h"

extern char** environ; // NOLINT: POSIX names it so

namespace kvmosaic::eval {

namespace {

constexpr const char* kMissing = "gnuplot is not installed, and it draws the plots: install the package gnuplot-nox "
                                 "(Debian: apt-get install gnuplot-nox)";

// A folder that is gone with its contents when this ends.
class Scratch {
public:
    Scratch() {
        std::error_code ec;
        const std::filesystem::path base = std::filesystem::temp_directory_path(ec);
        std::string name = (ec ? std::filesystem::path("/tmp") : base) / "kvmosaic-plot-XXXXXX";
        if (::mkdtemp(name.data())) path_ = name;
    }
    ~Scratch() {
        std::error_code ec;
        if (!path_.empty()) std::filesystem::remove_all(path_, ec);
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    bool ok() const { return !path_.empty(); }
    std::string file(const char* name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

// Runs gnuplot with these words, its output into files; returns its exit status, or that of errno as negative.
int run(std::vector<std::string> words, const std::string& out, const std::string& err) {
    std::vector<char*> arguments;
    for (std::string& word : words)
        arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    constexpr int kNew = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&files, 1, out.c_str(), kNew, 0600);
    posix_spawn_file_actions_addopen(&files, 2, err.c_str(), kNew, 0600);
    pid_t child = 0;
    const int bad = ::posix_spawnp(&child, "gnuplot", &files, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    if (bad != 0) return -bad;
    int state = 0;
    while (::waitpid(child, &state, 0) < 0 && errno == EINTR)
        continue;
    return WIFEXITED(state) ? WEXITSTATUS(state) : 128;
}

std::string with(std::string text, const std::string& from, const std::string& to) {
    for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
        text.replace(at, from.size(), to);
    return text;
}

} // namespace

Status check_gnuplot() {
    const int code = run({"gnuplot", "--version"}, "/dev/null", "/dev/null");
    if (code == 0) return {};
    if (code == -ENOENT) return {StatusCode::unsupported, kMissing};
    return {StatusCode::unsupported, fmt::format("gnuplot cannot be started ({})",
                                                 code < 0 ? std::strerror(-code) : fmt::format("exit code {}", code))};
}

std::string gnuplot_text(const std::string& text) {
    std::string out = "'";
    for (const char c : text) {
        if (c == '\'')
            out += "''";
        else
            out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + "'";
}

Result<std::string> draw_svg(const std::string& name, int width, int height, const std::string& script) {
    const Scratch scratch;
    if (!scratch.ok()) {
        return Status(StatusCode::unsupported,
                      fmt::format("a folder for plots cannot be made: {}", std::strerror(errno)));
    }
    const std::string file = scratch.file("plot.gp"), out = scratch.file("plot.svg"), err = scratch.file("errors");
    const std::string head = fmt::format("set encoding utf8\nset terminal svg size {},{} dynamic noenhanced name {} "
                                         "font 'sans-serif,13' linewidth 1.2 background rgb 'white'\n",
                                         width, height, gnuplot_text(name));
    if (Status bad = write_file(file, head + script); !bad) return bad;
    const int code = run({"gnuplot", "-d", file}, out, err); // -d: a user's own settings do not count
    if (code == -ENOENT) return Status(StatusCode::unsupported, kMissing);
    if (code != 0) {
        std::string why = read_file(err) ? *read_file(err) : "";
        for (char& c : why)
            c = c == '\n' ? ' ' : c;
        return Status(StatusCode::unsupported,
                      fmt::format("gnuplot could not draw {} (exit code {}): {}", name, code, why));
    }
    Result<std::string> text = read_file(out);
    if (!text) return text.status();
    const size_t begin = text->find("<svg"), end = text->rfind("</svg>");
    if (begin == std::string::npos || end == std::string::npos) {
        return Status(StatusCode::corrupt, fmt::format("gnuplot drew nothing for {}", name));
    }
    std::string svg = text->substr(begin, end + 6 - begin);
    for (const char* mark : {" id='", " id=\"", "href='#", "href=\"#", "url(#"})
        svg = with(std::move(svg), mark, fmt::format("{}{}-", mark, name));
    // Cells of a heat map are numbers: browsers would blend neighbours.
    return with(std::move(svg), "<image ", "<image style='image-rendering:pixelated' ");
}

} // namespace kvmosaic::eval
