// Sequences in files: what Cache::save gives, in a frame of sections with lengths and checksums (XXH3), optionally
// compressed (zstd, where the build has it). Sections that sequences have in common are stored once. docs/format.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"
#include "kvmosaic/method.h"

namespace kvmosaic {

// One sequence of a file, and what its owner wants to find again beside it.
struct FileSequence {
    SeqId seq = 0;
    std::vector<int32_t> tokens = {}; // ids of its rows, then of tokens that are known but not in the cache; or empty
    std::string note = {};            // whatever the owner needs, in its own form
};

struct FileOptions {
    bool compress = false; // refused where the build has no zstd
    int level = 3;         // of the compression, 1 to 19
};
bool can_compress();

// As bytes. Refuses sequences that the cache does not hold, and tokens that are fewer than the rows.
Result<std::vector<uint8_t>> write_sequences(const Cache& cache, std::span<const FileSequence> sequences,
                                             const FileOptions& options = {});
// All sequences of the bytes replace those of the same name, or, on an error, nothing has changed. Any damage is
// refused with the field named. `into`: other names, in the order of the bytes; empty: as they were saved.
Result<std::vector<FileSequence>> read_sequences(Cache* cache, std::span<const uint8_t> bytes,
                                                 std::span<const SeqId> into = {});

// The same with a file. Written beside it, synchronized and renamed: whatever interrupts a save, the path holds either
// what it held before or the whole new file. An existing file is replaced.
Status save_file(const Cache& cache, const std::string& path, std::span<const FileSequence> sequences,
                 const FileOptions& options = {});
Result<std::vector<FileSequence>> load_file(Cache* cache, const std::string& path, std::span<const SeqId> into = {});

// What a file says of itself, without a cache. Sections are checked, pages are not decoded.
struct FileInfo {
    uint32_t version = 0;
    uint64_t bytes = 0; // of the file
    ModelShape model;
    std::string spec;
    struct Sequence {
        SeqId seq = 0;
        int64_t rows = 0;
        int32_t first_position = 0, last_position = 0;
        std::vector<int64_t> packed; // [L][2] key, value: rows packed beyond the front
        int64_t tokens = 0;
        std::string note;
        uint64_t state_bytes = 0; // of all its sections, uncompressed
    };
    std::vector<Sequence> sequences;
    struct Section {
        std::string name;               // "model", "pages", ...: all sections of a kind together
        int64_t count = 0, shared = 0;  // shared: of other sequences' sections, not stored again
        uint64_t bytes = 0, stored = 0; // stored: in the file, compressed
    };
    std::vector<Section> sections;
};
Result<FileInfo> file_info(std::span<const uint8_t> bytes);
// A file's bytes, as they are.
Result<std::vector<uint8_t>> read_file(const std::string& path);

} // namespace kvmosaic
