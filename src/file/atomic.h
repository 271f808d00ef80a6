// Files that are replaced as a whole or not at all.
#pragma once

#include <sys/types.h>

#include <functional>
#include <span>
#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::file {

// What replacing a file asks of the system; tests put failures here.
struct System {
    std::function<ssize_t(int, const void*, size_t)> write;
    std::function<int(int)> sync;
    std::function<int(const char*, const char*)> rename;
    System(); // the real ones
};

// Writes beside `path`, synchronizes, renames, synchronizes the folder. On an error `path` is what it was and nothing
// is left beside it. A link is followed. The mode of a file that was there is kept.
Status replace_file(const std::string& path, std::span<const uint8_t> bytes, const System& system = {});

} // namespace kvmosaic::file
