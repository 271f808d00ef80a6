// Our cache against llama.cpp's own in f32, driven through llama.h only: the logits after every kind of sequence
// operation. Weights are f32, so that what differs is the cache.
#include <algorithm>
#include <cstdio>

#include <gtest/gtest.h>

#include "model/support.h"

namespace kvmosaic::testing {
namespace {

struct Step {
    std::string name;
    std::vector<float> logits;
};

class Story {
public:
    // divides: seq_div is called. llama.cpp's own cache turns keys the wrong way there (it adds what it should
    // subtract), so the reference moves each position by seq_add instead.
    Story(llama_context* context, const std::vector<llama_token>& tokens, bool divides)
        : context_(context), t_(tokens), divides_(divides) {}

    // Every step decodes something and keeps the logits of its last rows.
    std::vector<Step> tell() {
        prompt_over_several_ubatches();
        fork_and_diverge();
        truncate_and_replay();
        tokens_of_several_sequences();
        four_sequences_at_once();
        copy_of_a_beginning();
        save_clear_restore();
        full_context();
        context_shift();
        stretched_positions();
        copy_of_a_middle();
        return std::move(steps_);
    }

private:
    static constexpr int kPrompt = 150; // five ubatches of 32

    llama_memory_t memory() const { return llama_get_memory(context_); }
    llama_token token(int i) const { return t_[size_t(i) % t_.size()]; }
    void keep(const std::string& name, int32_t item) { steps_.push_back({name, logits_of(context_, item)}); }

    void prompt_over_several_ubatches() {
        std::vector<Item> items;
        for (int i = 0; i < kPrompt; ++i)
            items.push_back({token(i), i, {0}, i >= kPrompt - 2});
        ASSERT_EQ(decode(context_, items), 0);
        keep("prompt", kPrompt - 1);
    }

    void fork_and_diverge() {
        llama_memory_seq_cp(memory(), 0, 1, -1, -1);
        ASSERT_EQ(decode(context_, {{token(3), kPrompt, {0}, true}, {token(5), kPrompt, {1}, true}}), 0);
        keep("fork, first", 0);
        keep("fork, second", 1);
    }

