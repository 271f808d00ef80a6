// Kitty and PN-Mix: which key channels get how many bits, recomputed here by other means.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

std::unique_ptr<Method> open(const std::string& spec) {
    auto method = open_method(spec);
    EXPECT_TRUE(method.ok()) << method.status().message();
    return std::move(*method);
}

// Keys [count][dim] and queries [count][heads][dim] of one KV head, with channels of different sizes.
struct Stream {
    int32_t dim, heads;
    int64_t count;
    std::vector<float> keys, queries;

    Stream(int32_t d, int64_t n, uint32_t seed, int32_t g = 2)
        : dim(d), heads(g), count(n), keys(size_t(n * d)), queries(size_t(n * d) * size_t(g)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<float> of_key(static_cast<size_t>(d)), of_query(static_cast<size_t>(d));
        for (float& x : of_key)
            x = std::exp(normal(random));
        for (float& x : of_query)
            x = std::exp(normal(random));
        for (size_t i = 0; i < keys.size(); ++i)
            keys[i] = normal(random) * of_key[i % size_t(d)];
        for (size_t i = 0; i < queries.size(); ++i)
            queries[i] = normal(random) * of_query[i % size_t(d)];
    }
    void plant(int32_t channel, float key, float query) { // of equal size in all rows
        for (size_t i = size_t(channel); i < keys.size(); i += size_t(dim))
            keys[i] = key;
        for (size_t i = size_t(channel); i < queries.size(); i += size_t(dim))
            queries[i] = query;
    }
    // The statistic as the cache keeps it: norms of pairs for both of their channels, |q| for the others.
    std::vector<float> statistic(const Rope* rope) const {
        std::vector<float> sums(static_cast<size_t>(dim));
        for (size_t at = 0; at < queries.size(); at += size_t(dim)) {
            std::vector<float> x(queries.begin() + int64_t(at), queries.begin() + int64_t(at) + dim);
            for (float& value : x)
                value = std::abs(value);
            for (int32_t i = 0; rope && rope->known && i < rope->rotary / 2; ++i) {
                const auto [a, b] = rope->pair(i);
                x[size_t(a)] = x[size_t(b)] = std::sqrt(x[size_t(a)] * x[size_t(a)] + x[size_t(b)] * x[size_t(b)]);
            }
            for (size_t d = 0; d < x.size(); ++d)
                sums[d] += x[d];
        }
        return sums;
    }
};

SidePlan planned(const Method& method, const Stream& stream) {
    SidePlan plan = method.initial(Side::key, 0, 0, stream.dim);
    PlanInput in;
    in.rows = stream.keys.data();
    in.count = stream.count;
    in.dim = stream.dim;
    method.plan(in, &plan);
    return plan;
}

SidePlan frozen(const Method& method, const Stream& stream, const Rope* rope, bool with_queries = true) {
    SidePlan plan = method.initial(Side::key, 0, 0, stream.dim);
    const std::vector<float> sums = stream.statistic(rope);
    PlanInput in;
    in.rows = stream.keys.data();
    in.count = stream.count;
    in.dim = stream.dim;
    in.front = int32_t(stream.count - kPageTokens);
    in.rope = rope;
    if (with_queries) in.query = {sums.data(), stream.count * stream.heads};
    method.freeze(in, &plan);
    return plan;
}

Rope rope_of(int32_t rotary, bool halves) {
    Rope rope;
    rope.known = true;
    rope.rotary = rotary;
    rope.halves = halves;
    return rope;
}

std::set<int32_t> first(const std::vector<uint16_t>& order, int32_t n) { return {order.begin(), order.begin() + n}; }

// ---- Kitty ----

TEST(Kitty, StoresAndWindows) {
    const auto method = open("kitty");
    const SidePlan key = method->initial(Side::key, 0, 0, 128), value = method->initial(Side::value, 0, 0, 128);
    EXPECT_EQ(key.window, (Window{32, 0, 128}));
    EXPECT_EQ(value.window, (Window{32, 128, 128}));
    EXPECT_EQ(key.store.kind, StoreKind::tiered);
    EXPECT_EQ(key.store.group, 128);
    EXPECT_TRUE(key.store.page_map);
    EXPECT_EQ(key.store.axis, Axis::tokens);
    EXPECT_EQ(value.store.kind, StoreKind::grid);
    EXPECT_EQ(value.store.bits, 2);
    EXPECT_EQ(value.store.axis, Axis::channels);
    EXPECT_EQ(value.store.group, 128);
    EXPECT_EQ(method->initial(Side::value, 0, 0, 100).store.group, 104); // D up to 8
    EXPECT_EQ(method->initial(Side::value, 0, 0, 256).store.group, 128);
    EXPECT_FALSE(method->freezes(Side::key));
    EXPECT_FALSE(method->info().uses_query);
    // 128 to 255 raw values, as the deployed runtime holds: a ring, and a second buffer that fills up.
    int64_t packed = 0;
    for (int64_t rows = 1; rows <= 1000; ++rows) {
        packed = value.window.packed_after(packed, rows);
        EXPECT_EQ(packed, rows < 256 ? 0 : (rows - 128) / 128 * 128) << rows;
    }
}

