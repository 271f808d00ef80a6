// Who reads which items. One block computes it on the device from the sequences' states, once per step for all layers,
// so that a captured graph stays valid while sequences grow.
//
// Items (pages and quarters of all sequences and KV heads, in this order) are split evenly: first over blocks, then
// over the teams of a block, so that every block up to the number of items has work.
#pragma once

#include "kernels/cuda/attend.h"

namespace kvmosaic::cuda {

struct PlanParams {
    const SequenceState* states = nullptr; // [sequences]
    SequencePlan* plans = nullptr;         // [sequences]
    TeamPlan* teams_plan = nullptr;        // [blocks * teams]
    BlockPlan* blocks_plan = nullptr;      // [blocks]
    int32_t* prefix = nullptr;             // [sequences + 1] items of one KV head of the sequences before
    int32_t sequences = 0, kv_heads = 0, rows = 1, blocks = 0, teams = 0;
};

// Number of quarters behind `pages` page items.
KVMOSAIC_HD inline int quarter_count(const SequenceState& s, int pages) {
    const int end = s.rows > s.front ? s.rows - s.front : 0;
    const int packed_low = s.key_packed < s.value_packed ? s.key_packed : s.value_packed;
    const int packed_high = s.key_packed < s.value_packed ? s.value_packed : s.key_packed;
    int count = (s.front + kQuarter - 1) / kQuarter, low = pages * kPageTokens;
    for (int part = 0; part < 3; ++part) {
        int high = part == 0 ? packed_low : part == 1 ? packed_high : end;
        high = high < end ? high : end;
        if (high > low) count += (high + kQuarter - 1) / kQuarter - low / kQuarter, low = high;
    }
    return count;
}

KVMOSAIC_HD inline SequencePlan plan_sequence(const SequenceState& state, int32_t query_rows) {
    SequencePlan plan;
    plan.state = state;
    // Pages that every query row of the step sees whole.
    int32_t seen = state.rows - (query_rows - 1) - state.front;
    seen = seen < state.key_packed ? seen : state.key_packed;
    seen = seen < state.value_packed ? seen : state.value_packed;
    plan.pages = seen > 0 ? seen / kPageTokens : 0;
    const int32_t all = plan.pages + quarter_count(state, plan.pages);
    plan.items = all > 1 ? all : 1; // a sequence without rows has one empty item, which writes the result 0
    return plan;
}

struct ItemPlace {
    int32_t sequence = 0, head = 0, item = 0;
};

// prefix: [sequences + 1] items of one KV head of the sequences before.
KVMOSAIC_HD inline ItemPlace place_item(const int32_t* prefix, int32_t sequences, int32_t kv_heads, int64_t ordinal) {
    int32_t low = 0, high = sequences; // last sequence whose first item is not behind
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (int64_t(prefix[middle]) * kv_heads <= ordinal)
            low = middle;
        else
            high = middle;
    }
    const int32_t items = prefix[low + 1] - prefix[low];
    const int64_t rest = ordinal - int64_t(prefix[low]) * kv_heads;
    return {low, int32_t(rest / items), int32_t(rest % items)};
}

// Range of ordinals of a block: blocks beyond the number of items get none.
struct Range {
    int64_t low = 0, high = 0;
};
KVMOSAIC_HD inline Range block_range(int64_t total, int32_t blocks, int32_t block) {
    const int64_t used = total < blocks ? total : blocks;
    if (block >= used) return {total, total};
    return {block * total / used, (block + 1) * total / used};
}
KVMOSAIC_HD inline Range team_range(const Range& block, int32_t teams, int32_t team) {
    const int64_t count = block.high - block.low;
    return {block.low + team * count / teams, block.low + (team + 1) * count / teams};
}

