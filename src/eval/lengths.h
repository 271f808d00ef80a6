// True bits of a cache at contexts that were not run: everything that does not depend on what the rows hold is measured
// on a real cache of that length; pages whose size does depend on it (tiers by threshold) take the mean size that the
// same layer, head and side had in a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"

namespace kvmosaic::eval {

class LengthBits {
public:
    // Fills a cache of this shape and spec with made-up rows, once, and keeps its sizes at each of `lengths`
    // (ascending). Nothing is attended. Beyond 8,192 rows, where only whole pages are added, sizes are worked out.
    static Result<LengthBits> make(const ModelShape& shape, const std::string& spec, std::vector<int64_t> lengths);

    // Bits per value at lengths[i] for a sequence whose pages are like those of sequence 0 of `measured`; NaN where
    // that has no page yet to tell.
    double bits(size_t i, const Cache& measured) const;

private:
    struct Pages { // of one layer, head and side
        int64_t count = 0, bytes = 0;
        bool varies = false; // their size is decided page by page
    };
    struct Entry {
        int64_t fixed = 0, values = 0; // bytes of all but the packed pages
        std::vector<Pages> pages;      // in the order of layers, heads, sides
    };
    static Entry beyond(const Entry& first, const Entry& second, int64_t length);
    std::vector<Entry> entries_;
};

} // namespace kvmosaic::eval
