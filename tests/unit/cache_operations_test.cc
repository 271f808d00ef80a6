// Prefixes, budgets, compaction and sequences from another method: the rules that the random operations do not spell
// out.
#include "property/lifecycle.h"

namespace kvmosaic::test {
namespace {

std::vector<int32_t> ids(int32_t first, int64_t n) {
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < n; ++i)
        tokens.push_back(first + i);
    return tokens;
}

TEST(Prefix, PagesAreSharedAndCountedOnce) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 600, 1);
    auto cache = make(shape, "kivi:bits=2");
    feed(*cache, text, 0, 512);
    const Footprint alone = cache->footprint();
    ASSERT_TRUE(cache->keep_prefix(0, ids(0, 512)).ok());
    for (SeqId s = 1; s < 9; ++s)
        ASSERT_EQ(cache->take_prefix(s, ids(0, 550)), 512);
    const Footprint shared = cache->footprint();
    EXPECT_EQ(shared.tokens, 512);
    EXPECT_EQ(shared.allocated, alone.allocated);
    EXPECT_EQ(shared.packed[0] + shared.raw[0] + shared.packed[1] + shared.raw[1],
              alone.packed[0] + alone.raw[0] + alone.packed[1] + alone.raw[1]);
    for (SeqId s = 1; s < 9; ++s)
        feed(*cache, text, 512, 1, s);
    EXPECT_LT(cache->footprint().allocated, 4 * alone.allocated); // nine sequences, tails of their own
    cache->clear();
    EXPECT_EQ(cache->footprint().tokens, 512); // the prefix stays
    EXPECT_EQ(cache->footprint().allocated, alone.allocated);
    EXPECT_EQ(cache->drop_prefixes(), 1);
    EXPECT_EQ(cache->footprint().allocated, 0);
}

// What a sequence weighs alone is what a cache with nothing else weighs, shared pages or not.
TEST(Footprint, OfOneSequenceKnowsNothingOfOthers) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 600, 1), other(shape.layers[0], 600, 2);
    for (const char* spec : {"f16", "kivi:bits=2", "mixkvq:raw_share=0.125,mid_share=0.5"}) {
        auto alone = make(shape, spec), full = make(shape, spec);
        feed(*alone, text, 0, 400);
        const Footprint want = alone->footprint();
        feed(*full, text, 0, 300);
        ASSERT_TRUE(full->fork(0, 1).ok());
        feed(*full, text, 300, 100);
        feed(*full, other, 300, 50, 1);
        feed(*full, other, 0, 500, 2);
        const Footprint got = full->footprint(0);
        EXPECT_EQ(got.tokens, 400) << spec;
        EXPECT_EQ(got.cache_bytes(), want.cache_bytes()) << spec;
        EXPECT_EQ(got.true_bits(0), want.true_bits(0)) << spec;
        EXPECT_GT(full->footprint().cache_bytes(), 2 * got.cache_bytes()) << spec;
        EXPECT_EQ(full->footprint(7).tokens, 0);
    }
}

TEST(Prefix, NamesOtherThanTheRowsAreRefused) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 100, 1);
    auto cache = make(shape, "f16");
    feed(*cache, text, 0, 100);
    EXPECT_EQ(cache->keep_prefix(0, ids(0, 99)).code(), StatusCode::invalid_argument);
    EXPECT_EQ(cache->keep_prefix(1, ids(0, 99)).code(), StatusCode::not_found);
    EXPECT_TRUE(cache->prefixes().empty());
    EXPECT_EQ(prefix_hash(ids(0, 8)), prefix_hash(ids(4, 4), prefix_hash(ids(0, 4))));
    EXPECT_NE(prefix_hash(ids(0, 8)), prefix_hash(ids(1, 8)));
}

