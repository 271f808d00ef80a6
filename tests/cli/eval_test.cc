// Metrics, files and stored results of src/eval; no model needed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <random>

#include <gtest/gtest.h>
#include <unistd.h>

#include "eval/compare.h"
#include "eval/files.h"
#include "eval/metrics.h"
#include "eval/results.h"
#include "eval/texts.h"
#include "eval/weights.h"

namespace kvmosaic::eval {
namespace {

std::vector<float> random_logits(int n, unsigned seed, float spread) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0, spread);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x)
        v = normal(engine);
    return x;
}

// Straight from the definition, all in long double.
double plain_kl(const std::vector<float>& a, const std::vector<float>& b) {
    const auto normalizer = [](const std::vector<float>& x) {
        long double sum = 0;
        for (const float v : x)
            sum += std::exp(static_cast<long double>(v));
        return std::log(sum);
    };
    const long double za = normalizer(a), zb = normalizer(b);
    long double kl = 0;
    for (size_t i = 0; i < a.size(); ++i)
        kl += std::exp(a[i] - za) * ((a[i] - za) - (b[i] - zb));
    return double(kl);
}

TEST(Metrics, KlEqualsItsDefinitionDownToTheSmallestFloors) {
    for (const int n : {2, 33, 50000}) {
        for (const float noise : {1.0f, 1e-2f, 1e-3f, 1e-4f}) {
            const auto a = random_logits(n, 1, 3.0f);
            auto b = a;
            const auto shift = random_logits(n, 2, noise);
            for (size_t i = 0; i < b.size(); ++i)
                b[i] += shift[i];
            const LogSum sa = log_sum(a.data(), n), sb = log_sum(b.data(), n);
            const double want = plain_kl(a, b);
            EXPECT_NEAR(kl_divergence(a.data(), sa, b.data(), sb, n), want, 1e-6 * want + 2e-11) << n << " " << noise;
        }
    }
}

TEST(Metrics, EqualRowsHaveNoDivergenceAndShiftsDoNotMatter) {
    const auto a = random_logits(1000, 3, 5.0f);
    auto b = a;
    for (float& v : b)
        v += 64.0f; // softmax does not see a constant
    const LogSum sa = log_sum(a.data(), 1000), sb = log_sum(b.data(), 1000);
    EXPECT_EQ(kl_divergence(a.data(), sa, a.data(), sa, 1000), 0.0);
    EXPECT_LT(kl_divergence(a.data(), sa, b.data(), sb, 1000), 1e-9);
    EXPECT_EQ(sa.best, sb.best);
}

TEST(Metrics, LogProbabilitiesAddUpToOne) {
    const auto a = random_logits(777, 4, 20.0f);
    const LogSum sum = log_sum(a.data(), 777);
    double total = 0;
    for (int i = 0; i < 777; ++i)
        total += std::exp(log_probability(a.data(), sum, i));
    EXPECT_NEAR(total, 1.0, 1e-6);
    EXPECT_TRUE(sum.finite);
}

TEST(Metrics, BrokenLogitsAreNotFinite) {
    std::vector<float> a{1.0f, NAN, 2.0f};
    EXPECT_FALSE(log_sum(a.data(), 3).finite);
    a[1] = INFINITY;
    EXPECT_FALSE(log_sum(a.data(), 3).finite);
    a[1] = -INFINITY; // a suppressed token is legal
    EXPECT_TRUE(log_sum(a.data(), 3).finite);
}

TEST(Metrics, SummaryAndQuantile) {
    const Summary s = summarize(std::vector<float>{1, 2, 3, 4});
    EXPECT_DOUBLE_EQ(s.mean, 2.5);
    EXPECT_NEAR(s.error, std::sqrt(5.0 / 3.0 / 4.0), 1e-12);
    EXPECT_EQ(summarize(std::vector<float>{}).mean, 0.0);
    EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 0.0), 1.0);
    EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 1.0), 4.0);
    EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 0.5), 2.5);
}

