// Memory of a cache: blocks carved from slabs, best fit, neighbours joined again when freed. Page sizes vary from page
// to page, so size classes would waste what quantization saved; a general allocator would not tell what it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace kvmosaic {

// Not thread-safe: a cache allocates between computations only. Every size is rounded up to kBlock.
class Arena {
public:
    static constexpr size_t kBlock = 64;             // alignment and granularity
    static constexpr size_t kSlab = size_t(4) << 20; // asked from the system at a time

    // max_bytes 0: no limit. poison: every block is filled with 0xFF when handed out and when returned.
    Arena(int64_t max_bytes, bool poison) : max_bytes_(max_bytes), poison_(poison) {}
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    static size_t rounded(size_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }
    void* allocate(size_t bytes);            // null when the limit or the system refuses; contents undefined
    void release(void* block, size_t bytes); // bytes as given to allocate

    // Gives the memory of large holes back to the system; the addresses stay ours. Worth a call after a step that freed
    // much (raw rows of a prompt); does nothing when little was freed since the last call.
    void trim();
    // Slabs that hold nothing go back, and all holes are trimmed.
    void give_back();

    int64_t live() const { return live_; } // handed out, rounded
    int64_t held() const { return held_; } // address space taken from the system
    bool at_limit(size_t bytes) const { return max_bytes_ > 0 && live_ + int64_t(rounded(bytes)) > max_bytes_; }

private:
    using Address = uintptr_t;
    void insert_free(Address at, size_t size);
    void erase_free(Address at, size_t size);

    std::map<Address, size_t> slabs_;           // start -> size
    std::map<Address, size_t> free_by_address_; // start -> size; never spans two slabs
    std::set<std::pair<size_t, Address>> free_by_size_;
    int64_t max_bytes_ = 0, live_ = 0, held_ = 0, freed_ = 0; // freed_: since the last trim
    bool poison_ = false;
};

} // namespace kvmosaic
