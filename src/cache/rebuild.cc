// Sequences made anew from what a cache holds: rows dropped, keys turned to other positions, memory given back. What
// must change place or turn is decoded, becomes raw rows, and is packed again with the next step; pages before it are
// shared. The old sequence stays until the new one is whole.
#include <algorithm>
#include <cstring>

#include "cache/impl.h"
#include "cache/scratch.h"

namespace kvmosaic {

struct Cache::Impl::Rebuild {
    int64_t first = 0, end = 0;               // rows that go
    std::vector<int32_t> positions = {};      // of the rows that stay
    int64_t turned_first = 0, turned_end = 0; // of the rows that stay: those whose keys turn
    int64_t old_row(int64_t row) const { return row < first ? row : row + (end - first); }
};

// One side of the sequence under construction. false: no memory.
bool Cache::Impl::rebuild_side(const Sequence& from, Sequence& to, int32_t layer, int32_t head, Side side,
                               const Rebuild& how) {
    const int32_t index = side_index(layer, head, side);
    const SidePlan& plan = plans[size_t(index)];
    const SideState& old = from.sides[size_t(index)];
    SideState& state = to.sides[size_t(index)];
    const int32_t dim = raw_layouts[size_t(index)]->dim;
    const size_t row_bytes = size_t(dim) * bytes_of(plan.raw);
    const int64_t front = plan.window.front, rows = int64_t(how.positions.size());
    const int64_t beyond = std::max<int64_t>(0, rows - front);
    const bool turns_keys = side == Side::key && how.turned_first < how.turned_end;
    const bool codes_stay = turns_keys && turns[size_t(layer)] != nullptr; // packed as they were before rotation
    const int64_t old_packed = from.packed[packed_index(layer, side)];
    const int64_t packed = to.packed[packed_index(layer, side)];

    state.abs_sum = old.abs_sum;
    state.query_count = old.query_count;
    state.frozen = old.frozen;
    state.decided = old.decided;
    if (beyond == 0) { // the first page went: what rests on it begins anew
        std::fill(state.abs_sum.begin(), state.abs_sum.end(), 0.0f);
        state.query_count = 0;
        state.frozen.reset();
        state.decided = false;
    }
    // The first row, in the new numbering, that is not where and what it was.
    const int64_t changed = std::min(how.first, turns_keys ? how.turned_first : rows);

    float* x = thread_scratch().floats(Scratch::total, size_t(kPageTokens) * size_t(dim));
    const Rope& rope = shape.layers[size_t(layer)].rope;
    kernels::Counters counters; // decoded values were counted when they came
    const auto turn = [&](int64_t row, float* values) {
        if (!turns_keys || row < how.turned_first || row >= how.turned_end) return;
        const int64_t was = from.positions[size_t(how.old_row(row))];
        const int64_t delta = int64_t(how.positions[size_t(row)]) - was;
        if (delta != 0) rope.turn(values, double(delta));
    };
    // Rows [row, end) of the new sequence to raw bytes.
    const auto put = [&](int64_t row, int64_t end, uint8_t* bytes) {
        while (row < end) {
            int64_t n = std::min<int64_t>(kPageTokens, end - row);
            if (row < how.first) n = std::min(n, how.first - row); // neighbours there, not across the gap
            decode(from, layer, head, side, old_packed, how.old_row(row), n, x);
            for (int64_t i = 0; i < n; ++i, ++row, bytes += row_bytes) {
                turn(row, x + i * dim);
                table->store_raw(plan.raw, x + i * dim, dim, bytes, &counters);
            }
        }
    };

    if (old.front && rows > 0) {
        if (changed >= std::min(front, rows)) {
            share(state.front = old.front);
        } else {
            state.front = new_page(front_layouts[size_t(index)], front_layouts[size_t(index)]->bytes, false);
            if (!state.front) return false;
            put(0, std::min(front, rows), state.front->bytes());
        }
    }
    state.slots.resize(size_t((beyond + kPageTokens - 1) / kPageTokens));
    for (size_t i = 0; i < state.slots.size(); ++i) {
        const int64_t base = int64_t(i) * kPageTokens, end = std::min(beyond, base + kPageTokens);
        if (base < packed) share(state.slots[i].packed = old.slots[i].packed);
        if (packed >= end) continue;                                          // no raw rows are needed
        if (front + end <= changed && old_packed <= std::max(base, packed)) { // raw before, raw now
            share(state.slots[i].raw = old.slots[i].raw);
            continue;
        }
        const PageLayout* raw = raw_page(index, end - base);
        Page* page = state.slots[i].raw = new_page(raw, raw->bytes, false);
        if (!page) return false;
        const int64_t first = std::max(base, packed);
        put(front + first, front + end, page->bytes() + size_t(first - base) * row_bytes);
    }
    if (!old.pins || packed == 0) return true;
    if (!codes_stay) {
        share(state.pins = old.pins);
        return true;
    }
    state.pins = new_page(old.pins->layout, old.pins->layout->bytes, true); // raw rows: they turn with the others
    if (!state.pins) return false;
    const std::vector<uint16_t>& pinned = state.frozen->pinned;
    for (size_t i = 0; i < pinned.size() && pinned[i] < packed; ++i) {
        table->load_raw(plan.raw, old.pins->bytes() + i * row_bytes, 1, dim, x, dim);
        turn(front + pinned[i], x);
        table->store_raw(plan.raw, x, dim, state.pins->bytes() + i * row_bytes, &counters);
    }
    return true;
}

// Null when there is no memory.
std::shared_ptr<Sequence> Cache::Impl::rebuild(const Sequence& from, const Rebuild& how) {
    auto to = make_sequence();
    to->positions = how.positions;
    if (!how.positions.empty()) to->origin = from.origin;
    const int64_t rows = to->rows();
    for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
        if (!shape.layers[size_t(layer)].has_kv()) continue;
        for (const Side side : {Side::key, Side::value}) {
            const size_t i = packed_index(layer, side);
            const int64_t front = window(layer, side).front;
            int64_t changed = std::min(how.first, rows);
            if (side == Side::key && !turns[size_t(layer)] && how.turned_first < how.turned_end)
                changed = std::min(changed, how.turned_first);
            const int64_t kept = std::max<int64_t>(0, changed - front);
            // Packed rows of the page that is cut return to raw, with all behind them.
            to->packed[i] = kept < from.packed[i] ? kept / kPageTokens * kPageTokens : from.packed[i];
        }
    }
    bool memory = true;
    for (int32_t layer = 0; memory && layer < int32_t(shape.layers.size()); ++layer)
        for (int32_t head = 0; memory && head < shape.layers[size_t(layer)].kv_heads; ++head)
            for (const Side side : {Side::key, Side::value})
                memory = memory && rebuild_side(from, *to, layer, head, side, how);
    if (!memory) {
        free_pages(*to);
        return nullptr;
    }
    rebase(*to);
    return to;
}

