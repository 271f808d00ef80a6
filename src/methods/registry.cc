// The registered methods and the way from a spec string to one of them.
#include "core/text.h"
#include "methods/method.h"

namespace kvmosaic {

#define KVMOSAIC_METHOD(function) const MethodEntry& function();
#include "methods/methods.def"
#undef KVMOSAIC_METHOD

namespace {

constexpr const char* kAutoGuard = "0.3"; // of `auto`: docs/mosaic.md
constexpr size_t kMaxSpec = 1000;         // characters; longer is a mistake, not a spec

const std::vector<const MethodEntry*>& entries() {
    static const std::vector<const MethodEntry*> all = {
#define KVMOSAIC_METHOD(function) &function(),
#include "methods/methods.def"
#undef KVMOSAIC_METHOD
    };
    return all;
}

Status unknown(std::string_view name) {
    std::vector<std::string> names;
    for (const MethodEntry* entry : entries())
        names.push_back(entry->info.name);
    const std::string near = text::nearest(name, names);
    return Status(StatusCode::invalid_argument,
                  (name.empty() ? "the name of a method is missing" : "unknown method " + text::quote(name)) +
                      (near.empty() ? "" : ", did you mean " + near + "?") + " (methods are " +
                      text::join(names, " and ") + ")");
}

Status in_spec(const Status& s, std::string_view spec) {
    return Status(s.code(), s.message() + " (in " + text::quote(spec) + ")");
}

// `auto:bits=B,...` asks for bits instead of a name: the project's own method, guarded unless the spec says otherwise.
std::string by_bits(std::string_view spec, size_t colon) {
    const std::string options = colon == std::string_view::npos ? "" : std::string(spec.substr(colon + 1));
    std::string out = "mosaic:";
    if (options.find("bits=") == std::string::npos) out += "bits=3,";
    if (options.find("guard=") == std::string::npos) out.append("guard=").append(kAutoGuard).append(",");
    out += options;
    if (out.back() == ',') out.pop_back();
    return out;
}

} // namespace

const std::vector<const MethodInfo*>& methods() {
    static const std::vector<const MethodInfo*> all = [] {
        std::vector<const MethodInfo*> infos;
        for (const MethodEntry* entry : entries())
            infos.push_back(&entry->info);
        return infos;
    }();
    return all;
}

Result<std::unique_ptr<Method>> open_method(std::string_view spec) {
    if (spec.size() > kMaxSpec) {
        return Status(StatusCode::invalid_argument, "a spec has at most " + std::to_string(kMaxSpec) +
                                                        " characters, this one has " + std::to_string(spec.size()) +
                                                        " (it begins " + text::quote(spec) + ")");
    }
    const size_t colon = spec.find(':');
    std::string_view name = spec.substr(0, colon);
    if (name == "auto") return open_method(by_bits(spec, colon));
    const MethodEntry* entry = nullptr;
    for (const MethodEntry* e : entries()) {
        if (e->info.name == name) entry = e;
    }
    if (entry == nullptr) return in_spec(unknown(name), spec);
    const std::vector<OptionInfo>& options = entry->info.options;
    const std::string_view list = colon == std::string_view::npos ? std::string_view() : spec.substr(colon + 1);
    if (colon != std::string_view::npos && list.empty()) {
        return in_spec(bad_options(entry->info.name + ": option=value must follow the colon"), spec);
    }
    Result<OptionValues> values = parse_options(name, options, list);
    if (!values) return in_spec(values.status(), spec);
    Result<std::unique_ptr<Method>> made = entry->make(*values);
    if (!made) return in_spec(made.status(), spec);
    const std::string printed = print_options(options, *values);
    (*made)->spec_ = entry->info.name + (printed.empty() ? "" : ":" + printed);
    return made;
}

} // namespace kvmosaic
