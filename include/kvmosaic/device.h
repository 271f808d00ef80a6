// GPU backend: attention over packed pages in device memory, encoding and appending, on raw device pointers and a
// stream. Nothing synchronizes with the host or allocates after `create`: a CUDA graph of it serves growing sequences.
//
// Rows of a sequence: [0, front) raw for good | packed | recent, raw; keys and values end their packed rows at
// different places. Packed rows lie in pages of 128 rows counted from `front`, in the GPU's order (format.md, 11).
//
// A decode step: advance (new row counts; what is due), plan (once for all layers), then for each layer append, seal
// where the store is tiered, attend. Without KVMOSAIC_CUDA `devices` is empty and the rest returns `unsupported`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvmosaic/status.h"
#include "kvmosaic/store.h"

namespace kvmosaic::device {
using Stream = void*; // a cudaStream_t

struct DeviceInfo {
    std::string name;
    int32_t major = 0, minor = 0, multiprocessors = 0; // compute capability
    int64_t memory = 0;                                // bytes
    bool runs = false;                                 // the kernels of this build run on it
};
std::vector<DeviceInfo> devices();
enum class ElementType : int32_t { f32, f16, bf16 };

inline constexpr uint32_t kPageUnit = 32; // pages start at multiples of it

// Where a page lies: units of kPageUnit bytes from the pool's base, and for tiered pages the number of granules of each
// tier, a byte each, widest first (ladder_code); of pages in planes their length in units.
struct PageRef {
    uint32_t unit = 0;
    uint32_t tiers = 0;
};

// State of a sequence; `advance` keeps it.
struct SequenceState {
    int32_t slot = 0;                         // row of page tables and raw buffers
    int32_t rows = 0;                         // of the sequence, the step's rows included
    int32_t front = 0;                        // rows kept raw at the start, at most `rows`
    int32_t key_packed = 0, value_packed = 0; // packed rows beyond the front
    int32_t stable_pages = 0; // pages complete before this step: they may be read before the previous kernel has ended
    int32_t key_before = 0;   // packed rows before this step: what lies between is due in it
    int32_t value_before = 0;
};

// Raw rows of all sequences: [slot][kv_heads][capacity][D]. Front rows at their row number; recent rows at
// (row - front) % capacity, so that a block of 128 never wraps.
struct RawRows {
    void* base = nullptr;
    int32_t capacity = 0; // a multiple of 32; of recent rows a multiple of 128
};

struct SideMemory { // one layer's keys or values
    uint8_t* pool = nullptr;
    PageRef* pages = nullptr; // [slot][kv_heads][table_stride]
    RawRows front, recent;
};
struct LayerMemory {
    SideMemory key, value;
    int32_t table_stride = 0;           // pages of a (slot, KV head) in the tables
    ElementType raw = ElementType::f16; // f16 or bf16
};

// Bytes of a page in the GPU's order, a multiple of kPageUnit.
uint32_t page_bytes(const StoreSpec& spec, Side side, int32_t dim, const Ladder& ladder = {});
// PageRef::tiers for a ladder of a store with these widths (widest first, at most four).
uint32_t ladder_code(const Ladder& ladder, const std::vector<uint8_t>& widths);

// ---- attention ----

struct AttentionShape {
    int32_t heads = 0, kv_heads = 0, dim = 0; // dim: 64, 128 or 256
    int32_t rows = 1;                         // query rows of a sequence, 1..16
    int32_t max_sequences = 1;
    StoreSpec key, value;
    std::vector<uint8_t> widths; // tiered keys: widths that pages may have
    uint32_t key_bytes = 0;      // tiered keys: largest page; 0: worst of all ladders
    Ladder ladder;               // tiered keys without a map: of all pages; queries come in its order
    bool key_basis = false;      // calls bring q_packed
    int32_t value_hadamard = 0;  // fitted values: dim where they were packed behind a Hadamard transform, or 0
    int64_t expected_rows = 0;   // of all sequences together, for the choice of launch shape; 0: many
    int32_t warps = 0, slots = 0, blocks_per_multiprocessor = 0; // for measurements; 0: chosen
    bool early = true; // may start before the kernel before it has ended (see SequenceState::stable_pages)
};

// What keys of KeySpace::centred were packed without, and what products with it need; made by DeviceCache.
struct KeyMean {
    const uint32_t* mean = nullptr; // device, [cache slots * kv_heads][slots] pairs of f16; null: packed as they are
    const void *features = nullptr, *slow = nullptr, *turns = nullptr, *near = nullptr, *channels = nullptr; // device
    int32_t fast_steps = 0, slow_steps = 0, slots = 0;
};

struct AttendCall {
    LayerMemory memory;
    KeyMean mean;            // searched keys
    const void* q = nullptr; // [sequences][rows][heads][D]; aligned to 8 bytes, as q_packed
    void* out = nullptr;     // alike
    ElementType q_type = ElementType::bf16, out_type = ElementType::bf16; // q: f16 or bf16
    // f16, alike: q for packed keys whose basis is not that of the raw ones (to_key_basis); with key_basis alone.
    const void* q_packed = nullptr;
    float* log_sum = nullptr; // [sequences][rows][heads] log of the softmax denominator, or null
    float scale = 1.0f;
};

class Attention {
public:
    // Chooses the kernel and allocates plan and scratch on the current device.
    static Result<std::unique_ptr<Attention>> create(const AttentionShape& shape);
    ~Attention();
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;
    const std::string& kernel() const; // name of the fused kernel
    int64_t scratch_bytes() const;     // allocated on the device

