// What every registered method must satisfy inside the cache: bytes to the byte, front rows exact, round trips,
// refusals.
#include "rig.h"

#include <set>

#include "core/arena.h"

namespace kvmosaic::test {
namespace {

// Every method at its defaults, and the widest and narrowest of the others by option extremes where they matter.
std::vector<std::string> conformance_specs() {
    std::vector<std::string> specs = all_specs();
    for (const MethodInfo* m : methods())
        if (std::find(specs.begin(), specs.end(), m->name) == specs.end()) specs.push_back(m->name);
    return specs;
}

// L1: bytes declared from layouts equal the bytes taken from the arena, and a closed form, at lengths around borders.
TEST(Conformance, DeclaredBytesAreAllocatedBytes) {
    const ModelShape shape = one_layer(4, 2, 64, 64, 3);
    const Text text(shape.layers[0], 4096, 1);
    const SeqId seq = 0;
    for (const std::string& spec : conformance_specs())
        for (const bool decode_heavy : {false, true}) {
            auto cache = make(shape, spec);
            int64_t at = 0;
            for (const int64_t rows : {1, 31, 127, 128, 129, 1000, 4096}) {
                while (at < rows) {
                    const int64_t n = decode_heavy && rows < 1000 ? 1 : std::min<int64_t>(512, rows - at);
                    write_layers(*cache, text, at, n, 3, seq);
                    at += n;
                    cache->end_step();
                }
                const Footprint f = cache->footprint();
                EXPECT_EQ(f.tokens, rows) << spec;
                EXPECT_EQ(f.values[0], rows * 3 * 2 * 64) << spec;
                EXPECT_EQ(f.reserved, 0) << spec;
                // Closed form over layouts: pages of every head and side, each in its block of the arena.
                int64_t raw[2] = {}, packed[2] = {}, blocks = 0;
                for (int32_t l = 0; l < 3; ++l)
                    for (int32_t h = 0; h < 2; ++h)
                        for (const Side side : {Side::key, Side::value}) {
                            const SidePlan plan = cache->method().initial(side, l, h, 64);
                            const auto add = [&](int64_t bytes, int64_t* sum) {
                                *sum += bytes;
                                blocks += int64_t(Arena::rounded(size_t(bytes) + 32));
                            };
                            const Window& w = plan.window;
                            if (w.front) add(raw_layout(plan.raw, side, 64, w.front).bytes, &raw[int(side)]);
                            const int64_t beyond = std::max<int64_t>(0, rows - w.front);
                            int64_t sealed = 0; // by the window's definition, one row at a time
                            for (int64_t t = 1; w.flush && t <= beyond; ++t)
                                while (t >= w.first && t - sealed >= w.keep + w.flush)
                                    sealed += w.flush;
                            if (plan.pins > 0 && sealed > 0)
                                add(raw_layout(plan.raw, side, 64, plan.pins).bytes, &raw[int(side)]);
                            EXPECT_EQ(cache->packed_rows(0, l, side), sealed) << spec << " rows " << rows;
                            for (int64_t base = 0; base < beyond; base += kPageTokens) {
                                if (base < sealed)
                                    add(cache->page(0, l, h, side, base / kPageTokens).layout->bytes,
                                        &packed[int(side)]);
                                if (sealed < std::min(beyond, base + kPageTokens) ||
                                    (sealed < base + kPageTokens && beyond > base))
                                    add(raw_layout(plan.raw, side, 64,
                                                   int32_t((std::min<int64_t>(128, beyond - base) + 31) / 32 * 32))
                                            .bytes,
                                        &raw[int(side)]);
                            }
                        }
                for (const int side : {0, 1}) {
                    EXPECT_EQ(f.raw[side], raw[side]) << spec << " rows " << rows << " side " << side;
                    EXPECT_EQ(f.packed[side], packed[side]) << spec << " rows " << rows << " side " << side;
                }
                EXPECT_EQ(f.allocated, blocks) << spec << " rows " << rows;
                EXPECT_GE(f.arena, f.allocated);
            }
            // The headline follows from the parts, and long texts approach the page's own bits.
            const Footprint f = cache->footprint();
            EXPECT_DOUBLE_EQ(f.true_bits(), 8.0 * double(f.cache_bytes()) / double(f.values[0] + f.values[1]));
        }
}

TEST(Conformance, FrontRowsAreExact) {
    const ModelShape shape = one_layer(2, 1, 64);
    Text text(shape.layers[0], 300, 2);
    for (float& x : text.k.x)
        x = f16_to_f32(f32_to_f16(x));
    for (float& x : text.v.x)
        x = f16_to_f32(f32_to_f16(x));
    for (const std::string& spec : conformance_specs()) {
        auto cache = make(shape, spec);
        feed(*cache, text, 0, 300);
        const int64_t front = cache->method().initial(Side::key, 0, 0, 64).window.front;
        std::vector<float> got(size_t(front) * 64);
        if (front == 0) continue;
        cache->decode(0, 0, 0, Side::key, 0, front, got.data());
        EXPECT_EQ(0, std::memcmp(got.data(), text.k.x.data(), got.size() * sizeof(float))) << spec;
        cache->decode(0, 0, 0, Side::value, 0, front, got.data());
        EXPECT_EQ(0, std::memcmp(got.data(), text.v.x.data(), got.size() * sizeof(float))) << spec;
    }
}

// The bytes of a sealed page never change, whatever comes later: the plan of page n ignores later tokens.
TEST(Conformance, SealedPagesNeverChange) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 900, 3);
    Text other(shape.layers[0], 900, 4);
    for (const std::string& spec : conformance_specs()) {
        auto a = make(shape, spec), b = make(shape, spec);
        feed(*a, text, 0, 500);
        feed(*b, text, 0, 500);
        feed(*a, text, 500, 400);
        feed(*b, other, 500, 400);
        for (const Side side : {Side::key, Side::value})
            for (int64_t p = 0; p < a->pages(0, 0, side); ++p) {
                const PageView x = a->page(0, 0, 1, side, p), y = b->page(0, 0, 1, side, p);
                const Window w = a->method().initial(side, 0, 1, 64).window;
                if ((p + 1) * kPageTokens > w.packed_after(0, 500 - w.front)) break;
                ASSERT_EQ(x.layout->bytes, y.layout->bytes) << spec;
                EXPECT_EQ(0, std::memcmp(x.bytes, y.bytes, x.layout->bytes)) << spec << " page " << p;
            }
    }
}

