#include "core/arena.h"

#include <cstring>
#include <iterator>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define KVMOSAIC_MMAP 1
#endif

namespace kvmosaic {

namespace {

// Straight from the system, so that a returned slab leaves the process and untouched pages cost nothing.
void* take_slab(size_t bytes) {
#if KVMOSAIC_MMAP
    // On edges of huge pages, for attention walks over all of it, and address lookups that miss cost as much as data.
    constexpr size_t kHuge = size_t(2) << 20;
    const size_t more = bytes + kHuge;
    void* p = mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    uint8_t* const first = static_cast<uint8_t*>(p);
    uint8_t* const slab = first + (kHuge - reinterpret_cast<uintptr_t>(p) % kHuge) % kHuge;
    if (slab > first) munmap(first, size_t(slab - first));
    if (slab + bytes < first + more) munmap(slab + bytes, size_t(first + more - slab - bytes));
#ifdef MADV_HUGEPAGE
    madvise(slab, bytes, MADV_HUGEPAGE);
#endif
    return slab;
#else
    return ::operator new(bytes, std::align_val_t(Arena::kBlock), std::nothrow);
#endif
}

void return_slab(void* p, size_t bytes) {
#if KVMOSAIC_MMAP
    munmap(p, bytes);
#else
    ::operator delete(p, std::align_val_t(Arena::kBlock));
    (void)bytes;
#endif
}

} // namespace

Arena::~Arena() {
    for (const auto& [at, size] : slabs_)
        return_slab(reinterpret_cast<void*>(at), size);
}

void Arena::insert_free(Address at, size_t size) {
    free_by_address_.emplace(at, size);
    free_by_size_.emplace(size, at);
}

void Arena::erase_free(Address at, size_t size) {
    free_by_address_.erase(at);
    free_by_size_.erase({size, at});
}

void* Arena::allocate(size_t bytes) {
    const size_t need = rounded(bytes ? bytes : 1);
    if (at_limit(need)) return nullptr;
    auto fit = free_by_size_.lower_bound({need, 0});
    if (fit == free_by_size_.end()) {
        const size_t slab = need > kSlab ? need : kSlab;
        void* p = take_slab(slab);
        if (!p) return nullptr;
        slabs_.emplace(reinterpret_cast<Address>(p), slab);
        held_ += int64_t(slab);
        insert_free(reinterpret_cast<Address>(p), slab);
        fit = free_by_size_.lower_bound({need, 0});
    }
    const auto [size, at] = *fit;
    erase_free(at, size);
    if (size > need) insert_free(at + need, size - need);
    live_ += int64_t(need);
    void* block = reinterpret_cast<void*>(at);
    if (poison_) std::memset(block, 0xFF, need);
    return block;
}

void Arena::release(void* block, size_t bytes) {
    if (!block) return;
    size_t size = rounded(bytes ? bytes : 1);
    Address at = reinterpret_cast<Address>(block);
    if (poison_) std::memset(block, 0xFF, size);
    live_ -= int64_t(size);
    freed_ += int64_t(size);

    auto slab = std::prev(slabs_.upper_bound(at));
    const Address slab_end = slab->first + slab->second;
    auto next = free_by_address_.lower_bound(at);
    if (next != free_by_address_.end() && next->first == at + size && next->first < slab_end) {
        const auto [next_at, next_size] = *next;
        erase_free(next_at, next_size);
        size += next_size;
    }
    auto before = free_by_address_.lower_bound(at);
    if (before != free_by_address_.begin()) {
        --before;
        const auto [before_at, before_size] = *before;
        if (before_at + before_size == at && before_at >= slab->first) {
            erase_free(before_at, before_size);
            at = before_at;
            size += before_size;
        }
    }
    if (at == slab->first && size == slab->second && slabs_.size() > 1) {
        return_slab(reinterpret_cast<void*>(at), size);
        held_ -= int64_t(size);
        slabs_.erase(slab);
        return;
    }
    insert_free(at, size);
}

void Arena::trim() {
#if KVMOSAIC_MMAP
    constexpr int64_t kWorthIt = int64_t(1) << 20;
    constexpr size_t kHole = size_t(64) << 10, kPage = size_t(16) << 10; // whole pages on any usual system
    if (freed_ < kWorthIt) return;
    freed_ = 0;
    for (auto it = free_by_size_.lower_bound({kHole, 0}); it != free_by_size_.end(); ++it) {
        const Address first = (it->second + kPage - 1) / kPage * kPage;
        const Address end = (it->second + it->first) / kPage * kPage;
        if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
    }
#endif
}

void Arena::give_back() {
    for (auto slab = slabs_.begin(); slab != slabs_.end();) {
        const auto hole = free_by_address_.find(slab->first);
        if (hole == free_by_address_.end() || hole->second != slab->second) {
            ++slab;
            continue;
        }
        erase_free(slab->first, slab->second);
        return_slab(reinterpret_cast<void*>(slab->first), slab->second);
        held_ -= int64_t(slab->second);
        slab = slabs_.erase(slab);
    }
    freed_ = INT64_MAX / 2;
    trim();
    freed_ = 0;
}

} // namespace kvmosaic
