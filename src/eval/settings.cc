#include "eval/settings.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>

#include <fmt/format.h>

#include "core/parallel.h"
#include "eval/lengths.h"

namespace kvmosaic::eval {

namespace {

// One choice from each axis makes a setting; "" leaves the defaults. Shares in place of thresholds, so that what a
// setting weighs does not depend on the text.
struct Entry {
    const char* method;
    std::vector<std::vector<std::string>> axes;
};

const std::vector<Entry>& table() {
    static const std::vector<Entry> all{
        {"f16", {{""}}},
        {"bf16", {{""}}},
        {"f32", {{""}}},
        {"mosaic",
         {{"k=1,v=1", "k=1,v=1.5", "k=1.5,v=1.5", "k=1.5,v=2", "k=2,v=2", "k=2,v=2.5", "k=2.5,v=2.5", "k=2.5,v=3",
           "k=3,v=3", "k=3,v=3.5", "k=3.5,v=3.5", "k=3.5,v=4", "k=4,v=4", "k=4,v=4.5", "k=4.5,v=5", "k=5,v=5.5",
           "k=6,v=6", "k=8,v=6"}}},
        {"kivi", {{"bits=1", "bits=2", "bits=3", "bits=4", "bits=6", "bits=8"}, {"", "group=64", "group=128"}}},
        {"mixkvq",
         {{"raw_share=0,mid_share=0.0625", "raw_share=0,mid_share=0.375", "raw_share=0.03125,mid_share=0.5",
           "raw_share=0.0625,mid_share=0.5", "raw_share=0.125,mid_share=0.5"},
          {"", "v=3", "v=4"},
          {"", "group=128"}}},
        {"kitty", {{"", "variant=pro", "ratio=0.5", "ratio=0.75"}, {"", "v=3", "v=4"}}},
        {"pnmix",
         {{"", "b_hi=4", "b_hi=3,b_lo=2", "b_hi=4,b_lo=2", "b_hi=6,b_lo=2"}, {"", "r=0.25"}, {"", "v=3", "v=4"}}},
        {"innerq", {{"", "variant=small", "variant=hybrid", "variant=hybrid,asym=4level"}, {"", "group=16"}}},
        {"turboquant", {{"", "k=2,v=2", "k=3,v=3", "v=6", "v=8"}, {"", "skip=0"}}},
        {"kvtuner", {{"", "group=64,residual=64", "group=128,residual=128"}}},
        {"skvq", {{"", "v=1.5", "k=3,v=3", "k=4,v=4"}, {"", "group=64", "group=32"}}},
        {"rotatekv", {{"", "bits=3", "bits=4"}}},
        {"kvquant", {{"", "bits=2", "bits=4"}, {"", "outliers=0"}}},
        {"q8_0", {{""}}},
        {"q4_0", {{"", "hadamard=1"}}},
    };
    return all;
}

std::vector<std::string> split(const std::string& list) {
    std::vector<std::string> out;
    for (size_t at = 0; at < list.size();) {
        const size_t end = std::min(list.find(',', at), list.size());
        out.push_back(list.substr(at, end - at));
        at = end + 1;
    }
    return out;
}
std::string name_of(const std::string& assignment) { return assignment.substr(0, assignment.find('=')); }

// Every way through the axes.
std::vector<std::string> combinations(const Entry& entry) {
    std::vector<std::string> lists{""};
    for (const std::vector<std::string>& axis : entry.axes) {
        std::vector<std::string> longer;
        for (const std::string& list : lists)
            for (const std::string& choice : axis)
                longer.push_back(list + (list.empty() || choice.empty() ? "" : ",") + choice);
        lists = std::move(longer);
    }
    return lists;
}

} // namespace

Result<std::vector<Setting>> settings_of(const std::string& wish) {
    const size_t colon = wish.find(':');
    const std::string name = wish.substr(0, colon);
    const std::vector<std::string> fixed = split(colon == std::string::npos ? "" : wish.substr(colon + 1));
    const auto entry = std::find_if(table().begin(), table().end(), [&](const Entry& e) { return e.method == name; });
    if (entry == table().end()) {
        const auto method = open_method(wish);
        if (!method) return method.status();
        return Status(StatusCode::invalid_argument,
                      fmt::format("{}: is no method with settings of its own; one of {}, ...", wish,
                                  fmt::join(free_methods(), ", ")));
    }
    std::vector<Setting> out;
    for (const std::string& list : combinations(*entry)) {
        std::vector<std::string> options;
        for (const std::string& option : split(list)) {
            const auto same = [&](const std::string& f) { return name_of(f) == name_of(option); };
            if (std::none_of(fixed.begin(), fixed.end(), same)) options.push_back(option);
        }
        options.insert(options.end(), fixed.begin(), fixed.end());
        const auto method =
            open_method(fmt::format("{}{}{}", name, options.empty() ? "" : ":", fmt::join(options, ",")));
        if (!method) return method.status();
        const auto known = [&](const Setting& s) { return s.spec == (*method)->spec(); };
        if (std::none_of(out.begin(), out.end(), known)) out.push_back({name, (*method)->spec()});
    }
    return out;
}

std::vector<std::string> free_methods() {
    std::vector<std::string> out;
    for (const Entry& entry : table()) {
        const auto info = std::find_if(methods().begin(), methods().end(),
                                       [&](const MethodInfo* i) { return i->name == entry.method; });
        if (info != methods().end() && !(*info)->calibrated && !(*info)->options.empty()) out.push_back(entry.method);
    }
    return out;
}

std::vector<SizedSetting> size_settings(const ModelShape& shape, const std::vector<Setting>& settings,
                                        const SizeOptions& options, std::vector<std::string>* refused,
                                        const Progress& progress) {
    std::vector<std::optional<SizedSetting>> sized(settings.size());
    std::vector<std::string> reasons(settings.size());
    std::atomic<size_t> next{0}, done{0};
    const auto work = [&](int32_t thread) {
        for (size_t i = next++; i < settings.size(); i = next++) {
            const Result<LengthBits> made = LengthBits::make(shape, settings[i].spec, {options.context});
            if (made) {
                const int64_t n = options.sequences;
                sized[i] = {settings[i].method, settings[i].spec, made->bits(0), n * made->bytes(0),
                            n * made->growth()};
            } else {
                reasons[i] = fmt::format("{}: {}", settings[i].spec, made.status().message());
            }
            ++done;
            if (thread == 0 && progress) progress("sizes of caches", double(done) / double(settings.size()));
        }
    };
    on_threads(std::min(thread_count(options.threads), int32_t(settings.size())), work);
    std::vector<SizedSetting> out;
    for (size_t i = 0; i < settings.size(); ++i) {
        if (sized[i])
            out.push_back(std::move(*sized[i]));
        else if (refused)
            refused->push_back(std::move(reasons[i]));
    }
    return out;
}

} // namespace kvmosaic::eval
