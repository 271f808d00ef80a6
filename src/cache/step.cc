// begin_step and end_step: which rows go where, and all memory that a step can need.
#include <algorithm>
#include <cstring>
#include <set>

#include "cache/impl.h"

namespace kvmosaic {

namespace {

Status no_room(const char* what, int64_t have, int64_t limit) {
    return {StatusCode::out_of_capacity, std::string(what) + ": " + std::to_string(have) + " of at most " +
                                             std::to_string(limit) + "; nothing was appended"};
}

} // namespace

// Distributes the rows over sequences. A row of several sequences is appended once where their histories are one
// object and once each where not; an object of which only some names go on is cloned for those.
Status Cache::Impl::place(std::span<const StepRow> rows, Step* into, Moves* moves) const {
    std::map<Sequence*, int32_t> index; // sequence -> index into into->sequences
    const auto current = [&](SeqId id) -> std::shared_ptr<Sequence> {
        if (const auto m = moves->find(id); m != moves->end()) return m->second;
        const auto it = sequences.find(id);
        return it == sequences.end() ? nullptr : it->second;
    };
    const auto names_of = [&](const Sequence* seq) {
        std::set<SeqId> names;
        for (const auto& [id, s] : sequences)
            if (!moves->count(id) && s.get() == seq) names.insert(id);
        for (const auto& [id, s] : *moves)
            if (s.get() == seq) names.insert(id);
        return names;
    };
    const auto enlist = [&](const std::shared_ptr<Sequence>& seq) -> StepSequence& {
        const auto [it, fresh] = index.emplace(seq.get(), int32_t(into->sequences.size()));
        if (fresh) {
            StepSequence s;
            s.seq = seq;
            s.old_rows = seq->rows();
            s.old_packed = seq->packed;
            s.first = s.old_rows == 0;
            into->sequences.push_back(std::move(s));
        }
        return into->sequences[size_t(it->second)];
    };

    for (size_t i = 0; i < rows.size(); ++i) {
        const StepRow& row = rows[i];
        if (row.sequences.empty())
            return {StatusCode::invalid_argument, "begin_step: row " + std::to_string(i) + " names no sequence"};
        std::vector<std::pair<std::shared_ptr<Sequence>, std::set<SeqId>>> parts; // histories among the row's names
        for (const SeqId id : row.sequences) {
            auto seq = current(id);
            auto part = std::find_if(parts.begin(), parts.end(), [&](const auto& p) { return p.first == seq; });
            if (part == parts.end()) part = parts.insert(parts.end(), {seq, {}});
            part->second.insert(id);
        }
        std::shared_ptr<Sequence> reads;
        for (auto& [seq, names] : parts) {
            if (!seq || names != names_of(seq.get())) {
                auto own = seq ? clone(*seq) : make_sequence();
                for (const SeqId id : names)
                    (*moves)[id] = own;
                if (seq && index.count(seq.get())) { // rows that the history received in this very step
                    const std::vector<int32_t> tokens = into->sequences[size_t(index[seq.get()])].tokens;
                    enlist(own).tokens = tokens;
                }
                seq = own;
            }
            StepSequence& s = enlist(seq);
            const int32_t last = !s.tokens.empty()        ? rows[size_t(s.tokens.back())].position
                                 : seq->positions.empty() ? row.position
                                                          : seq->positions.back();
            if (row.position < last)
                return {StatusCode::invalid_argument, "begin_step: row " + std::to_string(i) + " has position " +
                                                          std::to_string(row.position) +
                                                          ", the sequence is already at " + std::to_string(last)};
            s.tokens.push_back(int32_t(i));
            if (names.count(row.sequences.front())) reads = seq;
        }
        into->source.emplace_back(index[reads.get()],
                                  int32_t(into->sequences[size_t(index[reads.get()])].tokens.size()) - 1);
    }
    return {};
}

Status Cache::Impl::check_room(const StepSequence& s) const {
    const int64_t total = s.old_rows + int64_t(s.tokens.size());
    if (options.max_rows > 0 && total > options.max_rows)
        return no_room("begin_step: rows of a sequence", total, options.max_rows);
    return {};
}

// Raw rows come in steps of kRawStep, so that a short tail does not pay for a whole page.
const PageLayout* Cache::Impl::raw_page(int32_t index, int64_t rows) {
    const PageLayout& whole = *raw_layouts[size_t(index)];
    const int64_t tokens = (std::min<int64_t>(rows, kPageTokens) + kRawStep - 1) / kRawStep * kRawStep;
    if (tokens == kPageTokens) return &whole;
    return intern(raw_layout(whole.raw, whole.side, whole.dim, int32_t(tokens)));
}

bool Cache::Impl::prepare_side(StepSequence& s, int32_t layer, int32_t head, Side side, std::vector<Change>* changes) {
    const int32_t index = side_index(layer, head, side);
    const Window& w = plans[size_t(index)].window;
    SideState& state = s.seq->sides[size_t(index)];
    const int64_t total = s.old_rows + int64_t(s.tokens.size());
    const auto take = [&](Page** at, const PageLayout* layout, uint32_t bytes, bool zero) {
        if (*at) return own(at, changes);
        Page* page = new_page(layout, bytes, zero);
        if (!page) return false;
        changes->push_back({at, nullptr});
        *at = page;
        return true;
    };

    if (s.old_rows < std::min<int64_t>(w.front, total)) {
        const PageLayout* front = front_layouts[size_t(index)];
        if (!take(&state.front, front, front->bytes, false)) return false;
    }
    if (options.rollback > 0 && !state.abs_sum.empty()) {
        const size_t entries = size_t(std::min<int64_t>(options.rollback, total));
        if (state.past_count.size() < entries) {
            state.past_count.resize(entries);
            state.past_sums.resize(entries * state.abs_sum.size());
        }
    }
    const int64_t before = std::max<int64_t>(0, s.old_rows - w.front);
    const int64_t beyond = std::max<int64_t>(0, total - w.front);
    if (beyond == before) return true;
    state.slots.resize(size_t((beyond + kPageTokens - 1) / kPageTokens));
    for (int64_t i = before / kPageTokens; i <= (beyond - 1) / kPageTokens; ++i) {
        Page*& at = state.slots[size_t(i)].raw;
        const PageLayout* raw = raw_page(index, beyond - i * kPageTokens);
        if (at && at->layout->tokens < raw->tokens) { // the page grows with its rows
            Page* wider = new_page(raw, raw->bytes, false);
            if (!wider) return false;
            std::memcpy(wider->bytes(), at->bytes(), at->layout->bytes);
            changes->push_back({&at, at});
            at = wider;
        } else if (!take(&at, raw, raw->bytes, false)) {
            return false;
        }
    }
    if (w.first > 0 && beyond >= w.first && !state.frozen && (method->freezes(side) || plans[size_t(index)].pins > 0)) {
        state.frozen = std::make_shared<SidePlan>(plans[size_t(index)]); // room for what freeze() decides
        const size_t width = size_t(shape.layers[size_t(layer)].dim(side)) * size_t(state.frozen->transform.joined);
        state.frozen->transform.scale.reserve(width);
        state.frozen->transform.shift.reserve(width);
        state.frozen->transform.order.reserve(width);
        state.frozen->pinned.reserve(kPageTokens);
        state.frozen->mean.reserve(width);
    }
    const int64_t packed = s.old_packed[packed_index(layer, side)];
    const int64_t packed_new = w.packed_after(packed, beyond);
    if (packed_new == packed) return true;
    if (const PageLayout* pins = pin_layouts[size_t(index)]; pins && packed < kPageTokens)
        if (!take(&state.pins, pins, pins->bytes, true)) return false;
    for (int64_t i = packed / kPageTokens; i <= (packed_new - 1) / kPageTokens; ++i) {
        const PageLayout* grid = grid_layouts[size_t(index)]; // null for tiered stores: worst case, cut to size later
        if (!take(&state.slots[size_t(i)].packed, grid, grid ? grid->bytes : worst[size_t(index)], grid != nullptr))
            return false;
    }
    return true;
}

Status Cache::Impl::begin_step(std::span<const StepRow> rows) {
    end_step();
    Step fresh;
    Moves moves;
    std::vector<Change> changes;
    const auto give_back = [&] {
        undo(&changes);
        for (StepSequence& s : fresh.sequences)
            for (SideState& side : s.seq->sides) { // slots that were added hold nothing
                while (!side.slots.empty() && !side.slots.back().raw && !side.slots.back().packed)
                    side.slots.pop_back();
                if (!side.decided) side.frozen.reset();
            }
        fresh.sequences.clear();
        std::set<Sequence*> seen;
        for (auto& [id, seq] : moves)
            if (seen.insert(seq.get()).second) free_pages(*seq);
    };
    if (Status st = place(rows, &fresh, &moves); !st) {
        give_back();
        return st;
    }
    for (StepSequence& s : fresh.sequences)
        if (Status st = check_room(s); !st) {
            give_back();
            return st;
        }
    for (StepSequence& s : fresh.sequences)
        for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer)
            for (int32_t head = 0; head < shape.layers[size_t(layer)].kv_heads; ++head)
                for (const Side side : {Side::key, Side::value})
                    if (!prepare_side(s, layer, head, side, &changes)) {
                        const bool limit = options.max_bytes > 0;
                        give_back();
                        if (limit) return no_room("begin_step: bytes in use", arena.live(), options.max_bytes);
                        return {StatusCode::out_of_memory, "begin_step: the system gave no memory beyond " +
                                                               std::to_string(arena.held()) +
                                                               " bytes; nothing was appended"};
                    }

