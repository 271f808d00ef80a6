#include "gguf_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_set>

namespace kvmosaic::gguf {
namespace {

constexpr uint64_t kMaxLayers = 512, kMaxExperts = 1024; // libllama's own limits
constexpr uint64_t kMaxWidth = 1 << 24;                  // of any one size; keeps 32-bit products in range

std::string num(uint64_t n) { return std::to_string(n); }

class ModelCheck {
public:
    ModelCheck(const File& file, std::vector<std::string>& warnings) : file_(file), warnings_(warnings) {}

    Status run() {
        if (Status s = general(); !s) return s;
        if (Status s = sizes(); !s) return s;
        if (Status s = heads(); !s) return s;
        if (Status s = experts(); !s) return s;
        if (Status s = rope_and_norm(); !s) return s;
        return tokenizer();
    }

private:
    Status bad(const std::string& what) const { return failed(StatusCode::corrupt, file_.path, what); }
    Status unsupported(const std::string& what) const { return failed(StatusCode::unsupported, file_.path, what); }

    // A key of the architecture's own, "llama." + name.
    std::string own(const char* name) const { return arch_ + "." + name; }

    Status wrong_kind(const std::string& key, const Value& v, const char* allowed) const {
        return bad(key + " has type " + kind_name(v.kind) +
                   (v.kind == Kind::array ? std::string(" of ") + kind_name(v.element) : "") + "; allowed is " +
                   allowed);
    }

    Status general();
    Status sizes();
    Status heads();
    Status experts();
    Status rope_and_norm();
    Status tokenizer();
    Status vocabulary(const std::string& kind, const std::vector<std::string>& tokens);
    Status special_ids(const std::string& kind, uint64_t n_tokens);

    // A u32 key of the architecture within [low, high].
    Status size(const char* name, bool required, uint64_t low, uint64_t high, uint64_t& out) const {
        const std::string key = own(name);
        const Value* v = file_.find(key);
        if (!v) return required ? bad("has no " + key + "; every model needs it") : Status();
        if (v->kind != Kind::u32) return wrong_kind(key, *v, "u32");
        if (v->bits < low || v->bits > high) {
            return bad(key + " is " + num(v->bits) + "; allowed are " + num(low) + " to " + num(high));
        }
        out = v->bits;
        return {};
    }

    // One u32, or an array with one per layer.
    Status per_layer(const char* name, uint64_t high, std::vector<uint64_t>& out) const {
        const std::string key = own(name);
        const Value* v = file_.find(key);
        if (!v) return {};
        if (v->kind == Kind::u32) {
            out.assign(layers_, v->bits);
        } else if (v->is_array_of(Kind::u32) || v->is_array_of(Kind::i32)) {
            if (v->n != layers_) {
                return bad(key + " has " + num(v->n) + " elements; allowed is " + num(layers_) + ", one per layer");
            }
            out.resize(layers_);
            for (uint64_t i = 0; i < layers_; ++i) {
                uint32_t x = 0;
                std::memcpy(&x, v->raw.data() + 4 * i, 4);
                out[i] = x;
            }
        } else {
            return wrong_kind(key, *v, "u32, or an array of u32 or i32");
        }
        for (uint64_t x : out) {
            if (x > high) return bad(key + " is " + num(x) + "; allowed are 0 to " + num(high));
        }
        return {};
    }

