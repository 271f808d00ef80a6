// Inside of device::DeviceCache. Not installed.
#pragma once

#include <string>
#include <vector>

#include "cache/impl.h"
#include "core/parallel.h"
#include "kernels/cuda/memory.h"
#include "kvmosaic/device_cache.h"

namespace kvmosaic::device {

inline Status refuse(StatusCode code, const std::string& what) { return {code, "device cache: " + what}; }

// Row i of a sequence beyond its front lies at i % capacity, so the rows of a page lie together.
inline int64_t ring_row(const RawRows& rows, int64_t beyond) { return beyond % rows.capacity; }

// Raw rows of a slot, all its KV heads: what goes or comes as one piece.
struct Stripe {
    uint8_t* at;
    size_t bytes;
};
inline Stripe stripe(const RawRows& rows, int32_t slot, int32_t kv_heads, int32_t dim) {
    const size_t bytes = size_t(kv_heads) * size_t(rows.capacity) * size_t(dim) * 2;
    return {static_cast<uint8_t*>(rows.base) + size_t(slot) * bytes, bytes};
}

inline constexpr uint32_t kNoPair = 0xFFFFFFFFu;

// Keys or values of one layer, all slots.
struct SideStore {
    StoreSpec store;
    int32_t dim = 0, first = 0; // first: side index of KV head 0; others follow at steps of 2
    std::vector<uint8_t> widths;
    bool packs = false, varies = false; // varies: pages differ in size and are placed one after another
    uint32_t page_units = 0;            // of a page that does not vary, or of the largest of those that do
    uint32_t units = 0;                 // of the pool
    uint32_t* used = nullptr;           // varying pages: on the device
    uint32_t* exhausted = nullptr;
    SideMemory memory;
    float* sums = nullptr; // [slots * kv_heads][D]
    int32_t* counts = nullptr;
    KeyBasis basis;
    float* factor = nullptr; // of basis
    uint16_t* order = nullptr;
    const char* no_basis = nullptr; // why queries cannot be brought there
    KeyMean mean;                   // keys of space `centred`; its tables are those of the layer's rotation
    uint32_t* means = nullptr;      // of mean
    std::vector<uint32_t> pairs;    // [slots] its channels, a and b << 16; kNoPair: none
};

// What the host knows of a slot: what it was when it came.
struct Slot {
    bool taken = false;
    std::vector<int32_t> positions;
    std::vector<uint8_t> decided;                      // section of a state
    bool undecided = false;                            // something is decided once a sequence, and was not yet
    bool shifted = false;                              // its rows are not at positions 0, 1, ...
    bool uneven = false;                               // heads without maps have other ladders than the plan
    std::vector<int64_t> counts;                       // [side_count] of queries
    std::vector<Ladder> ladder;                        // [side_count] of tiered pages without a map
    std::vector<std::vector<const PageLayout*>> pages; // [side_count] pages that vary
};

struct DeviceCache::Impl {
    using Host = ::kvmosaic::Cache::Impl; // through a friend

    ~Impl();
    std::unique_ptr<Cache> like; // without sequences: plans, layouts, the method
    DeviceCacheOptions options;
    Memory* memory = nullptr;
    int64_t allocated = 0;
    std::vector<void*> blocks;
    int32_t stride = 0;            // of page tables
    std::vector<SideStore> sides;  // [L][2]
    std::vector<int32_t> group_of; // [L], -1: no K/V
    std::vector<int32_t> leaders;  // [groups] a layer of each
    std::vector<SequenceState*> states;
    mutable std::vector<Slot> slots;

    template <class T>
    Status take(size_t count, T** at) {
        Result<void*> block = memory->allocate(count * sizeof(T));
        if (!block) return block.status();
        blocks.push_back(*block);
        allocated += int64_t(count * sizeof(T));
        *at = static_cast<T*>(*block);
        return {};
    }
    SideStore& side(int32_t layer, Side s) { return sides[size_t(layer) * 2 + size_t(s)]; }
    const SideStore& side(int32_t layer, Side s) const { return sides[size_t(layer) * 2 + size_t(s)]; }
    int32_t kv_heads(int32_t layer) const { return like->shape().layers[size_t(layer)].kv_heads; }

    Status set_up();
    Status set_up_side(int32_t layer, Side which);
    Status check_slot(int32_t slot) const;
    // States of a slot, one for each group.
    Status read_states(int32_t slot, std::vector<SequenceState>* out) const;
    // Pages of a side that hold packed rows.
    int64_t pages(int32_t layer, Side which, const std::vector<SequenceState>& states) const;
    // The layout of a page as it lies on the device; `bytes`: the page, for ladders that only its map tells.
    const PageLayout* page_layout(const SideStore& s, const Slot& slot, int32_t index, int64_t page, uint32_t tiers,
                                  const uint8_t* bytes) const;
    Status make_room(int32_t layer, Side which, uint32_t units);
    struct Moved;
    Status set_up_basis(int32_t layer);
    Status set_up_mean(int32_t layer);
    template <class T>
    Status put(const std::vector<T>& from, const void** at) {
        T* to = nullptr;
        if (Status bad = take(from.size(), &to); !bad) return bad;
        *at = to;
        return memory->copy_in(to, from.data(), from.size() * sizeof(T));
    }
    Status write_basis(int32_t layer, int32_t slot, const Sequence& seq);
    Status write_rows(int32_t layer, Side which, int32_t slot, const Sequence& seq);
    Status write_pages(int32_t layer, Side which, int32_t slot, const Moved& moved);
};

// The ladder of a page with a map whose tiers are known in granules (PageRef::tiers): the live entries of each tier
// ascend, the others are 0.
Ladder ladder_of_device_page(const StoreSpec& store, int32_t dim, const std::vector<uint8_t>& widths, uint32_t tiers,
                             const uint8_t* bytes);

} // namespace kvmosaic::device