Status Cache::Impl::drop_rows(std::shared_ptr<Sequence>& seq, int64_t first, int64_t end) {
    Rebuild how;
    how.first = first, how.end = end;
    how.positions.assign(seq->positions.begin(), seq->positions.begin() + first);
    how.positions.insert(how.positions.end(), seq->positions.begin() + end, seq->positions.end());
    std::shared_ptr<Sequence> fresh = rebuild(*seq, how);
    if (!fresh)
        return {StatusCode::out_of_memory,
                "no memory for the raw rows of pages cut at row " + std::to_string(first) + "; nothing has changed"};
    drop_sequence(seq);
    seq = std::move(fresh);
    return {};
}

Status Cache::Impl::can_turn() const {
    for (size_t layer = 0; layer < shape.layers.size(); ++layer)
        if (shape.layers[layer].has_kv() && !shape.layers[layer].rope.known)
            return {StatusCode::unsupported, "layer " + std::to_string(layer) +
                                                 ": its rotary embedding is not known, so its keys cannot be turned"};
    return {};
}

Status Cache::Impl::reposition(std::shared_ptr<Sequence>& seq, int64_t first, std::span<const int32_t> positions) {
    Rebuild how;
    how.first = how.end = seq->rows();
    how.positions = seq->positions;
    std::copy(positions.begin(), positions.end(), how.positions.begin() + first);
    how.turned_first = first, how.turned_end = first + int64_t(positions.size());
    while (how.turned_first < how.turned_end &&
           how.positions[size_t(how.turned_first)] == seq->positions[size_t(how.turned_first)])
        ++how.turned_first;
    if (how.turned_first == how.turned_end) return {};
    std::shared_ptr<Sequence> fresh = rebuild(*seq, how);
    if (!fresh)
        return {StatusCode::out_of_memory, "no memory for the keys of rows from " + std::to_string(first) +
                                               " while they turn; nothing has changed"};
    drop_sequence(seq);
    seq = std::move(fresh);
    return {};
}

