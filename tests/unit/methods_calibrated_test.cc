// KVTuner, SKVQ, RotateKV and KVQuant: what they take from their files and what comes out, recomputed by other means.
#include <bit>
#include <cmath>
#include <set>

#include "rig.h"
#include "unit/methods_calibration.h"
#include "unit/methods_page.h"

namespace kvmosaic {
namespace {

using pages::open;
using pages::round_trip;

ModelShape model(int32_t layers, int32_t heads, int32_t kv_heads, int32_t dim, bool halves = true) {
    ModelShape shape = test::one_layer(heads, kv_heads, dim, dim, layers);
    for (LayerShape& l : shape.layers)
        l.rope.halves = halves;
    return shape;
}

std::unique_ptr<Method> opened(const std::string& spec, const ModelShape& shape) {
    auto method = open(calibrations::with_file(spec, shape));
    EXPECT_TRUE(method->accept(shape).ok());
    return method;
}

// ---- KVTuner ----

TEST(KvTuner, WidthsByLayer) {
    const ModelShape shape = model(4, 8, 2, 128);
    for (const char* base : {"kivi", "token"}) {
        const bool token = base[0] == 't';
        const auto method = opened(std::string("kvtuner:base=") + base, shape);
        for (int32_t i = 0; i < 4; ++i) {
            const SidePlan key = method->initial(Side::key, i, 1, 128), value = method->initial(Side::value, i, 1, 128);
            EXPECT_EQ(key.store.bits, i % 2 ? 4 : 8);
            EXPECT_EQ(value.store.bits, i % 2 ? 2 : 4);
            EXPECT_EQ(key.store.rule, GridRule::integer);
            EXPECT_EQ(value.store.rule, GridRule::integer);
            EXPECT_EQ(key.store.axis, token ? Axis::channels : Axis::tokens);
            EXPECT_EQ(value.store.axis, Axis::channels);
            EXPECT_EQ(key.store.group, token ? 128 : 32);
            EXPECT_EQ(value.store.group, token ? 128 : 32);
            EXPECT_EQ(key.window, (token ? Window{0, 0, 1} : Window{0, 0, 32}));
            EXPECT_EQ(value.window, (token ? Window{0, 0, 1} : Window{0, 32, 1}));
            // The label leaves out one bit of metadata at groups of 32, an eighth or so at whole heads.
            EXPECT_EQ(layout(key.store, Side::key, 128).true_bits(), key.store.bits + (token ? 0.25 : 1.0));
        }
    }
}

// ---- SKVQ ----

TEST(Skvq, StoresAndWindows) {
    const ModelShape shape = model(2, 8, 4, 128);
    const auto method = opened("skvq:k=3,v=1.5,group=32", shape);
    const SidePlan key = method->initial(Side::key, 1, 2, 128), value = method->initial(Side::value, 1, 2, 128);
    EXPECT_EQ(key.window, (Window{5, 128, 1}));
    EXPECT_EQ(value.window, key.window);
    EXPECT_EQ(key.store.bits, 3);
    EXPECT_EQ(key.store.levels, 0);
    EXPECT_EQ(value.store.bits, 2);
    EXPECT_EQ(value.store.levels, 3);
    for (const SidePlan* plan : {&key, &value}) {
        EXPECT_EQ(plan->store.rule, GridRule::asym);
        EXPECT_EQ(plan->store.params, ParamType::f8e4m3);
        EXPECT_EQ(plan->store.clip, 0.92f);
        EXPECT_EQ(plan->store.axis, Axis::channels);
        EXPECT_EQ(plan->store.edge_groups, 4);
        EXPECT_EQ(plan->transform.joined, 1);
    }
    const Calibration file = calibrations::make("skvq", shape);
    for (const Side side : {Side::key, Side::value}) {
        const SidePlan& plan = side == Side::key ? key : value;
        const auto& order = *file.find("order32", 1, 2, side);
        const auto& edges = *file.find("edges32", 1, 2, side);
        EXPECT_TRUE(std::equal(order.begin(), order.end(), plan.transform.order.begin(), plan.transform.order.end()));
        EXPECT_TRUE(std::equal(edges.begin(), edges.end(), plan.store.edges));
    }
    EXPECT_NE(method->initial(Side::key, 1, 1, 128).transform.order, key.transform.order); // each head its own
    EXPECT_EQ(opened("skvq", model(1, 8, 4, 64))->initial(Side::key, 0, 0, 64).store.edge_groups, 1); // at least one
}

TEST(Skvq, ClustersAcrossHeadsAreCutWherePagesEnd) {
    for (const int32_t dim : {64, 80, 128}) {
        const ModelShape shape = model(1, 8, 4, dim);
        const auto method = opened("skvq:across=1,group=64", shape);
        const Calibration file = calibrations::make("skvq", shape);
        const auto& edges = *file.find("edges64x", 0, -1, Side::value);
        std::set<int32_t> want(edges.begin(), edges.end()), seen;
        for (int32_t h = 0; h <= 4; ++h)
            want.insert(h * dim);
        for (int32_t h = 0; h < 4; ++h) {
            const SidePlan plan = method->initial(Side::value, 0, h, dim);
            EXPECT_TRUE(validate(plan.store, Side::value, dim).ok());
            EXPECT_EQ(plan.transform.joined, 4);
            ASSERT_EQ(plan.transform.order.size(), size_t(4 * dim));
            for (int32_t g = 0; g <= plan.store.edge_groups; ++g)
                seen.insert(h * dim + plan.store.edges[g]);
        }
        EXPECT_EQ(seen, want) << dim;
    }
}

// Every cluster of a token has its own clipped range; a value lies within half a step of the grid or at its end.
TEST(Skvq, ValuesLieOnTheirClustersGrid) {
    const ModelShape shape = model(1, 4, 1, 96);
    const auto method = opened("skvq:group=32,params=f16,k=2", shape);
    const SidePlan plan = method->initial(Side::key, 0, 0, 96);
    const test::Text text(shape.layers[0], 128, 5);
    const std::vector<float> back = round_trip(plan, Side::key, 96, text.k.x);
    for (int64_t t = 0; t < 128; ++t) {
        for (int32_t g = 0; g < plan.store.edge_groups; ++g) {
            double low = 1e30, high = -1e30;
            for (int32_t i = plan.store.edges[g]; i < plan.store.edges[g + 1]; ++i) {
                const double x = text.k.at(t, 0)[plan.transform.order[size_t(i)]];
                low = std::min(low, x), high = std::max(high, x);
            }
            const double s = 0.92 * (high - low) / 3;
            for (int32_t i = plan.store.edges[g]; i < plan.store.edges[g + 1]; ++i) {
                const int32_t c = plan.transform.order[size_t(i)];
                const double x = text.k.at(t, 0)[c], y = back[size_t(t * 96 + c)];
                const double end = std::max(0.92 * low - x, x - 0.92 * high); // beyond the clipped range
                ASSERT_LE(std::fabs(y - x), std::max(s / 2, end) * 1.01 + 0.01) << t << " " << c;
                ASSERT_GE(y, 0.92 * low - 0.01);
                ASSERT_LE(y, 0.92 * high + 0.01);
            }
        }
    }
}

// ---- RotateKV ----

TEST(RotateKv, StoresWindowsAndJoinedHeads) {
    struct Case {
        int32_t kv_heads, together;
    };
    for (const Case c : {Case{1, 1}, Case{2, 2}, Case{3, 1}, Case{4, 4}, Case{6, 2}, Case{8, 4}}) {
        for (const int32_t dim : {64, 80, 128, 256}) {
            const ModelShape shape = model(2, c.kv_heads * 2, c.kv_heads, dim);
            const auto method = opened("rotatekv", shape);
            const SidePlan key = method->initial(Side::key, 1, 0, dim), value = method->initial(Side::value, 1, 0, dim);
            EXPECT_EQ(key.transform.joined, c.kv_heads);
            EXPECT_EQ(key.transform.hadamard, c.together * dim);
            EXPECT_EQ(key.transform.order.size(), size_t(c.kv_heads * dim));
            EXPECT_EQ(key.space, KeySpace::pre_rope);
            EXPECT_EQ(key.store.group, std::min(dim, 128));
            EXPECT_EQ(value.transform.joined, 1);
            EXPECT_EQ(value.transform.hadamard, dim);
            EXPECT_TRUE(value.transform.order.empty());
            EXPECT_EQ(value.store.group, dim);
            for (const SidePlan* plan : {&key, &value}) {
                EXPECT_EQ(plan->store.rule, GridRule::integer);
                EXPECT_EQ(plan->store.bits, 2);
                EXPECT_EQ(plan->store.clip, 0.8f);
                EXPECT_EQ(plan->pins, 20);
                EXPECT_EQ(plan->window, (Window{0, 0, 1, 128}));
            }
        }
    }
    const ModelShape shape = model(1, 4, 2, 64);
    EXPECT_EQ(opened("rotatekv:bits=3", shape)->initial(Side::key, 0, 0, 64).store.clip, 1.0f);
    EXPECT_EQ(opened("rotatekv:bits=4", shape)->initial(Side::key, 0, 0, 64).store.clip, 1.0f);
    EXPECT_FALSE(opened("rotatekv:pins=0", shape)->freezes(Side::key));
}

TEST(RotateKv, TheWidestRowsArePinned) {
    const ModelShape shape = model(1, 4, 2, 64);
    const auto method = opened("rotatekv:pins=4,front=8", shape);
    std::vector<float> rows(136 * 64, 1.0f);
    const auto widen = [&](int64_t row, float low, float high) {
        rows[size_t((8 + row) * 64 + 3)] = low;
        rows[size_t((8 + row) * 64 + 40)] = high;
    };
    for (int64_t row = 0; row < 128; ++row)
        widen(row, 0.0f, 1.0f);
    widen(-3, -100.0f, 100.0f); // a front row is raw anyway
    widen(90, -2.0f, 4.0f);
    widen(5, -1.0f, 5.0f); // as wide
    widen(127, 0.0f, 50.0f);
    widen(60, 99.0f, 100.0f); // loud and not that wide: 99
    PlanInput in;
    in.rows = rows.data();
    in.count = 136;
    in.front = 8;
    in.dim = 64;
    for (const Side side : {Side::key, Side::value}) {
        SidePlan plan = method->initial(side, 0, 0, 64);
        in.side = side;
        method->freeze(in, &plan);
        EXPECT_EQ(plan.pinned, (std::vector<uint16_t>{5, 60, 90, 127}));
    }
    const auto three = opened("rotatekv:pins=3,front=8", shape);
    SidePlan plan = three->initial(Side::key, 0, 0, 64);
    three->freeze(in, &plan);
    EXPECT_EQ(plan.pinned, (std::vector<uint16_t>{5, 60, 127})); // the earlier of two that are as wide
    const auto all = opened("rotatekv:pins=128,front=8", shape);
    plan = all->initial(Side::key, 0, 0, 64);
    all->freeze(in, &plan);
    EXPECT_EQ(plan.pinned.size(), 128u);
}

// A vector before the rotation: pair (a, b) turned back by the angle of its position.
std::vector<double> turned(const Rope& rope, const float* x, int32_t dim, double position) {
    std::vector<double> y(x, x + dim);
    for (int32_t i = 0; i < rope.rotary / 2; ++i) {
        const int32_t a = rope.halves ? i : 2 * i, b = rope.halves ? i + rope.rotary / 2 : 2 * i + 1;
        const double angle = position * std::pow(double(rope.base), -2.0 * i / rope.rotary);
        y[size_t(a)] = std::cos(angle) * double(x[a]) - std::sin(angle) * double(x[b]);
        y[size_t(b)] = std::sin(angle) * double(x[a]) + std::cos(angle) * double(x[b]);
    }
    return y;
}

// Walsh-Hadamard by its definition: entry (i, j) is the parity of the common bits of i and j.
std::vector<double> walsh(const std::vector<double>& x, size_t at, size_t n) {
    std::vector<double> y = x;
    for (size_t i = 0; i < n; ++i) {
        y[at + i] = 0;
        for (size_t j = 0; j < n; ++j)
            y[at + i] += (std::popcount(i & j) % 2 ? -1.0 : 1.0) * x[at + j] / std::sqrt(double(n));
    }
    return y;
}

// What Cache::decode shows of packed keys, against the whole path in double precision.
TEST(RotateKv, DecodedKeysEqualAnIndependentRecomputation) {
    for (const bool halves : {false, true}) {
        const int32_t kv_heads = 6, dim = 64; // two heads at a time are rotated together, all six are sorted
        const ModelShape shape = model(1, 12, kv_heads, dim, halves);
        test::Text text(shape.layers[0], 200, 6);
        for (float& x : text.k.x)
            x = f16_to_f32(f32_to_f16(x));
        const auto cache = test::make(shape, "rotatekv:bits=3");
        test::feed(*cache, text, 0, 200);
        const Rope& rope = shape.layers[0].rope;
        const auto order = *calibrations::make("rotatekv", shape).find("order", 0, -1, Side::key);
        std::vector<float> got(size_t(kv_heads) * 200 * dim);
        for (int32_t h = 0; h < kv_heads; ++h)
            cache->decode(0, 0, h, Side::key, 0, 200, got.data() + h * 200 * dim);
        int64_t exact = 0, near = 0, far = 0;
        for (int64_t t = 0; t < 200; ++t) {
            std::vector<double> joined;
            for (int32_t h = 0; h < kv_heads; ++h) {
                const std::vector<double> back = turned(rope, text.k.at(t, h), dim, -double(t));
                joined.insert(joined.end(), back.begin(), back.end());
            }
            for (size_t at = 0; at < joined.size(); at += size_t(2 * dim))
                joined = walsh(joined, at, size_t(2 * dim));
            std::vector<double> decoded = joined;
            for (int32_t page = 0; page < kv_heads; ++page) {
                double low = 1e30, high = -1e30;
                for (int32_t i = 0; i < dim; ++i) {
                    const double x = joined[size_t(order[size_t(page * dim + i)])];
                    low = std::min(low, x), high = std::max(high, x);
                }
                const double s = double(f16_to_f32(f32_to_f16(float((high - low) / 7)))),
                             zero = std::nearbyint(low / s);
                for (int32_t i = 0; i < dim; ++i) {
                    double& x = decoded[size_t(order[size_t(page * dim + i)])];
                    x = s * (zero + std::clamp(std::nearbyint(x / s - zero), 0.0, 7.0));
                }
            }
            for (size_t at = 0; at < decoded.size(); at += size_t(2 * dim))
                decoded = walsh(decoded, at, size_t(2 * dim));
            for (int32_t h = 0; h < kv_heads; ++h) {
                const std::vector<float> one(decoded.begin() + h * dim, decoded.begin() + (h + 1) * dim);
                const std::vector<double> want = turned(rope, one.data(), dim, double(t));
                const float* row = got.data() + (h * 200 + t) * dim;
                const bool pinned = std::equal(row, row + dim, text.k.at(t, h)); // raw to the bit
                exact += pinned;
                EXPECT_TRUE(!pinned || t < 128);
                for (int32_t d = 0; d < dim && !pinned; ++d)
                    ++(std::fabs(double(row[d]) - want[size_t(d)]) < 1e-3 ? near : far);
            }
        }
        EXPECT_EQ(exact, 20 * kv_heads); // the pinned rows, and only they
        EXPECT_LT(far, near / 100);      // a value at the border of two codes may fall to the other side
    }
}

// ---- KVQuant ----

TEST(KvQuant, StoresAndWindows) {
    const ModelShape shape = model(2, 8, 2, 128);
    const Calibration file = calibrations::make("kvquant", shape);
    const auto method = opened("kvquant", shape);
    const SidePlan key = method->initial(Side::key, 1, 1, 128), value = method->initial(Side::value, 1, 1, 128);
    EXPECT_EQ(key.window, (Window{1, 0, 1}));
    EXPECT_EQ(value.window, key.window);
    EXPECT_EQ(key.space, KeySpace::pre_rope);
    EXPECT_EQ(key.store.rule, GridRule::codebook_fixed);
    EXPECT_EQ(value.store.rule, GridRule::codebook_range);
    EXPECT_EQ(key.transform.shift, *file.find("shift", 1, 1, Side::key));
    EXPECT_EQ(key.transform.scale, *file.find("scale", 1, 1, Side::key));
    EXPECT_TRUE(value.transform.identity());
    for (const Side side : {Side::key, Side::value}) {
        const SidePlan& plan = side == Side::key ? key : value;
        const auto& book = *file.find("book3", 1, -1, side);
        EXPECT_TRUE(std::equal(book.begin(), book.end(), plan.store.book));
        EXPECT_EQ(plan.store.bits, 3);
        EXPECT_EQ(plan.store.group, 128);
        EXPECT_EQ(plan.store.outliers, 1);
    }
    for (const auto& [spec, dim, k] :
         {std::tuple("kvquant:outliers=0", 128, 0), std::tuple("kvquant", 64, 1), std::tuple("kvquant", 256, 3),
          std::tuple("kvquant:outliers=0.05", 80, 4), std::tuple("kvquant:outliers=0.25", 512, 128)})
        EXPECT_EQ(opened(spec, model(1, 2, 1, dim))->initial(Side::key, 0, 0, dim).store.outliers, k) << spec << dim;
}

TEST(KvQuant, DecodedRowsEqualAnIndependentRecomputation) {
    for (const int32_t dim : {64, 80}) {
        const ModelShape shape = model(1, 4, 2, dim, dim == 80);
        test::Text text(shape.layers[0], 150, 7);
        for (std::vector<float>* rows : {&text.k.x, &text.v.x})
            for (float& x : *rows)
                x = f16_to_f32(f32_to_f16(x));
        const auto cache = test::make(shape, "kvquant:outliers=0.05"); // 3 of 64, 4 of 80
        test::feed(*cache, text, 0, 150);
        const Calibration file = calibrations::make("kvquant", shape);
        const auto nearest = [&](Side side, double x) {
            double best = 1e30;
            for (const float level : *file.find("book3", 0, -1, side))
                if (std::fabs(double(level) - x) < std::fabs(best - x)) best = double(level);
            return best;
        };
        const auto apart = size_t(std::lround(0.05 * dim));
        int64_t near = 0, far = 0;
        for (int32_t h = 0; h < 2; ++h) {
            const auto& shift = *file.find("shift", 0, h, Side::key);
            const auto& scale = *file.find("scale", 0, h, Side::key);
            std::vector<float> k(size_t(150 * dim)), v = k;
            cache->decode(0, 0, h, Side::key, 0, 150, k.data());
            cache->decode(0, 0, h, Side::value, 0, 150, v.data());
            for (int64_t t = 1; t < 150; ++t) {
                std::vector<double> x = turned(shape.layers[0].rope, text.k.at(t, h), dim, -double(t));
                std::vector<std::pair<double, size_t>> beyond;
                for (size_t d = 0; d < x.size(); ++d) {
                    x[d] = (x[d] - double(shift[d])) / double(scale[d]);
                    if (std::fabs(x[d]) > 1) beyond.push_back({-std::fabs(x[d]), d});
                }
                std::sort(beyond.begin(), beyond.end());
                beyond.resize(std::min(beyond.size(), apart));
                std::vector<float> y(x.size());
                for (size_t d = 0; d < x.size(); ++d) {
                    const bool kept = std::any_of(beyond.begin(), beyond.end(), [&](auto& b) { return b.second == d; });
                    y[d] = float((kept ? x[d] : nearest(Side::key, x[d])) * double(scale[d]) + double(shift[d]));
                }
                const std::vector<double> want = turned(shape.layers[0].rope, y.data(), dim, double(t));
                for (size_t d = 0; d < x.size(); ++d)
                    ++(std::fabs(double(k[size_t(t * dim) + d]) - want[d]) < 0.02 ? near : far);

                std::vector<std::pair<float, size_t>> sorted; // values: largest, smallest, largest, ... in turn
                for (size_t d = 0; d < x.size(); ++d)
                    sorted.push_back({text.v.at(t, h)[d], d});
                std::sort(sorted.begin(), sorted.end());
                const size_t below = apart / 2, above = apart - below;
                const double low = sorted[below].first, high = sorted[sorted.size() - above - 1].first;
                for (size_t i = 0; i < sorted.size(); ++i) {
                    const double value = sorted[i].first, got = v[size_t(t * dim) + sorted[i].second];
                    if (value == low || value == high) continue; // one of equal values may be kept apart
                    if (i < below || i >= sorted.size() - above) {
                        EXPECT_EQ(got, value);
                        continue;
                    }
                    const double middle = (high + low) / 2, half = (high - low) / 2;
                    const double expect = middle + half * nearest(Side::value, (value - middle) / half);
                    ++(std::fabs(got - expect) < 0.01 ? near : far);
                }
            }
        }
        EXPECT_LT(far, near / 100) << dim;
        EXPECT_GT(near, 30000) << dim;
    }
}

// Keys from before a rotation that nobody knows cannot be packed; said when the cache is made.
TEST(KvQuant, NeedsTheRotation) {
    ModelShape shape = model(1, 4, 2, 64);
    shape.layers[0].rope.known = false;
    for (const char* name : {"kvquant", "rotatekv"}) {
        const auto cache = Cache::create(shape, calibrations::with_file(name, shape));
        ASSERT_FALSE(cache.ok()) << name;
        EXPECT_EQ(cache.status().code(), StatusCode::unsupported);
        EXPECT_NE(cache.status().message().find("layer 0"), std::string::npos) << cache.status().message();
    }
}

} // namespace
} // namespace kvmosaic
