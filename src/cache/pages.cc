// Pages, sequences and looking into them: everything that happens between steps.
#include <algorithm>
#include <cstring>
#include <new>

#include "cache/impl.h"
#include "cache/scratch.h"

namespace kvmosaic {

const PageLayout* Cache::Impl::intern(const PageLayout& layout) {
    // Over what differs between pages of one store; the rest is compared.
    uint64_t hash = fnv1a(&layout.side, sizeof(layout.side), kFnvStart);
    hash = fnv1a(&layout.dim, sizeof(layout.dim), hash);
    for (int i = 0; i < layout.tier_count; ++i)
        hash = fnv1a(&layout.tiers[size_t(i)].live, sizeof(uint16_t), hash * 31 + layout.tiers[size_t(i)].bits);
    const std::lock_guard lock(layouts_mutex);
    const auto [first, last] = layout_index.equal_range(hash);
    for (auto it = first; it != last; ++it)
        if (*it->second == layout) return it->second;
    layouts.push_back(std::make_unique<PageLayout>(layout));
    return layout_index.emplace(hash, layouts.back().get())->second;
}

void Cache::Impl::forget_layouts(size_t kept) {
    const std::lock_guard lock(layouts_mutex);
    for (; layouts.size() > kept; layouts.pop_back())
        std::erase_if(layout_index, [&](const auto& entry) { return entry.second == layouts.back().get(); });
}

Page* Cache::Impl::new_page(const PageLayout* layout, uint32_t bytes, bool zero, bool evict) {
    const size_t block = Arena::rounded(sizeof(Page) + bytes);
    void* memory = arena.allocate(block);
    while (!memory && evict && evict_prefix())
        memory = arena.allocate(block);
    if (!memory) return nullptr;
    Page* page = new (memory) Page;
    page->block = uint32_t(block);
    page->layout = layout;
    if (zero) std::memset(page->bytes(), 0, bytes);
    return page;
}

void Cache::Impl::drop(Page*& page) {
    if (page && page->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const size_t block = page->block;
        page->~Page();
        arena.release(page, block);
    }
    page = nullptr;
}

void Cache::Impl::narrow(Page*& page, const PageLayout* layout) {
    if (page->refs.load() > 1 || page->block <= Arena::rounded(sizeof(Page) + layout->bytes)) return;
    Page* exact = new_page(layout, layout->bytes, false, false);
    if (!exact) return; // under a tight limit the reserve stays, and is counted
    std::memcpy(exact->bytes(), page->bytes(), layout->bytes);
    drop(page);
    page = exact;
}

bool Cache::Impl::own(Page** at, std::vector<Change>* changes) {
    Page* page = *at;
    if (page->refs.load(std::memory_order_acquire) == 1) return true;
    Page* copy = new_page(page->layout, page->block - uint32_t(sizeof(Page)), false);
    if (!copy) return false;
    std::memcpy(copy->bytes(), page->bytes(), page->layout->bytes);
    changes->push_back({at, page});
    *at = copy;
    return true;
}

void Cache::Impl::undo(std::vector<Change>* changes) {
    for (auto it = changes->rbegin(); it != changes->rend(); ++it) {
        drop(*it->at);
        *it->at = it->before;
    }
    changes->clear();
}

void Cache::Impl::accept(std::vector<Change>* changes) {
    for (Change& c : *changes)
        drop(c.before);
    changes->clear();
}

uint8_t* Cache::Impl::raw_row(int32_t index, SideState& side, int64_t row) const {
    const SidePlan& plan = plans[size_t(index)];
    const int64_t beyond = row - plan.window.front;
    const size_t row_bytes = size_t(raw_layouts[size_t(index)]->dim) * bytes_of(plan.raw);
    if (beyond < 0) return side.front->bytes() + size_t(row) * row_bytes;
    return side.slots[size_t(beyond / kPageTokens)].raw->bytes() + size_t(beyond % kPageTokens) * row_bytes;
}

std::shared_ptr<Sequence> Cache::Impl::make_sequence() const {
    auto seq = std::make_shared<Sequence>();
    seq->sides.resize(size_t(side_count));
    seq->packed.assign(shape.layers.size() * 2, 0);
    seq->base_packed = seq->packed;
    if (method->info().uses_query) {
        for (size_t layer = 0; layer < shape.layers.size(); ++layer)
            for (int32_t head = 0; head < shape.layers[layer].kv_heads; ++head)
                seq->sides[size_t(side_index(int32_t(layer), head, Side::key))].abs_sum.assign(
                    size_t(shape.layers[layer].key_dim), 0.0f);
    }
    return seq;
}

std::shared_ptr<Sequence> Cache::Impl::clone(const Sequence& from) {
    auto seq = std::make_shared<Sequence>(from);
    for (SideState& side : seq->sides) {
        share(side.front);
        share(side.pins);
        for (Slot& slot : side.slots) {
            share(slot.raw);
            share(slot.packed);
        }
    }
    return seq;
}

void Cache::Impl::free_pages(Sequence& seq) {
    for (SideState& side : seq.sides) {
        drop(side.front);
        drop(side.pins);
        for (Slot& slot : side.slots) {
            drop(slot.raw);
            drop(slot.packed);
        }
        side.slots.clear();
    }
}

void Cache::Impl::drop_sequence(std::shared_ptr<Sequence>& seq) {
    if (seq && seq.use_count() == 1) free_pages(*seq);
    seq.reset();
}

Basis Cache::Impl::basis(const Sequence& seq, int32_t layer, int32_t head, Side side, int64_t slot) const {
    const int32_t index = side_index(layer, head, side);
    const SideState& state = seq.sides[size_t(index)];
    const int64_t row = plans[size_t(index)].window.front + slot * kPageTokens;
    Basis b;
    b.plan = &plan_of(state, index);
    if (side == Side::key) b.turn = turns[size_t(layer)].get();
    if (!b.plan->mean.empty()) b.mean = means[size_t(layer)].get();
    b.positions = seq.positions.data() + row;
    b.base = *b.positions;
    b.head = head % b.plan->transform.joined;
    b.group = &state - 2 * b.head;
    b.slot = slot;
    if (slot == 0 && state.pins) {
        b.pins = state.pins->bytes();
        b.pin_type = b.plan->raw;
    }
    return b;
}

void Cache::Impl::decode(const Sequence& seq, int32_t layer, int32_t head, Side which, int64_t packed, int64_t first,
                         int64_t count, float* out) const {
    const int32_t index = side_index(layer, head, which);
    const SidePlan& plan = plans[size_t(index)];
    const SideState& side = seq.sides[size_t(index)];
    const int32_t dim = raw_layouts[size_t(index)]->dim;
    const size_t row_bytes = size_t(dim) * bytes_of(plan.raw);
    for (int64_t row = first; row < first + count;) {
        const int64_t beyond = row - plan.window.front;
        float* to = out + (row - first) * dim;
        if (beyond < 0) {
            const int64_t n = std::min<int64_t>(plan.window.front, first + count) - row;
            table->load_raw(plan.raw, side.front->bytes() + size_t(row) * row_bytes, int32_t(n), dim, to, dim);
            row += n;
            continue;
        }
        const Slot& slot = side.slots[size_t(beyond / kPageTokens)];
        const int64_t at = beyond % kPageTokens;
        int64_t n = std::min<int64_t>(kPageTokens - at, first + count - row);
        if (beyond < packed) {
            n = std::min(n, packed - beyond);
            restore_rows(*table, basis(seq, layer, head, which, beyond / kPageTokens), int32_t(at), int32_t(n), dim, to,
                         dim, thread_scratch());
        } else {
            table->load_raw(plan.raw, slot.raw->bytes() + size_t(at) * row_bytes, int32_t(n), dim, to, dim);
        }
        row += n;
    }
}

} // namespace kvmosaic
