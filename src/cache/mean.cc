#include "cache/mean.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cache/scratch.h"

namespace kvmosaic {

namespace {

constexpr int32_t kFar = 64;            // entries of the tables by 128 and 8192 positions
constexpr int32_t kSlowTerms = 16;      // polynomials up to degree 15
constexpr double kSlowAngle = 5.0 / 64; // a pair turns at most 5 radians from the middle of a page to its end
constexpr int32_t kFarStep = kPageTokens * kFar;

// [n][2 * pairs]: cosines, then sines, of multiples of `step` positions.
std::vector<float> turns_by(const std::vector<double>& angles, int32_t n, double step) {
    const size_t pairs = angles.size();
    std::vector<float> table(size_t(n) * 2 * pairs);
    for (int32_t k = 0; k < n; ++k)
        for (size_t i = 0; i < pairs; ++i) {
            const double t = double(k) * step * angles[i];
            table[size_t(k) * 2 * pairs + i] = float(std::cos(t));
            table[(size_t(k) * 2 + 1) * pairs + i] = float(std::sin(t));
        }
    return table;
}

// Polynomials of degree 0, 1, ... that are orthonormal over the page's positions. [terms][128]
std::vector<std::vector<double>> polynomials(int32_t terms) {
    std::vector<std::vector<double>> p;
    for (int32_t k = 0; k < terms; ++k) {
        std::vector<double> next(size_t{kPageTokens}, 1.0);
        for (int32_t t = 0; k > 0 && t < kPageTokens; ++t)
            next[size_t(t)] = p.back()[size_t(t)] * (double(t) - 0.5 * (kPageTokens - 1)) / 64.0;
        for (int round = 0; round < 2; ++round) // the second for what rounding left of the first
            for (const std::vector<double>& before : p) {
                const double dot = std::inner_product(next.begin(), next.end(), before.begin(), 0.0);
                for (size_t t = 0; t < next.size(); ++t)
                    next[t] -= dot * before[t];
            }
        const double norm = std::sqrt(std::inner_product(next.begin(), next.end(), next.begin(), 0.0));
        for (double& x : next)
            x /= norm;
        p.push_back(std::move(next));
    }
    return p;
}

// (c, s) becomes the turn by both angles. [pairs] each
void compose(int32_t pairs, const float* by, float* turn) {
    for (int32_t i = 0; i < pairs; ++i) {
        const float c = turn[i], s = turn[pairs + i];
        turn[i] = c * by[i] - s * by[pairs + i];
        turn[pairs + i] = s * by[i] + c * by[pairs + i];
    }
}

} // namespace

MeanTable::MeanTable(const Rope& rope) : turns_(rope), pairs_(rope.known ? rope.rotary / 2 : 0) {
    std::vector<int32_t> order(static_cast<size_t>(pairs_));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return rope.angle(x) > rope.angle(y); });
    for (const int32_t i : order) {
        const auto [a, b] = rope.pair(i);
        halves_ = halves_ && a == int32_t(a_.size()) && b == a + pairs_;
        a_.push_back(a), b_.push_back(b);
        angles_.push_back(rope.angle(i));
    }
    near_ = turns_by(angles_, kPageTokens, 1.0);
    far_ = turns_by(angles_, kFar, kPageTokens);
    huge_ = turns_by(angles_, kFar, kFarStep);
    fast_ = int32_t(std::partition_point(angles_.begin(), angles_.end(), [](double w) { return w > kSlowAngle; }) -
                    angles_.begin());
    if (2 * (pairs_ - fast_) > kSlowTerms)
        terms_ = kSlowTerms;
    else
        fast_ = pairs_;
    width_ = 2 * fast_ + terms_;
    features_.resize(size_t(kPageTokens) * size_t(width_));
    const std::vector<std::vector<double>> p = polynomials(terms_);
    for (int32_t t = 0; t < kPageTokens; ++t) {
        const auto at = [&](int32_t i) -> float& { return features_[size_t(i) * kPageTokens + size_t(t)]; };
        for (int32_t i = 0; i < fast_; ++i) {
            at(i) = near_[size_t(t * 2 * pairs_ + i)];
            at(fast_ + i) = near_[size_t(t * 2 * pairs_ + pairs_ + i)];
        }
        for (int32_t k = 0; k < terms_; ++k)
            at(2 * fast_ + k) = float(p[size_t(k)][size_t(t)]);
    }
    const int32_t slow = pairs_ - fast_;
    slow_.assign(size_t(terms_) * 2 * size_t(slow), 0.0f);
    for (int32_t k = 0; k < terms_; ++k)
        for (int32_t i = 0; i < slow; ++i) {
            double c = 0.0, s = 0.0;
            for (int32_t t = 0; t < kPageTokens; ++t) {
                c += p[size_t(k)][size_t(t)] * std::cos(double(t) * angles_[size_t(fast_ + i)]);
                s += p[size_t(k)][size_t(t)] * std::sin(double(t) * angles_[size_t(fast_ + i)]);
            }
            slow_[size_t(i * terms_ + k)] = float(c);
            slow_[size_t((slow + i) * terms_ + k)] = float(s);
        }
}