    const File& file_;
    std::vector<std::string>& warnings_;
    std::string arch_;
    uint64_t layers_ = 0, width_ = 0;
};

Status ModelCheck::general() {
    if (const Value* type = file_.find("general.type"); type && type->kind == Kind::string) {
        for (const char* other : {"adapter", "imatrix", "mmproj"}) {
            if (type->text == other)
                return unsupported("general.type is '" + type->text + "'; only 'model' can be run");
        }
    }
    const Value* arch = file_.find("general.architecture");
    if (!arch) return bad("has no general.architecture; every model needs it");
    if (arch->kind != Kind::string) return wrong_kind("general.architecture", *arch, "string");
    if (arch->text.empty() || arch->text.find('\0') != std::string::npos) {
        return bad("general.architecture is " + quoted(arch->text) + "; allowed is the name of an architecture");
    }
    if (arch->text == "clip")
        return unsupported("general.architecture is 'clip', an image encoder, not a language model");
    arch_ = arch->text;
    return {};
}

Status ModelCheck::sizes() {
    uint64_t unused = 0;
    if (Status s = size("block_count", true, 1, kMaxLayers, layers_); !s) return s;
    if (Status s = size("context_length", true, 1, INT32_MAX, unused); !s) return s;
    if (Status s = size("embedding_length", true, 1, kMaxWidth, width_); !s) return s;
    if (Status s = size("vocab_size", false, 1, kMaxWidth, unused); !s) return s;
    if (Status s = size("nextn_predict_layers", false, 0, layers_ - 1, unused); !s) return s;
    std::vector<uint64_t> ff;
    return per_layer("feed_forward_length", kMaxWidth, ff);
}

Status ModelCheck::heads() {
    std::vector<uint64_t> heads, kv_heads;
    if (Status s = per_layer("attention.head_count", kMaxWidth, heads); !s) return s;
    if (Status s = per_layer("attention.head_count_kv", kMaxWidth, kv_heads); !s) return s;
    uint64_t key_length = 0, rope = 0;
    if (Status s = size("attention.key_length", false, 1, kMaxWidth, key_length); !s) return s;
    if (Status s = size("attention.value_length", false, 1, kMaxWidth, rope); !s) return s;
    if (heads.empty()) return {};
    if (kv_heads.empty()) kv_heads = heads;
    for (uint64_t i = 0; i < layers_; ++i) {
        if (heads[i] == 0) continue; // a layer without attention
        if (kv_heads[i] != 0 && heads[i] % kv_heads[i] != 0) {
            return bad(own("attention.head_count_kv") + " is " + num(kv_heads[i]) + " in layer " + num(i) +
                       "; allowed are divisors of its " + num(heads[i]) + " query heads");
        }
    }
    if (heads[0] != 0 && key_length == 0 && heads[0] > width_) {
        return bad(own("attention.head_count") + " is " + num(heads[0]) + "; allowed are at most " + num(width_) +
                   " (" + own("embedding_length") + ") unless attention.key_length is given");
    }
    rope = 0;
    if (Status s = size("rope.dimension_count", false, 0, kMaxWidth, rope); !s) return s;
    if (rope % 2 != 0) {
        return bad(own("rope.dimension_count") + " is " + num(rope) + "; allowed are even numbers");
    }
    return {};
}

Status ModelCheck::experts() {
    uint64_t experts = 0, groups = 0, used_groups = 0;
    if (Status s = size("expert_count", false, 0, kMaxExperts, experts); !s) return s;
    std::vector<uint64_t> used;
    if (Status s = per_layer("expert_used_count", kMaxExperts, used); !s) return s;
    uint64_t most = 0;
    for (uint64_t x : used)
        most = std::max(most, x);
    if (most > experts || (experts > 0 && most == 0)) {
        return bad(own("expert_used_count") + " is " + num(most) + "; allowed are " + (experts ? "1" : "0") + " to " +
                   num(experts) + " (" + own("expert_count") + ")");
    }
    if (Status s = size("expert_group_count", false, 0, experts ? experts - 1 : 0, groups); !s) return s;
    if (groups <= 1) return {};
    if (experts % groups != 0) {
        return bad(own("expert_group_count") + " is " + num(groups) + "; allowed are divisors of " + num(experts));
    }
    if (Status s = size("expert_group_used_count", true, 1, groups - 1, used_groups); !s) return s;
    return {};
}

Status ModelCheck::rope_and_norm() {
    const std::string scaling = own("rope.scaling.type");
    if (const Value* v = file_.find(scaling)) {
        if (v->kind != Kind::string) return wrong_kind(scaling, *v, "string");
        if (v->text != "none" && v->text != "linear" && v->text != "yarn" && v->text != "longrope") {
            return unsupported(scaling + " is " + quoted(v->text) + "; allowed are none, linear, yarn and longrope");
        }
    }
    const struct {
        const char* name;
        bool zero;
    } reals[] = {{"attention.layer_norm_rms_epsilon", true},
                 {"attention.layer_norm_epsilon", true},
                 {"attention.group_norm_epsilon", true},
                 {"rope.freq_base", false},
                 {"rope.freq_base_swa", false},
                 {"rope.scaling.factor", true}};
    for (const auto& r : reals) {
        const std::string key = own(r.name);
        const Value* v = file_.find(key);
        if (!v) continue;
        if (v->kind != Kind::f32) return wrong_kind(key, *v, "f32");
        const double x = v->f32();
        if (!std::isfinite(x) || x < 0 || (x == 0 && !r.zero)) {
            return bad(key + " is " + std::to_string(x) + "; allowed are finite numbers " +
                       (r.zero ? "from 0" : "above 0"));
        }
    }
    return {};
}

Status ModelCheck::tokenizer() {
    const Value* model = file_.find("tokenizer.ggml.model");
    if (!model) return bad("has no tokenizer.ggml.model, so no text could be read or written with it");
    if (model->kind != Kind::string) return wrong_kind("tokenizer.ggml.model", *model, "string");
    const std::string& kind = model->text;
    if (kind == "none" || kind == "no_vocab") {
        return unsupported("tokenizer.ggml.model is '" + kind +
                           "', a model without a vocabulary; one is needed to run text");
    }
    const Value* list = file_.find("tokenizer.ggml.tokens");
    if (!list) return bad("has no tokenizer.ggml.tokens; a vocabulary needs them");
    if (!list->is_array_of(Kind::string)) return wrong_kind("tokenizer.ggml.tokens", *list, "an array of strings");
    if (list->n == 0) return bad("tokenizer.ggml.tokens has 0 elements; a vocabulary has at least 1");
    if (Status s = vocabulary(kind, list->strings); !s) return s;
    return special_ids(kind, list->n);
}

Status ModelCheck::vocabulary(const std::string& kind, const std::vector<std::string>& tokens) {
    const uint64_t n = tokens.size();
    std::unordered_set<std::string_view> seen;
    seen.reserve(n);
    std::vector<std::string> renamed; // libllama gives empty tokens a name of its own
    renamed.reserve(static_cast<size_t>(std::count(tokens.begin(), tokens.end(), std::string())));
    for (uint64_t i = 0; i < n; ++i) {
        std::string_view text = tokens[i];
        if (text.empty()) text = renamed.emplace_back("[EMPTY_" + num(i) + "]");
        if (!seen.insert(text).second) {
            return bad("tokenizer.ggml.tokens element " + num(i) + " is " + quoted(text) +
                       ", which an earlier token is too; every token is allowed once");
        }
    }
    const Value* scores = file_.find("tokenizer.ggml.scores");
    if (scores && !scores->is_array_of(Kind::f32) && !scores->is_array_of(Kind::i32)) {
        return wrong_kind("tokenizer.ggml.scores", *scores, "an array of f32");
    }
    const Value* types = file_.find("tokenizer.ggml.token_type");
    if (types && !types->is_array_of(Kind::i32))
        return wrong_kind("tokenizer.ggml.token_type", *types, "an array of i32");
    for (const auto& [name, v] : {std::pair("scores", scores), std::pair("token_type", types)}) {
        if (v && v->n < n) {
            return bad("tokenizer.ggml." + std::string(name) + " has " + num(v->n) + " elements; allowed is " + num(n) +
                       ", one per token");
        }
    }
    const Value* merges = file_.find("tokenizer.ggml.merges");
    const Value* pre = file_.find("tokenizer.ggml.pre");
    if (pre && pre->kind != Kind::string) return wrong_kind("tokenizer.ggml.pre", *pre, "string");
    if (kind == "llama" || kind == "plamo2") {
        if (!scores) {
            return bad("tokenizer.ggml.model is '" + kind + "' but there are no tokenizer.ggml.scores" +
                       (merges ? "; with tokenizer.ggml.merges it looks like a byte-pair vocabulary ('gpt2')"
                               : "; this kind needs one score per token"));
        }
        // A byte that no token covers makes libllama throw in the middle of a text.
        for (int b = 0; b < 256; ++b) {
            static const char* hex = "0123456789ABCDEF";
            const char name[] = {'<', '0', 'x', hex[b >> 4], hex[b & 15], '>', 0};
            const char raw = static_cast<char>(b);
            if (!seen.contains(name) && !(kind == "llama" && seen.contains(std::string_view(&raw, 1)))) {
                return bad("tokenizer.ggml.model is '" + kind + "' but the vocabulary has no byte token '" + name +
                           "'; this kind needs all 256" +
                           (merges ? ", so it looks like a byte-pair vocabulary ('gpt2')" : ""));
            }
        }
    }
    if (kind == "gpt2" || kind == "gemma4" || kind == "hybriddna" || kind == "whitespace") {
        if (!merges && !(pre && pre->text == "kimi-k2")) {
            return bad("tokenizer.ggml.model is '" + kind + "' but there are no tokenizer.ggml.merges" +
                       (scores ? "; with tokenizer.ggml.scores it looks like a SentencePiece vocabulary ('llama')"
                               : "; this kind needs them"));
        }
        if (merges && !merges->is_array_of(Kind::string)) {
            return wrong_kind("tokenizer.ggml.merges", *merges, "an array of strings");
        }
        if (kind == "gpt2" && !pre) {
            warnings_.push_back(file_.path + ": has no tokenizer.ggml.pre, so text is split by a default rule and the "
                                             "model may answer worse than it could");
        }
    }
    if (pre && kind == "gpt2" && pre->text == "whitespace") {
        return bad("tokenizer.ggml.pre is 'whitespace', which is allowed for tokenizer.ggml.model 'whitespace' only");
    }
    for (uint64_t i = 0; types && i < n && 4 * (i + 1) <= types->raw.size(); ++i) {
        int32_t type = 0;
        std::memcpy(&type, types->raw.data() + 4 * i, 4);
        constexpr int32_t kByte = 6;
        const std::string& t = tokens[i];
        if (type == kByte && kind == "bert") {
            return bad("token " + num(i) + " is marked as a byte in tokenizer.ggml.token_type; the vocabulary kind " +
                       quoted(kind) + " allows none, so its name looks wrong");
        }
        if (type == kByte && (t.size() != 6 || !t.starts_with("<0x") || t[5] != '>')) {
            return bad("token " + num(i) + " is " + quoted(t) + " but marked as a byte in tokenizer.ggml.token_type; " +
                       "allowed are '<0x00>' to '<0xFF>'");
        }
    }
    return {};
}

// Ids that generation uses must exist. The others (padding, separators, fill-in-the-middle) are never read here,
// and libllama drops them with a warning when they are out of range; models in circulation have such.
Status ModelCheck::special_ids(const std::string& kind, uint64_t n) {
    auto flag = [&](const char* key, bool fallback) {
        const Value* v = file_.find(key);
        return v && v->kind == Kind::boolean ? v->bits != 0 : fallback;
    };
    for (const char* name : {"bos", "eos", "eot", "eom", "unknown"}) {
        const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
        const Value* v = file_.find(key);
        if (!v) continue;
        if (v->kind != Kind::u32) return wrong_kind(key, *v, "u32");
        if (v->bits >= n) {
            return bad(key + " is " + num(v->bits) + "; allowed are 0 to " + num(n - 1) + " (the vocabulary has " +
                       num(n) + (n == 1 ? " token)" : " tokens)"));
        }
    }
    // Without the key libllama takes an id by kind, and asserts when a text is to start or end with one it has not.
    const struct {
        const char* name;
        bool wanted;
        uint64_t fallback;
    } ends[] = {{"bos", flag("tokenizer.ggml.add_bos_token", kind == "llama"), kind == "llama" ? 1u : 11u},
                {"eos", flag("tokenizer.ggml.add_eos_token", false), kind == "llama" ? 2u : 11u}};
    for (const auto& e : ends) {
        const std::string id = std::string("tokenizer.ggml.") + e.name + "_token_id";
        if (e.wanted && !file_.find(id) && e.fallback >= n) {
            return bad("every text is to get a " + std::string(e.name) + " token (tokenizer.ggml.add_" + e.name +
                       "_token), but there is no " + id + " and its default " + num(e.fallback) +
                       " is outside the vocabulary; allowed are 0 to " + num(n - 1));
        }
    }
    return {};
}

} // namespace

Status check_weights(const File& file) {
    constexpr uint32_t kF32 = 0, kI32 = 26, kBf16 = 30;
    for (const TensorInfo& t : file.tensors) {
        const std::string at = "tensor " + quoted(t.name) + " has type " + num(t.type);
        const bool vector = t.n_dims == 1 && t.type != 1 && t.type != kBf16 && t.type != kI32;
        if (t.type != kF32 && (vector || t.name.ends_with("norm.weight") || t.name.ends_with(".bias"))) {
            return failed(StatusCode::unsupported, file.path,
                          at + "; allowed for norms, biases and vectors is 0 (f32)");
        }
        // 9 and 15 are formats of activations; 24 to 28 are integers and f64. No product takes them as weights.
        const bool weight = t.name.starts_with("token_embd") || t.name == "output.weight" ||
                            t.name.find("attn_") != std::string::npos || t.name.find("ffn_") != std::string::npos;
        const bool table = t.name.find("tid2eid") != std::string::npos; // expert numbers by token
        if (weight && !table && (t.type == 9 || t.type == 15 || (t.type >= 24 && t.type <= 28))) {
            return failed(StatusCode::unsupported, file.path,
                          at + "; not allowed for weights are 9, 15 and 24 to 28 (block sums, integers, f64)");
        }
    }
    return {};
}

Status check_model(const File& file, std::vector<std::string>& warnings) { return ModelCheck(file, warnings).run(); }

} // namespace kvmosaic::gguf
