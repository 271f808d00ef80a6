// Where the rows and pages of a state come from: a sequence of the cache, or one that comes back from a device.
#pragma once

#include <cstdint>

#include "kvmosaic/cache.h"

namespace kvmosaic {

// One sequence, its sides by Cache::Impl::side_index. Pointers are valid until the next call.
class RowSource {
public:
    virtual ~RowSource() = default;
    virtual const uint8_t* front(int32_t index) const = 0;         // min(front, rows) raw rows
    virtual PageView packed(int32_t index, size_t page) const = 0; // of a page with packed rows
    // Rows of a page that are not packed: row i of the page at i times the bytes of a row.
    virtual const uint8_t* raw(int32_t index, size_t page) const = 0;
};

} // namespace kvmosaic
