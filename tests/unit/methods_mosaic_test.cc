// mosaic: where its bits go, recomputed by other means.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "methods/ladder.h"
#include "unit/methods_page.h"

namespace kvmosaic {
namespace {

using pages::open;

std::vector<float> weights_of(int32_t dim, double spread, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<float> w(static_cast<size_t>(dim));
    for (float& x : w)
        x = float(std::exp(spread * normal(random)));
    std::sort(w.begin(), w.end(), std::greater<>());
    return w;
}

double error_of(const Ladder& ladder, const std::vector<float>& w) {
    double sum = 0;
    for (int i = 0; i < ladder.count; ++i) {
        const Tier& tier = ladder.tiers[size_t(i)];
        int32_t rank = 0;
        for (int k = 0; k < ladder.count; ++k)
            if (ladder.tiers[size_t(k)].bits > tier.bits) rank += ladder.tiers[size_t(k)].channels;
        for (int32_t c = 0; c < tier.channels; ++c)
            sum += double(w[size_t(rank + c)]) * distortion_of(tier.bits);
    }
    return sum;
}

StoreSpec store_of(int32_t vectors) {
    StoreSpec spec = open("mosaic")->initial(Side::key, 0, 0, 64).store;
    spec.vectors = uint16_t(vectors);
    return spec;
}

// The least error of any ladder whose planes fit: all numbers of channels by brute force.
double best_of_all(const std::vector<float>& w, int32_t vectors) {
    const auto dim = int32_t(w.size());
    double best = 1e300;
    for (int32_t eight = 0; eight <= dim; eight += 2)
        for (int32_t six = 0; six + eight <= dim; six += 2)
            for (int32_t four = 0; six + eight + four <= dim; four += 2)
                for (int32_t three = 0; six + eight + four + three <= dim; three += 2)
                    for (int32_t two = 0; six + eight + four + three + two <= dim; two += 2)
                        for (int32_t one = 0; six + eight + four + three + two + one <= dim; one += 2) {
                            const auto up = [](int32_t n, int32_t to) { return (n + to - 1) / to; };
                            if (up(eight, 8) + up(eight + six + four, 8) + up(six + two + three, 16) +
                                    up(three + one, 32) >
                                vectors)
                                continue;
                            Ladder ladder;
                            const std::pair<int, int32_t> tiers[] = {{8, eight}, {4, four},  {6, six},
                                                                     {2, two},   {3, three}, {1, one}};
                            for (const auto& [bits, n] : tiers)
                                ladder.push(uint8_t(bits), uint16_t(n));
                            ladder.push(0, uint16_t(dim - eight - six - four - three - two - one));
                            best = std::min(best, error_of(ladder, w));
                        }
    return best;
}

TEST(Ladder, IsNearTheBestOfAll) {
    for (const int32_t dim : {24, 32})
        for (const int32_t vectors : {1, 2, 3, 4})
            for (const double spread : {0.3, 1.5, 3.0}) {
                const std::vector<float> w = weights_of(dim, spread, uint32_t(dim + vectors));
                const LadderChoice choice = choose_ladder(w.data(), dim, vectors);
                ASSERT_TRUE(validate(choice.ladder, dim, store_of(vectors)))
                    << validate(choice.ladder, dim, store_of(vectors)).message();
                EXPECT_NEAR(choice.error, error_of(choice.ladder, w), 1e-9 * choice.error);
                EXPECT_LE(choice.error, 1.06 * best_of_all(w, vectors)) << dim << " " << vectors << " " << spread;
            }
}

// Against real-valued water-filling without vectors: what whole vectors cost.
TEST(Ladder, WholeVectorsCostLittle) {
    constexpr int kSteps[][2] = {{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 6}, {6, 8}};
    for (const int32_t dim : {64, 80, 128, 256})
        for (const double bits : {1.5, 2.0, 2.5, 3.5}) {
            const std::vector<float> w = weights_of(dim, 1.5, uint32_t(dim));
            std::vector<std::pair<double, int>> gains; // a bit, and how many bits it takes
            for (const float x : w)
                for (const auto& [from, to] : kSteps)
                    gains.push_back({double(x) * (distortion_of(from) - distortion_of(to)) / (to - from), to - from});
            std::sort(gains.begin(), gains.end(), std::greater<>());
            double error = std::accumulate(w.begin(), w.end(), 0.0), budget = 32 * int32_t(bits * dim / 32);
            for (const auto& [gain, cost] : gains) {
                if (budget < cost) break;
                budget -= cost;
                error -= gain * cost;
            }
            const LadderChoice choice = choose_ladder(w.data(), dim, int32_t(bits * dim / 32));
            EXPECT_LE(choice.error, (dim < 100 ? 1.35 : 1.12) * error) << dim << " at " << bits;
        }
}

TEST(Ladder, EveryBudgetAndHeadSizeIsValid) {
    for (const int32_t dim : {1, 8, 20, 40, 64, 80, 100, 112, 128, 192, 256, 512})
        for (int32_t vectors = 1; vectors <= dim / 4 + 2; vectors += 1 + dim / 64) {
            std::vector<float> w = weights_of(dim, 2.0, uint32_t(vectors));
            if (vectors % 5 == 0) std::fill(w.begin(), w.end(), 0.0f);
            if (vectors % 5 == 1) std::fill(w.begin(), w.end(), 3.0f);
            const LadderChoice choice = choose_ladder(w.data(), dim, vectors);
            const Status st = validate(choice.ladder, dim, store_of(vectors));
            ASSERT_TRUE(st) << dim << " " << vectors << ": " << st.message();
        }
}

struct Planned {
    std::unique_ptr<Method> method;
    SidePlan plan;
    std::vector<float> rows;
};
// Channel d of the keys has size d + 1, of the queries 1, but for channel 3 of the queries.
Planned planned(const std::string& spec, int32_t dim, float third_query) {
    Planned p;
    p.method = open(spec);
    p.plan = p.method->initial(Side::key, 0, 0, dim);
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    p.rows.resize(size_t(kPageTokens * dim));
    for (size_t i = 0; i < p.rows.size(); ++i)
        p.rows[i] = normal(random) * float(i % size_t(dim) + 1);
    std::vector<float> squares(size_t(dim), 10.0f);
    squares[3] = 10.0f * third_query * third_query;
    PlanInput in;
    in.rows = p.rows.data();
    in.count = kPageTokens;
    in.dim = dim;
    in.query.abs_sum = squares.data();
    in.query.count = 10;
    p.method->plan(in, &p.plan);
    return p;
}
int bits_of(const SidePlan& plan, int32_t channel) {
    int32_t at = 0;
    for (int i = 0; i < plan.ladder.count; ++i) {
        const Tier& tier = plan.ladder.tiers[size_t(i)];
        for (int32_t c = 0; c < tier.channels; ++c)
            if (plan.channels[size_t(at + c)] == channel) return tier.bits;
        at += tier.channels;
    }
    return -1;
}

TEST(Mosaic, BitsFollowVarianceAndQueries) {
    const Planned p = planned("mosaic:k=2", 64, 1.0f);
    for (int32_t d = 1; d < 64; ++d)
        EXPECT_LE(bits_of(p.plan, d / 2), bits_of(p.plan, d)) << d; // sizes two times apart are never swapped
    EXPECT_EQ(bits_of(p.plan, 3), 0);
    EXPECT_GE(bits_of(planned("mosaic:k=2", 64, 1000.0f).plan, 3), 4);
    EXPECT_EQ(bits_of(planned("mosaic:k=2,query=0", 64, 1000.0f).plan, 3), 0);
    std::vector<uint16_t> sorted = p.plan.channels;
    std::sort(sorted.begin(), sorted.end());
    for (int32_t d = 0; d < 64; ++d)
        EXPECT_EQ(sorted[size_t(d)], d);
}

TEST(Mosaic, GuardAddsVectorsUpToItsEnd) {
    const auto vectors = [](const SidePlan& plan, int32_t dim) {
        const PageLayout page = layout(plan.store, Side::key, dim, plan.ladder);
        return int32_t(page.scale_offset / (32u * page.lane_blocks));
    };
    const int32_t plain = vectors(planned("mosaic:k=2", 128, 1.0f).plan, 128);
    EXPECT_EQ(plain, 8);
    EXPECT_EQ(vectors(planned("mosaic:k=2,guard=1000", 128, 1.0f).plan, 128), plain);
    const int32_t some = vectors(planned("mosaic:k=2,guard=200", 128, 1.0f).plan, 128);
    EXPECT_GT(some, plain);
    EXPECT_EQ(vectors(planned("mosaic:k=2,guard=0.0001", 128, 1.0f).plan, 128), 16);
    EXPECT_LT(some, 16);
}

TEST(Mosaic, PresetsByBits) {
    const auto bits = [](const std::string& spec, int32_t dim) {
        ModelShape shape;
        shape.layers.assign(1, {.heads = 2, .kv_heads = 1, .key_dim = dim, .value_dim = dim});
        auto method = open(spec);
        EXPECT_TRUE(method->accept(shape));
        const SidePlan v = method->initial(Side::value, 0, 0, dim), k = method->initial(Side::key, 0, 0, dim);
        StoreSpec key = k.store;
        return 0.5 * (layout(v.store, Side::value, dim).true_bits() +
                      8.0 * worst_page_bytes(key, Side::key, dim, {}) / (128.0 * dim));
    };
    for (const int32_t dim : {64, 128}) {
        double last = 0;
        for (const double asked : {2.25, 2.5, 3.0, 3.3, 4.1, 5.1}) {
            const double got = bits(std::string("mosaic:bits=").append(std::to_string(asked)), dim);
            EXPECT_LE(got, asked);
            EXPECT_GT(got, asked - 0.35);
            EXPECT_GE(got, last);
            last = got;
        }
        EXPECT_LT(bits("mosaic:bits=0.5", dim), 2.1); // the nearest there is
        EXPECT_GT(bits("mosaic:bits=16", dim), 4.7);
    }
}

TEST(Mosaic, AutoIsItsName) {
    EXPECT_EQ(open("auto:bits=2.5")->spec(), "mosaic:bits=2.5,guard=0.3");
    EXPECT_EQ(open("auto:bits=2.5,guard=0")->spec(), "mosaic:bits=2.5");
    EXPECT_EQ(open("auto")->spec(), "mosaic:bits=3,guard=0.3");
    EXPECT_NE(open_method("auto:bits=hello").status().message().find("bits"), std::string::npos);
}

TEST(Mosaic, PairsThatContradictAreRefused) {
    for (const char* spec : {"mosaic:k=2.1", "mosaic:v=2.25", "mosaic:bits=3,k=2", "mosaic:fit=0,v=2.5",
                             "mosaic:tiers=0,guard=1", "mosaic:bits=3,tiers=0"}) {
        const auto method = open_method(spec);
        ASSERT_FALSE(method.ok()) << spec;
        EXPECT_NE(method.status().message().find("mosaic"), std::string::npos) << method.status().message();
    }
}

TEST(Mosaic, MeanIsThatOfTheRowsItGets) {
    const auto method = open("mosaic");
    SidePlan plan = method->initial(Side::key, 0, 0, 16);
    EXPECT_EQ(plan.space, KeySpace::centred);
    std::vector<float> rows(size_t(132 * 16));
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = float(i % 16) + (i / 16 % 2 == 0 ? 0.5f : -0.5f);
    PlanInput in;
    in.rows = rows.data();
    in.count = 132;
    in.dim = 16;
    in.front = 4;
    method->freeze(in, &plan);
    for (int32_t d = 0; d < 16; ++d)
        EXPECT_EQ(plan.mean[size_t(d)], float(d));
}

} // namespace
} // namespace kvmosaic
