// What plan, attend and append kernels share: plain data on the device.
//
// Rows of a sequence: [0, front) raw for good | packed | recent, raw. Packed rows lie in pages of 128 rows that count
// from `front`. Key and value sides end their packed rows at different places. A *page item* is a page that is full and
// packed on both sides. Everything else that a row sees is cut into *quarter items* of 32 rows: front, rows packed on
// one side only, open pages, recent rows. Items of one (sequence, KV head) are merged in this order: pages, quarters.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/order.h"
#include "kvmosaic/device.h"

struct float2; // of the CUDA toolkit; the plan is plain C++ and is tested without it

namespace kvmosaic::cuda {

inline constexpr int32_t kQuarter = 32;
inline constexpr int32_t kMaxWarps = 16; // of a block

using device::ElementType;
using device::PageRef;
using device::RawRows;
using device::SequenceState;

// Of one sequence, made by the plan.
struct SequencePlan {
    SequenceState state;
    int32_t pages = 0; // page items of each KV head
    int32_t items = 0; // pages and quarters
};

// What a team of warps does: a contiguous range of items.
struct alignas(16) TeamPlan {
    int32_t sequence = 0, head = 0; // of the first item
    int32_t item = 0;               // first item in its head; above 0: the head began in an earlier team
    int32_t count = 0;
    int32_t slot = 0, pages = 0, items = 0; // of the first sequence
    int32_t stable = 0;                     // leading page items that may be read before the previous kernel has ended
};

// Sums of one head that several teams of a block share.
struct MergeTask {
    enum To : uint8_t { result = 0, before = 1, after = 2 }; // the head is complete here; began before; goes on behind
    int32_t head = 0;                                        // sequence * kv_heads + KV head
    uint8_t start = 0, stop = 0;                             // teams
    uint8_t to = result;
    uint8_t stop_is_first = 0; // of team `stop` it is the first of several heads: its sums lie in global scratch
    // Of a head shared with other blocks: its place in BlockPlan::shares and in a block's part of block_partial.
    KVMOSAIC_HD int side() const { return to == before ? 0 : 1; }
};
// Blocks that share a (sequence, KV head).
struct HeadPlan {
    int32_t first_block = 0, blocks = 0;
};
struct BlockPlan {
    int32_t tasks = 0;
    int32_t before = -1, after = -1; // heads shared with other blocks
    uint32_t work = 0;               // teams that have items, a bit each
    int32_t finished = 0;            // warps that are done, counted by the block in its copy
    HeadPlan shares[2];              // of `before` and `after`
    MergeTask task[kMaxWarps + 1];
};

// Offsets in shared memory.
struct SharedPlan {
    uint32_t key_slot = 0, slot = 0, team_ring = 0; // bytes of a key slot, of a page pair, of a team's ring
    uint32_t ring = 0, q = 0, partial = 0, partial_stride = 0, ml = 0, scale = 0, barriers = 0, tiers = 0, block = 0;
    uint32_t scratch = 0, scratch_stride = 0, tables = 0; // of a warp; of the block
    uint32_t ones = 0, bytes = 0;
};

// Levels of a codebook as fp16, low bytes and high bytes apart; entry i is byte i % 4 of word i / 4.
struct BookTable {
    uint32_t low[4] = {}, high[4] = {};
};
BookTable book_table(const StoreSpec& spec); // of a store that is no codebook: zeros
// First channel of the tier of each width, at most four, in a ladder without a map.
void set_tier_first(const Ladder& ladder, const std::vector<uint8_t>& widths, uint32_t (&first)[4]);

using device::KeyMean;

struct AttendParams {
    // keys and values
    const uint8_t* key_pool = nullptr;
    const uint8_t* value_pool = nullptr;
    const PageRef* key_pages = nullptr; // [slot][kv_heads][table_stride]
    const PageRef* value_pages = nullptr;
    int32_t table_stride = 0;
    BookTable book;              // codebook keys
    uint32_t tier_first[4] = {}; // tiered keys without a map: first channel of each tier
    KeyMean mean;                // keys in planes
    int32_t value_hadamard = 0;  // values in planes: D or 0
    RawRows key_front, value_front, key_recent, value_recent;
    ElementType raw_type = ElementType::f16; // f16 or bf16
    // queries: [sequences][rows][heads][D]; out alike
    const void* q = nullptr;
    const void* q_packed = nullptr; // f16, for packed keys; null: q
    void* out = nullptr;
    float* log_sum = nullptr; // [sequences][rows][heads] natural log of the softmax denominator, or null
    ElementType q_type = ElementType::bf16, out_type = ElementType::f32;
    int32_t sequences = 0, rows = 1, heads = 0, kv_heads = 0;
    float scale_log2 = 1.0f; // softmax scale times log2(e)
    // plan
    const SequencePlan* plans = nullptr; // [sequences]
    const TeamPlan* teams = nullptr;     // [blocks * teams]
    const BlockPlan* blocks = nullptr;   // [blocks]
    // launch shape
    int32_t group = 1, group_inverse = 65537; // heads / kv_heads; 65536 / group + 1
    // warps: units of the instance (launch.h); team: units that share pages; slots: page pairs in flight of a team
    int32_t warps_per_block = 0, teams_per_block = 0, team = 1, slots = 1;
    SharedPlan shared;
    // scratch
    float* warp_partial = nullptr;  // [blocks * warps][a warp's columns][D] first part of a warp's work
    float2* warp_ml = nullptr;      // [blocks * warps][a warp's columns]
    float* block_partial = nullptr; // [blocks][2][columns][D]
    float2* block_ml = nullptr;
    int32_t* arrivals = nullptr; // [sequences * kv_heads][columns], zero between launches
};

} // namespace kvmosaic::cuda
