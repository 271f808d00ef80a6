// Each method against what its paper and DESIGN.md say, recomputed here by other means.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

std::unique_ptr<Method> open(const std::string& spec) {
    auto method = open_method(spec);
    EXPECT_TRUE(method.ok()) << method.status().message();
    return std::move(*method);
}

// A block of keys [count][dim] with query statistics [dim].
struct Block {
    int32_t dim = 0;
    int64_t count = 128, queries = 0;
    std::vector<float> rows, abs_sum;

    Block(int32_t d, uint32_t seed) : dim(d), rows(size_t(count) * size_t(d)), abs_sum(size_t(d)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<float> width(static_cast<size_t>(d)), size(static_cast<size_t>(d));
        for (int32_t c = 0; c < d; ++c) {
            width[size_t(c)] = std::exp(normal(random));
            size[size_t(c)] = std::exp(normal(random));
        }
        for (size_t i = 0; i < rows.size(); ++i)
            rows[i] = normal(random) * width[i % size_t(d)];
        for (int i = 0; i < 300; ++i, ++queries) {
            for (int32_t c = 0; c < d; ++c)
                abs_sum[size_t(c)] += std::abs(normal(random)) * size[size_t(c)];
        }
    }
    PlanInput input() const {
        PlanInput in;
        in.rows = rows.data();
        in.count = count;
        in.dim = dim;
        in.query = {abs_sum.data(), queries};
        return in;
    }
    // Channel c swings between 0 and `range`, and the mean |q_c| is `query`.
    void plant(int32_t c, float range, float query) {
        for (int64_t t = 0; t < count; ++t)
            rows[size_t(t * dim + c)] = t % 2 ? range : 0.0f;
        abs_sum[size_t(c)] = query * float(queries);
    }
};

SidePlan planned(const Method& method, const Block& block) {
    SidePlan plan = method.initial(Side::key, 0, 0, block.dim);
    method.plan(block.input(), &plan);
    return plan;
}

// Width of every channel, from ladder and map.
std::vector<int> widths_of(const SidePlan& plan) {
    std::vector<int> widths(plan.channels.size(), -1);
    size_t at = 0;
    for (int i = 0; i < plan.ladder.count; ++i) {
        for (int n = 0; n < plan.ladder.tiers[size_t(i)].channels; ++n) {
            widths[plan.channels[at++]] = plan.ladder.tiers[size_t(i)].bits;
        }
    }
    EXPECT_EQ(at, plan.channels.size());
    return widths;
}

TEST(Raw, NeverPacks) {
    for (const auto& [name, type] :
         {std::pair("f16", RawType::f16), std::pair("bf16", RawType::bf16), std::pair("f32", RawType::f32)}) {
        const auto method = open(name);
        for (const Side side : {Side::key, Side::value}) {
            const SidePlan plan = method->initial(side, 0, 0, 64);
            EXPECT_EQ(plan.store.kind, StoreKind::raw);
            EXPECT_EQ(plan.store.raw, type);
            EXPECT_EQ(plan.raw, type);
            EXPECT_EQ(plan.window, (Window{0, 0, 0}));
            EXPECT_EQ(plan.window.packed_after(0, 1 << 20), 0);
        }
    }
}

TEST(Kivi, StoresAndWindows) {
    const auto method = open("kivi:bits=4,group=64,front=8,keep=16,residual=64,params=bf16");
    const SidePlan key = method->initial(Side::key, 0, 0, 128), value = method->initial(Side::value, 0, 0, 128);
    EXPECT_EQ(key.window, (Window{8, 16, 64}));
    EXPECT_EQ(value.window, (Window{8, 80, 1}));
    EXPECT_EQ(key.store.axis, Axis::tokens);
    EXPECT_EQ(value.store.axis, Axis::channels);
    for (const SidePlan* plan : {&key, &value}) {
        EXPECT_EQ(plan->store.kind, StoreKind::grid);
        EXPECT_EQ(plan->store.bits, 4);
        EXPECT_EQ(plan->store.group, 64);
        EXPECT_EQ(plan->store.params, ParamType::bf16);
        EXPECT_EQ(plan->raw, RawType::f16);
    }
    EXPECT_EQ(method->initial(Side::value, 0, 0, 40).store.group, 40);  // min(group, D)
    EXPECT_EQ(method->initial(Side::value, 0, 0, 100).store.group, 64); // the last group is shorter
    EXPECT_EQ(method->initial(Side::value, 0, 0, 20).store.group, 24);  // whole lane blocks
    EXPECT_EQ(method->initial(Side::key, 0, 0, 20).store.group, 64);    // along tokens: D does not matter
    EXPECT_FALSE(method->info().uses_query);
}

