// Pages: rows to codes and back.
#include <algorithm>

#include "kernels/grid.h"
#include "kernels/ref/ref.h"

namespace kvmosaic::kernels::ref {
namespace {

void put_code(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, int code, uint8_t* bytes) {
    CodeSite sites[2];
    const int count = code_sites(page, tier, lane, pos, sites);
    for (int i = 0; i < count; ++i) {
        const int plane = (code >> sites[i].weight) & ((1 << sites[i].width) - 1);
        bytes[sites[i].byte] = uint8_t(bytes[sites[i].byte] | (plane << sites[i].shift));
    }
}

int get_code(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, const uint8_t* bytes) {
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
    const uint32_t i = uint32_t(group) * page.coded + uint32_t(column);
    store(page.params, bytes + page.scale_offset, i, grid.s);
    store(page.params, bytes + page.zero_offset, i, grid.z);
}

float get_value(const PageLayout& page, int32_t group, int32_t column, int code, const uint8_t* bytes) {
    const uint32_t i = uint32_t(group) * page.coded + uint32_t(column);
    return decode(load(page.params, bytes + page.scale_offset, i), load(page.params, bytes + page.zero_offset, i),
                  code);
}

Grid fit(const PageLayout& page, int bits, const float* x, int32_t n, int64_t stride) {
    float min = x[0], max = x[0];
    for (int32_t i = 1; i < n; ++i) {
        min = std::min(min, x[i * stride]);
        max = std::max(max, x[i * stride]);
    }
    return make_grid(page.params, bits, min, max);
}

// Key pages: the group runs over tokens. rows points at the row of token `lo`; tokens lo .. hi - 1 are the live part of
// `group`.
void encode_key_group(const PageLayout& page, const uint16_t* channels, const float* rows, int32_t group, int32_t lo,
                      int32_t hi, uint8_t* bytes) {
    const auto channel = [&](int32_t ladder_pos) { return channels ? int32_t(channels[ladder_pos]) : ladder_pos; };
    for (int32_t r = 0; r < page.raw_depth; ++r) {
        for (int32_t lane = lo; lane < hi; ++lane)
            store(RawType::f16, bytes + page.raw_offset, uint32_t(r) * page.lanes + uint32_t(lane),
                  rows[int64_t(lane - lo) * page.dim + channel(r)]);
    }
    for (int t = 0; t < page.tier_count; ++t) {
        const TierLayout& tier = page.tiers[size_t(t)];
        for (int32_t pos = 0; pos < tier.live; ++pos) {
            const float* x = rows + channel(tier.first + pos);
            const Grid grid = fit(page, tier.bits, x, hi - lo, page.dim);
            put_grid(page, group, tier.param_first + pos, grid, bytes);
            for (int32_t lane = lo; lane < hi; ++lane)
                put_code(page, tier, lane, pos, code_of(grid, x[int64_t(lane - lo) * page.dim]), bytes);
        }
    }
    for (int32_t i = 0; i < page.zero_bits; ++i) {
        const float* x = rows + channel(page.dim - page.zero_bits + i);
        put_grid(page, group, page.coded - page.zero_bits + i, fit(page, 0, x, hi - lo, page.dim), bytes);
    }
}

// Value pages: the group runs over channels, one token at a time.
void encode_value_row(const PageLayout& page, const float* row, int32_t token, uint8_t* bytes) {
    const TierLayout& tier = page.tiers[0];
    for (int32_t group = 0; group < page.groups; ++group) {
        const int32_t lo = group * page.group, hi = std::min<int32_t>(lo + page.group, page.lanes);
        const Grid grid = fit(page, tier.bits, row + lo, hi - lo, 1);
        put_grid(page, group, token, grid, bytes);
        for (int32_t lane = lo; lane < hi; ++lane)
            put_code(page, tier, lane, token, code_of(grid, row[lane]), bytes);
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
    const int32_t group = lane / page.group;
    for (int32_t r = 0; r < page.raw_depth; ++r)
        out[map_at(page, bytes, r)] =
            load(RawType::f16, bytes + page.raw_offset, uint32_t(r) * page.lanes + uint32_t(lane));
    for (int t = 0; t < page.tier_count; ++t) {
        const TierLayout& tier = page.tiers[size_t(t)];
        for (int32_t pos = 0; pos < tier.live; ++pos)
            out[map_at(page, bytes, tier.first + pos)] =
                get_value(page, group, tier.param_first + pos, get_code(page, tier, lane, pos, bytes), bytes);
    }
    for (int32_t i = 0; i < page.zero_bits; ++i)
        out[map_at(page, bytes, page.dim - page.zero_bits + i)] =
            get_value(page, group, page.coded - page.zero_bits + i, 0, bytes);
}

void restore_value_row(const PageLayout& page, const uint8_t* bytes, int32_t token, float* out) {
    for (int32_t lane = 0; lane < page.lanes; ++lane)
        out[lane] = get_value(page, lane / page.group, token, get_code(page, page.tiers[0], lane, token, bytes), bytes);
}

} // namespace

void encode(const PageLayout& page, const uint16_t* channels, const float* rows, int32_t first, int32_t n,
            uint8_t* bytes) {
    if (page.kind == StoreKind::raw) {
        for (int32_t i = 0; i < n * page.dim; ++i)
            store(page.raw, bytes, uint32_t(first * page.dim + i), rows[i]);
        return;
    }
    if (page.map_bytes != 0) put_map(page, channels, bytes);
    if (page.side == Side::value) {
        for (int32_t i = 0; i < n; ++i)
            encode_value_row(page, rows + int64_t(i) * page.dim, first + i, bytes);
        return;
    }
    for (int32_t lo = first; lo < first + n;) {
        const int32_t group = lo / page.group, hi = std::min((group + 1) * int32_t(page.group), first + n);
        encode_key_group(page, channels, rows + int64_t(lo - first) * page.dim, group, lo, hi, bytes);
        lo = hi;
    }
}

void restore(const PageLayout& page, const uint8_t* bytes, int32_t first, int32_t n, float* out, int64_t stride) {
    for (int32_t i = 0; i < n; ++i) {
        const int32_t row = first + i;
        float* to = out + i * stride;
        if (page.kind == StoreKind::raw) {
            for (int32_t d = 0; d < page.dim; ++d)
                to[d] = load(page.raw, bytes, uint32_t(row * page.dim + d));
        } else if (page.side == Side::key) {
            restore_key_row(page, bytes, row, to);
        } else {
            restore_value_row(page, bytes, row, to);
        }
    }
}

} // namespace kvmosaic::kernels::ref