void MeanTable::angle(int64_t position, float* turn) const {
    if (pairs_ == 0) return;
    const int64_t row = 2 * int64_t(pairs_);
    const int64_t far = position / kPageTokens % kFar, huge = position / kFarStep;
    std::copy_n(&near_[size_t(position % kPageTokens * row)], row, turn);
    if (far > 0) compose(pairs_, &far_[size_t(far * row)], turn);
    if (huge > 0 && huge < kFar) compose(pairs_, &huge_[size_t(huge * row)], turn);
    if (huge < kFar) return;
    float beyond[kMaxHeadDim];
    for (int32_t i = 0; i < pairs_; ++i) {
        const double t = double(huge * kFarStep) * angles_[size_t(i)];
        beyond[i] = float(std::cos(t)), beyond[pairs_ + i] = float(std::sin(t));
    }
    compose(pairs_, beyond, turn);
}

void MeanTable::add(const float* mean, float sign, float* rows, int32_t n, int64_t stride, int32_t dim,
                    const int32_t* positions, int32_t base) const {
    float from_a[kMaxHeadDim / 2], from_b[kMaxHeadDim / 2], turn[kMaxHeadDim], still[kMaxHeadDim];
    float base_a[kMaxHeadDim / 2], base_b[kMaxHeadDim / 2], x[kMaxHeadDim / 2], y[kMaxHeadDim / 2];
    for (int32_t d = 0; d < dim; ++d)
        still[d] = sign * mean[d];
    for (int32_t i = 0; i < pairs_; ++i) {
        from_a[i] = still[a_[size_t(i)]], from_b[i] = still[b_[size_t(i)]];
        still[a_[size_t(i)]] = still[b_[size_t(i)]] = 0.0f;
    }
    const auto turned = [&](const float* by, const float* fa, const float* fb, float* ta, float* tb) {
        for (int32_t i = 0; i < pairs_; ++i) {
            const float ac = fa[i] * by[i], bs = fb[i] * by[pairs_ + i];
            const float as = fa[i] * by[pairs_ + i], bc = fb[i] * by[i];
            ta[i] = ac - bs;
            tb[i] = as + bc;
        }
    };
    angle(base, turn);
    turned(turn, from_a, from_b, base_a, base_b);
    const bool rest = 2 * pairs_ < dim;
    for (int32_t t = 0; t < n; ++t) {
        const int64_t delta = int64_t(positions[t]) - base;
        if (delta >= 0 && delta < kPageTokens) {
            turned(pairs_ > 0 ? &near_[size_t(delta * 2 * pairs_)] : nullptr, base_a, base_b, x, y);
        } else { // a gap in the positions
            angle(positions[t], turn);
            turned(turn, from_a, from_b, x, y);
        }
        float* row = rows + t * stride;
        if (halves_) { // the usual order, for which plain loops do
            for (int32_t i = 0; i < pairs_; ++i)
                row[i] += x[i];
            for (int32_t i = 0; i < pairs_; ++i)
                row[pairs_ + i] += y[i];
        } else {
            for (int32_t i = 0; i < pairs_; ++i) {
                row[a_[size_t(i)]] += x[i];
                row[b_[size_t(i)]] += y[i];
            }
        }
        for (int32_t d = 0; rest && d < dim; ++d)
            row[d] += still[d];
    }
}

