// Cutting a sequence's end. Within the window of CacheOptions::rollback a cut leaves exactly what would be there had
// the rows never come: raw rows of every state in the window are kept, statistics are remembered row by row, and what
// the rows added to an open page is taken out of it again.
#include <algorithm>
#include <cstring>

#include "cache/impl.h"
#include "cache/scratch.h"

namespace kvmosaic {

int64_t Cache::Impl::packed_at(const Sequence& seq, int32_t layer, Side side, int64_t rows) const {
    const size_t i = packed_index(layer, side);
    const Window& w = window(layer, side);
    const int64_t base = seq.base_packed[i];
    const int64_t then = rows <= seq.base ? base : w.packed_after(base, std::max<int64_t>(0, rows - w.front));
    return std::min(then, seq.packed[i]); // a step that was given up packed nothing
}

void Cache::Impl::rebase(Sequence& seq) const {
    seq.base = seq.floor = seq.rows();
    seq.base_packed = seq.packed;
    for (SideState& side : seq.sides)
        side.settled = side.decided;
}

void Cache::Impl::remember(SideState& state, int64_t row) const {
    if (options.rollback <= 0 || state.abs_sum.empty()) return;
    const size_t at = size_t(row % options.rollback);
    std::copy(state.abs_sum.begin(), state.abs_sum.end(), state.past_sums.begin() + int64_t(at * state.abs_sum.size()));
    state.past_count[at] = state.query_count;
}

void Cache::Impl::recall(SideState& state, int64_t row) const {
    if (state.abs_sum.empty()) return;
    const size_t at = size_t(row % options.rollback);
    std::copy_n(state.past_sums.begin() + int64_t(at * state.abs_sum.size()), state.abs_sum.size(),
                state.abs_sum.begin());
    state.query_count = state.past_count[at];
}

Status Cache::Impl::cut(std::shared_ptr<Sequence>& seq, int64_t rows) {
    if (rows > 0 && rows >= seq->floor && options.rollback > 0) return cut_exactly(seq, rows);
    return drop_rows(seq, rows, seq->rows());
}

// Takes the rows packed .. out of the open page that holds row `packed`. A block is encoded from its raw rows once
// more, into an empty page: what comes out is what the block added to the page, and no other block has a share in those
// bits (in three levels packed five a byte: in those digits).
bool Cache::Impl::unseal(Sequence& seq, int32_t layer, int32_t first_head, Side side, int64_t packed,
                         std::vector<Change>* changes) {
    const int32_t first_index = side_index(layer, first_head, side);
    const SidePlan& plan = plan_of(seq.sides[size_t(first_index)], first_index);
    const int32_t joined = plan.transform.joined, dim = raw_layouts[size_t(first_index)]->dim;
    const int32_t flush = plan.window.flush, width = joined * dim;
    const int64_t slot = packed / kPageTokens;
    const int64_t end = std::min((slot + 1) * kPageTokens, seq.packed[packed_index(layer, side)]);
    for (int32_t h = 0; h < joined; ++h)
        if (!own(&seq.sides[size_t(first_index + 2 * h)].slots[size_t(slot)].packed, changes)) return false;
    const PageLayout& page = *seq.sides[size_t(first_index)].slots[size_t(slot)].packed->layout;
    std::vector<uint8_t> added(size_t(joined) * page.bytes, 0);
    for (int64_t block = packed; block < end; block += flush) {
        float* rows = block_rows(seq, layer, first_head, side, block);
        to_basis(plan.transform, rows, flush, width);
        for (int32_t h = 0; h < joined; ++h)
            table->encode(page, nullptr, head_rows(rows, flush, joined, h, dim), int32_t(block % kPageTokens), flush,
                          added.data() + size_t(h) * page.bytes);
    }
    for (int32_t h = 0; h < joined; ++h) {
        uint8_t* bytes = seq.sides[size_t(first_index + 2 * h)].slots[size_t(slot)].packed->bytes();
        for (uint32_t i = 0; i < page.bytes; ++i)
            bytes[i] = uint8_t(bytes[i] - added[size_t(h) * page.bytes + i]);
    }
    return true;
}

Status Cache::Impl::cut_exactly(std::shared_ptr<Sequence>& seq, int64_t rows) {
    std::shared_ptr<Sequence> fresh = seq.use_count() > 1 ? clone(*seq) : seq; // other names keep what they have
    const bool cloned = fresh != seq;
    // All that needs memory first: copies of shared pages that change.
    std::vector<Change> changes;
    bool memory = true;
    const auto pages_left = [&](int64_t packed) { return size_t((packed + kPageTokens - 1) / kPageTokens); };
    for (int32_t layer = 0; memory && layer < int32_t(shape.layers.size()); ++layer) {
        if (!shape.layers[size_t(layer)].has_kv()) continue;
        for (const Side side : {Side::key, Side::value}) {
            const int64_t packed = packed_at(*fresh, layer, side, rows);
            if (packed == fresh->packed[packed_index(layer, side)]) continue;
            for (int32_t h = 0; memory && h < shape.layers[size_t(layer)].kv_heads; h += joined(layer, side))
                if (packed % kPageTokens != 0) memory = unseal(*fresh, layer, h, side, packed, &changes);
            for (int32_t h = 0; memory && h < shape.layers[size_t(layer)].kv_heads; ++h) {
                SideState& state = fresh->sides[size_t(side_index(layer, h, side))];
                if (!state.pins || packed == 0 || packed >= kPageTokens) continue;
                memory = own(&state.pins, &changes);
                if (!memory) break;
                const size_t row_bytes =
                    size_t(state.pins->layout->dim) * bytes_of(state.frozen->raw); // rows that are no longer packed
                for (size_t i = 0; i < state.frozen->pinned.size(); ++i)
                    if (state.frozen->pinned[i] >= packed)
                        std::memset(state.pins->bytes() + i * row_bytes, 0, row_bytes);
            }
        }
    }
    if (!memory) {
        undo(&changes);
        if (cloned) drop_sequence(fresh);
        return {StatusCode::out_of_memory, "truncate: no memory for a copy of the page cut at row " +
                                               std::to_string(rows) + "; nothing has changed"};
    }
    accept(&changes);

    for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
        if (!shape.layers[size_t(layer)].has_kv()) continue;
        for (const Side side : {Side::key, Side::value}) {
            const int64_t packed = packed_at(*fresh, layer, side, rows);
            const int64_t beyond = std::max<int64_t>(0, rows - window(layer, side).front);
            for (int32_t h = 0; h < shape.layers[size_t(layer)].kv_heads; ++h) {
                SideState& state = fresh->sides[size_t(side_index(layer, h, side))];
                for (size_t i = pages_left(packed); i < state.slots.size(); ++i)
                    drop(state.slots[i].packed);
                for (size_t i = pages_left(beyond); i < state.slots.size(); ++i)
                    drop(state.slots[i].raw);
                state.slots.resize(std::min(state.slots.size(), pages_left(beyond)));
                recall(state, rows);
                if (packed == 0) drop(state.pins);
                if (state.decided && !state.settled && beyond < kPageTokens) {
                    state.frozen.reset();
                    state.decided = false;
                }
            }
            fresh->packed[packed_index(layer, side)] = packed;
        }
    }
    fresh->positions.resize(size_t(rows));
    seq = std::move(fresh);
    return {};
}

} // namespace kvmosaic
