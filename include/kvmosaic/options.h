// Options of a spec: the one place where a name, range, default and help stand. Parser, canonical printer, `--help`,
// JSON and docs are all read from the same list.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic {

// One option of a method.
struct OptionInfo {
    // text: any characters but a comma. Without a default (fallback = "") it must be given.
    enum class Kind { integer, real, choice, text };
    std::string name;
    Kind kind = Kind::integer;
    std::string fallback;                  // default, as text
    double min = 0, max = 0;               // inclusive, for numbers
    std::vector<std::string> choices = {}; // for choice, and for numbers that allow only these
    std::string help;
    std::string word = {}; // a word that may stand in place of a number ("off"), or empty
};
const char* name_of(OptionInfo::Kind kind); // "integer", "real", "choice", "text"
// What may be given, in words: "0 to 4096", "f16, bf16 or f8e4m3", "0 to 1, or off".
std::string allowed_text(const OptionInfo& option);

// Values of a spec's options after defaults, by name, as text that parses.
class OptionValues {
public:
    void set(std::string name, std::string value) { values_[std::move(name)] = std::move(value); }
    bool has(std::string_view name) const { return values_.find(name) != values_.end(); }
    const std::string& text(std::string_view name) const { return values_.find(name)->second; }
    int32_t integer(std::string_view name) const;
    double real(std::string_view name) const;
    const std::map<std::string, std::string, std::less<>>& all() const { return values_; }

private:
    std::map<std::string, std::string, std::less<>> values_;
};

// Reads `option=value,...` for the method `name`; every option that is not given gets its default. Numbers come out
// in canonical form (`1.60` as `1.6`), so that equal settings are equal text.
Result<OptionValues> parse_options(std::string_view name, const std::vector<OptionInfo>& options,
                                   std::string_view list);
// The options that differ from their defaults, in the order of `options`: "bits=4,group=64", or "".
std::string print_options(const std::vector<OptionInfo>& options, const OptionValues& values);
// One line an option, aligned: name, range, default, help. Each line begins with `indent` spaces and ends with '\n'.
std::string help_text(const std::vector<OptionInfo>& options, int indent = 2);

} // namespace kvmosaic
