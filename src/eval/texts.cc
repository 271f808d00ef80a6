#include "eval/texts.h"

#include "eval/files.h"
#include "eval/records.h"

namespace kvmosaic::eval {

Result<std::string> read_text(const std::string& path) {
    if (!path.ends_with(".jsonl") && !path.ends_with(".jsonl.gz")) return read_file(path);
    const auto read = [&](const char* first, const char* between, const char* second) -> Result<std::string> {
        const Result<Records> records = read_records(path, {first, second});
        if (!records) return records.status();
        std::string out;
        for (const nlohmann::json& record : records->items)
            out += record[first].get<std::string>() + between + record[second].get<std::string>() + "\n\n";
        return out;
    };
    const Result<Records> any = read_records(path, {});
    if (!any) return any.status();
    if (any->items.front().contains("canonical_solution")) return read("prompt", "", "canonical_solution");
    return read("question", "\n", "answer");
}

} // namespace kvmosaic::eval
