// The plan of attention, on the CPU: every item has one team, and the merge adds every part of a head exactly once.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "kernels/cuda/plan.h"
#include "unit/codec_util.h"

namespace kvmosaic::testing {
namespace {

using namespace cuda; // NOLINT: the functions under test

struct Plan {
    std::vector<SequencePlan> plans;
    std::vector<int32_t> prefix = {0};
    Plan(const std::vector<SequenceState>& states, int32_t rows) {
        for (const SequenceState& s : states) {
            plans.push_back(plan_sequence(s, rows));
            prefix.push_back(prefix.back() + plans.back().items);
        }
    }
};

void check(const std::vector<SequenceState>& states, int32_t kv_heads, int32_t blocks, int32_t teams) {
    const Plan plan(states, 1);
    const int32_t n = int32_t(states.size());
    const int64_t total = int64_t(plan.prefix.back()) * kv_heads;
    std::set<std::pair<int32_t, int32_t>> seen;      // {head, item}
    std::map<int32_t, std::set<int32_t>> arriving;   // blocks that share a head
    std::map<int32_t, std::vector<HeadPlan>> shares; // what those blocks say of it
    std::set<int32_t> complete;                      // heads finished inside a team or a block
    for (int32_t b = 0; b < blocks; ++b) {
        const Range range = block_range(total, blocks, b);
        const BlockPlan block = plan_block(plan.prefix.data(), n, kv_heads, blocks, teams, b);
        std::map<int32_t, std::set<int32_t>> parts; // of heads that no single team has: teams
        for (int32_t t = 0; t < teams; ++t) {
            const TeamPlan team =
                plan_team(plan.plans.data(), plan.prefix.data(), n, kv_heads, team_range(range, teams, t));
            ASSERT_EQ(team.count > 0, (block.work >> t & 1u) != 0);
            int32_t sequence = team.sequence, head = team.head, item = team.item;
            for (int32_t i = 0; i < team.count; ++i) {
                const int32_t id = sequence * kv_heads + head, items = plan.plans[size_t(sequence)].items;
                ASSERT_TRUE(seen.insert({id, item}).second);
                const int32_t first = i == 0 ? team.item : 0, last = first + team.count - i;
                if (item == first && first == 0 && last >= items)
                    complete.insert(id);
                else if (!complete.count(id))
                    parts[id].insert(t);
                if (++item == items) {
                    item = 0;
                    if (++head == kv_heads) head = 0, ++sequence;
                }
            }
        }
        ASSERT_EQ(parts.size(), size_t(block.tasks));
        for (int32_t k = 0; k < block.tasks; ++k) {
            const MergeTask& task = block.task[k];
            ASSERT_TRUE(parts.count(task.head));
            EXPECT_EQ(*parts[task.head].begin(), task.start);
            EXPECT_EQ(*parts[task.head].rbegin(), task.stop);
            if (task.to == MergeTask::result)
                EXPECT_TRUE(complete.insert(task.head).second);
            else
                arriving[task.head].insert(b), shares[task.head].push_back(block.shares[task.side()]);
        }
    }
    EXPECT_EQ(int64_t(seen.size()), total);
    for (int32_t id = 0; id < n * kv_heads; ++id) {
        EXPECT_NE(complete.count(id), arriving.count(id)) << "head " << id;
        if (!arriving.count(id)) continue;
        for (const HeadPlan& head : shares[id]) {
            EXPECT_EQ(head.first_block, *arriving[id].begin());
            EXPECT_EQ(size_t(head.blocks), arriving[id].size());
        }
    }
}

TEST(CudaPlan, EveryItemOnceAndEveryPartMerged) {
    Random random(3);
    for (int round = 0; round < 200; ++round) {
        std::vector<SequenceState> states(size_t(1 + random.below(9)));
        for (SequenceState& s : states) {
            s.rows = random.below(4) == 0 ? random.below(3) : random.below(6000);
            s.front = std::min(s.rows, random.below(2) * 4);
            s.key_packed = std::max(0, s.rows - s.front - random.below(200)) / 128 * 128;
            s.value_packed = std::max(0, s.rows - s.front - random.below(200));
        }
        check(states, 1 + random.below(8), 1 + random.below(140), 1 + random.below(12));
    }
}

TEST(CudaPlan, QuartersCoverWhatIsNoPage) {
    SequenceState s;
    s.rows = 4 + 300, s.front = 4, s.key_packed = 256, s.value_packed = 172;
    const SequencePlan plan = plan_sequence(s, 1);
    EXPECT_EQ(1, plan.pages);
    // Front 1; both packed 128..172: 2 quarters; keys packed 172..256: 3; raw 256..300: 2.
    EXPECT_EQ(1 + 1 + 2 + 3 + 2, plan.items);
    EXPECT_EQ(1, plan_sequence(SequenceState{}, 1).items);
    // 16 query rows: the first does not see the last page whole.
    s.key_packed = s.value_packed = 256, s.rows = 4 + 256;
    EXPECT_EQ(2, plan_sequence(s, 1).pages);
    EXPECT_EQ(1, plan_sequence(s, 16).pages);
}

} // namespace
} // namespace kvmosaic::testing
