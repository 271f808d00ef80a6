// What every method must keep to, run over all registered methods and the extreme values of all their options: a new
// row in methods.def is tested here without a further line.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

// Every value worth trying: the ends of a range, each choice, the word.
std::vector<std::string> extremes(const OptionInfo& option) {
    std::vector<std::string> values = option.choices;
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
    std::vector<std::unique_ptr<Method>> all() const {
        std::vector<std::unique_ptr<Method>> opened;
        for (const std::string& spec : specs_of(info())) {
            auto method = open_method(spec);
            if (method) opened.push_back(std::move(*method));
        }
        EXPECT_FALSE(opened.empty());
        return opened;
    }
};

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
        EXPECT_TRUE(open_method(info().name + ":" + option.name + "=" + option.fallback).ok()) << option.name;
    }
    const auto method = open_method(info().name);
    ASSERT_TRUE(method.ok());
    EXPECT_EQ(&(*method)->info(), GetParam());
    if ((*method)->initial(Side::key, 0, 0, 64).store.kind == StoreKind::raw) return;
    for (const char* shared : {"front", "keep", "params"})
        EXPECT_TRUE(names.count(shared)) << shared;
}

TEST_P(Methods, SpecsRoundTrip) {
    const auto plain = open_method(info().name);
    ASSERT_TRUE(plain.ok());
    EXPECT_EQ((*plain)->spec(), info().name);
    for (const std::string& spec : specs_of(info())) {
        const auto method = open_method(spec);
        if (!method) continue; // a pair with a default that cannot work; see the option pairs below
        const auto again = open_method((*method)->spec());
        ASSERT_TRUE(again.ok()) << spec << " printed as " << (*method)->spec() << ": " << again.status().message();
        EXPECT_EQ((*again)->spec(), (*method)->spec()) << spec;
    }
}

// A printed spec says everything: what it opens decides as the original did.
TEST_P(Methods, PrintedSpecsMeanTheSame) {
    for (const auto& method : all()) {
        const auto again = open_method(method->spec());
        ASSERT_TRUE(again.ok());
        for (const Side side : {Side::key, Side::value}) {
            const SidePlan a = method->initial(side, 0, 0, 64), b = (*again)->initial(side, 0, 0, 64);
            EXPECT_EQ(a.store, b.store) << method->spec();
            EXPECT_EQ(a.raw, b.raw) << method->spec();
            EXPECT_EQ(a.window, b.window) << method->spec();
            EXPECT_EQ(method->widths(side), (*again)->widths(side)) << method->spec();
        }
        EXPECT_EQ(method->query_scope(), (*again)->query_scope());
        EXPECT_EQ(method->map_scope(), (*again)->map_scope());
    }
}

TEST_P(Methods, InitialPlansAreValid) {
    for (const auto& method : all()) {
        for (const int32_t dim : kDims) {
            ASSERT_TRUE(method->accept({{{8, 4, dim, dim}}, "m"}).ok()) << method->spec() << " " << dim;
            for (const Side side : {Side::key, Side::value}) {
                const SidePlan plan = method->initial(side, 0, 0, dim);
                const Status s = validate(plan.store, side, dim);
                ASSERT_TRUE(s.ok()) << method->spec() << " " << dim << ": " << s.message();
                const Window& w = plan.window;
                EXPECT_GE(w.front, 0);
                EXPECT_LE(w.front, 4096);
                EXPECT_GE(w.keep, 0);
                EXPECT_LE(w.keep, 65536 + kPageTokens);
                EXPECT_EQ(w.flush == 0, plan.store.kind == StoreKind::raw);
                if (w.flush == 0) continue;
                EXPECT_EQ(kPageTokens % w.flush, 0) << method->spec();
                if (plan.store.axis == Axis::tokens) {
                    EXPECT_EQ(w.flush % plan.store.group, 0) << method->spec(); // no group is cut by a flush
                }
                EXPECT_EQ(plan.store.kind == StoreKind::tiered, !method->widths(side).empty());
                if (plan.store.kind != StoreKind::tiered) continue;
                EXPECT_EQ(w.flush, kPageTokens) << method->spec(); // a page has one ladder
                EXPECT_TRUE(validate(plan.ladder, dim).ok()) << method->spec();
                EXPECT_EQ(plan.channels.size(), size_t(dim));
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
};

TEST_P(Methods, PlansArePureAndComplete) {
    const auto opened = all();
    for (const int32_t dim : kDims) {
        const Data data(dim, 7), other(dim, 8);
        for (const auto& method : opened) {
            if (method->widths(Side::key).empty()) continue;
            const auto twin = open_method(method->spec());
            ASSERT_TRUE(twin.ok());
            SidePlan a = method->initial(Side::key, 1, 0, dim), b = (*twin)->initial(Side::key, 1, 0, dim);
            method->plan(data.input(1), &a);
            (*twin)->plan(other.input(0), &b); // a past decision leaves nothing behind, in plan or method
            (*twin)->plan(data.input(1), &b);
            EXPECT_EQ(a.channels, b.channels) << method->spec();
            EXPECT_EQ(a.ladder, b.ladder) << method->spec();

            const Status s = validate(a.ladder, dim);
            ASSERT_TRUE(s.ok()) << method->spec() << ": " << s.message();
            std::vector<uint16_t> sorted = a.channels, all_channels(static_cast<size_t>(dim));
            std::sort(sorted.begin(), sorted.end());
            std::iota(all_channels.begin(), all_channels.end(), uint16_t(0));
            EXPECT_EQ(sorted, all_channels) << method->spec();
            const std::vector<uint8_t> widths = method->widths(Side::key);
            for (int i = 0; i < a.ladder.count; ++i) {
                EXPECT_NE(std::find(widths.begin(), widths.end(), a.ladder.tiers[size_t(i)].bits), widths.end());
            }
            EXPECT_LE(layout(a.store, Side::key, dim, a.ladder).bytes,
                      worst_page_bytes(a.store, Side::key, dim, widths))
                << method->spec();
            // What is fixed when a cache is made stays as it was.
            const SidePlan start = method->initial(Side::key, 1, 0, dim);
            EXPECT_EQ(a.store, start.store);
            EXPECT_EQ(a.window, start.window);
        }
    }
}

TEST_P(Methods, PlansDoNotSeeLaterRows) {
    for (const auto& method : all()) {
        if (method->widths(Side::key).empty()) continue;
        for (const int32_t dim : {20, 64, 128}) {
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

INSTANTIATE_TEST_SUITE_P(All, Methods, testing::ValuesIn(methods()), [](const auto& test) { return test.param->name; });

TEST(MethodList, NamesAreUnique) {
    std::set<std::string> names;
    for (const MethodInfo* info : methods())
        EXPECT_TRUE(names.insert(info->name).second) << info->name;
    EXPECT_GE(names.size(), 5u);
}

} // namespace
} // namespace kvmosaic