void MeanTable::fold(const float* mean, const float* q, int32_t nq, int32_t dim, float* folded) const {
    float still[kMaxHeadDim];
    std::copy_n(mean, dim, still);
    for (int32_t i = 0; i < pairs_; ++i)
        still[a_[size_t(i)]] = still[b_[size_t(i)]] = 0.0f;
    for (int32_t n = 0; n < nq; ++n) {
        const float* from = q + int64_t(n) * dim;
        float* to = folded + int64_t(n) * folded_width();
        for (int32_t i = 0; i < pairs_; ++i) {
            const int32_t a = a_[size_t(i)], b = b_[size_t(i)];
            to[i] = from[a] * mean[a] + from[b] * mean[b];
            to[pairs_ + i] = from[b] * mean[a] - from[a] * mean[b];
        }
        float constant = 0.0f;
        for (int32_t d = 0; 2 * pairs_ < dim && d < dim; ++d)
            constant += from[d] * still[d];
        to[2 * pairs_] = constant;
    }
}

void MeanTable::add_scores(const kernels::Table& table, const float* folded, int32_t nq, const int32_t* positions,
                           int32_t first, int32_t end, float scale, float* s, Scratch& scratch) const {
    float turn[kMaxHeadDim];
    bool together = true; // of the whole page, so that a row's numbers do not depend on what others want of it
    for (int32_t t = 0; t < kPageTokens; ++t)
        together = together && positions[t] == positions[0] + t;
    const int32_t slow = pairs_ - fast_;
    for (int32_t n = 0; n < nq; ++n) {
        const float constant = folded[int64_t(n) * folded_width() + 2 * pairs_];
        if (constant == 0.0f) continue; // as where every channel turns
        for (int32_t t = first; t < end; ++t)
            s[int64_t(n) * kPageTokens + t] += scale * constant;
    }
    if (pairs_ == 0) return;
    if (!together) {
        for (int32_t t = first; t < end; ++t) {
            angle(positions[t], turn);
            for (int32_t n = 0; n < nq; ++n) {
                const float* from = folded + int64_t(n) * folded_width();
                float sum = 0.0f;
                for (int32_t i = 0; i < 2 * pairs_; ++i)
                    sum += from[i] * turn[i];
                s[int64_t(n) * kPageTokens + t] += scale * sum;
            }
        }
        return;
    }
    // Features of each query, times scale: fast pairs turned back by the page's first position, then polynomials.
    float* feature = scratch.floats(Scratch::mean, size_t(nq) * size_t(width_ + 2 * slow));
    float* rest = feature + int64_t(nq) * width_;
    angle(positions[0], turn);
    for (int32_t n = 0; n < nq; ++n) {
        const float* from = folded + int64_t(n) * folded_width();
        float *fast = feature + int64_t(n) * width_, *slower = rest + int64_t(n) * 2 * slow;
        const auto turned = [&](int32_t at, int32_t count, float* x, float* y) {
            const float *c = turn + at, *sine = turn + pairs_ + at, *a = from + at, *b = from + pairs_ + at;
            for (int32_t i = 0; i < count; ++i) {
                x[i] = scale * (a[i] * c[i] + b[i] * sine[i]);
                y[i] = scale * (b[i] * c[i] - a[i] * sine[i]);
            }
        };
        turned(0, fast_, fast, fast + fast_);
        turned(fast_, slow, slower, slower + slow);
        std::fill_n(fast + 2 * fast_, terms_, 0.0f);
    }
    int32_t* bounds = scratch.bounds(nq, 2 * slow);
    if (terms_ > 0)
        table.mix(rest, 2 * slow, bounds, bounds + nq, nq, slow_.data(), terms_, terms_, feature + 2 * fast_, width_);
    std::fill_n(bounds + nq, nq, width_);
    table.mix(feature, width_, bounds, bounds + nq, nq, features_.data() + first, kPageTokens, end - first, s + first,
              kPageTokens);
}

} // namespace kvmosaic
