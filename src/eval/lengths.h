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
    // Fills a cache of this shape and spec with made-up rows, once, up to where it grows by whole pages alone, and
    // keeps its sizes at each of `lengths`, any of which may be longer than that. Where all layers are alike, a few of
    // them stand for all. Nothing is attended.
    static Result<LengthBits> make(const ModelShape& shape, const std::string& spec,
                                   const std::vector<int64_t>& lengths);

    // Bits per value at lengths[i] for a sequence whose pages are like those of sequence 0 of `measured`; NaN where
    // that has no page yet to tell.
    double bits(size_t i, const Cache& measured) const;
    // The same with pages like those of the made-up rows: exact for methods whose pages have the same size whatever
    // they hold.
    double bits(size_t i) const;
    int64_t bytes(size_t i) const;
    int64_t values(size_t i) const { return entries_[i].values; }
    // What kPageTokens more rows add, once the cache grows by whole pages alone.
    int64_t growth() const { return growth_; }

private:
    struct Pages { // of one layer, head and side
        int64_t count = 0, bytes = 0;
        bool varies = false; // their size is decided page by page
    };
    struct Entry {
        int64_t fixed = 0, values = 0; // bytes of all but the packed pages
        std::vector<Pages> pages;      // in the order of layers, heads, sides
        int64_t bytes() const;
    };
    static Result<LengthBits> whole(const ModelShape& shape, const std::string& spec,
                                    const std::vector<int64_t>& lengths);
    static Entry entry_of(const Cache& cache);
    static Entry beyond(const Entry& first, const Entry& second, int64_t times);
    std::vector<Entry> entries_;
    int64_t growth_ = 0;
};

} // namespace kvmosaic::eval
