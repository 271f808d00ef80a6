// Failures of operations on quantized sequences in other engines: shifts, roll-backs, forks, beams, trims, wildcards
// (E1 to E15, F3, F8), for every method.
#include "property/lifecycle.h"

namespace kvmosaic::test {
namespace {

// Rows of a text in another order or turned, as a text of their own.
Text pick(const Text& from, const LayerShape& l, const std::vector<int64_t>& rows, double turn = 0,
          int64_t turned = 0) {
    Text to(l, int64_t(rows.size()));
    for (size_t i = 0; i < rows.size(); ++i) {
        std::copy_n(from.q.at(rows[i], 0), l.heads * l.key_dim, to.q.at(int64_t(i), 0));
        std::copy_n(from.k.at(rows[i], 0), l.kv_heads * l.key_dim, to.k.at(int64_t(i), 0));
        std::copy_n(from.v.at(rows[i], 0), l.kv_heads * l.value_dim, to.v.at(int64_t(i), 0));
        for (int32_t h = 0; h < l.kv_heads && int64_t(i) >= turned; ++h)
            l.rope.turn(to.k.at(int64_t(i), h), turn);
    }
    return to;
}

std::vector<int64_t> numbers(int64_t first, int64_t end) {
    std::vector<int64_t> n;
    for (int64_t i = first; i < end; ++i)
        n.push_back(i);
    return n;
}

// Relative L2 of a side of head 0 against the rows of a text.
double distance(const Cache& cache, const Tensor& want, Side side, int64_t rows) {
    std::vector<float> got(size_t(rows) * size_t(want.dim));
    cache.decode(0, 0, 0, side, 0, rows, got.data());
    double error = 0, size = 0;
    for (int64_t t = 0; t < rows; ++t)
        for (int32_t d = 0; d < want.dim; ++d) {
            const double x = want.at(t, 0)[d], e = double(got[size_t(t * want.dim + d)]) - x;
            error += e * e, size += x * x;
        }
    return std::sqrt(error / size);
}

// E1: rows 4 .. 515 go, the others move down 512 and are packed anew. The error against the true, turned keys is at
// most twice what packing those keys at once costs.
TEST(BugCaseE1, ShiftWithQuantizedKeys) {
    const ModelShape shape = one_layer(4, 2, 64);
    const LayerShape& l = shape.layers[0];
    const Text text(l, 1000, 1), more(l, 300, 2);
    std::vector<int64_t> kept = numbers(0, 4);
    for (int64_t i = 516; i < 1000; ++i)
        kept.push_back(i);
    const Text truth = pick(text, l, kept, -512, 4);
    std::vector<int32_t> positions;
    for (int32_t i = 4; i < 488; ++i)
        positions.push_back(i);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec), direct = make(shape, spec);
        feed_split(*cache, text, 1000, {512});
        ASSERT_TRUE(cache->can_shift().ok());
        ASSERT_TRUE(cache->remove_rows(0, 4, 516).ok()) << spec;
        ASSERT_TRUE(cache->reposition(0, 4, positions).ok()) << spec;
        ASSERT_EQ(cache->rows(0), 488);
        feed(*direct, truth, 0, 488);
        for (Cache* c : {cache.get(), direct.get()}) { // goes on from position 488, and is packed again
            std::vector<StepRow> rows;
            const SeqId seq = 0;
            for (int32_t t = 0; t < 300; ++t)
                rows.push_back({488 + t, {&seq, 1}});
            std::vector<float> out(size_t(300) * 4 * 64);
            ASSERT_TRUE(c->append_and_attend(0, rows, more.q.rows(), more.k.rows(), more.v.rows(),
                                             {.scale = default_scale(l)}, out.data())
                            .ok());
            for (const float x : out)
                ASSERT_TRUE(std::isfinite(x)) << spec;
            EXPECT_LT(error_of(out.data() + 299 * 4 * 64, expected(*c, more, 299, 0, 788)), bound_of(*c)) << spec;
        }
        for (const Side side : {Side::key, Side::value}) {
            EXPECT_EQ(cache->packed_rows(0, 0, side), direct->packed_rows(0, 0, side)) << spec;
            const Tensor& want = side == Side::key ? truth.k : truth.v;
            const double shifted = distance(*cache, want, side, 488), once = distance(*direct, want, side, 488);
            EXPECT_LT(shifted, 2 * once + 1e-3) << spec << ", " << name_of(side);
            RecordProperty(spec + name_of(side), std::to_string(shifted) + " for " + std::to_string(once));
        }
    }
}

