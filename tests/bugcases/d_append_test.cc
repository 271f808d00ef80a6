// Failures of streaming appends in other engines: groups of one token, tails that never drain, limits off by one.
#include "rig.h"

namespace kvmosaic::test {
namespace {

// D1: decode steps flush whole groups: packed rows have an error, and the bytes match the claim.
TEST(BugCaseD1, NoGroupsOfOneToken) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 200, 1);
    auto cache = make(shape, "kivi:bits=2,group=32,residual=32");
    feed(*cache, text, 0, 32);
    for (int64_t t = 32; t < 200; ++t)
        feed(*cache, text, t, 1);
    const int64_t packed = cache->packed_rows(0, 0, Side::key);
    EXPECT_EQ(packed, 192);
    std::vector<float> k(200 * 64);
    cache->decode(0, 0, 0, Side::key, 0, 200, k.data());
    for (int64_t g = 0; g < packed; g += 32) {
        double err = 0;
        for (int64_t t = g; t < g + 32; ++t)
            for (int32_t d = 0; d < 64; ++d)
                err += std::fabs(double(k[size_t(t * 64 + d)]) - double(text.k.at(t, 0)[d]));
        EXPECT_GT(err / (32 * 64), 0.05) << "rows from " << g << " were stored exactly";
    }
    const PageView page = cache->page(0, 0, 0, Side::key, 0);
    EXPECT_EQ(page.layout->bytes, 128 * 64 * 2 / 8 + 2 * 2 * 64 * (128 / 32));
}

// D2: raw rows never exceed keep + flush (and the front), at every step, once the first flush was due.
TEST(BugCaseD2, TheTailDrains) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 1000, 2);
    for (const std::string& spec : all_specs()) {
        auto cache = make(shape, spec);
        for (int64_t t = 0; t < 1000; ++t) {
            feed(*cache, text, t, 1);
            for (const Side side : {Side::key, Side::value}) {
                const Window w = cache->method().initial(side, 0, 0, 64).window;
                if (w.flush == 0) continue;
                const int64_t raw = t + 1 - w.front - cache->packed_rows(0, 0, side);
                ASSERT_LT(raw, std::max(w.first, w.keep + w.flush)) << spec << " row " << t;
            }
        }
    }
}

// D5: a prompt shorter than the raw tail is not quantized: bit for bit the raw cache.
TEST(BugCaseD5, ShortPromptsStayExact) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 140, 3);
    for (const auto& [spec, exact] : std::vector<std::pair<std::string, int64_t>>{
             {"kivi:bits=2", 127}, {"mixkvq:front=0", 127}, {"mixkvq", 131}, {"kivi:bits=2,residual=32", 31}})
        for (const int64_t rows : {int64_t(20), exact, exact + 1}) {
            auto cache = make(shape, spec), f16 = make(shape, "f16");
            const auto a = feed(*cache, text, 0, rows), b = feed(*f16, text, 0, rows);
            double worst = 0;
            for (size_t i = 0; i < a.size(); ++i)
                worst = std::max(worst, double(std::fabs(a[i] - b[i])));
            if (rows <= exact)
                EXPECT_LT(worst, 1e-6) << spec << " rows " << rows; // only page edges differ
            else
                EXPECT_GT(worst, 1e-4) << spec << " rows " << rows;
        }
}

// D6: the point at which packing begins lies inside the prompt; both ways of appending honour it.
TEST(BugCaseD6, ThresholdInsideThePrompt) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 1500, 4);
    const std::string spec = "kivi:bits=2,keep=1000";
    auto bulk = make(shape, spec), single = make(shape, spec);
    feed_split(*bulk, text, 1500, {512});
    feed_split(*single, text, 1500, {1});
    EXPECT_TRUE(bulk->save(0) == single->save(0));
    EXPECT_EQ(bulk->packed_rows(0, 0, Side::key), (1500 - 1000) / 128 * 128);
    auto raw = make(shape, "f16");
    feed_split(*raw, text, 1500, {512});
    EXPECT_LT(bulk->footprint().cache_bytes(), raw->footprint().cache_bytes());
}

// D7: a prompt that ends exactly on a page, then one more row.
TEST(BugCaseD7, PromptEndsOnAPage) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 600, 5);
    for (const std::string& spec : all_specs())
        for (const int64_t rows : {128, 132, 256, 260, 384, 388}) {
            auto cache = make(shape, spec);
            feed(*cache, text, 0, rows);
            const auto out = feed(*cache, text, rows, 1);
            EXPECT_LT(error_of(out.data(), expected(*cache, text, rows, 0, rows + 1)), bound_of(*cache))
                << spec << " " << rows;
        }
}