    // Accepted. A page that was copied for us loses one owner; names move to their sequences.
    accept(&changes);
    for (auto& [id, seq] : moves) {
        const auto it = sequences.find(id);
        if (it != sequences.end()) drop_sequence(it->second);
        sequences[id] = seq;
    }
    moves.clear();
    for (StepSequence& s : fresh.sequences) {
        for (const int32_t t : s.tokens)
            s.seq->positions.push_back(rows[size_t(t)].position);
        for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
            if (!shape.layers[size_t(layer)].has_kv()) continue;
            for (const Side side : {Side::key, Side::value}) {
                const Window& w = window(layer, side);
                int64_t& packed = s.seq->packed[packed_index(layer, side)];
                packed = w.packed_after(packed, std::max<int64_t>(0, s.seq->rows() - w.front));
            }
        }
    }
    step.sequences = std::move(fresh.sequences);
    step.source = std::move(fresh.source);
    step.written.assign(shape.layers.size(), 0);
    step.queries = true;
    step.open = true;
    make_tiles();
    return {};
}

int32_t Cache::Impl::spans(const RowTile& tile, int32_t layer) const {
    const StepSequence& s = step.sequences[size_t(tile.sequence)];
    const int64_t beyond = std::max<int64_t>(0, s.seq->rows() - window(layer, Side::key).front);
    const int64_t pages = (beyond + kPageTokens - 1) / kPageTokens;
    return int32_t(std::max<int64_t>(1, (pages + kSpanPages - 1) / kSpanPages));
}

