// What `run` keeps in a sequence file beside the rows, so that a conversation goes on where it ended.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eval/engine.h"
#include "kvmosaic/file.h"
#include "kvmosaic/status.h"

namespace kvmosaic::tool {

struct Saved {
    std::vector<int32_t> tokens; // of all rows, then those that are known but not in the cache; empty: nobody told
    bool shaped = false;         // the text is a conversation in the model's template
    std::string text;            // of all tokens; conversations only
    std::vector<std::pair<std::string, std::string>> messages; // role, content
};

// A file with one sequence, read and checked; info.spec is the spec that it was written with.
struct SavedFile {
    std::string path;
    std::vector<uint8_t> bytes;
    FileInfo info;
};
Result<SavedFile> open_saved(const std::string& path);
// Sequence 0 of the context becomes that of the file; the context is as it was when this is refused.
Result<Saved> load_saved(const SavedFile& file, const eval::Context& context);
// Sequence 0, whole or not at all; returns the bytes of the file.
Result<int64_t> write_saved(const std::string& path, const eval::Context& context, const Saved& what, bool compress);

// The verb `inspect FILE`, to standard output.
void inspect_saved(const std::string& path, bool json);

} // namespace kvmosaic::tool
