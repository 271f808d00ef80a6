#include "kvmosaic/saved.h"

#include <filesystem>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

// The note of other programs is not ours to read: then there is only what tokens and rows say.
void read_note(const std::string& note, Saved* into) {
    const ordered_json json = ordered_json::parse(note, nullptr, false);
    if (!json.is_object() || json.value("kvmosaic_run", ordered_json()) != 1) return;
    try {
        Saved found;
        json.at("text").get_to(found.text);
        for (const auto& message : json.at("messages"))
            found.messages.emplace_back(message.at("role"), message.at("content"));
        into->shaped = true;
        into->text = std::move(found.text);
        into->messages = std::move(found.messages);
    } catch (const ordered_json::exception&) {
        return; // a note that is like ours and is not
    }
}

} // namespace

Result<SavedFile> open_saved(const std::string& path) {
    auto bytes = read_file(path);
    if (!bytes) return bytes.status();
    auto info = file_info(*bytes);
    if (!info) return Status(info.status().code(), path + ": " + info.status().message());
    if (info->sequences.size() != 1)
        return Status(StatusCode::invalid_argument, fmt::format("{}: holds {} sequences; run goes on with files of one",
                                                                path, info->sequences.size()));
    return SavedFile{path, std::move(*bytes), std::move(*info)};
}

Result<Saved> load_saved(const SavedFile& file, const eval::Context& context) {
    const SeqId own[] = {0};
    auto read = read_sequences(context.cache(), file.bytes, own);
    if (!read) return Status(read.status().code(), file.path + ": " + read.status().message());
    Saved out;
    out.tokens = std::move(read->front().tokens);
    read_note(read->front().note, &out);
    return out;
}

Result<int64_t> write_saved(const std::string& path, const eval::Context& context, const Saved& what, bool compress) {
    FileSequence sequence;
    sequence.tokens = what.tokens;
    if (what.shaped) {
        ordered_json note{{"kvmosaic_run", 1}, {"text", what.text}, {"messages", ordered_json::array()}};
        for (const auto& [role, content] : what.messages)
            note["messages"].push_back({{"role", role}, {"content", content}});
        sequence.note = note.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
    }
    const Status st = save_file(*context.cache(), path, {&sequence, 1}, {.compress = compress});
    if (!st) return st;
    std::error_code ec;
    const auto size = std::filesystem::file_size(path, ec);
    return ec ? int64_t(0) : int64_t(size);
}

} // namespace kvmosaic::tool
