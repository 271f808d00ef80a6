#include "eval/pareto.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvmosaic::eval {

namespace {

constexpr double kLeast = 1e-12; // a loss of 0 has no logarithm

bool finite(const Point& p) { return std::isfinite(p.bits) && std::isfinite(p.loss); }

} // namespace

bool dominates(const Point& a, const Point& b) {
    if (!finite(a) || !finite(b)) return finite(a) && !finite(b);
    return a.bits <= b.bits && a.loss <= b.loss && (a.bits < b.bits || a.loss < b.loss);
}

std::vector<size_t> front_of(const std::vector<Point>& points) {
    std::vector<size_t> order(points.size()), front;
    std::iota(order.begin(), order.end(), size_t(0));
    std::erase_if(order, [&](size_t i) { return !finite(points[i]); });
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return points[a].bits != points[b].bits ? points[a].bits < points[b].bits : points[a].loss < points[b].loss;
    });
    for (const size_t i : order)
        if (front.empty() || points[i].loss < points[front.back()].loss) front.push_back(i);
    return front;
}

size_t knee_of(const std::vector<Point>& points, const std::vector<size_t>& front) {
    const auto height = [&](size_t i) { return std::log(std::max(points[front[i]].loss, kLeast)); };
    size_t best = 0;
    double most = 0;
    for (size_t i = 1; i + 1 < front.size(); ++i) {
        const size_t last = front.size() - 1;
        const double x =
            (points[front[i]].bits - points[front[0]].bits) / (points[front[last]].bits - points[front[0]].bits);
        const double y = (height(i) - height(last)) / (height(0) - height(last));
        if (1 - x - y > most) best = i, most = 1 - x - y;
    }
    return best;
}

Chosen choose_by_bits(const std::vector<Point>& points, const std::vector<size_t>& front, double bits) {
    for (size_t i = front.size(); i-- > 0;)
        if (points[front[i]].bits <= bits) return {i, true};
    return {0, false};
}

Chosen choose_by_loss(const std::vector<Point>& points, const std::vector<size_t>& front, double loss) {
    for (size_t i = 0; i < front.size(); ++i)
        if (points[front[i]].loss <= loss) return {i, true};
    return {front.size() - 1, false};
}

} // namespace kvmosaic::eval
