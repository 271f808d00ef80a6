#include "cache/tile.h"

#include <algorithm>
#include <cmath>

#include "cache/impl.h"

namespace kvmosaic {

namespace {

// Smallest range of the page's rows that some query row wants.
struct Extent {
    int32_t lo = kPageTokens, hi = 0;
    void cover(int32_t a, int32_t b) {
        if (a < b) lo = std::min(lo, a), hi = std::max(hi, b);
    }
    bool empty() const { return lo >= hi; }
    int32_t size() const { return hi - lo; }
};

void load(const kernels::Table& table, const TileSource& from, Extent e, int32_t dim, float* tile) {
    table.load_raw(from.type, from.raw + size_t(e.lo) * size_t(dim) * bytes_of(from.type), e.size(), dim, tile, dim);
}

void score_codes(const kernels::Table& table, const TileQuery& query, const TileSource& key, Extent e, float* s,
                 Scratch& scratch) {
    const Page& page = key.packed.page(0);
    const int32_t nq = query.rows * query.group;
    const kernels::CodeRows rows{.w = key.q,
                                 .stride = query.dk,
                                 .n = nq,
                                 .depth = query.dk,
                                 .lane_first = e.lo,
                                 .lane_end = e.hi,
                                 .scale = query.scale,
                                 .fast = query.fast,
                                 .next = key.next,
                                 .out = s,
                                 .out_stride = kPageTokens};
    table.weigh(*page.layout, page.bytes(), rows, scratch.codes_work());
    if (key.mean)
        key.packed.mean->add_scores(table, key.mean, nq, key.packed.positions, e.lo, e.hi, query.scale, s, scratch);
    for (int32_t n = 0; key.shift && n < nq; ++n)
        for (int32_t t = e.lo; t < e.hi; ++t)
            s[n * kPageTokens + t] += query.scale * key.shift[n];
}

// lo, hi: rows of the page that each query row weighs; e: all of them together.
void mix_codes(const kernels::Table& table, const TileQuery& query, const TileSource& value, Extent e, const float* p,
               const int32_t* lo, const int32_t* hi, float* o, Scratch& scratch) {
    const Page& page = value.packed.page(0);
    const Transform& transform = value.packed.plan->transform;
    const int32_t nq = query.rows * query.group, dv = query.dv;
    const bool plain = transform.identity() || query.apart;
    if (query.apart) o += dv;
    float* out = plain ? o : scratch.floats(Scratch::mixed, size_t(nq + 1) * size_t(dv));
    const kernels::CodeRows rows{.w = p,
                                 .stride = kPageTokens,
                                 .n = nq,
                                 .lo = lo,
                                 .hi = hi,
                                 .depth = e.hi,
                                 .lane_first = 0,
                                 .lane_end = dv,
                                 .add = plain,
                                 .fast = query.fast,
                                 .next = value.next,
                                 .out = out,
                                 .out_stride = plain ? query.stride() : dv};
    table.weigh(*page.layout, page.bytes(), rows, scratch.codes_work());
    for (int32_t n = 0; !plain && n < nq; ++n) {
        float* row = out + int64_t(n) * dv;
        float weight = 0.0f;
        for (int32_t t = lo[n]; t < hi[n]; ++t)
            weight += p[n * kPageTokens + t];
        transform.unfold(row, dv, weight, out + int64_t(nq) * dv);
        for (int32_t d = 0; d < dv; ++d)
            o[int64_t(n) * dv + d] += row[d];
    }
}

} // namespace

void attend_page(const kernels::Table& table, const TileQuery& query, const TileSource& key, const TileSource& value,
                 const TileRange* range, kernels::RowState* state, float* o, Scratch& scratch) {
    const int32_t group = query.group, nq = query.rows * group, dk = query.dk, dv = query.dv;
    Extent k_codes, k_raw, v_codes, v_raw;
    for (int32_t i = 0; i < query.rows; ++i) {
        const TileRange& r = range[i];
        k_codes.cover(r.lo, r.k_packed);
        k_raw.cover(r.k_packed, r.hi);
        v_codes.cover(r.lo, r.v_packed);
        v_raw.cover(r.v_packed, r.hi);
    }
    if (k_codes.empty() && k_raw.empty()) return;
    float* tile = scratch.floats(Scratch::tile, size_t(kPageTokens) * size_t(std::max(dk, dv)));
    float* s = scratch.floats(Scratch::scores, size_t(nq) * kPageTokens);

    // Scores. Where some rows see a token packed and others raw, both are computed and each row takes its own.
    if (!k_codes.empty()) {
        if (key.fused) {
            score_codes(table, query, key, k_codes, s, scratch);
        } else {
            restore_rows(table, key.packed, k_codes.lo, k_codes.size(), dk, tile, dk, scratch);
            table.scores(query.q, nq, tile, dk, k_codes.size(), dk, query.scale, s + k_codes.lo, kPageTokens);
        }
    }
    if (!k_raw.empty()) {
        float* own = k_codes.empty() ? s : scratch.floats(Scratch::raw_scores, size_t(nq) * kPageTokens);
        load(table, key, k_raw, dk, tile);
        table.scores(query.q, nq, tile, dk, k_raw.size(), dk, query.scale, own + k_raw.lo, kPageTokens);
        for (int32_t n = 0; own != s && n < nq; ++n) {
            const TileRange& r = range[n / group];
            const float* from = own + size_t(n) * kPageTokens;
            if (r.k_packed < r.hi) std::copy(from + r.k_packed, from + r.hi, s + size_t(n) * kPageTokens + r.k_packed);
        }
    }

    for (int32_t n = 0; n < nq; ++n) {
        const TileRange& r = range[n / group];
        if (r.lo >= r.hi) continue;
        float* row = s + size_t(n) * kPageTokens;
        if (query.soft_cap > 0.0f)
            for (int32_t t = r.lo; t < r.hi; ++t)
                row[t] = query.soft_cap * std::tanh(row[t] / query.soft_cap);
        table.softmax(row + r.lo, r.hi - r.lo, &state[n], o + int64_t(n) * query.stride(), query.stride());
    }

    // Values, packed before raw: the order of tokens.
    scratch.ranges.resize(size_t(nq) * 2);
    int32_t *lo = scratch.ranges.data(), *hi = lo + nq;
    const auto bounds = [&](int32_t first, bool codes) {
        for (int32_t n = 0; n < nq; ++n) {
            const TileRange& r = range[n / group];
            const int32_t a = codes ? r.lo : r.v_packed, b = codes ? r.v_packed : r.hi;
            lo[n] = a < b ? a - first : 0;
            hi[n] = a < b ? b - first : 0;
        }
    };
    const auto mix = [&](Extent e, bool codes) {
        bounds(e.lo, codes);
        table.mix(s + e.lo, kPageTokens, lo, hi, nq, tile, dv, dv, o, query.stride());
    };
    if (!v_codes.empty() && value.fused) {
        bounds(0, true);
        mix_codes(table, query, value, v_codes, s, lo, hi, o, scratch);
    } else if (!v_codes.empty()) {
        restore_rows(table, value.packed, v_codes.lo, v_codes.size(), dv, tile, dv, scratch);
        mix(v_codes, true);
    }
    if (!v_raw.empty()) {
        load(table, value, v_raw, dv, tile);
        mix(v_raw, false);
    }
}

} // namespace kvmosaic
