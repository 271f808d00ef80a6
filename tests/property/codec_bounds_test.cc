// How far a value may come back from what it was, for every rule, by what the page itself stores: each value gets the
// level nearest to it. And what is stored fits the group's range.
#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::reference;
using namespace testing;

// A group of a page as docs/format.md has it.
struct Group {
    double s = 1.0, z = 0.0;
    bool flagged = false; // hybrids: has an offset
};

Group group_of(const RuleCase& c, const Page& page, int32_t group, int32_t column) {
    const PageLayout& l = c.page;
    const double steps = l.levels == 3 ? 1.0 : double((1 << (c.spec.bits - 1)) - 1);
    Group g;
    if (l.has_scales()) g.s = double(scale_at(page, group, column));
    if (l.has_offsets()) g.z = double(zero_at(page, group, column));
    switch (l.rule) {
    case GridRule::integer:
        if (g.s != 0.0) g.z *= g.s;
        break;
    case GridRule::symmetric:
        g.z = -steps * g.s;
        break;
    case GridRule::extreme:
        g.z = -double(1 << (c.spec.bits - 1)) * g.s;
        break;
    case GridRule::hybrid_1bit:
    case GridRule::hybrid_4level:
        g.flagged = std::signbit(scale_at(page, group, column));
        g.s = std::fabs(g.s);
        if (!g.flagged) g.z = -steps * g.s;
        break;
    default:
        break;
    }
    return g;
}

// The levels that an encoder of this rule uses in a group.
std::vector<double> levels_of(const RuleCase& c, const Group& g) {
    std::vector<double> levels;
    int count = c.spec.levels == 3 ? 3 : 1 << c.spec.bits;
    if (c.spec.rule == GridRule::symmetric && c.spec.levels == 0) count -= 1;
    if (c.spec.rule == GridRule::hybrid_1bit) count = g.flagged ? 2 : 3;
    if (c.spec.rule == GridRule::hybrid_4level && !g.flagged) count -= 1;
    for (int code = 0; code < count; ++code)
        levels.push_back(g.z + g.s * (c.spec.book != nullptr ? double(c.spec.book[code]) : double(code)));
    return levels;
}

// Calls f(group, column, values' indices in rows) for every group of a grid or codebook page.
template <class F>
void each_group(const PageLayout& l, F f) {
    const int32_t outer = in_token(l) ? kPageTokens : l.dim;
    for (int32_t o = 0; o < outer; ++o) {
        for (int32_t g = 0; g < l.groups; ++g) {
            const int32_t last = std::min<int32_t>(l.group_first(g + 1), in_token(l) ? l.dim : kPageTokens);
            std::vector<size_t> index;
            for (int32_t i = l.group_first(g); i < last; ++i)
                index.push_back(in_token(l) ? size_t(o) * l.dim + size_t(i) : size_t(i) * l.dim + size_t(o));
            f(g, o, index);
        }
    }
}

bool is_outlier(const Page& page, size_t i) {
    const PageLayout& l = page.layout();
    for (uint32_t k = 0; k < l.outliers; ++k) {
        const uint8_t* at = page.bytes() + l.outlier_offset + (uint32_t(i / l.dim) * l.outliers + k) * 4;
        if (size_t(at[0] | at[1] << 8) == i % l.dim) return true;
    }
    return false;
}

