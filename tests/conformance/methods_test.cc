// What every method must keep to, run over all registered methods and the extreme values of all their options: a new
// row in methods.def is tested here without a further line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "kvmosaic/method.h"
#include "unit/methods_calibration.h"

namespace kvmosaic {
namespace {

// Every value worth trying: the ends of a range, each choice, the word. A file is no matter of trying.
std::vector<std::string> extremes(const OptionInfo& option) {
    std::vector<std::string> values = option.choices;
    if (option.kind == OptionInfo::Kind::text) return values;
    if (values.empty()) {
        for (const double end : {option.min, option.max}) {
            values.push_back(option.kind == OptionInfo::Kind::integer ? std::to_string(int64_t(end))
                                                                      : std::to_string(end));
        }
    }
    if (!option.word.empty()) values.push_back(option.word);
    return values;
}

// The method without options and with each extreme value of each option, where that can stand alone.
std::vector<std::string> specs_of(const MethodInfo& info) {
    std::vector<std::string> specs = {info.name};
    for (const OptionInfo& option : info.options) {
        for (const std::string& value : extremes(option))
            specs.push_back(info.name + ":" + option.name + "=" + value);
    }
    return specs;
}

class Methods : public testing::TestWithParam<const MethodInfo*> {
protected:
    const MethodInfo& info() const { return *GetParam(); }
    // All specs, for a model of two layers that are alike.
    std::vector<std::unique_ptr<Method>> all(int32_t dim) const {
        std::vector<std::unique_ptr<Method>> opened;
        for (const std::string& spec : specs_of(info())) {
            auto method = open_method(calibrations::with_file(spec, shape_of(dim)));
            if (!method) continue; // a value that its default partner does not allow; see the option pairs
            const Status s = (*method)->accept(shape_of(dim));
            EXPECT_TRUE(s.ok()) << spec << " " << dim << ": " << s.message();
            opened.push_back(std::move(*method));
        }
        EXPECT_FALSE(opened.empty());
        return opened;
    }
    static std::unique_ptr<Method> again(const std::string& spec, int32_t dim) {
        auto method = open_method(spec);
        EXPECT_TRUE(method.ok()) << spec << ": " << method.status().message();
        EXPECT_TRUE((*method)->accept(shape_of(dim)).ok());
        return std::move(*method);
    }
    static ModelShape shape_of(int32_t dim) {
        LayerShape layer{8, 4, dim, dim};
        layer.rope.known = true;
        layer.rope.rotary = dim / 2 * 2;
        return {{layer, layer, layer, layer, layer, layer}, "m"};
    }
};

// The same store, whoever owns its levels and edges.
void expect_same_store(StoreSpec a, StoreSpec b, const std::string& where) {
    if (a.book && b.book) {
        EXPECT_TRUE(std::equal(a.book, a.book + (1 << a.bits), b.book)) << where;
        a.book = b.book;
    }
    if (a.edges && b.edges && a.edge_groups == b.edge_groups) {
        EXPECT_TRUE(std::equal(a.edges, a.edges + a.edge_groups + 1, b.edges)) << where;
        a.edges = b.edges;
    }
    EXPECT_EQ(a, b) << where;
}

void expect_same_basis(const SidePlan& a, const SidePlan& b, const std::string& where) {
    EXPECT_EQ(a.transform.joined, b.transform.joined) << where;
    EXPECT_EQ(a.transform.hadamard, b.transform.hadamard) << where;
    EXPECT_EQ(a.transform.shift, b.transform.shift) << where;
    EXPECT_EQ(a.transform.scale, b.transform.scale) << where;
    EXPECT_EQ(a.transform.order, b.transform.order) << where;
    EXPECT_EQ(a.space, b.space) << where;
    EXPECT_EQ(a.pins, b.pins) << where;
    EXPECT_EQ(a.pinned, b.pinned) << where;
    EXPECT_EQ(a.mean, b.mean) << where;
    EXPECT_EQ(a.ladder, b.ladder) << where;
    EXPECT_EQ(a.channels, b.channels) << where;
}

constexpr int32_t kDims[] = {1, 20, 40, 64, 80, 100, 112, 128, 192, 256, 512};

TEST_P(Methods, DescriptionIsComplete) {
    EXPECT_FALSE(info().summary.empty());
    EXPECT_EQ(info().summary.find('\n'), std::string::npos);
    EXPECT_FALSE(info().paper.empty());
    EXPECT_EQ(info().name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"), std::string::npos);
    std::set<std::string> names;
    for (const OptionInfo& option : info().options) {
        EXPECT_TRUE(names.insert(option.name).second) << option.name;
        EXPECT_EQ(option.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"), std::string::npos);
        EXPECT_FALSE(option.help.empty()) << option.name;
        EXPECT_TRUE(option.kind != OptionInfo::Kind::choice || !option.choices.empty()) << option.name;
        if (option.kind == OptionInfo::Kind::text) continue;
        const std::string spec = info().name + ":" + option.name + "=" + option.fallback;
        EXPECT_TRUE(open_method(calibrations::with_file(spec, shape_of(64))).ok()) << spec;
    }
    EXPECT_EQ(names.count("calib"), info().calibrated ? 1u : 0u); // methods that need no file do not ask for one
    const auto method = std::move(all(64).front());
    EXPECT_EQ(&method->info(), GetParam());
    if (method->initial(Side::key, 2, 0, 64).store.kind == StoreKind::raw) return;
    for (const char* shared : {"front", "keep", "params"}) {
        const bool has_type = !in_planes(method->initial(Side::key, 2, 0, 64).store.rule);
        EXPECT_TRUE(names.count(shared) || (shared == std::string("params") && !has_type)) << shared;
    }
}

TEST_P(Methods, SpecsRoundTrip) {
    const std::string name = calibrations::with_file(info().name, shape_of(64));
    const auto plain = open_method(name);
    ASSERT_TRUE(plain.ok());
    EXPECT_EQ((*plain)->spec(), name);
    EXPECT_EQ(open_method(info().name).ok(), !info().calibrated);
    for (const std::string& given : specs_of(info())) {
        const std::string spec = calibrations::with_file(given, shape_of(64));
        const auto method = open_method(spec);
        if (!method) continue; // a pair with a default that cannot work; see the option pairs below
        const auto again = open_method((*method)->spec());
        ASSERT_TRUE(again.ok()) << spec << " printed as " << (*method)->spec() << ": " << again.status().message();
        EXPECT_EQ((*again)->spec(), (*method)->spec()) << spec;
    }
}

// A printed spec says everything: what it opens decides as the original did.
TEST_P(Methods, PrintedSpecsMeanTheSame) {
    for (const auto& method : all(64)) {
        const auto twin = again(method->spec(), 64);
        for (const Side side : {Side::key, Side::value}) {
            const SidePlan a = method->initial(side, 2, 1, 64), b = twin->initial(side, 2, 1, 64);
            expect_same_store(a.store, b.store, method->spec());
            expect_same_basis(a, b, method->spec());
            EXPECT_EQ(a.raw, b.raw) << method->spec();
            EXPECT_EQ(a.window, b.window) << method->spec();
            EXPECT_EQ(method->widths(side), twin->widths(side)) << method->spec();
            EXPECT_EQ(method->freezes(side), twin->freezes(side)) << method->spec();
        }
        EXPECT_EQ(method->query_scope(), twin->query_scope());
        EXPECT_EQ(method->map_scope(), twin->map_scope());
    }
}

TEST_P(Methods, InitialPlansAreValid) {
    for (const int32_t dim : kDims) {
        for (const auto& method : all(dim)) {
            for (const Side side : {Side::key, Side::value}) {
                for (const auto& [layer, head] : {std::pair(0, 0), std::pair(3, 3)}) {
                    const SidePlan plan = method->initial(side, layer, head, dim);
                    Status s = validate(plan.store, side, dim);
                    ASSERT_TRUE(s.ok()) << method->spec() << " " << dim << ": " << s.message();
                    s = validate(plan.transform, dim, 4);
                    ASSERT_TRUE(s.ok()) << method->spec() << " " << dim << ": " << s.message();
                    const Window& w = plan.window;
                    EXPECT_GE(w.front, 0);
                    EXPECT_LE(w.front, 4096);
                    EXPECT_GE(w.keep, 0);
                    EXPECT_LE(w.keep, 65536 + kPageTokens);
                    EXPECT_TRUE(w.first == 0 || w.first == kPageTokens);
                    EXPECT_EQ(w.flush == 0, plan.store.kind == StoreKind::raw);
                    if (w.flush == 0) continue;
                    EXPECT_EQ(kPageTokens % w.flush, 0) << method->spec();
                    if (plan.store.axis == Axis::tokens) {
                        EXPECT_EQ(w.flush % plan.store.group, 0) << method->spec(); // no group is cut by a flush
                    }
                    if (method->freezes(side)) {
                        EXPECT_EQ(w.first, kPageTokens) << method->spec();
                    }
                    EXPECT_LE(plan.pins, kPageTokens);
                    EXPECT_TRUE(plan.pins == 0 || method->freezes(side)) << method->spec();
                    EXPECT_TRUE(plan.space == KeySpace::post_rope || side == Side::key) << method->spec();
                    EXPECT_EQ(plan.store.kind == StoreKind::tiered, !method->widths(side).empty());
                    if (plan.store.kind != StoreKind::tiered) continue;
                    EXPECT_EQ(w.flush, kPageTokens) << method->spec(); // a page has one ladder
                    EXPECT_EQ(plan.transform.joined, 1) << method->spec();
                    EXPECT_TRUE(validate(plan.ladder, dim, plan.store).ok()) << method->spec();
                    EXPECT_EQ(plan.channels.size(), plan.store.page_map ? size_t(dim) : 0u) << method->spec();
                }
                // All heads of a layer share a window, and both sides a front.
                EXPECT_EQ(method->initial(side, 1, 0, dim).window, method->initial(side, 1, 3, dim).window);
                EXPECT_EQ(method->initial(side, 1, 0, dim).window.front,
                          method->initial(Side::key, 1, 0, dim).window.front);
            }
        }
    }
}

// Rows [blocks * 128][dim] and statistics of a planned block.
struct Data {
    int32_t dim;
    std::vector<float> rows, abs_sum;
    Data(int32_t d, uint32_t seed) : dim(d), rows(4 * size_t(kPageTokens) * size_t(d)), abs_sum(size_t(d)) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < rows.size(); ++i)
            rows[i] = normal(random) * std::exp(float(i % size_t(d) % 11) / 4.0f);
        for (float& sum : abs_sum)
            sum = 400.0f * std::exp(normal(random));
    }
    PlanInput input(int64_t block, int64_t count = kPageTokens) const {
        PlanInput in;
        in.layer = 1;
        in.block = block;
        in.rows = rows.data() + size_t(block) * size_t(kPageTokens) * size_t(dim);
        in.count = count;
        in.dim = dim;
        in.query = {abs_sum.data(), 400};
        return in;
    }
    // The first front + 128 rows, as freeze() gets them.
    PlanInput opening(Side side, int32_t front, const Rope* rope) const {
        PlanInput in = input(0, front + kPageTokens);
        in.side = side;
        in.front = front;
        in.rope = rope;
        return in;
    }
};

Rope rope_of(int32_t dim) {
    Rope rope;
    rope.known = rope.halves = true;
    rope.rotary = dim / 2 * 2;
    return rope;
}

TEST_P(Methods, PlansArePureAndComplete) {
    for (const int32_t dim : kDims) {
        const Data data(dim, 7), other(dim, 8);
        for (const auto& method : all(dim)) {
            if (method->widths(Side::key).empty()) continue;
            const auto twin = again(method->spec(), dim);
            SidePlan a = method->initial(Side::key, 2, 0, dim), b = twin->initial(Side::key, 2, 0, dim);
            method->plan(data.input(1), &a);
            twin->plan(other.input(0), &b); // a past decision leaves nothing behind, in plan or method
            twin->plan(data.input(1), &b);
            EXPECT_EQ(a.channels, b.channels) << method->spec();
            EXPECT_EQ(a.ladder, b.ladder) << method->spec();

            const Status s = validate(a.ladder, dim, a.store);
            ASSERT_TRUE(s.ok()) << method->spec() << ": " << s.message();
            if (a.store.page_map) {
                std::vector<uint16_t> sorted = a.channels, all_channels(static_cast<size_t>(dim));
                std::sort(sorted.begin(), sorted.end());
                std::iota(all_channels.begin(), all_channels.end(), uint16_t(0));
                EXPECT_EQ(sorted, all_channels) << method->spec();
            }
            const std::vector<uint8_t> widths = method->widths(Side::key);
            for (int i = 0; i < a.ladder.count; ++i) {
                EXPECT_NE(std::find(widths.begin(), widths.end(), a.ladder.tiers[size_t(i)].bits), widths.end());
            }
            EXPECT_LE(layout(a.store, Side::key, dim, a.ladder).bytes,
                      worst_page_bytes(a.store, Side::key, dim, widths))
                << method->spec();
            // What is fixed when a cache is made stays as it was.
            const SidePlan start = method->initial(Side::key, 2, 0, dim);
            EXPECT_EQ(a.store, start.store);
            EXPECT_EQ(a.window, start.window);
        }
    }
}

TEST_P(Methods, PlansDoNotSeeLaterRows) {
    for (const int32_t dim : {20, 64, 128}) {
        for (const auto& method : all(dim)) {
            if (method->widths(Side::key).empty()) continue;
            for (const int64_t count : {int64_t(kPageTokens), 2 * int64_t(kPageTokens)}) {
                Data data(dim, 9);
                SidePlan before = method->initial(Side::key, 0, 0, dim), after = before;
                method->plan(data.input(1, count), &before);
                const size_t first = size_t(kPageTokens) * size_t(dim), end = first + size_t(count) * size_t(dim);
                std::fill(data.rows.begin(), data.rows.begin() + int64_t(first), 1e6f);
                std::fill(data.rows.begin() + int64_t(end), data.rows.end(), NAN);
                method->plan(data.input(1, count), &after);
                EXPECT_EQ(before.channels, after.channels) << method->spec();
                EXPECT_EQ(before.ladder, after.ladder) << method->spec();
            }
        }
    }
}

// What a sequence decides once: pure, complete, from the first front + 128 rows alone, and nothing that is fixed.
TEST_P(Methods, FreezesArePureAndComplete) {
    for (const int32_t dim : kDims) {
        const Rope rope = rope_of(dim);
        for (const auto& method : all(dim)) {
            for (const Side side : {Side::key, Side::value}) {
                const SidePlan start = method->initial(side, 2, 1, dim);
                if (!method->freezes(side) || start.window.front > 3 * kPageTokens) continue;
                Data data(dim, 11), other(dim, 12);
                SidePlan a = start, b = start;
                method->freeze(data.opening(side, start.window.front, &rope), &a);
                const size_t end = size_t(start.window.front + kPageTokens) * size_t(dim);
                std::fill(data.rows.begin() + int64_t(end), data.rows.end(), NAN);
                const auto twin = again(method->spec(), dim);
                twin->freeze(other.opening(side, start.window.front, &rope), &b);
                twin->freeze(data.opening(side, start.window.front, &rope), &b);
                expect_same_basis(a, b, method->spec());

                Status s = validate(a.transform, dim, 4);
                ASSERT_TRUE(s.ok()) << method->spec() << ": " << s.message();
                EXPECT_EQ(a.transform.joined, start.transform.joined);
                EXPECT_EQ(a.store, start.store) << method->spec();
                EXPECT_EQ(a.window, start.window) << method->spec();
                EXPECT_EQ(a.space, start.space) << method->spec();
                EXPECT_LE(int64_t(a.pinned.size()), start.pins) << method->spec();
                for (size_t i = 0; i < a.pinned.size(); ++i) {
                    EXPECT_LT(a.pinned[i], kPageTokens);
                    EXPECT_TRUE(i == 0 || a.pinned[i] > a.pinned[i - 1]) << method->spec();
                }
                if (a.store.kind != StoreKind::tiered) continue;
                s = validate(a.ladder, dim, a.store);
                ASSERT_TRUE(s.ok()) << method->spec() << ": " << s.message();
                EXPECT_LE(layout(a.store, side, dim, a.ladder).bytes,
                          worst_page_bytes(a.store, side, dim, method->widths(side)));
                if (!a.mean.empty()) { // decided once; the ladder goes page by page
                    EXPECT_EQ(a.mean.size(), size_t(dim)) << method->spec();
                    const std::vector<float> mean = a.mean;
                    method->plan(other.input(1), &a);
                    EXPECT_EQ(a.mean, mean) << method->spec();
                    continue;
                }
                // Later blocks keep it.
                b = a;
                method->plan(other.input(1), &b);
                expect_same_basis(a, b, method->spec());
            }
        }
    }
}

// Rows of zeros: a channel without anything in it still needs a scale above 0, and ties an order.
TEST_P(Methods, FreezesOfZerosAreValid) {
    for (const int32_t dim : {1, 20, 64, 128}) {
        const Rope rope = rope_of(dim);
        for (const auto& method : all(dim)) {
            for (const Side side : {Side::key, Side::value}) {
                SidePlan plan = method->initial(side, 2, 1, dim);
                if (!method->freezes(side) || plan.window.front > 3 * kPageTokens) continue;
                Data data(dim, 11);
                std::fill(data.rows.begin(), data.rows.end(), 0.0f);
                std::fill(data.abs_sum.begin(), data.abs_sum.end(), 0.0f);
                method->freeze(data.opening(side, plan.window.front, &rope), &plan);
                Status s = validate(plan.transform, dim, 4);
                EXPECT_TRUE(s.ok()) << method->spec() << " " << dim << ": " << s.message();
                if (plan.store.kind != StoreKind::tiered) continue;
                s = validate(plan.ladder, dim);
                EXPECT_TRUE(s.ok()) << method->spec() << " " << dim << ": " << s.message();
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, Methods, testing::ValuesIn(methods()), [](const auto& test) { return test.param->name; });

TEST(MethodList, NamesAreUnique) {
    std::set<std::string> names;
    for (const MethodInfo* info : methods())
        EXPECT_TRUE(names.insert(info->name).second) << info->name;
    EXPECT_GE(names.size(), 15u);
}

} // namespace
} // namespace kvmosaic
