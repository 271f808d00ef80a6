// Streaming appends (D1, D5, D6) and states past a window (E11), for every method. d_append_test.cc looks closer at
// some.
#include "property/lifecycle.h"

namespace kvmosaic::test {
namespace {

// D1: what decode steps packed went through codes, and weighs what the layout says.
TEST(BugCaseD1, PackedRowsOfEveryMethodAreCoded) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 420, 1);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec);
        feed_split(*cache, text, 420, {32, 1});
        for (const Side side : {Side::key, Side::value}) {
            const SidePlan& plan = cache->plan(0, 0, 0, side);
            const int64_t packed = cache->packed_rows(0, 0, side);
            if (plan.window.flush == 0) {
                EXPECT_EQ(packed, 0) << spec;
                continue;
            }
            ASSERT_GE(packed, 128) << spec;
            const Tensor& want = side == Side::key ? text.k : text.v;
            std::vector<float> got(420 * 64);
            cache->decode(0, 0, 0, side, 0, 420, got.data());
            int64_t exact = 0;
            for (int64_t t = plan.window.front; t < plan.window.front + packed; ++t)
                exact += std::memcmp(got.data() + t * 64, want.at(t, 0), 64 * sizeof(float)) == 0;
            EXPECT_EQ(exact, 0) << spec << ", " << name_of(side);
            int64_t bytes = 0;
            for (int64_t p = 0; p < cache->pages(0, 0, side); ++p)
                bytes += cache->page(0, 0, 0, side, p).layout->bytes;
            EXPECT_EQ(cache->footprint().packed[int(side)], bytes) << spec;
        }
    }
}

// D5: as long as nothing is due, every method is the raw cache of its raw type, bit for bit; with one row more it is
// not.
TEST(BugCaseD5, NothingIsPackedBeforeItIsDue) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 600, 2);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec);
        int64_t due = 600;
        for (const Side side : {Side::key, Side::value}) {
            const Window w = cache->method().initial(side, 0, 0, 64).window;
            if (w.flush) due = std::min<int64_t>(due, w.front + std::max(w.first, w.keep + w.flush));
        }
        if (due == 600) continue;
        auto raw = make(shape, name_of(cache->method().initial(Side::key, 0, 0, 64).raw));
        if (due > 1) {
            feed(*cache, text, 0, due - 1);
            feed(*raw, text, 0, due - 1);
        }
        std::vector<float> a(size_t(due) * 64), b(a.size());
        for (const Side side : {Side::key, Side::value}) {
            cache->decode(0, 0, 1, side, 0, due - 1, a.data());
            raw->decode(0, 0, 1, side, 0, due - 1, b.data());
            EXPECT_EQ(0, std::memcmp(a.data(), b.data(), size_t(due - 1) * 64 * sizeof(float))) << spec;
            EXPECT_EQ(cache->packed_rows(0, 0, side), 0) << spec;
        }
        feed(*cache, text, due - 1, 1);
        EXPECT_GT(cache->packed_rows(0, 0, Side::key) + cache->packed_rows(0, 0, Side::value), 0) << spec;
    }
}

// D6: packing begins inside the prompt; bulk and single rows honour it, and no more than is asked stays raw.
TEST(BugCaseD6, ThresholdInsideThePromptForEveryMethod) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 900, 3);
    int tried = 0;
    for (const MethodInfo* info : methods()) {
        const bool keeps = std::any_of(info->options.begin(), info->options.end(),
                                       [](const OptionInfo& o) { return o.name == std::string("keep"); });
        if (!keeps) continue;
        ++tried;
        const std::string spec = info->name + ":keep=500";
        auto bulk = make(shape, spec), single = make(shape, spec);
        feed(*bulk, text, 0, 900);
        feed_split(*single, text, 900, {400, 1});
        EXPECT_TRUE(bulk->save(0) == single->save(0)) << spec;
        for (const Side side : {Side::key, Side::value}) {
            const Window w = bulk->method().initial(side, 0, 0, 64).window;
            if (w.flush == 0) continue;
            EXPECT_GE(w.keep, 500 - 128) << spec;
            EXPECT_EQ(bulk->packed_rows(0, 0, side), w.packed_after(0, 900 - w.front)) << spec;
            EXPECT_GT(bulk->packed_rows(0, 0, side), 0) << spec;
        }
    }
    EXPECT_GT(tried, 8);
}

// E11: a window of 128 that the text has outgrown; saved, restored elsewhere, 16 rows more: the same bits.
TEST(BugCaseE11, SavedPastTheWindow) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 620, 4);
    AttendArgs args;
    args.window = 128;
    for (const std::string& spec : lifecycle_specs())
        for (const int64_t rows : {127, 128, 129, 200, 600}) {
            auto cache = make(shape, spec), other = make(shape, spec);
            feed(*cache, text, 0, rows, 0, args);
            feed(*other, text, 0, 70, 3);
            ASSERT_TRUE(other->load(3, cache->save(0)).ok()) << spec;
            for (int64_t t = rows; t < rows + 16; ++t)
                ASSERT_TRUE(feed(*cache, text, t, 1, 0, args) == feed(*other, text, t, 1, 3, args)) << spec;
            EXPECT_TRUE(cache->save(0) == other->save(3)) << spec;
        }
}

} // namespace
} // namespace kvmosaic::test
