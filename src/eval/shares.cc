#include "eval/shares.h"

#include <algorithm>
#include <cmath>

namespace kvmosaic::eval {

Interval wilson(int64_t hits, int64_t trials) {
    if (trials <= 0) return {0, 1};
    constexpr double kZ = 1.959963984540054; // the normal distribution's 97.5 % point
    const double n = double(trials), p = double(hits) / n, zz = kZ * kZ / n;
    const double middle = (p + zz / 2) / (1 + zz);
    const double half = kZ * std::sqrt(p * (1 - p) / n + zz / (4 * n)) / (1 + zz);
    return {std::max(0.0, middle - half), std::min(1.0, middle + half)};
}

double mcnemar(int64_t a, int64_t b) {
    const int64_t n = a + b;
    double tail = 0; // of a fair coin: at most min(a, b) heads in n
    for (int64_t k = 0; k <= std::min(a, b); ++k) {
        const double ways = std::lgamma(double(n) + 1) - std::lgamma(double(k) + 1) - std::lgamma(double(n - k) + 1);
        tail += std::exp(ways - double(n) * std::log(2.0));
    }
    return std::min(1.0, 2 * tail);
}

} // namespace kvmosaic::eval
