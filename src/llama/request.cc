#include "llama/request.h"

#include <cstdlib>

namespace kvmosaic::seam {
namespace {

thread_local Request* current = nullptr;

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

// A whole number in 0..most; 0 when the variable is unset or empty.
Status number(const char* name, int64_t most, int64_t* value) {
    const std::string text = variable(name);
    *value = 0;
    if (text.empty()) return {};
    char* end = nullptr;
    const long long n = std::strtoll(text.c_str(), &end, 10);
    if (*end || n < 0 || n > most)
        return {StatusCode::invalid_argument,
                std::string(name) + " is '" + text + "', allowed are 0.." + std::to_string(most)};
    *value = n;
    return {};
}

} // namespace

Request* current_request() { return current; }
RequestScope::RequestScope(Request* request) { current = request; }
RequestScope::~RequestScope() { current = nullptr; }

bool flag(const char* name) {
    const std::string value = variable(name);
    return !value.empty() && value != "0";
}

std::optional<Result<MemoryOptions>> environment_options() {
    MemoryOptions options;
    options.spec = variable("KVMOSAIC_CACHE");
    if (options.spec.empty()) return std::nullopt;
    const std::string step = variable("KVMOSAIC_STEP");
    if (step == "chunk") {
        options.cache.step = StepMode::chunk;
    } else if (!step.empty() && step != "decode") {
        return Result<MemoryOptions>(
            Status(StatusCode::invalid_argument, "KVMOSAIC_STEP is '" + step + "', allowed are decode and chunk"));
    }
    options.cache.isa = variable("KVMOSAIC_ISA");
    int64_t rollback = 0, mib = 0;
    if (Status st = number("KVMOSAIC_ROLLBACK", 65536, &rollback); !st) return Result<MemoryOptions>(st);
    if (Status st = number("KVMOSAIC_BUDGET", int64_t(1) << 24, &mib); !st) return Result<MemoryOptions>(st);
    options.cache.rollback = int32_t(rollback);
    options.cache.max_bytes = mib << 20;
    options.statistics = flag("KVMOSAIC_STATS");
    options.check_rope = flag("KVMOSAIC_CHECK_ROPE");
    return Result<MemoryOptions>(options);
}

} // namespace kvmosaic::seam
