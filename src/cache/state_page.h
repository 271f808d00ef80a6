// Page contents in a saved state: ladders, and what a reader must not find in bytes that it is given.
#pragma once

#include <algorithm>
#include <string>

#include "cache/state_io.h"
#include "kvmosaic/store.h"

namespace kvmosaic::state {

// The rows of one page number, as one side of a sequence holds them: the first `coded` of `rows` are packed.
struct Extent {
    int64_t coded = 0, rows = 0;
    bool operator==(const Extent&) const = default;
};
inline Extent extent(int64_t packed, int64_t beyond, int64_t page) { // beyond: rows behind the front
    const int64_t base = page * kPageTokens;
    const int64_t rows = std::clamp<int64_t>(beyond - base, 0, kPageTokens);
    return {std::clamp<int64_t>(packed - base, 0, rows), rows};
}

Ladder ladder_of(const PageLayout& page); // of a tiered page; empty for others
void put_ladder(Writer* w, const Ladder& ladder);
void get_ladder(Reader* r, const StoreSpec& store, int32_t dim, Ladder* ladder);

// "scales: a value is not finite" and the like, or "": indices in range, numbers finite. What codes say is free.
std::string page_fault(const PageLayout& page, const uint8_t* bytes);
bool all_finite(RawType type, const uint8_t* values, size_t count);

} // namespace kvmosaic::state
