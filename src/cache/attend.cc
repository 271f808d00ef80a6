// Attention over a sequence: front, packed, mixed and raw pages, each adding to a partial softmax state; states of
// kSpanPages pages are merged in a fixed order.
//
// What bounds it: restoring a page costs a fraction of a nanosecond a value, which all query rows of a tile share;
// above a handful of rows the products dominate. Every number of a row's result depends on that row's own range alone:
// pages are tiles of fixed edges, spans are fixed runs of pages, states are merged first to last. So a row gives the
// same bits alone, in a chunk, on one thread or on many.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cache/impl.h"
#include "cache/scratch.h"
#include "cache/tile.h"

namespace kvmosaic {

namespace {

using kernels::RowState;

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

TileSource rows_at(const Page& front, int64_t row, int32_t dim, RawType type) {
    TileSource from;
    from.raw = front.bytes() + size_t(row) * size_t(dim) * bytes_of(type);
    from.type = type;
    return from;
}

// A state as it lies in memory: [nq] m, [nq] l, [nq][dv] o.
void clear_state(float* state, int32_t nq, int32_t dv) {
    std::fill(state, state + nq, kEmpty);
    std::fill(state + nq, state + size_t(nq) * size_t(dv + 2), 0.0f);
}

void merge_states(float* into, const float* from, int32_t nq, int32_t dv) {
    for (int32_t n = 0; n < nq; ++n) {
        RowState a{into[n], into[nq + n]};
        kernels::merge(&a, into + 2 * nq + int64_t(n) * dv, {from[n], from[nq + n]}, from + 2 * nq + int64_t(n) * dv,
                       dv);
        into[n] = a.m, into[nq + n] = a.l;
    }
}

} // namespace

struct Cache::Impl::AttendCall {
    int32_t layer = 0;
    int32_t heads = 0, group = 1; // of the attending layer
    RowsF32 q;
    const AttendArgs* args = nullptr;
    float* out = nullptr;
};

int64_t Cache::Impl::packed_seen(const StepSequence& s, int32_t layer, Side side, int64_t row, bool causal) const {
    const int64_t old = s.old_packed[packed_index(layer, side)];
    if (options.step == StepMode::chunk || !causal) return old;
    const Window& w = window(layer, side);
    return w.packed_after(old, std::max<int64_t>(0, row + 1 - w.front));
}

// Spans [first, end) for one tile and KV head; `total` receives the merged state of its query vectors.
void Cache::Impl::attend_spans(const AttendCall& call, const RowTile& tile, int32_t head, int32_t first, int32_t end,
                               float* total) {
    const LayerShape& l = shape.layers[size_t(call.layer)];
    const StepSequence& s = step.sequences[size_t(tile.sequence)];
    const Sequence& seq = *s.seq;
    const int32_t group = call.group, nq = tile.count * group, dk = l.key_dim, dv = l.value_dim;
    const int32_t k_index = side_index(call.layer, head, Side::key), v_index = k_index + 1;
    const SideState &ks = seq.sides[size_t(k_index)], &vs = seq.sides[size_t(v_index)];
    const RawType k_type = plans[size_t(k_index)].raw, v_type = plans[size_t(v_index)].raw;
    const int64_t front = plans[size_t(k_index)].window.front;
    Scratch& scratch = thread_scratch();

    float* q = scratch.floats(Scratch::query, size_t(nq) * size_t(dk));
    scratch.seen.resize(size_t(tile.count));
    int64_t lowest = seq.rows(), highest = 0;
    for (int32_t i = 0; i < tile.count; ++i) {
        const int32_t token = s.tokens[size_t(tile.first + i)];
        const int64_t row = s.old_rows + tile.first + i;
        for (int32_t g = 0; g < group; ++g)
            std::copy_n(call.q.at(token, int64_t(head) * group + g), dk, q + int64_t(i * group + g) * dk);
        Scratch::Seen& r = scratch.seen[size_t(i)];
        r.hi = call.args->causal ? row + 1 : seq.rows();
        r.lo = 0;
        if (call.args->window > 0) {
            const int32_t oldest = seq.positions[size_t(row)] - call.args->window + 1;
            r.lo =
                std::lower_bound(seq.positions.begin(), seq.positions.begin() + r.hi, oldest) - seq.positions.begin();
        }
        r.k_packed = packed_seen(s, call.layer, Side::key, row, call.args->causal);
        r.v_packed = packed_seen(s, call.layer, Side::value, row, call.args->causal);
        lowest = std::min(lowest, r.lo), highest = std::max(highest, r.hi);
    }

    // A basis without a shift is undone once a span: what pages add in it is kept apart.
    const Transform& basis_v = plan_of(vs, v_index).transform;
    const bool apart = fused[size_t(v_index)] && !basis_v.identity() && basis_v.shift.empty();
    const TileQuery query{.q = q,
                          .rows = tile.count,
                          .group = group,
                          .dk = dk,
                          .dv = dv,
                          .scale = call.args->scale,
                          .soft_cap = call.args->soft_cap,
                          .fast = options.accuracy == Accuracy::fast,
                          .apart = apart};
    // Queries in the basis of the packed keys, for kernels that read codes.
    const float *folded = q, *shift = nullptr;
    const Transform& basis_k = plan_of(ks, k_index).transform;
    if (fused[size_t(k_index)] && !basis_k.identity()) {
        float* to = scratch.floats(Scratch::folded, size_t(nq) * size_t(dk + 1) + size_t(dk));
        float* constant = to + int64_t(nq) * dk;
        for (int32_t n = 0; n < nq; ++n)
            constant[n] = basis_k.fold(q + int64_t(n) * dk, dk, to + int64_t(n) * dk, constant + nq);
        folded = to;
        if (!basis_k.shift.empty()) shift = constant;
    }
    const std::vector<float>& mean_k = plan_of(ks, k_index).mean;
    const float* mean = nullptr;
    if (fused[size_t(k_index)] && !mean_k.empty()) {
        const MeanTable& table_k = *means[size_t(call.layer)];
        float* to = scratch.floats(Scratch::folded, size_t(nq) * size_t(table_k.folded_width()));
        table_k.fold(mean_k.data(), q, nq, dk, to);
        mean = to;
    }
    TileRange range[kMaxTileRows];
    scratch.states.resize(size_t(nq));
    RowState* states = scratch.states.data();
    // A page of `size` rows that begins at row `base`; `packed_base` is where it begins for the packed boundaries.
    const auto page = [&](const TileSource& key, const TileSource& value, int64_t base, int64_t size, bool packs,
                          float* o) {
        for (int32_t i = 0; i < tile.count; ++i) {
            const Scratch::Seen& r = scratch.seen[size_t(i)];
            TileRange& to = range[i];
            to.lo = int32_t(std::clamp<int64_t>(r.lo - base, 0, size));
            to.hi = int32_t(std::clamp<int64_t>(r.hi - base, to.lo, size));
            to.k_packed = packs ? int32_t(std::clamp<int64_t>(r.k_packed + front - base, to.lo, to.hi)) : to.lo;
            to.v_packed = packs ? int32_t(std::clamp<int64_t>(r.v_packed + front - base, to.lo, to.hi)) : to.lo;
        }
        attend_page(*table, query, key, value, range, states, o, scratch);
    };
    const auto source = [&](const SideState& side, int64_t slot, Side which, RawType type) {
        const Slot& at = side.slots[size_t(slot)];
        TileSource from;
        from.raw = at.raw ? at.raw->bytes() : nullptr;
        from.type = type;
        if (!at.packed) return from;
        from.packed = basis(seq, call.layer, head, which, slot);
        from.fused = fused[size_t(which == Side::key ? k_index : v_index)];
        if (which == Side::key) from.q = folded, from.shift = shift, from.mean = mean;
        if (slot + 1 < int64_t(side.slots.size()))
            if (const Page* next = side.slots[size_t(slot) + 1].packed) from.next = next->bytes(); // not looked into
        return from;
    };

    const bool single = end == first + 1;
    float* partial = single ? total : scratch.floats(Scratch::partial, size_t(nq) * size_t(dv + 2));
    if (!single) clear_state(total, nq, dv);
    for (int32_t span = first; span < end; ++span) {
        clear_state(partial, nq, dv);
        std::fill(states, states + nq, RowState{kEmpty, 0.0f});
        float* o = partial + 2 * int64_t(nq);
        if (apart) {
            o = scratch.floats(Scratch::mixed, size_t(nq) * 2 * size_t(dv) + size_t(dv));
            std::fill_n(o, size_t(nq) * 2 * size_t(dv), 0.0f);
        }
        for (int64_t base = 0; span == 0 && base < front && base < seq.rows(); base += kPageTokens)
            page(rows_at(*ks.front, base, dk, k_type), rows_at(*vs.front, base, dv, v_type), base,
                 std::min<int64_t>(kPageTokens, front - base), false, o);
        for (int64_t c = int64_t(span) * kSpanPages; c < int64_t(span + 1) * kSpanPages; ++c) {
            const int64_t base = front + c * kPageTokens;
            if (base >= highest || c >= int64_t(ks.slots.size())) break;
            if (base + kPageTokens <= lowest) continue;
            page(source(ks, c, Side::key, k_type), source(vs, c, Side::value, v_type), base, kPageTokens, true, o);
        }
        for (int32_t n = 0; n < nq; ++n)
            partial[n] = states[n].m, partial[nq + n] = states[n].l;
        for (int32_t n = 0; apart && n < nq; ++n) {
            float *raw = o + int64_t(n) * 2 * dv, *packed = raw + dv, *to = partial + 2 * int64_t(nq) + int64_t(n) * dv;
            basis_v.unfold(packed, dv, 0.0f, o + int64_t(nq) * 2 * dv);
            for (int32_t d = 0; d < dv; ++d)
                to[d] = raw[d] + packed[d];
        }
        if (!single) merge_states(total, partial, nq, dv);
    }
}

// Sinks, division, and the rows' place in the output. A row that saw nothing gives 0.
void Cache::Impl::finish_tile(const AttendCall& call, const RowTile& tile, int32_t head, const float* total) {
    const StepSequence& s = step.sequences[size_t(tile.sequence)];
    const int32_t group = call.group, nq = tile.count * group, dv = shape.layers[size_t(call.layer)].value_dim;
    for (int32_t n = 0; n < nq; ++n) {
        const int32_t h = head * group + n % group;
        const int32_t token = s.tokens[size_t(tile.first + n / group)];
        const float* o = total + 2 * int64_t(nq) + int64_t(n) * dv;
        float* out = call.out + (int64_t(token) * call.heads + h) * dv;
        float l = total[nq + n], shrink = 1.0f;
        if (call.args->sinks) {
            const float m = std::max(total[n], call.args->sinks[h]);
            shrink = total[n] == kEmpty ? 0.0f : std::exp(total[n] - m);
            l = l * shrink + std::exp(call.args->sinks[h] - m);
        }
        const float f = l > 0.0f ? shrink / l : 0.0f;
        for (int32_t d = 0; d < dv; ++d)
            out[d] = o[d] * f;
    }
}

void Cache::attend(int32_t layer, RowsF32 q, const AttendArgs& args, float* out, Thread thread) {
    Impl& im = *impl_;
    Step& step = im.step;
    const LayerShape& l = im.shape.layers[size_t(layer)];
    Impl::AttendCall call;
    call.layer = layer;
    call.heads = args.heads > 0 ? args.heads : l.heads;
    call.group = call.heads / l.kv_heads;
    call.q = q;
    call.args = &args;
    call.out = out;

    int32_t items = 0;
    for (const RowTile& tile : step.tiles)
        items += step.split ? im.spans(tile, layer) : 1;
    items *= l.kv_heads;
    // A thread takes neighbouring spans of one head together, as far as there are enough for all: their pages follow
    // each other in memory.
    const int32_t run = step.split ? std::clamp(items / (thread.count * 8), 1, 8) : 1;
    for (int32_t item = 0, left = 0;; ++item, --left) {
        if (left == 0) item = step.attend_work.next.fetch_add(run), left = run;
        if (item >= items) break;
        if (!step.split) {
            // Later tiles of a sequence see more rows: those first, so that no thread waits long at the end.
            const RowTile& tile = step.tiles[step.tiles.size() - 1 - size_t(item / l.kv_heads)];
            const int32_t nq = tile.count * call.group;
            float* total = thread_scratch().floats(Scratch::total, size_t(nq) * size_t(l.value_dim + 2));
            im.attend_spans(call, tile, item % l.kv_heads, 0, im.spans(tile, layer), total);
            im.finish_tile(call, tile, item % l.kv_heads, total);
            continue;
        }
        int32_t t = 0, tile_spans = im.spans(step.tiles[0], layer), before = 0;
        while (item >= (before + tile_spans) * l.kv_heads) {
            before += tile_spans;
            tile_spans = im.spans(step.tiles[size_t(++t)], layer);
        }
        const int32_t head = (item - before * l.kv_heads) / tile_spans;
        const int32_t span = (item - before * l.kv_heads) % tile_spans;
        const RowTile& tile = step.tiles[size_t(t)];
        const auto state = [&](int32_t sp) {
            return step.partial.data() + (int64_t(before + sp) * l.kv_heads + head) * step.partial_stride;
        };
        im.attend_spans(call, tile, head, span, span + 1, state(span));
        std::atomic<int32_t>& done = step.remaining[size_t(t) * size_t(l.kv_heads) + size_t(head)];
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < tile_spans) continue;
        done.store(0, std::memory_order_relaxed); // ready for the next layer
        const int32_t nq = tile.count * call.group;
        const float* total = state(0);
        if (tile_spans > 1) { // as attend_spans does it: from an empty state, first to last
            float* merged = thread_scratch().floats(Scratch::total, size_t(nq) * size_t(l.value_dim + 2));
            clear_state(merged, nq, l.value_dim);
            for (int32_t sp = 0; sp < tile_spans; ++sp)
                merge_states(merged, state(sp), nq, l.value_dim);
            total = merged;
        }
        im.finish_tile(call, tile, head, total);
    }
    im.scratch_report();
    step.attend_work.leave(thread.count);
}

} // namespace kvmosaic
