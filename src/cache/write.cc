// Writing a layer's new rows: copy, statistics, plan, seal, row by row in order, so that the plan of a block rests on
// exactly the rows up to the one that completes it, however the text was cut into steps.
#include <algorithm>
#include <cmath>
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
    in.rope = &shape.layers[size_t(layer)].rope;
    *plan = plan_of(state, index);
    method->plan(in, plan);
}

// What a sequence decides once, from its first front + 128 rows and the queries of exactly those.
void Cache::Impl::freeze(StepSequence& s, int32_t layer, int32_t head, Side side) {
    const int32_t index = side_index(layer, head, side);
    SideState& state = s.seq->sides[size_t(index)];
    const int32_t dim = raw_layouts[size_t(index)]->dim, front = plans[size_t(index)].window.front;
    const int32_t count = front + kPageTokens;
    float* rows = thread_scratch().floats(Scratch::rows, size_t(count) * size_t(dim));
    for (int64_t r = 0; r < count;) {
        const int64_t end = r < front ? front : count;
        table->load_raw(plans[size_t(index)].raw, raw_row(index, state, r), int32_t(end - r), dim, rows + r * dim, dim);
        r = end;
    }
    if (side == Side::key && means[size_t(layer)])
        means[size_t(layer)]->turns().turn(rows, count, dim, s.seq->positions.data(), s.seq->positions[0], -1);
    PlanInput in;
    in.side = side;
    in.layer = layer;
    in.kv_head = head;
    in.rows = rows;
    in.count = count;
    in.dim = dim;
    in.query.abs_sum = state.abs_sum.empty() ? nullptr : state.abs_sum.data();
    in.query.count = state.query_count;
    in.front = front;
    in.rope = &shape.layers[size_t(layer)].rope;
    method->freeze(in, state.frozen.get());
    state.decided = true;
}

// One query vector of a KV head into its statistic: |q|, q^2, or norms of rotary pairs (both channels of a pair get
// it).
void Cache::Impl::add_query(SideState& state, int32_t layer, RawType type, const float* q) const {
    const int32_t dim = int32_t(state.abs_sum.size());
    const QuerySum sum = method->info().query_sum;
    if (sum != QuerySum::pair_norm) {
        (sum == QuerySum::square ? table->add_squares : table->add_abs)(type, q, dim, state.abs_sum.data());
        return;
    }
    const Rope& rope = shape.layers[size_t(layer)].rope;
    float x[kMaxHeadDim] = {};
    table->add_abs(type, q, dim, x);
    for (int32_t i = 0; rope.known && i < rope.rotary / 2; ++i) {
        const auto [a, b] = rope.pair(i);
        const float aa = x[a] * x[a], bb = x[b] * x[b];
        x[a] = x[b] = std::sqrt(aa + bb);
    }
    for (int32_t d = 0; d < dim; ++d)
        state.abs_sum[size_t(d)] += x[d];
}

// The raw rows of a block of all heads that are joined with the first one, keys turned back or centred as they are
// packed: [flush][joined * D], in the thread's working memory.
float* Cache::Impl::block_rows(const Sequence& seq, int32_t layer, int32_t first_head, Side side,
                               int64_t packed) const {
    const int32_t first_index = side_index(layer, first_head, side);
    const SidePlan& fixed = plans[size_t(first_index)];
    const int32_t dim = raw_layouts[size_t(first_index)]->dim, flush = fixed.window.flush;
    const int32_t joined = fixed.transform.joined, width = joined * dim;
    const int32_t first = int32_t(packed % kPageTokens);
    const size_t row_bytes = size_t(dim) * bytes_of(fixed.raw);
    float* rows = thread_scratch().floats(Scratch::rows, size_t(flush) * size_t(width));
    for (int32_t h = 0; h < joined; ++h) {
        const Slot& slot = seq.sides[size_t(first_index + 2 * h)].slots[size_t(packed / kPageTokens)];
        table->load_raw(fixed.raw, slot.raw->bytes() + size_t(first) * row_bytes, flush, dim, rows + h * dim, width);
    }
    const int32_t* positions = seq.positions.data() + fixed.window.front + (packed - first);
    const std::vector<float>& mean = plan_of(seq.sides[size_t(first_index)], first_index).mean;
    if (!mean.empty())
        means[size_t(layer)]->add(mean.data(), -1.0f, rows, flush, dim, dim, positions + first, *positions);
    if (side == Side::key && turns[size_t(layer)]) {
        for (int32_t h = 0; h < joined; ++h)
            turns[size_t(layer)]->turn(rows + h * dim, flush, width, positions + first, *positions, -1);
    }
    return rows;
}

