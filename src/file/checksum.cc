#define XXH_INLINE_ALL // the library's own way of needing nothing at link and run time
#include <xxhash.h>

#include "file/frame.h"

namespace kvmosaic::file {

uint64_t checksum(std::span<const uint8_t> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

} // namespace kvmosaic::file
