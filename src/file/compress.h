// zstd, or its absence.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic::file {

Result<std::vector<uint8_t>> compress(std::span<const uint8_t> bytes, int level);
// Exactly `bytes` bytes; memory is taken as they come out, not as the file promises.
Result<std::vector<uint8_t>> decompress(std::span<const uint8_t> stored, uint64_t bytes);

} // namespace kvmosaic::file
