// What instructions count in a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvmosaic::eval::text {

std::string lower(std::string text); // ASCII letters
std::string strip(const std::string& text, const char* what = " \t\r\n\f\v");
std::vector<std::string> split(const std::string& text, const std::string& separator);
// Runs of letters, digits and underscores of any script.
std::vector<std::string> words(const std::string& text);
int64_t count(const std::string& text, const std::string& part); // without overlap; 0 for an empty part
bool has_word(const std::string& text, const std::string& word); // not as part of a longer word
// Parts of a line between `open` and `close` that hold neither line ends nor, where `without` is not 0, that character.
std::vector<std::string> enclosed(const std::string& text, const std::string& open, const std::string& close,
                                  char without = 0);
bool all_upper(const std::string& text); // some letter, and none of the other case
bool all_lower(const std::string& text);

} // namespace kvmosaic::eval::text