TEST(CodecBounds, EveryValueGetsTheNearestLevel) {
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (int32_t dim : {20, 100}) {
            for (float scale : {1.0f, 0.01f, 30.0f}) {
                if (params != ParamType::f16 && scale != 1.0f) continue;
                const std::vector<float> rows = normal_rows(dim, 3, scale);
                for (const RuleCase& c : rule_cases(dim, {32, 128}, params)) {
                    if (c.page.kind == StoreKind::tiered || c.spec.rule == GridRule::codebook_norm) continue;
                    const Page page = encoded(reference(), c, rows);
                    const std::vector<float> back = restored(reference(), page);
                    each_group(c.page, [&](int32_t g, int32_t column, const std::vector<size_t>& index) {
                        const Group group = group_of(c, page, g, column);
                        const std::vector<double> levels = levels_of(c, group);
                        for (size_t i : index) {
                            const double x = double(rows[i]), error = std::fabs(double(back[i]) - x);
                            if (is_outlier(page, i)) {
                                ASSERT_EQ(back[i], rows[i]) << c.name; // the rows are f16
                                continue;
                            }
                            double best = INFINITY;
                            for (double level : levels)
                                best = std::min(best, std::fabs(level - x));
                            const double rounding =
                                1e-6 * (std::fabs(x) + std::fabs(levels[0]) + std::fabs(levels.back()));
                            ASSERT_LE(error, best + rounding) << c.name << " group " << g << " at " << i;
                            ASSERT_GE(error, best - rounding) << c.name << " group " << g << " at " << i;
                        }
                    });
                }
            }
        }
    }
}

// The levels span the group's range, up to what rounding scale and offset to their type moves.
TEST(CodecBounds, LevelsSpanTheClippedRange) {
    for (ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        const double unit = params == ParamType::f16 ? 0x1p-11 : params == ParamType::bf16 ? 0x1p-8 : 0x1p-4;
        for (int32_t dim : {20, 100}) {
            const std::vector<float> rows = normal_rows(dim, 4, 3.0f);
            for (const RuleCase& c : rule_cases(dim, {32, 128}, params)) {
                const GridRule rule = c.spec.rule;
                if (c.page.kind != StoreKind::grid || rule == GridRule::hybrid_1bit ||
                    rule == GridRule::hybrid_4level || (rule == GridRule::midpoint && c.spec.bits == 1))
                    continue;
                const Page page = encoded(reference(), c, rows);
                each_group(c.page, [&](int32_t g, int32_t column, const std::vector<size_t>& index) {
                    double min = INFINITY, max = -INFINITY;
                    for (size_t i : index)
                        min = std::min(min, double(rows[i])), max = std::max(max, double(rows[i]));
                    if (min < max) min *= double(c.spec.clip), max *= double(c.spec.clip);
                    const Group group = group_of(c, page, g, column);
                    const std::vector<double> levels = levels_of(c, group);
                    const double most = std::max(std::fabs(min), std::fabs(max)), step = std::fabs(group.s);
                    const double slack = (params == ParamType::f8e4m3 ? 0x1p-10 * double(levels.size()) : 1e-6) +
                                         2.0 * unit * (most + (max - min)) +
                                         (rule == GridRule::integer ? 0.51 * step : 0.0);
                    const double low = std::min(levels.front(), levels.back());
                    const double high = std::max(levels.front(), levels.back());
                    if (rule == GridRule::symmetric) {
                        ASSERT_NEAR(low, -most, slack) << c.name;
                        ASSERT_NEAR(high, most, slack) << c.name;
                    } else if (rule == GridRule::extreme) { // the far end lies at the value of largest magnitude
                        ASSERT_NEAR(levels.front(), -min > max ? min : max, slack) << c.name;
                        ASSERT_NEAR(high - low, step * (double(levels.size()) - 1.0), slack) << c.name;
                    } else {
                        ASSERT_NEAR(low, min, slack) << c.name;
                        ASSERT_GE(high, max - slack) << c.name;
                        // Offsets that count steps widen them where the range is narrow and far from 0.
                        ASSERT_LE(high, rule == GridRule::integer ? INFINITY : max + slack) << c.name;
                    }
                });
            }
        }
    }
}

