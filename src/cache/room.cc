// Whether a step fits, before anything is done for it.
#include <algorithm>
#include <unordered_set>

#include "cache/impl.h"

namespace kvmosaic {

// Mirrors prepare_side: blocks for pages that are not there yet, that grow, or that others own too.
int64_t Cache::Impl::bytes_needed(const StepSequence& s) const {
    const int64_t total = s.old_rows + int64_t(s.tokens.size());
    int64_t need = 0;
    const auto block = [&](int64_t bytes) { need += int64_t(Arena::rounded(sizeof(Page) + size_t(bytes))); };
    const auto take = [&](const Page* page, int64_t bytes) {
        if (!page || page->layout->bytes < bytes)
            block(bytes);
        else if (page->refs.load() > 1)
            need += page->block;
    };
    each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
        const Window& w = plans[size_t(index)].window;
        const SideState& state = s.seq->sides[size_t(index)];
        const auto slot = [&](int64_t i) { return i < int64_t(state.slots.size()) ? state.slots[size_t(i)] : Slot(); };
        if (s.old_rows < std::min<int64_t>(w.front, total)) take(state.front, front_layouts[size_t(index)]->bytes);
        const int64_t before = std::max<int64_t>(0, s.old_rows - w.front);
        const int64_t beyond = std::max<int64_t>(0, total - w.front);
        if (beyond == before) return;
        const PageLayout& raw = *raw_layouts[size_t(index)];
        for (int64_t i = before / kPageTokens; i <= (beyond - 1) / kPageTokens; ++i) {
            const int64_t rows = std::min<int64_t>(kPageTokens, beyond - i * kPageTokens);
            take(slot(i).raw, int64_t(raw.bytes) * ((rows + kRawStep - 1) / kRawStep * kRawStep) / kPageTokens);
        }
        const int64_t packed = s.old_packed[packed_index(layer, side)], now = w.packed_after(packed, beyond);
        if (now == packed) return;
        if (const PageLayout* pins = pin_layouts[size_t(index)]; pins && packed < kPageTokens)
            take(state.pins, pins->bytes);
        const PageLayout* grid = grid_layouts[size_t(index)];
        for (int64_t i = packed / kPageTokens; i <= (now - 1) / kPageTokens; ++i) {
            if (const Page* page = slot(i).packed)
                take(page, 0);
            else
                block(grid ? grid->bytes : worst[size_t(index)]);
        }
    });
    return need;
}

Status Cache::can_append(std::span<const StepRow> rows) const {
    Step probe;
    Impl::Moves moves;
    Status st = impl_->place(rows, &probe, &moves);
    int64_t need = 0;
    for (const StepSequence& s : probe.sequences) {
        if (st) st = impl_->check_room(s);
        if (impl_->options.max_bytes > 0) need += impl_->bytes_needed(s);
    }
    probe.sequences.clear();
    std::unordered_set<Sequence*> clones;
    for (auto& [id, seq] : moves)
        if (clones.insert(seq.get()).second) impl_->free_pages(*seq);
    const int64_t limit = impl_->options.max_bytes, live = impl_->arena.live();
    if (st && limit > 0 && live + need > limit && live + need - impl_->evictable() > limit)
        return {StatusCode::out_of_capacity, "append: " + std::to_string(live) + " bytes in use and up to " +
                                                 std::to_string(need) + " needed, of at most " + std::to_string(limit) +
                                                 "; nothing was appended"};
    return st;
}

} // namespace kvmosaic
