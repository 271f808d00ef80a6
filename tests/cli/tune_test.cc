// The parts of tune that need no model, by cases worked out by hand.
#include <cmath>
#include <fstream>
#include <random>

#include <gtest/gtest.h>

#include "eval/metrics.h"
#include "eval/pareto.h"
#include "eval/tune.h"
#include "eval/tune_layers.h"
#include "eval/tune_report.h"

namespace kvmosaic::eval {
namespace {

using nlohmann::ordered_json;

TEST(Pareto, DominationNeedsNoLossAndOneGain) {
    const Point a{3, 0.1};
    EXPECT_FALSE(dominates(a, a));
    EXPECT_TRUE(dominates(a, {3, 0.2}));
    EXPECT_TRUE(dominates(a, {4, 0.1}));
    EXPECT_FALSE(dominates(a, {2, 0.2})) << "fewer bits, more loss: neither";
    EXPECT_FALSE(dominates({2, 0.2}, a));
    EXPECT_TRUE(dominates(a, {NAN, 0.01}));
    EXPECT_FALSE(dominates({NAN, 0.01}, a));
    EXPECT_FALSE(dominates({NAN, 0.01}, {NAN, 0.02}));
}

TEST(Pareto, FrontIsWhatNoneDominates) {
    //                               0         1         2        3          4         5         6
    const std::vector<Point> points{{4, 0.2}, {3, 0.5}, {5, 0.2}, {6, 0.1}, {3, 0.6}, {4, 0.2}, {2, NAN}};
    EXPECT_EQ(front_of(points), (std::vector<size_t>{1, 0, 3})); // of the equal 0 and 5 the first
    EXPECT_TRUE(front_of({{NAN, 1}}).empty());
    // Against the definition, on many points.
    std::mt19937 engine(5);
    std::uniform_int_distribution<int> whole(0, 15);
    std::vector<Point> many;
    for (int i = 0; i < 200; ++i)
        many.push_back({double(whole(engine)), double(whole(engine)) + 20.0 * double(whole(engine) == 3)});
    const std::vector<size_t> front = front_of(many);
    for (size_t i = 0; i < many.size(); ++i) {
        bool beaten = false, there = false;
        for (const Point& p : many)
            beaten = beaten || dominates(p, many[i]);
        for (const size_t f : front)
            there = there || (many[f].bits == many[i].bits && many[f].loss == many[i].loss);
        EXPECT_EQ(there, !beaten) << i;
    }
}

TEST(Pareto, KneeIsFarthestBelowTheLine) {
    // Losses 1, 0.01, 0.001 at 2, 3, 6 bits: heights 1, 1/3, 0 at 0, 1/4, 1, so 1 - 1/4 - 1/3 below the line.
    const std::vector<Point> points{{2, 1}, {3, 0.01}, {6, 0.001}};
    EXPECT_EQ(knee_of(points, {0, 1, 2}), 1u);
    // 0.1 at 3 bits and 0.002 at 4: 1 - 1/4 - 2/3 = 0.083 and 1 - 1/2 - 0.1 = 0.4.
    const std::vector<Point> two{{2, 1}, {3, 0.1}, {4, 0.002}, {6, 0.001}};
    EXPECT_EQ(knee_of(two, {0, 1, 2, 3}), 2u);
    EXPECT_EQ(knee_of({{2, 1}, {5, 0.5}, {6, 0.01}}, {0, 1, 2}), 0u) << "none lies below";
    EXPECT_EQ(knee_of({{2, 1}}, {0}), 0u);
    EXPECT_EQ(knee_of({{2, 1}, {3, 0.5}, {4, 0}}, {0, 1, 2}), 0u) << "a loss of 0";
}

TEST(Pareto, ChoicesKeepToTheWishOrSayThatTheyDoNot) {
    const std::vector<Point> points{{2, 1}, {3, 0.1}, {6, 0.01}};
    const std::vector<size_t> front{0, 1, 2};
    EXPECT_EQ(choose_by_bits(points, front, 5.9).index, 1u);
    EXPECT_EQ(choose_by_bits(points, front, 6).index, 2u);
    EXPECT_FALSE(choose_by_bits(points, front, 1.9).kept);
    EXPECT_EQ(choose_by_bits(points, front, 1.9).index, 0u);
    EXPECT_EQ(choose_by_loss(points, front, 0.1).index, 1u);
    EXPECT_EQ(choose_by_loss(points, front, 2).index, 0u);
    EXPECT_FALSE(choose_by_loss(points, front, 0.001).kept);
    EXPECT_EQ(choose_by_loss(points, front, 0.001).index, 2u);
}

TEST(Kept, LogitsLoseLittle) {
    std::mt19937 engine(3);
    std::normal_distribution<float> normal(12, 5);
    constexpr int32_t kVocabulary = 5000;
    std::vector<float> row(kVocabulary), back(kVocabulary);
    KeptLogits kept;
    kept.begin(3, kVocabulary);
    for (int i = 0; i < 3; ++i) {
        for (float& x : row)
            x = normal(engine);
        kept.add(row.data());
    }
    EXPECT_FALSE(kept.has(0));
    kept.finish();
    ASSERT_TRUE(kept.has(0));
    kept.read(0, 2, back.data());
    const LogSum a = log_sum(row.data(), kVocabulary), b = log_sum(back.data(), kVocabulary);
    EXPECT_EQ(a.best, b.best);
    EXPECT_LT(kl_divergence(row.data(), a, back.data(), b, kVocabulary), 1e-6);
    kept.read(0, 1, back.data());
    EXPECT_GT(kl_divergence(row.data(), a, back.data(), log_sum(back.data(), kVocabulary), kVocabulary), 0.1);
}

TEST(Tunables, EveryRowIsAnOptionWhoseRangeItsMethodTakes) {
    for (const std::string& name : tunable_methods()) {
        TuneWish wish;
        wish.method = name;
        const Result<TunedMethod> method = tuned_method(wish);
        if (name == "skvq" || name == "rotatekv" || name == "kvquant") { // not without a file
            EXPECT_NE(method.status().message().find("calib"), std::string::npos) << method.status().message();
            continue;
        }
        ASSERT_TRUE(method.ok()) << method.status().message();
        if (method->by_layer()) continue;
        TunedMethod fitted = *method;
        fitted.fit_to(64);
        for (const auto& values : grid_of(fitted.space, 40)) {
            const std::string spec = fitted.spec(fitted.space, values);
            EXPECT_TRUE(open_method(spec).ok()) << spec;
        }
    }
}

TEST(Tunables, ThresholdsAreInUnitsOfTheHead) {
    TunedMethod method = *tuned_method({.method = "mixkvq:v=3", .tune = {}, .ranges = {}});
    method.fit_to(64);
    ASSERT_EQ(method.space.size(), 2u);
    EXPECT_DOUBLE_EQ(method.space[0].low, 0.8);
    EXPECT_DOUBLE_EQ(method.space[1].high, 16);
    EXPECT_EQ(method.spec(), "mixkvq:v=3");
    EXPECT_EQ(method.spec(method.space, {"10.5", "1.6"}), "mixkvq:hi=10.5,v=3");
    EXPECT_EQ(method.defaults(), (std::vector<std::string>{"12", "1.6"}));
    TunedMethod strict = *tuned_method({.method = "mixkvq", .tune = {}, .ranges = {"hi=0.1..2", "mid=0.1..2"}});
    strict.fit_to(64);
    EXPECT_DOUBLE_EQ(strict.space[0].high, 2);
    EXPECT_TRUE(strict.defaults().empty()) << "hi=12 lies outside";
}

TEST(Tunables, ValuesAreStepsInTheirRange) {
    Tunable t;
    t.name = "k", t.low = 1, t.high = 5, t.step = 0.25;
    EXPECT_EQ(t.text(2.3), "2.25");
    EXPECT_EQ(t.text(9), "5");
    EXPECT_EQ(*t.value(2.4), "2.5");
    EXPECT_NE(t.value(7).status().message().find("k = 7: 1 to 5"), std::string::npos);
    EXPECT_FALSE(t.value("2").ok());
    EXPECT_TRUE(t.has("2.5"));
    EXPECT_FALSE(t.has("2.4"));
    EXPECT_FALSE(t.has("off"));
    t.choices = {"8/8", "4/4"};
    EXPECT_EQ(*t.value("4/4"), "4/4");
    EXPECT_NE(t.value("2/2").status().message().find("8/8, 4/4"), std::string::npos);
    EXPECT_FALSE(t.value(4).ok());
    const std::vector<Tunable> back = space_from(to_json({t}));
    EXPECT_EQ(back[0].choices, t.choices);
}

TEST(Tunables, WhatCannotBeTunedIsNamed) {
    const auto refusal = [](TuneWish wish) { return tuned_method(wish).status().message(); };
    EXPECT_NE(refusal({"f16", {}, {}}).find("f16: has nothing to tune; one of mosaic, kivi"), std::string::npos);
    EXPECT_NE(refusal({"mixkvk", {}, {}}).find("did you mean mixkvq"), std::string::npos);
    EXPECT_NE(refusal({"kivi:bits=5", {}, {}}).find("bits"), std::string::npos);
    EXPECT_NE(refusal({"mixkvq", {"front"}, {}}).find("these can be tuned: hi, mid"), std::string::npos);
    EXPECT_NE(refusal({"mixkvq:v=3", {"v"}, {}}).find("fixes v"), std::string::npos);
    EXPECT_NE(refusal({"kitty:ratio=0.25", {}, {}}).find("fixes all"), std::string::npos);
    EXPECT_NE(refusal({"mixkvq", {"hi", "raw_share"}, {}}).find("shares"), std::string::npos);
    EXPECT_NE(refusal({"mixkvq", {}, {"hi=3..1"}}).find("LOW..HIGH within 0 to"), std::string::npos);
    EXPECT_NE(refusal({"mixkvq", {}, {"v=2,3"}}).find("with a name that is tuned: hi, mid"), std::string::npos);
    EXPECT_NE(refusal({"kivi", {}, {"bits=2,5"}}).find("bits"), std::string::npos);
    EXPECT_NE(refusal({"kivi", {}, {"bits=2..4"}}).find("bits=A,B,C"), std::string::npos);
    EXPECT_NE(refusal({"kvtuner:calib=x", {}, {}}).find("leave calib out"), std::string::npos);
    EXPECT_NE(refusal({"kvtuner", {"bits"}, {}}).find("widths of its layers"), std::string::npos);
}

TEST(Tunables, GridsHaveEndsAndNoMoreThanAsked) {
    Tunable a, b;
    a.name = "a", a.low = 1, a.high = 100, a.log = true;
    b.name = "b", b.choices = {"x", "y"};
    const auto grid = grid_of({a, b}, 7); // 3 by 2
    ASSERT_EQ(grid.size(), 6u);
    EXPECT_EQ(grid[0], (std::vector<std::string>{"1", "x"}));
    EXPECT_EQ(grid[2], (std::vector<std::string>{"10", "x"}));
    EXPECT_EQ(grid[5], (std::vector<std::string>{"100", "y"}));
    EXPECT_EQ(grid_of({a, b}, 1).size(), 1u);
    EXPECT_EQ(grid_of({b}, 30).size(), 2u) << "nothing twice";
    a.step = 33, a.log = false;
    EXPECT_EQ(grid_of({a}, 30).size(), 4u);
}

LayerSensitivity layer(int32_t number, std::vector<double> errors, std::vector<size_t> front) {
    return {number, std::move(errors), std::move(front)};
}

TEST(LayerSpace, ClustersHaveTheSamePairsAndSimilarErrors) {
    std::vector<LayerSensitivity> layers;
    for (int i = 0; i < 8; ++i) {
        const double scale = i % 2 ? 1.0 : 0.01;
        const bool other = i == 3;
        layers.push_back(layer(i, {0.001 * scale, 0.1 * scale, 1.0 * scale},
                               other ? std::vector<size_t>{2, 0} : std::vector<size_t>{2, 1, 0}));
    }
    using Groups = std::vector<std::vector<size_t>>;
    EXPECT_EQ(clusters_of_layers(layers, 3), (Groups{{0, 2, 4, 6}, {1, 5, 7}, {3}}));
    EXPECT_EQ(clusters_of_layers(layers, 1), (Groups{{0, 1, 2, 4, 5, 6, 7}, {3}})) << "one for each set at least";
    EXPECT_EQ(clusters_of_layers(layers, 99).size(), 8u);
}

TEST(LayerSpace, WidthsAreThoseOfTheirLayers) {
    Tunable odd, even;
    odd.name = "layers 1,3", odd.layers = {1, 3}, odd.choices = {"8/4", "2/2"};
    even.name = "layer 2", even.layers = {2}, even.choices = {"4/2"};
    const std::vector<WidthPair> widths = widths_of({odd, even}, {"8/4", "4/2"});
    EXPECT_EQ(widths, (std::vector<WidthPair>{{8, 4}, {4, 2}, {8, 4}}));
    EXPECT_EQ(text_of(widths), "8/4, 4/2, 8/4");
    EXPECT_EQ(text_of({{2, 2}, {2, 2}, {4, 4}}), "2/2 x2, 4/4");
    ModelShape shape;
    shape.layers.resize(4);
    for (size_t i = 1; i < 4; ++i)
        shape.layers[i].heads = shape.layers[i].kv_heads = 1, shape.layers[i].key_dim = shape.layers[i].value_dim = 8;
    const Calibration file = calibration_of(shape, widths, false);
    EXPECT_EQ(*file.find("bits", 2, -1, Side::key), (std::vector<float>{4, 2}));
    EXPECT_EQ(*file.find("bits", 3, -1, Side::key), (std::vector<float>{8, 4}));
    EXPECT_EQ(file.find("bits", 0, -1, Side::key), nullptr);
}

TEST(LayerSpace, DescentSpendsWhereTheErrorFallsMost) {
    const std::vector<WidthPair> pairs{{8, 8}, {4, 4}, {2, 2}};
    const std::vector<LayerSensitivity> layers{layer(0, {0.0, 0.1, 1.0}, {2, 1, 0}),
                                               layer(1, {0.0, 0.01, 0.1}, {2, 1, 0})};
    EXPECT_EQ(widths_under(layers, pairs, 2), (std::vector<size_t>{0, 0}));
    EXPECT_EQ(widths_under(layers, pairs, 3), (std::vector<size_t>{1, 0}));
    EXPECT_EQ(widths_under(layers, pairs, 4), (std::vector<size_t>{1, 1}));
    EXPECT_EQ(widths_under(layers, pairs, 8), (std::vector<size_t>{2, 2}));
}

Trial trial(std::string label, std::vector<std::string> values, double bits, std::vector<float> kl) {
    Trial t;
    t.label = std::move(label), t.values = std::move(values), t.spec = "mixkvq";
    t.search.text = "here:1", t.search.bits = bits, t.search.kl_each = std::move(kl);
    t.search.kl = summarize(t.search.kl_each).mean;
    return t;
}

TEST(TuneResult, VerdictsGoByPairsOfPositions) {
    const auto measured = [](double bits, std::vector<float> kl) { return trial("", {}, bits, std::move(kl)).search; };
    const Measured base = measured(4, {1.0f, 2.0f, 3.0f, 4.0f});
    // 0.1 less everywhere: certain, though the positions differ by far more
    const Against less = against(measured(4, {0.9f, 1.9f, 2.9f, 3.9f}), base);
    EXPECT_NEAR(less.kl, -0.1, 1e-6);
    EXPECT_LT(less.kl_error, 1e-6);
    EXPECT_EQ(less.verdict, Verdict::leads);
    // differences 1, -1, 1, -1: mean 0, error sqrt(4/3)/2
    const Against none = against(measured(4.005, {2.0f, 1.0f, 4.0f, 3.0f}), base);
    EXPECT_NEAR(none.kl_error, std::sqrt(4.0 / 3) / 2, 1e-6);
    EXPECT_EQ(none.verdict, Verdict::level);
    EXPECT_EQ(against(measured(3.5, {2.0f, 1.0f, 4.0f, 3.0f}), base).verdict, Verdict::leads)
        << "fewer bits, no more KL";
    EXPECT_EQ(against(measured(3.5, {1.1f, 2.1f, 3.1f, 4.1f}), base).verdict, Verdict::trades);
    EXPECT_EQ(against(measured(4, {1.1f, 2.1f, 3.1f, 4.1f}), base).verdict, Verdict::trails);
    EXPECT_EQ(against(measured(4.5, {1.0f, 2.0f, 3.0f, 4.0f}), base).verdict, Verdict::trails);
}

TEST(TuneResult, VerdictsOnAnswersGoByHowManyAreRight) {
    const auto measured = [](double bits, std::vector<uint8_t> right) {
        Measured m;
        m.bits = bits, m.right = std::move(right);
        return m;
    };
    const Measured base = measured(4, {1, 1, 0, 0, 0, 0, 0, 0});
    const auto of = [&](double bits, std::vector<uint8_t> right) {
        return against(measured(bits, std::move(right)), base, Objective::gsm8k);
    };
    const Against same = of(3.5, {1, 0, 1, 0, 0, 0, 0, 0});
    EXPECT_EQ(same.lost, 1);
    EXPECT_EQ(same.won, 1);
    EXPECT_EQ(same.verdict, Verdict::leads) << "fewer bits, as many right";
    EXPECT_EQ(of(3.5, {1, 0, 0, 0, 0, 0, 0, 0}).verdict, Verdict::trades) << "one fewer";
    EXPECT_EQ(of(4.5, {1, 1, 0, 0, 0, 0, 0, 0}).verdict, Verdict::trails);
    EXPECT_EQ(of(4.005, {1, 1, 0, 0, 0, 0, 0, 0}).verdict, Verdict::level);
    const Against more = of(4.5, {1, 1, 1, 1, 1, 1, 1, 1});
    EXPECT_EQ(more.won, 6);
    EXPECT_NEAR(more.p, 2.0 / 64, 1e-12);
    EXPECT_EQ(more.verdict, Verdict::trades);
}

TEST(TuneResult, WhereAnswersCountTheFrontIsOfRightOnes) {
    Study s;
    s.head = {{"kind", "kvmosaic study 1"}, {"context", 1024}, {"objective", "gsm8k"}, {"questions", 4}};
    s.head["space"] = ordered_json::array({{{"name", "hi"}}});
    s.trials = {trial("mixkvq", {"12"}, 4, {0.1f}), trial(kFloorLabel, {}, 32, {0.0f}),
                trial(kReferenceLabel, {}, 16, {0.0f}), trial("", {"3"}, 3, {0.5f}), trial("", {"5"}, 5, {0.01f})};
    const std::vector<std::vector<uint8_t>> right{{1, 1, 0, 0}, {1, 1, 1, 0}, {1, 1, 1, 1}, {1, 0, 0, 0}, {0, 1, 1, 0}};
    for (size_t i = 0; i < right.size(); ++i)
        s.trials[i].search.right = right[i], s.trials[i].search.tokens = 1;
    const TuneResult r = result_of(s, {}, {});
    EXPECT_EQ(r.trials, (std::vector<size_t>{0, 3, 4})) << "f16 is no setting";
    EXPECT_EQ(r.front, (std::vector<size_t>{3, 0})) << "the last has less KL, but no more right answers";
    const std::string table = to_table(s, r);
    EXPECT_NE(table.find("right %"), std::string::npos) << table;
    EXPECT_NE(table.find("100.0"), std::string::npos) << "f16 stands beside\n" << table;
    const ordered_json j = to_json(s, r, {});
    EXPECT_EQ(j["rows"][3]["hits"], 1);
    EXPECT_EQ(j["rows"][3]["accuracy"], 0.25);
    EXPECT_EQ(j["rows"][3]["against"][0]["lost"], 1);
    // As it comes back from its file; a result that lacks answers is none.
    s.path = testing::TempDir() + "kvmosaic_tune_answers.study";
    Measured more;
    more.text = "others", more.bits = 3, more.right = {0, 1};
    s.trials[3].elsewhere.push_back(more);
    ASSERT_TRUE(s.save().ok());
    const Result<Study> back = open_study(s.path, s.head, {"objective", "questions"});
    ASSERT_TRUE(back.ok()) << back.status().message();
    EXPECT_EQ(back->objective(), Objective::gsm8k);
    EXPECT_EQ(back->trials[0].search.right, right[0]);
    EXPECT_EQ(back->trials[3].on("others")->right, more.right);
    ordered_json other = s.head;
    other["objective"] = "kl";
    EXPECT_NE(open_study(s.path, other, {"objective"}).status().message().find(R"(objective is "gsm8k" there, "kl")"),
              std::string::npos);
    s.trials[3].search.right = {1};
    ASSERT_TRUE(s.save().ok());
    EXPECT_NE(open_study(s.path, s.head, {}).status().message().find("line 5: has 1 answers, the search is over 4"),
              std::string::npos);
    std::remove(s.path.c_str());
}

Study study_of() {
    Study s;
    s.head = {
        {"kind", "kvmosaic study 1"}, {"model_sha256", "abc"}, {"context", 1024}, {"objective", "kl"}, {"seed", 1}};
    s.head["space"] = ordered_json::array({{{"name", "hi"}, {"low", 1}, {"high", 16}, {"step", 0}, {"log", true}}});
    s.head["descent"] = ordered_json::array();
    s.trials = {trial("mixkvq", {"12"}, 4, {0.1f, 0.3f}), trial(kFloorLabel, {}, NAN, {1e-4f, 1e-4f}),
                trial("", {"3"}, 3.9, {0.1f, 0.2f}),      trial("", {"5"}, 3, {0.5f, 0.6f}),
                trial("", {"7"}, 6, {0.01f, 0.02f}),      trial("", {"8"}, 6.5, {0.2f, 0.3f})};
    return s;
}

TEST(TuneResult, FrontDefaultsAndChoice) {
    const Study s = study_of();
    const TuneResult r = result_of(s, {}, {});
    EXPECT_EQ(r.front, (std::vector<size_t>{3, 2, 4})) << "the floor is no setting";
    EXPECT_EQ(r.defaults, (std::vector<size_t>{0}));
    EXPECT_EQ(r.chosen, r.knee);
    EXPECT_EQ(result_of(s, 4.0, {}).chosen, 2u);
    EXPECT_EQ(result_of(s, {}, 0.05).chosen, 4u);
    EXPECT_FALSE(result_of(s, 1.0, {}).kept);
    const std::string table = to_table(s, r);
    EXPECT_NE(table.find("default  mixkvq"), std::string::npos) << table;
    EXPECT_EQ(table.find("hi=8"), std::string::npos) << "beaten ones are not shown\n" << table;
    const ordered_json j = to_json(s, r, {});
    EXPECT_EQ(j["rows"].size(), 6u);
    EXPECT_TRUE(j["rows"][1]["true_bits"].is_null());
    EXPECT_EQ(j["rows"][2]["against"][0]["default"], "mixkvq");
}

TEST(TuneResult, WhatStillLeadsElsewhereIsSaid) {
    Study s = study_of();
    const auto there = [&](size_t i, double bits, std::vector<float> kl) {
        Measured m = trial("", {}, bits, std::move(kl)).search;
        m.text = "there:1";
        s.trials[i].elsewhere.push_back(m);
    };
    s.trials[2].search.kl_each = {0.05f, 0.25f}; // leads the default on the search's text
    there(0, 4, {0.2f, 0.4f});
    there(2, 3.9, {0.3f, 0.5f});
    there(3, 3, {0.1f, 0.3f});
    there(4, 6, {0.01f, 0.02f});
    const TuneResult r = result_of(s, {}, {});
    const std::string text = elsewhere_table(s, r, {"there:1", "other.txt", "x", 1});
    EXPECT_NE(text.find("of the 1 that lead mixkvq (trial 0) on the search's text, 0 still do on other.txt: none; no "
                        "longer: 2; there lead too: 3"),
              std::string::npos)
        << text;
    EXPECT_NE(text.find("trades (was leads)"), std::string::npos) << text;
}

TEST(Studies, ComeBackAsTheyWereAndAreRefusedByTheField) {
    Study s = study_of();
    s.path = testing::TempDir() + "kvmosaic_tune_test.study";
    s.trials[2].widths = {{8, 4}, {2, 2}};
    s.trials[2].elsewhere.push_back(s.trials[2].search);
    ASSERT_TRUE(s.save().ok());
    const Result<Study> back = open_study(s.path, s.head, {"model_sha256", "seed"});
    ASSERT_TRUE(back.ok()) << back.status().message();
    ASSERT_EQ(back->trials.size(), s.trials.size());
    EXPECT_EQ(back->head, s.head);
    EXPECT_EQ(back->trials[2].widths, s.trials[2].widths);
    EXPECT_EQ(back->trials[2].search.kl_each, s.trials[2].search.kl_each);
    EXPECT_NE(back->trials[2].on("here:1"), nullptr);
    EXPECT_EQ(back->trials[3].on("here:1"), nullptr);
    ordered_json other = s.head;
    const std::string whole = *read_file(s.path), objective = R"("objective":"kl",)";
    std::string older = whole;
    older.erase(older.find(objective), objective.size());
    ASSERT_TRUE(write_file(s.path, older).ok());
    EXPECT_TRUE(open_study(s.path, s.head, {"objective"}).ok()) << "files that name no objective are of KL";
    ASSERT_TRUE(write_file(s.path, whole).ok());
    other["seed"] = 2;
    EXPECT_TRUE(open_study(s.path, other, {"model_sha256"}).ok());
    EXPECT_NE(open_study(s.path, other, {"seed"}).status().message().find("seed is 1 there, 2 here"),
              std::string::npos);
    const std::string text = *read_file(s.path);
    const auto refusal = [&](const std::string& content) {
        EXPECT_TRUE(write_file(s.path, content).ok());
        return open_study(s.path, s.head, {}).status().message();
    };
    EXPECT_NE(refusal("hello\n").find("is not the file of a search"), std::string::npos);
    EXPECT_NE(refusal("").find("is not the file of a search"), std::string::npos);
    EXPECT_NE(refusal(text.substr(0, text.size() - 40)).find("line 7: is not a result"), std::string::npos);
    std::remove(s.path.c_str());
    const Result<Study> fresh = open_study(s.path, s.head, {"seed"});
    ASSERT_TRUE(fresh.ok());
    EXPECT_TRUE(fresh->trials.empty());
    EXPECT_FALSE(exists(s.path)) << "nothing is written before there is a result";
}

} // namespace
} // namespace kvmosaic::eval
