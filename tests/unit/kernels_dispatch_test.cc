#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "kernels/kernels.h"

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
        EXPECT_TRUE(t->encode && t->restore && t->load_raw && t->store_raw && t->add_abs && t->scores && t->softmax &&
                    t->mix)
            << t->isa;
    }
}

TEST(Dispatch, ListsWhatTheProcessorSays) {
#if defined(__x86_64__)
    EXPECT_EQ(find("avx2") != nullptr, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
    EXPECT_EQ(find("avx512") != nullptr, __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                                             __builtin_cpu_supports("avx512dq"));
#endif
    EXPECT_EQ(find("neon9"), nullptr);
    EXPECT_EQ(find("AVX2"), nullptr); // names are exact
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

} // namespace
} // namespace kvmosaic::kernels
