#include "gguf_file.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <unordered_set>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace kvmosaic::gguf {
namespace {

constexpr struct {
    const char* name;
    uint32_t size;
} kKinds[] = {{"u8", 1},   {"i8", 1},     {"u16", 2},   {"i16", 2}, {"u32", 4}, {"i32", 4}, {"f32", 4},
              {"bool", 1}, {"string", 0}, {"array", 0}, {"u64", 8}, {"i64", 8}, {"f64", 8}};

// Values and bytes of one block of each tensor type; block 0 marks numbers that were never used or were retired.
// Facts of ggml's public headers (ggml.h, ggml-common.h), as of llama.cpp in llama-cpp-python 0.3.36.
struct TypeSize {
    uint32_t block;
    uint32_t bytes;
};
constexpr TypeSize kTypes[] = {
    {1, 4},    {1, 2},    {32, 18},   {32, 20},   {0, 0},     {0, 0},     {32, 22},   {32, 24},  {32, 34},
    {32, 36},  {256, 84}, {256, 110}, {256, 144}, {256, 176}, {256, 210}, {256, 292}, {256, 66}, {256, 74},
    {256, 98}, {256, 50}, {32, 18},   {256, 110}, {256, 82},  {256, 136}, {1, 1},     {1, 2},    {1, 4},
    {1, 8},    {1, 8},    {256, 56},  {1, 2},     {0, 0},     {0, 0},     {0, 0},     {256, 54}, {256, 66},
    {0, 0},    {0, 0},    {0, 0},     {32, 17},   {64, 36},   {128, 18},  {64, 18}};
constexpr uint32_t kTypeCount = sizeof kTypes / sizeof kTypes[0];

// First bytes of files that people pass by mistake.
constexpr struct {
    std::string_view start;
    const char* what;
} kForeign[] = {{"version https://git-lfs", "a Git LFS pointer, not the file itself"},
                {std::string_view("PK\3\4", 4), "a ZIP archive, such as a PyTorch checkpoint"},
                {"\x89HDF", "an HDF5 file"},
                {"<!DOCTYPE", "a web page"},
                {"<!doctype", "a web page"},
                {"<html", "a web page"},
                {"lmgg", "a GGML file from before GGUF"},
                {"fmgg", "a GGML file from before GGUF"},
                {"tjgg", "a GGML file from before GGUF"},
                {"algg", "a GGML adapter from before GGUF"},
                {"\x1f\x8b", "a gzip archive"},
                {"FUGG", "a byte-swapped GGUF file"}};

// Buffered reads at a running position that never passes the end of the file.
class Reader {
public:
    Reader(int fd, uint64_t size) : fd_(fd), size_(size), buffer_(new unsigned char[kBuffer]) {}

    uint64_t at() const { return at_; }
    uint64_t left() const { return size_ - at_; }

    bool take(void* out, uint64_t n) {
        if (n > left()) return false;
        auto* to = static_cast<unsigned char*>(out);
        while (n > 0) {
            if (at_ < start_ || at_ >= start_ + have_) {
                const ssize_t got = pread(fd_, buffer_.get(), kBuffer, static_cast<off_t>(at_));
                if (got <= 0) return false;
                start_ = at_;
                have_ = static_cast<uint64_t>(got);
            }
            const uint64_t part = std::min(n, start_ + have_ - at_);
            std::memcpy(to, buffer_.get() + (at_ - start_), part);
            to += part;
            at_ += part;
            n -= part;
        }
        return true;
    }

    template <typename T>
    bool number(T& out) {
        static_assert(std::endian::native == std::endian::little, "GGUF is read as little-endian");
        return take(&out, sizeof out);
    }

    void seek(uint64_t to) { at_ = std::min(to, size_); }

    bool skip(uint64_t n) {
        if (n > left()) return false;
        at_ += n;
        return true;
    }

private:
    static constexpr uint64_t kBuffer = 256 << 10;
    int fd_;
    uint64_t size_, at_ = 0, start_ = 0, have_ = 0;
    std::unique_ptr<unsigned char[]> buffer_;
};

struct Descriptor {
    int fd = -1;
    ~Descriptor() {
        if (fd >= 0) close(fd);
    }
};

std::string num(uint64_t n) { return std::to_string(n); }

// One pass over a file; every function returns ok or the sentence that ends the pass.
class Parser {
public:
    Parser(File& file, int fd) : file_(file), in_(fd, file.size) {}

