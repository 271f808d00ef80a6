// The way of a spec into the seam: make_context sets a request for its thread, which create_memory (called below
// llama_init_from_model on the same thread) reads; without one the environment of a foreign tool is asked.
#pragma once

#include <optional>
#include <string>

#include "kvmosaic/status.h"
#include "llama/memory.h"

namespace kvmosaic::seam {

struct Request {
    MemoryOptions options;
    Status failure; // set by the seam when it refuses
};

// The request of this thread, or null.
Request* current_request();

// Sets the request of this thread for its own lifetime.
class RequestScope {
public:
    explicit RequestScope(Request* request);
    ~RequestScope();
    RequestScope(const RequestScope&) = delete;
    RequestScope& operator=(const RequestScope&) = delete;
};

// True when the variable is set, not empty and not "0".
bool flag(const char* name);

// What KVMOSAIC_CACHE and its companions ask for; nothing when KVMOSAIC_CACHE is unset or empty.
std::optional<Result<MemoryOptions>> environment_options();

} // namespace kvmosaic::seam
