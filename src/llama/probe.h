// Looking at what attention gets, for calibration and component reports.
#pragma once

#include <cstdint>
#include <functional>

#include "kvmosaic/cache.h"

namespace kvmosaic {

// Rows of one step that a layer is about to store: q [rows, H, Dk], k [rows, G, Dk], v [rows, G, Dv]; q and k after
// RoPE. Called by one thread for each layer that stores K/V, in the order of the layers, while the model computes; the
// rows are only valid during the call. It must not throw and must leave the context alone.
using Probe = std::function<void(int32_t layer, int64_t rows, RowsF32 q, RowsF32 k, RowsF32 v)>;

} // namespace kvmosaic
