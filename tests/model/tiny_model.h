// Models of a few kilobytes, written and loaded by a test: any architecture of llama.cpp with random weights.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "ggml.h"
#include "gguf.h"
#include "model/support.h"

namespace kvmosaic::testing {

inline constexpr int64_t kEmbd = 32, kVocab = 48, kFf = 64, kHeads = 4, kKvHeads = 2, kHead = kEmbd / kHeads;

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
    TinyModel& tensor(const std::string& name, const std::vector<int64_t>& shape, float range = 0.1f) {
        ggml_tensor* t = ggml_new_tensor(ggml_, GGML_TYPE_F32, int(shape.size()), shape.data());
        ggml_set_name(t, name.c_str());
        float* values = static_cast<float*>(t->data);
        for (int64_t i = 0; i < ggml_nelements(t); ++i) {
            state_ = state_ * 1664525u + 1013904223u;
            values[i] = (float(state_ >> 8) / float(1u << 23) - 1.0f) * range;
        }
        gguf_add_tensor(gguf_, t);
        return *this;
    }
    TinyModel& block(int layer, const std::string& name, const std::vector<int64_t>& shape, float range = 0.1f) {
        return tensor("blk." + std::to_string(layer) + "." + name, shape, range);
    }
    TinyModel& gated_ffn(int layer) {
        return block(layer, "ffn_norm.weight", {kEmbd})
            .block(layer, "ffn_gate.weight", {kEmbd, kFf})
            .block(layer, "ffn_down.weight", {kFf, kEmbd})
            .block(layer, "ffn_up.weight", {kEmbd, kFf});
    }
    // Query and key weights within `range`: larger ones give larger scores.
    TinyModel& qkv(int layer, float range = 0.1f) {
        return block(layer, "attn_q.weight", {kEmbd, kEmbd}, range)
            .block(layer, "attn_k.weight", {kEmbd, kKvHeads * kHead}, range)
            .block(layer, "attn_v.weight", {kEmbd, kKvHeads * kHead})
            .block(layer, "attn_output.weight", {kEmbd, kEmbd});
    }

    ModelPtr load() const {
        const std::filesystem::path path =
            std::filesystem::temp_directory_path() / ("kvmosaic-" + arch_ + "-" + std::to_string(getpid()) + ".gguf");
        EXPECT_TRUE(gguf_write_to_file(gguf_, path.c_str(), false));
        ModelPtr model = load_model(path.string());
        std::filesystem::remove(path);
        EXPECT_TRUE(model) << arch_;
        return model;
    }

private:
    std::string arch_;
    gguf_context* gguf_;
    ggml_context* ggml_ = nullptr;
    uint32_t state_ = 1;
};

} // namespace kvmosaic::testing
