// The turning mean: rows and scores against rotations in double.
#include "cache/mean.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "cache/scratch.h"

namespace kvmosaic {
namespace {

struct Setting {
    Rope rope;
    int32_t dim = 0;
    std::vector<float> mean;
};
std::vector<Setting> setups() {
    std::vector<Setting> all;
    for (const int32_t dim : {20, 64, 128, 256})
        for (const bool halves : {false, true})
            for (const float base : {1e4f, 1e6f})
                for (const int32_t rotary : {dim, dim / 4 * 2, 0}) {
                    Setting s;
                    s.rope.known = rotary > 0, s.rope.halves = halves, s.rope.rotary = rotary, s.rope.base = base;
                    s.dim = dim;
                    std::mt19937 random(5);
                    std::normal_distribution<float> normal;
                    for (int32_t d = 0; d < dim; ++d)
                        s.mean.push_back(8.0f * normal(random));
                    all.push_back(s);
                }
    return all;
}
std::vector<double> turned(const Setting& s, int32_t position) {
    std::vector<double> x(s.mean.begin(), s.mean.end());
    for (int32_t i = 0; s.rope.known && i < s.rope.rotary / 2; ++i) {
        const auto [a, b] = s.rope.pair(i);
        const double t = position * s.rope.angle(i), c = std::cos(t), n = std::sin(t);
        const double xa = x[size_t(a)], xb = x[size_t(b)];
        x[size_t(a)] = xa * c - xb * n;
        x[size_t(b)] = xa * n + xb * c;
    }
    return x;
}

// Positions of a page: neighbours, with gaps, far away and beyond the tables.
std::vector<std::vector<int32_t>> pages() {
    std::vector<std::vector<int32_t>> all;
    for (const int32_t base : {0, 4, 8191, 40000, 523000, 800001}) {
        std::vector<int32_t> page;
        for (int32_t t = 0; t < kPageTokens; ++t)
            page.push_back(base + t);
        all.push_back(page);
    }
    all.push_back(all[1]);
    for (size_t t = 50; t < all.back().size(); ++t)
        all.back()[t] += 300;
    return all;
}

TEST(MeanTable, RowsAreTheTurnedMean) {
    for (const Setting& s : setups()) {
        const MeanTable table(s.rope);
        for (const std::vector<int32_t>& positions : pages()) {
            std::vector<float> rows(size_t(kPageTokens * s.dim), 1.0f), again(size_t(5 * s.dim), 1.0f);
            table.add(s.mean.data(), 1.0f, rows.data(), kPageTokens, s.dim, s.dim, positions.data(), positions[0]);
            for (int32_t t = 0; t < kPageTokens; t += 7) {
                const std::vector<double> want = turned(s, positions[size_t(t)]);
                for (int32_t d = 0; d < s.dim; ++d)
                    ASSERT_NEAR(rows[size_t(t * s.dim + d)] - 1.0f, want[size_t(d)], 4e-5)
                        << "D " << s.dim << " position " << positions[size_t(t)] << " channel " << d;
            }
            // A part of the page gives the same bits.
            table.add(s.mean.data(), 1.0f, again.data(), 5, s.dim, s.dim, positions.data() + 60, positions[0]);
            for (int32_t i = 0; i < 5 * s.dim; ++i)
                ASSERT_EQ(again[size_t(i)], rows[size_t(60 * s.dim + i)]);
        }
    }
}

TEST(MeanTable, ScoresAreProductsWithTheTurnedMean) {
    Scratch scratch;
    for (const Setting& s : setups()) {
        const MeanTable table(s.rope);
        std::mt19937 random(6);
        std::normal_distribution<float> normal;
        const int32_t nq = 5;
        std::vector<float> q(size_t(nq * s.dim));
        for (float& x : q)
            x = normal(random);
        std::vector<float> folded(size_t(nq) * size_t(table.folded_width()));
        table.fold(s.mean.data(), q.data(), nq, s.dim, folded.data());
        for (const std::vector<int32_t>& positions : pages())
            for (const kernels::Table* kernel : kernels::available()) {
                std::vector<float> scores(size_t(nq * kPageTokens), 2.0f);
                table.add_scores(*kernel, folded.data(), nq, positions.data(), 10, 121, 0.5f, scores.data(), scratch);
                for (int32_t n = 0; n < nq; ++n)
                    for (int32_t t = 0; t < kPageTokens; t += 3) {
                        double want = 2.0, size = 0.0;
                        const std::vector<double> row = turned(s, positions[size_t(t)]);
                        for (int32_t d = 0; d < s.dim; ++d) {
                            const double x = double(q[size_t(n * s.dim + d)]) * row[size_t(d)];
                            if (t >= 10 && t < 121) want += 0.5 * x;
                            size += x * x;
                        }
                        ASSERT_NEAR(scores[size_t(n * kPageTokens + t)], want, 2e-6 * std::sqrt(size) + 1e-5)
                            << kernel->isa << " D " << s.dim << " base " << s.rope.base << " position "
                            << positions[size_t(t)];
                    }
            }
    }
}

} // namespace
} // namespace kvmosaic
