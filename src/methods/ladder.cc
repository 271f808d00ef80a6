#include "methods/ladder.h"

#include <algorithm>
#include <array>
#include <limits>

namespace kvmosaic {
namespace {

// By rank, heaviest channels first.
constexpr int kWidths[] = {8, 6, 4, 3, 2, 1, 0};
constexpr int kWidthCount = 7;
// Channels that one vector of each plane holds: low4, high4, two, one.
constexpr int32_t kSpan[4] = {8, 8, 16, 32};

// Vectors of each plane, channels of 6 bits (low4 and two) and of 3 (two and one).
struct Mix {
    std::array<int32_t, 4> vectors{};
    int32_t six = 0, three = 0;
};

class Search {
public:
    // weights: [dim], descending.
    Search(const float* weights, int32_t dim) : weights_(weights), dim_(dim) {
        double sum = 0.0;
        sums_[0] = 0.0;
        for (int32_t i = 0; i < dim; ++i)
            sums_[size_t(i) + 1] = sum += double(weights[i]);
    }

    // Channels of each width of kWidths.
    std::array<int32_t, kWidthCount> counts(const Mix& mix) const {
        const int32_t low = kSpan[0] * mix.vectors[0], high = kSpan[1] * mix.vectors[1],
                      two = kSpan[2] * mix.vectors[2], one = kSpan[3] * mix.vectors[3];
        std::array<int32_t, kWidthCount> n = {
            high, mix.six, low - high - mix.six, mix.three, two - mix.six - mix.three, one - mix.three, 0};
        int32_t left = dim_;
        for (int32_t& count : n) { // what no channel is left for becomes padding
            count = std::min(count, left);
            left -= count;
        }
        n.back() = left;
        return n;
    }

    double error(const Mix& mix) const {
        double sum = 0.0;
        int32_t at = 0;
        const std::array<int32_t, kWidthCount> n = counts(mix);
        for (int i = 0; i < kWidthCount; ++i) {
            sum += distortion_of(kWidths[i]) * (sums_[size_t(at + n[size_t(i)])] - sums_[size_t(at)]);
            at += n[size_t(i)];
        }
        return sum;
    }

    // The best borders inside the planes that two widths share, for these vectors; false where high4 has no low4.
    bool settle(Mix* mix) const {
        const int32_t low = kSpan[0] * mix->vectors[0], high = kSpan[1] * mix->vectors[1],
                      two = kSpan[2] * mix->vectors[2], one = kSpan[3] * mix->vectors[3];
        for (const int32_t n : mix->vectors)
            if (n < 0) return false;
        if (high > low) return false;
        const auto d = [](int bits) { return distortion_of(bits); };
        mix->six = mix->three = 0;
        for (int round = 0; round < 2; ++round) {
            // One channel more at 3 bits takes a bit from the last one that has 1; both gains fall as it grows.
            mix->three = border(std::min(two - mix->six, one), [&](int32_t n) {
                return (d(2) - d(3)) * weight(low + n) > (d(0) - d(1)) * weight(low + two - mix->six + one - n - 1);
            });
            // One channel more at 6 takes two bits from the last one that has 2, which takes one from the last with 1.
            mix->six = border(std::min(low - high, two - mix->three), [&](int32_t n) {
                return (d(4) - d(6)) * weight(high + n) >
                       (d(1) - d(2)) * weight(low + two - n - 1) +
                           (d(0) - d(1)) * weight(low + two - n + one - mix->three - 1);
            });
        }
        return true;
    }

    // Takes the best single move of a vector until none helps.
    Mix improve(std::array<int32_t, 4> vectors) {
        Mix best;
        best.vectors = vectors;
        for (double least = tried(&best);;) {
            Mix next = best;
            double found = least;
            for (int from = 0; from < 4; ++from)
                for (int to = 0; to < 4; ++to)
                    for (int also = to; also < 5; ++also) { // alone, or with a second one, to the same plane or a third
                        if (from == to || also == from) continue;
                        Mix mix = best;
                        --mix.vectors[size_t(from)], ++mix.vectors[size_t(to)];
                        if (also < 4) --mix.vectors[size_t(from)], ++mix.vectors[size_t(also)];
                        const double e = tried(&mix);
                        if (e < found) found = e, next = mix;
                    }
            if (!(found < least)) return best;
            best = next, least = found;
        }
    }

private:
    // The error of these vectors with their best borders; infinity where settle says no. Neighbours of neighbours come
    // again and again, and both beginnings meet: what was seen last is kept.
    double tried(Mix* mix) {
        const std::array<int32_t, 4>& v = mix->vectors;
        Seen& seen = seen_[size_t(v[0] * 37 + v[1] * 11 + v[2] * 101 + v[3] * 3) % seen_.size()];
        if (!seen.known || seen.mix.vectors != v) {
            seen.known = true;
            seen.error = settle(mix) ? error(*mix) : kImpossible;
            seen.mix = *mix;
        }
        *mix = seen.mix;
        return seen.error;
    }
    static constexpr double kImpossible = std::numeric_limits<double>::infinity();
    struct Seen {
        Mix mix;
        double error = 0.0;
        bool known = false;
    };
    std::array<Seen, 256> seen_; // by a hash of the vectors

