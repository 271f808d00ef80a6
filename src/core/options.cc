#include "kvmosaic/options.h"

#include <algorithm>

#include "core/text.h"

namespace kvmosaic {

namespace {

Status bad(std::string message) { return Status(StatusCode::invalid_argument, std::move(message)); }

std::vector<std::string> names_of(const std::vector<OptionInfo>& options) {
    std::vector<std::string> names;
    for (const OptionInfo& option : options)
        names.push_back(option.name);
    return names;
}

std::string suggestion(std::string_view given, const std::vector<std::string>& names) {
    const std::string near = text::nearest(given, names);
    return near.empty() ? "" : ", did you mean " + near + "?";
}

// The canonical text of a value, or the empty string when the option does not allow it.
std::string canonical(const OptionInfo& option, std::string_view value) {
    if (!option.word.empty() && value == option.word) return option.word;
    std::string printed;
    if (option.kind == OptionInfo::Kind::choice || option.kind == OptionInfo::Kind::text) {
        printed = value;
    } else if (option.kind == OptionInfo::Kind::integer) {
        int64_t n = 0;
        if (!text::parse_integer(value, &n)) return "";
        if (option.choices.empty() && (double(n) < option.min || double(n) > option.max)) return "";
        printed = std::to_string(n);
    } else {
        double x = 0;
        if (!text::parse_real(value, &x)) return "";
        if (option.choices.empty() && (x < option.min || x > option.max)) return "";
        printed = text::print_real(x);
    }
    const auto& choices = option.choices;
    const bool listed = std::find(choices.begin(), choices.end(), printed) != choices.end();
    return choices.empty() || listed ? printed : "";
}

} // namespace

const char* name_of(OptionInfo::Kind kind) {
    switch (kind) {
    case OptionInfo::Kind::integer:
        return "integer";
    case OptionInfo::Kind::real:
        return "real";
    case OptionInfo::Kind::choice:
        return "choice";
    case OptionInfo::Kind::text:
        return "text";
    }
    return "?";
}

std::string allowed_text(const OptionInfo& option) {
    if (option.kind == OptionInfo::Kind::text) return "text without a comma";
    std::string allowed = option.choices.empty() ? text::print_real(option.min) + " to " + text::print_real(option.max)
                                                 : text::join(option.choices);
    if (option.choices.empty() && option.kind == OptionInfo::Kind::integer) {
        allowed = std::to_string(int64_t(option.min)) + " to " + std::to_string(int64_t(option.max));
    }
    if (!option.word.empty()) allowed += ", or " + option.word;
    return allowed;
}

int32_t OptionValues::integer(std::string_view name) const {
    int64_t n = 0;
    (void)text::parse_integer(text(name), &n);
    return int32_t(n);
}

double OptionValues::real(std::string_view name) const {
    double x = 0;
    (void)text::parse_real(text(name), &x);
    return x;
}

Result<OptionValues> parse_options(std::string_view name, const std::vector<OptionInfo>& options,
                                   std::string_view list) {
    const std::string who(name);
    const std::vector<std::string> names = names_of(options);
    OptionValues given, values;
    for (const std::string_view part : list.empty() ? std::vector<std::string_view>() : text::split(list, ',')) {
        if (part.empty()) return bad(who + ": an option is missing before or after a comma");
        const size_t equals = part.find('=');
        const std::string_view key = part.substr(0, equals);
        const auto option = std::find_if(options.begin(), options.end(), [&](const auto& o) { return o.name == key; });
        if (option == options.end()) {
            if (options.empty()) return bad(who + ": has no options, given was " + text::quote(key));
            return bad(who + ": unknown option " + text::quote(key) + suggestion(key, names) + " (its options are " +
                       text::join(names, " and ") + ")");
        }
        const std::string allowed = option->name + " must be " + allowed_text(*option);
        if (equals == std::string_view::npos || equals + 1 == part.size()) {
            return bad(who + ": option " + option->name + " has no value; " + allowed);
        }
        if (given.has(key)) return bad(who + ": option " + option->name + " is given twice");
        const std::string_view value = part.substr(equals + 1);
        const std::string printed = canonical(*option, value);
        if (printed.empty()) return bad(who + ": " + allowed + ", not " + text::quote(value));
        given.set(option->name, printed);
    }
    for (const OptionInfo& option : options) {
        if (option.kind == OptionInfo::Kind::text && option.fallback.empty() && !given.has(option.name))
            return bad(who + ": option " + option.name + " must be given: " + option.help);
        values.set(option.name, given.has(option.name) ? given.text(option.name) : canonical(option, option.fallback));
    }
    return values;
}

std::string print_options(const std::vector<OptionInfo>& options, const OptionValues& values) {
    std::string printed;
    for (const OptionInfo& option : options) {
        const std::string& value = values.text(option.name);
        if (value == canonical(option, option.fallback)) continue;
        printed += (printed.empty() ? "" : ",") + option.name + "=" + value;
    }
    return printed;
}

std::string help_text(const std::vector<OptionInfo>& options, int indent) {
    size_t width = 0;
    for (const OptionInfo& option : options)
        width = std::max(width, option.name.size());
    std::string help;
    for (const OptionInfo& option : options) {
        help += std::string(size_t(std::max(indent, 0)), ' ') + option.name + "=" +
                std::string(width - option.name.size() + 2, ' ') + option.help + " (" + allowed_text(option) +
                (option.fallback.empty() ? "; must be given" : "; default " + option.fallback) + ")\n";
    }
    return help;
}

} // namespace kvmosaic
