// Writing a layer's new rows: copy, statistics, plan, seal, row by row in order, so that the plan of a block rests on
// exactly the rows up to the one that completes it, however the text was cut into steps.
#include <algorithm>
#include <cstring>

#include "cache/impl.h"
#include "cache/scratch.h"

namespace kvmosaic {

void Cache::Impl::plan_page(const StepSequence& s, int32_t layer, int32_t head, Side side, const float* rows,
                            int64_t first, int64_t count, SidePlan* plan) const {
    const int32_t index = side_index(layer, head, side);
    const SideState& state = s.seq->sides[size_t(index)];
    PlanInput in;
    in.side = side;
    in.layer = layer;
    in.kv_head = head;
    in.block = first / std::max(1, plans[size_t(index)].window.flush);
    in.rows = rows;
    in.count = count;
    in.dim = raw_layouts[size_t(index)]->dim;
    in.query.abs_sum = state.abs_sum.empty() ? nullptr : state.abs_sum.data();
    in.query.count = state.query_count;
    *plan = plans[size_t(index)];
    method->plan(in, plan);
}

// Packs the block of `flush` rows that begins `packed` rows beyond the front.
void Cache::Impl::seal(StepSequence& s, int32_t layer, int32_t head, Side side, int64_t packed,
                       const SidePlan* shared) {
    const int32_t index = side_index(layer, head, side);
    const SidePlan& fixed = plans[size_t(index)];
    SideState& state = s.seq->sides[size_t(index)];
    const int32_t dim = raw_layouts[size_t(index)]->dim, flush = fixed.window.flush;
    const int32_t first = int32_t(packed % kPageTokens);
    Slot& slot = state.slots[size_t(packed / kPageTokens)];

    Scratch& scratch = thread_scratch();
    float* rows = scratch.floats(Scratch::rows, size_t(flush) * size_t(dim)); // [flush][D]
    table->load_raw(fixed.raw, slot.raw->bytes() + size_t(first) * size_t(dim) * bytes_of(fixed.raw), flush, dim, rows,
                    dim);
    const uint16_t* channels = nullptr;
    if (fixed.store.kind == StoreKind::tiered) {
        const SidePlan* plan = shared;
        if (!plan) {
            plan_page(s, layer, head, side, rows, packed, flush, &scratch.plan);
            plan = &scratch.plan;
        }
        channels = plan->channels.data();
        const PageLayout page = layout(plan->store, side, dim, plan->ladder);
        slot.packed->layout = intern(page);
        std::memset(slot.packed->bytes(), 0, page.bytes);
    }
    table->encode(*slot.packed->layout, channels, rows, first, flush, slot.packed->bytes());
    if (side == Side::key && method->query_scope() == QueryScope::window) {
        std::fill(state.abs_sum.begin(), state.abs_sum.end(), 0.0f);
        state.query_count = 0;
    }
}

void Cache::Impl::write_side(StepSequence& s, int32_t layer, int32_t head, Side side, RowsF32 q, RowsF32 x) {
    const int32_t index = side_index(layer, head, side);
    const SidePlan& plan = plans[size_t(index)];
    const LayerShape& l = shape.layers[size_t(layer)];
    SideState& state = s.seq->sides[size_t(index)];
    const int32_t group = l.heads / l.kv_heads, dim = l.dim(side);
    const bool statistics = side == Side::key && !state.abs_sum.empty();
    const bool one_map = method->map_scope() == MapScope::first_step && s.first && plan.store.kind == StoreKind::tiered;
    int64_t packed = s.old_packed[packed_index(layer, side)];
    kernels::Counters counters;

    for (size_t i = 0; i < s.tokens.size(); ++i) {
        const int32_t token = s.tokens[i];
        const int64_t row = s.old_rows + int64_t(i);
        table->store_raw(plan.raw, x.at(token, head), dim, raw_row(index, state, row), &counters);
        if (statistics) {
            for (int32_t g = 0; g < group; ++g)
                table->add_abs(plan.raw, q.at(token, int64_t(head) * group + g), dim, state.abs_sum.data());
            state.query_count += group;
        }
        if (one_map) continue;
        const int64_t due = plan.window.packed_after(packed, std::max<int64_t>(0, row + 1 - plan.window.front));
        for (; packed < due; packed += plan.window.flush)
            seal(s, layer, head, side, packed, nullptr);
    }
    if (one_map) { // the one method option whose plan sees the whole first step (`map=prompt`)
        const int64_t due = plan.window.packed_after(packed, std::max<int64_t>(0, s.seq->rows() - plan.window.front));
        if (due > packed) {
            Scratch& scratch = thread_scratch();
            float* rows = scratch.floats(Scratch::total, size_t(due - packed) * size_t(dim));
            for (int64_t r = packed; r < due; r += kPageTokens) {
                const int64_t n = std::min<int64_t>(kPageTokens, due - r);
                table->load_raw(plan.raw, raw_row(index, state, plan.window.front + r), int32_t(n), dim,
                                rows + (r - packed) * dim, dim);
            }
            SidePlan whole;
            plan_page(s, layer, head, side, rows, packed, due - packed, &whole);
            for (; packed < due; packed += plan.window.flush)
                seal(s, layer, head, side, packed, &whole);
        }
    }
    if (counters.non_finite) non_finite += counters.non_finite;
    if (counters.saturated) saturated += counters.saturated;
}

void Cache::write(int32_t layer, RowsF32 q, RowsF32 k, RowsF32 v, Thread thread) {
    Impl& im = *impl_;
    const int32_t heads = im.shape.layers[size_t(layer)].kv_heads;
    const int32_t per_sequence = 2 * heads;
    const int32_t tasks = int32_t(im.step.sequences.size()) * per_sequence;
    for (;;) {
        const int32_t task = im.step.write_work.next.fetch_add(1);
        if (task >= tasks) break;
        StepSequence& s = im.step.sequences[size_t(task / per_sequence)];
        const int32_t head = task % per_sequence / 2;
        const Side side = task % 2 ? Side::value : Side::key;
        im.write_side(s, layer, head, side, q, side == Side::key ? k : v);
    }
    im.step.write_work.leave(thread.count);
}

} // namespace kvmosaic
