// Reports and channels: what needs no model. Plots need gnuplot, and are skipped without it, visibly.
#include <cmath>

#include <gtest/gtest.h>

#include "eval/channels.h"
#include "eval/compare.h"
#include "eval/gnuplot.h"
#include "eval/labels.h"
#include "eval/lengths.h"
#include "eval/one_layer.h"
#include "eval/report.h"

namespace kvmosaic::eval {
namespace {

TEST(Channels, CorrelationsOfSmallCases) {
    // by hand: deviations (-1.5, -0.5, 0.5, 1.5) and (-2, 0, -1, 3); 7 / sqrt(5 * 14)
    EXPECT_NEAR(pearson({1, 2, 3, 4}, {0, 2, 1, 5}), 7 / std::sqrt(70.0), 1e-12);
    EXPECT_NEAR(spearman({1, 2, 3, 4}, {0, 2, 1, 5}), 0.8, 1e-12); // 1 - 6 * 2 / (4 * 15)
    EXPECT_NEAR(spearman({1, 2, 3, 4}, {1, 10, 100, 1000}), 1, 1e-12);
    EXPECT_NEAR(pearson({1, 2, 3}, {3, 2, 1}), -1, 1e-12);
    // ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5)
    EXPECT_NEAR(spearman({1, 2, 2, 9}, {1, 2, 3, 4}), 4.5 / std::sqrt(22.5), 1e-12);
    EXPECT_TRUE(std::isnan(pearson({1, 1, 1}, {1, 2, 3})));
}

// One layer of two KV heads, two query heads each, of 8 channels: channel c of KV head g spans c + 1 + g in each page,
// |q| is 8 - c in one query head and twice that in the other.
Capture made_up(int64_t rows) {
    Capture seen;
    LayerShape layer{4, 2, 8, 8};
    seen.shape.layers = {LayerShape{2, 1, 8, 8}, layer};
    seen.rows = rows;
    seen.layers.resize(2);
    CapturedLayer& x = seen.layers[1];
    for (int64_t t = 0; t < rows; ++t) {
        seen.positions.push_back(int32_t(t));
        for (int h = 0; h < 4; ++h)
            for (int c = 0; c < 8; ++c)
                x.q.push_back(float((8 - c) * (h % 2 ? 2 : 1)) * (t % 2 ? 1.0f : -1.0f));
        for (int g = 0; g < 2; ++g) {
            for (int c = 0; c < 8; ++c) {
                x.k.push_back(float(c + 1 + g) * (float(t % 128) / 127.0f - 0.5f));
                x.v.push_back(float(t % 7) - float(c));
            }
        }
    }
    return seen;
}

TEST(Channels, RangesQueriesAndSharesOfAHead) {
    ChannelSums sums;
    sums.add(made_up(300)); // the last 44 rows are no page
    sums.add(made_up(256));
    const std::vector<LayerChannels> layers = sums.means();
    ASSERT_EQ(layers.size(), 1u) << "a layer without rows is left out";
    EXPECT_EQ(layers[0].layer, 1);
    ASSERT_EQ(layers[0].heads.size(), 2u);
    for (int g = 0; g < 2; ++g) {
        const HeadChannels& head = layers[0].heads[size_t(g)];
        for (int c = 0; c < 8; ++c) {
            EXPECT_NEAR(head.range[size_t(c)], c + 1 + g, 1e-5);
            EXPECT_NEAR(head.query[size_t(c)], 1.5 * (8 - c), 1e-5);
        }
        EXPECT_NEAR(head.pearson, -1, 1e-6);
        EXPECT_NEAR(head.range_ratio, (8 + g) / (4.5 + g), 1e-5);
        EXPECT_NEAR(head.top_share, 1, 1e-12); // there are only 8
    }
    EXPECT_NEAR(layers[0].range_ratio, (8 / 4.5 + 9 / 5.5) / 2, 1e-5);
    EXPECT_EQ(telling_head(layers), (std::pair<int32_t, int32_t>(1, 0)));
}

TEST(Channels, AHeatMapShowsWhichChannelsGotTheBits) {
    const Capture seen = made_up(512);
    const auto map = heat_map(seen, 1, 0, {"mixkvq:raw_share=0.125,mid_share=0.25,front=0", "kivi:bits=2"});
    ASSERT_TRUE(map.ok()) << map.status().message();
    ASSERT_EQ(map->range.size(), 4u);
    EXPECT_NEAR(map->salience[3][4], map->range[3][4] * map->query[3][4], 1e-9);
    ASSERT_EQ(map->caches.size(), 1u) << "KIVI has one width";
    ASSERT_EQ(map->caches[0].bits.size(), 4u);
    // (c + 1)(8 - c) is largest in the middle: channels 3 and 4 (20 each), then 2 and 5 (18); equal scores go to the
    // lower
    const std::vector<double> wanted{2, 2, 4, 16, 4, 2, 2, 2};
    for (const std::vector<double>& page : map->caches[0].bits)
        EXPECT_EQ(page, wanted);
    EXPECT_FALSE(heat_map(seen, 1, 0, {"nothing"}).ok());
}

TEST(Layers, AMethodInOneLayerLeavesTheOthersAlone) {
    ModelShape shape;
    shape.layers = {{2, 1, 64, 64}, {2, 1, 64, 64}, {2, 1, 64, 64}};
    for (const char* spec : {"kivi:bits=2", "mixkvq", "pnmix", "mosaic"}) {
        auto method = only_layer(spec, 1);
        ASSERT_TRUE(method.ok());
        auto made = Cache::create(shape, std::move(*method));
        ASSERT_TRUE(made.ok()) << spec << ": " << made.status().message();
        Cache& cache = **made;
        std::vector<float> x(512 * 128);
        for (size_t i = 0; i < x.size(); ++i)
            x[i] = float((i * 2654435761u >> 8) % 1000) / 500.0f - 1.0f;
        const SeqId names[] = {0};
        std::vector<StepRow> step(512);
        for (size_t i = 0; i < step.size(); ++i)
            step[i] = {int32_t(i), names};
        ASSERT_TRUE(cache.begin_step(step).ok());
        for (int32_t layer = 0; layer < 3; ++layer)
            cache.write(layer, {x.data(), 128, 64}, {x.data(), 64, 64}, {x.data(), 64, 64});
        cache.end_step();
        std::vector<float> row(512 * 64);
        for (int32_t layer = 0; layer < 3; ++layer) {
            EXPECT_EQ(cache.packed_rows(0, layer, Side::key) > 0, layer == 1) << spec << " " << layer;
            cache.decode(0, layer, 0, Side::key, 0, 512, row.data());
            double error = 0;
            for (size_t i = 0; i < row.size(); ++i)
                error = std::max(error, double(std::fabs(row[i] - x[i])));
            EXPECT_EQ(error > 1e-3, layer == 1) << spec << " " << layer;
        }
    }
    EXPECT_FALSE(only_layer("nothing", 0).ok());
}

TEST(Positions, PartsCoverTheScoredPositionsOnce) {
    CompareOptions o;
    o.window = 12, o.score_from = 5;
    EXPECT_EQ(position_edges(o, 3), (std::vector<int32_t>{5, 7, 9, 12}));
    EXPECT_EQ(position_edges(o, 100).size(), 8u) << "no part without a position";
    Row row;
    row.windows.resize(2);
    row.windows[0].kl = {1, 2, 3, 4, 5, 6, 7};
    row.windows[1].kl = {3, 4, 5, 6, 7, 8, 9};
    EXPECT_EQ(kl_by_position(row, {5, 7, 9, 12}), (std::vector<double>{2.5, 4.5, 7}));
}

// Beyond what is filled, sizes are worked out: they are those of a cache of that length.
TEST(Lengths, LongContextsAreWorkedOut) {
    constexpr int64_t kRows = 12288, kStep = 512;
    ModelShape shape;
    shape.layers = {{2, 1, 64, 64}};
    std::vector<float> x(kStep * 128);
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = float((i * 2654435761u >> 8) % 1000) / 500.0f - 1.0f;
    const SeqId names[] = {0};
    for (const char* spec :
         {"f16", "kivi:bits=2", "kitty", "pnmix", "innerq", "mixkvq:raw_share=0.125,mid_share=0.5", "mosaic"}) {
        const auto worked = LengthBits::make(shape, spec, {2048, kRows});
        ASSERT_TRUE(worked.ok()) << worked.status().message();
        auto cache = std::move(*Cache::create(shape, spec));
        for (int64_t first = 0; first < kRows; first += kStep) {
            std::vector<StepRow> step;
            for (int64_t i = 0; i < kStep; ++i)
                step.push_back({int32_t(first + i), names});
            ASSERT_TRUE(cache->begin_step(step).ok());
            cache->write(0, {x.data(), 128, 64}, {x.data(), 64, 64}, {x.data(), 64, 64});
            cache->end_step();
        }
        EXPECT_NEAR(worked->bits(1, *cache), cache->footprint().true_bits(), 0.005) << spec;
    }
}

TEST(Labels, CoverNeitherPointsNorEachOther) {
    std::vector<Label> labels;
    for (int i = 0; i < 12; ++i)
        labels.push_back({200 + 70.0 * (i % 4), 150 + 45.0 * (i / 4), "bits=" + std::to_string(i)});
    labels.push_back({2, 2, "corner"});
    place_labels(&labels, 600, 400, 11);
    const auto covers = [](const Label& a, double x, double y, double w, double h) {
        const double mine = 0.62 * 11 * double(a.text.size());
        return std::fabs(a.at_x - x) < (mine + w) / 2 - 1e-6 && std::fabs(a.at_y - y) < (12.1 + h) / 2 - 1e-6;
    };
    for (size_t i = 0; i < labels.size(); ++i) {
        const Label& a = labels[i];
        EXPECT_GE(a.at_x - 0.31 * 11 * double(a.text.size()), -1e-6) << a.text;
        EXPECT_GE(a.at_y - 6.05, -1e-6) << a.text;
        for (size_t j = 0; j < labels.size(); ++j) {
            const Label& b = labels[j];
            EXPECT_FALSE(covers(a, b.x, b.y, 8, 8)) << a.text << " covers the point of " << b.text;
            if (i != j) {
                EXPECT_FALSE(covers(a, b.at_x, b.at_y, 0.62 * 11 * double(b.text.size()), 12.1))
                    << a.text << " " << b.text;
            }
        }
    }
}

Json row(const std::string& spec, double bits, double kl) {
    return {{"spec", spec},      {"canonical", spec}, {"tokens", 100},
            {"true_bits", bits}, {"kl_mean", kl},     {"kl_error", kl / 10}};
}
Json result(const std::string& model, std::vector<Json> rows) {
    Json out{{"model", model},       {"model_sha256", "aa" + model},
             {"text", "t"},          {"text_sha256", "bb"},
             {"weights", "f16"},     {"window", 64},
             {"windows", 1},         {"score_from", 32},
             {"commit", "c"},        {"machine", "m"},
             {"version", "1"},       {"command", "kvmosaic " + model},
             {"rows", Json::array()}};
    rows.insert(rows.begin(), {row("f16", 16.1, 0), row("floor", 16.1, 1e-6)});
    out["rows"] = rows;
    return out;
}

TEST(Report, TheFrontHasNothingBetterThanItself) {
    const std::vector<Json> rows{row("a", 2, 0.5), row("b", 3, 0.1), row("c", 3, 0.2), row("d", 4, 0.1),
                                 row("e", 5, 0.01)};
    EXPECT_EQ(on_front(rows), (std::vector<bool>{true, true, false, false, true}));
    EXPECT_EQ(caches_of(result("m", rows)).size(), rows.size());
}

TEST(Report, SpecsAreShortened) {
    EXPECT_EQ(short_spec("kvquant:calib=/long/path,bits=2", 40), "kvquant:bits=2");
    EXPECT_EQ(short_spec("skvq:v=1.5,calib=x", 40), "skvq:v=1.5");
    EXPECT_EQ(short_spec("kvquant:calib=x", 40), "kvquant");
    EXPECT_EQ(short_spec("0123456789abcdef", 9), "0123\u2026cdef");
}

TEST(Report, ResultsOfOneKindAreJoinedOthersStayApart) {
    Json other = result("m", {row("a", 2, 0.9), row("b", 3, 0.1)});
    other["command"] = "another";
    Json window = result("m", {row("a", 2, 0.5)});
    window["window"] = 128;
    const std::vector<Json> joined =
        join_results({result("m", {row("a", 2, 0.5)}), result("n", {row("a", 2, 0.7)}), other, window});
    ASSERT_EQ(joined.size(), 3u);
    const std::vector<Json> rows = caches_of(joined[0]);
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0]["kl_mean"], 0.5) << "the first stays";
    EXPECT_EQ(rows[1]["spec"], "b");
    ASSERT_EQ(joined[0]["parts"].size(), 2u);
    EXPECT_EQ(joined[0]["parts"][1]["command"], "another");
}

