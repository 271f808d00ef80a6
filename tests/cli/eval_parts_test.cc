// Parts of src/eval that need no model: sizes at lengths, answers, clusters, calibration of made-up activations.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "eval/calibrate.h"
#include "eval/cluster.h"
#include "eval/lengths.h"
#include "eval/passkey.h"

namespace kvmosaic::eval {
namespace {

std::vector<float> normal_values(int n, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x)
        v = normal(engine);
    return x;
}

// Sizes at lengths that were not run are those of caches of that length; tiers take the mean of the pages that were.
TEST(Lengths, MeetACacheOfThatLength) {
    ModelShape shape;
    shape.layers = {{4, 2, 64, 64}, {}, {2, 2, 32, 48}};
    const auto filled = [&](const std::string& spec, int64_t rows) {
        auto cache = std::move(*Cache::create(shape, spec));
        std::vector<float> x(size_t(rows) * 256);
        for (size_t i = 0; i < x.size(); ++i)
            x[i] = float((i * 2654435761u >> 8) % 1000) / 500.0f - 1.0f;
        const SeqId names[] = {0};
        std::vector<StepRow> step(static_cast<size_t>(rows));
        for (size_t i = 0; i < step.size(); ++i)
            step[i] = {int32_t(i), names};
        EXPECT_TRUE(cache->begin_step(step).ok());
        for (const int layer : {0, 2}) {
            const LayerShape& l = shape.layers[size_t(layer)];
            cache->write(layer, {x.data(), l.heads * l.key_dim, l.key_dim},
                         {x.data(), l.kv_heads * l.key_dim, l.key_dim},
                         {x.data(), l.kv_heads * l.value_dim, l.value_dim});
        }
        cache->end_step();
        return cache;
    };
    for (const char* spec : {"f16", "kivi:bits=2", "mixkvq:raw_share=0.125,mid_share=0.5"}) {
        const auto made = LengthBits::make(shape, spec, {1000, 2048});
        ASSERT_TRUE(made.ok()) << made.status().message();
        const auto short_one = filled(spec, 700), long_one = filled(spec, 2048);
        EXPECT_NEAR(made->bits(1, *short_one), long_one->footprint().true_bits(), 0.01) << spec;
        EXPECT_NEAR(made->bits(0, *short_one), filled(spec, 1000)->footprint().true_bits(), 0.02) << spec;
    }
    // by threshold, a cache without pages tells nothing
    const auto made = LengthBits::make(shape, "mixkvq", {2048});
    ASSERT_TRUE(made.ok());
    EXPECT_TRUE(std::isnan(made->bits(0, *filled("mixkvq", 50))));
    EXPECT_GT(made->bits(0, *filled("mixkvq", 300)), 2);
    EXPECT_FALSE(LengthBits::make(shape, "nothing", {2048}).ok());
}

// A key is found digit for digit: longer numbers, shorter ones and other spellings are not it.
TEST(Passkey, AnswersAreParsedExactly) {
    for (const char* right : {"12345", " 12345.", "It is 12345, I think", "x12345y", "99 12345", "12345 12345"})
        EXPECT_TRUE(holds_key(right, "12345")) << right;
    for (const char* other : {"", "1234", "123456", "012345", "12 345", "12,345", "54321", "12345678 2345", "1234 5"})
        EXPECT_FALSE(holds_key(other, "12345")) << other;
}

TEST(Clusters, LevelsAreAFixedPointOfLloyd) {
    std::vector<float> values = normal_values(5000, 7);
    for (const int n : {2, 4, 8, 16}) {
        const std::vector<float> levels = levels_of(values, n);
        ASSERT_EQ(levels.size(), size_t(n));
        std::vector<double> sums(levels.size(), 0), counts(levels.size(), 0);
        double error = 0;
        for (const float x : values) {
            size_t best = 0;
            for (size_t k = 1; k < levels.size(); ++k)
                if (std::fabs(x - levels[k]) < std::fabs(x - levels[best])) best = k;
            sums[best] += x, counts[best] += 1, error += double(x - levels[best]) * double(x - levels[best]);
        }
        for (size_t k = 0; k < levels.size(); ++k) {
            if (k > 0) {
                EXPECT_GT(levels[k], levels[k - 1]);
            }
            EXPECT_NEAR(sums[k] / counts[k], double(levels[k]), n < 16 ? 1e-3 : 5e-3) << n << " levels, " << k;
        }
        // the best error for a normal distribution is 0.3634, 0.1175, 0.03454, 0.009497 (Max, 1960)
        const double best[] = {0.3634, 0.1175, 0.03454, 0.009497};
        EXPECT_NEAR(error / 5000 / best[n == 2 ? 0 : n == 4 ? 1 : n == 8 ? 2 : 3], 1, 0.1) << n;
    }
    std::reverse(values.begin(), values.end());
    EXPECT_EQ(levels_of(values, 8), levels_of(normal_values(5000, 7), 8)) << "the order of values must not matter";
    const std::vector<float> few = levels_of({1.0f, 1.0f, 1.0f}, 4);
    for (size_t k = 1; k < few.size(); ++k)
        EXPECT_GT(few[k], few[k - 1]);
}

TEST(Clusters, FindPlantedGroupsAndNeverLeaveOneEmpty) {
    std::vector<float> a, b;
    for (int i = 0; i < 60; ++i) {
        const float noise = float(i * 37 % 11) / 50.0f;
        a.push_back((i % 3 == 0 ? -1.0f : i % 3 == 1 ? -5.0f : -20.0f) + noise);
        b.push_back((i % 3 == 0 ? 1.0f : i % 3 == 1 ? 6.0f : 9.0f) - noise);
    }
    const std::vector<int32_t> own = clusters_of(a, b, 3);
    for (size_t i = 0; i < own.size(); ++i)
        EXPECT_EQ(own[i], own[i % 3]) << i;
    EXPECT_NE(own[0], own[1]);
    EXPECT_NE(own[1], own[2]);
    EXPECT_NE(own[0], own[2]);
    const std::vector<float> same(8, 2.0f); // constant channels: any split will do, but each must exist
    for (const int n : {1, 3, 8}) {
        std::vector<int> sizes(size_t(n), 0);
        for (const int32_t k : clusters_of(same, same, n))
            ++sizes[size_t(k)];
        EXPECT_EQ(std::count(sizes.begin(), sizes.end(), 0), 0) << n;
    }
}

// Keys of 2 heads of 8 channels whose pre-rotation ranges are planted: channel c of head h lies in +-(1 + c) around
// 10 * h + c.
Capture planted(int64_t rows) {
    Capture seen;
    LayerShape l{4, 2, 8, 8};
    l.rope.known = true, l.rope.halves = true, l.rope.rotary = 8;
    seen.shape.layers = {{}, l};
    seen.rows = rows;
    seen.layers.resize(2);
    std::mt19937 engine(3);
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t row = 0; row < rows; ++row) {
        seen.positions.push_back(int32_t(row));
        for (int h = 0; h < 2; ++h) {
            float key[8];
            for (int c = 0; c < 8; ++c) {
                key[c] = float(10 * h + c) + float(1 + c) * uniform(engine);
                seen.layers[1].v.push_back(uniform(engine) * (c < 4 ? 1.0f : 30.0f));
            }
            l.rope.turn(key, double(row));
            seen.layers[1].k.insert(seen.layers[1].k.end(), key, key + 8);
        }
    }
    return seen;
}