// E1, keys kept before RoPE: positions change, codes do not.
TEST(BugCaseE1, KeysFromBeforeRopeKeepTheirCodes) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 700, 3);
    int seen = 0;
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec), plain = make(shape, spec);
        if (cache->method().initial(Side::key, 0, 0, 64).space != KeySpace::pre_rope) continue;
        ++seen;
        feed(*cache, text, 0, 700);
        feed(*plain, text, 0, 700);
        std::vector<int32_t> positions;
        for (int32_t i = 0; i < 700; ++i)
            positions.push_back(1000 + i);
        ASSERT_TRUE(cache->reposition(0, 0, positions).ok());
        ASSERT_GT(cache->pages(0, 0, Side::key), 2) << spec;
        for (int64_t p = 0; p < cache->pages(0, 0, Side::key); ++p) {
            const PageView a = cache->page(0, 0, 1, Side::key, p), b = plain->page(0, 0, 1, Side::key, p);
            EXPECT_EQ(0, std::memcmp(a.bytes, b.bytes, a.layout->bytes)) << spec << " page " << p;
        }
    }
    EXPECT_GT(seen, 0);
}

// A layer whose rotation nobody told: refused, and nothing changes.
TEST(BugCaseE1, UnknownRotationsAreRefused) {
    ModelShape shape = one_layer(2, 1, 64);
    shape.layers[0].rope.known = false;
    const Text text(shape.layers[0], 300, 4);
    auto cache = make(shape, "kivi:bits=2");
    feed(*cache, text, 0, 300);
    const auto before = cache->save(0);
    const int32_t later[] = {400};
    const Status st = cache->reposition(0, 299, later);
    EXPECT_EQ(st.code(), StatusCode::unsupported);
    EXPECT_EQ(cache->can_shift().code(), StatusCode::unsupported);
    EXPECT_NE(st.message().find("layer 0"), std::string::npos) << st.message();
    EXPECT_TRUE(cache->save(0) == before);
    EXPECT_TRUE(cache->remove_rows(0, 10, 20).ok()); // leaves a gap; nothing turns
}

// E3: a magnitude that YaRN multiplies keys with once is not multiplied in again.
TEST(BugCaseE3, NormsSurviveAShiftUnderYarn) {
    ModelShape shape = one_layer(2, 1, 64);
    Rope& rope = shape.layers[0].rope;
    rope.ext_factor = 1.0f, rope.freq_scale = 0.125f, rope.original_context = 2048;
    ASSERT_GT(rope.magnitude(), 1.1);
    const Text text(shape.layers[0], 300, 5);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec);
        feed(*cache, text, 0, 300);
        std::vector<float> before(300 * 64), after(before.size());
        cache->decode(0, 0, 0, Side::key, 0, 300, before.data());
        std::vector<int32_t> positions;
        for (int32_t i = 0; i < 300; ++i)
            positions.push_back(7777 + i);
        ASSERT_TRUE(cache->reposition(0, 0, positions).ok()) << spec;
        cache->decode(0, 0, 0, Side::key, 0, 300, after.data());
        for (int64_t t = 0; t < 300; ++t) {
            double a = 0, b = 0;
            for (int64_t d = 0; d < 64; ++d) {
                a += std::pow(double(before[size_t(t * 64 + d)]), 2);
                b += std::pow(double(after[size_t(t * 64 + d)]), 2);
            }
            ASSERT_NEAR(std::sqrt(b / a), 1.0, spec == "bf16" ? 4e-3 : 1e-3) << spec << " row " << t;
        }
    }
}

