#include "core/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace kvmosaic::text {

namespace {

constexpr size_t kQuoted = 80; // longest text that a message repeats in full

char lower(char c) { return c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c; }

// Levenshtein distance, one row of the table at a time.
size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j)
        row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            const size_t change = diagonal + (lower(a[i - 1]) == lower(b[j - 1]) ? 0 : 1);
            diagonal = row[j];
            row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
        }
    }
    return row[b.size()];
}

template <typename T>
bool parse_all(std::string_view s, T* out) {
    T value{};
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
    if (error != std::errc() || end != s.data() + s.size()) return false;
    *out = value;
    return true;
}

} // namespace

bool parse_integer(std::string_view s, int64_t* out) { return parse_all(s, out); }

bool parse_real(std::string_view s, double* out) {
    double value = 0;
    if (!parse_all(s, &value) || !std::isfinite(value)) return false;
    *out = value == 0 ? 0.0 : value; // no "-0"
    return true;
}

std::string print_real(double x) {
    char buffer[40];
    const auto result = std::to_chars(buffer, buffer + sizeof(buffer), x);
    return std::string(buffer, result.ptr);
}

std::vector<std::string_view> split(std::string_view s, char separator) {
    std::vector<std::string_view> parts;
    for (;;) {
        const size_t at = s.find(separator);
        parts.push_back(s.substr(0, at));
        if (at == std::string_view::npos) return parts;
        s.remove_prefix(at + 1);
    }
}

std::string join(const std::vector<std::string>& words, std::string_view last) {
    std::string all;
    for (size_t i = 0; i < words.size(); ++i) {
        if (i > 0) all += i + 1 == words.size() ? last : std::string_view(", ");
        all += words[i];
    }
    return all;
}

std::string quote(std::string_view s) {
    std::string shown(s.substr(0, kQuoted));
    for (char& c : shown) {
        if (c < 0x20 || c > 0x7E) c = '?';
    }
    if (s.size() > kQuoted) shown += "...";
    return '"' + shown + '"';
}

std::string nearest(std::string_view s, const std::vector<std::string>& candidates) {
    if (s.size() > kQuoted) return "";
    std::string best;
    size_t best_distance = s.size(); // sharing no letter at all is not near
    for (const std::string& candidate : candidates) {
        const size_t distance = edit_distance(s, candidate);
        if (distance < best_distance && distance <= std::max(s.size(), candidate.size()) / 2) {
            best = candidate;
            best_distance = distance;
        }
    }
    return best;
}

} // namespace kvmosaic::text