// The released code's own bookkeeping: keys are packed when R of them wait, values slide out one by one.
TEST(Kivi, PacksWhenTheReleasedCodeDoes) {
    for (const int64_t residual : {32, 64, 128}) {
        const auto method = open("kivi:residual=" + std::to_string(residual));
        const Window key = method->initial(Side::key, 0, 0, 64).window;
        const Window value = method->initial(Side::value, 0, 0, 64).window;
        int64_t key_waiting = 0, key_packed = 0, value_waiting = 0, value_packed = 0;
        int64_t by_key_window = 0, by_value_window = 0;
        for (int64_t rows = 1; rows <= 700; ++rows) {
            if (++key_waiting == residual) key_packed += std::exchange(key_waiting, 0);
            if (++value_waiting > residual) ++value_packed, --value_waiting;
            by_key_window = key.packed_after(by_key_window, rows);
            by_value_window = value.packed_after(by_value_window, rows);
            ASSERT_EQ(by_key_window, key_packed) << rows;
            ASSERT_EQ(by_value_window, value_packed) << rows;
            ASSERT_EQ(key.packed_after(0, rows), rows - rows % residual); // a prompt at once
            ASSERT_EQ(value.packed_after(0, rows), std::max<int64_t>(0, rows - residual));
        }
    }
}

TEST(MixKvq, StoresAndWindows) {
    const auto method = open("mixkvq");
    const SidePlan key = method->initial(Side::key, 0, 0, 128), value = method->initial(Side::value, 0, 0, 128);
    EXPECT_EQ(key.window, (Window{4, 0, 128}));
    EXPECT_EQ(value.window, (Window{4, 0, 128}));
    EXPECT_EQ(key.store.kind, StoreKind::tiered);
    EXPECT_EQ(key.store.group, 32);
    EXPECT_EQ(value.store.kind, StoreKind::grid);
    EXPECT_EQ(value.store.bits, 2);
    EXPECT_EQ(value.store.group, 32);
    EXPECT_TRUE(method->info().uses_query);
    EXPECT_EQ(method->query_scope(), QueryScope::running);
    EXPECT_EQ(method->map_scope(), MapScope::block);
    EXPECT_EQ(open("mixkvq:query=window")->query_scope(), QueryScope::window);
    EXPECT_EQ(open("mixkvq:map=prompt")->map_scope(), MapScope::first_step);
    EXPECT_EQ(method->widths(Side::key), (std::vector<uint8_t>{16, 4, 2}));
    EXPECT_TRUE(method->widths(Side::value).empty());
    EXPECT_EQ(open("mixkvq:v=3,group=128")->initial(Side::value, 0, 0, 64).store.bits, 3);
    EXPECT_EQ(open("mixkvq:v=3,group=128")->initial(Side::value, 0, 0, 64).store.group, 64);
}

TEST(MixKvq, PlantedChannelsLandInTheirTiers) {
    Block block(64, 1);
    for (int32_t c = 0; c < 64; ++c)
        block.plant(c, 3.0f, 0.5f); // A = 0.5 * 1
    block.plant(5, 30.0f, 2.0f);    // A = 20: raw
    block.plant(40, 3.0f, 13.0f);   // A = 13: raw, by its query alone
    block.plant(9, 36.0f, 1.0f);    // A = 12, not above hi: 4 bits
    block.plant(2, 300.0f, 0.02f);  // A = 2: a wide key that no query looks at
    block.plant(63, 3.0f, 1.5f);    // A = 1.5: 2 bits
    const SidePlan plan = planned(*open("mixkvq"), block);
    ASSERT_EQ(plan.ladder.count, 3);
    EXPECT_EQ(plan.ladder.tiers[0], (Tier{16, 2}));
    EXPECT_EQ(plan.ladder.tiers[1], (Tier{4, 2}));
    EXPECT_EQ(plan.ladder.tiers[2], (Tier{2, 60}));
    const std::vector<uint16_t> head(plan.channels.begin(), plan.channels.begin() + 6);
    EXPECT_EQ(head, (std::vector<uint16_t>{5, 40, 2, 9, 0, 1})); // ascending in each tier
}

TEST(MixKvq, HighThresholdIsTestedFirstAndMayBeLower) {
    Block block(64, 2);
    for (int32_t c = 0; c < 64; ++c)
        block.plant(c, 3.0f, float(c) / 16.0f); // A = c / 16
    const std::vector<int> widths = widths_of(planned(*open("mixkvq:hi=1,mid=2"), block));
    for (int32_t c = 0; c < 64; ++c)
        EXPECT_EQ(widths[size_t(c)], c > 16 ? 16 : 2) << c;
    const std::vector<int> zero = widths_of(planned(*open("mixkvq:hi=1e9,mid=0"), block));
    for (int32_t c = 0; c < 64; ++c)
        EXPECT_EQ(zero[size_t(c)], c > 0 ? 4 : 2) << c;
}