class Files : public ::testing::Test {
protected:
    void SetUp() override {
        folder_ = std::filesystem::temp_directory_path() / ("kvmosaic-eval-" + std::to_string(::getpid()));
        std::filesystem::create_directories(folder_);
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }
    std::string path(const char* name) const { return (folder_ / name).string(); }
    std::filesystem::path folder_;
};

TEST_F(Files, WriteReplacesWholeOrLeavesNothing) {
    EXPECT_TRUE(write_file(path("a"), "one").ok());
    EXPECT_TRUE(write_file(path("a"), "two").ok());
    EXPECT_EQ(*read_file(path("a")), "two");
    const Status bad = write_file(path("none/a"), "three");
    EXPECT_FALSE(bad.ok());
    EXPECT_NE(bad.message().find("none/a"), std::string::npos);
    std::filesystem::create_directories(path("folder"));
    EXPECT_FALSE(write_file(path("folder"), "four").ok());
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
        files += entry.is_regular_file();
    EXPECT_EQ(files, 1) << "a temporary file was left behind";
}

TEST_F(Files, ChecksumsAreThoseOfTheStandard) {
    const char* abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"; // FIPS 180-4, example 1
    EXPECT_EQ(sha256_of("abc"), abc);
    ASSERT_TRUE(write_file(path("abc"), "abc").ok());
    EXPECT_EQ(*sha256_of_file(path("abc")), abc);
    EXPECT_FALSE(sha256_of_file(path("missing")).ok());
}

TEST_F(Files, ReadSaysWhatIsWrong) {
    EXPECT_EQ(read_file(path("missing")).status().code(), StatusCode::not_found);
    EXPECT_NE(read_file(folder_.string()).status().message().find("folder"), std::string::npos);
    ASSERT_TRUE(write_file(path("big"), std::string(100, 'x')).ok());
    EXPECT_FALSE(read_file(path("big"), 99).ok());
    EXPECT_TRUE(read_file(path("big"), 100).ok());
}

WindowResult window(float nll, float kl) {
    WindowResult w;
    w.nll = {nll, nll + 1};
    w.kl = {kl, 3 * kl};
    w.agree = 1, w.tokens = 4, w.seconds = 0.5, w.cache_bytes = 100;
    w.bits = 4, w.bits_key = 5, w.bits_value = 3;
    w.path = "restore", w.isa = "scalar";
    return w;
}

CompareHead head() {
    CompareHead h;
    h.model = "m.gguf", h.model_sha256 = "aa", h.texts = {"t"}, h.texts_sha256 = {"bb"}, h.weights = "f16",
    h.version = "1";
    h.options.window = 4, h.options.windows = {2}, h.options.score_from = 2;
    return h;
}

TEST(Results, SummaryOfARow) {
    const Row row{"kivi", "kivi", "f16", {window(1, 0.1f), window(2, 0.2f)}};
    const Row base{"f16", "f16", "f16", {window(0.5f, 0), window(1.75f, 0)}};
    const RowSummary s = summarize(row, base);
    EXPECT_NEAR(s.ppl_ratio, s.ppl / summarize(base, base).ppl, 1e-6);
    EXPECT_GT(s.ppl_ratio_error, 0);
    EXPECT_EQ(summarize(base, base).ppl_ratio, 1.0);
    EXPECT_TRUE(std::isnan(summarize(row, {"f16", "f16", "f16", {window(1, 0)}}).ppl_ratio)) << "other positions";
    EXPECT_EQ(s.tokens, 4);
    EXPECT_NEAR(s.ppl, std::exp(2.0), 1e-6);
    EXPECT_NEAR(s.kl_mean, (0.1 + 0.3 + 0.2 + 0.6) / 4, 1e-6);
    EXPECT_DOUBLE_EQ(s.top1, 0.5);
    EXPECT_DOUBLE_EQ(s.tokens_per_second, 8.0);
    EXPECT_EQ(s.cache_bytes, 100);
}

