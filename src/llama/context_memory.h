// What a context takes beside its cache, in bytes.
#pragma once

#include <cstdint>

namespace kvmosaic {

struct ContextMemory {
    int64_t weights = 0; // as they are loaded
    int64_t compute = 0; // buffers for the steps of its graph
    int64_t all() const { return weights + compute; }
};

} // namespace kvmosaic