TEST(Kitty, TheLoudestChannelsOfEachPage) {
    for (const int32_t dim : {64, 80, 96, 128, 256}) {
        for (const auto& [spec, ratio] :
             {std::pair("kitty", 0.125), std::pair("kitty:variant=pro", 0.25), std::pair("kitty:ratio=0.2", 0.2),
              std::pair("kitty:ratio=0", 0.0), std::pair("kitty:ratio=1", 1.0)}) {
            const Stream page(dim, kPageTokens, uint32_t(dim));
            const SidePlan plan = planned(*open(spec), page);
            std::vector<std::pair<double, int32_t>> loudness; // by mean |k|, in double precision
            for (int32_t d = 0; d < dim; ++d) {
                double sum = 0;
                for (int64_t t = 0; t < page.count; ++t)
                    sum += std::fabs(double(page.keys[size_t(t * dim + d)]));
                loudness.push_back({-sum / double(page.count), d});
            }
            std::sort(loudness.begin(), loudness.end());
            const auto top = int32_t(std::floor(ratio * dim + 1e-9));
            std::set<int32_t> want;
            for (int32_t i = 0; i < top; ++i)
                want.insert(loudness[size_t(i)].second);
            EXPECT_EQ(first(plan.channels, top), want) << spec << " " << dim;
            Ladder ladder;
            ladder.push(4, uint16_t(top));
            ladder.push(2, uint16_t(dim - top));
            EXPECT_EQ(plan.ladder, ladder) << spec << " " << dim;
        }
    }
}

TEST(Kitty, TheMeanCountsNotTheRange) {
    Stream page(64, kPageTokens, 5);
    for (int32_t d = 0; d < 64; ++d)
        page.plant(d, 1.0f, 0.0f);
    page.plant(17, -9.0f, 0.0f);              // constant and loud: a wide code that it would not need
    page.keys[size_t(40)] = 100.0f;           // one outlier: mean 1.77
    for (int64_t t = 0; t < kPageTokens; ++t) // a wide swing around 0 with a mean of 0.9
        page.keys[size_t(t * 64 + 33)] = t % 2 ? 0.9f : -0.9f;
    const SidePlan plan = planned(*open("kitty:ratio=0.04"), page); // 2 channels
    EXPECT_EQ(first(plan.channels, 2), (std::set<int32_t>{17, 40}));
    EXPECT_EQ(plan.ladder.tiers[0], (Tier{4, 2}));
}