KVMOSAIC_HD inline TeamPlan plan_team(const SequencePlan* plans, const int32_t* prefix, int32_t sequences,
                                      int32_t kv_heads, const Range& range) {
    TeamPlan plan;
    plan.count = int32_t(range.high - range.low);
    if (plan.count == 0) return plan;
    const ItemPlace at = place_item(prefix, sequences, kv_heads, range.low);
    const SequencePlan& sequence = plans[at.sequence];
    plan.sequence = at.sequence, plan.head = at.head, plan.item = at.item;
    plan.slot = sequence.state.slot, plan.pages = sequence.pages, plan.items = sequence.items;
    // Within the first head only; what follows waits for the previous kernel.
    int32_t stable = sequence.state.stable_pages < sequence.pages ? sequence.state.stable_pages : sequence.pages;
    stable = stable - at.item < plan.count ? stable - at.item : plan.count;
    plan.stable = stable > 0 ? stable : 0;
    return plan;
}

KVMOSAIC_HD inline HeadPlan plan_head(const int32_t* prefix, int32_t sequences, int32_t kv_heads, int32_t blocks,
                                      int32_t head) {
    const int64_t total = int64_t(prefix[sequences]) * kv_heads;
    const int64_t used = total < blocks ? total : blocks;
    const int32_t sequence = head / kv_heads, items = prefix[sequence + 1] - prefix[sequence];
    const int64_t first = int64_t(prefix[sequence]) * kv_heads + int64_t(head % kv_heads) * items;
    const auto block_of = [&](int64_t ordinal) { return int32_t(((ordinal + 1) * used - 1) / total); };
    const int32_t from = block_of(first);
    return {from, block_of(first + items - 1) - from + 1};
}

// Heads that more than one team of the block, or other blocks, have part of.
KVMOSAIC_HD inline BlockPlan plan_block(const int32_t* prefix, int32_t sequences, int32_t kv_heads, int32_t blocks,
                                        int32_t teams, int32_t block) {
    BlockPlan plan;
    const int64_t total = int64_t(prefix[sequences]) * kv_heads;
    const Range range = block_range(total, blocks, block);
    if (range.high == range.low) return plan;
    MergeTask open;
    bool is_open = false;
    for (int32_t t = 0; t < teams; ++t) {
        const Range mine = team_range(range, teams, t);
        if (mine.high == mine.low) continue;
        plan.work |= 1u << t;
        const ItemPlace first = place_item(prefix, sequences, kv_heads, mine.low);
        const ItemPlace last = place_item(prefix, sequences, kv_heads, mine.high - 1);
        const int32_t first_head = first.sequence * kv_heads + first.head;
        const int32_t last_head = last.sequence * kv_heads + last.head;
        const int32_t last_items = prefix[last.sequence + 1] - prefix[last.sequence];
        const bool goes_on = last.item + 1 < last_items;
        if (first.item > 0 && !is_open) { // from an earlier block
            open = MergeTask{first_head, uint8_t(t), uint8_t(t), MergeTask::before, 0};
            plan.before = first_head;
            is_open = true;
        }
        if (is_open) {
            open.stop = uint8_t(t);
            if (first_head != last_head || !goes_on) { // ends in this team
                open.stop_is_first = first_head != last_head;
                plan.task[plan.tasks++] = open;
                is_open = false;
                if (first_head == last_head) continue;
            }
        }
        if (!is_open && goes_on) {
            open = MergeTask{last_head, uint8_t(t), uint8_t(t), MergeTask::result, 0};
            is_open = true;
        }
    }
    if (is_open) {
        if (open.to == MergeTask::result) open.to = MergeTask::after, plan.after = open.head;
        plan.task[plan.tasks++] = open;
    }
    if (plan.before >= 0) plan.shares[0] = plan_head(prefix, sequences, kv_heads, blocks, plan.before);
    if (plan.after >= 0) plan.shares[1] = plan_head(prefix, sequences, kv_heads, blocks, plan.after);
    return plan;
}

} // namespace kvmosaic::cuda