void Cache::Impl::to_basis(const Transform& transform, float* rows, int32_t count, int32_t width) const {
    if (transform.identity()) return;
    float* work = thread_scratch().floats(Scratch::basis, size_t(width));
    for (int32_t t = 0; t < count; ++t)
        transform.forward(rows + int64_t(t) * width, width, work);
}

// The rows of one of the joined heads: [count][D], in the thread's working memory where more than one is joined.
const float* Cache::Impl::head_rows(const float* rows, int32_t count, int32_t joined, int32_t head, int32_t dim) const {
    if (joined == 1) return rows;
    float* split = thread_scratch().floats(Scratch::joined, size_t(count) * size_t(dim));
    for (int32_t t = 0; t < count; ++t)
        std::copy_n(rows + (int64_t(t) * joined + head) * dim, dim, split + int64_t(t) * dim);
    return split;
}

// Packs the block of `flush` rows that begins `packed` rows beyond the front, of all heads that are joined with the
// first one.
void Cache::Impl::seal(StepSequence& s, int32_t layer, int32_t first_head, Side side, int64_t packed,
                       const SidePlan* shared) {
    const int32_t first_index = side_index(layer, first_head, side);
    const SidePlan& fixed = plans[size_t(first_index)];
    const int32_t dim = raw_layouts[size_t(first_index)]->dim, flush = fixed.window.flush;
    const int32_t joined = fixed.transform.joined, width = joined * dim;
    const int32_t first = int32_t(packed % kPageTokens);
    const size_t row_bytes = size_t(dim) * bytes_of(fixed.raw);
    Scratch& scratch = thread_scratch();
    float* rows = block_rows(*s.seq, layer, first_head, side, packed);
    // A tiered plan sees the rows as they came, or centred; its store takes no transform but the order of channels.
    const bool tiered = fixed.store.kind == StoreKind::tiered;
    const SidePlan* plan = shared;
    if (tiered && !plan) {
        plan_page(s, layer, first_head, side, rows, packed, flush, &scratch.plan);
        plan = &scratch.plan;
    }
    to_basis(plan_of(s.seq->sides[size_t(first_index)], first_index).transform, rows, flush, width);
    for (int32_t h = 0; h < joined; ++h) {
        const int32_t index = first_index + 2 * h;
        SideState& state = s.seq->sides[size_t(index)];
        Slot& slot = state.slots[size_t(packed / kPageTokens)];
        if (tiered) {
            const PageLayout page = layout(plan->store, side, dim, plan->ladder);
            slot.packed->layout = intern(page);
            sealed_ladders.fetch_add(1, std::memory_order_relaxed);
            if (plan->raised) raised.fetch_add(1, std::memory_order_relaxed);
            std::memset(slot.packed->bytes(), 0, page.bytes);
        }
        const float* own = head_rows(rows, flush, joined, h, dim);
        const uint16_t* channels = tiered && slot.packed->layout->map_bytes > 0 ? plan->channels.data() : nullptr;
        table->encode(*slot.packed->layout, channels, own, first, flush, slot.packed->bytes());
        if (state.pins && packed < kPageTokens) {
            const std::vector<uint16_t>& pinned = state.frozen->pinned;
            for (size_t i = 0; i < pinned.size(); ++i)
                if (pinned[i] >= first && pinned[i] < first + flush)
                    std::memcpy(state.pins->bytes() + i * row_bytes, slot.raw->bytes() + size_t(pinned[i]) * row_bytes,
                                row_bytes);
        }
        if (side == Side::key && method->query_scope() == QueryScope::window) {
            std::fill(state.abs_sum.begin(), state.abs_sum.end(), 0.0f);
            state.query_count = 0;
        }
    }
}

