// Saved state: u32 magic, u32 number of sequences, then per sequence its id (i32), the length (u64) and the bytes of
// Cache::save. A partial state asks only for what truncation cannot bring back, and truncation brings everything back
// here: it is empty.
#include <algorithm>
#include <stdexcept>

#include "llama-io.h"
#include "llama/memory.h"

namespace kvmosaic::seam {
namespace {

constexpr uint32_t kMagic = 0x534d564b; // "KVMS" in the file

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

} // namespace

void Memory::state_write(llama_io_write_i& io, llama_seq_id id, llama_state_seq_flags flags) const {
    cache_->end_step();
    std::vector<llama_seq_id> ids;
    if (!(flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) ids = which(id);
    put<uint32_t>(io, kMagic);
    put<uint32_t>(io, uint32_t(ids.size()));
    for (const llama_seq_id s : ids) {
        const std::vector<uint8_t> bytes = cache_->save(s);
        put<int32_t>(io, s);
        put<uint64_t>(io, bytes.size());
        io.write(bytes.data(), bytes.size());
    }
}

// Errors here are exceptions because libllama catches and reports them (llama_state_set_data and its relatives).
void Memory::state_read(llama_io_read_i& io, llama_seq_id id, llama_state_seq_flags flags) {
    cache_->end_step();
    if (get<uint32_t>(io) != kMagic) throw std::runtime_error("kvmosaic: not a state of this cache");
    const uint32_t count = get<uint32_t>(io);
    const bool partial = (flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) != 0;
    const uint32_t limit = partial ? 0 : id < 0 ? LLAMA_MAX_SEQ : 1;
    if (count > limit) {
        throw std::runtime_error("kvmosaic: the state holds " + std::to_string(count) +
                                 " sequences, expected at most " + std::to_string(limit));
    }
    if (partial) return;
    for (const llama_seq_id s : which(id))
        cache_->remove(s);
    for (uint32_t i = 0; i < count; ++i) {
        const int32_t stored = get<int32_t>(io);
        const std::vector<uint8_t> bytes = get_bytes(io, get<uint64_t>(io));
        if (stored < 0 || stored >= LLAMA_MAX_SEQ) {
            throw std::runtime_error("kvmosaic: the state names sequence " + std::to_string(stored) +
                                     ", allowed are 0.." + std::to_string(LLAMA_MAX_SEQ - 1));
        }
        const Status status = cache_->load(id < 0 ? stored : id, bytes);
        if (!status) throw std::runtime_error("kvmosaic: " + status.message());
    }
}

} // namespace kvmosaic::seam