TEST(Results, RowsStartWithReferenceAndFloorAndF16IsNotRepeated) {
    const std::vector<Row> rows = plan_rows({"f16", "kivi:bits=4"});
    ASSERT_EQ(rows.size(), 3u);
    EXPECT_EQ(rows[0].spec, "f16");
    EXPECT_EQ(rows[1].spec, "floor");
    EXPECT_EQ(rows[1].reference, "f32");
    EXPECT_EQ(rows[2].spec, "kivi:bits=4");
    EXPECT_EQ(rows[2].reference, "f16");
}

TEST(Results, WarnsOfAFloorAboveATenthOfARow) {
    std::vector<Row> rows = plan_rows({"kivi:bits=4", "kivi:bits=2"});
    rows[0].windows = {window(1, 0)};
    rows[1].windows = {window(1, 0.001f)};
    rows[2].windows = {window(1, 0.009f)}; // floor is a ninth of it
    rows[3].windows = {window(1, 0.011f)};
    const std::vector<std::string> texts = warnings(rows);
    ASSERT_EQ(texts.size(), 1u);
    EXPECT_NE(texts[0].find("kivi:bits=4"), std::string::npos);
}

TEST(Results, ValidateNamesFieldAndRange) {
    CompareOptions o;
    const std::vector<int32_t> text(8192);
    EXPECT_TRUE(validate(o, {"a"}, {text}, 8192).ok());
    const auto message = [&](const CompareOptions& wrong) { return validate(wrong, {"a"}, {text}, 8192).message(); };
    CompareOptions wrong = o;
    wrong.window = 8193;
    EXPECT_NE(message(wrong).find("2 to 8192"), std::string::npos);
    wrong = o, wrong.windows = {5};
    EXPECT_NE(message(wrong).find("10240"), std::string::npos);
    wrong = o, wrong.score_from = 2048;
    EXPECT_NE(message(wrong).find("1 to 2047"), std::string::npos);
    wrong = o, wrong.windows = {0};
    EXPECT_NE(message(wrong).find("windows 0"), std::string::npos);
    wrong = o, wrong.windows = {4, 1};
    const std::vector<int32_t> shorter(100);
    EXPECT_NE(validate(wrong, {"a", "bee"}, {text, shorter}, 8192)
                  .message()
                  .find("1 window of 2048 tokens need 2048 tokens, the text bee has 100"),
              std::string::npos);
}

TEST_F(Files, ProgressComesBackAndKeepsWhatIsNotAskedFor) {
    std::vector<Row> rows = plan_rows({"kivi:bits=4", "mixkvq"});
    for (Row& row : rows)
        row.windows = {window(1, 0.25f)};
    const std::string file = path("progress");
    ASSERT_TRUE(save_progress(file, head(), rows).ok());

    std::vector<Row> fewer = plan_rows({"mixkvq"});
    ASSERT_TRUE(load_progress(file, head(), &fewer).ok());
    ASSERT_EQ(fewer.back().windows.size(), 1u);
    EXPECT_EQ(fewer.back().windows[0].kl, rows.back().windows[0].kl);
    EXPECT_EQ(fewer.back().windows[0].path, "restore");
    fewer.back().windows.push_back(window(2, 0.5f));
    ASSERT_TRUE(save_progress(file, head(), fewer).ok());

    std::vector<Row> again = plan_rows({"kivi:bits=4", "mixkvq"});
    ASSERT_TRUE(load_progress(file, head(), &again).ok());
    EXPECT_EQ(again[2].windows.size(), 1u) << "a row that one run left out was lost";
    EXPECT_EQ(again[3].windows.size(), 2u);
}

// Windows of several texts are numbered through: only those of the last text may grow.
TEST_F(Files, ProgressOfSeveralTexts) {
    CompareHead both = head();
    both.texts = {"t", "u"}, both.texts_sha256 = {"bb", "cc"}, both.options.windows = {2, 1};
    const std::string file = path("progress");
    std::vector<Row> rows = plan_rows({"mixkvq"});
    for (Row& row : rows)
        row.windows = {window(1, 0), window(2, 0), window(3, 0)};
    rows[2].windows[0].curve[kAt2K] = 4.5;
    ASSERT_TRUE(save_progress(file, both, rows).ok());
    std::vector<Row> again = plan_rows({"mixkvq"});
    ASSERT_TRUE(load_progress(file, both, &again).ok());
    ASSERT_EQ(again[2].windows.size(), 3u);
    EXPECT_EQ(again[2].windows[0].curve[kAt2K], 4.5);
    EXPECT_TRUE(std::isnan(again[2].windows[0].curve[kAt8K]));
    both.options.windows = {2, 4};
    EXPECT_TRUE(load_progress(file, both, &again).ok());
    both.options.windows = {1, 1};
    EXPECT_NE(load_progress(file, both, &again).message().find("text_sha256"), std::string::npos);
    EXPECT_FALSE(load_progress(file, head(), &again).ok());
}

