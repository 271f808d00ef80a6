// Pages: rows to codes and back.
#include <algorithm>
#include <cmath>

#include "kernels/grid.h"
#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::ref {
namespace {

constexpr int kDigits = 5; // codes of three levels in a byte
constexpr int kPower[kDigits] = {1, 3, 9, 27, 81};
constexpr uint16_t kNoChannel = 0xFFFF; // an outlier slot without one

uint8_t* digit_byte(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, const uint8_t* bytes) {
    return const_cast<uint8_t*>(bytes) + int64_t(lane / kLaneBlock) * page.lane_block_bytes + tier.offset +
           pos / kDigits * kLaneBlock + lane % kLaneBlock;
}

// Adds a code to bytes that hold 0 for it.
void put_code(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, int code, uint8_t* bytes) {
    if (page.levels == 3) {
        uint8_t* at = digit_byte(page, tier, lane, pos, bytes);
        *at = uint8_t(*at + code * kPower[pos % kDigits]);
        return;
    }
    CodeSite sites[2];
    const int count = code_sites(page, tier, lane, pos, sites);
    for (int i = 0; i < count; ++i) {
        const int plane = (code >> sites[i].weight) & ((1 << sites[i].width) - 1);
        bytes[sites[i].byte] = uint8_t(bytes[sites[i].byte] | (plane << sites[i].shift));
    }
}

int get_code(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, const uint8_t* bytes) {
    if (page.levels == 3) return *digit_byte(page, tier, lane, pos, bytes) / kPower[pos % kDigits] % 3;
    CodeSite sites[2];
    const int count = code_sites(page, tier, lane, pos, sites);
    int code = 0;
    for (int i = 0; i < count; ++i) {
        const int plane = (bytes[sites[i].byte] >> sites[i].shift) & ((1 << sites[i].width) - 1);
        code |= plane << sites[i].weight;
    }
    return code;
}

void put_grid(const PageLayout& page, int32_t group, int32_t column, const Grid& grid, uint8_t* bytes) {
    const uint32_t i = uint32_t(group) * page.columns + uint32_t(column);
    if (page.has_scales()) store(page.params, bytes + page.scale_offset, i, grid.stored_s);
    if (page.has_offsets()) store(page.params, bytes + page.zero_offset, i, grid.stored_z);
}

float get_value(const PageLayout& page, int bits, int32_t group, int32_t column, int code, const uint8_t* bytes) {
    const uint32_t i = uint32_t(group) * page.columns + uint32_t(column);
    float s = page.has_scales() ? load(page.params, bytes + page.scale_offset, i) : 1.0f;
    float z = page.has_offsets() ? load(page.params, bytes + page.zero_offset, i) : 0.0f;
    open_grid(page.rule, bits, page.levels, &s, &z);
    return decode(s, z, page.book ? page.book[code] : float(code));
}

// ---- one group: x(0) .. x(n - 1) in the order of tokens or channels ----

GridForm form_of(const PageLayout& page, int bits) { return {page.rule, page.params, bits, page.levels, page.clip}; }

template <class At>
Grid fit_range(const GridForm& form, int32_t n, At x) {
    float min = x(0), max = x(0);
    for (int32_t i = 1; i < n; ++i) {
        min = std::min(min, x(i));
        max = std::max(max, x(i));
    }
    return make_grid(form, min, max);
}

// The better of two grids by the sum of |decoded - x|; equal sums go to the asymmetric one.
template <class At>
Grid fit_hybrid(GridForm form, int32_t n, At x) {
    const bool two = form.rule == GridRule::hybrid_1bit;
    form.rule = GridRule::symmetric;
    const Grid symmetric = fit_range(form, n, x);
    form.rule = GridRule::asym;
    if (two) form.bits = 1;
    Grid asym = fit_range(form, n, x);
    const auto error = [&](const Grid& grid) {
        float sum = 0.0f;
        for (int32_t i = 0; i < n; ++i)
            sum += magnitude(decode(grid.s, grid.z, float(code_of(grid, x(i)))) - x(i));
        return sum;
    };
    if (error(symmetric) < error(asym)) return symmetric;
    asym.stored_s = -asym.stored_s; // the flag: the sign bit, of a scale of 0 too
    return asym;
}

template <class At>
Grid fit_norm(const PageLayout& page, int bits, int32_t n, At x, int* codes) {
    Grid grid;
    const float norm = std::sqrt(sum_squares(n, x));
    const bool flat = !(norm >= kSmallestScale) || norm > kGridLimit;
    const float unit = flat ? 0.0f : float(std::sqrt(double(n))) / norm;
    for (int32_t i = 0; i < n; ++i)
        codes[i] = flat ? 0 : book_code(page.book, bits, x(i) * unit);
    if (flat) return grid;
    const float levels = std::sqrt(sum_squares(n, [&](int32_t i) { return page.book[codes[i]]; }));
    grid.stored_s = grid.s = rounded(page.params, norm / levels);
    return grid;
}

// [min, max] over the values that are not kept apart maps to [-1, 1].
template <class At, class Apart>
Grid fit_book_range(const PageLayout& page, int32_t n, At x, Apart apart) {
    Grid grid;
    float min = 0.0f, max = 0.0f;
    bool any = false;
    for (int32_t i = 0; i < n; ++i) {
        if (apart(i)) continue;
        min = any ? std::min(min, x(i)) : x(i);
        max = any ? std::max(max, x(i)) : x(i);
        any = true;
    }
    min = std::fmin(std::fmax(min, -kGridLimit), kGridLimit) + 0.0f;
    max = std::fmin(std::fmax(max, -kGridLimit), kGridLimit) + 0.0f;
    const float low = 0.5f * min, high = 0.5f * max;
    grid.s = rounded(page.params, high - low);
    if (grid.s < kSmallestScale) grid.s = 0.0f;
    grid.z = rounded(page.params, high + low);
    grid.inverse = grid.s == 0.0f ? 0.0f : 1.0f / grid.s;
    grid.stored_s = grid.s, grid.stored_z = grid.z;
    return grid;
}

// Scale, offset and codes of one group under every rule. apart(i): value i is kept apart as an outlier.
template <class At, class Apart>
Grid fit(const PageLayout& page, int bits, int32_t n, At x, Apart apart, int* codes) {
    Grid grid;
    switch (page.rule) {
    case GridRule::codebook_norm:
        return fit_norm(page, bits, n, x, codes);
    case GridRule::codebook_fixed:
        grid.s = grid.inverse = 1.0f;
        break;
    case GridRule::codebook_range:
        grid = fit_book_range(page, n, x, apart);
        break;
    case GridRule::hybrid_1bit:
    case GridRule::hybrid_4level:
        grid = fit_hybrid(form_of(page, bits), n, x);
        break;
    default:
        grid = fit_range(form_of(page, bits), n, x);
        break;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (!page.book)
            codes[i] = code_of(grid, x(i));
        else
            codes[i] = grid.s == 0.0f ? 0 : book_code(page.book, bits, (x(i) - grid.z) * grid.inverse);
    }
    return grid;
}

// ---- outliers of a token ----

uint8_t* outlier_at(const PageLayout& page, int32_t token, int32_t i, const uint8_t* bytes) {
    return const_cast<uint8_t*>(bytes) + page.outlier_offset + (int64_t(token) * page.outliers + i) * 4;
}

// channels: [page.outliers], ascending. Where each value has been scaled to a nominal [-1, 1], the largest |x| beyond
// it; else the ends of the row: the largest and smallest in turn. Equal values go to the lower channel.
void find_outliers(const PageLayout& page, const float* row, uint16_t* channels) {
    const int32_t k = page.outliers;
    bool taken[kMaxHeadDim] = {};
    for (int32_t i = 0; i < k; ++i) {
        int32_t best = -1;
        for (int32_t c = 0; c < page.dim; ++c) {
            if (taken[c]) continue;
            const bool fixed = page.rule == GridRule::codebook_fixed;
            if (fixed && !(magnitude(row[c]) > 1.0f)) continue;
            const bool better = best < 0 || (fixed        ? magnitude(row[c]) > magnitude(row[best])
                                             : i % 2 == 0 ? row[c] > row[best]
                                                          : row[c] < row[best]);
            if (better) best = c;
        }
        if (best >= 0) taken[best] = true;
    }
    int32_t n = 0;
    for (int32_t c = 0; c < page.dim && n < k; ++c)
        if (taken[c]) channels[n++] = uint16_t(c);
    while (n < k)
        channels[n++] = kNoChannel;
}

} // namespace

