// What a cache weighs, to the byte: every page once, whoever shares it, and the tables around them.
#include <algorithm>
#include <unordered_set>

#include "cache/impl.h"

namespace kvmosaic {

Footprint Cache::Impl::footprint(const std::vector<const Sequence*>& held, Layouts which) const {
    Footprint f;
    std::unordered_set<const Page*> counted;
    std::unordered_set<const SidePlan*> plans_seen;
    std::unordered_set<const PageLayout*> used;
    const auto count = [&](const Page* page, int64_t* bytes) {
        if (!page || !counted.insert(page).second) return false;
        const int64_t exact = page->layout ? int64_t(Arena::rounded(sizeof(Page) + page->layout->bytes)) : 0;
        if (!page->layout || page->block > exact) { // the worst case of a seal that this step makes
            f.reserved += page->block - exact;
            if (!page->layout) return true;
        }
        used.insert(page->layout);
        *bytes += page->layout->bytes;
        f.tables += exact - page->layout->bytes;
        return true;
    };
    for (const Sequence* seq : held) {
        f.tables += int64_t(sizeof(Sequence)) + int64_t(seq->positions.size() * sizeof(int32_t)) +
                    int64_t(seq->packed.size() * 2 * sizeof(int64_t)) + int64_t(seq->sides.size() * sizeof(SideState));
        bool first_side = true;
        each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
            const SideState& state = seq->sides[size_t(index)];
            const int64_t front = plans[size_t(index)].window.front;
            const int side_number = int(side), dim = shape.layers[size_t(layer)].dim(side);
            f.tables += int64_t(state.slots.size() * sizeof(Slot));
            f.statistics += int64_t((state.abs_sum.size() + state.past_sums.size()) * sizeof(float)) +
                            int64_t(state.past_count.size() * sizeof(int64_t));
            int64_t rows = 0; // not yet counted through another sequence that shares the page
            if (count(state.front, &f.raw[side_number])) rows += std::min(front, seq->rows());
            count(state.pins, &f.raw[side_number]);
            if (state.frozen && plans_seen.insert(state.frozen.get()).second) {
                const SidePlan& p = *state.frozen;
                f.tables += int64_t(sizeof(SidePlan)) +
                            int64_t((p.transform.scale.size() + p.transform.shift.size()) * sizeof(float)) +
                            int64_t(p.mean.size() * sizeof(float)) +
                            int64_t((p.transform.order.size() + p.pinned.size() + p.channels.size()) * 2);
            }
            for (size_t i = 0; i < state.slots.size(); ++i) {
                const Slot& slot = state.slots[i];
                const bool fresh_raw = count(slot.raw, &f.raw[side_number]);
                const bool fresh_packed = count(slot.packed, &f.packed[side_number]);
                const bool fresh = slot.packed ? fresh_packed : fresh_raw;
                if (fresh) rows += std::min<int64_t>(kPageTokens, seq->rows() - front - int64_t(i) * kPageTokens);
            }
            f.values[side_number] += rows * dim;
            if (first_side) f.tokens += rows;
            first_side = false;
        });
    }
    for (const auto* fixed : {&front_layouts, &raw_layouts, &grid_layouts, &pin_layouts}) // there from the beginning
        used.insert(fixed->begin(), fixed->end());
    used.erase(nullptr);
    f.tables += int64_t((which == Layouts::all ? layouts.size() : used.size()) * sizeof(PageLayout));
    f.scratch = scratch_bytes.load() + int64_t(step.partial.size() * sizeof(float));
    f.allocated = arena.live();
    f.arena = arena.held();
    f.non_finite = non_finite.load();
    f.saturated = saturated.load();
    f.ladders = sealed_ladders.load();
    f.raised = raised.load();
    return f;
}

Footprint Cache::footprint() const {
    std::vector<const Sequence*> held;
    std::unordered_set<const Sequence*> seen;
    int64_t names = 0;
    for (const auto& [id, seq] : impl_->sequences)
        if (seen.insert(seq.get()).second) held.push_back(seq.get());
    for (const auto& [hash, prefix] : impl_->prefixes) {
        held.push_back(prefix.state.get());
        names += int64_t(sizeof(Prefix)) + int64_t(prefix.tokens.size() * sizeof(int32_t));
    }
    Footprint f = impl_->footprint(held, Impl::Layouts::all);
    f.tables += names;
    return f;
}

Footprint Cache::footprint(SeqId seq) const {
    const Sequence* one = impl_->find(seq);
    return impl_->footprint(one ? std::vector<const Sequence*>{one} : std::vector<const Sequence*>{},
                            Impl::Layouts::used);
}

} // namespace kvmosaic
