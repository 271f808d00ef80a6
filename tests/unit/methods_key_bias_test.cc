// Bug case A10 at the level of plans: keys with a large constant bias before the rotation, as Qwen2.5 models have in
// their first and last layers. A method with one scale per channel must survive them; one scale across the channels
// of a token cannot, and serves here as the measure.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

constexpr int64_t kRows = 128, kQueries = 64;

struct Bias {
    int32_t pair;
    float key, query;
};

// Keys [kRows][dim] and queries [kQueries][dim], both rotated; queries sit behind the block.
struct Layer {
    int32_t dim;
    Rope rope;
    std::vector<float> keys, queries, abs_sum;

    Layer(int32_t d, bool halves, const std::vector<Bias>& biases) : dim(d) {
        rope.halves = halves;
        rope.rotary = d;
        rope.base = 1e6f;
        std::mt19937 random(11);
        std::normal_distribution<float> normal;
        std::vector<float> key_bias(static_cast<size_t>(d)), query_bias(static_cast<size_t>(d));
        for (const Bias& bias : biases) {
            const auto [a, b] = rope.pair(bias.pair);
            key_bias[size_t(a)] = bias.key;
            key_bias[size_t(b)] = -0.5f * bias.key;
            query_bias[size_t(a)] = bias.query;
        }
        const auto fill = [&](std::vector<float>* x, int64_t rows, int64_t first, const std::vector<float>& add) {
            x->resize(size_t(rows * d));
            for (size_t i = 0; i < x->size(); ++i)
                (*x)[i] = normal(random) + add[i % size_t(d)];
            for (int64_t t = 0; t < rows; ++t)
                rope.turn(x->data() + t * d, double(first + t));
        };
        fill(&keys, kRows, 1000, key_bias);
        fill(&queries, kQueries, 1000 + kRows, query_bias);
        abs_sum.resize(size_t(d));
        for (size_t i = 0; i < queries.size(); ++i)
            abs_sum[i % size_t(d)] += std::abs(queries[i]);
    }

    SidePlan plan(const std::string& spec) const {
        auto method = open_method(spec);
        EXPECT_TRUE(method.ok());
        SidePlan plan = (*method)->initial(Side::key, 0, 0, dim);
        PlanInput in;
        in.rows = keys.data();
        in.count = kRows;
        in.dim = dim;
        in.query = {abs_sum.data(), kQueries};
        (*method)->plan(in, &plan);
        return plan;
    }

    // Mean KL of the softmax over the block against that of the true keys.
    double loss(const std::vector<float>& other) const {
        double sum = 0;
        for (int64_t i = 0; i < kQueries; ++i) {
            std::vector<double> p = softmax(keys, i), r = softmax(other, i);
            for (size_t t = 0; t < p.size(); ++t)
                sum += p[t] > 0 ? p[t] * std::log(p[t] / std::max(r[t], 1e-300)) : 0;
        }
        return sum / double(kQueries);
    }

private:
    std::vector<double> softmax(const std::vector<float>& k, int64_t query) const {
        std::vector<double> s(size_t(kRows), 0.0);
        for (int64_t t = 0; t < kRows; ++t) {
            for (int32_t c = 0; c < dim; ++c) {
                s[size_t(t)] += double(queries[size_t(query * dim + c)]) * double(k[size_t(t * dim + c)]);
            }
            s[size_t(t)] /= std::sqrt(double(dim));
        }
        const double top = *std::max_element(s.begin(), s.end());
        double sum = 0;
        for (double& x : s)
            sum += x = std::exp(x - top);
        for (double& x : s)
            x /= sum;
        return s;
    }
};

// Rounds the n values at x, x + step, ... to an asymmetric grid of `bits`.
void round_group(float* x, int64_t step, int64_t n, int bits) {
    float low = x[0], high = x[0];
    for (int64_t i = 0; i < n; ++i)
        low = std::min(low, x[i * step]), high = std::max(high, x[i * step]);
    const float s = (high - low) / float((1 << bits) - 1);
    for (int64_t i = 0; i < n && s > 0; ++i)
        x[i * step] = low + s * std::nearbyint((x[i * step] - low) / s);
}

std::vector<float> rounded_by(const Layer& layer, const SidePlan& plan) {
    std::vector<float> keys = layer.keys;
    size_t at = 0;
    for (int i = 0; i < plan.ladder.count; ++i) {
        const Tier& tier = plan.ladder.tiers[size_t(i)];
        for (int n = 0; n < tier.channels; ++n, ++at) {
            for (int64_t t = 0; t < kRows && tier.bits < 16; t += 32) {
                round_group(&keys[size_t(t * layer.dim + plan.channels[at])], layer.dim, 32, tier.bits);
            }
        }
    }
    return keys;
}

