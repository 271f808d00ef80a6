// Inside of Cache: pages, sequences and the step under way. Not installed.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cache/basis.h"
#include "cache/mean.h"
#include "core/arena.h"
#include "core/hash.h"
#include "kernels/kernels.h"
#include "kvmosaic/cache.h"

namespace kvmosaic {

class RowSource;
namespace state {
class Writer;
}

// A block of the arena: this header, then layout->bytes. Shared between sequences by reference; the cache copies a
// page before it writes to one that has other owners.
struct Page {
    std::atomic<uint32_t> refs{1};
    uint32_t block = 0; // bytes taken from the arena, this header included
    const PageLayout* layout = nullptr;
    uint64_t unused[2] = {};
    uint8_t* bytes() { return reinterpret_cast<uint8_t*>(this + 1); }
    const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(this + 1); }
};
static_assert(sizeof(Page) == kPageAlign, "the bytes behind the header keep the page's alignment");

// The 128 tokens of one page number. While some of them are packed and some raw, both are there (a mixed page).
struct Slot {
    Page* raw = nullptr;
    Page* packed = nullptr;
};

// One layer, KV head and side of a sequence.
struct SideState {
    Page* front = nullptr;
    Page* pins = nullptr; // raw rows that the plan pinned, [plan.pins][D]; written when the first page is packed
    std::vector<Slot> slots;
    std::vector<float> abs_sum; // [D], key side of methods that use queries
    int64_t query_count = 0;
    // Statistics as they stood before each of the newest `rollback` rows: those before row r at r modulo rollback.
    std::vector<float> past_sums;    // [rollback][D]
    std::vector<int64_t> past_count; // [rollback]
    // The plan with what this sequence decided once (Method::freeze). Made when the rows for it are there; shared by
    // forks, and never changed after `decided`.
    std::shared_ptr<SidePlan> frozen;
    bool decided = false;
    bool settled = false; // decided before Sequence::base
};

// Held by every sequence that shares pages with a kept prefix: a prefix in use is not evicted.
struct PrefixUse {};

struct Sequence {
    std::vector<int32_t> positions; // [rows]
    std::vector<SideState> sides;   // by Cache::Impl::side_index
    std::vector<int64_t> packed;    // [L][2] rows packed beyond the front
    // Since it had `base` rows the sequence only grew or was cut exactly; then `base_packed` of them were packed. Cuts
    // to `floor` rows and more are exact: raw rows and statistics of every state from there on are still here.
    int64_t base = 0, floor = 0;
    std::vector<int64_t> base_packed;        // [L][2]
    std::shared_ptr<const PrefixUse> origin; // of the kept prefix that it began from or became
    int64_t rows() const { return int64_t(positions.size()); }
};

// A sequence as it was when it was kept, for others to begin from.
struct Prefix {
    std::vector<int32_t> tokens; // [rows]
    std::shared_ptr<Sequence> state;
    std::shared_ptr<const PrefixUse> use;
    uint64_t last_use = 0; // by Cache::Impl::clock
    bool referenced() const { return use.use_count() > 1; }
};

// Rows that one sequence receives in a step.
struct StepSequence {
    std::shared_ptr<Sequence> seq;
    int64_t old_rows = 0;
    std::vector<int32_t> tokens;     // index in the step of each new row, in order
    std::vector<int64_t> old_packed; // [L][2]
    bool first = false;              // the sequence was empty
};

// Query rows that are attended together: consecutive new rows of one sequence.
struct RowTile {
    int32_t sequence = 0;         // index into Step::sequences
    int32_t first = 0, count = 0; // of StepSequence::tokens
};

struct WorkCounter {
    std::atomic<int32_t> next{0}, left{0};
    // The thread that leaves last makes the counter ready for the next operation; operations never overlap.
    void leave(int32_t threads) {
        if (left.fetch_add(1) + 1 == threads) {
            next.store(0);
            left.store(0);
        }
    }
};

struct Step {
    bool open = false;
    std::vector<StepSequence> sequences;
    std::vector<std::pair<int32_t, int32_t>> source; // [rows of the step] (sequence, its new row) that it reads
    std::vector<RowTile> tiles;
    std::vector<uint8_t> written; // [L] whether the layer's rows arrived
    bool queries = true;          // q enters the statistics
    bool split = false;           // every span of the context is a work item of its own (few rows, long context)
    int64_t partial_stride = 0;   // floats per item
    std::vector<float> partial;   // states of split items
    std::vector<std::atomic<int32_t>> remaining; // [tiles][heads] spans not done yet
    WorkCounter write_work, attend_work;
};

struct Cache::Impl {
    Impl(const ModelShape& s, const CacheOptions& o);
    ~Impl();

