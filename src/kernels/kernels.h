// The kernels that the cache calls, as a table of functions per instruction set. Kernels know stores and head sizes;
// they know no methods, windows or sequences. All entries are thread-safe and allocate nothing.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvmosaic/store.h"

namespace kvmosaic::kernels {

// What stands for an infinity among raw rows of any type: large, yet products with it stay finite in fp32.
inline constexpr float kInfinityStandIn = 65504.0f;

struct Counters {
    int64_t non_finite = 0, saturated = 0;
};

// Softmax state of rows over a part of the context (FlashAttention's online softmax, arXiv 2205.14135):
// m = running maximum, l = sum of exp(s - m), o = sum of exp(s - m) v. Empty: m = -inf, l = 0, o = 0.
struct RowState {
    float m, l;
};

// Rows of weights that meet the codes of a page, all of them at once: out[r][lane] = scale * sum over depth of
// w[r][depth] * value(lane, depth), or added to `out`. Key side: w = queries in the page's basis (the page's own
// channel map is applied here), lanes are tokens, out = scores. Value side: w = weights of tokens, lanes are channels.
struct CodeRows {
    const float* w = nullptr; // [n][stride], depth values a row
    int64_t stride = 0;
    int32_t n = 0;
    const int32_t *lo = nullptr, *hi = nullptr; // [n] depth outside [lo, hi) counts as weight 0; null: all of it
    int32_t depth = 0;                          // behind it every weight is 0
    int32_t lane_first = 0, lane_end = 0;       // lanes that are wanted; whole lane blocks are written
    float scale = 1.0f;
    bool add = false;
    bool fast = false;             // weights rounded to 8 bits (error up to 5e-2) instead of 16 (below 5e-4)
    const uint8_t* next = nullptr; // bytes of the page that will be read after this one, about as long: fetched ahead
    float* out = nullptr;          // [n][out_stride]
    int64_t out_stride = 0;
};
inline constexpr size_t kCodesWorkBytes = 192 * 1024;

struct Table {
    const char* isa;

    // Encodes `n` rows of a page. rows: [n][dim] fp32, finite, in token order, to become rows first .. first + n - 1.
    // Groups of tokens: first and n are multiples of the group, or the rows complete the page. Groups of channels: any
    // n. `channels`: [dim] ladder order for tiered layouts with a map; not read otherwise. The page was zeroed when it
    // was opened. Numerics contract: docs/numerics.md; codes and metadata equal the reference bit for bit.
    void (*encode)(const PageLayout& page, const uint16_t* channels, const float* rows, int32_t first, int32_t n,
                   uint8_t* bytes);
    // Decodes rows first .. first + n - 1 to fp32, channels in model order. out: [n][stride], dim values a row.
    void (*restore)(const PageLayout& page, const uint8_t* bytes, int32_t first, int32_t n, float* out, int64_t stride);

    // Raw rows. store_raw replaces NaN by 0 and infinities by +-kInfinityStandIn, saturates, and counts both.
    void (*load_raw)(RawType type, const uint8_t* rows, int32_t n, int32_t dim, float* out, int64_t stride);
    void (*store_raw)(RawType type, const float* x, int32_t dim, uint8_t* row, Counters* counters);
    // sum[d] += |round(q[d])| with q rounded to `type` first (non-finite q counts as 0), one vector.
    void (*add_abs)(RawType type, const float* q, int32_t dim, float* sum);
    void (*add_squares)(RawType type, const float* q, int32_t dim, float* sum); // the same with the square

    // s[r][t] = scale * (q[r] . k[t]); q: [nq][dim] dense; k: [n][k_stride]; s: [nq][s_stride]. The order of sums of
    // one (r, t) depends on dim alone, never on nq or n.
    void (*scores)(const float* q, int32_t nq, const float* k, int64_t k_stride, int32_t n, int32_t dim, float scale,
                   float* s, int64_t s_stride);
    // Attention straight from codes: whether it serves a layout, and one side of a page. work: [kCodesWorkBytes],
    // aligned to 64. A row's result depends on that row alone.
    bool (*reads_codes)(const PageLayout& page);
    void (*weigh)(const PageLayout& page, const uint8_t* bytes, const CodeRows& rows, uint8_t* work);

    // One row: s[0..n) become exp(s - m'), state moves to m', o is rescaled. n may be 0.
    void (*softmax)(float* s, int32_t n, RowState* state, float* o, int32_t dim);
    // o[r] += sum over t in [lo[r], hi[r]) of p[r][t] v[t], in order of t; o: [nq][o_stride].
    void (*mix)(const float* p, int64_t p_stride, const int32_t* lo, const int32_t* hi, int32_t nq, const float* v,
                int64_t v_stride, int32_t dim, float* o, int64_t o_stride);
};

// Tables that this machine can run, best last; the scalar one is always first.
const std::vector<const Table*>& available();
// "" gives the best one, or the one that KVMOSAIC_ISA names. Null when the name is unknown or this machine lacks it.
const Table* find(std::string_view isa);
// Plain loops, double accumulation: the specification in code (src/kernels/ref/).
const Table& reference();

// Adds the state of a later part of the context to (a, oa): order matters for bits, not for meaning.
void merge(RowState* a, float* oa, const RowState& b, const float* ob, int32_t dim);

} // namespace kvmosaic::kernels