std::vector<float> rounded_per_token(const Layer& layer, int bits) {
    std::vector<float> keys = layer.keys;
    for (int64_t i = 0; i < kRows * layer.dim; i += 32)
        round_group(&keys[size_t(i)], 1, 32, bits);
    return keys;
}

// The loss with biased keys against the loss of the same scheme without the bias: what the bias costs.
TEST(BugA10, ChannelPlansSurviveABiasThatPerTokenScalesDoNot) {
    for (const int32_t dim : {64, 128}) {
        for (const bool halves : {false, true}) {
            // Slow pairs carry the large biases of real models: they turn little, so all tokens get nearly the same
            // score from them. One faster pair has a moderate one.
            const int32_t last = dim / 2 - 1;
            const Layer plain(dim, halves, {});
            const Layer biased(dim, halves,
                               {{last, 300, 3}, {last - 3, -200, 2}, {last - 6, 120, 1}, {dim / 4, 50, 0.5f}});
            const auto tiered = [](const Layer& layer) { return layer.loss(rounded_by(layer, layer.plan("mixkvq"))); };
            const auto per_token = [](const Layer& layer) { return layer.loss(rounded_per_token(layer, 4)); };
            EXPECT_GT(tiered(plain), 1e-4) << dim; // something is rounded at all
            EXPECT_LT(tiered(biased), 2 * tiered(plain)) << dim;
            EXPECT_GT(per_token(biased), 20 * per_token(plain)) << dim;
            EXPECT_GT(per_token(biased), 5 * tiered(biased)) << dim; // 2 to 4 bits against 4
        }
    }
}

// The wide swing of a biased pair that turns within the block is what the plan must see, on both pair layouts.
TEST(BugA10, BiasedPairsThatTurnGetTheWidestTiers) {
    for (const int32_t dim : {64, 128}) {
        for (const bool halves : {false, true}) {
            const int32_t fast = 2, slow = dim / 2 - 1;
            const Layer layer(dim, halves, {{fast, 80, 0}, {slow, 300, 0}});
            const SidePlan plan = layer.plan("mixkvq:hi=12,mid=1.6");
            ASSERT_GT(plan.ladder.count, 1);
            ASSERT_EQ(plan.ladder.tiers[0], (Tier{16, 2}));
            const auto [a, b] = layer.rope.pair(fast);
            EXPECT_EQ(plan.channels[0], a);
            EXPECT_EQ(plan.channels[1], b);
            const auto [c, e] = layer.rope.pair(slow); // large but constant in the block: an offset, not a range
            const auto first_narrow =
                plan.channels.begin() + (dim - plan.ladder.tiers[size_t(plan.ladder.count - 1)].channels);
            EXPECT_EQ(plan.ladder.tiers[size_t(plan.ladder.count - 1)].bits, 2);
            for (const int32_t channel : {c, e}) {
                EXPECT_NE(std::find(first_narrow, plan.channels.end(), channel), plan.channels.end()) << channel;
            }
        }
    }
}

// At an equal budget the product beats ranking by key scale alone when queries do not look at the widest channels.
TEST(BugA10, QueryAwareBeatsScaleOnlyAtEqualBits) {
    for (const int32_t dim : {64, 128}) {
        Layer layer(dim, true, {{1, 40, 0}, {3, 40, 0}, {5, 8, 6}, {7, 8, 6}});
        const auto mute = [&](int32_t pair) { // the query has nothing in this pair
            const auto [a, b] = layer.rope.pair(pair);
            for (int64_t i = 0; i < kQueries; ++i) {
                layer.queries[size_t(i * dim + a)] *= 0.01f;
                layer.queries[size_t(i * dim + b)] *= 0.01f;
            }
            layer.abs_sum[size_t(a)] *= 0.01f;
            layer.abs_sum[size_t(b)] *= 0.01f;
        };
        mute(1);
        mute(3);
        const std::string shares = "mixkvq:raw_share=" + std::to_string(4.0 / dim) + ",mid_share=0,score=";
        const double product = layer.loss(rounded_by(layer, layer.plan(shares + "product")));
        const double scale = layer.loss(rounded_by(layer, layer.plan(shares + "scale")));
        EXPECT_LT(2 * product, scale) << dim;
    }
}

} // namespace
} // namespace kvmosaic