void Cache::Impl::make_tiles() {
    constexpr int32_t kSplitRows = 16; // above, rows and heads alone keep the threads busy
    int32_t group = 1, kv_heads = 1, value_dim = 1;
    int32_t owner = -1; // the layer with the shortest front has the most pages
    for (size_t i = 0; i < shape.layers.size(); ++i) {
        const LayerShape& l = shape.layers[i];
        if (!l.has_kv()) continue;
        group = std::max(group, l.heads / l.kv_heads);
        kv_heads = std::max(kv_heads, l.kv_heads);
        value_dim = std::max(value_dim, l.value_dim);
        if (owner < 0 || window(int32_t(i), Side::key).front < window(owner, Side::key).front) owner = int32_t(i);
    }
    const int32_t per_tile = std::max(1, kMaxTileRows / group);

    step.tiles.clear();
    std::vector<std::vector<int32_t>> reads(step.sequences.size()); // new rows that somebody reads, in order
    for (const auto& [sequence, row] : step.source)
        reads[size_t(sequence)].push_back(row);
    for (size_t i = 0; i < reads.size(); ++i)
        for (size_t a = 0; a < reads[i].size();) {
            size_t b = a + 1;
            while (b < reads[i].size() && reads[i][b] == reads[i][b - 1] + 1 && int32_t(b - a) < per_tile)
                ++b;
            step.tiles.push_back({int32_t(i), reads[i][a], int32_t(b - a)});
            a = b;
        }

    int32_t items = 0;
    for (const RowTile& tile : step.tiles)
        items += spans(tile, owner);
    step.split = int32_t(step.source.size()) <= kSplitRows && items > int32_t(step.tiles.size());
    step.partial_stride = int64_t(std::min<int64_t>(per_tile, int64_t(step.source.size()))) * group * (value_dim + 2);
    const size_t need = step.split ? size_t(items) * size_t(kv_heads) * size_t(step.partial_stride) : 0;
    if (step.partial.size() < need) step.partial.resize(need);
    const size_t counters = step.split ? step.tiles.size() * size_t(kv_heads) : 0;
    if (step.remaining.size() < counters) step.remaining = std::vector<std::atomic<int32_t>>(counters);
    for (auto& r : step.remaining)
        r.store(0, std::memory_order_relaxed);
}

