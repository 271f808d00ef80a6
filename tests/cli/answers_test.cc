// What free answers are judged by: numbers, shares, words, instructions. Everything against values worked out by hand.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "eval/answers.h"
#include "eval/gsm8k.h"
#include "eval/gzip.h"
#include "eval/ifeval.h"
#include "eval/ifeval_text.h"
#include "eval/longbench.h"
#include "eval/metrics.h"
#include "eval/shares.h"

namespace kvmosaic::eval {
namespace {

TEST(Answers, NumbersAreReadAsTheyAreWritten) {
    EXPECT_EQ(last_number("so it is 1,234,567."), "1234567");
    EXPECT_EQ(last_number("costs $18.50 in all"), "18.5");
    EXPECT_EQ(last_number("that is $-3"), "-3");
    EXPECT_EQ(last_number("that is -$3"), "-3");
    EXPECT_EQ(last_number("10-5"), "5");
    EXPECT_EQ(last_number("x = -5"), "-5");
    EXPECT_EQ(last_number("18.00"), "18");
    EXPECT_EQ(last_number("007"), "7");
    EXPECT_EQ(last_number("about .25 of it"), "0.25");
    EXPECT_EQ(last_number("-0"), "0");
    EXPECT_EQ(last_number("one, 2, 3"), "3");
    EXPECT_EQ(last_number("\\boxed{42}."), "42");
    EXPECT_EQ(last_number("1,2345"), "2345"); // no group of thousands
    EXPECT_EQ(last_number("none"), "");
    EXPECT_EQ(marked_number("3 and 4\n#### 7\n#### 8"), "7");
    EXPECT_EQ(marked_number("#### $1,000 dollars, 5 cents"), "1000");
    EXPECT_EQ(marked_number("####\n9"), "");
    EXPECT_EQ(marked_number("the answer is 7"), "");
}

TEST(Answers, SharesAndTheirIntervals) {
    // by the formula: p = 0.8, n = 10, z = 1.96
    EXPECT_NEAR(wilson(8, 10).low, 0.4901625, 1e-6);
    EXPECT_NEAR(wilson(8, 10).high, 0.9433178, 1e-6);
    EXPECT_EQ(wilson(0, 5).low, 0);
    EXPECT_EQ(wilson(5, 5).high, 1);
    EXPECT_EQ(wilson(0, 0).high, 1);
    EXPECT_DOUBLE_EQ(mcnemar(0, 0), 1);
    EXPECT_DOUBLE_EQ(mcnemar(3, 3), 1);
    EXPECT_NEAR(mcnemar(0, 5), 2.0 / 32, 1e-12);
    EXPECT_NEAR(mcnemar(7, 1), 2.0 * 9 / 256, 1e-12);
    EXPECT_EQ(mcnemar(7, 1), mcnemar(1, 7));
}

TEST(Answers, WhatTokensTell) {
    EXPECT_EQ(common_tokens({1, 2, 3}, {1, 2, 4, 3}), 2);
    EXPECT_EQ(common_tokens({}, {1}), 0);
    EXPECT_EQ(repetition({1, 2, 3, 4}), 0);
    EXPECT_DOUBLE_EQ(repetition({1, 2, 3, 4, 1, 2, 3, 4}), 1.0 / 5);
    EXPECT_EQ(common_beginning({{{1, 2, 3}}, {{1, 2, 3, 4}}}), 2u); // the first keeps a token of its own
    EXPECT_EQ(common_beginning({{{1, 2, 3}}}), 0u);
    Prompt forced{{1, 2, 3, 4}, 0, 2};
    EXPECT_EQ(common_beginning({forced, forced}), 1u); // what is said at its second token is asked

    Answer mine, theirs;
    mine.tokens = {1, 2, 3}, mine.stop = Stop::count, mine.bits = 4, mine.seconds = 2;
    theirs.tokens = {1, 2, 3}, theirs.stop = Stop::end, theirs.bits = 16;
    AnswersSummary s = summarize({&mine, &theirs}, {&theirs, &theirs});
    EXPECT_DOUBLE_EQ(s.identical, 0.5); // the same words, but one of them had ended
    EXPECT_DOUBLE_EQ(s.cut, 0.5);
    EXPECT_DOUBLE_EQ(s.bits, 10);
    EXPECT_DOUBLE_EQ(s.tokens_per_second, 3);
    EXPECT_DOUBLE_EQ(s.common_median, 3);
}

TEST(Answers, ErrorsOfBlocks) {
    // means 1 and 3 around 2: an error of 1, though the values alone would tell 0.58
    const Summary s = summarize(std::vector<std::vector<float>>{{1, 1}, {3, 3}});
    EXPECT_DOUBLE_EQ(s.mean, 2);
    EXPECT_DOUBLE_EQ(s.error, 1);
    EXPECT_TRUE(std::isnan(summarize(std::vector<std::vector<float>>{{1, 2}}).error));
    // independent blocks of one value each: the usual error
    EXPECT_NEAR(summarize(std::vector<std::vector<float>>{{1}, {2}, {4}}).error, summarize({1, 2, 4}).error, 1e-12);
}

TEST(Answers, WordsAreComparedAsLongBenchDoes) {
    EXPECT_DOUBLE_EQ(token_f1("The cat sat.", "a cat sat down"), 0.8);
    EXPECT_DOUBLE_EQ(token_f1("Yes!", "yes"), 1);
    EXPECT_DOUBLE_EQ(token_f1("no", "yes"), 0);
    EXPECT_DOUBLE_EQ(token_f1("cat cat", "cat"), 2.0 / 3);
    EXPECT_NEAR(rouge_l("the cat sat. a dog ran", "the cat ran"), 2.0 / 3, 1e-7);
    EXPECT_NEAR(rouge_l("sat cat the", "the cat sat"), 1.0 / 3, 1e-7); // order counts
    EXPECT_EQ(rouge_l("", "the cat"), 0);
    EXPECT_DOUBLE_EQ(right_numbers("Paragraph 7", "Paragraph 7"), 1);
    EXPECT_DOUBLE_EQ(right_numbers("Paragraph 7 or 17", "Paragraph 7"), 0.5);
    EXPECT_DOUBLE_EQ(right_numbers("none", "7"), 0);
    LongItem item{find_long_task("qasper"), "", {"a red car", "bus"}};
    EXPECT_DOUBLE_EQ(score(item, "bus"), 1);
    EXPECT_EQ(without_middle({1, 2, 3, 4, 5, 6}, 3), (std::vector<int32_t>{1, 2, 6}));
    EXPECT_EQ(without_middle({1, 2}, 3), (std::vector<int32_t>{1, 2}));
}

struct Case {
    const char* kind;
    const char* arguments;
    const char* good;
    const char* bad;
};

TEST(Answers, InstructionsAreKeptOrNot) {
    const Case cases[] = {
        {"keywords:existence", R"({"keywords": ["Mom", "tea"]})", "mom makes TEA", "mom makes"},
        {"keywords:forbidden_words", R"({"forbidden_words": ["rock"]})", "rocket", "a Rock."},
        {"keywords:frequency", R"({"keyword": "war", "relation": "at least", "frequency": 2})", "war and War", "war"},
        {"keywords:frequency", R"({"keyword": "war", "relation": "less than", "frequency": 2})", "war", "war, war"},
        {"keywords:letter_frequency", R"({"letter": "!", "let_relation": "at least", "let_frequency": 3})", "a!!!",
         "a!!"},
        {"length_constraints:number_paragraphs", R"({"num_paragraphs": 2})", "one\n***\ntwo\n***\n",
         "one\n***\n***\nb"},
        {"length_constraints:number_words", R"({"relation": "less than", "num_words": 3})", "two words", "it's two"},
        {"length_constraints:nth_paragraph_first_word",
         R"({"first_word": "then", "num_paragraphs": 2, "nth_paragraph": 2})", "One.\n\n\"Then, two",
         "One.\n\nTwo then"},
        {"detectable_content:number_placeholders", R"({"num_placeholders": 2})", "[name] at [place]", "[name]"},
        {"detectable_content:postscript", R"({"postscript_marker": "P.S."})", "bye\np. s. more", "bye"},
        {"detectable_format:number_bullet_lists", R"({"num_bullets": 2})", "* a\n - b", "* a\n**b**"},
        {"detectable_format:number_highlighted_sections", R"({"num_highlights": 2})", "*a* and **b**", "*a* and ** **"},
        {"detectable_format:multiple_sections", R"({"section_spliter": "SECTION", "num_sections": 2})",
         "SECTION 1\nx\nSECTION2", "SECTION 1 section 2"},
        {"combination:repeat_prompt", R"({"prompt_to_repeat": "Say hi."})", " say hi. Hi", "Hi. Say hi."},
        {"startend:end_checker", R"({"end_phrase": "The end."})", "So \"the end.\"", "The end. Or not"},
        {"change_case:capital_word_frequency", R"({"capital_relation": "at least", "capital_frequency": 2})",
         "A USA day", "Usa A"},
        {"detectable_format:json_format", "{}", "```json\n{\"a\": 1}\n```", "{a: 1}"},
        {"detectable_format:constrained_response", "{}", "My answer is no.", "no"},
        {"detectable_format:title", "{}", "<<A title>>\ntext", "<< >> text"},
        {"combination:two_responses", "{}", "one\n******\ntwo", "one\n******\none"},
        {"startend:quotation", "{}", " \"all of it\" ", "\"half\" of it"},
        {"change_case:english_capital", "{}", "ALL OF IT 1.", "ALL of it"},
        {"change_case:english_lowercase", "{}", "all of it 1.", "All of it"},
        {"punctuation:no_comma", "{}", "none; at all", "one, at least"}};
    std::vector<std::string> seen;
    for (const Case& c : cases) {
        const Instruction instruction{c.kind, nlohmann::json::parse(c.arguments)};
        ASSERT_TRUE(validate(instruction).ok()) << c.kind;
        EXPECT_TRUE(kept(instruction, c.good)) << c.kind;
        EXPECT_FALSE(kept(instruction, c.bad)) << c.kind;
        EXPECT_FALSE(kept(instruction, " \n")) << c.kind;
        seen.push_back(c.kind);
    }
    for (const std::string& kind : checkable_kinds())
        EXPECT_NE(std::find(seen.begin(), seen.end(), kind), seen.end()) << kind;
    EXPECT_NE(validate({"keywords:existence", {{"keywords", "tea"}}}).message().find("a list of texts"),
              std::string::npos);
    EXPECT_FALSE(validate({"keywords:none", nlohmann::json::object()}).ok());
    // of any script; dashes and quotes part words
    EXPECT_EQ(text::words("d\u00e9j\u00e0 vu\u2014\u201cwe\u201d 2_x"),
              (std::vector<std::string>{"d\u00e9j\u00e0", "vu", "we", "2_x"}));
}

TEST(Answers, GzipIsReadWholeOrNotAtAll) {
    // printf 'hello\n' | gzip -n, twice
    const unsigned char bytes[] = {0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0xcb, 0x48, 0xcd,
                                   0xc9, 0xc9, 0xe7, 0x02, 0x00, 0x20, 0x30, 0x3a, 0x36, 0x06, 0x00, 0x00, 0x00};
    const std::string one(reinterpret_cast<const char*>(bytes), sizeof bytes);
    EXPECT_EQ(*gunzip(one), "hello\n");
    EXPECT_EQ(*gunzip(one + one), "hello\nhello\n");
    EXPECT_FALSE(gunzip(one.substr(0, 20)).ok());
    EXPECT_FALSE(gunzip("hello").ok());
    EXPECT_FALSE(gunzip("").ok());
    EXPECT_EQ(gunzip(one, 3).status().code(), StatusCode::out_of_capacity);
}

} // namespace
} // namespace kvmosaic::eval
