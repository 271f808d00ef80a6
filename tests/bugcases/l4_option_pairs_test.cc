// Bug case L4: a pair of options that cannot work is a sentence when the spec is read, never a crash later.
#include <gtest/gtest.h>

#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

std::vector<std::string> values_of(const OptionInfo& option) {
    std::vector<std::string> values = option.choices;
    if (values.empty()) {
        for (const double x : {option.min, (option.min + option.max) / 2, option.max}) {
            values.push_back(option.kind == OptionInfo::Kind::integer ? std::to_string(int64_t(x)) : std::to_string(x));
        }
    }
    if (!option.word.empty()) values.push_back(option.word);
    return values;
}

// Opens the spec; if it opens, it must also serve a model. Returns whether it opened.
bool opens_and_serves(const std::string& spec, const std::string& a, const std::string& b) {
    const auto method = open_method(spec);
    if (!method) {
        const std::string& message = method.status().message();
        EXPECT_EQ(method.status().code(), StatusCode::invalid_argument);
        EXPECT_NE(message.find(a), std::string::npos) << message;
        EXPECT_NE(message.find(b), std::string::npos) << message;
        EXPECT_NE(message.find(spec), std::string::npos) << message;
        return false;
    }
    const ModelShape shape{{{12, 2, 128, 128}, {16, 16, 192, 128}, {9, 3, 64, 64}, {4, 1, 80, 40}}, "m"};
    EXPECT_TRUE((*method)->accept(shape).ok()) << spec;
    for (const Side side : {Side::key, Side::value}) {
        const SidePlan plan = (*method)->initial(side, 0, 0, 128);
        if (plan.window.flush == 0) continue;
        EXPECT_EQ(kPageTokens % plan.window.flush, 0) << spec;
        EXPECT_TRUE(plan.store.axis == Axis::channels || plan.window.flush % plan.store.group == 0) << spec;
    }
    return true;
}

TEST(BugL4, AllOptionPairs) {
    int opened = 0, refused = 0;
    for (const MethodInfo* info : methods()) {
        for (const OptionInfo& a : info->options) {
            for (const OptionInfo& b : info->options) {
                if (a.name >= b.name) continue;
                for (const std::string& x : values_of(a)) {
                    for (const std::string& y : values_of(b)) {
                        const std::string spec = info->name + ":" + a.name + "=" + x + "," + b.name + "=" + y;
                        ++(opens_and_serves(spec, a.name, b.name) ? opened : refused);
                    }
                }
            }
        }
    }
    EXPECT_GT(opened, 500);
    EXPECT_GT(refused, 5);
}

TEST(BugL4, KnownImpossiblePairs) {
    EXPECT_FALSE(opens_and_serves("kivi:group=64,residual=32", "group=64", "residual=32"));
    EXPECT_FALSE(opens_and_serves("mixkvq:hi=3,raw_share=0.1", "hi=3", "raw_share"));
    EXPECT_FALSE(opens_and_serves("mixkvq:mid=3,mid_share=0.1", "mid=3", "mid_share"));
    EXPECT_FALSE(opens_and_serves("mixkvq:raw_share=0.6,mid_share=0.6", "0.6 and 0.6", "0 to 1"));
    EXPECT_TRUE(opens_and_serves("mixkvq:hi=12,raw_share=0.1", "", "")); // the default value says nothing
}

} // namespace
} // namespace kvmosaic
