#include "eval/texts.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "eval/files.h"

namespace kvmosaic::eval {

Result<std::string> read_text(const std::string& path) {
    Result<std::string> file = read_file(path);
    if (!file || !path.ends_with(".jsonl")) return file;
    const auto wrong = [&](int line, const std::string& why) {
        return Status(StatusCode::invalid_argument, fmt::format("{}, line {}: {}", path, line, why));
    };
    std::string out;
    int number = 0;
    for (size_t at = 0; at < file->size();) {
        const size_t end = std::min(file->find('\n', at), file->size());
        const std::string line = file->substr(at, end - at);
        at = end + 1;
        ++number;
        if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
        const nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
        if (!record.is_object()) return wrong(number, "is not a JSON object");
        for (const char* field : {"question", "answer"}) {
            if (!record.contains(field) || !record[field].is_string()) {
                return wrong(number, fmt::format("has no text in the field '{}'", field));
            }
        }
        out += record["question"].get<std::string>() + "\n" + record["answer"].get<std::string>() + "\n\n";
    }
    return out;
}

} // namespace kvmosaic::eval
