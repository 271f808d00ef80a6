// Bits of the channels of one page: a ladder that spends a budget of whole vectors where the weighted error falls most.
#pragma once

#include "kvmosaic/method.h"

namespace kvmosaic {

// Error of a channel coded at a width, as a share of its variance (mosaic, section 1: measured on normal variables with
// the searched range). Widths 0, 1, 2, 3, 4, 6, 8; others are not used.
double distortion_of(int bits);

// w = mean(q^2) * var / D of each channel of a page: what coding it adds to the variance of a scaled score, per
// distortion. Without `queries`, or none so far (a cache filled from outside), every channel's mean square counts as 1.
// out: [dim].
void channel_weights(const PlanInput& in, bool queries, float* out);

struct LadderChoice {
    Ladder ladder;      // in the order of the planes (GridRule::searched)
    double error = 0.0; // sum of weight * distortion
};

// The ladder of at most `vectors` 32-byte vectors a lane block with the least error that moves of one or two vectors
// from plane to plane find; borders inside shared planes are the best for each. Comparisons and sums in double in a
// fixed order, so every machine finds the same. weights: [dim] of the channels at `order`, descending, finite, >= 0.
// dim <= kMaxHeadDim.
LadderChoice choose_ladder(const float* weights, int32_t dim, int32_t vectors);

// Channels of each tier in ascending order, tiers as the ladder lists them. order: [dim] by weight, heaviest first;
// out: [dim].
void place_channels(const Ladder& ladder, const uint16_t* order, int32_t dim, uint16_t* out);

} // namespace kvmosaic
