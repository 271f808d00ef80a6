#include "eval/ifeval_text.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace kvmosaic::eval::text {

namespace {

bool upper_letter(char c) { return c >= 'A' && c <= 'Z'; }
bool lower_letter(char c) { return c >= 'a' && c <= 'z'; }

// The code point at `at`, which goes behind it; a byte that begins none counts alone.
uint32_t code_point(const std::string& text, size_t* at) {
    const auto byte = [&](size_t i) { return uint32_t(static_cast<unsigned char>(text[i])); };
    const uint32_t first = byte((*at)++);
    const int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc0 ? 1 : 0;
    uint32_t out = more == 0 ? first : first & (0x3fu >> more);
    for (int i = 0; i < more && *at < text.size() && (byte(*at) & 0xc0u) == 0x80u; ++i)
        out = out << 6 | (byte((*at)++) & 0x3fu);
    return out;
}

bool in_word(uint32_t c) {
    if (c < 0x80) return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
    if (c < 0xc0) return c == 0xaa || c == 0xb2 || c == 0xb3 || c == 0xb5 || c == 0xb9 || c == 0xba;
    const bool sign = c == 0xd7 || c == 0xf7 || (c >= 0x2000 && c < 0x2070) || (c >= 0x20a0 && c < 0x20d0) ||
                      (c >= 0x2190 && c < 0x2c00) || (c >= 0x3000 && c < 0x3005) || (c >= 0x3008 && c < 0x3021) ||
                      (c >= 0xff00 && c < 0xff10) || (c >= 0x1f000 && c < 0x20000);
    return !sign;
}

} // namespace

std::string lower(std::string text) {
    for (char& c : text)
        if (upper_letter(c)) c = char(c - 'A' + 'a');
    return text;
}

std::string strip(const std::string& text, const char* what) {
    const size_t first = text.find_first_not_of(what);
    if (first == std::string::npos) return "";
    return text.substr(first, text.find_last_not_of(what) + 1 - first);
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
    std::vector<std::string> out;
    size_t at = 0;
    while (true) {
        const size_t end = text.find(separator, at);
        out.push_back(text.substr(at, end - at));
        if (end == std::string::npos) return out;
        at = end + separator.size();
    }
}

std::vector<std::string> words(const std::string& text) {
    std::vector<std::string> out;
    std::string word;
    for (size_t at = 0; at < text.size();) {
        const size_t first = at;
        if (in_word(code_point(text, &at)))
            word += text.substr(first, at - first);
        else if (!word.empty())
            out.push_back(std::exchange(word, ""));
    }
    if (!word.empty()) out.push_back(word);
    return out;
}

int64_t count(const std::string& text, const std::string& part) {
    if (part.empty()) return 0;
    return int64_t(split(text, part).size()) - 1;
}

bool has_word(const std::string& text, const std::string& word) {
    const auto joined = [&](size_t i) {
        return i < text.size() && (upper_letter(text[i]) || lower_letter(text[i]) || text[i] == '_' ||
                                   (text[i] >= '0' && text[i] <= '9') || static_cast<unsigned char>(text[i]) >= 0x80);
    };
    if (word.empty()) return false;
    for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at) {
        if (!(at > 0 && joined(at - 1)) && !joined(at + word.size())) return true;
    }
    return false;
}

std::vector<std::string> enclosed(const std::string& text, const std::string& open, const std::string& close,
                                  char without) {
    std::vector<std::string> out;
    size_t at = 0;
    while ((at = text.find(open, at)) != std::string::npos) {
        const size_t first = at + open.size(), end = text.find(close, first);
        if (end == std::string::npos) break;
        const std::string inner = text.substr(first, end - first);
        const bool plain =
            inner.find('\n') == std::string::npos && (without == 0 || inner.find(without) == std::string::npos);
        if (plain) out.push_back(inner);
        at = plain ? end + close.size() : at + 1;
    }
    return out;
}

bool all_upper(const std::string& text) {
    return std::any_of(text.begin(), text.end(), upper_letter) && std::none_of(text.begin(), text.end(), lower_letter);
}

bool all_lower(const std::string& text) {
    return std::any_of(text.begin(), text.end(), lower_letter) && std::none_of(text.begin(), text.end(), upper_letter);
}

} // namespace kvmosaic::eval::text