TEST(Conformance, SaveAndLoadGiveTheSameCache) { // E9 at the cache's API
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 500, 5);
    for (const std::string& spec : conformance_specs())
        for (const int64_t rows : {1, 100, 131, 132, 300, 400}) {
            auto cache = make(shape, spec);
            feed(*cache, text, 0, rows);
            const auto bytes = cache->save(0);
            EXPECT_TRUE(bytes == cache->save(0));
            auto other = make(shape, spec);
            feed(*other, text, 0, 50, 4); // other pages, another sequence number
            ASSERT_TRUE(other->load(9, bytes).ok()) << spec;
            EXPECT_TRUE(other->save(9) == bytes) << spec;
            const auto a = feed(*cache, text, rows, 1), b = feed(*other, text, rows, 1, 9);
            EXPECT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float))) << spec << " rows " << rows;
            EXPECT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float))) << spec;
        }
}

TEST(Conformance, DamagedStatesAreRefused) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text text(shape.layers[0], 200, 6);
    for (const char* spec : {"f16", "kivi:bits=2", "mixkvq"}) {
        auto cache = make(shape, spec);
        feed(*cache, text, 0, 200);
        const auto bytes = cache->save(0);
        auto other = make(shape, spec);
        for (size_t n = 0; n < bytes.size(); n += n < 300 ? 1 : 97) {
            const Status st = other->load(1, {bytes.data(), n});
            ASSERT_FALSE(st.ok()) << spec << " cut at " << n;
            ASSERT_FALSE(st.message().empty());
        }
        for (size_t i = 0; i < 300; ++i) { // a flip in the header is refused or harmless, never a crash
            auto flipped = bytes;
            flipped[i] ^= 0x41;
            (void)other->load(1, flipped).ok();
        }
        auto longer = bytes;
        longer.push_back(0);
        EXPECT_EQ(other->load(1, longer).code(), StatusCode::corrupt);
        EXPECT_TRUE(other->load(1, bytes).ok());
        auto foreign = make(shape, "kivi:bits=8");
        EXPECT_NE(foreign->load(0, bytes).message().find("spec"), std::string::npos);
        auto shaped = make(one_layer(2, 1, 80), spec);
        EXPECT_NE(shaped->load(0, bytes).message().find("another model"), std::string::npos);
        CacheOptions small;
        small.max_rows = 100;
        EXPECT_NE(make(shape, spec, small)->load(0, bytes).message().find("100"), std::string::npos);
    }
}

// A13 through the front door: one NaN, then one infinity, is counted and stays in its own channel or token.
TEST(Conformance, NonFiniteInputIsContained) {
    const ModelShape shape = one_layer(2, 1, 64);
    const Text clean(shape.layers[0], 300, 7);
    for (const std::string& spec : conformance_specs())
        for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
            Text text = clean;
            text.k.at(40, 0)[7] = bad;
            text.v.at(40, 0)[7] = bad;
            auto cache = make(shape, spec), good = make(shape, spec);
            const auto out = feed(*cache, text, 0, 300);
            feed(*good, clean, 0, 300);
            EXPECT_EQ(cache->footprint().non_finite, 2) << spec;
            for (const float x : out)
                ASSERT_TRUE(std::isfinite(x)) << spec;
            std::vector<float> a(300 * 64), b(a.size());
            for (const Side side : {Side::key, Side::value}) {
                cache->decode(0, 0, 0, side, 0, 300, a.data());
                good->decode(0, 0, 0, side, 0, 300, b.data());
                const SidePlan plan = cache->method().initial(side, 0, 0, 64);
                // A value that a plan looks at may move a tier or a scale elsewhere; then finite is all there is.
                if (plan.store.kind == StoreKind::tiered || cache->method().freezes(side)) continue;
                if (in_planes(plan.store.rule)) continue;
                for (int64_t t = 0; t < 300; ++t)
                    for (int32_t d = 0; d < 64; ++d) {
                        if (plan.store.axis == Axis::tokens ? d == 7 : t == 40) continue;
                        if (plan.window.flush == 0 && d == 7) continue;
                        ASSERT_EQ(a[size_t(t * 64 + d)], b[size_t(t * 64 + d)]) << spec << " row " << t << " " << d;
                    }
            }
        }
}

