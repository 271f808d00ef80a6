// The reference table's functions; contracts as in kernels/kernels.h. Plain loops, double where sums occur; this is the
// specification in code and is never optimised.
#pragma once

#include "kernels/kernels.h"

namespace kvmosaic::kernels::ref {

void encode(const PageLayout& page, const uint16_t* channels, const float* rows, int32_t first, int32_t n,
            uint8_t* bytes);
void restore(const PageLayout& page, const uint8_t* bytes, int32_t first, int32_t n, float* out, int64_t stride);

// Pages in planes, whole ones. channels: [dim] at each ladder position, or null: the order of the rows.
void encode_planes(const PageLayout& page, const uint16_t* channels, const float* rows, uint8_t* bytes);
void restore_planes_row(const PageLayout& page, const uint8_t* bytes, const uint16_t* channels, int32_t token,
                        float* out);

// Writes the slots of the values that a page keeps apart. channels: [page.outliers], ascending, 0xFFFF in empty slots.
void put_outliers(const PageLayout& page, const float* row, const uint16_t* channels, int32_t token, uint8_t* bytes);

void load_raw(RawType type, const uint8_t* rows, int32_t n, int32_t dim, float* out, int64_t stride);
void store_raw(RawType type, const float* x, int32_t dim, uint8_t* row, Counters* counters);
void add_abs(RawType type, const float* q, int32_t dim, float* sum);
void add_squares(RawType type, const float* q, int32_t dim, float* sum);

void scores(const float* q, int32_t nq, const float* k, int64_t k_stride, int32_t n, int32_t dim, float scale, float* s,
            int64_t s_stride);
bool reads_codes(const PageLayout& page); // all of them
void weigh(const PageLayout& page, const uint8_t* bytes, const CodeRows& rows, uint8_t* work);
void softmax(float* s, int32_t n, RowState* state, float* o, int32_t dim);
void mix(const float* p, int64_t p_stride, const int32_t* lo, const int32_t* hi, int32_t nq, const float* v,
         int64_t v_stride, int32_t dim, float* o, int64_t o_stride);

} // namespace kvmosaic::kernels::ref