// A step that ended before this layer was written (a failed or cancelled graph): nothing of it is packed, rows that
// were there before stay what they were, the new ones are zeros. The caller truncates them, but finds a cache that is
// whole.
void Cache::Impl::give_up(StepSequence& s, int32_t layer, Side side) {
    const int64_t before = s.old_packed[packed_index(layer, side)];
    int64_t& packed = s.seq->packed[packed_index(layer, side)];
    for (int32_t head = 0; head < shape.layers[size_t(layer)].kv_heads; ++head) {
        const int32_t index = side_index(layer, head, side);
        SideState& state = s.seq->sides[size_t(index)];
        const size_t row_bytes = size_t(raw_layouts[size_t(index)]->dim) * bytes_of(plans[size_t(index)].raw);
        for (int64_t row = s.old_rows; row < s.seq->rows(); ++row) {
            std::memset(raw_row(index, state, row), 0, row_bytes);
            if (row >= s.seq->rows() - options.rollback) remember(state, row);
        }
        for (int64_t page = (before + kPageTokens - 1) / kPageTokens; page * kPageTokens < packed; ++page)
            drop(state.slots[size_t(page)].packed);
        if (state.frozen && !state.decided) {
            state.frozen.reset();
            drop(state.pins);
        }
    }
    packed = before;
}

void Cache::Impl::end_step() {
    if (!step.open) return;
    step.open = false;
    for (StepSequence& s : step.sequences) {
        const int64_t floor = std::max(s.seq->floor, s.seq->rows() - options.rollback);
        for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
            if (!shape.layers[size_t(layer)].has_kv()) continue;
            for (const Side side : {Side::key, Side::value}) {
                if (!step.written[size_t(layer)]) give_up(s, layer, side);
                const int64_t before = s.old_packed[packed_index(layer, side)];
                const int64_t now = s.seq->packed[packed_index(layer, side)];
                const int64_t needless = packed_at(*s.seq, layer, side, floor) / kPageTokens; // pages, as raw rows
                for (int32_t head = 0; head < shape.layers[size_t(layer)].kv_heads; ++head) {
                    SideState& state = s.seq->sides[size_t(side_index(layer, head, side))];
                    for (int64_t i = needless - 1; i >= 0 && state.slots[size_t(i)].raw; --i)
                        drop(state.slots[size_t(i)].raw);
                    for (int64_t i = before / kPageTokens; now > before && i <= (now - 1) / kPageTokens; ++i)
                        narrow(state.slots[size_t(i)].packed, state.slots[size_t(i)].packed->layout);
                }
            }
        }
        s.seq->floor = floor;
        // One plan for all that the first step seals: no shorter text has the same pages.
        if (s.first && method->map_scope() == MapScope::first_step) rebase(*s.seq);
    }
    arena.trim();
    step.sequences.clear();
    step.tiles.clear();
    step.source.clear();
}

} // namespace kvmosaic