TEST(MixKvq, EqualsAnIndependentRecomputation) {
    struct Case {
        std::string spec;
        bool use_query, use_scale;
        double hi, mid;
    };
    const std::vector<Case> cases = {{"mixkvq:hi=4,mid=1.5", true, true, 4, 1.5},
                                     {"mixkvq:hi=3,mid=1,score=scale", false, true, 3, 1},
                                     {"mixkvq:hi=2,mid=0.75,score=query", true, false, 2, 0.75}};
    int tiers_seen[17] = {};
    for (const int32_t dim : {20, 64, 80, 96, 128, 256, 512}) {
        for (uint32_t seed = 10; seed < 14; ++seed) {
            const Block block(dim, seed);
            for (const Case& c : cases) {
                const std::vector<int> widths = widths_of(planned(*open(c.spec), block));
                for (int32_t d = 0; d < dim; ++d) {
                    std::vector<double> column;
                    for (int64_t t = 0; t < block.count; ++t)
                        column.push_back(block.rows[size_t(t * dim + d)]);
                    std::sort(column.begin(), column.end());
                    double score = 1;
                    if (c.use_scale) score *= (column.back() - column.front()) / (4 - 1); // 2^B - 1 with B = 2
                    if (c.use_query) score *= double(block.abs_sum[size_t(d)]) / double(block.queries);
                    if (std::abs(score - c.hi) < 1e-5 || std::abs(score - c.mid) < 1e-5) continue; // fp32 may differ
                    EXPECT_EQ(widths[size_t(d)], score > c.hi ? 16 : score > c.mid ? 4 : 2) << c.spec << " " << d;
                    ++tiers_seen[widths[size_t(d)]];
                }
            }
        }
    }
    for (const int bits : {16, 4, 2})
        EXPECT_GT(tiers_seen[bits], 500) << bits;
}

TEST(MixKvq, QueriesCountByTheirMean) {
    Block block(64, 3);
    const SidePlan once = planned(*open("mixkvq:hi=4,mid=1.5"), block);
    for (float& sum : block.abs_sum)
        sum *= 4.0f; // four query heads that are all alike
    block.queries *= 4;
    EXPECT_EQ(planned(*open("mixkvq:hi=4,mid=1.5"), block).channels, once.channels);
}

TEST(MixKvq, WithoutQueriesTheKeyScaleDecides) {
    Block block(64, 4);
    const SidePlan scale = planned(*open("mixkvq:hi=2,mid=1,score=scale"), block);
    EXPECT_GT(scale.ladder.count, 1);
    block.queries = 0;
    for (const char* score : {"product", "query", "scale"}) {
        const SidePlan plan = planned(*open(std::string("mixkvq:hi=2,mid=1,score=") + score), block);
        EXPECT_EQ(plan.channels, scale.channels) << score;
        EXPECT_EQ(plan.ladder, scale.ladder) << score;
    }
}

TEST(MixKvq, SharesTakeTheBestOfEveryScore) {
    for (const int32_t dim : {64, 80, 128}) {
        const Block block(dim, 5);
        for (const char* score : {"product", "scale", "query"}) {
            const SidePlan plan =
                planned(*open(std::string("mixkvq:raw_share=0.05,mid_share=0.4,score=") + score), block);
            const std::vector<int> widths = widths_of(plan);
            const auto raw = std::lround(0.05 * dim), mid = std::lround(0.4 * dim);
            EXPECT_EQ(std::count(widths.begin(), widths.end(), 16), raw);
            EXPECT_EQ(std::count(widths.begin(), widths.end(), 4), mid);
            std::vector<double> scores(static_cast<size_t>(dim));
            for (int32_t d = 0; d < dim; ++d) {
                float low = 1e30f, high = -1e30f;
                for (int64_t t = 0; t < block.count; ++t) {
                    low = std::min(low, block.rows[size_t(t * dim + d)]);
                    high = std::max(high, block.rows[size_t(t * dim + d)]);
                }
                scores[size_t(d)] = score[0] == 'q' ? 1.0 : double(high - low);
                if (score[0] != 's') scores[size_t(d)] *= double(block.abs_sum[size_t(d)]);
            }
            for (int32_t a = 0; a < dim; ++a) {
                for (int32_t b = 0; b < dim; ++b) {
                    if (widths[size_t(a)] > widths[size_t(b)]) {
                        EXPECT_GE(scores[size_t(a)], scores[size_t(b)] * (1 - 1e-6)) << score;
                    }
                }
            }
        }
    }
}