    void truncate_and_replay() {
        const int cut = kPrompt / 2;
        EXPECT_TRUE(llama_memory_seq_rm(memory(), 0, cut, -1));
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 0), cut - 1);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 1), kPrompt);
        std::vector<Item> items;
        for (int i = cut; i < kPrompt; ++i)
            items.push_back({token(i), i, {0}, i == kPrompt - 1});
        ASSERT_EQ(decode(context_, items), 0);
        keep("truncate and replay", int32_t(items.size()) - 1);
        EXPECT_LT(divergence(steps_.front().logits, steps_.back().logits), 1e-4);
    }

    void tokens_of_several_sequences() {
        std::vector<Item> items;
        for (int i = 0; i < 40; ++i)
            items.push_back({token(i + 4), i, {2, 3}, i == 39});
        ASSERT_EQ(decode(context_, items), 0);
        keep("shared prefix", 39);
        ASSERT_EQ(
            decode(context_, {{token(20), 40, {2}, true}, {token(21), 40, {3}, true}, {token(22), kPrompt, {0}, true}}),
            0);
        keep("behind the shared prefix, first", 0);
        keep("behind the shared prefix, second", 1);
        keep("beside the shared prefix", 2);
    }

    void four_sequences_at_once() {
        for (int s = 4; s < 8; ++s)
            llama_memory_seq_rm(memory(), s, -1, -1);
        std::vector<Item> items;
        for (int i = 0; i < 20; ++i) {
            for (int s = 4; s < 8; ++s)
                items.push_back({token(7 * s + i), i, {s}, i == 19});
        }
        ASSERT_EQ(decode(context_, items), 0);
        for (int s = 0; s < 4; ++s)
            keep("four at once " + std::to_string(s), 76 + s);
    }

    void copy_of_a_beginning() {
        llama_memory_seq_rm(memory(), 5, -1, -1);
        llama_memory_seq_cp(memory(), 1, 5, 0, 33);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 5), 32);
        ASSERT_EQ(decode(context_, {{token(9), 33, {5}, true}}), 0);
        keep("copy of a beginning", 0);
    }

    void save_clear_restore() {
        std::vector<uint8_t> bytes(llama_state_seq_get_size(context_, 1));
        EXPECT_EQ(llama_state_seq_get_size(context_, 1), bytes.size());
        ASSERT_EQ(llama_state_seq_get_data(context_, bytes.data(), bytes.size(), 1), bytes.size());
        std::vector<uint8_t> again(bytes.size());
        llama_state_seq_get_data(context_, again.data(), again.size(), 1);
        EXPECT_EQ(bytes, again);
        llama_memory_clear(memory(), true);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 1), -1);
        ASSERT_EQ(llama_state_seq_set_data(context_, bytes.data(), bytes.size(), 6), bytes.size());
        EXPECT_EQ(llama_memory_seq_pos_min(memory(), 6), 0);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 6), kPrompt);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 1), -1);
        ASSERT_EQ(decode(context_, {{token(7), kPrompt + 1, {6}, true}}), 0);
        keep("restored", 0);
    }

    // A batch that does not fit is answered with 1 and leaves everything as it was.
    void full_context() {
        const int last = llama_memory_seq_pos_max(memory(), 6);
        std::vector<Item> items;
        for (int i = 0; i < int(llama_n_ctx(context_)) - last; ++i)
            items.push_back({token(i), last + 1 + i, {6}, false});
        items.back().logits = true;
        EXPECT_EQ(decode(context_, items), 1);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 6), last);
        llama_memory_seq_keep(memory(), 6);
        ASSERT_EQ(decode(context_, {{token(11), last + 1, {6}, true}}), 0);
        keep("after a full context", 0);
    }

    // What a server does when a context is full: a part of the middle goes, the rest moves down.
    void context_shift() {
        EXPECT_TRUE(llama_memory_can_shift(memory()));
        const int last = llama_memory_seq_pos_max(memory(), 6);
        EXPECT_TRUE(llama_memory_seq_rm(memory(), 6, 10, 60));
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 6), last);
        ASSERT_EQ(decode(context_, {{token(12), last + 1, {6}, true}}), 0);
        keep("a gap in the middle", 0);
        llama_memory_seq_add(memory(), 6, 60, -1, -50);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 6), last + 1 - 50);
        EXPECT_EQ(llama_memory_seq_pos_min(memory(), 6), 0);
        ASSERT_EQ(decode(context_, {{token(13), last + 2 - 50, {6}, true}}), 0);
        keep("context shift", 0);
    }

    // As self-extension does it: positions move up, then two tokens share one.
    void stretched_positions() {
        const int last = llama_memory_seq_pos_max(memory(), 6);
        llama_memory_seq_add(memory(), 6, 40, -1, 40);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 6), last + 40);
        if (divides_) llama_memory_seq_div(memory(), 6, 80, -1, 2);
        for (int p = 80; !divides_ && p <= last + 40; ++p)
            llama_memory_seq_add(memory(), 6, p, p + 1, p / 2 - p);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 6), (last + 40) / 2);
        ASSERT_EQ(decode(context_, {{token(14), (last + 40) / 2 + 1, {6}, true}}), 0);
        keep("divided positions", 0);
    }

    void copy_of_a_middle() {
        llama_memory_seq_cp(memory(), 6, 7, 20, 40);
        EXPECT_EQ(llama_memory_seq_pos_min(memory(), 7), 20);
        EXPECT_EQ(llama_memory_seq_pos_max(memory(), 7), 39);
        ASSERT_EQ(decode(context_, {{token(15), 40, {7}, true}}), 0);
        keep("copy of a middle", 0);
    }

    llama_context* context_;
    const std::vector<llama_token>& t_;
    bool divides_;
    std::vector<Step> steps_;
};

class SeamParity : public ::testing::Test {
protected:
    static void SetUpTestSuite() {
        const std::string path = f32_model_path("tiny");
        if (path.empty()) return;
        model = load_model(path);
        tokens = tokenize(model.get(), prose());
        const ContextPtr stock = stock_context(model.get(), small_context(512));
        reference = Story(stock.get(), tokens, false).tell();
    }
    static void TearDownTestSuite() { model.reset(); }

    void SetUp() override {
        if (!model) GTEST_SKIP() << "model 'tiny' is not in " << models_folder();
    }

    void compare(const std::string& spec, double mean_bound, double step_bound) {
        const ContextPtr own = own_context(model.get(), small_context(512), spec);
        ASSERT_TRUE(own);
        const std::vector<Step> steps = Story(own.get(), tokens, true).tell();
        ASSERT_EQ(steps.size(), reference.size());
        ASSERT_FALSE(steps.empty());
        double sum = 0.0;
        for (size_t i = 0; i < steps.size(); ++i) {
            const double kl = divergence(reference[i].logits, steps[i].logits);
            EXPECT_LT(kl, step_bound) << steps[i].name;
            sum += kl;
            RecordProperty(steps[i].name, std::to_string(kl));
            std::printf("    %-6s %-34s KL %9.2e  largest gap %8.2e\n", spec.c_str(), steps[i].name.c_str(), kl,
                        double(largest_gap(reference[i].logits, steps[i].logits)));
        }
        EXPECT_LT(sum / double(steps.size()), mean_bound);
    }

    static inline ModelPtr model;
    static inline std::vector<llama_token> tokens;
    static inline std::vector<Step> reference;
};