// D9: exactly full; the refusal changes nothing.
TEST(BugCaseD9, CapacityIsExact) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 400, 6);
    const SeqId seq = 0;
    const auto rows = [&](int64_t from, int64_t n) {
        std::vector<StepRow> r;
        for (int64_t t = 0; t < n; ++t)
            r.push_back({int32_t(from + t), {&seq, 1}});
        return r;
    };
    for (const std::string& spec : all_specs())
        for (const int64_t limit : {64, 128, 300}) {
            CacheOptions options;
            options.max_rows = limit;
            auto cache = make(shape, spec, options);
            feed(*cache, text, 0, limit - 2);
            const auto before = cache->save(0);
            const int64_t bytes = cache->footprint().allocated;
            EXPECT_EQ(cache->can_append(rows(limit - 2, 4)).code(), StatusCode::out_of_capacity);
            const Status st = cache->begin_step(rows(limit - 2, 4));
            EXPECT_EQ(st.code(), StatusCode::out_of_capacity);
            EXPECT_NE(st.message().find(std::to_string(limit)), std::string::npos) << st.message();
            EXPECT_TRUE(cache->save(0) == before) << spec;
            EXPECT_EQ(cache->footprint().allocated, bytes) << spec;
            feed(*cache, text, limit - 2, 2);
            EXPECT_EQ(cache->rows(0), limit);
            EXPECT_EQ(cache->begin_step(rows(limit, 1)).code(), StatusCode::out_of_capacity);
            EXPECT_EQ(cache->rows(0), limit);
        }
}

// D9, bytes: a budget that runs out in the middle of a step's pages leaves the cache as it was.
TEST(BugCaseD9, ByteBudgetRefusesWhole) {
    const ModelShape shape = one_layer(4, 2, 64, 64, 3);
    const Text text(shape.layers[0], 600, 7);
    const SeqId seq = 0;
    for (const std::string& spec : all_specs()) {
        auto probe = make(shape, spec);
        feed(*probe, text, 0, 300);
        CacheOptions options;
        options.max_bytes = probe->footprint().allocated * 3 / 2;
        auto cache = make(shape, spec, options);
        int64_t at = 0;
        Status st;
        while (at < 560) { // one row at a time until the budget says no
            const StepRow row{int32_t(at), {&seq, 1}};
            const auto before = cache->save(0);
            const int64_t bytes = cache->footprint().allocated;
            st = cache->begin_step({&row, 1});
            if (!st) {
                EXPECT_EQ(cache->footprint().allocated, bytes) << spec;
                EXPECT_TRUE(cache->save(0) == before) << spec;
                break;
            }
            for (int32_t layer = 0; layer < 3; ++layer)
                cache->write(layer, text.q.rows(at), text.k.rows(at), text.v.rows(at));
            cache->end_step();
            ++at;
        }
        EXPECT_LE(cache->footprint().allocated, options.max_bytes) << spec;
        if (!st) {
            EXPECT_EQ(st.code(), StatusCode::out_of_capacity) << spec;
        }
    }
}

// A step that is given up half way (a cancelled graph): the rows can be dropped and the cache is what it was.
TEST(BugCaseD9, AbandonedStepCanBeTakenBack) {
    const ModelShape shape = one_layer(4, 2, 64, 64, 2);
    const Text text(shape.layers[0], 600, 8);
    for (const std::string& spec : all_specs()) {
        auto cache = make(shape, spec);
        const auto step = [&](int64_t from, int64_t n, int32_t layers) { write_layers(*cache, text, from, n, layers); };
        step(0, 120, 2);
        cache->end_step();
        const auto before = cache->save(0);
        step(120, 300, 1); // layer 1 never runs
        ASSERT_TRUE(cache->truncate(0, 120).ok());
        EXPECT_EQ(cache->rows(0), 120) << spec;
        // Raw rows are what they were; a page that the step sealed is cut by the written rule: decoded, then raw.
        const bool raw = spec == "f16" || spec == "f32" || spec == "bf16";
        if (raw) {
            EXPECT_TRUE(cache->save(0) == before) << spec;
        }
        const auto out = feed(*cache, text, 120, 1);
        EXPECT_LT(error_of(out.data(), expected(*cache, text, 120, 0, 121)), bound_of(*cache)) << spec;
        cache->clear();
        EXPECT_EQ(cache->footprint().allocated, 0) << spec;
    }
}

} // namespace
} // namespace kvmosaic::test
