// Raw rows and the attention state over decoded rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::ref {

void load_raw(RawType type, const uint8_t* rows, int32_t n, int32_t dim, float* out, int64_t stride) {
    for (int32_t t = 0; t < n; ++t) {
        const uint8_t* row = rows + size_t(t) * size_t(dim) * bytes_of(type);
        for (int32_t d = 0; d < dim; ++d)
            out[t * stride + d] = load(type, row, uint32_t(d));
    }
}

void store_raw(RawType type, const float* x, int32_t dim, uint8_t* row, Counters* counters) {
    for (int32_t d = 0; d < dim; ++d) {
        float v = x[d];
        if (!std::isfinite(v)) {
            ++counters->non_finite;
            v = std::isnan(v) ? 0.0f : std::copysign(kInfinityStandIn, v);
        } else if ((type == RawType::f16 && std::isinf(f16_to_f32(f32_to_f16(v)))) ||
                   (type == RawType::bf16 && std::isinf(bf16_to_f32(f32_to_bf16(v))))) {
            ++counters->saturated;
        }
        store(type, row, uint32_t(d), v);
    }
}

namespace {

// Calls f with each q[d] as the rows store it; what is no number counts as 0.
template <class Add>
void each_query(RawType type, const float* q, int32_t dim, Add add) {
    for (int32_t d = 0; d < dim; ++d) {
        if (!std::isfinite(q[d])) continue;
        float v = q[d];
        if (type == RawType::f16) v = f16_to_f32(f32_to_f16_sat(v));
        if (type == RawType::bf16) v = bf16_to_f32(f32_to_bf16_sat(v));
        add(d, v);
    }
}

} // namespace

void add_abs(RawType type, const float* q, int32_t dim, float* sum) {
    each_query(type, q, dim, [&](int32_t d, float v) { sum[d] += std::fabs(v); });
}
void add_squares(RawType type, const float* q, int32_t dim, float* sum) {
    each_query(type, q, dim, [&](int32_t d, float v) {
        const float square = v * v;
        sum[d] += square;
    });
}

void scores(const float* q, int32_t nq, const float* k, int64_t k_stride, int32_t n, int32_t dim, float scale, float* s,
            int64_t s_stride) {
    for (int32_t r = 0; r < nq; ++r) {
        for (int32_t t = 0; t < n; ++t) {
            double sum = 0.0;
            for (int32_t d = 0; d < dim; ++d)
                sum += double(q[int64_t(r) * dim + d]) * double(k[t * k_stride + d]);
            s[r * s_stride + t] = float(double(scale) * sum);
        }
    }
}

bool reads_codes(const PageLayout& page) { return page.kind != StoreKind::raw; }

void weigh(const PageLayout& page, const uint8_t* bytes, const CodeRows& rows, uint8_t*) {
    std::vector<float> values(size_t(kPageTokens) * page.dim);
    restore(page, bytes, 0, kPageTokens, values.data(), page.dim);
    const bool key = page.side == Side::key;
    for (int32_t r = 0; r < rows.n; ++r) {
        const int32_t lo = rows.lo ? rows.lo[r] : 0, hi = std::min(rows.hi ? rows.hi[r] : page.depth, rows.depth);
        for (int32_t lane = rows.lane_first; lane < rows.lane_end; ++lane) {
            double sum = 0.0;
            for (int32_t d = lo; d < hi; ++d)
                sum += double(rows.w[r * rows.stride + d]) *
                       double(values[size_t(key ? lane : d) * page.dim + size_t(key ? d : lane)]);
            float& to = rows.out[r * rows.out_stride + lane];
            to = float(double(rows.scale) * sum + (rows.add ? double(to) : 0.0));
        }
    }
}

void softmax(float* s, int32_t n, RowState* state, float* o, int32_t dim) {
    float m = state->m;
    for (int32_t t = 0; t < n; ++t)
        m = s[t] > m ? s[t] : m;
    if (m == -std::numeric_limits<float>::infinity()) { // nothing seen yet and nothing to see here
        for (int32_t t = 0; t < n; ++t)
            s[t] = 0.0f;
        return;
    }
    const double keep = std::exp(double(state->m) - double(m)); // exp(-inf) = 0 for an empty state
    double l = double(state->l) * keep;
    for (int32_t t = 0; t < n; ++t) {
        const double p = std::exp(double(s[t]) - double(m));
        s[t] = float(p);
        l += p;
    }
    for (int32_t d = 0; d < dim; ++d)
        o[d] = float(double(o[d]) * keep);
    *state = RowState{m, float(l)};
}

void mix(const float* p, int64_t p_stride, const int32_t* lo, const int32_t* hi, int32_t nq, const float* v,
         int64_t v_stride, int32_t dim, float* o, int64_t o_stride) {
    for (int32_t r = 0; r < nq; ++r) {
        for (int32_t d = 0; d < dim; ++d) {
            double sum = double(o[r * o_stride + d]);
            for (int32_t t = lo[r]; t < hi[r]; ++t)
                sum += double(p[r * p_stride + t]) * double(v[t * v_stride + d]);
            o[r * o_stride + d] = float(sum);
        }
    }
}

} // namespace kvmosaic::kernels::ref

namespace kvmosaic::kernels {

const Table& reference() {
    static const Table table = {"reference",      ref::encode,  ref::restore,     ref::load_raw,
                                ref::store_raw,   ref::add_abs, ref::add_squares, ref::scores,
                                ref::reads_codes, ref::weigh,   ref::softmax,     ref::mix};
    return table;
}

} // namespace kvmosaic::kernels
