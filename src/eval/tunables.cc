#include "eval/tunables.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace kvmosaic::eval {

using nlohmann::ordered_json;

namespace {

enum : bool { kUsual = true, kAsked = false }; // tuned unless something else is asked for, or only when asked for

struct Entry {
    const char* method;
    bool usual;
    Tunable what;
};

Tunable numbers(const char* name, double low, double high, double step) {
    Tunable t;
    t.name = name, t.low = low, t.high = high, t.step = step;
    return t;
}
Tunable choices(const char* name, std::vector<std::string> allowed) {
    Tunable t;
    t.name = name, t.choices = std::move(allowed);
    return t;
}
// MixKVQ searches both thresholds in [0.1, 2]. Our scores are larger than its by what looks like the root of the head
// size (the published pairs would keep half of the channels raw; DESIGN of the method: src/methods/mixkvq.cc), so the
// range is taken in those units.
Tunable threshold(const char* name) {
    Tunable t = numbers(name, 0.1, 2.0, 0);
    t.log = t.by_head = true;
    return t;
}

const std::vector<Entry>& table() {
    static const std::vector<std::string> value_bits{"2", "3", "4"}, groups{"32", "64", "128"};
    static const std::vector<Entry> entries{
        {"mosaic", kUsual, numbers("k", 1, 5, 0.25)},
        {"mosaic", kUsual, numbers("v", 1.5, 5, 0.5)},
        {"kivi", kUsual, choices("bits", {"1", "2", "3", "4", "6", "8"})},
        {"kivi", kUsual, choices("group", groups)},
        {"mixkvq", kUsual, threshold("hi")},
        {"mixkvq", kUsual, threshold("mid")},
        {"mixkvq", kAsked, numbers("raw_share", 0, 0.25, 1.0 / 64)},
        {"mixkvq", kAsked, numbers("mid_share", 0, 0.75, 1.0 / 64)},
        {"mixkvq", kAsked, choices("v", value_bits)},
        {"mixkvq", kAsked, choices("group", groups)},
        {"kitty", kUsual, numbers("ratio", 0, 0.5, 1.0 / 64)},
        {"kitty", kAsked, choices("v", value_bits)},
        {"pnmix", kUsual, numbers("r", 0, 1, 1.0 / 32)},
        {"pnmix", kAsked, choices("b_hi", {"2", "3", "4", "6"})},
        {"pnmix", kAsked, choices("b_lo", {"0", "1", "2"})},
        {"pnmix", kAsked, choices("v", value_bits)},
        {"innerq", kUsual, choices("variant", {"small", "hybrid", "base"})},
        {"innerq", kUsual, choices("group", {"8", "16", "32"})},
        {"turboquant", kUsual, choices("k", {"1", "2", "3", "4"})},
        {"turboquant", kUsual, choices("v", value_bits)},
        {"turboquant", kUsual, choices("skip", {"0", "1", "2", "3", "4"})},
        {"skvq", kUsual, numbers("clip", 0.7, 1, 0.02)},
        {"skvq", kUsual, choices("k", {"1.5", "2", "3", "4"})},
        {"skvq", kUsual, choices("v", {"1.5", "2", "3", "4"})},
        {"skvq", kAsked, choices("group", groups)},
        {"rotatekv", kUsual, choices("bits", {"2", "3", "4"})},
        {"rotatekv", kUsual, choices("pins", {"0", "5", "10", "20", "40"})},
        {"kvquant", kUsual, choices("bits", {"2", "3", "4"})},
        {"kvquant", kUsual, numbers("outliers", 0, 0.1, 1.0 / 128)},
    };
    return entries;
}

Status wrong(std::string text) { return {StatusCode::invalid_argument, std::move(text)}; }

const OptionInfo* option_of(const MethodInfo& info, const std::string& name) {
    for (const OptionInfo& option : info.options)
        if (option.name == name) return &option;
    return nullptr;
}

bool as_number(const std::string& text, double* out) {
    size_t used = 0;
    try {
        *out = std::stod(text, &used);
    } catch (const std::exception&) {
        return false;
    }
    return used == text.size() && std::isfinite(*out);
}

// NAME=LOW..HIGH or NAME=A,B,C for one of the space.
Status narrow(const std::string& wish, const MethodInfo& info, std::vector<Tunable>* space) {
    const size_t equals = wish.find('=');
    const std::string name = wish.substr(0, equals);
    const auto at = std::find_if(space->begin(), space->end(), [&](const Tunable& t) { return t.name == name; });
    if (equals == std::string::npos || at == space->end()) {
        std::vector<std::string> names;
        for (const Tunable& t : *space)
            names.push_back(t.name);
        return wrong(fmt::format("--range {}: NAME=LOW..HIGH or NAME=A,B,C, with a name that is tuned: {}", wish,
                                 fmt::join(names, ", ")));
    }
    const std::string range = wish.substr(equals + 1);
    const size_t dots = range.find("..");
    const OptionInfo& option = *option_of(info, name);
    if (dots != std::string::npos) {
        double low = 0, high = 0;
        const bool numbers = as_number(range.substr(0, dots), &low) && as_number(range.substr(dots + 2), &high);
        if (!at->choices.empty() || !numbers || !(low < high) || low < option.min || high > option.max) {
            return wrong(fmt::format("--range {}: {} are possible", wish,
                                     at->choices.empty() ? fmt::format("LOW..HIGH within {}", allowed_text(option))
                                                         : fmt::format("{}=A,B,C of {}", name, allowed_text(option))));
        }
        at->by_head = false, at->low = low, at->high = high;
        at->log = at->log && low > 0;
        return {};
    }
    std::vector<std::string> wanted;
    for (size_t from = 0; from <= range.size();) {
        const size_t end = std::min(range.find(',', from), range.size());
        wanted.push_back(range.substr(from, end - from));
        from = end + 1;
        if (const Result<OptionValues> good = parse_options(info.name, {option}, name + "=" + wanted.back()); !good)
            return wrong(fmt::format("--range {}: {}", wish, good.status().message()));
    }
    at->by_head = at->log = false;
    at->choices = std::move(wanted);
    return {};
}

} // namespace