void put_outliers(const PageLayout& page, const float* row, const uint16_t* channels, int32_t token, uint8_t* bytes) {
    for (int32_t i = 0; i < page.outliers; ++i) {
        uint8_t* at = outlier_at(page, token, i, bytes);
        at[0] = uint8_t(channels[i] & 0xFF), at[1] = uint8_t(channels[i] >> 8);
        store(RawType::f16, at + 2, 0, channels[i] == kNoChannel ? 0.0f : row[channels[i]]);
    }
}

namespace {

// ---- groups of channels of one token ----

// Where token and channel lie in the matrix of a page without a map.
int32_t lane_of(const PageLayout& page, int32_t token, int32_t channel) {
    return page.side == Side::key ? token : channel;
}
int32_t depth_of(const PageLayout& page, int32_t token, int32_t channel) {
    return page.side == Side::key ? channel : token;
}

void encode_token(const PageLayout& page, const float* row, int32_t token, uint8_t* bytes) {
    const TierLayout& tier = page.tiers[0];
    uint16_t apart[256];
    if (page.outliers > 0) find_outliers(page, row, apart);
    const auto is_apart = [&](int32_t c) {
        for (int32_t i = 0; i < page.outliers; ++i)
            if (apart[i] == c) return true;
        return false;
    };
    int codes[kMaxHeadDim];
    for (int32_t group = 0; group < page.groups; ++group) {
        const int32_t lo = page.group_first(group), hi = std::min<int32_t>(page.group_first(group + 1), page.dim);
        const Grid grid = fit(
            page, tier.bits, hi - lo, [&](int32_t i) { return row[lo + i]; },
            [&](int32_t i) { return is_apart(lo + i); }, codes);
        put_grid(page, group, token, grid, bytes);
        for (int32_t c = lo; c < hi; ++c)
            put_code(page, tier, lane_of(page, token, c), depth_of(page, token, c), codes[c - lo], bytes);
    }
    put_outliers(page, row, apart, token, bytes);
}

void restore_token(const PageLayout& page, const uint8_t* bytes, int32_t token, float* out) {
    const TierLayout& tier = page.tiers[0];
    for (int32_t c = 0; c < page.dim; ++c) {
        const int code = get_code(page, tier, lane_of(page, token, c), depth_of(page, token, c), bytes);
        out[c] = get_value(page, tier.bits, page.group_at(c), token, code, bytes);
    }
    for (int32_t i = 0; i < page.outliers; ++i) {
        const uint8_t* at = outlier_at(page, token, i, bytes);
        const int32_t channel = at[0] | (at[1] << 8);
        if (channel < page.dim) out[channel] = load(RawType::f16, at + 2, 0);
    }
}

// ---- groups of tokens of one channel ----

bool nothing_apart(int32_t) { return false; }

// Key pages. rows points at the row of token `lo`; tokens lo .. hi - 1 are the live part of `group`.
void encode_key_group(const PageLayout& page, const uint16_t* channels, const float* rows, int32_t group, int32_t lo,
                      int32_t hi, uint8_t* bytes) {
    const auto channel = [&](int32_t ladder_pos) { return channels ? int32_t(channels[ladder_pos]) : ladder_pos; };
    int codes[kPageTokens];
    for (int32_t r = 0; r < page.raw_depth; ++r) {
        for (int32_t lane = lo; lane < hi; ++lane)
            store(RawType::f16, bytes + page.raw_offset, uint32_t(r) * page.lanes + uint32_t(lane),
                  rows[int64_t(lane - lo) * page.dim + channel(r)]);
    }
    for (int t = 0; t < page.tier_count; ++t) {
        const TierLayout& tier = page.tiers[size_t(t)];
        for (int32_t pos = 0; pos < tier.live; ++pos) {
            const float* x = rows + channel(tier.first + pos);
            const Grid grid = fit(
                page, tier.bits, hi - lo, [&](int32_t i) { return x[int64_t(i) * page.dim]; }, nothing_apart, codes);
            put_grid(page, group, tier.param_first + pos, grid, bytes);
            for (int32_t lane = lo; lane < hi; ++lane)
                put_code(page, tier, lane, pos, codes[lane - lo], bytes);
        }
    }
    for (int32_t i = 0; i < page.zero_bits; ++i) {
        const float* x = rows + channel(page.dim - page.zero_bits + i);
        const Grid grid = fit(
            page, 0, hi - lo, [&](int32_t t) { return x[int64_t(t) * page.dim]; }, nothing_apart, codes);
        put_grid(page, group, page.coded - page.zero_bits + i, grid, bytes);
    }
}

// Value pages; as above.
void encode_value_group(const PageLayout& page, const float* rows, int32_t group, int32_t lo, int32_t hi,
                        uint8_t* bytes) {
    int codes[kPageTokens];
    for (int32_t lane = 0; lane < page.lanes; ++lane) {
        const Grid grid = fit(
            page, page.tiers[0].bits, hi - lo, [&](int32_t i) { return rows[int64_t(i) * page.dim + lane]; },
            nothing_apart, codes);
        put_grid(page, group, lane, grid, bytes);
        for (int32_t token = lo; token < hi; ++token)
            put_code(page, page.tiers[0], lane, token, codes[token - lo], bytes);
    }
}

void put_map(const PageLayout& page, const uint16_t* channels, uint8_t* bytes) {
    for (uint32_t i = 0; i < page.dim; ++i) {
        uint8_t* at = bytes + page.map_offset;
        if (page.map_bytes == page.dim) {
            at[i] = uint8_t(channels[i]);
        } else {
            at[2 * i] = uint8_t(channels[i] & 0xFF);
            at[2 * i + 1] = uint8_t(channels[i] >> 8);
        }
    }
}

int32_t map_at(const PageLayout& page, const uint8_t* bytes, int32_t ladder_pos) {
    if (page.map_bytes == 0) return ladder_pos;
    const uint8_t* at = bytes + page.map_offset;
    return page.map_bytes == page.dim ? at[ladder_pos] : at[2 * ladder_pos] | (at[2 * ladder_pos + 1] << 8);
}

void restore_key_row(const PageLayout& page, const uint8_t* bytes, int32_t lane, float* out) {
    const int32_t group = page.group_at(lane);
    for (int32_t r = 0; r < page.raw_depth; ++r)
        out[map_at(page, bytes, r)] =
            load(RawType::f16, bytes + page.raw_offset, uint32_t(r) * page.lanes + uint32_t(lane));
    for (int t = 0; t < page.tier_count; ++t) {
        const TierLayout& tier = page.tiers[size_t(t)];
        for (int32_t pos = 0; pos < tier.live; ++pos)
            out[map_at(page, bytes, tier.first + pos)] = get_value(page, tier.bits, group, tier.param_first + pos,
                                                                   get_code(page, tier, lane, pos, bytes), bytes);
    }
    for (int32_t i = 0; i < page.zero_bits; ++i)
        out[map_at(page, bytes, page.dim - page.zero_bits + i)] =
            get_value(page, 0, group, page.coded - page.zero_bits + i, 0, bytes);
}

void restore_value_row(const PageLayout& page, const uint8_t* bytes, int32_t token, float* out) {
    for (int32_t lane = 0; lane < page.lanes; ++lane)
        out[lane] = get_value(page, page.tiers[0].bits, page.group_at(token), lane,
                              get_code(page, page.tiers[0], lane, token, bytes), bytes);
}

// Whether a group's values are channels of one token.
bool in_token(const PageLayout& page) { return (page.side == Side::key) == page.along_depth; }

} // namespace

