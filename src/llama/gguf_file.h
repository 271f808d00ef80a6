// The metadata of one GGUF file, read with bounds: header, key-value pairs, tensor infos. No tensor data.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic::gguf {

// Value types as numbered in the file.
enum class Kind : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64, count };

const char* kind_name(Kind kind);

struct Value {
    Kind kind = Kind::count;
    Kind element = Kind::count;       // of an array
    uint64_t n = 1;                   // elements of an array
    uint64_t bits = 0;                // a scalar's bytes, zero-extended
    std::string text;                 // a string
    std::vector<std::string> strings; // an array of strings, kept for the vocabulary only
    std::vector<unsigned char> raw;   // an array of numbers, kept up to kKeptBytes

    bool is_array_of(Kind k) const { return kind == Kind::array && element == k; }
    double f32() const;
};

struct TensorInfo {
    std::string name;
    uint32_t n_dims = 0;
    uint64_t dims[4] = {1, 1, 1, 1}; // fastest first
    uint32_t type = 0;
    uint64_t offset = 0; // from the start of the data section
    uint64_t bytes = 0;
};

struct File {
    std::string path;
    uint64_t size = 0;
    uint32_t version = 0;
    uint64_t alignment = 32;
    uint64_t data_offset = 0;
    std::unordered_map<std::string, Value> values;
    std::vector<TensorInfo> tensors;

    const Value* find(const std::string& key) const;
};

// Limits of ours, far above any known model, so that a crafted file costs neither time nor memory.
inline constexpr uint64_t kMaxKeys = 1 << 16, kMaxTensors = 1 << 17, kMaxElements = 1 << 26, kMaxStrings = 1 << 22;
inline constexpr uint64_t kMaxKeyBytes = 65535, kMaxStringBytes = 64 << 20, kMaxMetadataBytes = 256 << 20;
inline constexpr uint64_t kMaxTensorName = 63; // libllama keeps 64 bytes with the closing zero
inline constexpr uint64_t kKeptBytes = 32 << 20;

// The file's text for a message: in quotes, at most 60 characters, without control characters.
std::string quoted(std::string_view text);

// "path: what" with a code.
Status failed(StatusCode code, const std::string& path, const std::string& what);

// Reads and checks everything that one file can be checked for on its own.
Status read(const std::string& path, File& out);

} // namespace kvmosaic::gguf
