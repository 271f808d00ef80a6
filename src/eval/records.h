// Records of evaluation data: JSON objects, one a line.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

struct Records {
    std::vector<nlohmann::json> items;
    std::vector<int> lines; // where each stood in the file
    std::string sha256;     // of the file's bytes
};
// Every record is an object whose fields `texts` are strings; a line that is none is an error that names it, and so is
// a file without any. Empty lines are passed over.
Result<Records> read_records(const std::string& path, std::initializer_list<const char*> texts);

} // namespace kvmosaic::eval
