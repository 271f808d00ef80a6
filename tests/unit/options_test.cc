// Spec strings: what parses, how it is printed, and that every mistake is one sentence that names it.
#include <gtest/gtest.h>

#include "core/text.h"
#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

std::string canonical(const std::string& spec) {
    const auto method = open_method(spec);
    EXPECT_TRUE(method.ok()) << spec << ": " << method.status().message();
    return method ? (*method)->spec() : "";
}

TEST(Options, DefaultsAreLeftOutAndOrderIsFixed) {
    EXPECT_EQ(canonical("kivi"), "kivi");
    EXPECT_EQ(canonical("kivi:bits=2,group=32,residual=128,front=0,keep=0,params=f16"), "kivi");
    EXPECT_EQ(canonical("kivi:front=8,group=64,bits=4"), "kivi:bits=4,group=64,front=8");
    EXPECT_EQ(canonical("mixkvq:hi=12,mid=1.6,front=4"), "mixkvq");
    EXPECT_EQ(canonical("mixkvq:raw_share=off,mid_share=off"), "mixkvq");
    EXPECT_EQ(canonical("f16"), "f16");
}

TEST(Options, EqualNumbersAreEqualText) {
    EXPECT_EQ(canonical("mixkvq:mid=0.50"), "mixkvq:mid=0.5");
    EXPECT_EQ(canonical("mixkvq:mid=5e-1"), "mixkvq:mid=0.5");
    EXPECT_EQ(canonical("mixkvq:mid=1.600"), "mixkvq");
    EXPECT_EQ(canonical("mixkvq:mid=-0"), "mixkvq:mid=0");
    EXPECT_EQ(canonical("kivi:front=007"), "kivi:front=7");
    EXPECT_EQ(canonical("kivi:bits=04"), "kivi:bits=4");
}

struct Mistake {
    std::string spec;
    std::vector<std::string> says;
};

TEST(Options, EveryMistakeIsOneSentenceThatNamesIt) {
    const std::vector<Mistake> mistakes = {
        {"", {"the name of a method is missing", "f16", "kivi", "mixkvq"}},
        {":bits=2", {"the name of a method is missing"}},
        {"kivy", {"unknown method \"kivy\"", "did you mean kivi?", "(methods are f16, bf16, f32, mosaic, kivi"}},
        {"KIVI:bits=2", {"unknown method \"KIVI\"", "did you mean kivi?"}},
        {"mixkv:hi=3", {"unknown method \"mixkv\"", "did you mean mixkvq?"}},
        {"zzzzzzzzzz", {"unknown method \"zzzzzzzzzz\" (methods are"}},
        {"f16:front=4", {"f16: has no options", "\"front\""}},
        {"kivi:", {"kivi", "must follow the colon"}},
        {"kivi:bit=2",
         {"unknown option \"bit\"", "did you mean bits?", "bits, group, residual, front, keep and params"}},
        {"kivi: bits=2", {"unknown option \" bits\"", "did you mean bits?"}},
        {"kivi:bits=two", {"kivi: bits must be 1, 2, 3, 4, 6 or 8, not \"two\"", "(in \"kivi:bits=two\")"}},
        {"kivi:bits=5", {"bits must be 1, 2, 3, 4, 6 or 8, not \"5\""}},
        {"kivi:bits=2.0", {"bits must be", "not \"2.0\""}},
        {"kivi:bits=+2", {"bits must be", "not \"+2\""}},
        {"kivi:bits= 2", {"bits must be", "not \" 2\""}},
        {"kivi:bits=", {"option bits has no value", "bits must be 1, 2, 3, 4, 6 or 8"}},
        {"kivi:bits", {"option bits has no value"}},
        {"kivi:bits=2,bits=2", {"option bits is given twice"}},
        {"kivi:bits=2,", {"an option is missing before or after a comma"}},
        {"kivi:,bits=2", {"an option is missing before or after a comma"}},
        {"kivi:bits=2,,group=32", {"an option is missing before or after a comma"}},
        {"kivi:=2", {"unknown option \"\""}},
        {"kivi:bits=2=3", {"not \"2=3\""}},
        {"kivi:front=-1", {"front must be 0 to 4096, not \"-1\""}},
        {"kivi:front=4097", {"front must be 0 to 4096, not \"4097\""}},
        {"kivi:keep=65537", {"keep must be 0 to 65536, not \"65537\""}},
        {"kivi:front=99999999999999999999", {"front must be 0 to 4096"}},
        {"kivi:group=24", {"group must be 8, 16, 32, 64 or 128, not \"24\""}},
        {"kivi:group=256", {"group must be"}},
        {"kivi:params=f32", {"params must be f16, bf16 or f8e4m3, not \"f32\""}},
        {"mixkvq:hi=nan", {"hi must be 0 to 1e+09, not \"nan\""}},
        {"mixkvq:hi=inf", {"hi must be 0 to 1e+09, not \"inf\""}},
        {"mixkvq:hi=1e999", {"hi must be"}},
        {"mixkvq:hi=-1", {"hi must be"}},
        {"mixkvq:hi=1,5", {"unknown option \"5\""}},
        {"mixkvq:raw_share=1.1", {"raw_share must be 0 to 1, or off, not \"1.1\""}},
        {"mixkvq:score=both", {"score must be product, scale or query, not \"both\""}},
        {"kivi:bits=2\n", {"not \"2?\""}},
    };
    for (const Mistake& mistake : mistakes) {
        const auto method = open_method(mistake.spec);
        ASSERT_FALSE(method.ok()) << mistake.spec;
        EXPECT_EQ(method.status().code(), StatusCode::invalid_argument) << mistake.spec;
        const std::string& message = method.status().message();
        for (const std::string& part : mistake.says) {
            EXPECT_NE(message.find(part), std::string::npos) << '"' << part << "\" is not in: " << message;
        }
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        EXPECT_NE(message.find("(in "), std::string::npos) << message;
    }
}