TEST(Calibrations, KvquantFindsRangesBeforeTheRotation) {
    Calibration out;
    ASSERT_TRUE(calibrate_kvquant(planted(4000), {}, &out).ok());
    for (int h = 0; h < 2; ++h) {
        const std::vector<float>*shift = out.find("shift", 1, h, Side::key),
              *scale = out.find("scale", 1, h, Side::key);
        ASSERT_TRUE(shift && scale);
        for (int c = 0; c < 8; ++c) {
            EXPECT_NEAR((*shift)[size_t(c)], 10 * h + c, 0.05 * (1 + c)) << h << " " << c;
            EXPECT_NEAR((*scale)[size_t(c)], 0.99 * (1 + c), 0.02 * (1 + c)) << h << " " << c;
        }
    }
    const std::vector<float>* book = out.find("book2", 1, -1, Side::key); // even values: levels at odd eighths
    ASSERT_TRUE(book);
    for (size_t i = 0; i < 4; ++i)
        EXPECT_NEAR((*book)[i], -0.75 + 0.5 * double(i), 0.03);
    EXPECT_EQ(out.find("book4", 1, -1, Side::value)->size(), 16u);
    EXPECT_EQ(out.find("shift", 0, 0, Side::key), nullptr) << "a layer without K/V";
    Capture unknown = planted(100);
    unknown.shape.layers[1].rope.known = false;
    for (const auto& refused : {calibrate_kvquant(unknown, {}, &out), calibrate_rotatekv(unknown, {}, &out)})
        EXPECT_NE(refused.message().find("layer 1"), std::string::npos) << refused.message();
}

TEST(Calibrations, RotatekvSortsTheSumsOfRotatedKeys) {
    const Capture seen = planted(300);
    Calibration out;
    ASSERT_TRUE(calibrate_rotatekv(seen, {}, &out).ok());
    const std::vector<float>& order = *out.find("order", 1, -1, Side::key);
    ASSERT_EQ(order.size(), 16u);
    // by the matrix: entry (i, j) of the Walsh-Hadamard transform is +-1 by the parity of common bits
    const std::vector<float> keys = seen.keys_before_rotation(1);
    std::vector<double> sums(16, 0);
    for (int64_t row = 0; row < 300; ++row)
        for (unsigned i = 0; i < 16; ++i)
            for (unsigned j = 0; j < 16; ++j)
                sums[i] += (std::popcount(i & j) % 2 ? -0.25 : 0.25) * double(keys[size_t(row * 16 + j)]);
    for (size_t i = 1; i < 16; ++i)
        EXPECT_LE(sums[size_t(order[i - 1])], sums[size_t(order[i])]) << i;
}

TEST(Calibrations, SkvqPutsWideAndNarrowChannelsApart) {
    Capture seen = planted(500);
    // values of 64 channels, every third of them wide
    seen.shape.layers[1].value_dim = 64;
    std::vector<float>& v = seen.layers[1].v;
    v = normal_values(500 * 2 * 64, 5);
    for (size_t i = 0; i < v.size(); ++i)
        v[i] *= i % 64 % 3 == 0 ? 40.0f : 1.0f;
    Calibration out;
    ASSERT_TRUE(calibrate_skvq(seen, {}, &out).ok());
    const std::vector<float>&order = *out.find("order32", 1, 1, Side::value),
          &edges = *out.find("edges32", 1, 1, Side::value);
    EXPECT_EQ(edges, (std::vector<float>{0, 42, 64})); // narrow ones first
    for (size_t i = 0; i < 64; ++i)
        EXPECT_EQ(int(order[i]) % 3 == 0, i >= 42) << i;
    const std::vector<float>& across = *out.find("order64x", 1, -1, Side::value);
    EXPECT_EQ(std::accumulate(across.begin(), across.end(), 0.0f), 127.0f * 64);
    EXPECT_EQ(out.find("edges128", 1, 0, Side::key)->size(), 2u) << "one cluster where the head is smaller";
}

} // namespace
} // namespace kvmosaic::eval
