// What cannot be served is refused when the context is made, with the reason in the status.
#include <gtest/gtest.h>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

class Refusal : public ::testing::Test {
protected:
    void SetUp() override {
        const std::string path = model_path("tiny");
        if (path.empty()) GTEST_SKIP() << "model 'tiny' is not in " << models_folder();
        model = load_model(path);
        ASSERT_TRUE(model);
    }
    Status refused(const llama_context_params& params, const AdapterOptions& options) {
        const Result<llama_context*> made = make_context(model.get(), params, options);
        EXPECT_FALSE(made.ok());
        if (made) {
            llama_free(*made);
            return {};
        }
        return made.status();
    }
    static bool mentions(const Status& status, const std::string& word) {
        return status.message().find(word) != std::string::npos;
    }
    ModelPtr model;
};

TEST_F(Refusal, UnknownMethodAndOption) {
    AdapterOptions options;
    options.spec = "kivvi:bits=2";
    Status status = refused(small_context(128), options);
    EXPECT_TRUE(mentions(status, "kivvi")) << status.message();
    EXPECT_TRUE(mentions(status, "kivi:") || mentions(status, "kivi")) << status.message();
    options.spec = "kivi:bits=9";
    status = refused(small_context(128), options);
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_TRUE(mentions(status, "bits")) << status.message();
}

TEST_F(Refusal, CacheTypeOfLlamaCpp) {
    llama_context_params params = small_context(128);
    params.type_k = GGML_TYPE_Q8_0;
    const Status status = refused(params, {});
    EXPECT_TRUE(mentions(status, "--cache-type")) << status.message();
    EXPECT_TRUE(mentions(status, "llama")) << status.message();
}

TEST_F(Refusal, ReasonOfLlamaCppItself) {
    llama_context_params params = small_context(128);
    params.n_batch = params.n_ubatch = 0;
    const Status status = refused(params, {});
    EXPECT_TRUE(mentions(status, "n_batch")) << status.message();
}

TEST_F(Refusal, MissingInstructionSet) {
    AdapterOptions options;
    options.cache.isa = "abacus";
    const Status status = refused(small_context(128), options);
    EXPECT_TRUE(mentions(status, "abacus")) << status.message();
}

TEST_F(Refusal, NoModel) {
    const Result<llama_context*> made = make_context(nullptr, small_context(128), {});
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().code(), StatusCode::invalid_argument);
}

// A refusal leaves nothing behind that the next context would trip over.
TEST_F(Refusal, NextContextIsFine) {
    AdapterOptions options;
    options.spec = "nothing";
    EXPECT_FALSE(refused(small_context(128), options).ok());
    EXPECT_TRUE(own_context(model.get(), small_context(128), "f16"));
    EXPECT_TRUE(stock_context(model.get(), small_context(128)));
}

} // namespace
} // namespace kvmosaic::testing
