#include "cache/basis.h"

#include <algorithm>
#include <cmath>

#include "cache/impl.h"
#include "cache/scratch.h"

namespace kvmosaic {

const Page& Basis::page(int32_t joined_head) const { return *group[2 * joined_head].slots[size_t(slot)].packed; }

TurnTable::TurnTable(const Rope& r) : embedding(r), pairs(r.known ? r.rotary / 2 : 0) {
    for (int32_t i = 0; i < pairs; ++i)
        angles.push_back(embedding.angle(i));
    cosine.resize(size_t(kPageTokens) * size_t(pairs));
    sine.resize(cosine.size());
    for (int32_t p = 0; p < kPageTokens; ++p)
        for (int32_t i = 0; i < pairs; ++i) {
            const double t = double(p) * angles[size_t(i)];
            cosine[size_t(p * pairs + i)] = std::cos(t);
            sine[size_t(p * pairs + i)] = std::sin(t);
        }
}

void TurnTable::turn(float* rows, int32_t n, int64_t stride, const int32_t* positions, int32_t base, int sign) const {
    double c0[kMaxHeadDim / 2], s0[kMaxHeadDim / 2];
    for (int32_t i = 0; i < pairs; ++i) {
        c0[i] = std::cos(double(base) * angles[size_t(i)]);
        s0[i] = std::sin(double(base) * angles[size_t(i)]);
    }
    for (int32_t t = 0; t < n; ++t) {
        const int64_t delta = int64_t(positions[t]) - base;
        float* x = rows + t * stride;
        for (int32_t i = 0; i < pairs; ++i) {
            const bool near = delta >= 0 && delta < kPageTokens; // else a gap in the positions
            const double cd = near ? cosine[size_t(delta * pairs + i)] : std::cos(double(delta) * angles[size_t(i)]);
            const double sd = near ? sine[size_t(delta * pairs + i)] : std::sin(double(delta) * angles[size_t(i)]);
            const float c = float(c0[i] * cd - s0[i] * sd);
            const float s = float(sign) * float(s0[i] * cd + c0[i] * sd);
            const auto [a, b] = embedding.pair(i);
            const float xa = x[a], xb = x[b];
            const float ac = xa * c, bs = xb * s, as = xa * s, bc = xb * c;
            x[a] = ac - bs;
            x[b] = as + bc;
        }
    }
}

namespace {

void restore_page(const kernels::Table& table, const Basis& basis, int32_t head, int32_t first, int32_t n, float* out,
                  int64_t stride) {
    const Page& page = basis.page(head);
    table.restore(*page.layout, page.bytes(), first, n, out, stride);
}

void undo_transform(const kernels::Table& table, const Basis& basis, int32_t first, int32_t n, int32_t dim, float* out,
                    int64_t stride, Scratch& scratch) {
    const Transform& transform = basis.plan->transform;
    const int32_t width = transform.joined * dim;
    float* work = scratch.floats(Scratch::basis, size_t(width));
    if (transform.joined == 1) {
        restore_page(table, basis, 0, first, n, out, stride);
        for (int32_t t = 0; t < n; ++t)
            transform.inverse(out + t * stride, dim, work);
        return;
    }
    float* rows = scratch.floats(Scratch::joined, size_t(n) * size_t(width));
    for (int32_t h = 0; h < transform.joined; ++h)
        restore_page(table, basis, h, first, n, rows + h * dim, width);
    for (int32_t t = 0; t < n; ++t) {
        float* row = rows + int64_t(t) * width;
        transform.inverse(row, width, work);
        std::copy_n(row + basis.head * dim, dim, out + t * stride);
    }
}

} // namespace

void restore_rows(const kernels::Table& table, const Basis& basis, int32_t first, int32_t n, int32_t dim, float* out,
                  int64_t stride, Scratch& scratch) {
    if (basis.plan->transform.identity())
        restore_page(table, basis, 0, first, n, out, stride);
    else
        undo_transform(table, basis, first, n, dim, out, stride, scratch);
    if (basis.mean)
        basis.mean->add(basis.plan->mean.data(), 1.0f, out, n, stride, dim, basis.positions + first, basis.base);
    if (basis.turn) basis.turn->turn(out, n, stride, basis.positions + first, basis.base, 1);
    if (!basis.pins) return;
    const std::vector<uint16_t>& pinned = basis.plan->pinned;
    for (size_t i = 0; i < pinned.size(); ++i) {
        const int32_t row = pinned[i];
        if (row < first || row >= first + n) continue;
        const size_t row_bytes = size_t(dim) * bytes_of(basis.pin_type);
        table.load_raw(basis.pin_type, basis.pins + i * row_bytes, 1, dim, out + (row - first) * stride, dim);
    }
}

} // namespace kvmosaic