    ModelShape shape;
    CacheOptions options;
    std::unique_ptr<Method> method;
    const kernels::Table* table = nullptr;
    Arena arena;
    Path path = Path::raw;
    std::vector<uint8_t> fused; // [side_count] whether the side's codes are attended as they lie
    bool can_fuse(const SidePlan& plan, Side side, int32_t dim) const;
    Path fused_path() const;
    uint64_t calibration = kFnvStart; // hash of what plans hold beyond the spec: transforms, codebooks, groups

    std::vector<int32_t> side_first; // [L] index of the first SideState of a layer
    int32_t side_count = 0;
    std::vector<SidePlan> plans;                                             // [side_count] fixed part
    std::vector<const PageLayout*> front_layouts, raw_layouts, grid_layouts; // [side_count]
    std::vector<const PageLayout*> pin_layouts;                              // [side_count] null without pinned rows
    std::vector<uint32_t> worst;                         // [side_count] bytes of the largest page, tiered stores
    std::vector<std::shared_ptr<const TurnTable>> turns; // [L] for keys packed before RoPE, else null
    std::vector<std::shared_ptr<const MeanTable>> means; // [L] for centred keys, else null
    std::map<SeqId, std::shared_ptr<Sequence>> sequences;
    std::multimap<uint64_t, Prefix> prefixes; // by the hash of their tokens
    uint64_t clock = 0;
    Step step;
    std::atomic<int64_t> non_finite{0}, saturated{0}, sealed_ladders{0}, raised{0};
    std::atomic<int64_t> scratch_bytes{0}; // largest working memory of a thread so far
    void scratch_report();

    // ---- layouts ----
    const PageLayout* intern(const PageLayout& layout);
    mutable std::mutex layouts_mutex;
    std::vector<std::unique_ptr<PageLayout>> layouts;
    std::unordered_multimap<uint64_t, const PageLayout*> layout_index; // by what differs between pages of one store
    void forget_layouts(size_t kept);                                  // all but the first `kept`