void encode(const PageLayout& page, const uint16_t* channels, const float* rows, int32_t first, int32_t n,
            uint8_t* bytes) {
    if (page.kind == StoreKind::raw) {
        for (int32_t i = 0; i < n * page.dim; ++i)
            store(page.raw, bytes, uint32_t(first * page.dim + i), rows[i]);
        return;
    }
    if (page.map_bytes != 0)
        put_map(page, channels, bytes);
    else
        channels = nullptr; // nobody could find them again
    if (in_planes(page.rule)) {
        encode_planes(page, channels, rows, bytes);
        return;
    }
    if (in_token(page)) {
        for (int32_t i = 0; i < n; ++i)
            encode_token(page, rows + int64_t(i) * page.dim, first + i, bytes);
        return;
    }
    for (int32_t lo = first; lo < first + n;) {
        const int32_t group = page.group_at(lo), hi = std::min(page.group_first(group + 1), first + n);
        const float* x = rows + int64_t(lo - first) * page.dim;
        if (page.side == Side::key)
            encode_key_group(page, channels, x, group, lo, hi, bytes);
        else
            encode_value_group(page, x, group, lo, hi, bytes);
        lo = hi;
    }
}

void restore(const PageLayout& page, const uint8_t* bytes, int32_t first, int32_t n, float* out, int64_t stride) {
    uint16_t channels[kMaxHeadDim];
    for (int32_t p = 0; in_planes(page.rule) && p < page.dim; ++p)
        channels[p] = uint16_t(map_at(page, bytes, p));
    for (int32_t i = 0; i < n; ++i) {
        const int32_t row = first + i;
        float* to = out + i * stride;
        if (in_planes(page.rule)) {
            restore_planes_row(page, bytes, channels, row, to);
        } else if (page.kind == StoreKind::raw) {
            for (int32_t d = 0; d < page.dim; ++d)
                to[d] = load(page.raw, bytes, uint32_t(row * page.dim + d));
        } else if (in_token(page)) {
            restore_token(page, bytes, row, to);
        } else if (page.side == Side::key) {
            restore_key_row(page, bytes, row, to);
        } else {
            restore_value_row(page, bytes, row, to);
        }
    }
}

} // namespace kvmosaic::kernels::ref
