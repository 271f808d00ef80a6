#include "eval/records.h"

#include <algorithm>

#include <fmt/format.h>

#include "eval/files.h"
#include "eval/gzip.h"

namespace kvmosaic::eval {

Result<Records> read_records(const std::string& path, std::initializer_list<const char*> texts) {
    const Result<std::string> stored = read_file(path);
    if (!stored) return stored.status();
    const Result<std::string> file = path.ends_with(".gz") ? gunzip(*stored) : stored;
    if (!file) return Status(file.status().code(), fmt::format("{}: {}", path, file.status().message()));
    const auto wrong = [&](int line, const std::string& why) {
        return Status(StatusCode::invalid_argument, fmt::format("{}, line {}: {}", path, line, why));
    };
    Records out;
    out.sha256 = sha256_of(*stored);
    int number = 0;
    for (size_t at = 0; at < file->size();) {
        const size_t end = std::min(file->find('\n', at), file->size());
        const std::string line = file->substr(at, end - at);
        at = end + 1;
        ++number;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
        if (!record.is_object()) return wrong(number, "is not a JSON object");
        for (const char* field : texts) {
            if (!record.contains(field) || !record[field].is_string()) {
                return wrong(number, fmt::format("has no text in the field '{}'", field));
            }
        }
        out.items.push_back(std::move(record));
        out.lines.push_back(number);
    }
    if (out.items.empty()) return Status(StatusCode::invalid_argument, fmt::format("{}: has no records", path));
    return out;
}

} // namespace kvmosaic::eval