    // Who reads what; once a step. states: device, [sequences].
    Status plan(const SequenceState* states, int32_t sequences, Stream stream);
    // One layer. The plan's kernel lies at least two kernels back, or does not start its successor early.
    Status attend(const AttendCall& call, Stream stream);

private:
    struct Impl;
    explicit Attention(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

// The basis in which keys are packed: a Hadamard transform of runs of channels, a factor for each, an order.
struct KeyBasis {
    int32_t hadamard = 0;          // channels of a run, a power of two; 0: none
    const float* factor = nullptr; // device, [slots * kv_heads][D] for the queries (what keys were divided by), or null
    const uint16_t* order = nullptr; // device, likewise: channel at each stored place, or null
    bool any() const { return hadamard > 0 || factor || order; }
};
struct BasisCall {
    KeyBasis basis;
    const SequenceState* states = nullptr;                             // [sequences]
    int32_t sequences = 0, rows = 1, heads = 0, kv_heads = 0, dim = 0; // dim: 64, 128 or 256
    const void* q = nullptr;                                           // [sequences][rows][heads][D], f16 or bf16
    ElementType type = ElementType::bf16;
    void* out = nullptr; // alike, f16: AttendCall::q_packed
};
// Queries in the basis of packed keys: fold of transform.h, then rounded to f16.
Status to_key_basis(const BasisCall& call, Stream stream);
std::vector<std::string> attention_kernels(); // fused ones of this build

// ---- encoding and restoring ----

// 128 raw rows of one KV head that become a page.
struct EncodeJob {
    int64_t row = 0;   // of the first row, in elements from `rows`; a multiple of 8
    uint32_t unit = 0; // where the page goes; of planned keys chosen by the kernel where `pool_used` is given
    int32_t head = 0;  // row of EncodeCall::order; of planned pages that of query_sum, mean and table
    int32_t page = 0;  // of the head, planned
};
struct EncodeCall {
    const void* rows = nullptr; // finite; aligned to 16 bytes
    int64_t row_stride = 0;     // elements, a multiple of 8
    ElementType type = ElementType::f16;
    const EncodeJob* jobs = nullptr; // device, [count]
    int32_t count = 0;
    uint8_t* pool = nullptr;
    const uint16_t* order = nullptr; // tiers: device, [heads][D], channel at each ladder position; null: rows lie so
};
// Grids with groups along the lanes, asymmetric; along the depth, asymmetric, symmetric, hybrid or a codebook with the
// norm; keys in the tiers of a ladder, asymmetric or midpoint, without a map. Codes, scales, offsets are the CPU's.
Status encode(const StoreSpec& spec, Side side, int32_t dim, const EncodeCall& call, Stream stream,
              const Ladder& ladder = {});

// Pages whose plan is made on the device.
struct PlannedCall {
    EncodeCall pages;
    const float* query_sum = nullptr;         // keys: [heads][D]; null: every channel counts the same
    const int32_t* query_count = nullptr;     // [heads]
    float raw_above = 0.0f, mid_above = 0.0f; // encode_mix: scores
    KeyMean mean;                             // encode_planes, keys: taken off; so are the next two
    int32_t vectors = 0;                      // of 32 bytes, that a ladder gets: k D / 32
    double guard = 0.0;       // estimated variance of a score above which it gets more, up to the store's `vectors`
    bool hadamard = false;    // encode_planes, values: rotated first
    PageRef* table = nullptr; // [heads][table_stride]
    int32_t table_stride = 0;
    uint32_t *pool_used = nullptr, pool_units = 0; // units; used grows on the device
    uint32_t* exhausted = nullptr;                 // becomes 1 when a page found no room; that page is not written
};
// Keys in tiers of 16, 4 and 2 bits, D = 128: the score of a channel is the mean of |q| times its step at 2 bits.
Status encode_mix(const PlannedCall& call, Stream stream);
// Pages in planes, D = 64 or 128: searched keys, query_sum of q^2; fitted values of 2, 3 or 4 bits, at their jobs'
// places.
Status encode_planes(const StoreSpec& spec, Side side, int32_t dim, const PlannedCall& call, Stream stream);

struct RestoreJob {
    int64_t row = 0;    // where the page's first row goes, in elements from `rows`
    uint32_t unit = 0;  // of the page
    uint32_t tiers = 0; // PageRef::tiers, where the ladder is not given
};
struct RestoreCall {
    const uint8_t* pool = nullptr;
    const RestoreJob* jobs = nullptr; // device, [count]
    int32_t count = 0;
    void* rows = nullptr;
    int64_t row_stride = 0; // elements
    ElementType type = ElementType::bf16;
    std::vector<uint8_t> widths; // tiered pages with a map whose ladders differ: as in AttentionShape
};
// Pages of any store but raw ones and planes to rows of 128 tokens, channels in model order (without a map: in ladder
// order): the values of the CPU's decoder, rounded to `type`. ladder: of tiered pages, unless `widths` says theirs.
Status restore(const StoreSpec& spec, Side side, int32_t dim, const RestoreCall& call, Stream stream,
               const Ladder& ladder = {});

// ---- steps ----

// Which rows stay raw, of one side: the fields and rules of Window (method.h).
struct RowWindow {
    int32_t front = 0, keep = 0, flush = 0, first = 0;
};
// Adds `new_rows` to every sequence and sets what is due under the windows.
Status advance(SequenceState* states, int32_t sequences, int32_t new_rows, const RowWindow& key, const RowWindow& value,
               Stream stream);

struct AppendCall {
    LayerMemory memory;
    const SequenceState* states = nullptr; // after advance
    int32_t sequences = 0, new_rows = 1, kv_heads = 0, dim = 0;
    const void* k = nullptr; // [sequences][new_rows][kv_heads][D], f16 or bf16
    const void* v = nullptr;
    ElementType type = ElementType::bf16;
    StoreSpec key, value; // grids as `encode` takes them; tiers and pages in planes, which other calls pack (flush 128)
};
// Stores the new rows raw and packs what is due on both sides; key.flush is 128 or 0. Pages are those of the tables.
// Values of earlier rows are packed while the kernel before may still run, which therefore must not read this layer.
Status append(const AppendCall& call, Stream stream);

struct QueryCall {
    const SequenceState* states = nullptr; // after advance
    int32_t sequences = 0, new_rows = 1, heads = 0, kv_heads = 0, dim = 0;
    const void* q = nullptr;                                      // [sequences][new_rows][heads][D], f16 or bf16
    ElementType type = ElementType::bf16, raw = ElementType::f16; // raw: what q is rounded to, as the raw rows are
    float* sums = nullptr;                                        // [slots * kv_heads][D] of |q|, or of q^2
    int32_t* counts = nullptr;                                    // [slots * kv_heads]
    bool squares = false;
};
// Adds the new rows' queries to the statistics, in the CPU's order (row, then head): equal to the bit. Before the pages
// are sealed that these rows complete.
Status add_queries(const QueryCall& call, Stream stream);

} // namespace kvmosaic::device