TEST_F(SeamParity, F32CacheGivesTheSameLogits) { compare("f32", 1e-5, 1e-4); }
TEST_F(SeamParity, F16CacheGivesNearlyTheSameLogits) { compare("f16", 4e-4, 4e-3); }

TEST_F(SeamParity, Ranges) { // E15
    const ContextPtr own = own_context(model.get(), small_context(128), "f16");
    ASSERT_TRUE(own);
    llama_memory_t memory = llama_get_memory(own.get());
    std::vector<Item> items;
    for (int i = 0; i < 40; ++i)
        items.push_back({tokens[size_t(i)], i, {0}, false});
    ASSERT_EQ(decode(own.get(), items), 0);
    EXPECT_TRUE(llama_memory_seq_rm(memory, 0, 5, 5));
    EXPECT_TRUE(llama_memory_seq_rm(memory, 0, 5, 3));
    llama_memory_seq_add(memory, 0, 10, 20, -11); // would fall below 0 and below its neighbours
    llama_memory_seq_add(memory, 0, 10, 20, -5);
    llama_memory_seq_add(memory, 5, 0, -1, 7); // no such sequence
    EXPECT_EQ(llama_memory_seq_pos_max(memory, 0), 39);
    EXPECT_EQ(cache_of(own.get())->positions(0)[10], 10);
    EXPECT_TRUE(llama_memory_seq_rm(memory, 0, 40, 50)); // nothing there
    EXPECT_TRUE(llama_memory_seq_rm(memory, 3, 0, -1));  // no such sequence
    EXPECT_TRUE(llama_memory_seq_rm(memory, -1, 30, -1));
    EXPECT_EQ(cache_of(own.get())->rows(0), 30);
    EXPECT_TRUE(llama_memory_seq_rm(memory, 0, -1, -1));
    EXPECT_EQ(cache_of(own.get())->rows(0), 0);
}

TEST_F(SeamParity, ForeignStateIsRefused) {
    const ContextPtr own = own_context(model.get(), small_context(128), "f16");
    ASSERT_TRUE(own);
    std::vector<Item> items;
    for (int i = 0; i < 20; ++i)
        items.push_back({tokens[size_t(i)], i, {0}, false});
    ASSERT_EQ(decode(own.get(), items), 0);
    std::vector<uint8_t> bytes(llama_state_seq_get_size(own.get(), 0));
    ASSERT_EQ(llama_state_seq_get_data(own.get(), bytes.data(), bytes.size(), 0), bytes.size());

    // behind libllama's own two words: a length, then a sequence file, all of it under checksums
    ASSERT_GT(bytes.size(), 64u);
    const auto refused = [&](size_t first, size_t last, uint8_t value) {
        std::vector<uint8_t> bad = bytes;
        std::fill(bad.begin() + ptrdiff_t(first), bad.begin() + ptrdiff_t(last), value);
        return llama_state_seq_set_data(own.get(), bad.data(), bad.size(), 2) == 0;
    };
    EXPECT_TRUE(refused(8, 16, 0x7F));  // many exabytes
    EXPECT_TRUE(refused(16, 17, 0xFF)); // the magic
    for (size_t at = 17; at < bytes.size(); at += 1 + bytes.size() / 61)
        EXPECT_TRUE(refused(at, at + 1, uint8_t(bytes[at] ^ 4))) << at;
    std::vector<uint8_t> bad;
    bad.assign(bytes.begin(), bytes.begin() + ptrdiff_t(bytes.size() / 2));
    EXPECT_EQ(llama_state_seq_set_data(own.get(), bad.data(), bad.size(), 2), 0u);
    EXPECT_EQ(cache_of(own.get())->rows(2), 0);
    EXPECT_EQ(cache_of(own.get())->rows(0), 20);

    const ContextPtr other = own_context(model.get(), small_context(128), "kivi:bits=2");
    ASSERT_TRUE(other);
    EXPECT_EQ(llama_state_seq_set_data(other.get(), bytes.data(), bytes.size(), 0), 0u);
    EXPECT_EQ(cache_of(other.get())->rows(0), 0);
}

TEST_F(SeamParity, EmptyAndPartialStatesAreSmall) {
    const ContextPtr own = own_context(model.get(), small_context(128), "f16");
    ASSERT_TRUE(own);
    const size_t empty = llama_state_seq_get_size(own.get(), 0);
    ASSERT_EQ(decode(own.get(), {{tokens[0], 0, {0}, false}}), 0);
    EXPECT_GT(llama_state_seq_get_size(own.get(), 0), empty);
    EXPECT_EQ(llama_state_seq_get_size_ext(own.get(), 0, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY), empty);
}

} // namespace
} // namespace kvmosaic::testing
