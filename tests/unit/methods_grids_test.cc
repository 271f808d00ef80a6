// InnerQ, TurboQuant, q8_0 and q4_0: stores, windows, bases, and the values that come back, recomputed by other means.
#include <algorithm>
#include <cmath>
#include <random>

#include "unit/methods_page.h"

namespace kvmosaic {
namespace {

using namespace pages;

constexpr int32_t kDims[] = {64, 80, 96, 128, 256};

std::vector<float> normal_rows(int64_t count, int32_t dim, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> rows(static_cast<size_t>(count * dim));
    for (float& x : rows)
        x = f16_to_f32(f32_to_f16(normal(random)));
    return rows;
}

double to_f16(double x) { return double(f16_to_f32(f32_to_f16(float(x)))); }

// ---- InnerQ ----

TEST(InnerQ, StoresAndWindows) {
    const auto base = open("innerq");
    const SidePlan key = base->initial(Side::key, 0, 0, 128), value = base->initial(Side::value, 0, 0, 128);
    EXPECT_EQ(key.window, (Window{32, 96, 1, 128}));
    EXPECT_EQ(value.window, (Window{32, 96, 32}));
    EXPECT_EQ(key.store.axis, Axis::channels); // the transpose of every other method
    EXPECT_EQ(value.store.axis, Axis::tokens);
    for (const SidePlan* plan : {&key, &value}) {
        EXPECT_EQ(plan->store.kind, StoreKind::grid);
        EXPECT_EQ(plan->store.rule, GridRule::symmetric);
        EXPECT_EQ(plan->store.bits, 3);
        EXPECT_EQ(plan->store.group, 32);
    }
    const auto value_of = [](const char* spec) { return open(spec)->initial(Side::value, 0, 0, 128).store; };
    EXPECT_EQ(value_of("innerq:variant=small").bits, 2);
    EXPECT_EQ(value_of("innerq:variant=small").rule, GridRule::symmetric);
    EXPECT_EQ(value_of("innerq:variant=hybrid").rule, GridRule::hybrid_1bit);
    EXPECT_EQ(value_of("innerq:variant=hybrid").bits, 2);
    EXPECT_EQ(value_of("innerq:variant=hybrid,asym=4level").rule, GridRule::hybrid_4level);
    EXPECT_EQ(open("innerq:variant=hybrid")->initial(Side::key, 0, 0, 128).store.rule, GridRule::symmetric);
    EXPECT_EQ(value_of("innerq:group=8").group, 8);
    EXPECT_TRUE(base->freezes(Side::key));
    EXPECT_FALSE(base->freezes(Side::value));
    EXPECT_FALSE(open("innerq:norm=off")->freezes(Side::key));
}

// A released fault: the raw window of the values falls to 0 .. 31. Here 96 stay, and at most 31 more wait.
TEST(InnerQ, TheValueWindowDoesNotCollapse) {
    const auto method = open("innerq");
    for (const Side side : {Side::key, Side::value}) {
        const Window w = method->initial(side, 0, 0, 64).window;
        int64_t packed = 0;
        for (int64_t rows = 1; rows <= 2000; ++rows) {
            packed = w.packed_after(packed, rows);
            EXPECT_GE(rows - packed, std::min<int64_t>(rows, 96)) << rows;
            EXPECT_LE(rows - packed, 127) << rows;
        }
        EXPECT_GT(packed, 1800);
    }
}

TEST(InnerQ, NormsAreRootsOfTheLargestBeyondTheFront) {
    for (const int32_t dim : kDims) {
        const auto method = open("innerq:front=40");
        std::vector<float> rows = normal_rows(168, dim, uint32_t(dim));
        for (int32_t d = 0; d < dim; ++d)
            rows[size_t(d)] = 1000.0f; // a front row: does not count
        for (int64_t t = 40; t < 168; ++t)
            rows[size_t(t * dim + 3)] = 0.0f; // nothing beyond the front
        rows[size_t(167 * dim + 5)] = -400.0f;
        PlanInput in;
        in.rows = rows.data();
        in.count = 168;
        in.front = 40;
        in.dim = dim;
        SidePlan plan = method->initial(Side::key, 0, 0, dim);
        EXPECT_TRUE(plan.transform.identity());
        method->freeze(in, &plan);
        ASSERT_EQ(plan.transform.scale.size(), size_t(dim));
        for (int32_t d = 0; d < dim; ++d) {
            std::vector<double> column;
            for (int64_t t = 40; t < 168; ++t)
                column.push_back(std::fabs(double(rows[size_t(t * dim + d)])));
            const double most = *std::max_element(column.begin(), column.end());
            EXPECT_NEAR(plan.transform.scale[size_t(d)], d == 3 ? 1.0 : std::sqrt(most), 1e-5) << d;
        }
        EXPECT_NEAR(plan.transform.scale[5], 20.0, 1e-5);
        EXPECT_TRUE(plan.transform.shift.empty());
        SidePlan value = method->initial(Side::value, 0, 0, dim), before = value;
        in.side = Side::value;
        method->freeze(in, &value);
        EXPECT_TRUE(value.transform.identity());
    }
}

// With the norms, a channel 100 times as loud does not drown its neighbours in the group; without, it does.
TEST(InnerQ, NormsHelpTheNeighboursOfALoudChannel) {
    std::vector<float> rows = normal_rows(kPageTokens, 64, 9);
    for (int64_t t = 0; t < kPageTokens; ++t)
        rows[size_t(t * 64 + 7)] *= 100.0f;
    const auto error = [&](const char* spec) {
        const auto method = open(spec);
        SidePlan plan = method->initial(Side::key, 0, 0, 64);
        PlanInput in;
        in.rows = rows.data();
        in.count = kPageTokens;
        in.dim = 64;
        method->freeze(in, &plan);
        const std::vector<float> back = round_trip(plan, Side::key, 64, rows);
        double sum = 0;
        for (int64_t t = 0; t < kPageTokens; ++t)
            for (int32_t d = 0; d < 32; ++d)
                sum += d == 7 ? 0.0 : std::fabs(double(back[size_t(t * 64 + d)] - rows[size_t(t * 64 + d)]));
        return sum;
    };
    EXPECT_LT(error("innerq"), 0.8 * error("innerq:norm=off"));
}

// The vectors of the published Python grids: 3 bits are -3 .. 3 (not -4 .. 3), 2 bits ternary, ties to the asymmetric.
TEST(InnerQ, GridsOfThePythonReference) {
    const auto key = [](std::vector<float> x) {
        x.resize(32, 0.0f);
        const SidePlan plan = open("innerq:norm=off")->initial(Side::key, 0, 0, 32);
        const std::vector<float> back = round_trip(plan, Side::key, 32, repeated(x));
        return std::vector<float>(back.begin(), back.begin() + 4);
    };
    EXPECT_EQ(key({-1, -0.2f, 0.4f, 3}), (std::vector<float>{-1, 0, 0, 3}));
    EXPECT_EQ(key({-3, 3, 0.5f, 1.5f}), (std::vector<float>{-3, 3, 0, 2})); // +max is a level; half to even
    const auto value = [](const char* spec, const std::vector<float>& four) {
        std::vector<float> column;
        for (int32_t t = 0; t < kPageTokens; ++t)
            column.push_back(four[size_t(t) % four.size()]);
        const SidePlan plan = open(spec)->initial(Side::value, 0, 0, 16);
        const std::vector<float> back = round_trip(plan, Side::value, 16, repeated_in_channels(column, 16));
        return std::vector<float>{back[0], back[16], back[32], back[48]};
    };
    EXPECT_EQ(value("innerq:variant=small", {-1, -0.2f, 0.4f, 3}), (std::vector<float>{0, 0, 0, 3}));
    // 1.6 against 2.2 in the sum of errors: symmetric.
    EXPECT_EQ(value("innerq:variant=hybrid", {-1, -0.2f, 0.4f, 3}), (std::vector<float>{0, 0, 0, 3}));
    EXPECT_EQ(value("innerq:variant=hybrid", {1, 3, 3, 1}), (std::vector<float>{1, 3, 3, 1})); // two levels are exact
    EXPECT_EQ(value("innerq:variant=hybrid,asym=4level", {-1, 0, 1, 2}), (std::vector<float>{-1, 0, 1, 2}));
    // Ternary 0 0 0 2 and two levels -1 -1 2 2 are both off by 2: equal sums go to the asymmetric grid.
    EXPECT_EQ(value("innerq:variant=hybrid", {-1, 0, 1, 2}), (std::vector<float>{-1, -1, 2, 2}));
}

TEST(InnerQ, FourLevelsNeverLoseToTwo) {
    for (uint32_t seed = 1; seed < 20; ++seed) {
        const std::vector<float> rows = normal_rows(kPageTokens, 64, seed);
        const auto error = [&](const char* spec) {
            const SidePlan plan = open(spec)->initial(Side::value, 0, 0, 64);
            const std::vector<float> back = round_trip(plan, Side::value, 64, rows);
            double sum = 0;
            for (size_t i = 0; i < rows.size(); ++i)
                sum += std::fabs(double(back[i]) - double(rows[i]));
            return sum;
        };
        const double two = error("innerq:variant=hybrid"), four = error("innerq:variant=hybrid,asym=4level");
        EXPECT_LE(four, two * 1.001);
        EXPECT_LE(two, error("innerq:variant=small") * 1.001);
    }
}

// ---- TurboQuant ----

TEST(TurboQuant, StoresAndWindows) {
    const ModelShape shape{std::vector<LayerShape>(6, LayerShape{8, 2, 128, 128}), "m"};
    const auto method = open("turboquant");
    ASSERT_TRUE(method->accept(shape).ok());
    for (int32_t layer = 0; layer < 6; ++layer) {
        const SidePlan key = method->initial(Side::key, layer, 0, 128),
                       value = method->initial(Side::value, layer, 0, 128);
        const bool raw = layer < 2 || layer > 3;
        EXPECT_EQ(key.store.kind, raw ? StoreKind::raw : StoreKind::codebook) << layer;
        EXPECT_EQ(value.store.kind, raw ? StoreKind::raw : StoreKind::grid) << layer;
        EXPECT_EQ(key.window, (raw ? Window{} : Window{0, 0, 1})) << layer;
        EXPECT_EQ(value.window, key.window) << layer;
        if (raw) continue;
        EXPECT_EQ(key.transform.hadamard, 128);
        EXPECT_TRUE(value.transform.identity());
        EXPECT_EQ(key.store.rule, GridRule::codebook_norm);
        EXPECT_EQ(key.store.bits, 4);
        EXPECT_EQ(key.store.group, 128);
        EXPECT_EQ(value.store.rule, GridRule::asym);
        EXPECT_EQ(value.store.bits, 4);
        EXPECT_EQ(value.store.group, 128);
    }
    // Only layers that keep K/V count: of 1, 2, 4 and 5 the first and the last are raw.
    ModelShape gaps = shape;
    gaps.layers[0] = gaps.layers[3] = LayerShape{};
    const auto one = open("turboquant:skip=1");
    ASSERT_TRUE(one->accept(gaps).ok());
    for (const auto& [layer, raw] : {std::pair(1, true), std::pair(2, false), std::pair(4, false), std::pair(5, true)})
        EXPECT_EQ(one->initial(Side::key, layer, 0, 128).store.kind == StoreKind::raw, raw) << layer;
    const auto none = open("turboquant:skip=0");
    ASSERT_TRUE(none->accept(shape).ok());
    EXPECT_EQ(none->initial(Side::key, 0, 0, 128).store.kind, StoreKind::codebook);
    EXPECT_EQ(none->initial(Side::key, 5, 0, 128).store.kind, StoreKind::codebook);
    EXPECT_EQ(none->initial(Side::key, 0, 0, 80).store.group, 80);
}

// Lloyd and Max: each level is the mean of a normal variable between the midpoints to its neighbours. By Simpson's
// rule.
TEST(TurboQuant, LevelsAreOptimalForANormalVariable) {
    const auto density = [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); };
    const double published[] = {0.3634, 0.1175, 0.03455, 0.00950};
    for (int bits = 1; bits <= 4; ++bits) {
        const SidePlan plan = open("turboquant:skip=0,k=" + std::to_string(bits))->initial(Side::key, 0, 0, 128);
        const int n = 1 << bits;
        double loss = 0;
        for (int i = 0; i < n; ++i) {
            const float* level = plan.store.book;
            EXPECT_EQ(level[i], -level[n - 1 - i]);
            const double lo = i == 0 ? -12.0 : 0.5 * (double(level[i - 1]) + double(level[i]));
            const double hi = i == n - 1 ? 12.0 : 0.5 * (double(level[i]) + double(level[i + 1]));
            const int steps = 20000;
            double mass = 0, mean = 0;
            for (int j = 0; j <= steps; ++j) {
                const double x = lo + (hi - lo) * j / steps, w = j == 0 || j == steps ? 1 : j % 2 ? 4 : 2;
                mass += w * density(x);
                mean += w * density(x) * x;
                loss += w * density(x) * (x - double(level[i])) * (x - double(level[i])) * (hi - lo) / steps / 3;
            }
            EXPECT_NEAR(mean / mass, double(level[i]), 2e-7) << bits << " " << i;
        }
        EXPECT_NEAR(loss, published[bits - 1], 0.6 * std::pow(10.0, -4 - (bits > 2))) << bits;
    }
}

TEST(TurboQuant, DecodedKeysHaveTheirNormAndLittleError) {
    for (const int32_t dim : kDims) {
        for (int bits = 1; bits <= 4; ++bits) {
            std::vector<float> rows = normal_rows(kPageTokens, dim, 3);
            for (int64_t t = 0; t < kPageTokens; ++t)
                for (int32_t d = 0; d < dim; ++d)
                    rows[size_t(t * dim + d)] *=
                        d % 13 == 4 ? 12.0f : 1.0f; // outlier channels that the rotation spreads
            const SidePlan plan = open("turboquant:skip=0,k=" + std::to_string(bits))->initial(Side::key, 0, 0, dim);
            const std::vector<float> back = round_trip(plan, Side::key, dim, rows);
            double error = 0, power = 0;
            for (int64_t t = 0; t < kPageTokens; ++t) {
                double a = 0, b = 0;
                for (int32_t d = 0; d < dim; ++d) {
                    const double x = rows[size_t(t * dim + d)], y = back[size_t(t * dim + d)];
                    a += x * x, b += y * y, error += (x - y) * (x - y), power += x * x;
                }
                EXPECT_NEAR(std::sqrt(b / a), 1.0, 1e-3) << dim << " " << bits; // the scale is rounded to f16
            }
            const double ideal[] = {0.3634, 0.1175, 0.03455, 0.0095};
            EXPECT_LT(error / power, 1.5 * ideal[bits - 1]) << dim << " " << bits;
            EXPECT_GT(error / power, 0.6 * ideal[bits - 1]) << dim << " " << bits;
        }
    }
}

// ---- llama.cpp's formats ----

TEST(LlamaFormats, StoresAndWindows) {
    for (const Side side : {Side::key, Side::value}) {
        const SidePlan eight = open("q8_0")->initial(side, 0, 0, 128), four = open("q4_0")->initial(side, 0, 0, 128);
        EXPECT_EQ(eight.window, (Window{0, 0, 1}));
        EXPECT_EQ(four.window, (Window{0, 0, 1}));
        EXPECT_EQ(eight.store.axis, Axis::channels);
        EXPECT_EQ(four.store.axis, Axis::channels);
        EXPECT_EQ(eight.store.group, 32);
        EXPECT_EQ(four.store.group, 32);
        EXPECT_EQ(layout(eight.store, side, 128).true_bits(), 8.5);
        EXPECT_EQ(layout(four.store, side, 128).true_bits(), 4.5);
        EXPECT_TRUE(four.transform.identity());
        EXPECT_EQ(open("q4_0:hadamard=1")->initial(side, 0, 0, 80).transform.hadamard, 80);
        EXPECT_EQ(open("q8_0:hadamard=1")->initial(side, 0, 0, 128).transform.hadamard, 128);
    }
}

// ggml's definitions of the blocks, in double precision: every value on the grid and within half a step.
TEST(LlamaFormats, BlocksAreThoseOfGgml) {
    for (const int32_t dim : kDims) {
        for (const Side side : {Side::key, Side::value}) {
            const std::vector<float> rows = normal_rows(kPageTokens, dim, uint32_t(dim) + 5);
            const std::vector<float> eight = round_trip(open("q8_0")->initial(side, 0, 0, dim), side, dim, rows);
            const std::vector<float> four = round_trip(open("q4_0")->initial(side, 0, 0, dim), side, dim, rows);
            for (int64_t t = 0; t < kPageTokens; ++t) {
                for (int32_t lo = 0; lo < dim; lo += 32) {
                    const float* x = rows.data() + t * dim + lo;
                    const int32_t n = std::min(32, dim - lo);
                    double largest = 0, most = 0;
                    for (int32_t i = 0; i < n; ++i) {
                        if (std::fabs(double(x[i])) > most || (std::fabs(double(x[i])) == most && x[i] > 0))
                            largest = x[i];
                        most = std::max(most, std::fabs(double(x[i])));
                    }
                    const double d8 = to_f16(most / 127), d4 = to_f16(largest / -8);
                    for (int32_t i = 0; i < n; ++i) {
                        const double y8 = eight[size_t(t * dim + lo + i)], y4 = four[size_t(t * dim + lo + i)];
                        const double q8 = y8 / d8, q4 = y4 / d4;
                        ASSERT_NEAR(q8, std::round(q8), 1e-4);
                        ASSERT_LE(std::fabs(q8), 127.001);
                        ASSERT_NEAR(q4, std::round(q4), 1e-4);
                        ASSERT_GE(q4, -8.001);
                        ASSERT_LE(q4, 7.001);
                        ASSERT_LE(std::fabs(y8 - double(x[i])), 0.5 * d8 * 1.001 + 0.001 * most);
                        // Opposite the largest value the grid ends one step early.
                        const bool cut = double(x[i]) / d4 > 7.5;
                        ASSERT_LE(std::fabs(y4 - double(x[i])), (cut ? 1.0 : 0.5) * std::fabs(d4) * 1.01);
                    }
                }
            }
        }
    }
}

TEST(LlamaFormats, TheLargestValueIsALevel) {
    std::vector<float> x(32, 0.25f);
    x[9] = -4.0f;
    const std::vector<float> back = round_trip(open("q4_0")->initial(Side::key, 0, 0, 32), Side::key, 32, repeated(x));
    EXPECT_EQ(back[9], -4.0f);
    EXPECT_EQ(back[8], 0.0f); // half a step of 0.5: to even
    x[9] = 4.0f;
    EXPECT_EQ(round_trip(open("q4_0")->initial(Side::key, 0, 0, 32), Side::key, 32, repeated(x))[9], 4.0f);
}

// A rotation spreads what one channel has over all of them: 4 bits then lose far less next to an outlier channel.
TEST(LlamaFormats, HadamardHelpsNextToAnOutlier) {
    for (const int32_t dim : kDims) {
        std::vector<float> rows = normal_rows(kPageTokens, dim, 8);
        for (int64_t t = 0; t < kPageTokens; ++t)
            rows[size_t(t * dim + 5)] += 30.0f;
        const auto error = [&](const char* spec) {
            const std::vector<float> back = round_trip(open(spec)->initial(Side::key, 0, 0, dim), Side::key, dim, rows);
            double sum = 0;
            for (int64_t t = 0; t < kPageTokens; ++t)
                for (int32_t d = 0; d < 32; ++d)
                    sum += std::pow(double(back[size_t(t * dim + d)]) - double(rows[size_t(t * dim + d)]), 2);
            return sum;
        };
        EXPECT_LT(error("q4_0:hadamard=1"), 0.7 * error("q4_0")) << dim;
    }
}

} // namespace
} // namespace kvmosaic
