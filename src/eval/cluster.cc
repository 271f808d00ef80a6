#include "eval/cluster.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvmosaic::eval {

namespace {

constexpr int kRounds = 100, kStarts = 10;

struct Start {
    std::vector<double> a, b; // centres
};

double square(double x) { return x * x; }

double distance(const std::vector<float>& a, const std::vector<float>& b, size_t i, const Start& c, size_t k) {
    return square(double(a[i]) - c.a[k]) + square(double(b[i]) - c.b[k]);
}

// Each next centre is a point far from those before: the farthest of a few drawn ones (all of them in start 0).
Start spread(const std::vector<float>& a, const std::vector<float>& b, size_t n, int number) {
    uint64_t state = 0x9e3779b97f4a7c15u * uint64_t(number + 1);
    const auto draw = [&] {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return size_t((state >> 33) % a.size());
    };
    Start out;
    const auto add = [&](size_t i) { out.a.push_back(a[i]), out.b.push_back(b[i]); };
    add(number == 0 ? 0 : draw());
    while (out.a.size() < n) {
        size_t best = 0;
        double far = -1;
        const size_t tries = number == 0 ? a.size() : std::min<size_t>(a.size(), 8);
        for (size_t t = 0; t < tries; ++t) {
            const size_t i = number == 0 ? t : draw();
            double near = std::numeric_limits<double>::infinity();
            for (size_t k = 0; k < out.a.size(); ++k)
                near = std::min(near, distance(a, b, i, out, k));
            if (near > far) far = near, best = i;
        }
        add(best);
    }
    return out;
}

} // namespace

std::vector<float> levels_of(std::vector<float> values, int32_t n) {
    std::sort(values.begin(), values.end());
    std::vector<double> sums(values.size() + 1, 0.0);
    for (size_t i = 0; i < values.size(); ++i)
        sums[i + 1] = sums[i] + double(values[i]);
    std::vector<double> levels(static_cast<size_t>(n));
    for (size_t k = 0; k < levels.size(); ++k) {
        const double at = (double(k) + 0.5) / n * double(values.size());
        levels[k] = values.empty() ? 0.0 : double(values[std::min(values.size() - 1, size_t(at))]);
    }
    for (int round = 0; round < kRounds && !values.empty(); ++round) {
        bool moved = false;
        size_t first = 0;
        for (size_t k = 0; k < levels.size(); ++k) {
            size_t end = values.size();
            if (k + 1 < levels.size()) {
                const double middle = (levels[k] + levels[k + 1]) / 2;
                end = size_t(std::upper_bound(values.begin() + int64_t(first), values.end(), middle) - values.begin());
            }
            if (end > first) {
                const double mean = (sums[end] - sums[first]) / double(end - first);
                moved = moved || mean != levels[k];
                levels[k] = mean;
            }
            first = end;
        }
        if (!moved) break;
    }
    std::vector<float> out(levels.begin(), levels.end());
    std::sort(out.begin(), out.end());
    for (size_t k = 1; k < out.size(); ++k) {
        if (!(out[k] > out[k - 1])) out[k] = std::nextafter(out[k - 1], std::numeric_limits<float>::infinity());
    }
    return out;
}

std::vector<int32_t> clusters_of(const std::vector<float>& a, const std::vector<float>& b, int32_t n) {
    const size_t count = a.size(), wanted = size_t(n);
    std::vector<int32_t> best(count, 0);
    double least = std::numeric_limits<double>::infinity();
    for (int number = 0; number < kStarts; ++number) {
        Start centres = spread(a, b, wanted, number);
        std::vector<int32_t> own(count, -1);
        double inertia = 0;
        for (int round = 0; round < kRounds; ++round) {
            bool moved = false;
            inertia = 0;
            std::vector<double> near(count);
            for (size_t i = 0; i < count; ++i) {
                size_t k = 0;
                for (size_t other = 1; other < wanted; ++other) {
                    if (distance(a, b, i, centres, other) < distance(a, b, i, centres, k)) k = other;
                }
                moved = moved || own[i] != int32_t(k);
                own[i] = int32_t(k);
                near[i] = distance(a, b, i, centres, k);
                inertia += near[i];
            }
            std::vector<int32_t> sizes(wanted, 0);
            for (const int32_t k : own)
                ++sizes[size_t(k)];
            for (size_t k = 0; k < wanted; ++k) { // an empty cluster takes the point that lies worst elsewhere
                if (sizes[k] > 0) continue;
                size_t worst = count;
                for (size_t i = 0; i < count; ++i) {
                    if (sizes[size_t(own[i])] > 1 && (worst == count || near[i] > near[worst])) worst = i;
                }
                --sizes[size_t(own[worst])];
                own[worst] = int32_t(k), sizes[k] = 1, near[worst] = 0;
                moved = true;
            }
            if (!moved) break;
            centres.a.assign(wanted, 0), centres.b.assign(wanted, 0);
            for (size_t i = 0; i < count; ++i) {
                centres.a[size_t(own[i])] += double(a[i]) / sizes[size_t(own[i])];
                centres.b[size_t(own[i])] += double(b[i]) / sizes[size_t(own[i])];
            }
        }
        if (inertia < least) least = inertia, best = own;
    }
    return best;
}

} // namespace kvmosaic::eval