TEST(Kitty, EqualChannelsGoToTheLower) {
    Stream page(64, kPageTokens, 6);
    for (int32_t d = 0; d < 64; ++d)
        page.plant(d, d % 2 ? 2.0f : -2.0f, 0.0f);
    const SidePlan plan = planned(*open("kitty"), page); // 8 channels
    const std::vector<uint16_t> head(plan.channels.begin(), plan.channels.begin() + 9);
    EXPECT_EQ(head, (std::vector<uint16_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

// ---- PN-Mix ----

TEST(PnMix, StoresAndWindows) {
    const auto method = open("pnmix");
    const SidePlan key = method->initial(Side::key, 0, 0, 128), value = method->initial(Side::value, 0, 0, 128);
    EXPECT_EQ(key.window, (Window{32, 0, 128, 128}));
    EXPECT_EQ(value.window, (Window{32, 0, 128}));
    EXPECT_EQ(key.store.kind, StoreKind::tiered);
    EXPECT_FALSE(key.store.page_map);
    EXPECT_EQ(key.store.rule, GridRule::midpoint);
    EXPECT_EQ(key.store.group, 128);
    EXPECT_EQ(value.store.rule, GridRule::asym);
    EXPECT_EQ(value.store.bits, 2);
    EXPECT_EQ(value.store.group, 128);
    EXPECT_EQ(open("pnmix")->initial(Side::value, 0, 0, 80).store.group, 80);
    EXPECT_TRUE(method->info().uses_query);
    EXPECT_EQ(method->info().query_sum, QuerySum::pair_norm);
    EXPECT_TRUE(method->freezes(Side::key));
    EXPECT_FALSE(method->freezes(Side::value));
    EXPECT_EQ(method->widths(Side::key), (std::vector<uint8_t>{3, 1}));
    EXPECT_EQ(key.ladder.tiers[0], (Tier{3, 64}));
    EXPECT_EQ(key.ladder.tiers[1], (Tier{1, 64}));
    EXPECT_TRUE(key.transform.identity());
}

// Eq. 6 of the paper in double precision from the rows themselves.
std::vector<std::pair<double, std::vector<int32_t>>> scored_units(const Stream& s, const Rope* rope) {
    std::vector<std::vector<int32_t>> units;
    std::set<int32_t> turning;
    if (rope && rope->known) {
        for (int32_t i = 0; i < rope->rotary / 2; ++i) {
            const int32_t a = rope->halves ? i : 2 * i, b = rope->halves ? i + rope->rotary / 2 : 2 * i + 1;
            units.push_back({a, b});
            turning.insert({a, b});
        }
    }
    for (int32_t d = 0; d < s.dim; ++d)
        if (!turning.count(d)) units.push_back({d});
    std::vector<std::pair<double, std::vector<int32_t>>> scored;
    const auto mean_norm = [&](const std::vector<float>& rows, const std::vector<int32_t>& unit) {
        double sum = 0;
        for (size_t at = 0; at < rows.size(); at += size_t(s.dim)) {
            double square = 0;
            for (const int32_t c : unit)
                square += double(rows[at + size_t(c)]) * double(rows[at + size_t(c)]);
            sum += std::sqrt(square);
        }
        return sum * double(s.dim) / double(rows.size());
    };
    for (const auto& unit : units)
        scored.push_back({mean_norm(s.queries, unit) * mean_norm(s.keys, unit), unit});
    std::stable_sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first > b.first : a.second[0] < b.second[0];
    });
    return scored;
}

TEST(PnMix, EqualsAnIndependentRecomputation) {
    int compared = 0;
    for (const int32_t dim : {64, 80, 96, 128, 256}) {
        for (const bool halves : {false, true}) {
            for (const int32_t rotary : {dim, dim / 2, dim / 4, 0}) {
                for (const double r : {0.5, 0.25, 0.1, 0.9}) {
                    const Stream stream(dim, 160, uint32_t(dim + rotary + halves), 3);
                    const Rope rope = rope_of(rotary, halves);
                    const SidePlan plan = frozen(*open("pnmix:r=" + std::to_string(r)), stream, &rope);
                    const int32_t budget = 2 * int32_t(std::floor(r * dim / 2 + 1e-9));
                    std::set<int32_t> want;
                    double last = 0, next = 0;
                    for (const auto& [score, unit] : scored_units(stream, &rope)) {
                        next = score;
                        if (int32_t(want.size() + unit.size()) > budget) break;
                        want.insert(unit.begin(), unit.end());
                        last = score;
                    }
                    if (last - next < 1e-5 * last) continue; // fp32 may rank these two the other way
                    const auto wide = int32_t(want.size());
                    EXPECT_EQ(plan.ladder.tiers[0], (Tier{3, uint16_t(wide)}));
                    EXPECT_EQ(plan.ladder.tiers[1], (Tier{1, uint16_t(dim - wide)}));
                    EXPECT_EQ(first(plan.transform.order, wide), want) << dim << " " << rotary << " " << r;
                    EXPECT_TRUE(std::is_sorted(plan.transform.order.begin(), plan.transform.order.begin() + wide));
                    EXPECT_TRUE(std::is_sorted(plan.transform.order.begin() + wide, plan.transform.order.end()));
                    ++compared;
                }
            }
        }
    }
    EXPECT_GT(compared, 120);
}

// Queries decide as much as keys do, and both channels of a pair go together, on either pair layout.
TEST(PnMix, PlantedPairs) {
    for (const int32_t dim : {64, 80, 128}) {
        for (const bool halves : {false, true}) {
            Stream stream(dim, 160, 3);
            for (int32_t d = 0; d < dim; ++d)
                stream.plant(d, 1.0f, 1.0f);
            const Rope rope = rope_of(dim, halves);
            const auto [a, b] = rope.pair(5);
            stream.plant(a, 9.0f, 1.0f); // one loud channel: its partner comes with it
            const auto [c, d] = rope.pair(dim / 2 - 1);
            stream.plant(c, 0.1f, 90.0f); // quiet keys that queries look at
            stream.plant(d, 0.1f, 90.0f);
            const auto [e, f] = rope.pair(7);
            stream.plant(e, 9.0f, 0.01f); // loud keys that no query looks at
            stream.plant(f, 9.0f, 0.01f);
            const SidePlan plan = frozen(*open("pnmix:r=" + std::to_string(4.5 / dim)), stream, &rope);
            EXPECT_EQ(plan.ladder.tiers[0], (Tier{3, 4})) << dim;
            EXPECT_EQ(first(plan.transform.order, 4), (std::set<int32_t>{a, b, c, d})) << dim;
        }
    }
}

TEST(PnMix, EqualUnitsGoToTheLowerAndTheNextMustFit) {
    Stream stream(64, 160, 4);
    for (int32_t d = 0; d < 64; ++d)
        stream.plant(d, 1.0f, 1.0f);
    const Rope rope = rope_of(32, true); // pairs (i, i + 16); 32 .. 63 are single
    // A pair scores sqrt(2) squared = 2, a single channel 1: all pairs first, then the lowest singles.
    const SidePlan half = frozen(*open("pnmix"), stream, &rope);
    std::set<int32_t> want;
    for (int32_t d = 0; d < 32; ++d)
        want.insert(d);
    EXPECT_EQ(first(half.transform.order, 32), want);
    const SidePlan more = frozen(*open("pnmix:r=0.6"), stream, &rope); // 38 channels
    EXPECT_EQ(more.ladder.tiers[0], (Tier{3, 38}));
    EXPECT_EQ(more.transform.order[37], 37);
    // One single channel first, then pairs: an odd place stays unused rather than splitting a pair.
    stream.plant(50, 9.0f, 9.0f);
    const SidePlan odd = frozen(*open("pnmix:r=0.125"), stream, &rope); // 8 channels
    EXPECT_EQ(odd.ladder.tiers[0], (Tier{3, 7}));
    EXPECT_EQ(first(odd.transform.order, 7), (std::set<int32_t>{0, 1, 2, 16, 17, 18, 50}));
}

TEST(PnMix, UnknownRotationMakesChannelsSingle) {
    Stream stream(64, 160, 5);
    for (int32_t d = 0; d < 64; ++d)
        stream.plant(d, 1.0f, 1.0f);
    stream.plant(3, 5.0f, 1.0f);
    stream.plant(9, 5.0f, 1.0f);
    Rope unknown = rope_of(64, true);
    unknown.known = false;
    for (const Rope* rope : {static_cast<const Rope*>(&unknown), static_cast<const Rope*>(nullptr)}) {
        const SidePlan plan = frozen(*open("pnmix:r=0.04"), stream, rope); // 2 channels
        EXPECT_EQ(first(plan.transform.order, 2), (std::set<int32_t>{3, 9}));
    }
}

TEST(PnMix, EndsOfTheRange) {
    const Rope rope = rope_of(64, true);
    Stream stream(64, 160, 6);
    EXPECT_EQ(frozen(*open("pnmix:r=0"), stream, &rope).ladder, Ladder::uniform(1, 64));
    EXPECT_EQ(frozen(*open("pnmix:r=1"), stream, &rope).ladder, Ladder::uniform(3, 64));
    EXPECT_EQ(frozen(*open("pnmix:b_hi=2,b_lo=2"), stream, &rope).ladder, Ladder::uniform(2, 64));
    EXPECT_EQ(open("pnmix:b_hi=2,b_lo=2")->widths(Side::key), (std::vector<uint8_t>{2}));
    // Without a query the keys decide.
    for (int32_t d = 0; d < 64; ++d)
        stream.plant(d, 1.0f, float(d));
    stream.plant(2, 7.0f, 0.0f);
    EXPECT_EQ(first(frozen(*open("pnmix:r=0.04"), stream, &rope, false).transform.order, 2),
              (std::set<int32_t>{2, 34}));
}

TEST(PnMix, TheFrontRowsCountToo) {
    const Rope rope = rope_of(64, true);
    Stream stream(64, 160, 7);
    for (int32_t d = 0; d < 64; ++d)
        stream.plant(d, 1.0f, 1.0f);
    for (int64_t t = 0; t < 32; ++t) // large only in the raw rows at the start: mean 1 + 99 * 32 / 160
        stream.keys[size_t(t * 64 + 11)] = 100.0f;
    stream.plant(30, 15.0f, 1.0f); // pair (30, 62), below that mean
    EXPECT_EQ(first(frozen(*open("pnmix:r=0.04"), stream, &rope).transform.order, 2), (std::set<int32_t>{11, 43}));
}

} // namespace
} // namespace kvmosaic