TEST(Report, RefusesWhatIsNoResult) {
    EXPECT_TRUE(check_result(result("m", {})).ok());
    const auto message = [](const Json& j) { return check_result(j).message(); };
    EXPECT_NE(message(Json::array()).find("not a JSON object"), std::string::npos);
    EXPECT_NE(message({{"kind", "x"}}).find("'model'"), std::string::npos);
    Json bad = result("m", {row("a", 2, 1)});
    bad["rows"][2].erase("kl_mean");
    EXPECT_NE(message(bad).find("row 'a' has no number 'kl_mean'"), std::string::npos);
    bad["rows"] = 3;
    EXPECT_NE(message(bad).find("'rows'"), std::string::npos);
}

TEST(Report, QuotesForGnuplot) { EXPECT_EQ(gnuplot_text("it's\n\"x\""), "'it''s \"x\"'"); }

TEST(Report, PlotsHoldTheirTextsAsTextAndNamesOfTheirOwn) {
    if (!check_gnuplot()) GTEST_SKIP() << "gnuplot is not installed";
    const auto svg = draw_svg("mine", 300, 200, "plot x title " + gnuplot_text("<b>&'\"_{x}") + "\n");
    ASSERT_TRUE(svg.ok()) << svg.status().message();
    EXPECT_EQ(svg->rfind("<svg", 0), 0u);
    EXPECT_NE(svg->find("id='mine-gpPt0'"), std::string::npos);
    EXPECT_EQ(svg->find("id='gp"), std::string::npos);
    EXPECT_EQ(svg->find("href='#gp"), std::string::npos);
    EXPECT_NE(svg->find("&lt;b>&amp;'\"_{x}"), std::string::npos);
    EXPECT_EQ(svg->find("<b>"), std::string::npos);
    const auto bad = draw_svg("mine", 300, 200, "plot $nothing\n");
    EXPECT_NE(bad.status().message().find("could not draw mine"), std::string::npos);
}

TEST(Report, APageSaysWhereItsRowsComeFrom) {
    if (!check_gnuplot()) GTEST_SKIP() << "gnuplot is not installed";
    const auto page = html_report(
        {result("m.gguf", {row("a:x=<1>", 2.345, 0.5), row("b", 3, 0.1)}), result("n", {row("a", 2, 0.7)})});
    ASSERT_TRUE(page.ok()) << page.status().message();
    for (const char* text : {"a:x=&lt;1&gt;", "2.35", "0.50000", "kvmosaic m.gguf", "aam.gguf", "100 tokens scored",
                             "commit c", "floor: f16 against f32", "All results",
                             "Not in this result: KL by position in the window, KL by layer, "
                             "Bits against context length, Memory and speed, Channels"})
        EXPECT_NE(page->find(text), std::string::npos) << text;
    EXPECT_EQ(page->find("<1>"), std::string::npos);
}

} // namespace
} // namespace kvmosaic::eval