// ---- one thing that is tuned ----

std::string Tunable::text(double x) const {
    x = std::clamp(x, low, high);
    if (step > 0) x = std::min(low + std::nearbyint((x - low) / step) * step, high);
    return fmt::format("{:.4g}", x);
}

std::string Tunable::allowed() const {
    return choices.empty() ? fmt::format("{:.4g} to {:.4g}", low, high)
                           : fmt::format("one of {}", fmt::join(choices, ", "));
}

bool Tunable::has(const std::string& value) const {
    if (!choices.empty()) return std::find(choices.begin(), choices.end(), value) != choices.end();
    double x = 0;
    return as_number(value, &x) && x >= low && x <= high && text(x) == value;
}

Result<std::string> Tunable::value(const ordered_json& j) const {
    const bool number = choices.empty();
    if (number && j.is_number() && j.get<double>() >= low && j.get<double>() <= high) return text(j.get<double>());
    if (!number && j.is_string() && has(j.get<std::string>())) return j.get<std::string>();
    return wrong(fmt::format("{} = {}: {}", name, j.dump(), allowed()));
}

ordered_json to_json(const std::vector<Tunable>& space) {
    ordered_json out = ordered_json::array();
    for (const Tunable& t : space) {
        ordered_json one{{"name", t.name}};
        if (t.choices.empty())
            one["low"] = t.low, one["high"] = t.high, one["step"] = t.step, one["log"] = t.log;
        else
            one["choices"] = t.choices;
        if (!t.layers.empty()) one["layers"] = t.layers;
        out.push_back(std::move(one));
    }
    return out;
}

std::vector<Tunable> space_from(const ordered_json& j) {
    std::vector<Tunable> out;
    for (const ordered_json& one : j) {
        Tunable t;
        one.at("name").get_to(t.name);
        if (one.contains("choices")) {
            one.at("choices").get_to(t.choices);
        } else {
            one.at("low").get_to(t.low), one.at("high").get_to(t.high);
            one.at("step").get_to(t.step), one.at("log").get_to(t.log);
        }
        if (one.contains("layers")) one.at("layers").get_to(t.layers);
        out.push_back(std::move(t));
    }
    return out;
}

// ---- a method with its space ----

std::string TunedMethod::spec() const { return spec({}, {}); }

std::string TunedMethod::spec(const std::vector<Tunable>& names, const std::vector<std::string>& values) const {
    OptionValues all = fixed;
    for (size_t i = 0; i < names.size(); ++i)
        all.set(names[i].name, values[i]);
    const std::string printed = print_options(info->options, all);
    return info->name + (printed.empty() ? "" : ":" + printed);
}

std::vector<std::string> TunedMethod::defaults() const {
    std::vector<std::string> out;
    for (const Tunable& t : space) {
        if (!fixed.has(t.name) || !t.has(fixed.text(t.name))) return {};
        out.push_back(fixed.text(t.name));
    }
    return out;
}

void TunedMethod::fit_to(int32_t head_dim) {
    for (Tunable& t : space) {
        if (!t.by_head) continue;
        t.low *= std::sqrt(double(head_dim)), t.high *= std::sqrt(double(head_dim));
        t.by_head = false;
    }
}

std::vector<std::string> tunable_methods() {
    std::vector<std::string> out;
    for (const Entry& entry : table())
        if (out.empty() || out.back() != entry.method) out.push_back(entry.method);
    out.push_back("kvtuner");
    return out;
}

