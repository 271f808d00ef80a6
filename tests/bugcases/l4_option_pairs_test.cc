// Bug case L4: a pair of options that cannot work is a sentence when the spec is read, never a crash later.
#include <gtest/gtest.h>

#include "kvmosaic/method.h"
#include "unit/methods_calibration.h"

namespace kvmosaic {
namespace {

std::vector<std::string> values_of(const OptionInfo& option) {
    std::vector<std::string> values = option.choices;
    if (option.kind == OptionInfo::Kind::text) return values; // a file: the same for all pairs
    if (values.empty()) {
        for (const double x : {option.min, (option.min + option.max) / 2, option.max}) {
            values.push_back(option.kind == OptionInfo::Kind::integer ? std::to_string(int64_t(x)) : std::to_string(x));
        }
    }
    if (!option.word.empty()) values.push_back(option.word);
    return values;
}

LayerShape layer(int32_t heads, int32_t kv_heads, int32_t key_dim, int32_t value_dim) {
    LayerShape l{heads, kv_heads, key_dim, value_dim};
    l.rope.known = true;
    l.rope.rotary = key_dim;
    return l;
}

const ModelShape& some_model() {
    static const ModelShape shape{
        {layer(12, 2, 128, 128), layer(16, 16, 192, 128), layer(9, 3, 64, 64), layer(4, 1, 80, 40)}, "m"};
    return shape;
}

// Opens the spec; if it opens, it must also serve a model. Returns whether it opened.
bool opens_and_serves(const std::string& bare, const std::string& a, const std::string& b) {
    const std::string spec = calibrations::with_file(bare, some_model());
    const auto method = open_method(spec);
    if (!method) {
        const std::string& message = method.status().message();
        EXPECT_EQ(method.status().code(), StatusCode::invalid_argument) << message;
        EXPECT_NE(message.find(a), std::string::npos) << message;
        EXPECT_NE(message.find(b), std::string::npos) << message;
        EXPECT_NE(message.find(bare.substr(0, 40)), std::string::npos) << message;
        return false;
    }
    EXPECT_TRUE((*method)->accept(some_model()).ok()) << spec;
    for (int32_t i = 0; i < int32_t(some_model().layers.size()); ++i) {
        const LayerShape& l = some_model().layers[size_t(i)];
        for (const Side side : {Side::key, Side::value}) {
            const SidePlan plan = (*method)->initial(side, i, l.kv_heads - 1, l.dim(side));
            if (plan.window.flush == 0) continue;
            EXPECT_TRUE(validate(plan.store, side, l.dim(side)).ok()) << spec;
            EXPECT_TRUE(validate(plan.transform, l.dim(side), l.kv_heads).ok()) << spec;
            EXPECT_EQ(kPageTokens % plan.window.flush, 0) << spec;
            EXPECT_TRUE(plan.store.axis == Axis::channels || plan.window.flush % plan.store.group == 0) << spec;
        }
    }
    return true;
}

TEST(BugL4, AllOptionPairs) {
    int opened = 0, refused = 0;
    for (const MethodInfo* info : methods()) {
        // A value that the default of another option does not allow; the sentence names it.
        const auto refused_alone = [&](const OptionInfo& option, const std::string& value) {
            return !opens_and_serves(info->name + ":" + option.name + "=" + value, option.name, value);
        };
        for (const OptionInfo& a : info->options) {
            for (const OptionInfo& b : info->options) {
                if (a.name >= b.name) continue;
                for (const std::string& x : values_of(a)) {
                    if (refused_alone(a, x)) continue;
                    for (const std::string& y : values_of(b)) {
                        if (refused_alone(b, y)) continue;
                        const std::string spec = info->name + ":" + a.name + "=" + x + "," + b.name + "=" + y;
                        ++(opens_and_serves(spec, a.name, b.name) ? opened : refused);
                    }
                }
            }
        }
    }
    EXPECT_GT(opened, 1000);
    EXPECT_GT(refused, 5);
}

TEST(BugL4, KnownImpossiblePairs) {
    EXPECT_FALSE(opens_and_serves("kivi:group=64,residual=32", "group=64", "residual=32"));
    EXPECT_FALSE(opens_and_serves("mixkvq:hi=3,raw_share=0.1", "hi=3", "raw_share"));
    EXPECT_FALSE(opens_and_serves("mixkvq:mid=3,mid_share=0.1", "mid=3", "mid_share"));
    EXPECT_FALSE(opens_and_serves("mixkvq:raw_share=0.6,mid_share=0.6", "0.6 and 0.6", "0 to 1"));
    EXPECT_TRUE(opens_and_serves("mixkvq:hi=12,raw_share=0.1", "", "")); // the default value says nothing
    EXPECT_FALSE(opens_and_serves("kitty:variant=pro,ratio=0.5", "variant=pro", "ratio=0.5"));
    EXPECT_FALSE(opens_and_serves("innerq:variant=hybrid,params=f8e4m3", "variant=hybrid", "params"));
    EXPECT_FALSE(opens_and_serves("innerq:variant=small,asym=4level", "variant=small", "asym=4level"));
    EXPECT_TRUE(opens_and_serves("innerq:variant=hybrid,asym=4level", "", ""));
    EXPECT_FALSE(opens_and_serves("kvtuner:base=token,group=64", "base=token", "group=64"));
    EXPECT_FALSE(opens_and_serves("kvtuner:base=token,residual=64", "base=token", "residual=64"));
    EXPECT_FALSE(opens_and_serves("kvtuner:group=64,residual=32", "group=64", "residual=32"));
    EXPECT_TRUE(opens_and_serves("kvtuner:group=64,residual=128", "", ""));
    EXPECT_TRUE(opens_and_serves("pnmix:b_hi=2,b_lo=2", "", "")); // one tier
}

} // namespace
} // namespace kvmosaic