// Raw pages as wide as their rows need, vectors as long as their contents.
void Cache::Impl::compact_side(Sequence& seq, int32_t index) {
    SideState& state = seq.sides[size_t(index)];
    const int64_t beyond = std::max<int64_t>(0, seq.rows() - plans[size_t(index)].window.front);
    for (size_t i = 0; i < state.slots.size(); ++i) {
        if (state.slots[i].raw) narrow(state.slots[i].raw, raw_page(index, beyond - int64_t(i) * kPageTokens));
        if (state.slots[i].packed) narrow(state.slots[i].packed, state.slots[i].packed->layout);
    }
    state.slots.shrink_to_fit();
}

Status Cache::remove_rows(SeqId seq, int64_t first, int64_t last) {
    impl_->end_step();
    const auto it = impl_->sequences.find(seq);
    if (it == impl_->sequences.end())
        return {StatusCode::not_found, "remove_rows: there is no sequence " + std::to_string(seq)};
    const int64_t rows = it->second->rows();
    if (first < 0 || first > last || last > rows)
        return {StatusCode::invalid_argument, "remove_rows: [" + std::to_string(first) + ", " + std::to_string(last) +
                                                  ") asked of sequence " + std::to_string(seq) + ", which has " +
                                                  std::to_string(rows) + " rows"};
    if (first == last) return {};
    if (last == rows) return impl_->cut(it->second, first);
    return impl_->drop_rows(it->second, first, last);
}

Status Cache::can_shift() const { return impl_->can_turn(); }

Status Cache::reposition(SeqId seq, int64_t first, std::span<const int32_t> positions) {
    impl_->end_step();
    const auto it = impl_->sequences.find(seq);
    if (it == impl_->sequences.end())
        return {StatusCode::not_found, "reposition: there is no sequence " + std::to_string(seq)};
    const std::vector<int32_t>& old = it->second->positions;
    const int64_t rows = int64_t(old.size()), count = int64_t(positions.size());
    if (first < 0 || first > rows || count > rows - first)
        return {StatusCode::invalid_argument, "reposition: rows " + std::to_string(first) + ".." +
                                                  std::to_string(first + count) + " asked of sequence " +
                                                  std::to_string(seq) + ", which has " + std::to_string(rows)};
    if (count == 0) return {};
    const bool ascends = std::is_sorted(positions.begin(), positions.end()) &&
                         (first == 0 || old[size_t(first - 1)] <= positions.front()) &&
                         (first + count == rows || positions.back() <= old[size_t(first + count)]);
    if (!ascends || positions.front() < 0)
        return {StatusCode::invalid_argument, "reposition: positions of sequence " + std::to_string(seq) +
                                                  " would decrease, or fall below 0, from row " +
                                                  std::to_string(first) + " on"};
    if (Status st = impl_->can_turn(); !st) return {st.code(), "reposition: " + st.message()};
    return impl_->reposition(it->second, first, positions);
}

int64_t Cache::compact() {
    Impl& im = *impl_;
    im.end_step();
    const int64_t held = im.arena.held(), live = im.arena.live();
    const auto all = [&](Sequence& seq) {
        for (int32_t i = 0; i < im.side_count; ++i)
            im.compact_side(seq, i);
        seq.positions.shrink_to_fit();
    };
    for (auto& [id, seq] : im.sequences)
        all(*seq);
    for (auto& [hash, prefix] : im.prefixes)
        all(*prefix.state);
    std::vector<float>().swap(im.step.partial);
    im.arena.give_back();
    return live - im.arena.live() + held - im.arena.held();
}

} // namespace kvmosaic