// E4: 130 rows, cut at every edge, 40 other rows behind. With a window: the bytes of a cache that only ever saw the
// kept rows. Without: pages before the cut one keep their bytes, and no row is packed by two rules.
TEST(BugCaseE4, RollBackAcrossGroupEdges) {
    const ModelShape shape = one_layer(2, 1, 64);
    const LayerShape& l = shape.layers[0];
    const Text text(l, 260, 6), other(l, 300, 7);
    std::vector<std::string> specs = lifecycle_specs();
    specs.push_back("kivi:bits=2,group=32,residual=32");
    for (const std::string& spec : specs)
        for (const int64_t length : {130, 260})
            for (const int64_t cut : {129, 128, 127, 100, 97, 96, 95, 64, 33, 32, 31, 1, 0}) {
                std::vector<int64_t> kept = numbers(0, cut + length - 130);
                if (kept.empty() || (length == 260 && cut % 32 == 0)) continue;
                const int64_t rows = int64_t(kept.size());
                CacheOptions options;
                options.rollback = 130;
                auto exact = make(shape, spec, options), never = make(shape, spec), rule = make(shape, spec);
                feed(*exact, text, 0, length);
                feed(*rule, text, 0, length);
                feed(*never, text, 0, rows);
                const auto before = rule->save(0);
                ASSERT_TRUE(exact->truncate(0, rows).ok());
                ASSERT_TRUE(rule->truncate(0, rows).ok());
                ASSERT_TRUE(exact->save(0) == never->save(0)) << spec << " " << length << " to " << rows;
                const auto a = feed(*exact, other, rows, 40), b = feed(*never, other, rows, 40);
                EXPECT_TRUE(a == b) << spec << " " << length << " to " << rows;
                EXPECT_TRUE(exact->save(0) == never->save(0)) << spec << " " << length << " to " << rows;
                const auto c = feed(*rule, other, rows, 40);
                EXPECT_LT(error_of(c.data() + 39 * 2 * 64, expected(*rule, other, rows + 39, 0, rows + 40)),
                          bound_of(*rule))
                    << spec << " " << length << " to " << rows;
            }
}

// E6: a sliding window of 64, five draft rows of which three are rejected, again and again.
TEST(BugCaseE6, RejectedDraftsUnderAWindow) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 400, 8), drafts(shape.layers[0], 400, 9);
    AttendArgs args;
    args.window = 64;
    for (const std::string& spec : lifecycle_specs()) {
        CacheOptions options;
        options.rollback = 5;
        auto cache = make(shape, spec, options), plain = make(shape, spec);
        feed(*cache, text, 0, 200, 0, args);
        feed(*plain, text, 0, 200, 0, args);
        for (int64_t t = 200; t < 280; t += 2) {
            feed(*cache, text, t, 2, 0, args); // accepted
            feed(*cache, drafts, t + 2, 3, 0, args);
            ASSERT_TRUE(cache->truncate(0, t + 2).ok());
            feed(*plain, text, t, 2, 0, args);
            ASSERT_TRUE(cache->save(0) == plain->save(0)) << spec << " row " << t;
        }
        EXPECT_TRUE(feed(*cache, text, 280, 1, 0, args) == feed(*plain, text, 280, 1, 0, args)) << spec;
    }
}

// E8: four beams, reordered [2, 0, 0, 1] at every step: each is its own history, to the byte.
TEST(BugCaseE8, BeamsAreMovedNotEncodedAgain) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 400, 10);
    constexpr int kOrder[4] = {2, 0, 0, 1};
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec), alone = make(shape, spec);
        feed(*cache, text, 0, 120);
        std::vector<int64_t> history[4];
        for (int b = 0; b < 4; ++b) {
            ASSERT_TRUE(cache->fork(0, b).ok());
            history[b] = numbers(0, 120);
        }
        for (int step = 0; step < 50; ++step) {
            std::vector<int64_t> old[4];
            for (int b = 0; b < 4; ++b) {
                ASSERT_TRUE(cache->fork(b, 10 + b).ok());
                old[b] = history[b];
            }
            for (int b = 0; b < 4; ++b) {
                ASSERT_TRUE(cache->fork(10 + kOrder[b], b).ok());
                history[b] = old[kOrder[b]];
                const int64_t row = 120 + (step * 4 + b) % 280;
                history[b].push_back(row);
                const Text one = pick(text, shape.layers[0], {row});
                const SeqId seq = b;
                const StepRow at{int32_t(120 + step), {&seq, 1}};
                std::vector<float> out(2 * 64);
                ASSERT_TRUE(cache
                                ->append_and_attend(0, {&at, 1}, one.q.rows(), one.k.rows(), one.v.rows(),
                                                    {.scale = default_scale(shape.layers[0])}, out.data())
                                .ok());
            }
        }
        for (int b = 0; b < 4; ++b) {
            alone->clear();
            const Text own = pick(text, shape.layers[0], history[b]);
            feed(*alone, own, 0, 170);
            EXPECT_TRUE(alone->save(0) == cache->save(b)) << spec << " beam " << b;
        }
        cache->clear();
        EXPECT_EQ(cache->footprint().allocated, 0) << spec;
    }
}

