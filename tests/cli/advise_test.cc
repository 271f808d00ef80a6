// What advice and matched bits rest on, without a model: sizes in words, the table of settings, what settings weigh,
// and the choice itself.
#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "../unit/methods_calibration.h"
#include "eval/advise.h"
#include "eval/bytes.h"
#include "eval/lengths.h"
#include "eval/match.h"
#include "eval/settings.h"

namespace kvmosaic::eval {
namespace {

ModelShape small_shape() {
    constexpr int32_t dim = 64;
    LayerShape layer{4, 2, dim, dim};
    layer.rope.known = layer.rope.halves = true;
    layer.rope.rotary = dim;
    ModelShape shape;
    shape.layers = {layer, layer, layer, layer, layer}; // turboquant keeps four of them raw
    return shape;
}

// A cache of so many rows with a few large channels, as keys of models have them.
std::unique_ptr<Cache> filled(const ModelShape& shape, const std::string& spec, int64_t rows) {
    auto made = Cache::create(shape, spec);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (!made) return nullptr;
    std::unique_ptr<Cache> cache = std::move(*made);
    const LayerShape& l = shape.layers[0];
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> x(size_t(rows) * size_t(l.heads * l.key_dim));
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = normal(random) * (i % size_t(l.key_dim) % 11 == 3 ? 6.0f : 1.0f);
    const SeqId names[] = {0};
    std::vector<StepRow> step(static_cast<size_t>(rows));
    for (size_t i = 0; i < step.size(); ++i)
        step[i] = {int32_t(i), names};
    EXPECT_TRUE(cache->begin_step(step).ok());
    for (int32_t i = 0; i < int32_t(shape.layers.size()); ++i) {
        const auto view = [&](int32_t heads) { return RowsF32{x.data(), heads * l.key_dim, l.key_dim}; };
        cache->write(i, view(l.heads), view(l.kv_heads), view(l.kv_heads));
    }
    cache->end_step();
    return cache;
}

TEST(Bytes, AreReadAsPeopleWriteThem) {
    const auto read = [](const char* text) { return *parse_bytes(text); };
    EXPECT_EQ(read("4GiB"), int64_t(4) << 30);
    EXPECT_EQ(read("4G"), int64_t(4) << 30);
    EXPECT_EQ(read("4g"), int64_t(4) << 30);
    EXPECT_EQ(read("1.5 GiB"), int64_t(3) << 29);
    EXPECT_EQ(read("512M"), int64_t(512) << 20);
    EXPECT_EQ(read("4GB"), 4'000'000'000);
    EXPECT_EQ(read("2048KiB"), int64_t(2) << 20);
    for (const char* bad : {"", "4", "G", "-4G", "4 G B", "4GiBs", "four", "nan G", "1e3M", "4G ", "0x10M"})
        EXPECT_FALSE(parse_bytes(bad).ok()) << bad;
    for (const char* far : {"0G", "1023K", "1025TiB", "99999999999999999999G"})
        EXPECT_NE(parse_bytes(far).status().message().find("1MiB to 1024TiB"), std::string::npos) << far;
    EXPECT_EQ(bytes_text(int64_t(3) << 19), "1.5 MiB");
    EXPECT_EQ(bytes_text(int64_t(3) << 29), "1.50 GiB");
}

// A method that is added without a row here is found by this.
TEST(Settings, EveryMethodHasARowAndEverySettingOpens) {
    const ModelShape shape = small_shape();
    for (const MethodInfo* info : methods()) {
        std::string wish = info->name;
        if (info->calibrated)
            wish += ":calib=" + calibrations::Folder::here().path(info->name, calibrations::make(info->name, shape));
        const auto settings = settings_of(wish);
        ASSERT_TRUE(settings.ok()) << info->name << ": " << settings.status().message();
        ASSERT_FALSE(settings->empty()) << info->name;
        std::set<std::string> specs;
        for (const Setting& s : *settings) {
            EXPECT_EQ(s.method, info->name);
            EXPECT_TRUE(specs.insert(s.spec).second) << s.spec << " twice";
        }
        // the published default is among them, unless what it weighs depends on the text
        const std::string plain = (*open_method(wish))->spec();
        EXPECT_EQ(specs.count(plain), info->name == "mixkvq" ? 0u : 1u) << plain;
        std::vector<std::string> refused;
        const auto sized = size_settings(shape, *settings, {1024, 1, 1}, &refused, {});
        EXPECT_EQ(sized.size(), settings->size()) << (refused.empty() ? "" : refused.front());
    }
    const auto names = free_methods();
    EXPECT_EQ(std::count(names.begin(), names.end(), "kivi"), 1);
    for (const char* other : {"f16", "f32", "kvquant", "kvtuner"})
        EXPECT_EQ(std::count(names.begin(), names.end(), other), 0) << other;
}

TEST(Settings, WhatAWishFixesHoldsInAllOfThem) {
    const auto settings = settings_of("kivi:group=64,front=8");
    ASSERT_TRUE(settings.ok());
    EXPECT_EQ(settings->size(), 6u); // widths alone are left
    for (const Setting& s : *settings) {
        EXPECT_NE(s.spec.find("group=64"), std::string::npos) << s.spec;
        EXPECT_NE(s.spec.find("front=8"), std::string::npos) << s.spec;
    }
    EXPECT_NE(settings_of("kivy").status().message().find("kivi"), std::string::npos);
    EXPECT_FALSE(settings_of("kivi:group=5").ok());
    EXPECT_FALSE(settings_of("auto:bits=2").ok());
    EXPECT_FALSE(settings_of("kvquant").ok()); // needs its file
}

// What is promised for a length without filling a cache of that length is what such a cache weighs, whatever it holds.
TEST(Settings, SizesAreThoseOfARealCache) {
    const int64_t rows = 1100;
    const ModelShape shape = small_shape();
    for (const std::string& method : free_methods()) {
        const auto settings = settings_of(method);
        for (const SizedSetting& s : size_settings(shape, *settings, {rows, 1, 1}, nullptr, {})) {
            const auto cache = filled(shape, s.spec, rows);
            const Footprint f = cache->footprint();
            EXPECT_NEAR(double(s.bytes), double(f.cache_bytes()), 12 * sizeof(PageLayout)) << s.spec;
            EXPECT_NEAR(s.bits, f.true_bits(), 0.05) << s.spec;
        }
    }
}

// To the byte, but for the few layouts of part-filled pages that a cache keeps a table of, by how its rows came.
TEST(Settings, LengthsBeyondTheMeasuredOnesAreExact) {
    const ModelShape shape = small_shape();
    const double layouts = 12 * sizeof(PageLayout);
    for (const char* spec : {"f16", "kivi:bits=2", "kivi:bits=3,keep=200,front=5", "kitty", "innerq", "q4_0", "mosaic",
                             "rotatekv:calib=", "pnmix:front=7"}) {
        std::string full = spec;
        if (full.ends_with("calib="))
            full += calibrations::Folder::here().path("rotatekv", calibrations::make("rotatekv", shape));
        const auto made = LengthBits::make(shape, full, {3000, 130, 2999, 1536});
        ASSERT_TRUE(made.ok()) << made.status().message();
        const int64_t lengths[] = {3000, 130, 2999, 1536};
        for (size_t i = 0; i < 4; ++i) {
            const Footprint f = filled(shape, full, lengths[i])->footprint();
            EXPECT_EQ(made->values(i), f.values[0] + f.values[1]) << full;
            EXPECT_NEAR(double(made->bytes(i)), double(f.cache_bytes()), layouts) << full << " at " << lengths[i];
        }
        const auto longer = LengthBits::make(shape, full, {3000 + 128000});
        EXPECT_NEAR(double(made->growth()) * 1000, double(longer->bytes(0) - made->bytes(0)), layouts) << full;
    }
}

TEST(Settings, TheNearestToABudgetIsFound) {
    const std::vector<SizedSetting> sized{
        {"m", "a", 3.0, 0, 0}, {"m", "b", 2.01, 0, 0}, {"m", "c", 2.0, 0, 0}, {"m", "d", 5, 0, 0}};
    EXPECT_EQ(nearest_setting(sized, 1.0).setting.spec, "b"); // as good as c, and before it
    EXPECT_DOUBLE_EQ(nearest_setting(sized, 1.0).residual(), 1.01);
    EXPECT_EQ(nearest_setting(sized, 4.2).setting.spec, "d");
    EXPECT_DOUBLE_EQ(nearest_setting(sized, 9).residual(), -4.0);
    EXPECT_EQ(nearest_setting(sized, 2.9).setting.spec, "a");
}

// ---- the choice, on made-up methods: `good` loses least, `near` a little more, at a bit every million bytes ----

SizedChoices made_up_choices() {
    SizedChoices out;
    for (int bits = 2; bits <= 8; ++bits)
        for (const char* method : {"good", "near", "poor"})
            out.settings.push_back(
                {method, method + std::to_string(bits), double(bits), bits * 1'000'000, bits * 8'000});
    out.f16 = {"f16", "f16", 16, 16'000'000, 128'000};
    out.values = 8'000'000;
    return out;
}
Result<double> made_up_harm(const std::string& spec) {
    const double bits = double(spec.back() - '0');
    return std::exp2(-2 * bits) * (spec.starts_with("good") ? 1 : spec.starts_with("near") ? 2 : 50);
}
AdviseWish wish_by(AdviseWish::By by, double amount, int64_t context = 16'000) {
    AdviseWish wish;
    wish.by = by, wish.context = context;
    if (by == AdviseWish::By::bits)
        wish.bits = amount;
    else
        wish.bytes = int64_t(amount);
    return wish;
}
Advice advice_for(const AdviseWish& wish, int64_t context = 16'000) {
    const auto got = advise(wish, context, {100'000'000, 50'000'000}, made_up_choices(), made_up_harm);
    EXPECT_TRUE(got.ok());
    return *got;
}
std::vector<std::string> specs_of(const Advice& advice) {
    std::vector<std::string> out;
    for (const AdvicePick& p : advice.picks)
        out.push_back(std::string(name_of(p.role)) + " " + p.setting.spec);
    return out;
}
using By = AdviseWish::By;
using Specs = std::vector<std::string>;

TEST(Advise, TheBestThatFitsWithItsNeighboursAndTheBestOther) {
    const Specs want{"recommended good5", "smaller good4", "larger good6", "other near5", "reference f16"};
    for (const AdviseWish& wish : {wish_by(By::bits, 5), wish_by(By::bits, 5.9), wish_by(By::cache_memory, 5'400'000),
                                   wish_by(By::memory, 155'400'000)}) {
        const Advice got = advice_for(wish);
        EXPECT_EQ(specs_of(got), want);
        EXPECT_TRUE(got.met);
        EXPECT_TRUE(got.reasons.empty());
        EXPECT_TRUE(got.picks[0].fits && got.picks[1].fits && !got.picks[2].fits && got.picks[3].fits);
    }
    const Advice got = advice_for(wish_by(By::cache_memory, 5'400'000));
    // 400,000 bytes more make ten pages of 40,000 and no eleventh; the larger one lacks 600,000, 12.5 pages of 48,000
    EXPECT_EQ(got.picks[0].tokens, 16'000 + 10 * 128);
    EXPECT_EQ(got.picks[2].tokens, 16'000 - 13 * 128);
}

TEST(Advise, ImpossibleWishesGetTheNearest) {
    Advice got = advice_for(wish_by(By::bits, 1.5));
    EXPECT_EQ(specs_of(got), (Specs{"recommended good2", "larger good3", "other near2", "reference f16"}));
    EXPECT_FALSE(got.met || got.picks[0].fits);
    ASSERT_EQ(got.reasons.size(), 1u);
    EXPECT_NE(got.reasons[0].find("1.5 bits are below"), std::string::npos) << got.reasons[0];

    got = advice_for(wish_by(By::memory, 120'000'000)); // less than what stands beside the cache
    EXPECT_EQ(got.picks[0].setting.spec, "good2");
    EXPECT_FALSE(got.met || got.picks[0].fits);
    EXPECT_NE(got.reasons[0].find("145.0 MiB is the least"), std::string::npos) << got.reasons[0];

    got = advice_for(wish_by(By::bits, 16.5)); // nothing need be lost
    EXPECT_EQ(specs_of(got), (Specs{"recommended f16", "smaller good8", "smaller good4"}));
    EXPECT_TRUE(got.met && got.picks[0].fits);
    EXPECT_EQ(advice_for(wish_by(By::memory, 166'000'000)).picks[0].setting.spec, "f16");
    EXPECT_EQ(advice_for(wish_by(By::memory, 165'999'999)).picks[0].setting.spec, "good8");
}

TEST(Advise, AShorterContextWhereNoSettingFits) {
    const SizedChoices choices = made_up_choices();
    const AdviseWish wish = wish_by(By::cache_memory, 1'500'000);
    // the smallest grows by 16,000 bytes in 128 tokens and lacks 500,000: 32 pages, then whole 256
    EXPECT_EQ(longest_context(wish, 1'500'000, choices), (16'000 - 32 * 128) / 256 * 256);
    // settings below two bits would allow more, but are not worth it
    SizedChoices lower = choices;
    lower.settings.push_back({"poor", "poor1", 1, 1'600'000, 8'000});
    EXPECT_EQ(longest_context(wish, 1'500'000, lower), longest_context(wish, 1'500'000, choices));
    EXPECT_EQ(longest_context(wish, 9'000'000, choices), 16'000);
    EXPECT_EQ(longest_context(wish, 1'600'000, lower), 16'000); // fits, so nothing is shortened
    EXPECT_EQ(longest_context(wish, 10'000, choices), 0);
    EXPECT_EQ(longest_context(wish, -5, choices), 0);
    const Advice got = advice_for(wish, 11'776);
    EXPECT_FALSE(got.met);
    EXPECT_EQ(got.context, 11'776);
    EXPECT_NE(got.reasons[0].find("16000 tokens"), std::string::npos) << got.reasons[0];
}

TEST(Advise, WhatWasMeasuredHasTheLastWord) {
    const Advice first = advice_for(wish_by(By::bits, 5));
    Advice got = first;
    settle({{0.02, 0.001}, {0.05, 0.001}, {0.001, 0.0001}, {0.01, 0.001}}, &got);
    EXPECT_EQ(specs_of(got),
              (Specs{"recommended near5", "other good5", "smaller good4", "larger good6", "reference f16"}));
    EXPECT_EQ(got.reasons.size(), 1u);
    got = first;
    settle({{0.02, 0.006}, {0.05, 0.001}, {0.001, 0.0001}, {0.01, 0.006}}, &got); // within the errors
    EXPECT_EQ(specs_of(got), specs_of(first));
}

} // namespace
} // namespace kvmosaic::eval
