// Pages in planes: rows to codes and back.
#include <algorithm>
#include <cmath>

#include "kernels/planes.h"
#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::ref {
namespace {

// Calls f(byte, shift in the byte, width, shift in the code) for each plane that holds (lane, depth). bits: of the
// code.
template <class Plane>
void each_site(const PageLayout& page, int32_t lane, int32_t depth, int bits, Plane f) {
    const int32_t block = lane / kLaneBlock;
    for (int i = 0; i < page.plane_count; ++i) {
        const PlaneLayout& plane = page.planes[size_t(i)];
        const int shift = plane_shift(plane.role, bits);
        if (shift < 0 || block < plane.block_first || block >= plane.block_first + plane.block_count) continue;
        const int width = width_of(plane.role), per_vector = 32 / width;
        const int32_t at = depth - plane.first, d = at % per_vector;
        f(plane.offset + uint32_t(block - plane.block_first) * plane.stride + uint32_t(at / per_vector) * 32 +
              uint32_t(4 * (lane % kLaneBlock) + d % 4),
          width * (d / 4), width, shift);
    }
}

void put(const PageLayout& page, int32_t lane, int32_t depth, int bits, int code, uint8_t* bytes) {
    each_site(page, lane, depth, bits, [&](uint32_t at, int place, int width, int shift) {
        bytes[at] = uint8_t(bytes[at] | (((code >> shift) & ((1 << width) - 1)) << place));
    });
}

int get(const PageLayout& page, int32_t lane, int32_t depth, int bits, const uint8_t* bytes) {
    int code = 0;
    each_site(page, lane, depth, bits, [&](uint32_t at, int place, int width, int shift) {
        code |= ((bytes[at] >> place) & ((1 << width) - 1)) << shift;
    });
    return code;
}

// ---- keys ----

// Bits of the channel at a ladder position.
int bits_at(const PageLayout& page, int32_t position) {
    for (int i = 0; i < page.tier_count; ++i) {
        const TierLayout& tier = page.tiers[size_t(i)];
        if (position >= tier.first && position < tier.first + tier.live) return tier.bits;
    }
    return 0;
}

// Middle and half range of a channel; of one without codes its mean and standard deviation.
void range_of(const float* x, int64_t stride, int bits, float* middle, float* half) {
    if (bits > 0) {
        float min = x[0], max = x[0];
        for (int32_t t = 1; t < kPageTokens; ++t) {
            min = std::min(min, x[t * stride]);
            max = std::max(max, x[t * stride]);
        }
        *middle = 0.5f * max + 0.5f * min;
        *half = 0.5f * max - 0.5f * min;
    } else {
        float sum = 0.0f, squares = 0.0f;
        for (int32_t t = 0; t < kPageTokens; ++t)
            sum += x[t * stride];
        const float mean = sum * (1.0f / kPageTokens);
        for (int32_t t = 0; t < kPageTokens; ++t) {
            const float e = x[t * stride] - mean, square = e * e;
            squares += square;
        }
        *middle = mean;
        *half = std::sqrt(squares * (1.0f / kPageTokens));
    }
    *half = std::max(*half, magnitude(*middle) / kMostOffset);
}

// In steps of the grid, then by the fourth power of the step.
float fourth_powers(const float* x, int64_t stride, const Grid& grid) {
    const float sum = sum_in_eights(kPageTokens, [&](int32_t t) {
        const float away = x[t * stride] - grid.z, y = away * grid.inverse;
        const float e = y - float(code_of(grid, x[t * stride])), square = e * e;
        return square * square;
    });
    const float square = grid.s * grid.s;
    return sum * (square * square);
}

void encode_keys(const PageLayout& page, const uint16_t* channels, const float* rows, uint8_t* bytes) {
    float middle[kMaxHeadDim], half[kMaxHeadDim], most = 0.0f;
    for (int32_t p = 0; p < page.dim; ++p) {
        range_of(rows + (channels ? channels[p] : p), page.dim, bits_at(page, p), &middle[p], &half[p]);
        most = std::max(most, half[p]);
    }
    store(ParamType::f16, bytes + page.unit_offset, 0, most);
    const float unit = plane_unit(page, bytes, 0);
    for (int32_t p = 0; p < page.dim; ++p) {
        const float* x = rows + (channels ? channels[p] : p);
        const int bits = bits_at(page, p);
        struct Range {
            int code, offset;
            Grid grid;
        };
        const auto range = [&](int a) {
            const int code = log_code(unit, kShrink[a] * half[p], false);
            const float h = log_decode(unit, code, false);
            const int offset = h < kSmallestScale ? 0 : offset_code(middle[p], 16.0f / h);
            return Range{code, offset, open_searched(h, offset, bits)};
        };
        const int first = std::min(kFirstShrink[bits], page.shrinks - 1);
        const int chosen = bits == 0 ? 0 : walk_ranges(first, page.shrinks, [&](int a) {
            return fourth_powers(x, page.dim, range(a).grid);
        });
        const Range best = range(chosen);
        bytes[page.scale_offset + uint32_t(p)] = uint8_t(best.code);
        bytes[page.zero_offset + uint32_t(p)] = uint8_t(int8_t(best.offset));
        for (int32_t t = 0; bits > 0 && t < kPageTokens; ++t)
            put(page, t, p, bits, code_of(best.grid, x[int64_t(t) * page.dim]), bytes);
    }
}

// ---- values ----

// Mean of each channel in steps of a sixteenth of the page's root mean square.
void encode_means(const PageLayout& page, const float* rows, uint8_t* bytes) {
    float sum[kMaxHeadDim] = {}, squares[kMaxHeadDim] = {};
    for (int32_t t = 0; t < kPageTokens; ++t)
        for (int32_t d = 0; d < page.dim; ++d) {
            const float x = rows[int64_t(t) * page.dim + d], square = x * x;
            sum[d] += x;
            squares[d] += square;
        }
    const float total = sum_in_eights(page.dim, [&](int32_t d) { return squares[d]; });
    const float rms = std::sqrt(total / float(kPageTokens * page.dim));
    store(ParamType::f16, bytes + page.unit_offset, 1, rms * 0.0625f);
    const float unit = plane_unit(page, bytes, 1), inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
    for (int32_t d = 0; d < page.dim; ++d)
        bytes[page.zero_offset + uint32_t(d)] = uint8_t(int8_t(offset_code(sum[d] * (1.0f / kPageTokens), inverse)));
}

float mean_at(const PageLayout& page, const uint8_t* bytes, int32_t channel) {
    return float(int8_t(bytes[page.zero_offset + uint32_t(channel)])) * plane_unit(page, bytes, 1);
}

// The step of one token by two rounds of least squares from that of a normal variable.
float fit_step(const PageLayout& page, const float* x) {
    float s = std::sqrt(sum_squares(page.dim, [&](int32_t d) { return x[d]; }) / float(page.dim));
    for (int round = 0; round < 2; ++round) {
        const float inverse = s < kSmallestScale ? 0.0f : 1.0f / s;
        float level[kMaxHeadDim];
        for (int32_t d = 0; d < page.dim; ++d) {
            const int bits = fitted_bits(page, d);
            level[d] = fitted_level(bits, fitted_code(x[d], inverse, bits));
        }
        const float dot = sum_in_eights(page.dim, [&](int32_t d) { return x[d] * level[d]; });
        const float size = sum_squares(page.dim, [&](int32_t d) { return level[d]; });
        s = dot > 0.0f ? dot / size : 0.0f;
    }
    return s;
}

void encode_values(const PageLayout& page, const float* rows, uint8_t* bytes) {
    encode_means(page, rows, bytes);
    float step[kPageTokens], most = 0.0f, mean[kMaxHeadDim], x[kMaxHeadDim];
    for (int32_t d = 0; d < page.dim; ++d)
        mean[d] = mean_at(page, bytes, d);
    const auto centre = [&](int32_t t) {
        for (int32_t d = 0; d < page.dim; ++d)
            x[d] = rows[int64_t(t) * page.dim + d] - mean[d];
    };
    for (int32_t t = 0; t < kPageTokens; ++t) {
        centre(t);
        step[t] = fit_step(page, x);
        most = std::max(most, step[t]);
    }
    store(ParamType::f16, bytes + page.unit_offset, 0, most);
    const float unit = plane_unit(page, bytes, 0);
    for (int32_t t = 0; t < kPageTokens; ++t) {
        const int code = log_code(unit, step[t], true);
        bytes[page.scale_offset + uint32_t(t)] = uint8_t(code);
        const float s = log_decode(unit, code, true), inverse = s < kSmallestScale ? 0.0f : 1.0f / s;
        centre(t);
        for (int32_t d = 0; d < page.dim; ++d) {
            const int bits = fitted_bits(page, d);
            put(page, d, t, bits, fitted_code(x[d], inverse, bits), bytes);
        }
    }
}

} // namespace