    double weight(int32_t rank) const { return rank >= 0 && rank < dim_ ? double(weights_[rank]) : 0.0; }
    // The first n in 0..most where more does not help; it then does not help later either. In steps, so that a model's
    // pages share their layouts.
    template <class Helps>
    static int32_t border(int32_t most, Helps helps) {
        constexpr int32_t kStep = 4;
        int32_t from = 0;
        for (int32_t to = most / kStep; from < to;) {
            const int32_t middle = (from + to) / 2;
            if (helps(middle * kStep + kStep / 2))
                from = middle + 1;
            else
                to = middle;
        }
        return from * kStep;
    }

    const float* weights_;
    int32_t dim_;
    std::array<double, kMaxHeadDim + 1> sums_; // of the first i weights
};

Ladder ladder_of(const std::array<int32_t, kWidthCount>& n) {
    Ladder ladder;
    for (const int i : {0, 2, 1, 4, 3, 5, 6}) // 8, 4, 6, 2, 3, 1, 0
        ladder.push(uint8_t(kWidths[i]), uint16_t(n[size_t(i)]));
    return ladder;
}

} // namespace

double distortion_of(int bits) {
    constexpr double kDistortion[9] = {1.0, 0.3634, 0.1188, 0.03744, 0.01154, 1.0, 0.00104, 1.0, 0.0000909};
    return kDistortion[bits];
}

LadderChoice choose_ladder(const float* weights, int32_t dim, int32_t vectors) {
    Search search(weights, dim);
    const int32_t two = std::min(vectors, (dim + kSpan[2] - 1) / kSpan[2]);
    const Mix flat = search.improve({vectors - two, 0, two, 0}); // as many as possible at 2 bits first
    const Mix steep = search.improve({vectors, 0, 0, 0});        // or at 4
    const double error = search.error(flat), other = search.error(steep);
    return {ladder_of(search.counts(other < error ? steep : flat)), std::min(error, other)};
}

void channel_weights(const PlanInput& in, bool queries, float* out) {
    std::array<float, kMaxHeadDim> mean{}, squares{}; // no heap: plans are made while a step runs
    for (int64_t t = 0; t < in.count; ++t)
        for (int32_t d = 0; d < in.dim; ++d)
            mean[size_t(d)] += in.rows[t * in.dim + d];
    for (int32_t d = 0; d < in.dim; ++d)
        mean[size_t(d)] *= 1.0f / float(in.count);
    for (int64_t t = 0; t < in.count; ++t)
        for (int32_t d = 0; d < in.dim; ++d) {
            const float e = in.rows[t * in.dim + d] - mean[size_t(d)], square = e * e;
            squares[size_t(d)] += square;
        }
    const bool seen = queries && in.query.count > 0 && in.query.abs_sum != nullptr;
    for (int32_t d = 0; d < in.dim; ++d) {
        const float query = seen ? in.query.abs_sum[d] / float(in.query.count) : 1.0f;
        const float variance = squares[size_t(d)] / float(in.count);
        out[d] = query * variance / float(in.dim);
        if (!(out[d] >= 0.0f)) out[d] = 0.0f; // a loaded state may hold any bytes
    }
}

void place_channels(const Ladder& ladder, const uint16_t* order, int32_t dim, uint16_t* out) {
    int32_t place = 0;
    for (int i = 0; i < ladder.count; ++i) {
        const Tier& tier = ladder.tiers[size_t(i)];
        int32_t rank = 0; // of the tier's heaviest channel
        for (int k = 0; k < ladder.count; ++k)
            if (ladder.tiers[size_t(k)].bits > tier.bits) rank += ladder.tiers[size_t(k)].channels;
        std::copy_n(order + rank, std::min<int32_t>(tier.channels, dim - rank), out + place);
        std::sort(out + place, out + place + tier.channels);
        place += tier.channels;
    }
}

} // namespace kvmosaic