Result<TunedMethod> tuned_method(const TuneWish& wish) {
    TunedMethod out;
    const size_t colon = wish.method.find(':');
    const std::string list = colon == std::string::npos ? "" : wish.method.substr(colon + 1);
    for (const MethodInfo* info : methods())
        if (info->name == wish.method.substr(0, colon)) out.info = info;
    const auto known = tunable_methods();
    if (!out.info || std::find(known.begin(), known.end(), out.info->name) == known.end()) {
        if (!out.info && wish.method.substr(0, colon) != "auto") return open_method(wish.method).status();
        return wrong(fmt::format("--method {}: has nothing to tune; one of {}", wish.method, fmt::join(known, ", ")));
    }
    const bool layers = out.by_layer(), own_file = list.find("calib=") != std::string::npos;
    if (layers && own_file) return wrong("--method kvtuner: its calibration file is what tune finds, leave calib out");
    if (!layers)
        if (const auto method = open_method(wish.method); !method) return method.status();
    // kvtuner cannot be made without a file, but its other options can be read.
    Result<OptionValues> fixed = parse_options(out.info->name, out.info->options,
                                               layers ? list + (list.empty() ? "calib=?" : ",calib=?") : list);
    if (!fixed) return fixed.status();
    out.fixed = std::move(*fixed);
    if (layers) out.fixed.set("calib", "");
    if (layers && !(wish.tune.empty() && wish.ranges.empty()))
        return wrong("--method kvtuner: the widths of its layers are tuned; --tune and --range are for other methods");

    std::vector<std::string> names;
    for (const Entry& entry : table()) {
        if (entry.method != out.info->name) continue;
        const OptionInfo& option = *option_of(*out.info, entry.what.name);
        names.push_back(option.name);
        const bool asked = std::find(wish.tune.begin(), wish.tune.end(), option.name) != wish.tune.end();
        const bool fixed_there = out.fixed.text(option.name) != option.fallback;
        if (asked && fixed_there)
            return wrong(fmt::format("--tune {0}: --method {1} fixes {0}", option.name, wish.method));
        if (asked || (wish.tune.empty() && entry.usual && !fixed_there)) out.space.push_back(entry.what);
    }
    for (const std::string& name : wish.tune)
        if (std::find(names.begin(), names.end(), name) == names.end())
            return wrong(
                fmt::format("--tune {}: of {} these can be tuned: {}", name, out.info->name, fmt::join(names, ", ")));
    for (const std::string& range : wish.ranges)
        if (Status bad = narrow(range, *out.info, &out.space); !bad) return bad;
    if (!layers && out.space.empty())
        return wrong(fmt::format("--method {}: fixes all that is usually tuned; name something else with --tune: {}",
                                 wish.method, fmt::join(names, ", ")));
    if (layers) return out;
    std::vector<std::string> lows, highs; // settings that exclude each other are told before a model is loaded
    for (const Tunable& t : out.space) {
        lows.push_back(t.choices.empty() ? t.text(t.low) : t.choices.front());
        highs.push_back(t.choices.empty() ? t.text(t.high) : t.choices.back());
    }
    for (const auto& end : {lows, highs})
        if (const auto method = open_method(out.spec(out.space, end)); !method)
            return wrong(fmt::format("--tune: {}", method.status().message()));
    return out;
}

std::vector<std::vector<std::string>> grid_of(const std::vector<Tunable>& space, int32_t most) {
    const auto limit = [&](const Tunable& t) {
        if (!t.choices.empty()) return int64_t(t.choices.size());
        return t.step > 0 ? int64_t(std::llround((t.high - t.low) / t.step)) + 1 : int64_t(most);
    };
    std::vector<int64_t> counts(space.size(), 1);
    int64_t all = 1;
    for (bool grew = true; grew;) {
        grew = false;
        for (size_t i = 0; i < space.size(); ++i) {
            const int64_t more = all / counts[i] * (counts[i] + 1);
            if (counts[i] >= limit(space[i]) || more > most) continue;
            ++counts[i], all = more, grew = true;
        }
    }
    std::vector<std::vector<std::string>> out{{}};
    for (size_t i = 0; i < space.size(); ++i) {
        const Tunable& t = space[i];
        std::vector<std::string> values;
        for (int64_t n = 0; n < counts[i]; ++n) {
            const double share = counts[i] > 1 ? double(n) / double(counts[i] - 1) : 0.5;
            if (!t.choices.empty())
                values.push_back(t.choices[size_t(std::lround(share * double(t.choices.size() - 1)))]);
            else
                values.push_back(
                    t.text(t.log ? t.low * std::pow(t.high / t.low, share) : t.low + share * (t.high - t.low)));
        }
        std::vector<std::vector<std::string>> longer;
        for (const auto& start : out)
            for (const std::string& value : values) {
                longer.push_back(start);
                longer.back().push_back(value);
            }
        out = std::move(longer);
    }
    return out;
}

} // namespace kvmosaic::eval