void encode_planes(const PageLayout& page, const uint16_t* channels, const float* rows, uint8_t* bytes) {
    if (page.side == Side::key)
        encode_keys(page, channels, rows, bytes);
    else
        encode_values(page, rows, bytes);
}

void restore_planes_row(const PageLayout& page, const uint8_t* bytes, const uint16_t* channels, int32_t token,
                        float* out) {
    const float unit = plane_unit(page, bytes, 0);
    if (page.side == Side::value) {
        const float s = log_decode(unit, bytes[page.scale_offset + uint32_t(token)], true);
        for (int32_t d = 0; d < page.dim; ++d) {
            const int bits = fitted_bits(page, d);
            out[d] = decode(s, mean_at(page, bytes, d), fitted_level(bits, get(page, d, token, bits, bytes)));
        }
        return;
    }
    for (int32_t p = 0; p < page.dim; ++p) {
        const int bits = bits_at(page, p);
        const float h = log_decode(unit, bytes[page.scale_offset + uint32_t(p)], false);
        const Grid grid = open_searched(h, int8_t(bytes[page.zero_offset + uint32_t(p)]), bits);
        const int code = bits > 0 ? get(page, token, p, bits, bytes) : 0;
        out[channels ? channels[p] : p] = bits > 0 ? decode(grid.s, grid.z, float(code)) : grid.z;
    }
}

} // namespace kvmosaic::kernels::ref
