// The cache: which tokens are front, packed and recent; owns pages, sequences and statistics.
//
// A step is: begin_step (all allocation and bookkeeping, one thread), then for each layer write and attend (any number
// of threads, each calling with its own `thread`; all writes of a layer end before its first attend begins), then
// end_step. The simple form for one thread is `append_and_attend`. Sequences are named by the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvmosaic/method.h"
#include "kvmosaic/shape.h"
#include "kvmosaic/status.h"

namespace kvmosaic {

namespace device {
class DeviceCache;
}

using SeqId = int32_t;

// What a row sees of the rows that arrive with it (DESIGN.md section 13, "Chunks").
enum class StepMode : uint8_t {
    decode, // exactly what it would see if the rows came one at a time
    chunk,  // rows of one step see each other raw and everything older packed
};

// How weights are rounded where attention is computed straight from the codes.
enum class Accuracy : uint8_t {
    exact, // 15 bits and sign: error below 5e-4 of the attention over the stored values
    fast,  // 7 bits and sign: error up to 5e-2, less than what 2-bit codes lose
};
const char* name_of(Accuracy a);

struct CacheOptions {
    int64_t max_rows = 0;  // per sequence; 0: no limit
    int64_t max_bytes = 0; // of the arena; 0: no limit. Prefixes that nobody uses give way before a step is refused
    int32_t rollback = 0;  // truncate is exact down to this many rows before a sequence's newest; 0..65536
    StepMode step = StepMode::decode;
    Accuracy accuracy = Accuracy::exact; // KVMOSAIC_ACCURACY overrides
    bool restore = false;   // decode pages to rows before attending, also where codes could be read; KVMOSAIC_RESTORE=1
    bool reference = false; // use the plain double-precision kernels (tests, doubt)
    std::string isa;        // "" (what KVMOSAIC_ISA names, else the best), "scalar", "avx2", "neon", ...
    bool poison = false;    // fill memory with 0xFF before use (tests)
};

// Puts what KVMOSAIC_ACCURACY and KVMOSAIC_RESTORE say in place of the options. Cache::create does this to its own
// copy; for those who report how a cache would attend.
Status read_environment(CacheOptions* options);

// One row of a step. The same row may belong to several sequences (a shared prompt).
struct StepRow {
    int32_t position = 0;             // RoPE position; never below the sequence's last
    std::span<const SeqId> sequences; // at least one
};

// Rows of a tensor: element d of head h of row t is at base[t * row_stride + h * head_stride + d].
struct RowsF32 {
    const float* base = nullptr;
    int64_t row_stride = 0, head_stride = 0; // in elements
    const float* at(int64_t row, int64_t head) const { return base + row * row_stride + head * head_stride; }
};

struct AttendArgs {
    float scale = 1.0f;           // of q . k
    float soft_cap = 0.0f;        // c tanh(x / c) on scaled scores; 0: none
    const float* sinks = nullptr; // [H] extra logit in the softmax denominator, or null
    int32_t window = 0;           // a row sees at most this many positions including its own; 0: all
    bool causal = true;
    int32_t heads = 0; // H of the attending layer where it borrows another layer's K/V; 0: the layer's own
};

struct Thread {
    int32_t index = 0, count = 1;
};

// How packed pages are read: none are (raw), decoded to rows first (restore), straight from their codes (fused), or
// some sides one way and some the other (partly: e.g. keys packed before RoPE beside fused values).
enum class Path : uint8_t { raw, restore, fused, partly, reference };
const char* name_of(Path p);

// The plan and bytes of one sealed page, for `inspect` and tests.
struct PageView {
    const PageLayout* layout = nullptr;
    const uint8_t* bytes = nullptr; // layout->bytes, valid until the next step or sequence operation
    int32_t rows = 0;               // filled so far
};

// A state as Cache::save gave it, and the name that its sequence shall have.
struct SavedSequence {
    SeqId seq = 0;
    std::span<const uint8_t> bytes;
};

// A kept prefix, for looking in.
struct PrefixInfo {
    int64_t rows = 0;
    uint64_t hash = 0;   // prefix_hash of its tokens
    bool in_use = false; // a sequence shares its pages, so it is not evicted
};

// Running hash (FNV-1a) of token ids: prefix_hash(b, prefix_hash(a)) is that of a followed by b.
uint64_t prefix_hash(std::span<const int32_t> tokens, uint64_t before = 0);

// What a cache weighs, from the layout objects that the kernels use (DESIGN.md, promise 3); sizes in bytes. "True bits"
// divide everything that holds the tokens by the values they stand for.
struct Footprint {
    int64_t tokens = 0;     // rows over all sequences, shared rows counted once
    int64_t values[2] = {}; // key, value: tokens x KV heads x D over all layers