// E12: what was kept or restored is used: only new rows are read, with the outputs of a cold run.
TEST(BugCaseE12, KeptPrefixesAreUsed) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 400, 11);
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 400; ++i)
        tokens.push_back(i * 7 % 1000);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec), cold = make(shape, spec);
        feed(*cache, text, 0, 301);
        ASSERT_TRUE(cache->keep_prefix(0, std::span(tokens).first(301)).ok());
        feed(*cache, text, 301, 50);
        cache->remove(0);
        ASSERT_EQ(cache->find_prefix(tokens), 301) << spec;
        ASSERT_EQ(cache->find_prefix(std::span(tokens).first(300)), 0) << spec;
        ASSERT_EQ(cache->take_prefix(4, tokens), 301) << spec;
        feed(*cold, text, 0, 301);
        EXPECT_TRUE(feed(*cache, text, 301, 99, 4) == feed(*cold, text, 301, 99)) << spec;
        EXPECT_TRUE(cache->save(4) == cold->save(0)) << spec;
    }
}

// E14: layers of several kinds (sizes, skipped layers), 253 rows cut to 17: nothing beyond is reachable anywhere.
TEST(BugCaseE14, TrimmingReachesEveryLayer) {
    ModelShape shape = one_layer(4, 2, 64, 64, 5);
    shape.layers[1].kv_heads = 1;
    shape.layers[2].value_dim = 32;
    shape.layers[3].kv_heads = 0; // borrows
    const Text text(one_layer(4, 2, 64).layers[0], 253, 12);
    const SeqId seq = 0;
    std::vector<StepRow> rows;
    for (int32_t t = 0; t < 253; ++t)
        rows.push_back({t, {&seq, 1}});
    for (const std::string spec : {"turboquant", "kivi:bits=2", "mixkvq", "innerq", "q8_0", "pnmix", "f16"}) {
        auto cache = make(shape, spec), fresh = make(shape, spec);
        for (auto& [c, n] : {std::pair(cache.get(), 253), std::pair(fresh.get(), 17)}) {
            ASSERT_TRUE(c->begin_step(std::span(rows).first(size_t(n))).ok());
            for (int32_t layer : {0, 1, 2, 4})
                c->write(layer, text.q.rows(), text.k.rows(), text.v.rows());
            c->end_step();
        }
        ASSERT_TRUE(cache->truncate(0, 17).ok());
        EXPECT_EQ(cache->rows(0), 17);
        EXPECT_EQ(cache->footprint().tokens, 17) << spec;
        for (const int32_t layer : {0, 1, 2, 4})
            for (const Side side : {Side::key, Side::value}) {
                EXPECT_LE(cache->packed_rows(0, layer, side), 17) << spec;
                EXPECT_LE(cache->pages(0, layer, side), 1) << spec;
                EXPECT_EQ(cache->page(0, layer, 0, side, 1).layout, nullptr) << spec;
            }
        (void)cache->compact();
        EXPECT_LE(cache->footprint().raw[0] + cache->footprint().packed[0],
                  fresh->footprint().raw[0] + fresh->footprint().packed[0])
            << spec;
    }
}

