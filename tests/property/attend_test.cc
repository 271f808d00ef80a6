// Scores, softmax and mix of every table against double precision, and that a row's bits depend on nothing but itself.
#include "unit/codec_util.h"

namespace kvmosaic {
namespace {

using kernels::RowState;
using kernels::Table;
using namespace testing;

constexpr float kInf = std::numeric_limits<float>::infinity();
const std::vector<int32_t> kDims = {1, 3, 8, 17, 40, 64, 72, 80, 96, 100, 112, 128, 192, 256, 512};

std::vector<float> normals(size_t n, uint64_t seed, float scale = 1.0f) {
    Random random(seed);
    std::vector<float> x(n);
    for (float& v : x)
        v = scale * random.normal();
    return x;
}

// [n][stride] rows of D numbers between NaN, so that whoever reads past a row shows it.
std::vector<float> padded(const std::vector<float>& rows, int32_t n, int32_t dim, int32_t stride) {
    std::vector<float> out(size_t(n) * size_t(stride), NAN);
    for (int32_t t = 0; t < n; ++t)
        std::copy_n(rows.data() + t * dim, dim, out.data() + t * stride);
    return out;
}

TEST(Attend, ScoresAreExactToRounding) {
    for (const Table* table : kernels::available()) {
        for (int32_t dim : kDims) {
            for (int32_t nq : {1, 2, 3, 5, 7, 13}) {
                const int32_t n = 1 + (dim + nq) % 41, stride = dim + 5, s_stride = n + 3;
                const std::vector<float> q = normals(size_t(nq * dim), 1), k = normals(size_t(n * dim), 2);
                const std::vector<float> rows = padded(k, n, dim, stride);
                std::vector<float> s(size_t(nq * s_stride), 77.0f);
                table->scores(q.data(), nq, rows.data(), stride, n, dim, 0.37f, s.data(), s_stride);
                for (int32_t r = 0; r < nq; ++r) {
                    for (int32_t t = 0; t < s_stride; ++t) {
                        const float got = s[size_t(r * s_stride + t)];
                        if (t >= n) {
                            ASSERT_EQ(got, 77.0f) << table->isa; // the rest of the row is not ours
                            continue;
                        }
                        double want = 0.0, size = 0.0;
                        for (int32_t d = 0; d < dim; ++d) {
                            const double x = double(q[size_t(r * dim + d)]) * double(k[size_t(t * dim + d)]);
                            want += x;
                            size += std::fabs(x);
                        }
                        // At most dim / lanes additions in a row and the tree over the lanes; 40 units cover all.
                        ASSERT_NEAR(double(got), want * double(0.37f), 40 * 0x1p-24 * size * 0.37 + 1e-30)
                            << table->isa << " D " << dim << " rows " << nq;
                    }
                }
            }
        }
    }
}

TEST(Attend, ScoresDoNotDependOnTheirNeighbours) {
    for (const Table* table : kernels::available()) {
        for (int32_t dim : kDims) {
            const int32_t nq = 14, n = 45;
            const std::vector<float> q = normals(size_t(nq * dim), 3), k = normals(size_t(n * dim), 4);
            std::vector<float> all(size_t(nq * n));
            table->scores(q.data(), nq, k.data(), dim, n, dim, 0.125f, all.data(), n);
            Random random(5);
            for (int round = 0; round < 30; ++round) {
                const int32_t r0 = random.below(nq), rows = 1 + random.below(nq - r0);
                const int32_t t0 = random.below(n), tokens = 1 + random.below(n - t0);
                std::vector<float> part(size_t(rows * tokens));
                table->scores(q.data() + r0 * dim, rows, k.data() + t0 * dim, dim, tokens, dim, 0.125f, part.data(),
                              tokens);
                for (int32_t r = 0; r < rows; ++r)
                    for (int32_t t = 0; t < tokens; ++t)
                        ASSERT_EQ(part[size_t(r * tokens + t)], all[size_t((r0 + r) * n + t0 + t)])
                            << table->isa << " D " << dim;
            }
        }
    }
}

TEST(Attend, ExponentialIsAccurate) {
    for (const Table* table : tables()) {
        double worst = 0.0;
        for (int32_t i = 0; i < 200000; i += 128) {
            std::vector<float> x(129), s;
            for (int32_t t = 0; t < 128; ++t)
                x[size_t(t)] = -86.5f * float(i + t) / 200000.0f;
            x[128] = 0.0f; // the maximum
            s = x;
            RowState state{-kInf, 0.0f};
            table->softmax(s.data(), 129, &state, nullptr, 0);
            EXPECT_EQ(state.m, 0.0f);
            for (int32_t t = 0; t < 129; ++t)
                worst = std::max(worst, std::fabs(double(s[size_t(t)]) / std::exp(double(x[size_t(t)])) - 1.0));
        }
        EXPECT_LE(worst, 1e-6) << table->isa;
    }
}

TEST(Attend, FarScoresAreExactlyZero) {
    for (const Table* table : kernels::available()) {
        for (int32_t n : {1, 5, 8, 16, 21, 128}) {
            std::vector<float> s(size_t(n), -200.0f);
            s[size_t(n / 2)] = 3.0f;
            if (n > 2) s[0] = -kInf; // masked
            if (n > 2) s[size_t(n - 1)] = -3e38f;
            RowState state{-kInf, 0.0f};
            table->softmax(s.data(), n, &state, nullptr, 0);
            for (int32_t t = 0; t < n; ++t)
                ASSERT_EQ(s[size_t(t)], t == n / 2 ? 1.0f : 0.0f) << table->isa << " " << n;
            EXPECT_EQ(state.m, 3.0f);
            EXPECT_EQ(state.l, 1.0f);
        }
    }
}

// A NaN stays in its row: the row says so, instead of looking like an answer.
TEST(Attend, NotANumberShows) {
    for (const Table* table : kernels::available()) {
        for (int32_t at : {0, 7, 16, 17}) {
            std::vector<float> s(18, 0.5f);
            s[size_t(at)] = NAN;
            RowState state{-kInf, 0.0f};
            table->softmax(s.data(), 18, &state, nullptr, 0);
            EXPECT_TRUE(std::isnan(state.l)) << table->isa << " " << at;
        }
    }
}

TEST(Attend, SoftmaxMovesTheState) {
    for (const Table* table : kernels::available()) {
        for (int32_t dim : {1, 40, 100, 128}) {
            RowState state{-kInf, 0.0f}, want{-kInf, 0.0f};
            std::vector<float> o(size_t(dim), 0.0f), want_o(o);
            for (int32_t n : {3, 128, 1, 0, 45}) {
                std::vector<float> s = normals(size_t(n), uint64_t(n) + 7, 6.0f), want_s(s);
                table->softmax(s.data(), n, &state, o.data(), dim);
                kernels::reference().softmax(want_s.data(), n, &want, want_o.data(), dim);
                EXPECT_EQ(state.m, want.m);
                EXPECT_NEAR(state.l, want.l, 4e-6 * double(want.l)) << table->isa;
                for (int32_t t = 0; t < n; ++t)
                    ASSERT_NEAR(s[size_t(t)], want_s[size_t(t)], 1e-6 * double(want_s[size_t(t)])) << table->isa;
                for (int32_t d = 0; d < dim; ++d) {
                    ASSERT_NEAR(o[size_t(d)], want_o[size_t(d)], 4e-6 * std::fabs(double(want_o[size_t(d)])));
                    o[size_t(d)] += float(d + 1); // as a mix would
                    want_o[size_t(d)] = o[size_t(d)];
                }
            }
        }
    }
}

struct MixCase {
    int32_t nq, n, dim;
    std::vector<int32_t> lo, hi;
    std::vector<float> p, v, o; // p: [nq][n], v: [n][dim], o: [nq][dim]
};
MixCase mix_case(int32_t nq, int32_t n, int32_t dim, uint64_t seed) {
    MixCase c{nq,
              n,
              dim,
              {},
              {},
              normals(size_t(nq * n), seed),
              normals(size_t(n * dim), seed + 1),
              normals(size_t(nq * dim), seed + 2)};
    Random random(seed + 3);
    for (int32_t r = 0; r < nq; ++r) {
        const int32_t lo = random.below(n + 1);
        c.lo.push_back(random.below(3) ? 0 : lo);
        c.hi.push_back(random.below(4) ? n - random.below(std::min(n, 3)) : c.lo.back() + random.below(n - lo + 1));
        if (c.hi.back() < c.lo.back()) c.hi.back() = c.lo.back();
        for (int32_t t = 0; t < n; ++t) // p outside the range is not a number
            if (t < c.lo.back() || t >= c.hi.back()) c.p[size_t(r * n + t)] = NAN;
    }
    return c;
}

TEST(Attend, MixIsExactToRoundingAndInItsRange) {
    for (const Table* table : kernels::available()) {
        for (int32_t dim : kDims) {
            for (int32_t nq : {1, 2, 3, 4, 6, 7, 13, 20}) {
                MixCase c = mix_case(nq, 1 + (dim + 7 * nq) % 130, dim, uint64_t(dim + nq));
                const int32_t v_stride = dim + 3, o_stride = dim + 2;
                std::vector<float> v = padded(c.v, c.n, dim, v_stride), o = padded(c.o, nq, dim, o_stride);
                for (int32_t t = 0; t < c.n; ++t) { // rows that nobody sees are poison
                    bool seen = false;
                    for (int32_t r = 0; r < nq; ++r)
                        seen = seen || (t >= c.lo[size_t(r)] && t < c.hi[size_t(r)]);
                    if (!seen) std::memset(v.data() + t * v_stride, 0xFF, size_t(dim) * sizeof(float));
                }
                table->mix(c.p.data(), c.n, c.lo.data(), c.hi.data(), nq, v.data(), v_stride, dim, o.data(), o_stride);
                for (int32_t r = 0; r < nq; ++r) {
                    for (int32_t d = 0; d < dim; ++d) {
                        double want = double(c.o[size_t(r * dim + d)]), size = std::fabs(want);
                        for (int32_t t = c.lo[size_t(r)]; t < c.hi[size_t(r)]; ++t) {
                            const double x = double(c.p[size_t(r * c.n + t)]) * double(c.v[size_t(t * dim + d)]);
                            want += x;
                            size += std::fabs(x);
                        }
                        ASSERT_NEAR(double(o[size_t(r * o_stride + d)]), want, 140 * 0x1p-24 * size + 1e-30)
                            << table->isa << " D " << dim << " rows " << nq << " row " << r;
                    }
                    for (int32_t d = dim; d < o_stride; ++d)
                        ASSERT_TRUE(std::isnan(o[size_t(r * o_stride + d)])) << table->isa; // not ours
                }
            }
        }
    }
}

TEST(Attend, MixDoesNotDependOnItsNeighbours) {
    for (const Table* table : kernels::available()) {
        for (int32_t dim : kDims) {
            const int32_t nq = 17;
            const MixCase c = mix_case(nq, 100, dim, uint64_t(dim) + 90);
            std::vector<float> all = c.o, alone = c.o, split = c.o;
            table->mix(c.p.data(), c.n, c.lo.data(), c.hi.data(), nq, c.v.data(), dim, dim, all.data(), dim);
            for (int32_t r = 0; r < nq; ++r)
                table->mix(c.p.data() + r * c.n, c.n, &c.lo[size_t(r)], &c.hi[size_t(r)], 1, c.v.data(), dim, dim,
                           alone.data() + r * dim, dim);
            ASSERT_EQ(std::memcmp(all.data(), alone.data(), all.size() * sizeof(float)), 0) << table->isa << " " << dim;
            // The same tokens in two calls.
            for (int32_t cut : {0, 37, 100}) {
                split = c.o;
                std::vector<int32_t> lo = c.lo, mid_lo, mid_hi, hi = c.hi;
                for (int32_t r = 0; r < nq; ++r) {
                    mid_hi.push_back(std::clamp(cut, lo[size_t(r)], hi[size_t(r)]));
                    mid_lo.push_back(mid_hi.back());
                }
                table->mix(c.p.data(), c.n, lo.data(), mid_hi.data(), nq, c.v.data(), dim, dim, split.data(), dim);
                table->mix(c.p.data(), c.n, mid_lo.data(), hi.data(), nq, c.v.data(), dim, dim, split.data(), dim);
                ASSERT_EQ(std::memcmp(all.data(), split.data(), all.size() * sizeof(float)), 0) << table->isa;
            }
        }
    }
}

// Attention over parts, merged in any grouping, is the attention over the whole.
TEST(Attend, MergeIsAssociativeToRounding) {
    const int32_t dim = 72, n = 300;
    const std::vector<float> q = normals(size_t(dim), 1), k = normals(size_t(n * dim), 2),
                             v = normals(size_t(n * dim), 3);
    for (const Table* table : tables()) {
        struct Part {
            RowState state{-kInf, 0.0f};
            std::vector<float> o;
        };
        const auto part = [&](int32_t from, int32_t to) {
            Part p;
            p.o.assign(size_t(dim), 0.0f);
            std::vector<float> s(size_t(to - from) + 1);
            const int32_t lo = 0, hi = to - from;
            table->scores(q.data(), 1, k.data() + from * dim, dim, hi, dim, 0.3f, s.data(), n);
            table->softmax(s.data(), hi, &p.state, p.o.data(), dim);
            table->mix(s.data(), n, &lo, &hi, 1, v.data() + from * dim, dim, dim, p.o.data(), dim);
            return p;
        };
        const auto merged = [&](Part a, const Part& b) {
            kernels::merge(&a.state, a.o.data(), b.state, b.o.data(), dim);
            return a;
        };
        const Part whole = part(0, n), a = part(0, 50), b = part(50, 50), c = part(50, 171), d = part(171, n);
        for (const Part& p : {merged(merged(merged(a, b), c), d), merged(a, merged(b, merged(c, d))),
                              merged(merged(b, a), merged(c, d))}) {
            EXPECT_EQ(p.state.m, whole.state.m) << table->isa;
            EXPECT_NEAR(p.state.l, whole.state.l, 2e-6 * double(whole.state.l));
            for (int32_t i = 0; i < dim; ++i)
                EXPECT_NEAR(p.o[size_t(i)], whole.o[size_t(i)], 4e-6 * double(whole.state.l)) << table->isa;
        }
    }
}

// Bug case C6: rows with nothing to see give l = 0, m = -inf, o = 0, and vanish in a merge.
TEST(BugCaseC6, NothingToSee) {
    for (const Table* table : tables()) {
        for (int32_t n : {0, 1, 7, 16, 128}) {
            RowState state{-kInf, 0.0f};
            std::vector<float> s(size_t(n) + 1, -kInf), o(72, 0.0f);
            table->softmax(s.data(), n, &state, o.data(), 72); // no tokens, or all of them masked
            EXPECT_EQ(state.m, -kInf) << table->isa;
            EXPECT_EQ(state.l, 0.0f) << table->isa;
            for (int32_t t = 0; t < n; ++t)
                EXPECT_EQ(s[size_t(t)], 0.0f);
            const std::vector<float> poison(size_t(128 * 72), NAN);
            const std::vector<float> p(128, NAN);
            for (int32_t edge : {0, 5, 128}) {
                table->mix(p.data(), 128, &edge, &edge, 1, poison.data(), 72, 72, o.data(), 72);
                for (float x : o)
                    EXPECT_EQ(x, 0.0f) << table->isa;
            }
            RowState other{1.5f, 2.0f};
            std::vector<float> oo(72, 3.0f);
            kernels::merge(&other, oo.data(), state, o.data(), 72);
            EXPECT_EQ(other.m, 1.5f);
            EXPECT_EQ(other.l, 2.0f);
            kernels::merge(&state, o.data(), other, oo.data(), 72);
            EXPECT_EQ(state.m, 1.5f);
            EXPECT_EQ(state.l, 2.0f);
            EXPECT_EQ(o[71], 3.0f);
        }
    }
}

// Bug case C8: products of 1e5 before scaling, out of reach of fp16.
TEST(BugCaseC8, LargeScoresOfKernels) {
    for (const Table* table : tables()) {
        for (int32_t dim : {64, 100, 128}) {
            const int32_t n = 20;
            std::vector<float> q(size_t(dim), std::sqrt(1e5f / float(dim))), k(size_t(n * dim), 0.0f),
                s(size_t(n), 0.0f);
            for (int32_t t = 0; t < n; ++t)
                for (int32_t d = 0; d < dim; ++d)
                    k[size_t(t * dim + d)] = q[0] * float(t % 2 == 0 ? 1.0 - 0.001 * t : -1.0);
            const float scale = 1.0f / std::sqrt(float(dim));
            table->scores(q.data(), 1, k.data(), dim, n, dim, scale, s.data(), n);
            for (int32_t t = 0; t < n; ++t) {
                const double want = 1e5 * double(scale) * (t % 2 == 0 ? 1.0 - 0.001 * t : -1.0);
                EXPECT_NEAR(s[size_t(t)], want, 1e-5 * std::fabs(want)) << table->isa;
            }
            RowState state{-kInf, 0.0f};
            table->softmax(s.data(), n, &state, nullptr, 0);
            EXPECT_NEAR(state.m, 1e5f * scale, 0.1f);
            EXPECT_EQ(s[0], 1.0f);
            for (int32_t t = 0; t < n; ++t)
                EXPECT_TRUE(std::isfinite(s[size_t(t)])) << table->isa;
            EXPECT_EQ(s[1], 0.0f);
        }
    }
}

// Bug case C5 in attention: rows of the buffer behind the tokens are poison.
TEST(BugCaseC5, RowsPastTheEndDoNotMatter) {
    for (const Table* table : tables()) {
        for (int32_t dim : {1, 40, 100, 128}) {
            for (int32_t n : {1, 13, 31, 33, 127, 128}) {
                const std::vector<float> q = normals(size_t(3 * dim), 1), rows = normals(size_t(n * dim), 2);
                const auto run = [&](float behind) {
                    std::vector<float> k = rows;
                    k.resize(size_t((n + 9) * dim), behind);
                    std::vector<float> s(size_t(3 * (n + 9)), behind), o(size_t(3 * dim), 0.0f);
                    table->scores(q.data(), 3, k.data(), dim, n, dim, 0.2f, s.data(), n + 9);
                    RowState state[3];
                    const int32_t lo[3] = {}, hi[3] = {n, n, n};
                    for (int r = 0; r < 3; ++r) {
                        state[r] = {-kInf, 0.0f};
                        table->softmax(s.data() + r * (n + 9), n, &state[r], o.data() + r * dim, dim);
                    }
                    table->mix(s.data(), n + 9, lo, hi, 3, k.data(), dim, dim, o.data(), dim);
                    return o;
                };
                const std::vector<float> clean = run(0.0f);
                ASSERT_EQ(run(NAN), clean) << table->isa;
                ASSERT_EQ(run(kInf), clean) << table->isa;
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
