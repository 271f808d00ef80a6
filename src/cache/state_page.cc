#include "cache/state_page.h"

#include <algorithm>
#include <cmath>

namespace kvmosaic::state {

Ladder ladder_of(const PageLayout& page) {
    Ladder ladder;
    if (page.kind != StoreKind::tiered) return ladder;
    ladder.push(16, page.raw_depth);
    for (int t = 0; t < page.tier_count; ++t)
        ladder.push(page.tiers[size_t(t)].bits, page.tiers[size_t(t)].live);
    ladder.push(0, page.zero_bits);
    return ladder;
}

void put_ladder(Writer* w, const Ladder& ladder) {
    w->put(ladder.count);
    for (int t = 0; t < ladder.count; ++t) {
        w->put(ladder.tiers[size_t(t)].bits);
        w->put(ladder.tiers[size_t(t)].channels);
    }
}

void get_ladder(Reader* r, const StoreSpec& store, int32_t dim, Ladder* ladder) {
    *ladder = Ladder();
    const int tiers = r->get<uint8_t>("tiers");
    if (tiers > kMaxTiers) r->refuse("tiers: " + std::to_string(tiers) + " are more than " + std::to_string(kMaxTiers));
    for (int t = 0; r->ok() && t < tiers; ++t) {
        const uint8_t bits = r->get<uint8_t>("tier bits");
        const uint16_t channels = r->get<uint16_t>("tier channels");
        r->expect(channels > 0, "tier channels: a tier is empty");
        ladder->push(bits, channels);
    }
    if (store.kind == StoreKind::tiered && r->ok()) {
        const Status st = validate(*ladder, dim, store);
        if (!st) r->refuse("tiers: " + st.message());
    }
}

bool all_finite(RawType type, const uint8_t* values, size_t count) {
    const uint16_t exponent = type == RawType::f16 ? 0x7C00 : 0x7F80; // bf16 and the upper half of f32
    const size_t width = bytes_of(type);
    bool finite = true;
    for (size_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, values + i * width + width - 2, 2);
        finite &= (bits & exponent) != exponent;
    }
    return finite;
}

namespace {

bool params_finite(ParamType type, const uint8_t* values, size_t count) {
    if (type == ParamType::f16) return all_finite(RawType::f16, values, count);
    if (type == ParamType::bf16) return all_finite(RawType::bf16, values, count);
    return std::none_of(values, values + count, [](uint8_t b) { return (b & 0x7F) == 0x7F; });
}

// The map must name every channel once.
bool permutation(const PageLayout& page, const uint8_t* map) {
    const bool wide = page.map_bytes != page.dim;
    std::array<bool, kMaxHeadDim> seen{};
    for (size_t i = 0; i < page.dim; ++i) {
        uint16_t channel = map[i];
        if (wide) std::memcpy(&channel, map + 2 * i, 2);
        if (channel >= page.dim || seen[channel]) return false;
        seen[channel] = true;
    }
    return true;
}

} // namespace

std::string page_fault(const PageLayout& page, const uint8_t* bytes) {
    const size_t params = size_t(page.groups) * page.columns;
    const bool planes = in_planes(page.rule); // whose parameters are numbers whatever their bits are, but for the units
    if (planes && !all_finite(RawType::f16, bytes + page.unit_offset, page.side == Side::key ? 1 : 2))
        return "units: a value is not finite";
    if (!planes && page.has_scales() && !params_finite(page.params, bytes + page.scale_offset, params))
        return "scales: a value is not finite";
    if (!planes && page.has_offsets() && !params_finite(page.params, bytes + page.zero_offset, params))
        return "offsets: a value is not finite";
    if (page.raw_depth > 0 && !all_finite(RawType::f16, bytes + page.raw_offset, size_t(page.raw_depth) * page.lanes))
        return "raw channels: a value is not finite";
    if (page.map_bytes > 0 && !permutation(page, bytes + page.map_offset))
        return "channel map: no permutation of 0.." + std::to_string(page.dim - 1);
    for (size_t i = 0; i < size_t(page.outliers) * kPageTokens; ++i) {
        uint16_t slot[2]; // channel, value
        std::memcpy(slot, bytes + page.outlier_offset + 4 * i, 4);
        if (slot[0] != 0xFFFF && slot[0] >= page.dim)
            return "outliers: channel " + std::to_string(slot[0]) + " is outside 0.." + std::to_string(page.dim - 1);
        if ((slot[1] & 0x7C00) == 0x7C00) return "outliers: a value is not finite";
    }
    if (page.levels == 3) {
        const uint8_t* codes = bytes;
        const size_t count = size_t(page.lane_blocks) * page.lane_block_bytes;
        if (std::any_of(codes, codes + count, [](uint8_t b) { return b > 242; }))
            return "codes: a byte is above 242, which no five of three levels make";
    }
    return {};
}

} // namespace kvmosaic::state
