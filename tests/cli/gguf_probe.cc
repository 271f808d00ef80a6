// The GGUF pre-flight check by itself, without libllama.
//   gguf_probe FILE…      a line each: "ok MAPPABLE SHARDS [warning]" or "error CODE sentence"
//   gguf_probe sweep FILE OFFSETS
//       1. every shorter file must be refused, and every refusal must be one line that names the file;
//       2. every one of the first OFFSETS bytes is changed in four ways; the answer may be either, but must come.
//       Prints how many were refused, then "passed OFFSET VALUE" for each changed file that passed.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "llama/gguf_check.h"

namespace {

int describe(const char* path) {
    kvmosaic::GgufInfo info;
    const kvmosaic::Status s = kvmosaic::check_gguf(path, &info);
    if (!s.ok()) {
        std::printf("error %d %s\n", static_cast<int>(s.code()), s.message().c_str());
        return 1;
    }
    std::printf("ok %d %zu", info.mappable ? 1 : 0, info.shards.size());
    for (const std::string& w : info.warnings) {
        std::printf(" %s", w.c_str());
    }
    std::printf("\n");
    return 0;
}

struct Sweep {
    int fd = memfd_create("gguf", 0);
    std::string path = "/proc/self/fd/" + std::to_string(fd);

    // True when the check accepts these bytes.
    bool accepts(const std::vector<char>& bytes, size_t size) {
        if (ftruncate(fd, 0) != 0 || pwrite(fd, bytes.data(), size, 0) != static_cast<ssize_t>(size)) std::abort();
        const kvmosaic::Status s = kvmosaic::check_gguf(path);
        if (!s.ok() && (!s.message().starts_with(path + ": ") || s.message().find('\n') != std::string::npos)) {
            std::printf("not one sentence that names the file: %s\n", s.message().c_str());
            std::exit(2);
        }
        return s.ok();
    }
};

int sweep(const char* path, size_t offsets) {
    std::ifstream in(path, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(in)), {});
    Sweep run;
    if (!run.accepts(bytes, bytes.size())) {
        std::printf("the whole file is refused\n");
        return 2;
    }
    for (size_t n = 0; n < bytes.size(); ++n) {
        if (run.accepts(bytes, n)) {
            std::printf("accepted when cut to %zu of %zu bytes\n", n, bytes.size());
            return 2;
        }
    }
    std::vector<std::string> passed;
    size_t refused = 0;
    for (size_t at = 0; at < std::min(offsets, bytes.size()); ++at) {
        const char old = bytes[at];
        for (const int change : {0x01, 0x80, 0xff, old & 0xff}) { // the last makes the byte zero
            if (change == 0) continue;
            bytes[at] = static_cast<char>(old ^ change);
            if (run.accepts(bytes, bytes.size())) {
                passed.push_back("passed " + std::to_string(at) + " " + std::to_string(bytes[at] & 0xff));
            } else {
                ++refused;
            }
        }
        bytes[at] = old;
    }
    std::printf("refused %zu\n", refused);
    for (const std::string& line : passed) {
        std::printf("%s\n", line.c_str());
    }
    return 0;
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 4 && std::strcmp(argv[1], "sweep") == 0) return sweep(argv[2], std::strtoull(argv[3], nullptr, 10));
    int worst = 0;
    for (int i = 1; i < argc; ++i) {
        worst |= describe(argv[i]);
    }
    return worst;
}
