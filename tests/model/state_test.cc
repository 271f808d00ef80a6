// llama.cpp's own calls for saved states, on quantized caches: to memory, to files, all sequences or one.
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

class SavedStates : public ::testing::Test {
protected:
    static void SetUpTestSuite() {
        const std::string path = model_path("tiny");
        if (!path.empty()) model = load_model(path);
        if (model) tokens = tokenize(model.get(), prose() + prose());
    }
    static void TearDownTestSuite() { model.reset(); }
    void SetUp() override {
        if (!model) GTEST_SKIP() << "no model: kvmosaic fetch tiny";
        ASSERT_GT(tokens.size(), 200u);
    }

    // Tokens [first, last) to a sequence, in ubatches; logits of the last.
    static std::vector<float> read(llama_context* context, llama_seq_id seq, int first, int last) {
        for (int at = first; at < last; at += 32) {
            std::vector<Item> items;
            for (int i = at; i < std::min(last, at + 32); ++i)
                items.push_back({tokens[size_t(i)], i, {seq}, i + 1 == last});
            EXPECT_EQ(decode(context, items), 0);
            if (at + 32 >= last) return logits_of(context, int32_t(items.size()) - 1);
        }
        return {};
    }

    static ModelPtr model;
    static std::vector<llama_token> tokens;
};
ModelPtr SavedStates::model;
std::vector<llama_token> SavedStates::tokens;

const char* const kSpecs[] = {"kivi:bits=2,residual=32,group=32", "mixkvq", "innerq", "turboquant", "pnmix", "q4_0"};

// E9, E12: into another context and another sequence; then the same logits, with none of the old tokens read again.
TEST_F(SavedStates, E12MemoryGoesOnWithTheSameBits) {
    for (const char* spec : kSpecs) {
        const ContextPtr one = own_context(model.get(), small_context(512), spec);
        const ContextPtr two = own_context(model.get(), small_context(512), spec);
        ASSERT_TRUE(one && two);
        read(one.get(), 1, 0, 170);
        std::vector<uint8_t> bytes(llama_state_seq_get_size(one.get(), 1));
        ASSERT_EQ(llama_state_seq_get_data(one.get(), bytes.data(), bytes.size(), 1), bytes.size());
        read(two.get(), 4, 0, 40); // something else is there already
        ASSERT_EQ(llama_state_seq_set_data(two.get(), bytes.data(), bytes.size(), 4), bytes.size()) << spec;
        EXPECT_EQ(cache_of(two.get())->rows(4), 170) << spec;
        EXPECT_EQ(llama_memory_seq_pos_max(llama_get_memory(two.get()), 4), 169);
        EXPECT_EQ(cache_of(two.get())->footprint().tokens, 170); // the 40 rows are gone
        for (int t = 170; t < 175; ++t)
            EXPECT_EQ(read(one.get(), 1, t, t + 1), read(two.get(), 4, t, t + 1)) << spec << " token " << t;
        EXPECT_TRUE(cache_of(one.get())->save(1) == cache_of(two.get())->save(4)) << spec;
        EXPECT_GT(cache_of(two.get())->packed_rows(4, 10, Side::value), 0)
            << spec; // some methods leave the first layers raw
    }
}

TEST_F(SavedStates, FilesBringTokensAndRows) {
    const std::string path =
        (std::filesystem::temp_directory_path() / ("kvmosaic-state-" + std::to_string(::getpid()))).string();
    for (const char* spec : kSpecs) {
        const ContextPtr one = own_context(model.get(), small_context(512), spec);
        const ContextPtr two = own_context(model.get(), small_context(512), spec);
        ASSERT_TRUE(one && two);
        read(one.get(), 0, 0, 150);
        ASSERT_GT(llama_state_seq_save_file(one.get(), path.c_str(), 0, tokens.data(), 150), 0u);
        std::vector<llama_token> found(200);
        size_t count = 0;
        ASSERT_GT(llama_state_seq_load_file(two.get(), path.c_str(), 3, found.data(), found.size(), &count), 0u)
            << spec;
        ASSERT_EQ(count, 150u);
        EXPECT_TRUE(std::equal(found.begin(), found.begin() + 150, tokens.begin()));
        EXPECT_EQ(read(one.get(), 0, 150, 151), read(two.get(), 3, 150, 151)) << spec;

        // Damage is refused, and what was there stays.
        std::ifstream in(path, std::ios::binary);
        std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
        const std::vector<uint8_t> before = cache_of(two.get())->save(3);
        bytes[bytes.size() - 100] = char(bytes[bytes.size() - 100] ^ 1);
        std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
        EXPECT_EQ(llama_state_seq_load_file(two.get(), path.c_str(), 3, found.data(), found.size(), &count), 0u);
        EXPECT_TRUE(cache_of(two.get())->save(3) == before) << spec;
    }
    std::filesystem::remove(path);
}

// All sequences at once: what they share is stored and held once, and sequences that are not in the state go.
TEST_F(SavedStates, WholeContexts) {
    for (const char* spec : kSpecs) {
        const ContextPtr one = own_context(model.get(), small_context(512), spec);
        const ContextPtr two = own_context(model.get(), small_context(512), spec);
        ASSERT_TRUE(one && two);
        read(one.get(), 0, 0, 160);
        const size_t alone = llama_state_get_size(one.get());
        llama_memory_seq_cp(llama_get_memory(one.get()), 0, 2, -1, -1);
        read(one.get(), 2, 160, 165);
        EXPECT_LT(llama_state_get_size(one.get()), 2 * alone) << spec;
        std::vector<uint8_t> bytes(llama_state_get_size(one.get()));
        ASSERT_EQ(llama_state_get_data(one.get(), bytes.data(), bytes.size()), bytes.size());
        read(two.get(), 5, 0, 20);
        ASSERT_EQ(llama_state_set_data(two.get(), bytes.data(), bytes.size()), bytes.size());
        Cache &a = *cache_of(one.get()), &b = *cache_of(two.get());
        EXPECT_EQ(b.sequences(), (std::vector<SeqId>{0, 2})) << spec;
        for (const SeqId seq : {0, 2})
            EXPECT_TRUE(a.save(seq) == b.save(seq)) << spec;
        EXPECT_EQ(read(one.get(), 2, 165, 170), read(two.get(), 2, 165, 170)) << spec;
    }
}

// A state of another method is refused before anything changes.
TEST_F(SavedStates, F8AnotherMethodIsRefused) {
    const ContextPtr one = own_context(model.get(), small_context(512), "mixkvq");
    const ContextPtr two = own_context(model.get(), small_context(512), "kivi:bits=4");
    ASSERT_TRUE(one && two);
    read(one.get(), 0, 0, 150);
    read(two.get(), 0, 0, 30);
    std::vector<uint8_t> bytes(llama_state_seq_get_size(one.get(), 0));
    ASSERT_EQ(llama_state_seq_get_data(one.get(), bytes.data(), bytes.size(), 0), bytes.size());
    EXPECT_EQ(llama_state_seq_set_data(two.get(), bytes.data(), bytes.size(), 0), 0u);
    EXPECT_EQ(cache_of(two.get())->rows(0), 30);
}

} // namespace
} // namespace kvmosaic::testing
