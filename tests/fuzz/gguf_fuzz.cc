// libFuzzer target: any bytes at all must give ok or one sentence. Start it with a folder of small GGUF files, e.g.
//   python3 tests/fuzz/gguf_corpus.py corpus && gguf_fuzz -max_len=65536 -timeout=5 -rss_limit_mb=1024 corpus
#include <cstdint>
#include <cstdlib>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "llama/gguf_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const int fd = memfd_create("gguf", 0);
    static const std::string path = "/proc/self/fd/" + std::to_string(fd);
    if (fd < 0 || ftruncate(fd, 0) != 0) std::abort();
    if (pwrite(fd, data, size, 0) != static_cast<ssize_t>(size)) std::abort();
    kvmosaic::GgufInfo info;
    const kvmosaic::Status status = kvmosaic::check_gguf(path, &info);
    // A refusal names the file and is one line; a pass names at least one shard.
    if (!status.ok() &&
        (!status.message().starts_with(path + ": ") || status.message().find('\n') != std::string::npos)) {
        std::abort();
    }
    if (status.ok() && info.shards.empty()) std::abort();
    return 0;
}
