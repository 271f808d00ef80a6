#include "llama/request.h"

#include <cstdlib>

namespace kvmosaic::seam {
namespace {

thread_local Request* current = nullptr;

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
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
    options.statistics = flag("KVMOSAIC_STATS");
    options.check_rope = flag("KVMOSAIC_CHECK_ROPE");
    return Result<MemoryOptions>(options);
}

} // namespace kvmosaic::seam