TEST(Options, VeryLongSpecsAreRefusedAndNotRepeated) {
    for (const size_t length : {size_t(1001), size_t(100000)}) {
        const auto method = open_method("kivi:bits=" + std::string(length - 10, '2'));
        ASSERT_FALSE(method.ok());
        EXPECT_NE(method.status().message().find("at most 1000 characters, this one has " + std::to_string(length)),
                  std::string::npos);
        EXPECT_LT(method.status().message().size(), 300u);
    }
    const auto method = open_method(std::string(1000, 'k'));
    ASSERT_FALSE(method.ok());
    EXPECT_LT(method.status().message().size(), 400u);
}

TEST(Options, BytesOfAnyKindNeverParseByAccident) {
    for (int c = 1; c < 256; ++c) {
        const std::string odd(1, char(c));
        EXPECT_FALSE(open_method("kivi" + odd).ok()) << c;
        EXPECT_FALSE(open_method(odd + "kivi").ok()) << c;
        EXPECT_FALSE(open_method("kivi:" + odd).ok()) << c;
        const bool digit = c >= '0' && c <= '9';
        EXPECT_EQ(open_method("kivi:front=1" + odd).ok(), digit) << c;
    }
    EXPECT_FALSE(open_method(std::string_view("kivi\0", 5)).ok());
}

TEST(Options, HelpShowsEveryOption) {
    for (const MethodInfo* info : methods()) {
        const std::string help = help_text(info->options);
        for (const OptionInfo& option : info->options) {
            EXPECT_NE(help.find("  " + option.name + "="), std::string::npos) << help;
            EXPECT_NE(help.find(option.help), std::string::npos) << help;
            const std::string otherwise = option.fallback.empty() ? "must be given" : "default " + option.fallback;
            EXPECT_NE(help.find(allowed_text(option) + "; " + otherwise), std::string::npos) << help;
        }
    }
}

TEST(Text, NearestIgnoresCaseAndKnowsWhenNothingIsNear) {
    const std::vector<std::string> names = {"f16", "bf16", "kivi", "mixkvq"};
    EXPECT_EQ(text::nearest("kiwi", names), "kivi");
    EXPECT_EQ(text::nearest("MIXKVQ", names), "mixkvq");
    EXPECT_EQ(text::nearest("f61", names), ""); // two of three letters differ
    EXPECT_EQ(text::nearest("fp16", names), "f16");
    EXPECT_EQ(text::nearest("turbo", names), "");
    EXPECT_EQ(text::nearest("", names), "");
}

TEST(Text, JoinSplitQuote) {
    EXPECT_EQ(text::join({"a"}), "a");
    EXPECT_EQ(text::join({"a", "b"}), "a or b");
    EXPECT_EQ(text::join({"a", "b", "c"}, " and "), "a, b and c");
    EXPECT_EQ(text::split("a,,b", ','), (std::vector<std::string_view>{"a", "", "b"}));
    EXPECT_EQ(text::split("", ','), (std::vector<std::string_view>{""}));
    EXPECT_EQ(text::quote("a\tb\xC3"), "\"a?b?\"");
    EXPECT_EQ(text::quote(std::string(200, 'x')), '"' + std::string(80, 'x') + "...\"");
}

TEST(Text, RealsReadBackEqual) {
    for (const double x : {0.1, 1.6, 12.0, 1e9, 1.0 / 3.0, 5e-324}) {
        double back = -1;
        ASSERT_TRUE(text::parse_real(text::print_real(x), &back));
        EXPECT_EQ(back, x);
    }
}

} // namespace
} // namespace kvmosaic
