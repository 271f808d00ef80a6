// Attention of a few query rows over one page of one KV head.
#pragma once

#include <cstdint>

#include "cache/basis.h"
#include "cache/scratch.h"
#include "kernels/kernels.h"
#include "kvmosaic/cache.h"

namespace kvmosaic {

// What one query row sees of a page, in rows of the page: [lo, hi). Up to the packed boundaries (within [lo, hi]) it
// reads codes, behind them raw rows.
struct TileRange {
    int32_t lo = 0, hi = 0, k_packed = 0, v_packed = 0;
};

// One side of a page: codes, raw rows, or both (a mixed page).
struct TileSource {
    const uint8_t* raw = nullptr; // row 0 of the page
    RawType type = RawType::f16;
    Basis packed; // where there are codes
    // Codes are attended as they lie (kernels::Table::weigh) rather than restored.
    bool fused = false;
    const float* q = nullptr;      // key side: [rows * group][dk] queries in the basis of the codes
    const float* shift = nullptr;  // [rows * group] what a score has besides (Transform::fold), or null
    const float* mean = nullptr;   // [rows * group] queries folded with the keys' mean (MeanTable::fold), or null
    const uint8_t* next = nullptr; // bytes of the page after this one, or null
};

struct TileQuery {
    const float* q = nullptr; // [rows * group][dk]
    int32_t rows = 0, group = 1, dk = 0, dv = 0;
    float scale = 1.0f, soft_cap = 0.0f;
    bool fast = false; // Accuracy::fast
    // Values in the basis of their codes go behind each row of o, to be taken back once for many pages.
    bool apart = false;
    int32_t stride() const { return apart ? 2 * dv : dv; } // of o
};

// Adds the page to the states. state: [rows * group], o: [rows * group][stride()].
void attend_page(const kernels::Table& table, const TileQuery& query, const TileSource& key, const TileSource& value,
                 const TileRange* range, kernels::RowState* state, float* o, Scratch& scratch);

} // namespace kvmosaic