    Status run() {
        if (Status s = header(); !s) return s;
        for (uint64_t i = 0; i < n_kv_; ++i) {
            if (Status s = pair(i); !s) return s;
            if (in_.at() > kMaxMetadataBytes) {
                return bad("metadata is larger than " + num(kMaxMetadataBytes >> 20) + " MiB at key " + num(i + 1) +
                           " of " + num(n_kv_));
            }
        }
        if (Status s = alignment(); !s) return s;
        for (uint64_t i = 0; i < n_tensors_; ++i) {
            if (Status s = tensor(i); !s) return s;
        }
        return place();
    }

private:
    Status bad(const std::string& what) const { return failed(StatusCode::corrupt, file_.path, what); }
    Status cut(const std::string& where) const {
        return bad("ends inside " + where + " (file size " + num(file_.size) +
                   " bytes), so it is truncated or damaged");
    }

    Status header() {
        char first[32] = {};
        const uint64_t n = std::min<uint64_t>(sizeof first, file_.size);
        if (!in_.take(first, n)) return bad(std::string("cannot be read: ") + std::strerror(errno));
        const std::string_view head(first, n);
        if (head.substr(0, 4) != "GGUF") {
            std::string what = "starts with " + quoted(head.substr(0, 4)) + ", expected 'GGUF'";
            for (const auto& f : kForeign) {
                if (head.starts_with(f.start)) what += "; it looks like " + std::string(f.what);
            }
            if (n > 9 && head[8] == '{') what += "; it looks like a safetensors file";
            return bad(what);
        }
        if (n < 24) return cut("the 24-byte GGUF header");
        std::memcpy(&file_.version, first + 4, 4);
        std::memcpy(&n_tensors_, first + 8, 8);
        std::memcpy(&n_kv_, first + 16, 8);
        const uint32_t v = file_.version;
        if ((v & 0xffff) == 0 && v != 0) {
            return failed(StatusCode::unsupported, file_.path,
                          "is a big-endian GGUF file (version bytes read as " + num(v) +
                              "); only little-endian files load");
        }
        if (v < 2 || v > 3) {
            return failed(StatusCode::unsupported, file_.path, "has GGUF version " + num(v) + "; allowed are 2 and 3");
        }
        // The smallest pair takes 8 + 1 + 4 + 1 bytes, the smallest tensor 8 + 1 + 4 + 8 + 4 + 8.
        const uint64_t left = file_.size - 24;
        if (n_kv_ > std::min(kMaxKeys, left / 14)) {
            return bad("announces " + num(n_kv_) + " key-value pairs; " + num(left) +
                       " bytes left and our limit allow at most " + num(std::min(kMaxKeys, left / 14)));
        }
        if (n_tensors_ > std::min(kMaxTensors, left / 33)) {
            return bad("announces " + num(n_tensors_) + " tensors; " + num(left) +
                       " bytes left and our limit allow at most " + num(std::min(kMaxTensors, left / 33)));
        }
        in_.seek(24);
        return {};
    }

    // A length-prefixed string of at most `limit` bytes.
    Status string(std::string& out, uint64_t limit, const std::string& where) {
        uint64_t n = 0;
        if (!in_.number(n)) return cut(where);
        if (n > limit || n > in_.left()) {
            return bad(where + " has length " + num(n) + "; allowed are at most " + num(std::min(limit, in_.left())) +
                       " bytes");
        }
        out.resize(n);
        if (!in_.take(out.data(), n)) return cut(where);
        return {};
    }

    Status pair(uint64_t index);
    Status array(Value& v, const std::string& key);
    Status alignment();
    Status tensor(uint64_t index);
    Status place();

