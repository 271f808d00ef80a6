// Blocks never overlap, keep their contents, come back joined, and are counted to the block.
#include "core/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace kvmosaic {
namespace {

struct Block {
    uint8_t* at;
    size_t bytes;
    uint8_t mark;
};

TEST(Arena, RandomBlocksKeepTheirContents) {
    for (const bool poison : {false, true}) {
        Arena arena(0, poison);
        std::mt19937 rng(7);
        std::vector<Block> blocks;
        int64_t live = 0;
        for (int step = 0; step < 20000; ++step) {
            if (blocks.empty() || rng() % 100 < (step < 12000 ? 55 : 45)) {
                const size_t bytes = 1 + rng() % (rng() % 50 == 0 ? 6u << 20 : 20000u);
                auto* p = static_cast<uint8_t*>(arena.allocate(bytes));
                ASSERT_NE(p, nullptr);
                ASSERT_EQ(reinterpret_cast<uintptr_t>(p) % Arena::kBlock, 0u);
                blocks.push_back({p, bytes, uint8_t(rng())});
                std::memset(p, blocks.back().mark, std::min<size_t>(bytes, 64));
                p[bytes - 1] = blocks.back().mark;
                live += int64_t(Arena::rounded(bytes));
            } else {
                std::swap(blocks[rng() % blocks.size()], blocks.back());
                const Block b = blocks.back();
                blocks.pop_back();
                ASSERT_EQ(b.at[0], b.mark);
                ASSERT_EQ(b.at[b.bytes - 1], b.mark);
                arena.release(b.at, b.bytes);
                live -= int64_t(Arena::rounded(b.bytes));
            }
            ASSERT_EQ(arena.live(), live);
            ASSERT_GE(arena.held(), arena.live());
            if (step % 500 == 0) arena.trim(); // holes lose their contents, blocks do not
        }
        for (const Block& b : blocks) {
            ASSERT_EQ(b.at[0], b.mark);
            arena.release(b.at, b.bytes);
        }
        EXPECT_EQ(arena.live(), 0);
        EXPECT_LE(arena.held(), int64_t(8) << 20); // holes joined, slabs went back
    }
}

TEST(Arena, LimitIsExactAndRefusalChangesNothing) {
    Arena arena(64 * 100, false);
    void* a = arena.allocate(64 * 60);
    ASSERT_NE(a, nullptr);
    EXPECT_EQ(arena.allocate(64 * 41), nullptr);
    EXPECT_EQ(arena.live(), 64 * 60);
    void* b = arena.allocate(64 * 40);
    EXPECT_NE(b, nullptr);
    EXPECT_EQ(arena.allocate(1), nullptr);
    arena.release(a, 64 * 60);
    arena.release(b, 64 * 40);
    EXPECT_EQ(arena.live(), 0);
}

} // namespace
} // namespace kvmosaic
