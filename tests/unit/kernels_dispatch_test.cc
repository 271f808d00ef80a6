#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "kernels/kernels.h"
#include "rig.h"

namespace kvmosaic::kernels {
namespace {

// Sets KVMOSAIC_ISA for a scope.
class IsaVariable {
public:
    explicit IsaVariable(const char* value) {
        if (const char* old = std::getenv("KVMOSAIC_ISA")) old_ = old, had_ = true;
        setenv("KVMOSAIC_ISA", value, 1);
    }
    ~IsaVariable() {
        if (had_)
            setenv("KVMOSAIC_ISA", old_.c_str(), 1);
        else
            unsetenv("KVMOSAIC_ISA");
    }

private:
    std::string old_;
    bool had_ = false;
};

TEST(Dispatch, ScalarIsFirstAndTablesAreWhole) {
    ASSERT_FALSE(available().empty());
    EXPECT_STREQ(available().front()->isa, "scalar");
    for (const Table* t : available()) {
        EXPECT_EQ(find(t->isa), t);
        EXPECT_TRUE(t->encode && t->restore && t->load_raw && t->store_raw && t->add_abs && t->scores &&
                    t->reads_codes && t->weigh && t->softmax && t->mix)
            << t->isa;
    }
}

TEST(Dispatch, ListsWhatTheProcessorSays) {
#if defined(__x86_64__)
    EXPECT_EQ(find("avx2") != nullptr, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
    EXPECT_EQ(find("avx512") != nullptr, __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                                             __builtin_cpu_supports("avx512dq"));
    EXPECT_EQ(find("neon"), nullptr);
#elif defined(__aarch64__)
    EXPECT_NE(find("neon"), nullptr);
    EXPECT_EQ(find("avx2"), nullptr);
#endif
    EXPECT_EQ(find("neon9"), nullptr);
    EXPECT_EQ(find("AVX2"), nullptr); // names are exact
}

TEST(Dispatch, NamesAreDistinct) {
    std::set<std::string> names = {reference().isa};
    for (const Table* t : available())
        EXPECT_TRUE(names.insert(t->isa).second) << t->isa;
}

TEST(Dispatch, VariableForcesEveryTable) {
    for (const Table* t : available()) {
        const IsaVariable set(t->isa);
        EXPECT_EQ(find(""), t);
    }
}

TEST(Dispatch, VariableNamesTheDefault) {
    {
        const IsaVariable set("scalar");
        EXPECT_EQ(find(""), available().front());
        EXPECT_EQ(find(available().back()->isa), available().back()); // a name that is asked for wins
    }
    {
        const IsaVariable set("avx1024");
        EXPECT_EQ(find(""), nullptr);
    }
    {
        const IsaVariable set("");
        EXPECT_EQ(find(""), available().back());
    }
}

TEST(Dispatch, CacheReportsWhatItRuns) {
    const ModelShape shape = test::one_layer(2, 1, 16);
    const auto ran = [&](const char* variable, CacheOptions options) {
        const IsaVariable set(variable);
        const auto cache = Cache::create(shape, "f16", options);
        return cache.ok() ? std::string((*cache)->isa()) : cache.status().message();
    };
    CacheOptions named, reference_kernels;
    reference_kernels.reference = true;
    EXPECT_EQ(ran("", {}), available().back()->isa);
    EXPECT_EQ(ran("", reference_kernels), reference().isa);
    for (const Table* t : available()) {
        EXPECT_EQ(ran(t->isa, {}), t->isa);
        named.isa = t->isa;
        EXPECT_EQ(ran("", named), t->isa);
        EXPECT_EQ(ran("avx1024", named), t->isa);
    }
}

// An unknown name is refused, by the name that was asked for, with all that there are.
TEST(Dispatch, CacheRefusesAnUnknownName) {
    CacheOptions named;
    named.isa = "avx9000";
    for (const auto& [variable, options, asked, other] :
         {std::tuple{"avx1024", CacheOptions{}, "'avx1024'", "avx9000"}, std::tuple{"", named, "'avx9000'", "avx1024"},
          std::tuple{"avx1024", named, "'avx9000'", "avx1024"}}) {
        const IsaVariable set(variable);
        const auto cache = Cache::create(test::one_layer(2, 1, 16), "f16", options);
        ASSERT_FALSE(cache.ok());
        EXPECT_EQ(cache.status().code(), StatusCode::unsupported);
        const std::string message = cache.status().message();
        EXPECT_NE(message.find(asked), std::string::npos) << message;
        EXPECT_EQ(message.find(other), std::string::npos) << message;
        for (const Table* t : available())
            EXPECT_NE(message.find(t->isa), std::string::npos) << t->isa << ": " << message;
    }
}

} // namespace
} // namespace kvmosaic::kernels
