// Attention that the cache cannot carry, on models of a few kilobytes written here: each is refused when the context is
// made, by name, and llama.cpp's own cache still serves it. No fetched model is needed.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "ggml.h"
#include "gguf.h"
#include "model/support.h"

namespace kvmosaic::testing {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kEmbd = 32, kVocab = 48, kFf = 64, kHeads = 4, kKvHeads = 2, kHead = kEmbd / kHeads;

// Collects keys and f32 tensors of small pseudo-random values and writes a GGUF file without a vocabulary.
class TinyModel {
public:
    TinyModel(std::string arch, uint32_t layers) : arch_(std::move(arch)), gguf_(gguf_init_empty()) {
        ggml_init_params params = {size_t(16) << 20, nullptr, false};
        ggml_ = ggml_init(params);
        gguf_set_val_str(gguf_, "general.architecture", arch_.c_str());
        gguf_set_val_str(gguf_, "tokenizer.ggml.model", "no_vocab");
        u32("vocab_size", kVocab).u32("context_length", 128).u32("embedding_length", kEmbd).u32("block_count", layers);
        u32("feed_forward_length", kFf).u32("attention.head_count", kHeads);
        f32("attention.layer_norm_rms_epsilon", 1e-5f).f32("attention.layer_norm_epsilon", 1e-5f);
        tensor("token_embd.weight", {kEmbd, kVocab});
    }
    ~TinyModel() {
        ggml_free(ggml_);
        gguf_free(gguf_);
    }
    TinyModel(const TinyModel&) = delete;
    TinyModel& operator=(const TinyModel&) = delete;

    TinyModel& u32(const std::string& key, uint32_t value) {
        gguf_set_val_u32(gguf_, (arch_ + "." + key).c_str(), value);
        return *this;
    }
    TinyModel& f32(const std::string& key, float value) {
        gguf_set_val_f32(gguf_, (arch_ + "." + key).c_str(), value);
        return *this;
    }
    TinyModel& u32s(const std::string& key, const std::vector<uint32_t>& values) {
        gguf_set_arr_data(gguf_, (arch_ + "." + key).c_str(), GGUF_TYPE_UINT32, values.data(), values.size());
        return *this;
    }
    TinyModel& tensor(const std::string& name, const std::vector<int64_t>& shape) {
        ggml_tensor* t = ggml_new_tensor(ggml_, GGML_TYPE_F32, int(shape.size()), shape.data());
        ggml_set_name(t, name.c_str());
        float* values = static_cast<float*>(t->data);
        for (int64_t i = 0; i < ggml_nelements(t); ++i) {
            state_ = state_ * 1664525u + 1013904223u;
            values[i] = float(state_ >> 8) / float(1u << 24) * 0.2f - 0.1f;
        }
        gguf_add_tensor(gguf_, t);
        return *this;
    }
    TinyModel& block(int layer, const std::string& name, const std::vector<int64_t>& shape) {
        return tensor("blk." + std::to_string(layer) + "." + name, shape);
    }
    TinyModel& gated_ffn(int layer) {
        return block(layer, "ffn_norm.weight", {kEmbd})
            .block(layer, "ffn_gate.weight", {kEmbd, kFf})
            .block(layer, "ffn_down.weight", {kFf, kEmbd})
            .block(layer, "ffn_up.weight", {kEmbd, kFf});
    }
    TinyModel& qkv(int layer) {
        return block(layer, "attn_q.weight", {kEmbd, kEmbd})
            .block(layer, "attn_k.weight", {kEmbd, kKvHeads * kHead})
            .block(layer, "attn_v.weight", {kEmbd, kKvHeads * kHead})
            .block(layer, "attn_output.weight", {kEmbd, kEmbd});
    }

    ModelPtr load() const {
        const fs::path path =
            fs::temp_directory_path() / ("kvmosaic-" + arch_ + "-" + std::to_string(getpid()) + ".gguf");
        EXPECT_TRUE(gguf_write_to_file(gguf_, path.c_str(), false));
        ModelPtr model = load_model(path.string());
        fs::remove(path);
        EXPECT_TRUE(model) << arch_;
        return model;
    }

private:
    std::string arch_;
    gguf_context* gguf_;
    ggml_context* ggml_ = nullptr;
    uint32_t state_ = 1;
};

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