TEST_F(Files, TextsOfQuestionsAndAnswers) {
    ASSERT_TRUE(
        write_file(path("a.jsonl"),
                   "{\"question\": \"1+1?\", \"answer\": \"2\"}\n\n{\"question\": \"q\", \"answer\": \"a\", \"x\": 1}")
            .ok());
    EXPECT_EQ(*read_text(path("a.jsonl")), "1+1?\n2\n\nq\na\n\n");
    ASSERT_TRUE(write_file(path("a.txt"), "{\"question\": 1}").ok());
    EXPECT_EQ(*read_text(path("a.txt")), "{\"question\": 1}");
    const std::pair<const char*, const char*> wrong[] = {
        {"{\"question\": \"q\", \"answer\": 3}", "line 1: has no text in the field 'answer'"},
        {"{\"question\": \"q\", \"answer\": \"\"}\n[]", "line 2: is not a JSON object"},
        {"question", "line 1: is not a JSON object"}};
    for (const auto& [text, words] : wrong) {
        ASSERT_TRUE(write_file(path("b.jsonl"), text).ok());
        EXPECT_NE(read_text(path("b.jsonl")).status().message().find(words), std::string::npos) << text;
    }
    EXPECT_EQ(read_text(path("none.jsonl")).status().code(), StatusCode::not_found);
}

TEST_F(Files, ProgressOfAnotherComparisonIsRefusedByField) {
    const std::string file = path("progress");
    ASSERT_TRUE(save_progress(file, head(), plan_rows({"mixkvq"})).ok());
    CompareHead other = head();
    other.options.window = 8;
    std::vector<Row> rows = plan_rows({"mixkvq"});
    EXPECT_NE(load_progress(file, other, &rows).message().find("window is 4 there, 8 here"), std::string::npos);
    ASSERT_TRUE(write_file(file, "{\"kind\": 3}").ok());
    EXPECT_FALSE(load_progress(file, head(), &rows).ok());
    ASSERT_TRUE(write_file(file, "not json").ok());
    EXPECT_FALSE(load_progress(file, head(), &rows).ok());
    EXPECT_TRUE(load_progress(path("missing"), head(), &rows).ok()) << "no file is no progress";
}

TEST(Results, JsonHasTheAgreedFields) {
    std::vector<Row> rows = plan_rows({"mixkvq"});
    for (Row& row : rows)
        row.windows = {window(1, 0.25f)};
    const auto json = to_json(head(), rows);
    for (const char* field : {"model", "model_sha256", "text", "machine", "version", "rows"}) {
        EXPECT_TRUE(json.contains(field)) << field;
    }
    for (const auto& row : json["rows"]) {
        for (const char* field :
             {"spec", "tokens", "true_bits", "true_bits_k", "true_bits_v", "cache_bytes", "ppl", "ppl_ratio",
              "true_bits_2k", "true_bits_8k", "kl_mean", "kl_p99", "top1", "prefill_tok_s", "path"}) {
            EXPECT_TRUE(row.contains(field)) << field;
        }
    }
}

TEST(Weights, NamesAreParsed) {
    EXPECT_EQ(*parse_weights("f16"), WeightType::f16);
    EXPECT_EQ(*parse_weights("as-is"), WeightType::as_is);
    EXPECT_NE(parse_weights("f8").status().message().find("f16, f32 or as-is"), std::string::npos);
}

} // namespace
} // namespace kvmosaic::eval
