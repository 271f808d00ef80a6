// Saved state: u64 length, then that many bytes of a sequence file (kvmosaic/file.h); 0 where there is no sequence. So
// what llama.cpp saves, to memory, to files and for the server's slots, is checked as files are. A partial state asks
// only for what truncation cannot bring back, and truncation brings everything back here: it is empty.
#include <algorithm>
#include <stdexcept>

#include "kvmosaic/file.h"
#include "llama-io.h"
#include "llama/memory.h"

namespace kvmosaic::seam {
namespace {

template <typename T>
void put(llama_io_write_i& io, T value) {
    io.write(&value, sizeof(value));
}

template <typename T>
T get(llama_io_read_i& io) {
    T value;
    io.read(&value, sizeof(value));
    return value;
}

// A length that the source cannot hold must fail in the source, not in the allocator.
std::vector<uint8_t> get_bytes(llama_io_read_i& io, uint64_t count) {
    constexpr uint64_t kChunk = uint64_t(4) << 20;
    std::vector<uint8_t> bytes;
    while (bytes.size() < count) {
        const size_t have = bytes.size();
        const size_t more = size_t(std::min<uint64_t>(count - have, kChunk));
        bytes.resize(have + more);
        io.read(bytes.data() + have, more);
    }
    return bytes;
}

// Errors are exceptions here because libllama catches and reports them (llama_state_set_data and its relatives).
template <typename T>
T take(Result<T> result) {
    if (!result) throw std::runtime_error("kvmosaic: " + result.status().message());
    return std::move(*result);
}

void check_names(const FileInfo& info) {
    for (const FileInfo::Sequence& s : info.sequences) {
        if (s.seq < 0 || s.seq >= LLAMA_MAX_SEQ) {
            throw std::runtime_error("kvmosaic: the state names sequence " + std::to_string(s.seq) +
                                     ", allowed are 0.." + std::to_string(LLAMA_MAX_SEQ - 1));
        }
    }
}

} // namespace

void Memory::state_write(llama_io_write_i& io, llama_seq_id id, llama_state_seq_flags flags) const {
    cache_->end_step();
    std::vector<FileSequence> sequences;
    if (!(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
        for (const llama_seq_id s : which(id))
            sequences.push_back({s});
    }
    if (sequences.empty()) return put<uint64_t>(io, 0);
    const std::vector<uint8_t> bytes = take(write_sequences(*cache_, sequences));
    put<uint64_t>(io, bytes.size());
    io.write(bytes.data(), bytes.size());
}

void Memory::state_read(llama_io_read_i& io, llama_seq_id id, llama_state_seq_flags flags) {
    cache_->end_step();
    const std::vector<uint8_t> bytes = get_bytes(io, get<uint64_t>(io));
    if (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) {
        if (!bytes.empty()) throw std::runtime_error("kvmosaic: a partial state holds no sequences, this one does");
        return;
    }
    std::vector<FileSequence> loaded;
    if (!bytes.empty() && id < 0) check_names(take(file_info(bytes)));
    if (!bytes.empty()) {
        const SeqId own[] = {id};
        loaded = take(read_sequences(cache_.get(), bytes, {own, size_t(id < 0 ? 0 : 1)}));
    }
    for (const llama_seq_id s : which(id)) {
        const bool fresh = std::any_of(loaded.begin(), loaded.end(), [s](const FileSequence& l) { return l.seq == s; });
        if (!fresh) cache_->remove(s);
    }
}

} // namespace kvmosaic::seam