// The chosen grid of a hybrid is as good as either one alone, group by group.
TEST(CodecBounds, HybridIsTheBetterOfTwo) {
    for (Axis axis : {Axis::tokens, Axis::channels}) {
        for (int bits : {2, 3, 4}) {
            for (GridRule rule : {GridRule::hybrid_1bit, GridRule::hybrid_4level}) {
                if (rule == GridRule::hybrid_1bit && bits != 2) continue;
                const int32_t dim = 64;
                StoreSpec spec = grid_spec(Side::value, bits, 32);
                spec.axis = axis;
                std::vector<float> rows = normal_rows(dim, 5);
                for (size_t i = 0; i < rows.size(); ++i) { // groups of either axis: to one side of 0, or three levels
                    const size_t t = i / size_t(dim), c = i % size_t(dim);
                    if (t < 32 || c < 32) rows[i] = f16_to_f32(f32_to_f16(rows[i] + 2.5f));
                    if (t >= 96 && c >= 32) rows[i] = 1.5f * float(int(i * 7 % 5) % 3 - 1);
                }
                const auto errors = [&](GridRule r, int b) {
                    spec.rule = r, spec.bits = uint8_t(b);
                    const PageLayout l = layout(spec, Side::value, dim);
                    const std::vector<float> back = restored(reference(), encoded(reference(), l, {}, rows));
                    std::vector<double> sums;
                    each_group(l, [&](int32_t, int32_t, const std::vector<size_t>& index) {
                        double sum = 0.0;
                        for (size_t i : index)
                            sum += std::fabs(double(back[i]) - double(rows[i]));
                        sums.push_back(sum);
                    });
                    return sums;
                };
                const std::vector<double> even = errors(GridRule::symmetric, bits);
                const std::vector<double> asym = errors(GridRule::asym, rule == GridRule::hybrid_1bit ? 1 : bits);
                const std::vector<double> both = errors(rule, bits);
                int taken[2] = {0, 0};
                for (size_t i = 0; i < both.size(); ++i) {
                    ASSERT_NEAR(both[i], std::min(even[i], asym[i]), 1e-4) << int(rule) << " bits " << bits;
                    ++taken[even[i] < asym[i]];
                }
                EXPECT_GT(taken[0], 10) << int(rule) << " bits " << bits; // both occur: the check looks at a choice
                EXPECT_GT(taken[1], 10) << int(rule) << " bits " << bits;
            }
        }
    }
}

// codebook_norm: levels are nearest on the unit sphere of sqrt(n), and the decoded vector has the norm of the row.
TEST(CodecBounds, NormCodebooksKeepTheNorm) {
    for (int32_t dim : {64, 80, 100, 128}) {
        for (int bits : {1, 2, 3, 4}) {
            for (Side side : {Side::key, Side::value}) {
                StoreSpec spec = grid_spec(side, bits, 512);
                spec.axis = Axis::channels;
                spec.kind = StoreKind::codebook;
                spec.rule = GridRule::codebook_norm;
                spec.book = book_of(bits);
                const PageLayout l = layout(spec, side, dim);
                const std::vector<float> rows = normal_rows(dim, 6, 4.0f);
                const Page page = encoded(reference(), l, {}, rows);
                const std::vector<float> back = restored(reference(), page);
                for (int32_t t = 0; t < kPageTokens; ++t) {
                    double norm = 0.0, decoded = 0.0;
                    for (int32_t c = 0; c < dim; ++c) {
                        norm += std::pow(double(rows[size_t(t * dim + c)]), 2.0);
                        decoded += std::pow(double(back[size_t(t * dim + c)]), 2.0);
                    }
                    ASSERT_NEAR(std::sqrt(decoded / norm), 1.0, 0x1p-11) << dim << " " << bits;
                    const double s = double(scale_at(page, 0, t));
                    for (int32_t c = 0; c < dim; ++c) {
                        const double y = double(rows[size_t(t * dim + c)]) * std::sqrt(double(dim) / norm);
                        double best = INFINITY;
                        for (int i = 0; i < 1 << bits; ++i)
                            best = std::min(best, std::fabs(y - double(spec.book[i])));
                        ASSERT_NEAR(std::fabs(double(back[size_t(t * dim + c)]) / s - y), best, 1e-5);
                    }
                }
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
