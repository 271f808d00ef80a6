// Attention that the cache cannot carry, on models of a few kilobytes written here: each is refused when the context is
// made, by name, and llama.cpp's own cache still serves it. No fetched model is needed.
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "model/tiny_model.h"

namespace kvmosaic::testing {
namespace {

Status refusal(llama_model* model) {
    const Result<llama_context*> made = make_context(model, small_context(128), {});
    EXPECT_FALSE(made.ok());
    if (made) llama_free(*made);
    return made ? Status() : made.status();
}

void expect_refused(const ModelPtr& model, const std::string& arch, const std::string& reason) {
    ASSERT_TRUE(model);
    const Status status = refusal(model.get());
    EXPECT_EQ(status.code(), StatusCode::unsupported);
    EXPECT_NE(status.message().find("'" + arch + "'"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(reason), std::string::npos) << status.message();
    // the refusal is ours alone
    ContextPtr stock(llama_init_from_model(model.get(), small_context(128)));
    ASSERT_TRUE(stock);
    EXPECT_EQ(cache_of(stock.get()), nullptr);
    EXPECT_EQ(decode(stock.get(), {{3, 0, {0}, true}}), 0);
}

// The writer makes files that work: ordinary attention, layers of different KV head counts.
TEST(Architectures, OrdinaryAttentionIsServed) {
    TinyModel file("llama", 2);
    file.u32("attention.head_count_kv", kKvHeads)
        .u32("rope.dimension_count", kHead)
        .tensor("output_norm.weight", {kEmbd});
    for (int il = 0; il < 2; ++il)
        file.block(il, "attn_norm.weight", {kEmbd}).qkv(il).gated_ffn(il);
    const ModelPtr model = file.load();
    ASSERT_TRUE(model);
    const ContextPtr own = own_context(model.get(), small_context(128), "f32");
    ASSERT_TRUE(own);
    const ContextPtr stock = stock_context(model.get(), small_context(128));
    std::vector<Item> items;
    for (int i = 0; i < 50; ++i)
        items.push_back({llama_token(i * 7 % kVocab), i, {0}, i == 49});
    ASSERT_EQ(decode(own.get(), items), 0);
    ASSERT_EQ(decode(stock.get(), items), 0);
    EXPECT_LT(largest_gap(logits_of(own.get(), 49), logits_of(stock.get(), 49)), 1e-5f);
    EXPECT_GT(largest_gap(logits_of(own.get(), 49), std::vector<float>(size_t(kVocab), 0.0f)), 1e-3f);
}

// Every fourth layer of smollm3 does not rotate its keys, which the model's parameters do not say: a method that looks
// at rotations gets what the graph does.
TEST(Architectures, RotationsAreThoseOfTheGraph) {
    TinyModel file("smollm3", 4);
    file.u32("attention.head_count_kv", kKvHeads)
        .u32("rope.dimension_count", kHead)
        .tensor("output_norm.weight", {kEmbd});
    for (int il = 0; il < 4; ++il)
        file.block(il, "attn_norm.weight", {kEmbd}).qkv(il).gated_ffn(il);
    const ModelPtr model = file.load();
    ASSERT_TRUE(model);
    const ContextPtr context = own_context(model.get(), small_context(128), "pnmix:group=8");
    ASSERT_TRUE(context);
    for (int32_t il = 0; il < 4; ++il) {
        EXPECT_EQ(cache_of(context.get())->shape().layers[size_t(il)].rope.known, il != 3) << "layer " << il;
        EXPECT_EQ(rope_of(context.get(), il)->known, il != 3) << "layer " << il;
    }
    EXPECT_EQ(decode(context.get(), {{3, 0, {0}, true}}), 0);
    // A foreign tool makes its context in one go: there it is refused.
    setenv("KVMOSAIC_CACHE", "pnmix:group=8", 1);
    const ContextPtr foreign(llama_init_from_model(model.get(), small_context(128)));
    setenv("KVMOSAIC_CACHE", "mixkvq", 1);
    const ContextPtr other(llama_init_from_model(model.get(), small_context(128)));
    unsetenv("KVMOSAIC_CACHE");
    EXPECT_FALSE(foreign);
    EXPECT_TRUE(other) << "a method that does not look at rotations is served";
}

TEST(Architectures, AlibiIsRefused) {
    TinyModel file("mpt", 1);
    file.f32("attention.max_alibi_bias", 8.0f).tensor("output_norm.weight", {kEmbd});
    file.block(0, "attn_norm.weight", {kEmbd})
        .block(0, "attn_qkv.weight", {kEmbd, 3 * kEmbd})
        .block(0, "attn_output.weight", {kEmbd, kEmbd})
        .block(0, "ffn_norm.weight", {kEmbd})
        .block(0, "ffn_down.weight", {kFf, kEmbd})
        .block(0, "ffn_up.weight", {kEmbd, kFf});
    expect_refused(file.load(), "mpt", "ALiBi");
}

TEST(Architectures, RecurrentModelIsRefused) {
    constexpr int64_t kInner = 2 * kEmbd, kState = 8, kRank = 4, kConv = 4;
    TinyModel file("mamba", 1);
    file.u32("ssm.conv_kernel", kConv).u32("ssm.inner_size", kInner).u32("ssm.state_size", kState);
    file.u32("ssm.time_step_rank", kRank).tensor("output_norm.weight", {kEmbd});
    file.block(0, "attn_norm.weight", {kEmbd})
        .block(0, "ssm_in.weight", {kEmbd, 2 * kInner})
        .block(0, "ssm_conv1d.weight", {kConv, kInner})
        .block(0, "ssm_conv1d.bias", {kInner})
        .block(0, "ssm_x.weight", {kInner, kRank + 2 * kState})
        .block(0, "ssm_dt.weight", {kRank, kInner})
        .block(0, "ssm_dt.bias", {kInner})
        .block(0, "ssm_a", {kState, kInner})
        .block(0, "ssm_d", {kInner})
        .block(0, "ssm_out.weight", {kInner, kEmbd});
    expect_refused(file.load(), "mamba", "recurrent");
}

TinyModel& hybrid(TinyModel& file) {
    file.u32s("attention.head_count_kv", {0, kKvHeads}).u32("shortconv.l_cache", 3).u32("rope.dimension_count", kHead);
    file.tensor("token_embd_norm.weight", {kEmbd});
    for (int il = 0; il < 2; ++il)
        file.block(il, "attn_norm.weight", {kEmbd}).gated_ffn(il);
    file.block(0, "shortconv.conv.weight", {3, kEmbd})
        .block(0, "shortconv.in_proj.weight", {kEmbd, 3 * kEmbd})
        .block(0, "shortconv.out_proj.weight", {kEmbd, kEmbd});
    return file.block(1, "attn_q_norm.weight", {kHead}).block(1, "attn_k_norm.weight", {kHead}).qkv(1);
}

TEST(Architectures, HybridIsRefused) {
    TinyModel file("lfm2", 2);
    expect_refused(hybrid(file).load(), "lfm2", "not a plain or sliding-window K/V cache");
}

// Also where only the environment asks for the cache: a foreign tool must not run on another one without a word.
TEST(Architectures, HybridIsRefusedToForeignTools) {
    TinyModel file("lfm2", 2);
    const ModelPtr model = hybrid(file).load();
    ASSERT_TRUE(model);
    setenv("KVMOSAIC_CACHE", "f16", 1);
    const ContextPtr context(llama_init_from_model(model.get(), small_context(128)));
    unsetenv("KVMOSAIC_CACHE");
    EXPECT_FALSE(context);
}

TEST(Architectures, LatentAttentionIsRefused) {
    constexpr int64_t kRope = 8, kNope = 8, kValue = 8, kLatent = 16, kQueryRank = 16;
    TinyModel file("deepseek2", 1);
    file.u32("attention.head_count_kv", 1).u32("rope.dimension_count", kRope).u32("leading_dense_block_count", 1);
    file.u32("attention.q_lora_rank", kQueryRank).u32("attention.kv_lora_rank", kLatent);
    file.u32("attention.key_length", kLatent + kRope).u32("attention.value_length", kLatent);
    file.u32("attention.key_length_mla", kNope + kRope).u32("attention.value_length_mla", kValue);
    file.u32("expert_feed_forward_length", 16).u32("expert_shared_count", 1).tensor("output_norm.weight", {kEmbd});
    file.block(0, "attn_norm.weight", {kEmbd})
        .block(0, "attn_q_a_norm.weight", {kQueryRank})
        .block(0, "attn_kv_a_norm.weight", {kLatent})
        .block(0, "attn_q_a.weight", {kEmbd, kQueryRank})
        .block(0, "attn_q_b.weight", {kQueryRank, kHeads * (kNope + kRope)})
        .block(0, "attn_kv_a_mqa.weight", {kEmbd, kLatent + kRope})
        .block(0, "attn_k_b.weight", {kNope, kLatent, kHeads})
        .block(0, "attn_v_b.weight", {kLatent, kValue, kHeads})
        .block(0, "attn_output.weight", {kHeads * kValue, kEmbd})
        .gated_ffn(0);
    expect_refused(file.load(), "deepseek2", "MLA");
}

} // namespace
} // namespace kvmosaic::testing