// All rows of one side of the heads that are joined with the first one (usually itself alone).
void Cache::Impl::write_side(StepSequence& s, int32_t layer, int32_t first_head, Side side, RowsF32 q, RowsF32 x) {
    const int32_t first_index = side_index(layer, first_head, side);
    const SidePlan& plan = plans[size_t(first_index)];
    const LayerShape& l = shape.layers[size_t(layer)];
    const int32_t joined = plan.transform.joined, group = l.heads / l.kv_heads, dim = l.dim(side);
    SideState* sides = &s.seq->sides[size_t(first_index)]; // of head first_head + h: sides[2 * h]
    const bool statistics = side == Side::key && !sides->abs_sum.empty();
    const int64_t remembered = s.seq->rows() - options.rollback; // statistics before this row and later ones
    const bool one_map = method->map_scope() == MapScope::first_step && s.first && plan.store.kind == StoreKind::tiered;
    int64_t packed = s.old_packed[packed_index(layer, side)];
    kernels::Counters counters;

    for (size_t i = 0; i < s.tokens.size(); ++i) {
        const int32_t token = s.tokens[i];
        const int64_t row = s.old_rows + int64_t(i), beyond = row + 1 - plan.window.front;
        for (int32_t h = 0; h < joined; ++h) {
            SideState& state = sides[2 * h];
            const int32_t head = first_head + h;
            table->store_raw(plan.raw, x.at(token, head), dim, raw_row(first_index + 2 * h, state, row), &counters);
            if (statistics && row >= remembered) remember(state, row);
            if (statistics && step.queries) {
                for (int32_t g = 0; g < group; ++g)
                    add_query(state, layer, plan.raw, q.at(token, int64_t(head) * group + g));
                state.query_count += group;
            }
            if (state.frozen && !state.decided && beyond >= kPageTokens) freeze(s, layer, head, side);
        }
        if (one_map) continue;
        const int64_t due = plan.window.packed_after(packed, std::max<int64_t>(0, beyond));
        for (; packed < due; packed += plan.window.flush)
            seal(s, layer, first_head, side, packed, nullptr);
    }
    if (one_map) { // the one method option whose plan sees the whole first step (`map=prompt`)
        const int64_t due = plan.window.packed_after(packed, std::max<int64_t>(0, s.seq->rows() - plan.window.front));
        if (due > packed) {
            Scratch& scratch = thread_scratch();
            float* rows = scratch.floats(Scratch::total, size_t(due - packed) * size_t(dim));
            for (int64_t r = packed; r < due; r += kPageTokens) {
                const int64_t n = std::min<int64_t>(kPageTokens, due - r);
                table->load_raw(plan.raw, raw_row(first_index, *sides, plan.window.front + r), int32_t(n), dim,
                                rows + (r - packed) * dim, dim);
            }
            SidePlan whole;
            plan_page(s, layer, first_head, side, rows, packed, due - packed, &whole);
            for (; packed < due; packed += plan.window.flush)
                seal(s, layer, first_head, side, packed, &whole);
        }
    }
    if (counters.non_finite) non_finite += counters.non_finite;
    if (counters.saturated) saturated += counters.saturated;
}

void Cache::write(int32_t layer, RowsF32 q, RowsF32 k, RowsF32 v, Thread thread) {
    Impl& im = *impl_;
    const int32_t heads = im.shape.layers[size_t(layer)].kv_heads;
    const int32_t k_joined = im.joined(layer, Side::key), v_joined = im.joined(layer, Side::value);
    const int32_t k_tasks = heads / k_joined, per_sequence = k_tasks + heads / v_joined;
    const int32_t tasks = int32_t(im.step.sequences.size()) * per_sequence;
    for (;;) {
        const int32_t task = im.step.write_work.next.fetch_add(1);
        if (task >= tasks) break;
        StepSequence& s = im.step.sequences[size_t(task / per_sequence)];
        const int32_t part = task % per_sequence;
        if (part < k_tasks)
            im.write_side(s, layer, part * k_joined, Side::key, q, k);
        else
            im.write_side(s, layer, (part - k_tasks) * v_joined, Side::value, q, v);
    }
    if (thread.index == 0) im.step.written[size_t(layer)] = 1;
    im.step.write_work.leave(thread.count);
}

} // namespace kvmosaic
