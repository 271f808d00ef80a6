#include "gguf_check.h"

#include <cstdio>
#include <unordered_set>

#include "gguf_file.h"
#include "gguf_model.h"

namespace kvmosaic {
namespace {

using gguf::failed;
using gguf::File;
using gguf::Kind;
using gguf::quoted;
using gguf::Value;

constexpr uint64_t kMapAlignment = 32; // of ggml's CPU buffers over mapped memory

struct SplitKeys {
    bool any = false;
    uint64_t no = 0, count = 1, tensors = 0;
};

// split.no and split.count are u16, split.tensors.count is i32: libllama asserts or refuses otherwise.
Status split_keys(const File& file, SplitKeys& out) {
    const struct {
        const char* key;
        Kind kind;
        uint64_t* to;
    } keys[] = {{"split.no", Kind::u16, &out.no},
                {"split.count", Kind::u16, &out.count},
                {"split.tensors.count", Kind::i32, &out.tensors}};
    for (const auto& k : keys) {
        const Value* v = file.find(k.key);
        if (!v) continue;
        if (v->kind != k.kind) {
            return failed(StatusCode::corrupt, file.path,
                          std::string(k.key) + " has type " + kind_name(v->kind) + "; allowed is " + kind_name(k.kind));
        }
        *k.to = v->bits;
        out.any = true;
    }
    if (out.count == 0) out.count = 1; // as libllama: not a split model
    if (out.no >= out.count) {
        return failed(StatusCode::corrupt, file.path,
                      "split.no is " + std::to_string(out.no) + "; allowed are 0 to " + std::to_string(out.count - 1) +
                          " (split.count - 1)");
    }
    return {};
}

std::string shard_suffix(uint64_t no, uint64_t count) {
    char text[48];
    std::snprintf(text, sizeof text, "-%05u-of-%05u.gguf", static_cast<unsigned>(no + 1), static_cast<unsigned>(count));
    return text;
}

std::string shard_name(uint64_t no, uint64_t count) {
    return "shard " + std::to_string(no + 1) + " of " + std::to_string(count);
}

// Reads the other shards of a split model and holds each against the first.
Status check_shards(const File& first, const SplitKeys& split, std::vector<File>& shards) {
    const std::string suffix = shard_suffix(split.no, split.count);
    if (!first.path.ends_with(suffix) || first.path.size() == suffix.size()) {
        return failed(StatusCode::corrupt, first.path,
                      "says that it is " + shard_name(split.no, split.count) + "; its name must then end in NAME" +
                          suffix);
    }
    const std::string prefix = first.path.substr(0, first.path.size() - suffix.size());
    if (split.no != 0) {
        return failed(StatusCode::invalid_argument, first.path,
                      "is " + shard_name(split.no, split.count) + "; open the first one, " + prefix +
                          shard_suffix(0, split.count));
    }
    std::unordered_set<std::string> names;
    for (const auto& t : first.tensors) {
        names.insert(t.name);
    }
    uint64_t tensors = first.tensors.size();
    shards.resize(split.count - 1);
    for (uint64_t no = 1; no < split.count; ++no) {
        File& shard = shards[no - 1];
        const std::string path = prefix + shard_suffix(no, split.count);
        if (Status s = gguf::read(path, shard); !s) {
            return Status(s.code(), s.message() + " (" + shard_name(no, split.count) + " of the model)");
        }
        SplitKeys keys;
        if (Status s = split_keys(shard, keys); !s) return s;
        if (!shard.find("split.no") || keys.no != no) {
            return failed(StatusCode::corrupt, path,
                          (shard.find("split.no") ? "split.no is " + std::to_string(keys.no) : "has no split.no") +
                              ", but by its name it is " + shard_name(no, split.count) + "; allowed is " +
                              std::to_string(no));
        }
        if (shard.find("split.count") && keys.count != split.count) {
            return failed(StatusCode::corrupt, path,
                          "split.count is " + std::to_string(keys.count) + "; the first shard allows " +
                              std::to_string(split.count));
        }
        for (const auto& t : shard.tensors) {
            if (!names.insert(t.name).second) {
                return failed(StatusCode::corrupt, path,
                              "tensor " + quoted(t.name) + " is also in an earlier shard; every name is allowed once");
            }
        }
        tensors += shard.tensors.size();
    }
    if (!first.find("split.tensors.count")) {
        return failed(StatusCode::corrupt, first.path, "has split.count but no split.tensors.count");
    }
    if (tensors != split.tensors) {
        return failed(StatusCode::corrupt, first.path,
                      "split.tensors.count is " + std::to_string(split.tensors) + ", but its " +
                          std::to_string(split.count) + " shards hold " + std::to_string(tensors) + " tensors");
    }
    return {};
}

bool is_mappable(const File& file) {
    for (const auto& t : file.tensors) {
        if ((file.data_offset + t.offset) % kMapAlignment != 0) return false;
    }
    return true;
}

} // namespace

Status check_gguf(const std::string& path, GgufInfo* info) {
    GgufInfo found;
    File first;
    SplitKeys split;
    std::vector<File> shards;
    if (Status s = gguf::read(path, first); !s) return s;
    if (Status s = split_keys(first, split); !s) return s;
    if (split.count > 1) {
        if (Status s = check_shards(first, split, shards); !s) return s;
    }
    found.shards.push_back(path);
    found.mappable = is_mappable(first);
    uint64_t tensors = first.tensors.size();
    for (const File& shard : shards) {
        found.shards.push_back(shard.path);
        found.mappable = found.mappable && is_mappable(shard);
        tensors += shard.tensors.size();
    }
    if (Status s = gguf::check_model(first, found.warnings); !s) return s;
    if (Status s = gguf::check_weights(first); !s) return s;
    for (const File& shard : shards) {
        if (Status s = gguf::check_weights(shard); !s) return s;
    }
    if (tensors == 0) return failed(StatusCode::corrupt, path, "has no tensors; a model has at least one");
    if (info) *info = std::move(found);
    return {};
}

} // namespace kvmosaic
