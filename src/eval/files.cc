#include "eval/files.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <openssl/evp.h>
#include <sys/utsname.h>
#include <unistd.h>

namespace kvmosaic::eval {
namespace fs = std::filesystem;

namespace {

struct CloseFile {
    void operator()(std::FILE* f) const { std::fclose(f); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

std::string reason() { return std::strerror(errno); }

std::string hex(const unsigned char* bytes, unsigned n) {
    std::string text;
    for (unsigned i = 0; i < n; ++i)
        text += fmt::format("{:02x}", bytes[i]);
    return text;
}

class Sha256 {
public:
    Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
    ~Sha256() { EVP_MD_CTX_free(context_); }
    Sha256(const Sha256&) = delete;
    Sha256& operator=(const Sha256&) = delete;
    void add(const void* bytes, size_t n) { EVP_DigestUpdate(context_, bytes, n); }
    std::string finish() {
        unsigned char digest[EVP_MAX_MD_SIZE];
        unsigned n = 0;
        EVP_DigestFinal_ex(context_, digest, &n);
        return hex(digest, n);
    }

private:
    EVP_MD_CTX* context_;
};

} // namespace

bool exists(const std::string& path) {
    std::error_code ec;
    return fs::exists(path, ec);
}

int64_t file_size(const std::string& path) {
    std::error_code ec;
    const auto n = fs::file_size(path, ec);
    return ec ? -1 : int64_t(n);
}

Result<std::string> read_file(const std::string& path, int64_t limit) {
    std::error_code ec;
    if (path != "-" && fs::is_directory(path, ec)) {
        return Status(StatusCode::invalid_argument, fmt::format("{}: is a folder, a file is needed", path));
    }
    File opened(path == "-" ? nullptr : std::fopen(path.c_str(), "rb"));
    if (path != "-" && !opened) {
        return Status(errno == ENOENT ? StatusCode::not_found : StatusCode::invalid_argument,
                      fmt::format("{}: cannot be read: {}", path, reason()));
    }
    std::FILE* file = opened ? opened.get() : stdin;
    std::string text;
    char block[1 << 16];
    while (const size_t n = std::fread(block, 1, sizeof block, file)) {
        text.append(block, n);
        if (int64_t(text.size()) > limit) {
            return Status(StatusCode::invalid_argument,
                          fmt::format("{}: is larger than {} bytes, the most that is read", path, limit));
        }
    }
    if (std::ferror(file)) {
        return Status(StatusCode::invalid_argument, fmt::format("{}: cannot be read: {}", path, reason()));
    }
    return text;
}

std::string temporary_name(const std::string& path) { return fmt::format("{}.tmp-{}", path, ::getpid()); }

Status write_file(const std::string& path, const std::string& text) {
    const std::string temporary = temporary_name(path);
    bool good = false;
    {
        File file(std::fopen(temporary.c_str(), "wb"));
        good = file && std::fwrite(text.data(), 1, text.size(), file.get()) == text.size() &&
               std::fflush(file.get()) == 0 && ::fsync(::fileno(file.get())) == 0;
    }
    if (good && std::rename(temporary.c_str(), path.c_str()) == 0) return {};
    const std::string why = reason();
    std::remove(temporary.c_str());
    return {StatusCode::invalid_argument, fmt::format("{}: cannot be written: {}", path, why)};
}

Result<std::string> sha256_of_file(const std::string& path, const Progress& progress) {
    File file(std::fopen(path.c_str(), "rb"));
    if (!file) return Status(StatusCode::not_found, fmt::format("{}: cannot be read: {}", path, reason()));
    const double total = double(std::max<int64_t>(1, file_size(path)));
    Sha256 sum;
    std::string block(1 << 20, '\0');
    double done = 0;
    while (const size_t n = std::fread(block.data(), 1, block.size(), file.get())) {
        sum.add(block.data(), n);
        done += double(n);
        if (progress) progress("checksum of the model", done / total);
    }
    if (std::ferror(file.get())) {
        return Status(StatusCode::invalid_argument, fmt::format("{}: cannot be read: {}", path, reason()));
    }
    return sum.finish();
}

std::string sha256_of(const std::string& bytes) {
    Sha256 sum;
    sum.add(bytes.data(), bytes.size());
    return sum.finish();
}

std::string cache_folder() {
    if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg) return std::string(xdg) + "/kvmosaic";
    if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.cache/kvmosaic";
    return ".kvmosaic-cache";
}

Status make_folder(const std::string& path) {
    std::error_code ec;
    fs::create_directories(path, ec);
    if (!ec) return {};
    return {StatusCode::invalid_argument, fmt::format("{}: cannot make this folder: {}", path, ec.message())};
}

std::string machine_name() {
    std::string processor;
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);) {
        const size_t colon = line.find(": ");
        if (line.rfind("model name", 0) != 0 || colon == std::string::npos) continue;
        processor = line.substr(colon + 2);
        break;
    }
    utsname system{};
    ::uname(&system);
    if (processor.empty()) processor = system.machine;
    return fmt::format("{}, {} threads, {} {}", processor, std::thread::hardware_concurrency(), system.sysname,
                       system.machine);
}

} // namespace kvmosaic::eval
