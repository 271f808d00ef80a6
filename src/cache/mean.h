// A mean of keys that turns with the position: rows of it, and its share of the scores without making them.
//
// With (a, b) a rotary pair of the mean m and of a query q, q . R_t m = sum of A cos(t w) + B sin(t w) over pairs,
// where A = q_a m_a + q_b m_b and B = q_b m_a - q_a m_b. A page that begins at position t0 takes (A, B) turned back by
// t0 and one table of the 128 differences, shared by all heads, layers and pages of a rotary embedding. Pairs that turn
// little within a page are almost polynomials there: a few terms stand for all of them, which leaves two fifths of the
// products.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "cache/basis.h"
#include "kernels/kernels.h"
#include "kvmosaic/shape.h"

namespace kvmosaic {

struct Scratch;

class MeanTable {
public:
    explicit MeanTable(const Rope& rope);
    const Rope& rope() const { return turns_.rope(); }
    const TurnTable& turns() const { return turns_; }

    // For kernels of a device that do what add_scores does. Pairs fastest first; `fast` of them have a cosine and a
    // sine as features, the others go through `terms` polynomials (0: there are no others).
    int32_t pairs() const { return pairs_; }
    int32_t fast() const { return fast_; }
    int32_t terms() const { return terms_; }
    std::pair<int32_t, int32_t> channels(int32_t pair) const { return {a_[size_t(pair)], b_[size_t(pair)]}; }
    const std::vector<float>& features() const { return features_; } // [2 * fast + terms][128]
    const std::vector<float>& slow() const { return slow_; }         // [2 * (pairs - fast)][terms]
    void angle(int64_t position, float* turn) const;                 // turn: [2 * pairs] cosines, then sines

    // rows[t] += sign * R_position[t] mean. rows: [n][stride]; base: position of the page's first row. The same fp32
    // operations for a row whatever n is, so that what encoding takes off decoding puts back.
    void add(const float* mean, float sign, float* rows, int32_t n, int64_t stride, int32_t dim,
             const int32_t* positions, int32_t base) const;

    // A and B of each query. q: [nq][dim]; folded: [nq][folded_width(dim)].
    int32_t folded_width() const { return 2 * pairs_ + 1; }
    void fold(const float* mean, const float* q, int32_t nq, int32_t dim, float* folded) const;
    // s[n][t] += scale * q_n . R_position[t] mean for rows first .. end - 1 of a page. positions: of its 128 rows.
    // s: [nq][kPageTokens].
    void add_scores(const kernels::Table& table, const float* folded, int32_t nq, const int32_t* positions,
                    int32_t first, int32_t end, float scale, float* s, Scratch& scratch) const;

private:
    TurnTable turns_;
    int32_t pairs_ = 0, fast_ = 0, terms_ = 0, width_ = 0; // width: numbers that stand for a query
    bool halves_ = true;                                   // pair i is (i, i + pairs)
    std::vector<int32_t> a_, b_;                           // [pairs] channels of each pair, fastest first
    std::vector<double> angles_;                           // [pairs] a position
    std::vector<float> near_, far_, huge_;                 // [128], [64], [64][2 * pairs]: positions by 1, 128 and 8192
    std::vector<float> features_;                          // [width][128] cosines and sines of fast pairs, polynomials
    std::vector<float> slow_;                              // [2 * (pairs - fast)][terms] slow pairs to polynomials
};

} // namespace kvmosaic
