// Files that end in .gz.
#pragma once

#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

// What the bytes stand for, at most `limit` of it; all members of the file, one after the other.
Result<std::string> gunzip(const std::string& bytes, size_t limit = size_t(1) << 30);

} // namespace kvmosaic::eval