    File& file_;
    Reader in_;
    uint64_t n_kv_ = 0, n_tensors_ = 0;
    std::unordered_set<std::string> names_;
};

Status Parser::pair(uint64_t index) {
    std::string key;
    const std::string where = "key " + num(index + 1) + " of " + num(n_kv_);
    if (Status s = string(key, kMaxKeyBytes, where); !s) return s;
    if (key.empty()) return bad(where + " is empty; a key has 1 to " + num(kMaxKeyBytes) + " bytes");
    if (file_.values.contains(key)) return bad("key " + quoted(key) + " appears twice; every key is allowed once");

    const std::string at = "key " + quoted(key);
    Value v;
    uint32_t kind = 0;
    if (!in_.number(kind)) return cut(at);
    if (kind >= static_cast<uint32_t>(Kind::count)) {
        return bad(at + " has value type " + num(kind) + "; allowed are 0 to 12");
    }
    v.kind = Kind(kind);
    if (v.kind == Kind::string) {
        if (Status s = string(v.text, kMaxStringBytes, at); !s) return s;
    } else if (v.kind == Kind::array) {
        if (Status s = array(v, key); !s) return s;
    } else if (!in_.take(&v.bits, kKinds[kind].size)) {
        return cut(at);
    }
    file_.values.emplace(std::move(key), std::move(v));
    return {};
}

Status Parser::array(Value& v, const std::string& key) {
    const std::string at = "array " + quoted(key);
    uint32_t element = 0;
    if (!in_.number(element) || !in_.number(v.n)) return cut(at);
    if (element >= static_cast<uint32_t>(Kind::count) || Kind(element) == Kind::array) {
        return bad(at + " has element type " + num(element) + "; allowed are 0 to 12 without 9 (nested arrays)");
    }
    v.element = Kind(element);
    const uint64_t size = v.element == Kind::string ? 8 : kKinds[element].size; // of a string at least its length
    const uint64_t most = std::min(v.element == Kind::string ? kMaxStrings : kMaxElements, in_.left() / size);
    if (v.n > most) {
        return bad(at + " announces " + num(v.n) + " elements of type " + kind_name(v.element) + "; " +
                   num(in_.left()) + " bytes left allow at most " + num(most));
    }
    if (v.element != Kind::string) {
        if (v.n * size > kKeptBytes) return in_.skip(v.n * size) ? Status() : cut(at);
        v.raw.resize(v.n * size);
        return in_.take(v.raw.data(), v.raw.size()) ? Status() : cut(at);
    }
    const bool keep = key == "tokenizer.ggml.tokens";
    std::string text;
    for (uint64_t i = 0; i < v.n; ++i) {
        const std::string where = keep || i == 0 ? at + " element " + num(i) : at;
        if (Status s = string(text, kMaxStringBytes, where); !s) return s;
        if (keep) v.strings.push_back(text);
        if (in_.at() > kMaxMetadataBytes) {
            return bad(at + " passes " + num(kMaxMetadataBytes >> 20) + " MiB of metadata at element " + num(i) +
                       " of " + num(v.n) + "; larger metadata is refused");
        }
    }
    return {};
}

Status Parser::alignment() {
    const Value* v = file_.find("general.alignment");
    if (!v) return {};
    if (v->kind != Kind::u32) {
        return bad(std::string("general.alignment has type ") + kind_name(v->kind) + "; allowed is u32");
    }
    const uint64_t a = v->bits;
    constexpr uint64_t kMost = 1 << 20;
    const std::string allowed = "; allowed are the powers of two from 8 to " + num(kMost);
    if (a == 0 || a % 8 != 0) {
        return bad("general.alignment is " + num(a) + ", not a positive multiple of 8" + allowed);
    }
    if (!std::has_single_bit(a) || a > kMost) {
        return failed(StatusCode::unsupported, file_.path,
                      "general.alignment is " + num(a) + ", which the format permits but libllama does not load" +
                          allowed);
    }
    file_.alignment = a;
    return {};
}

Status Parser::tensor(uint64_t index) {
    TensorInfo t;
    const std::string where = "the name of tensor " + num(index + 1) + " of " + num(n_tensors_);
    if (Status s = string(t.name, kMaxTensorName, where); !s) return s;
    if (t.name.empty()) return bad(where + " is empty; a name has 1 to " + num(kMaxTensorName) + " bytes");
    const std::string at = "tensor " + quoted(t.name);
    // libllama compares names as C strings, so a zero byte would make two names one.
    if (t.name.find('\0') != std::string::npos) return bad(at + " has a zero byte in its name");
    if (!names_.insert(t.name).second) return bad(at + " appears twice; every name is allowed once");

    if (!in_.number(t.n_dims)) return cut(at);
    if (t.n_dims < 1 || t.n_dims > 4) return bad(at + " has " + num(t.n_dims) + " dimensions; allowed are 1 to 4");
    // Values are counted in 63 bits: libllama holds them in signed 64-bit numbers.
    constexpr uint64_t kMost = uint64_t(1) << 62;
    uint64_t values = 1;
    for (uint32_t i = 0; i < t.n_dims; ++i) {
        if (!in_.number(t.dims[i])) return cut(at);
        if (t.dims[i] == 0 || t.dims[i] > kMost / values) {
            return bad(at + " has dimension " + num(i + 1) + " = " + num(t.dims[i]) + "; allowed are 1 to " +
                       num(kMost / values) + (i ? " after the dimensions before it" : ""));
        }
        values *= t.dims[i];
    }
    if (!in_.number(t.type)) return cut(at);
    if (t.type >= kTypeCount || kTypes[t.type].block == 0) {
        return failed(StatusCode::unsupported, file_.path,
                      at + " has type " + num(t.type) + ", which libllama does not know; allowed are 0 to " +
                          num(kTypeCount - 1) + " without 4, 5, 31 to 33 and 36 to 38");
    }
    const TypeSize type = kTypes[t.type];
    if (t.dims[0] % type.block != 0) {
        return bad(at + " has rows of " + num(t.dims[0]) + " values; its type " + num(t.type) +
                   " allows multiples of " + num(type.block));
    }
    if (values / type.block > kMost / type.bytes) {
        return bad(at + " takes more than 2^62 bytes; the file has " + num(file_.size));
    }
    t.bytes = values / type.block * type.bytes;
    if (!in_.number(t.offset)) return cut(at);
    if (in_.at() > kMaxMetadataBytes)
        return bad("metadata is larger than " + num(kMaxMetadataBytes >> 20) + " MiB at " + at);
    file_.tensors.push_back(std::move(t));
    return {};
}

// Where the data lies: libllama wants the tensors back to back in the order of their infos.
Status Parser::place() {
    const uint64_t a = file_.alignment;
    auto pad = [a](uint64_t n) { return (n + a - 1) / a * a; };
    file_.data_offset = pad(in_.at());
    uint64_t expected = 0;
    for (const TensorInfo& t : file_.tensors) {
        const std::string at = "tensor " + quoted(t.name);
        if (t.offset != expected) {
            return bad(at + " has offset " + num(t.offset) + "; allowed is " + num(expected) +
                       ", right after the tensor before it at alignment " + num(a));
        }
        const uint64_t start = file_.data_offset + t.offset; // both are below the file size plus padding here
        if (start > file_.size || t.bytes > file_.size - start) {
            return bad(at + " needs bytes " + num(start) + " to " + num(start + t.bytes) + ", but the file ends at " +
                       num(file_.size) + ", so it is truncated or damaged");
        }
        expected = t.offset + pad(t.bytes);
    }
    return {};
}

} // namespace

