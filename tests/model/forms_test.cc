// Forms of attention beside the plain one, through the seam and against llama.cpp's own cache: soft-capped scores and
// sinks. Random weights with large scores, so that each form matters, and every test shows that it does.
#include <gtest/gtest.h>

#include "model/tiny_model.h"

namespace kvmosaic::testing {
namespace {

constexpr int kRows = 60;
constexpr float kLarge = 1.5f; // range of query and key weights

std::vector<float> last_logits(const ContextPtr& context) {
    std::vector<Item> items;
    for (int i = 0; i < kRows; ++i)
        items.push_back({llama_token((i * 7 + 3) % kVocab), i, {0}, i == kRows - 1});
    EXPECT_EQ(decode(context.get(), items), 0);
    return logits_of(context.get(), kRows - 1);
}

void expect_same(const ModelPtr& model, const ModelPtr& other_form) {
    ASSERT_TRUE(model && other_form);
    llama_context_params params = small_context(128);
    params.swa_full = true;
    const std::vector<float> stock = last_logits(stock_context(model.get(), params));
    const float gap = largest_gap(stock, last_logits(own_context(model.get(), params, "f32")));
    const float power = largest_gap(stock, last_logits(stock_context(other_form.get(), params)));
    std::printf("    largest gap %.2e, to the other form %.2e\n", double(gap), double(power));
    EXPECT_LT(gap, 2e-4f);
    EXPECT_GT(power, 50 * gap);
    EXPECT_GT(power, 1e-2f);
}

ModelPtr soft_capped(float cap) {
    TinyModel file("gemma2", 2);
    file.u32("attention.head_count_kv", kKvHeads)
        .u32("attention.key_length", kHead)
        .u32("attention.value_length", kHead);
    file.u32("attention.sliding_window", 24).f32("attn_logit_softcapping", cap).f32("final_logit_softcapping", 30.0f);
    file.tensor("output_norm.weight", {kEmbd}, 1.0f);
    for (int il = 0; il < 2; ++il) {
        file.block(il, "attn_norm.weight", {kEmbd}, 1.0f)
            .qkv(il, kLarge)
            .block(il, "post_attention_norm.weight", {kEmbd}, 1.0f)
            .gated_ffn(il)
            .block(il, "post_ffw_norm.weight", {kEmbd}, 1.0f);
    }
    return file.load();
}

TEST(Forms, SoftCappedScores) { expect_same(soft_capped(2.0f), soft_capped(50.0f)); }

ModelPtr with_sinks(float range) {
    constexpr int64_t kExperts = 2, kExpertFf = 32;
    TinyModel file("gpt-oss", 2);
    file.u32("attention.head_count_kv", kKvHeads)
        .u32("attention.key_length", kHead)
        .u32("attention.value_length", kHead);
    file.u32("rope.dimension_count", kHead).u32("attention.sliding_window", 24);
    file.u32("expert_count", kExperts).u32("expert_used_count", 1).u32("expert_feed_forward_length", kExpertFf);
    file.tensor("output_norm.weight", {kEmbd}, 1.0f).tensor("output.weight", {kEmbd, kVocab});
    for (int il = 0; il < 2; ++il) {
        file.block(il, "attn_norm.weight", {kEmbd}, 1.0f)
            .block(il, "post_attention_norm.weight", {kEmbd}, 1.0f)
            .qkv(il, kLarge)
            .block(il, "attn_output.bias", {kEmbd})
            .block(il, "attn_sinks.weight", {kHeads}, range)
            .block(il, "ffn_gate_inp.weight", {kEmbd, kExperts})
            .block(il, "ffn_gate_inp.bias", {kExperts})
            .block(il, "ffn_gate_exps.weight", {kEmbd, kExpertFf, kExperts})
            .block(il, "ffn_gate_exps.bias", {kExpertFf, kExperts})
            .block(il, "ffn_down_exps.weight", {kExpertFf, kEmbd, kExperts})
            .block(il, "ffn_down_exps.bias", {kEmbd, kExperts})
            .block(il, "ffn_up_exps.weight", {kEmbd, kExpertFf, kExperts})
            .block(il, "ffn_up_exps.bias", {kExpertFf, kExperts});
    }
    return file.load();
}

TEST(Forms, Sinks) { expect_same(with_sinks(8.0f), with_sinks(0.01f)); }

} // namespace
} // namespace kvmosaic::testing