    int64_t packed[2] = {}; // sealed and open pages: codes, scales, offsets, maps, padding
    int64_t raw[2] = {};    // front and recent pages, their unused rows included
    int64_t tables = 0;     // page headers, page tables, positions, layouts
    int64_t statistics = 0; // query statistics
    int64_t reserved = 0;   // taken for seals of the step under way, returned at its end
    int64_t scratch = 0;    // tiles and partial states of attention; not part of the cache's true bits
    int64_t allocated = 0;  // what the arena has handed out, measured apart from the sums above
    int64_t arena = 0;      // what the arena holds from the system: allocated plus holes

    int64_t non_finite = 0; // NaN and infinities met in K or V so far (docs/numerics.md says what became of them)
    int64_t saturated = 0;  // finite values outside the raw type's range
    int64_t ladders = 0;    // pages sealed so far whose widths were decided for them
    int64_t raised = 0;     // of these, pages that got more bits than asked for, by the method's guard

    int64_t cache_bytes() const { return packed[0] + packed[1] + raw[0] + raw[1] + tables + statistics + reserved; }
    // Bits per value; tables, statistics and reserve are shared evenly over all values.
    double true_bits() const { return bits(cache_bytes(), values[0] + values[1]); }
    double true_bits(int side) const {
        const double shared = bits(tables + statistics + reserved, values[0] + values[1]);
        return values[side] ? bits(packed[side] + raw[side], values[side]) + shared : 0.0;
    }
    double times_smaller() const {
        return cache_bytes() ? 2.0 * double(values[0] + values[1]) / double(cache_bytes()) : 0.0;
    }

private:
    static double bits(int64_t bytes, int64_t n) { return n ? 8.0 * double(bytes) / double(n) : 0.0; }
};

class Cache {
public:
    static Result<std::unique_ptr<Cache>> create(const ModelShape& shape, std::string_view spec,
                                                 const CacheOptions& options = {});
    // Bring your own method: one that methods.def does not list, or one that changes another's plans. It is refused by
    // name where its plans contradict themselves, as every method is. Saved states are bound to its spec (set_spec).
    static Result<std::unique_ptr<Cache>> create(const ModelShape& shape, std::unique_ptr<Method> method,
                                                 const CacheOptions& options = {});
    ~Cache();
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;

    const ModelShape& shape() const;
    const Method& method() const;
    Path path() const;
    Accuracy accuracy() const; // of fused pages
    const char* isa() const;   // of the kernels in use; "reference" for the reference kernels

    // ---- sequences (between steps) ----
    std::vector<SeqId> sequences() const;
    int64_t rows(SeqId seq) const;                       // 0 for an unknown sequence
    std::span<const int32_t> positions(SeqId seq) const; // [rows]
    Status fork(SeqId from, SeqId to);                   // `to` becomes equal to `from`; shares pages
    // Keeps the first `rows` rows. Down to CacheOptions::rollback rows before the newest: exactly as if the others had
    // never come. Below: a cut into a sealed page returns the kept rows of that page to raw (decoded values), to be
    // sealed again at the same edges; statistics and what was decided once stay, unless the first page goes.
    Status truncate(SeqId seq, int64_t rows);
    // Drops rows [first, last); positions of later rows stay. Rows behind the cut, and those of the page that it cuts,
    // become raw (decoded values) and are sealed again with the next step, by the plans of that step.
    Status remove_rows(SeqId seq, int64_t first, int64_t last);
    // Gives rows first .. new positions and turns their keys there. Keys packed before RoPE keep their codes; others
    // are decoded from the first page on that turns, and sealed again as above. Values are not touched. `can_shift`:
    // whether the rotation of all layers is known.
    Status reposition(SeqId seq, int64_t first, std::span<const int32_t> positions);
    Status can_shift() const;
    // `to` becomes sequence `seq` of another cache of the same model: its rows, decoded, are packed by this cache's
    // method as if they were a prompt. Query statistics carry over where both methods keep the same kind, else they
    // begin at zero. On an error nothing has changed.
    Status adopt(SeqId to, const Cache& from, SeqId seq);
    // Gives back what no sequence needs: room of raw pages, holes of the arena. Changes no row; returns bytes.
    int64_t compact();
    void remove(SeqId seq);
    void clear();

