// What a sequence decides once, and the way from a page's basis back to rows of the model.
#include "cache/basis.h"

#include "kvmosaic/transform.h"
#include "rig.h"

namespace kvmosaic::test {
namespace {

// Turning by page start times difference equals turning by the position, for near, far and missing positions.
TEST(TurnTable, EqualsTheRotationOfEachPosition) {
    for (const bool halves : {true, false})
        for (const int32_t rotary : {64, 48}) {
            Rope rope;
            rope.known = true;
            rope.halves = halves;
            rope.rotary = rotary;
            rope.base = 1e6f;
            const TurnTable table(rope);
            const std::vector<int32_t> positions = {100000, 100001, 100064, 100127, 100128, 104000};
            std::vector<float> rows(positions.size() * 64), want, back;
            std::mt19937 rng(3);
            std::normal_distribution<float> n;
            for (float& x : rows)
                x = n(rng);
            want = back = rows;
            table.turn(rows.data(), int32_t(positions.size()), 64, positions.data(), positions[0], 1);
            for (size_t i = 0; i < positions.size(); ++i)
                rope.turn(want.data() + i * 64, positions[i]);
            for (size_t i = 0; i < rows.size(); ++i)
                EXPECT_NEAR(rows[i], want[i], 2e-6) << i;
            for (size_t i = 0; i < positions.size(); ++i) // channels beyond the rotary part stay
                for (size_t d = size_t(rotary); d < 64; ++d)
                    EXPECT_EQ(rows[i * 64 + d], back[i * 64 + d]);
            table.turn(rows.data(), int32_t(positions.size()), 64, positions.data(), positions[0], -1);
            for (size_t i = 0; i < rows.size(); ++i)
                EXPECT_NEAR(rows[i], back[i], 1e-6) << i;
        }
}

// The decision rests on the first front + 128 rows and the queries of exactly those, whatever comes in the same step.
TEST(FrozenPlan, RestsOnTheFirstRowsOnly) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 700, 1);
    for (const std::string spec : {"pnmix", "innerq", "pnmix:front=0,r=0.25"}) {
        auto once = make(shape, spec), pieces = make(shape, spec), other = make(shape, spec);
        const int32_t front = once->method().initial(Side::key, 0, 0, 64).window.front;
        feed(*once, text, 0, 700);
        feed_split(*pieces, text, 700, {front + 127, 1, 5});
        Text changed = text;
        for (int64_t t = front + 128; t < 700; ++t)
            for (int32_t d = 0; d < 64; ++d)
                changed.k.at(t, 1)[d] *= 3.0f, changed.q.at(t, 3)[d] *= float(d);
        feed(*other, changed, 0, 700);
        for (int32_t head = 0; head < 2; ++head) {
            const SidePlan& a = once->plan(0, 0, head, Side::key);
            for (const Cache* cache : {pieces.get(), other.get()}) {
                const SidePlan& b = cache->plan(0, 0, head, Side::key);
                EXPECT_EQ(a.transform.order, b.transform.order) << spec;
                EXPECT_EQ(a.transform.scale, b.transform.scale) << spec;
                EXPECT_EQ(a.ladder, b.ladder) << spec;
            }
            EXPECT_FALSE(a.transform.identity()) << spec;
        }
    }
}

// Nothing is packed, and nothing decided, before the rows are there; then everything that is due at once.
TEST(FrozenPlan, FirstFlushWaits) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 400, 2);
    auto cache = make(shape, "innerq"); // key window 32/96/1, waits for 128 rows beyond the front
    feed_split(*cache, text, 159, {1});
    EXPECT_EQ(cache->packed_rows(0, 0, Side::key), 0);
    EXPECT_TRUE(cache->plan(0, 0, 0, Side::key).transform.identity());
    feed(*cache, text, 159, 1);
    EXPECT_EQ(cache->packed_rows(0, 0, Side::key), 32);
    EXPECT_EQ(cache->packed_rows(0, 0, Side::value), 32);
    feed(*cache, text, 160, 1);
    EXPECT_EQ(cache->packed_rows(0, 0, Side::key), 33);
    EXPECT_EQ(cache->packed_rows(0, 0, Side::value), 32);
    // The norms by hand.
    const SidePlan& plan = cache->plan(0, 0, 0, Side::key);
    for (int32_t d = 0; d < 64; ++d) {
        float most = 0;
        for (int64_t t = 32; t < 160; ++t)
            most = std::max(most, std::fabs(f16_to_f32(f32_to_f16(text.k.at(t, 0)[d]))));
        EXPECT_EQ(plan.transform.scale[size_t(d)], std::sqrt(most)) << d;
    }
}

// A fork shares the decision; truncation keeps it until the first page goes; then a new text decides anew.
TEST(FrozenPlan, LivesWithTheFirstPage) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 600, 3), next(shape.layers[0], 600, 4);
    for (const std::string spec : {"pnmix", "innerq"}) {
        auto cache = make(shape, spec);
        feed(*cache, text, 0, 400);
        const Transform before = cache->plan(0, 0, 0, Side::key).transform;
        ASSERT_TRUE(cache->fork(0, 1).ok());
        feed(*cache, text, 400, 50, 1);
        EXPECT_EQ(cache->plan(1, 0, 0, Side::key).transform.order, before.order);
        ASSERT_TRUE(cache->truncate(0, 100).ok()); // inside the first page
        feed(*cache, next, 100, 300);
        EXPECT_EQ(cache->plan(0, 0, 0, Side::key).transform.order, before.order);
        EXPECT_EQ(cache->plan(0, 0, 0, Side::key).transform.scale, before.scale);
        ASSERT_TRUE(cache->truncate(0, 10).ok()); // inside the front
        EXPECT_TRUE(cache->plan(0, 0, 0, Side::key).transform.identity());
        auto fresh = make(shape, spec);
        feed(*cache, next, 10, 400);
        Text joined = next;
        std::copy_n(text.k.x.data(), 10 * 64, joined.k.x.data());
        std::copy_n(text.q.x.data(), 10 * 2 * 64, joined.q.x.data());
        feed(*fresh, joined, 0, 410);
        // Query statistics of the ten rows that stayed were dropped with the first page, so only the key-made part of
        // the decision is compared.
        EXPECT_EQ(cache->plan(0, 0, 0, Side::key).transform.scale, fresh->plan(0, 0, 0, Side::key).transform.scale);
    }
}

// A step that was placed and never written leaves a cache that is whole, and truncating its rows undoes it.
TEST(FrozenPlan, AGivenUpStepIsUndone) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 600, 5);
    const SeqId seq = 0;
    for (const std::string spec : {"pnmix", "innerq", "kitty", "turboquant:skip=0"}) {
        auto cache = make(shape, spec), good = make(shape, spec);
        feed(*cache, text, 0, 100);
        std::vector<StepRow> rows;
        for (int32_t t = 100; t < 300; ++t)
            rows.push_back({t, {&seq, 1}});
        ASSERT_TRUE(cache->begin_step(rows).ok());
        cache->end_step(); // nobody wrote
        std::vector<float> x(300 * 64);
        cache->decode(0, 0, 0, Side::key, 0, 100, x.data());
        ASSERT_TRUE(cache->truncate(0, 100).ok());
        feed(*cache, text, 100, 300);
        feed(*good, text, 0, 400);
        if (spec == "pnmix" || spec == "innerq" || spec == "kitty") { // nothing of the first 100 rows was packed
            EXPECT_TRUE(cache->save(0) == good->save(0)) << spec;
        }
    }
}

} // namespace
} // namespace kvmosaic::test
