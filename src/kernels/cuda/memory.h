// Memory of a device, for host code that moves sequences there and back. Tests put it into host memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvmosaic/status.h"

namespace kvmosaic::device {

class Memory {
public:
    virtual ~Memory() = default;
    virtual Result<void*> allocate(size_t bytes) = 0; // filled with zeros
    virtual void free(void* at) = 0;
    // These wait until all work on the device has ended.
    virtual Status copy_in(void* to, const void* from, size_t bytes) = 0;
    virtual Status copy_out(void* to, const void* from, size_t bytes) = 0;
    virtual Status copy(void* to, const void* from, size_t bytes) = 0; // on the device; may overlap where to < from
};

// Of the current device; null in a build without a GPU backend.
Memory* device_memory();

} // namespace kvmosaic::device