// The least recently used prefix that nobody uses goes first; one in use, or that a used one grew from, never.
TEST(Prefix, EvictionByUse) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 400, 2);
    auto probe = make(shape, "kivi:bits=2");
    feed(*probe, text, 0, 300);
    CacheOptions options;
    options.max_bytes = probe->footprint().allocated * 5;
    auto cache = make(shape, "kivi:bits=2", options);
    for (const int32_t name : {1000, 2000}) { // two prefixes that nobody uses
        feed_split(*cache, text, 300, {10});
        ASSERT_TRUE(cache->keep_prefix(0, ids(name, 300)).ok());
        cache->remove(0);
    }
    ASSERT_EQ(cache->take_prefix(5, ids(1000, 300)), 300); // 1000 was used last
    cache->remove(5);
    feed_split(*cache, text, 300, {10}, 1); // 3000, grown from by the prefix of 360 rows, which sequence 1 uses
    ASSERT_TRUE(cache->keep_prefix(1, ids(3000, 300)).ok());
    feed(*cache, text, 300, 60, 1);
    ASSERT_EQ(cache->prefixes().size(), 3u);
    ASSERT_TRUE(cache->keep_prefix(1, ids(3000, 360)).ok());
    SeqId s = 2;
    const StepRow row{0, {&s, 1}};
    for (; cache->find_prefix(ids(2000, 300)) > 0 && s < 90; ++s)
        feed(*cache, text, 0, 10, s);
    EXPECT_EQ(cache->find_prefix(ids(2000, 300)), 0);
    EXPECT_EQ(cache->find_prefix(ids(1000, 300)), 300) << "the least recently used one goes first, and alone";
    Status st;
    while ((st = cache->can_append({&row, 1})) && s < 90) // until nothing more fits
        feed(*cache, text, 0, 10, s++);
    EXPECT_EQ(st.code(), StatusCode::out_of_capacity) << st.message();
    EXPECT_NE(st.message().find(std::to_string(options.max_bytes)), std::string::npos) << st.message();
    std::vector<StepRow> many;
    for (int32_t i = 0; i < 200; ++i)
        many.push_back({i, {&s, 1}});
    EXPECT_EQ(cache->begin_step(many).code(), StatusCode::out_of_capacity); // nor may a step take them
    EXPECT_EQ(cache->find_prefix(ids(1000, 300)), 0);
    EXPECT_EQ(cache->find_prefix(ids(3000, 400)), 360);
    EXPECT_EQ(cache->find_prefix(ids(3000, 301)), 300);
    EXPECT_LE(cache->footprint().allocated, options.max_bytes);
    cache->remove(1); // now nobody uses them
    EXPECT_TRUE(cache->can_append({&row, 1}).ok());
    EXPECT_EQ(cache->drop_prefixes(), 2);
}

// A window costs its raw rows and remembered statistics, and both are counted.
TEST(Rollback, ItsRowsAreCounted) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 1024, 3);
    for (const std::string spec : {"kivi:bits=2", "mixkvq", "q8_0"}) {
        CacheOptions options;
        options.rollback = 256;
        auto wide = make(shape, spec, options), plain = make(shape, spec);
        for (int64_t at = 0; at < 1024; at += 64) {
            feed(*wide, text, at, 64);
            feed(*plain, text, at, 64);
        }
        const Footprint a = wide->footprint(), b = plain->footprint();
        EXPECT_TRUE(wide->save(0) == plain->save(0)) << spec;     // the window is no part of the sequence
        EXPECT_GE(a.raw[0] - b.raw[0], 256 * 2 * 64 * 2) << spec; // rows x heads x D x f16
        EXPECT_LE(a.raw[0] - b.raw[0], (256 + 128) * 2 * 64 * 2) << spec;
        const int64_t sums = wide->method().info().uses_query ? 256 * 2 * (64 * 4 + 8) : 0;
        EXPECT_EQ(a.statistics - b.statistics, sums) << spec;
        EXPECT_GT(a.true_bits(), b.true_bits()) << spec;
        EXPECT_EQ(a.allocated - b.allocated, a.raw[0] + a.raw[1] - b.raw[0] - b.raw[1] +
                                                 (a.allocated - a.raw[0] - a.raw[1] - a.packed[0] - a.packed[1]) -
                                                 (b.allocated - b.raw[0] - b.raw[1] - b.packed[0] - b.packed[1]));
    }
    CacheOptions bad;
    bad.rollback = -1;
    EXPECT_EQ(Cache::create(shape, "f16", bad).status().code(), StatusCode::invalid_argument);
    bad.rollback = 65537;
    EXPECT_NE(Cache::create(shape, "f16", bad).status().message().find("65536"), std::string::npos);
}

// One plan for all that the first step packs (`map=prompt`) rests on the whole step: cuts into it follow the other
// rule.
TEST(Rollback, OnePlanForThePrompt) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 700, 4);
    CacheOptions options;
    options.rollback = 300;
    auto cache = make(shape, "mixkvq:map=prompt", options), plain = make(shape, "mixkvq:map=prompt");
    feed(*cache, text, 0, 500);
    feed(*plain, text, 0, 500);
    feed(*cache, text, 500, 150);
    ASSERT_TRUE(cache->truncate(0, 500).ok());
    EXPECT_TRUE(cache->save(0) == plain->save(0));
    ASSERT_TRUE(cache->truncate(0, 400).ok());
    ASSERT_TRUE(plain->truncate(0, 400).ok());
    EXPECT_TRUE(cache->save(0) == plain->save(0));
}

