// What is worth having of measured settings: fewer bits or less loss than every other.
#pragma once

#include <cstddef>
#include <vector>

namespace kvmosaic::eval {

struct Point {
    double bits = 0, loss = 0;
};

// Whether a is at least as good in both and better in one. What is not finite dominates nothing and is dominated by
// all that is.
bool dominates(const Point& a, const Point& b);

// Indices of the points that none dominates, by bits ascending; of equal points the first. Points that are not finite
// are left out.
std::vector<size_t> front_of(const std::vector<Point>& points);

// Index into `front` of the point farthest below the straight line between the front's ends, bits against the
// logarithm of the loss, both scaled to the ends: there one stops paying much loss for bits, or many bits for loss.
// The first where no point lies below.
size_t knee_of(const std::vector<Point>& points, const std::vector<size_t>& front);

// Index into `front` of the least loss at no more than `bits`, or of the fewest bits at no more than `loss`; where none
// keeps to the wish, the nearest to it, and `kept` is false.
struct Chosen {
    size_t index = 0;
    bool kept = true;
};
Chosen choose_by_bits(const std::vector<Point>& points, const std::vector<size_t>& front, double bits);
Chosen choose_by_loss(const std::vector<Point>& points, const std::vector<size_t>& front, double loss);

} // namespace kvmosaic::eval