    // ---- shared beginnings (between steps) ----
    // Keeps `seq` as it is now for others that begin with the same tokens; one token id for each of its rows. Pages are
    // shared. The least recently used prefixes that no sequence uses are evicted when max_bytes is reached.
    Status keep_prefix(SeqId seq, std::span<const int32_t> tokens);
    // `seq` becomes the longest kept prefix with which `tokens` begin, to the byte what it would be had it read them.
    // Returns its rows; 0: there is none, and nothing has changed.
    int64_t take_prefix(SeqId seq, std::span<const int32_t> tokens);
    int64_t find_prefix(std::span<const int32_t> tokens) const; // rows that take_prefix would find
    int64_t drop_prefixes();                                    // those not in use; returns how many
    std::vector<PrefixInfo> prefixes() const;

    // ---- a step ----
    // Whether the rows would fit (limits), without changing anything; may refuse a little too early under max_bytes.
    Status can_append(std::span<const StepRow> rows) const;
    // Places the rows and reserves the worst case of every seal they trigger. On an error nothing has changed.
    Status begin_step(std::span<const StepRow> rows);
    // Stores K and V of the step's rows, updates statistics, seals what is due. k: [rows, G, Dk], v: [rows, G, Dv],
    // q: [rows, H, Dk], all after RoPE. Does not allocate.
    void write(int32_t layer, RowsF32 q, RowsF32 k, RowsF32 v, Thread thread = {});
    // out: [rows, H, Dv] dense. A layer that borrows K/V passes the owner as `layer` and its own q.
    void attend(int32_t layer, RowsF32 q, const AttendArgs& args, float* out, Thread thread = {});
    // Returns what the step no longer needs. Called by begin_step too, and safe to call twice.
    void end_step();
    // begin_step, then for the one layer write and attend on this thread. Tests and simple engines.
    Status append_and_attend(int32_t layer, std::span<const StepRow> rows, RowsF32 q, RowsF32 k, RowsF32 v,
                             const AttendArgs& args, float* out);

    // ---- looking in (between steps) ----
    Footprint footprint() const;
    // What it would be with only this sequence in the cache; counters of values and seals met so far stay the cache's.
    Footprint footprint(SeqId seq) const;
    int64_t packed_rows(SeqId seq, int32_t layer, Side side) const; // beyond the front
    int64_t pages(SeqId seq, int32_t layer, Side side) const;       // pages that hold packed rows
    PageView page(SeqId seq, int32_t layer, int32_t kv_head, Side side, int64_t index) const;
    // The plan of a side, with what the sequence has decided once (Method::freeze); the method's initial plan before
    // that and for an unknown sequence. Valid until the next step or sequence operation.
    const SidePlan& plan(SeqId seq, int32_t layer, int32_t kv_head, Side side) const;
    // Decodes rows [first, first + count) of a side as attend sees them: packed rows from their codes, others from
    // their raw form. out: [count][D].
    void decode(SeqId seq, int32_t layer, int32_t kv_head, Side side, int64_t first, int64_t count, float* out) const;

    // ---- state (between steps) ----
    // One sequence as bytes: model, spec, plans, positions, statistics, pages (docs/format.md). Two calls without a
    // step between give equal bytes. No checksums: kvmosaic/file.h has those. Empty for an unknown sequence.
    std::vector<uint8_t> save(SeqId seq) const;
    // Replaces `seq`. Refuses bytes of another model, spec, page size or version, or that contradict themselves, naming
    // the field; then nothing has changed.
    Status load(SeqId seq, std::span<const uint8_t> bytes);
    // All of them or none. Pages that are equal between them are held once.
    Status load(std::span<const SavedSequence> saved);

private:
    friend class device::DeviceCache; // moves sequences
    struct Impl;
    explicit Cache(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace kvmosaic
