// Sizes of memory as people write them and as the program prints them.
#pragma once

#include <cstdint>
#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

// "4GiB", "4G" and "4096M" are powers of 1024, "4GB" is 4e9 bytes; fractions are possible. 1 MiB to 1 PiB; the error
// says what was wrong with `text`, without naming where it came from.
Result<int64_t> parse_bytes(const std::string& text);

std::string bytes_text(int64_t bytes); // "93.5 MiB", "1.04 GiB"

} // namespace kvmosaic::eval