// A failed step within the window leaves no trace.
TEST(Rollback, AGivenUpStepIsTakenBackExactly) {
    const ModelShape shape = one_layer(4, 2, 64, 64, 2);
    const Text text(shape.layers[0], 600, 8);
    for (const std::string& spec : lifecycle_specs()) {
        CacheOptions options;
        options.rollback = 400;
        auto cache = make(shape, spec, options);
        const auto step = [&](int64_t from, int64_t n, int32_t layers) {
            write_layers(*cache, text, from, n, layers);
            cache->end_step();
        };
        step(0, 120, 2);
        const auto before = cache->save(0);
        step(120, 300, 1); // layer 1 never runs
        ASSERT_TRUE(cache->truncate(0, 120).ok());
        EXPECT_TRUE(cache->save(0) == before) << spec;
    }
}

TEST(Compact, GivesBackRoomAndChangesNoRow) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 600, 5);
    for (const std::string spec : {"f16", "kivi:bits=2", "mixkvq"}) {
        auto cache = make(shape, spec);
        for (SeqId s = 0; s < 8; ++s)
            feed(*cache, text, 0, 600, s);
        for (SeqId s = 0; s < 8; ++s)
            ASSERT_TRUE(cache->truncate(s, 5).ok());
        std::vector<std::vector<uint8_t>> saved;
        for (SeqId s = 0; s < 8; ++s)
            saved.push_back(cache->save(s));
        const Footprint before = cache->footprint();
        EXPECT_GE(cache->compact(), spec == "f16" ? 1 : 0) << spec; // its pages were as wide as their old rows
        const Footprint after = cache->footprint();
        EXPECT_LE(after.allocated, before.allocated) << spec;
        EXPECT_LE(after.arena, before.arena) << spec;
        for (SeqId s = 0; s < 8; ++s)
            EXPECT_TRUE(cache->save(s) == saved[size_t(s)]) << spec;
        cache->clear();
        (void)cache->compact();
        EXPECT_EQ(cache->footprint().arena, 0) << spec;
        feed(*cache, text, 0, 200);
    }
}

// From every method to some others: the rows that arrive are the decoded ones, packed as a prompt.
TEST(Adopt, EqualsAPromptOfDecodedRows) {
    const ModelShape shape = one_layer(4, 2, 64);
    const LayerShape& l = shape.layers[0];
    const Text text(l, 500, 6);
    const auto specs = lifecycle_specs();
    for (size_t i = 0; i < specs.size(); ++i) {
        auto from = make(shape, specs[i]);
        feed(*from, text, 0, 500);
        const auto before = from->save(0);
        for (size_t j = i % 9; j < specs.size(); j += 9) {
            auto to = make(shape, specs[j]), prompt = make(shape, specs[j]);
            ASSERT_TRUE(to->adopt(3, *from, 0).ok()) << specs[i] << " to " << specs[j];
            EXPECT_TRUE(from->save(0) == before);
            EXPECT_EQ(to->sequences(), std::vector<SeqId>{3});
            if (to->method().info().uses_query) continue; // their queries are known as sums only
            Text decoded = text;
            std::vector<float> rows(500 * 64);
            for (int32_t h = 0; h < 2; ++h) {
                from->decode(0, 0, h, Side::key, 0, 500, rows.data());
                for (int64_t t = 0; t < 500; ++t)
                    std::copy_n(rows.data() + t * 64, 64, decoded.k.at(t, h));
                from->decode(0, 0, h, Side::value, 0, 500, rows.data());
                for (int64_t t = 0; t < 500; ++t)
                    std::copy_n(rows.data() + t * 64, 64, decoded.v.at(t, h));
            }
            feed(*prompt, decoded, 0, 500);
            EXPECT_TRUE(to->save(3) == prompt->save(0)) << specs[i] << " to " << specs[j];
        }
    }
}

TEST(Adopt, RefusalsChangeNothing) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 500, 7);
    auto from = make(shape, "f16");
    feed(*from, text, 0, 500);
    auto shaped = make(one_layer(4, 2, 80), "kivi:bits=2");
    EXPECT_NE(shaped->adopt(0, *from, 0).message().find("another model"), std::string::npos);
    CacheOptions options;
    options.max_bytes = 60000;
    auto tight = make(shape, "kivi:bits=2", options);
    feed(*tight, text, 0, 60);
    const auto before = tight->save(0);
    EXPECT_EQ(tight->adopt(1, *from, 0).code(), StatusCode::out_of_capacity);
    EXPECT_EQ(tight->adopt(0, *from, 9).code(), StatusCode::not_found);
    EXPECT_TRUE(tight->save(0) == before);
    EXPECT_EQ(tight->sequences(), std::vector<SeqId>{0});
    options.max_bytes = 0, options.max_rows = 499;
    EXPECT_NE(make(shape, "f16", options)->adopt(0, *from, 0).message().find("499"), std::string::npos);
}

} // namespace
} // namespace kvmosaic::test