const char* kind_name(Kind kind) { return kind < Kind::count ? kKinds[static_cast<uint32_t>(kind)].name : "unknown"; }

double Value::f32() const { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }

const Value* File::find(const std::string& key) const {
    const auto it = values.find(key);
    return it == values.end() ? nullptr : &it->second;
}

std::string quoted(std::string_view text) {
    constexpr size_t kMost = 60;
    std::string out = "'";
    for (unsigned char c : text.substr(0, kMost))
        out += c >= 32 && c != 127 && c < 128 ? static_cast<char>(c) : '?';
    return out + (text.size() > kMost ? "…'" : "'");
}

Status failed(StatusCode code, const std::string& path, const std::string& what) { return {code, path + ": " + what}; }

Status read(const std::string& path, File& out) {
    out = File();
    out.path = path;
    struct stat info {};
    // stat before open: opening a pipe would wait for a writer.
    if (stat(path.c_str(), &info) != 0) {
        return failed(errno == ENOENT || errno == ENOTDIR ? StatusCode::not_found : StatusCode::invalid_argument, path,
                      std::string("cannot be opened (") + std::strerror(errno) + "); expected a GGUF model file");
    }
    if (S_ISDIR(info.st_mode)) {
        return failed(StatusCode::invalid_argument, path, "is a directory; expected a GGUF model file");
    }
    if (!S_ISREG(info.st_mode)) {
        return failed(StatusCode::invalid_argument, path, "is not a regular file; expected a GGUF model file");
    }
    if (info.st_size == 0) return failed(StatusCode::corrupt, path, "is empty; expected a GGUF model file");
    Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
    if (file.fd < 0) {
        return failed(StatusCode::invalid_argument, path,
                      std::string("cannot be opened (") + std::strerror(errno) + "); expected a GGUF model file");
    }
    out.size = static_cast<uint64_t>(info.st_size);
    return Parser(out, file.fd).run();
}

} // namespace kvmosaic::gguf