TEST(MixKvq, SharesOnlyOneOfThem) {
    const Block block(64, 6);
    const std::vector<int> raw = widths_of(planned(*open("mixkvq:raw_share=0.25"), block));
    EXPECT_EQ(std::count(raw.begin(), raw.end(), 16), 16);
    EXPECT_EQ(std::count(raw.begin(), raw.end(), 2), 48);
    const std::vector<int> mid = widths_of(planned(*open("mixkvq:mid_share=1"), block));
    EXPECT_EQ(std::count(mid.begin(), mid.end(), 4), 64);
    const std::vector<int> none = widths_of(planned(*open("mixkvq:raw_share=0"), block));
    EXPECT_EQ(std::count(none.begin(), none.end(), 2), 64);
    // Rounding up twice must not ask for more channels than there are: 3 channels, halves round to 2 and 2.
    const Block tiny(3, 7);
    const SidePlan plan = planned(*open("mixkvq:raw_share=0.5,mid_share=0.5"), tiny);
    EXPECT_TRUE(validate(plan.ladder, 3).ok());
}

TEST(MixKvq, EqualScoresGoToTheLowerChannel) {
    Block block(64, 8);
    for (int32_t c = 0; c < 64; ++c)
        block.plant(c, 3.0f, 1.0f);
    block.plant(50, 6.0f, 1.0f);
    const SidePlan plan = planned(*open("mixkvq:raw_share=0.0625,mid_share=0.0625"), block); // 4 and 4
    const std::vector<uint16_t> head(plan.channels.begin(), plan.channels.begin() + 9);
    EXPECT_EQ(head, (std::vector<uint16_t>{0, 1, 2, 50, 3, 4, 5, 6, 7}));
}

TEST(MixKvq, ContradictoryStatisticsStillGiveALegalPlan) {
    Block block(64, 9);
    block.abs_sum[3] = NAN;
    block.abs_sum[4] = INFINITY;
    block.plant(4, 0.0f, INFINITY); // inf * 0
    for (const char* spec : {"mixkvq", "mixkvq:raw_share=0.1,mid_share=0.5"}) {
        const SidePlan plan = planned(*open(spec), block);
        EXPECT_TRUE(validate(plan.ladder, 64).ok());
        EXPECT_EQ(widths_of(plan)[3], 2);
        EXPECT_EQ(widths_of(plan)[4], 2);
    }
}

// The figures of docs/methods.md.
TEST(MethodsDoc, TrueBits) {
    struct Row {
        const char* spec;
        int32_t dim;
        double key, value;
    };
    for (const Row& row :
         {Row{"f16", 64, 16, 16}, Row{"f32", 128, 32, 32}, Row{"kivi", 64, 3, 3}, Row{"kivi", 128, 3, 3},
          Row{"kivi:bits=1", 128, 2, 2}, Row{"kivi:bits=3", 128, 4, 4}, Row{"kivi:bits=4", 64, 5, 5},
          Row{"kivi:bits=6", 128, 7, 7}, Row{"kivi:bits=8", 128, 9, 9}, Row{"kivi:group=128", 64, 2.25, 2.5},
          Row{"kivi:group=128", 128, 2.25, 2.25}, Row{"kivi:bits=8,group=128", 128, 8.25, 8.25},
          Row{"kivi:params=f8e4m3", 128, 2.5, 2.5}, Row{"mixkvq", 64, 3.0625, 3}, Row{"mixkvq:v=3", 128, 3.0625, 4}}) {
        const auto method = open(row.spec);
        for (const Side side : {Side::key, Side::value}) {
            const SidePlan plan = method->initial(side, 0, 0, row.dim);
            EXPECT_DOUBLE_EQ(layout(plan.store, side, row.dim, plan.ladder).true_bits(),
                             side == Side::key ? row.key : row.value)
                << row.spec << " " << row.dim;
        }
    }
    SidePlan plan = open("mixkvq")->initial(Side::key, 0, 0, 128);
    for (const auto& [raw, mid, bits] :
         {std::tuple(0, 32, 3.5625), std::tuple(4, 51, 4.625), std::tuple(8, 64, 5.0625)}) {
        plan.ladder = Ladder();
        plan.ladder.push(16, uint16_t(raw));
        plan.ladder.push(4, uint16_t(mid));
        plan.ladder.push(2, uint16_t(128 - raw - mid));
        EXPECT_DOUBLE_EQ(layout(plan.store, Side::key, 128, plan.ladder).true_bits(), bits);
    }
}

} // namespace
} // namespace kvmosaic