    // ---- indices ----
    int32_t side_index(int32_t layer, int32_t head, Side side) const {
        return side_first[size_t(layer)] + 2 * head + int32_t(side);
    }
    const Window& window(int32_t layer, Side side) const { return plans[size_t(side_index(layer, 0, side))].window; }
    // The plan that a sequence's pages of this side were made with.
    const SidePlan& plan_of(const SideState& state, int32_t index) const {
        return state.frozen ? *state.frozen : plans[size_t(index)];
    }
    int32_t joined(int32_t layer, Side side) const {
        return plans[size_t(side_index(layer, 0, side))].transform.joined;
    }
    // Calls f(layer, head, side, index) for every side, in the order in which sequences hold and save them.
    template <typename F>
    void each_side(F f) const {
        for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer)
            for (int32_t head = 0; head < shape.layers[size_t(layer)].kv_heads; ++head)
                for (const Side side : {Side::key, Side::value})
                    f(layer, head, side, side_index(layer, head, side));
    }
    class Loader; // of a saved state
    struct Loaded;
    // ---- pieces of a state, in their order (state.cc) ----
    void put_identity(state::Writer* w) const; // head, model, method, plans
    static void put_positions(state::Writer* w, std::span<const int32_t> positions, const std::vector<int64_t>& packed);
    void put_statistics(state::Writer* w, const std::vector<SideState>& sides) const;
    void put_decided(state::Writer* w, const std::vector<SideState>& sides) const;
    void put_rows(state::Writer* w, int64_t rows, const std::vector<int64_t>& packed, const RowSource& source) const;
    static size_t packed_index(int32_t layer, Side side) { return size_t(layer) * 2 + size_t(side); }
    size_t raw_row_bytes(int32_t index) const; // of a raw row

    // ---- pages ----
    // Null: no memory, also after all prefixes that nobody uses were evicted (where `evict` allows that).
    Page* new_page(const PageLayout* layout, uint32_t bytes, bool zero, bool evict = true);
    void drop(Page*& page);
    // Into a block that `layout` needs and no larger; stays where it is when others own it too or there is no memory.
    void narrow(Page*& page, const PageLayout* layout);
    static void share(Page* page) {
        if (page) page->refs.fetch_add(1, std::memory_order_relaxed);
    }
    uint8_t* raw_row(int32_t index, SideState& side, int64_t row) const; // row of the sequence

    struct Change { // of one page pointer, to be undone when a later allocation fails
        Page** at;
        Page* before;
    };
    bool own(Page** at, std::vector<Change>* changes); // copies a page that has other owners
    void undo(std::vector<Change>* changes);
    void accept(std::vector<Change>* changes);

    // ---- sequences ----
    const Sequence* find(SeqId id) const {
        const auto it = sequences.find(id);
        return it == sequences.end() ? nullptr : it->second.get();
    }
    std::shared_ptr<Sequence> make_sequence() const;
    static std::shared_ptr<Sequence> clone(const Sequence& from);
    void free_pages(Sequence& seq);
    void drop_sequence(std::shared_ptr<Sequence>& seq); // frees the pages when this was the last owner
    // Rows that were packed when the sequence had `rows` rows, floor <= rows.
    int64_t packed_at(const Sequence& seq, int32_t layer, Side side, int64_t rows) const;
    void rebase(Sequence& seq) const; // from here on cuts are exact
    Status cut(std::shared_ptr<Sequence>& seq, int64_t rows);
    Status cut_exactly(std::shared_ptr<Sequence>& seq, int64_t rows);
    bool unseal(Sequence& seq, int32_t layer, int32_t first_head, Side side, int64_t packed,
                std::vector<Change>* changes);
    void remember(SideState& state, int64_t row) const; // statistics before this row
    void recall(SideState& state, int64_t row) const;

    // Rebuilding a sequence: `from` stays as it is until the new one is whole.
    struct Rebuild; // which rows go where
    std::shared_ptr<Sequence> rebuild(const Sequence& from, const Rebuild& how);
    bool rebuild_side(const Sequence& from, Sequence& to, int32_t layer, int32_t head, Side side, const Rebuild& how);
    Status drop_rows(std::shared_ptr<Sequence>& seq, int64_t first, int64_t end);
    Status reposition(std::shared_ptr<Sequence>& seq, int64_t first, std::span<const int32_t> positions);
    Status can_turn() const;
    void compact_side(Sequence& seq, int32_t index);

    // Of these sequences, with all layouts that there are, or those that their pages and every sequence need.
    enum class Layouts : uint8_t { all, used };
    Footprint footprint(const std::vector<const Sequence*>& held, Layouts layouts) const;

    // ---- prefixes ----
    bool evict_prefix();       // the least recently used one that nobody uses; false: there is none
    int64_t evictable() const; // bytes of the arena that evicting would free
    Prefix* longest_prefix(std::span<const int32_t> tokens, int64_t* rows);

    void decode(const Sequence& seq, int32_t layer, int32_t head, Side side, int64_t packed, int64_t first,
                int64_t count, float* out) const;
    // How rows of packed page `slot` become rows of the model. Valid while nothing is appended.
    Basis basis(const Sequence& seq, int32_t layer, int32_t head, Side side, int64_t slot) const;

    // ---- step ----
    using Moves = std::map<SeqId, std::shared_ptr<Sequence>>; // ids that point elsewhere once the step is accepted
    Status place(std::span<const StepRow> rows, Step* into, Moves* moves) const;
    Status begin_step(std::span<const StepRow> rows);
    Status check_room(const StepSequence& s) const;
    bool prepare_side(StepSequence& s, int32_t layer, int32_t head, Side side, std::vector<Change>* changes);
    const PageLayout* raw_page(int32_t index, int64_t rows);
    int64_t bytes_needed(const StepSequence& s) const; // of the arena, at most
    void make_tiles();
    void end_step();
    void give_up(StepSequence& s, int32_t layer, Side side);
    void write_side(StepSequence& s, int32_t layer, int32_t first_head, Side side, RowsF32 q, RowsF32 x);
    void add_query(SideState& state, int32_t layer, RawType type, const float* q) const;
    void freeze(StepSequence& s, int32_t layer, int32_t head, Side side);
    void plan_page(const StepSequence& s, int32_t layer, int32_t head, Side side, const float* rows, int64_t first,
                   int64_t count, SidePlan* plan) const;
    float* block_rows(const Sequence& seq, int32_t layer, int32_t first_head, Side side, int64_t packed) const;
    const float* head_rows(const float* rows, int32_t count, int32_t joined, int32_t head, int32_t dim) const;
    void to_basis(const Transform& transform, float* rows, int32_t count, int32_t width) const;
    void seal(StepSequence& s, int32_t layer, int32_t first_head, Side side, int64_t packed, const SidePlan* shared);
    int64_t packed_seen(const StepSequence& s, int32_t layer, Side side, int64_t row, bool causal) const;
    int32_t spans(const RowTile& tile, int32_t layer) const;
    struct AttendCall;
    void attend_spans(const AttendCall& call, const RowTile& tile, int32_t head, int32_t first, int32_t end,
                      float* total);
    void finish_tile(const AttendCall& call, const RowTile& tile, int32_t head, const float* total);
};

inline constexpr int32_t kMaxTileRows = 64; // also the query vectors that share a restored page, if the group allows
inline constexpr int32_t kRawStep = 32;     // rows by which a raw page grows
inline constexpr int32_t kSpanPages = 4; // pages per partial attention state (512 tokens); fixed, so that bits of the
                                         // result do not depend on threads or on how rows were grouped

} // namespace kvmosaic