TEST(Conformance, BadInputIsRefusedWithASentence) {
    const ModelShape good = one_layer(4, 2, 64);
    for (const auto& [shape, spec, word] :
         std::vector<std::tuple<ModelShape, std::string, std::string>>{{good, "nonsense", "nonsense"},
                                                                       {good, "kivi:bits=5", "bits"},
                                                                       {good, "kivi:flavour=1", "flavour"},
                                                                       {good, "mixkvq:hi=abc", "hi"},
                                                                       {one_layer(5, 2, 64), "f16", "head"},
                                                                       {one_layer(4, 2, 0), "f16", "0"},
                                                                       {one_layer(4, 2, 4096), "f16", "4096"},
                                                                       {ModelShape{}, "f16", ""}}) {
        const auto cache = Cache::create(shape, spec);
        ASSERT_FALSE(cache.ok()) << spec;
        EXPECT_NE(cache.status().message().find(word), std::string::npos) << cache.status().message();
    }
    CacheOptions options;
    options.isa = "avx9000";
    const auto cache = Cache::create(good, "f16", options);
    ASSERT_FALSE(cache.ok());
    EXPECT_NE(cache.status().message().find("scalar"), std::string::npos) << cache.status().message();
}

// B8: sides of different width, and B10: an append of 5 then 3 equals one of 8, for two heads.
TEST(Conformance, SidesOfDifferentWidth) {
    for (const auto& [dk, dv] : std::vector<std::pair<int32_t, int32_t>>{{192, 128}, {128, 64}, {64, 128}, {80, 112}}) {
        const ModelShape shape = one_layer(4, 2, dk, dv);
        const Text text(shape.layers[0], 300, 8);
        for (const std::string& spec : conformance_specs()) {
            auto a = make(shape, spec), b = make(shape, spec);
            feed(*a, text, 0, 8);
            feed_split(*b, text, 8, {5, 3});
            EXPECT_TRUE(a->save(0) == b->save(0)) << spec;
            feed(*a, text, 8, 291);
            const auto out = feed(*a, text, 299, 1);
            EXPECT_LT(error_of(out.data(), expected(*a, text, 299, 0, 300)), bound_of(*a))
                << spec << " " << dk << "/" << dv;
        }
    }
}

// A10: keys with a large constant on a few channels, before rotation a bias. Per-channel groups must survive it.
TEST(BugCaseA10, KeyBias) {
    const ModelShape shape = one_layer(4, 2, 64);
    Text text(shape.layers[0], 600, 9);
    for (int64_t t = 0; t < 600; ++t)
        for (int32_t h = 0; h < 2; ++h)
            for (int32_t i = 0; i < 4; ++i) { // a biased pair turns with the position
                const double angle = double(t) * std::pow(10000.0, -2.0 * (20 + 3 * i) / 64.0);
                text.k.at(t, h)[20 + 3 * i] += float(200 * std::cos(angle));
                text.k.at(t, h)[20 + 3 * i + 32 - (20 + 3 * i >= 32 ? 64 : 0)] += float(200 * std::sin(angle));
            }
    for (float& x : text.q.x)
        x *= 0.3f;
    auto exact = make(shape, "f32");
    const auto want = feed(*exact, text, 0, 600);
    std::vector<double> errors;
    for (const char* spec : {"kivi:bits=2", "kivi:bits=4", "kivi:bits=8", "mixkvq"}) {
        auto cache = make(shape, spec);
        const auto got = feed(*cache, text, 0, 600);
        double num = 0, den = 0;
        for (size_t i = 0; i < got.size(); ++i) {
            ASSERT_TRUE(std::isfinite(got[i])) << spec;
            num += std::pow(double(got[i]) - double(want[i]), 2);
            den += std::pow(double(want[i]), 2);
        }
        errors.push_back(std::sqrt(num / den));
        RecordProperty(spec, std::to_string(errors.back()));
    }
    EXPECT_LT(errors[2], 0.1) << "8 bit";
    EXPECT_LT(errors[1], errors[0]) << "4 bit against 2 bit";
    EXPECT_LT(errors[2], errors[1]) << "8 bit against 4 bit";
}

} // namespace
} // namespace kvmosaic::test