// E15: empty and impossible ranges have a meaning and no effect.
TEST(BugCaseE15, Ranges) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 200, 13);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec);
        feed(*cache, text, 0, 200);
        const auto before = cache->save(0);
        EXPECT_TRUE(cache->remove_rows(0, 5, 5).ok());
        EXPECT_TRUE(cache->truncate(0, 200).ok());
        EXPECT_TRUE(cache->reposition(0, 200, {}).ok());
        for (const auto& [first, last] :
             std::vector<std::pair<int64_t, int64_t>>{{5, 3}, {-1, 3}, {0, 201}, {200, 300}})
            EXPECT_EQ(cache->remove_rows(0, first, last).code(), StatusCode::invalid_argument) << first << " " << last;
        for (const int64_t rows : {-1, 201})
            EXPECT_EQ(cache->truncate(0, rows).code(), StatusCode::invalid_argument);
        const int32_t falls[] = {3};
        EXPECT_EQ(cache->reposition(0, 100, falls).code(), StatusCode::invalid_argument);
        EXPECT_EQ(cache->reposition(0, 200, falls).code(), StatusCode::invalid_argument);
        EXPECT_EQ(cache->remove_rows(-1, 0, 1).code(), StatusCode::not_found);
        EXPECT_EQ(cache->truncate(7, 0).code(), StatusCode::not_found);
        EXPECT_EQ(cache->fork(7, 1).code(), StatusCode::not_found);
        EXPECT_EQ(cache->take_prefix(1, {}), 0);
        cache->remove(99);
        EXPECT_TRUE(cache->save(0) == before) << spec;
        EXPECT_TRUE(cache->remove_rows(0, 0, 200).ok());
        EXPECT_EQ(cache->rows(0), 0);
    }
}

// F3: prompts of 10, 20 and 40; the longest leaves first, the others go on for 50 steps.
TEST(BugCaseF3, TheLongestRowLeavesFirst) {
    const ModelShape shape = one_layer(4, 1, 64);
    const Text text(shape.layers[0], 200, 14);
    const int64_t prompts[] = {10, 20, 40};
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec), alone = make(shape, spec);
        for (SeqId s = 0; s < 3; ++s)
            feed(*cache, text, 0, prompts[s] + 100, s);
        cache->remove(2);
        for (int64_t i = 0; i < 50; ++i)
            for (SeqId s = 0; s < 2; ++s)
                feed(*cache, text, prompts[s] + 100 + i, 1, s);
        for (SeqId s = 0; s < 2; ++s) {
            feed(*alone, text, 0, prompts[s] + 150, s);
            EXPECT_TRUE(alone->save(s) == cache->save(s)) << spec;
        }
    }
}

// F8: statistics that are not there yet are not read as zeros: a sequence taken from a method that keeps none is packed
// by its keys alone, finite, and nearly as well as with them.
TEST(BugCaseF8, NoStatisticsIsNotZeroStatistics) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 600, 15);
    auto exact = make(shape, "f32");
    feed(*exact, text, 0, 600);
    for (const std::string& spec : lifecycle_specs()) {
        auto cache = make(shape, spec), direct = make(shape, spec);
        ASSERT_TRUE(cache->adopt(0, *exact, 0).ok()) << spec;
        feed(*direct, text, 0, 600);
        for (const Side side : {Side::key, Side::value}) {
            EXPECT_EQ(cache->packed_rows(0, 0, side), direct->packed_rows(0, 0, side)) << spec;
            const Tensor& want = side == Side::key ? text.k : text.v;
            EXPECT_LT(distance(*cache, want, side, 600), 1.2 * distance(*direct, want, side, 600) + 1e-3) << spec;
        }
        if (!cache->method().info().uses_query) {
            EXPECT_TRUE(cache->save(0) == direct->save(0)) << spec; // f32 rows: what a prompt would have brought
        }
        const auto out = feed(*cache, text, 599, 1); // a second row at the last position
        EXPECT_LT(error_of(out.data(), expected(*cache, text, 599, 0, 601)), bound_of(*cache)) << spec;
    }
}

} // namespace
} // namespace kvmosaic::test
