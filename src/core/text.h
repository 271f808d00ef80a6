// Small text helpers of parsers and messages. Independent of the locale.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvmosaic::text {

// Whole-string numbers: no sign '+', no spaces, no "inf" or "nan". False leaves *out alone.
bool parse_integer(std::string_view s, int64_t* out);
bool parse_real(std::string_view s, double* out);
std::string print_real(double x); // shortest text that reads back equal

std::vector<std::string_view> split(std::string_view s, char separator); // "a,,b" gives 3 parts, "" gives 1
std::string join(const std::vector<std::string>& words, std::string_view last = " or "); // "a, b or c"

// In double quotes for a message: long text is cut and unprintable bytes are shown as '?'.
std::string quote(std::string_view s);
// The candidate with the smallest edit distance, letter case ignored, or "" when none is close.
std::string nearest(std::string_view s, const std::vector<std::string>& candidates);

} // namespace kvmosaic::text
