// Writing and reading of saved states: plain fields in sections, each with a tag, a number and its length. A reader
// believes no count before it has compared it with the bytes that are left.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "kvmosaic/shape.h"
#include "kvmosaic/store.h"

namespace kvmosaic::state {

inline constexpr uint32_t kMagic = 0x534d564b; // "KVMS"
inline constexpr uint32_t kVersion = 3;
inline constexpr uint32_t kByteOrder = 0x01020304;
inline constexpr uint32_t kSwapped = 0x04030201;
inline constexpr size_t kHeadBytes = 16;    // magic, version, byte order, tokens of a page
inline constexpr size_t kSectionBytes = 16; // tag, number, length

enum class Tag : uint32_t {
    model = 1,  // name, fingerprint, sizes and rotation of every layer
    method,     // the spec, the hash of its calibration
    plans,      // what the method fixes: windows, stores, transforms
    positions,  // of every row, and how many of them are packed
    statistics, // of queries
    decided,    // what the sequence decided once, pinned rows
    front,      // rows that stay raw for good
    keys,       // by page number: packed parts and raw rows of all layers and heads
    values,     // likewise
};
inline constexpr uint32_t kLastTag = uint32_t(Tag::values);
constexpr Tag pages_of(Side side) { return side == Side::key ? Tag::keys : Tag::values; }
const char* name_of(Tag tag);

// One section as it lies in a state.
struct Section {
    Tag tag = Tag::model;
    uint32_t number = 0;
    std::span<const uint8_t> bytes;
};
// The sections of a state; their contents are not looked at.
Result<std::vector<Section>> sections(std::span<const uint8_t> bytes);
// The state that these sections make, headed as this version heads it.
void put_head(std::vector<uint8_t>* out);
void put_section_head(std::vector<uint8_t>* out, Tag tag, uint32_t number, uint64_t length);

class Writer {
public:
    std::vector<uint8_t> out;
    void bytes(const void* p, size_t n) {
        const auto* b = static_cast<const uint8_t*>(p);
        out.insert(out.end(), b, b + n);
    }
    template <typename T>
    void put(T v) {
        static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
        bytes(&v, sizeof(v));
    }
    template <typename T>
    void array(const std::vector<T>& values) {
        put(uint32_t(values.size()));
        bytes(values.data(), values.size() * sizeof(T));
    }
    void text(const std::string& s) {
        put(uint32_t(s.size()));
        bytes(s.data(), s.size());
    }
    void begin(Tag tag, uint32_t number = 0) {
        put_section_head(&out, tag, number, 0);
        start_ = out.size();
    }
    void end() {
        const uint64_t length = out.size() - start_;
        std::memcpy(out.data() + start_ - sizeof(length), &length, sizeof(length));
    }

private:
    size_t start_ = 0;
};

class Reader {
public:
    explicit Reader(std::span<const uint8_t> in) : in_(in) {}

    bool ok() const { return wrong_.empty(); }
    const std::string& wrong() const { return wrong_; } // the first field that did not fit, in a sentence
    size_t left() const { return in_.size() - at_; }
    void refuse(std::string sentence) {
        if (wrong_.empty()) wrong_ = std::move(sentence);
    }
    // Only where nothing is to be made for the sentence; others ask first.
    void expect(bool good, const char* sentence) {
        if (!good) refuse(sentence);
    }
    bool bytes(void* p, size_t n, const char* field) {
        if (!ok()) return false;
        if (left() < n) return short_of(n, field);
        if (n > 0) std::memcpy(p, in_.data() + at_, n); // an empty vector's data may be null
        at_ += n;
        return true;
    }
    template <typename T>
    T get(const char* field) {
        static_assert(std::is_arithmetic_v<T>);
        T v{};
        bytes(&v, sizeof(v), field);
        return v;
    }
    void skip(size_t n) { at_ += n; } // n: at most left()
    bool flag(const char* field) {
        const uint8_t v = get<uint8_t>(field);
        if (v > 1) refuse(std::string(field) + ": " + std::to_string(v) + " is neither 0 nor 1");
        return v == 1;
    }
    // Of any length up to `most`.
    template <typename T>
    void array(std::vector<T>* values, size_t most, const char* field) {
        const uint32_t count = get<uint32_t>(field);
        if (count > most)
            refuse(std::string(field) + ": " + std::to_string(count) + " are more than " + std::to_string(most));
        if (!ok() || size_t(count) * sizeof(T) > left()) {
            if (ok()) short_of(size_t(count) * sizeof(T), field);
            return;
        }
        values->resize(count);
        bytes(values->data(), count * sizeof(T), field);
    }
    void text(std::string* s, size_t most, const char* field) {
        std::vector<char> chars;
        array(&chars, most, field);
        s->assign(chars.begin(), chars.end());
        for (const char c : chars) // it is shown to people, on terminals
            if (uint8_t(c) < 0x20 || c == 0x7F) return refuse(std::string(field) + ": it holds control characters");
    }

private:
    bool short_of(size_t n, const char* field);
    std::span<const uint8_t> in_;
    size_t at_ = 0;
    std::string wrong_;
};

// ---- parts of a state that need no cache (state_plan.cc) ----
void put_model(Writer* w, const ModelShape& shape);
void get_model(Reader* r, ModelShape* shape);
// One sentence, or "" when a state of `saved` fits `here`.
std::string model_gap(const ModelShape& saved, const ModelShape& here);
// The spec without what only names a file: calibrations are compared by what they hold.
std::string portable(const std::string& spec);

} // namespace kvmosaic::state
