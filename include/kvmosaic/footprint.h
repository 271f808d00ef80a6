// What a cache weighs, to the byte, from the layout objects that the kernels use (DESIGN.md, promise 3).
#pragma once

#include <cstdint>

namespace kvmosaic {

// All sizes in bytes. "True bits" divide everything that holds the tokens by the values they stand for.
struct Footprint {
    int64_t tokens = 0;     // rows over all sequences, shared rows counted once
    int64_t values[2] = {}; // key, value: tokens x KV heads x D over all layers

    int64_t packed[2] = {}; // sealed and open pages: codes, scales, offsets, maps, padding
    int64_t raw[2] = {};    // front and recent pages, their unused rows included
    int64_t tables = 0;     // page headers, page tables, positions, layouts
    int64_t statistics = 0; // query statistics
    int64_t reserved = 0;   // taken for seals of the step under way, returned at its end
    int64_t scratch = 0;    // tiles and partial states of attention; not part of the cache's true bits
    int64_t allocated = 0;  // what the arena has handed out, measured apart from the sums above
    int64_t arena = 0;      // what the arena holds from the system: allocated plus holes

    int64_t non_finite = 0; // NaN and infinities met in K or V so far (docs/numerics.md says what became of them)
    int64_t saturated = 0;  // finite values outside the raw type's range
    int64_t ladders = 0;    // pages sealed so far whose widths were decided for them
    int64_t raised = 0;     // of these, pages that got more bits than asked for, by the method's guard

    int64_t cache_bytes() const { return packed[0] + packed[1] + raw[0] + raw[1] + tables + statistics + reserved; }
    // Bits per value; tables, statistics and reserve are shared evenly over all values.
    double true_bits() const { return bits(cache_bytes(), values[0] + values[1]); }
    double true_bits(int side) const {
        const double shared = bits(tables + statistics + reserved, values[0] + values[1]);
        return values[side] ? bits(packed[side] + raw[side], values[side]) + shared : 0.0;
    }
    double times_smaller() const {
        return cache_bytes() ? 2.0 * double(values[0] + values[1]) / double(cache_bytes()) : 0.0;
    }

private:
    static double bits(int64_t bytes, int64_t n) { return n ? 8.0 * double(bytes) / double(n) : 0.0; }
};

} // namespace kvmosaic
