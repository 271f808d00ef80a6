// k-means in one and two dimensions, deterministic: the same points give the same centres on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace kvmosaic::eval {

// Levels of a codebook: n centres of `values` (sorted here), ascending and different from each other. Starts at
// quantiles; Lloyd's steps until nothing moves, at most 100.
std::vector<float> levels_of(std::vector<float> values, int32_t n);

// Cluster of each point (a[i], b[i]), numbered 0..n-1, none empty; n is at most the number of points. The best of ten
// seeded starts.
std::vector<int32_t> clusters_of(const std::vector<float>& a, const std::vector<float>& b, int32_t n);

} // namespace kvmosaic::eval
