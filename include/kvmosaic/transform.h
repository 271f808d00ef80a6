// The basis in which channels are packed. A transform knows no bits and no windows.
#pragma once

#include <cstdint>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic {

// Forward, in this order, each step only where it is set:
//   1. orthonormal Walsh-Hadamard transform of runs of `hadamard` values. A run that is no power of two is cut into
//      blocks of powers of two, largest first (80 = 64 + 16), each transformed alone (QuaRot, arXiv 2404.00456)
//   2. x = (x - shift) / scale for each channel
//   3. stored channel i is channel order[i]
// The inverse undoes them last to first. All steps are fp32 in a fixed order, so every backend gives the same bits.
struct Transform {
    int32_t joined = 1;   // KV heads that are one row of joined * D values: head by head, and back into as many pages
    int32_t hadamard = 0; // 0: none
    std::vector<float> shift, scale; // [joined * D] or empty; scale > 0, finite
    std::vector<uint16_t> order;     // [joined * D], a permutation, or empty

    bool identity() const { return hadamard == 0 && scale.empty() && order.empty() && joined == 1; }
    // Rows of n = joined * D values, in place. scratch: [n].
    void forward(float* row, int32_t n, float* scratch) const;
    void inverse(float* row, int32_t n, float* scratch) const;

    // Attention in the basis of the packed rows, for joined = 1. `fold` takes a query there: q . row = q' . packed row
    // + the value that it returns. `unfold` takes sum of w * packed row, and the sum of w, to sum of w * row, in place.
    float fold(const float* q, int32_t n, float* folded, float* scratch) const;
    void unfold(float* row, int32_t n, float weight, float* scratch) const;
};

// In place: butterflies over neighbours at distance 1, 2, 4, ..., (a + b, a - b), then times 1 / sqrt(block) in fp32.
void hadamard(float* row, int32_t n);

// ok, or the field and its allowed range.
Status validate(const Transform& transform, int32_t dim, int32_t kv_heads);

} // namespace kvmosaic
