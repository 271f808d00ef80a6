// What the codec tests share: repeatable numbers, pages with guard bytes, and the tables to run on.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kvmosaic/store.h"

namespace kvmosaic::testing {

// splitmix64 (public domain constants by Steele, Lea and Flood, OOPSLA 2014): the same numbers on every machine.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits() {
        uint64_t x = (state_ += 0x9E3779B97F4A7C15ull);
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        return x ^ (x >> 31);
    }
    int32_t below(int32_t n) { return int32_t(bits() % uint64_t(n)); }
    float uniform(float lo, float hi) { return lo + (hi - lo) * float(bits() >> 40) * 0x1p-24f; } // [lo, hi]
    // Sum of 12 uniforms: near normal, no library function whose last bit could differ between machines.
    float normal() {
        float sum = -6.0f;
        for (int i = 0; i < 12; ++i)
            sum += float(bits() >> 48) * 0x1p-16f;
        return sum;
    }

private:
    uint64_t state_;
};

// The reference first, then every table that this machine can run.
inline std::vector<const kernels::Table*> tables() {
    std::vector<const kernels::Table*> all = {&kernels::reference()};
    for (const kernels::Table* t : kernels::available())
        all.push_back(t);
    return all;
}

inline StoreSpec grid_spec(Side side, int bits, int group, ParamType params = ParamType::f16) {
    StoreSpec spec;
    spec.kind = StoreKind::grid;
    spec.bits = uint8_t(bits);
    spec.axis = side == Side::key ? Axis::tokens : Axis::channels;
    spec.group = uint16_t(group);
    spec.params = params;
    return spec;
}

inline StoreSpec tiered_spec(int group, ParamType params = ParamType::f16) {
    StoreSpec spec = grid_spec(Side::key, 0, group, params);
    spec.kind = StoreKind::tiered;
    return spec;
}

inline Ladder ladder_of(std::initializer_list<std::pair<int, int>> tiers) {
    Ladder ladder;
    for (auto [bits, channels] : tiers)
        ladder.push(uint8_t(bits), uint16_t(channels));
    return ladder;
}

// A permutation that is not its own inverse, so that a map applied backwards shows.
inline std::vector<uint16_t> shuffled_channels(int32_t dim, uint64_t seed = 7) {
    std::vector<uint16_t> map(static_cast<size_t>(dim));
    std::iota(map.begin(), map.end(), uint16_t(0));
    Random random(seed);
    for (int32_t i = dim - 1; i > 0; --i)
        std::swap(map[size_t(i)], map[size_t(random.below(i + 1))]);
    return map;
}

// Zeroed page memory between guards; 32-byte aligned as the arena's.
class Page {
public:
    explicit Page(const PageLayout& page) : layout_(page), memory_(page.bytes + 2 * kGuard + 32, kGuardByte) {
        start_ = kGuard + (32 - (reinterpret_cast<uintptr_t>(memory_.data()) + kGuard) % 32) % 32;
        std::memset(bytes(), 0, page.bytes);
    }
    const PageLayout& layout() const { return layout_; }
    uint8_t* bytes() { return memory_.data() + start_; }
    const uint8_t* bytes() const { return memory_.data() + start_; }
    std::vector<uint8_t> copy() const { return {bytes(), bytes() + layout_.bytes}; }
    bool guards_intact() const {
        for (size_t i = 0; i < memory_.size(); ++i) {
            const bool inside = i >= start_ && i < start_ + layout_.bytes;
            if (!inside && memory_[i] != kGuardByte) return false;
        }
        return true;
    }

private:
    static constexpr size_t kGuard = 256;
    static constexpr uint8_t kGuardByte = 0xA5;
    PageLayout layout_;
    std::vector<uint8_t> memory_;
    size_t start_ = 0;
};

inline const uint16_t* map_or_null(const PageLayout& page, const std::vector<uint16_t>& channels) {
    return page.kind == StoreKind::tiered ? channels.data() : nullptr;
}

// Encodes `rows` [128][D] at once.
inline Page encoded(const kernels::Table& table, const PageLayout& page, const std::vector<uint16_t>& channels,
                    const std::vector<float>& rows) {
    Page out(page);
    table.encode(page, map_or_null(page, channels), rows.data(), 0, page.tokens, out.bytes());
    return out;
}

inline std::vector<float> restored(const kernels::Table& table, const Page& page) {
    const int32_t dim = page.layout().dim, tokens = page.layout().tokens;
    std::vector<float> out(size_t(tokens) * size_t(dim), NAN);
    table.restore(page.layout(), page.bytes(), 0, tokens, out.data(), dim);
    return out;
}

// Scale and offset of a group at a column, as stored.
inline float scale_at(const Page& page, int32_t group, int32_t column) {
    const PageLayout& l = page.layout();
    return load(l.params, page.bytes() + l.scale_offset, uint32_t(group * l.columns + column));
}
inline float zero_at(const Page& page, int32_t group, int32_t column) {
    const PageLayout& l = page.layout();
    return load(l.params, page.bytes() + l.zero_offset, uint32_t(group * l.columns + column));
}

// Where ladder position `p` of a page lies: width, column of its parameters; width 16 has no column.
struct Place {
    int bits = 16;
    int32_t column = -1;
};
inline Place place_of(const PageLayout& page, int32_t p) {
    if (p < page.raw_depth) return {};
    for (int t = 0; t < page.tier_count; ++t) {
        const TierLayout& tier = page.tiers[size_t(t)];
        if (p >= tier.first && p < tier.first + tier.live) return {tier.bits, tier.param_first + p - tier.first};
    }
    return {0, page.coded - page.dim + p};
}

// Largest error that a value of a group may have: half a step, or what rounding the metadata to its type moves the ends
// of the range by, and a little for fp32.
inline double allowed_error(int bits, double min, double max, double s, double z) {
    const double top = double((1 << bits) - 1);
    const double rounding = 1e-6 * std::max({std::fabs(min), std::fabs(max), std::fabs(z), s * top});
    if (bits == 0 || s == 0.0) return std::max(max - z, z - min) + rounding;
    const double ends = std::fabs(z - min) + std::fabs(s * top - (max - min));
    return std::max(s / 2, ends) + rounding;
}

// Checks every value of a page against `rows` [128][D]; returns the largest error divided by its allowance.
inline double worst_error(const Page& page, const std::vector<uint16_t>& channels, const std::vector<float>& rows,
                          const std::vector<float>& back) {
    const PageLayout& l = page.layout();
    double worst = 0.0;
    const auto at = [&](int32_t token, int32_t channel) { return size_t(token) * l.dim + size_t(channel); };
    for (int32_t depth = 0; depth < l.depth; ++depth) {
        const Place place = l.side == Side::key ? place_of(l, depth) : Place{l.tiers[0].bits, depth};
        for (int32_t group = 0; group < l.groups; ++group) {
            const int32_t lo = group * l.group, hi = std::min<int32_t>(lo + l.group, l.lanes);
            std::vector<size_t> index;
            for (int32_t lane = lo; lane < hi; ++lane)
                index.push_back(l.side == Side::value ? at(depth, lane)
                                                      : at(lane, channels.empty() ? depth : channels[size_t(depth)]));
            double min = INFINITY, max = -INFINITY;
            for (size_t i : index)
                min = std::min(min, double(rows[i])), max = std::max(max, double(rows[i]));
            for (size_t i : index) {
                const double error = std::fabs(double(rows[i]) - double(back[i]));
                double allowed = 0x1p-25;                                              // half of f16's smallest step
                if (place.bits == 16) allowed += 0x1p-11 * std::fabs(double(rows[i])); // half an ulp
                if (place.bits < 16)
                    allowed = allowed_error(place.bits, min, max, double(scale_at(page, group, place.column)),
                                            double(zero_at(page, group, place.column)));
                if (!(error <= allowed)) worst = std::max(worst, std::isfinite(error) ? error / allowed : INFINITY);
                if (error > 0) worst = std::max(worst, error / allowed);
            }
        }
    }
    return worst;
}

inline std::vector<float> normal_rows(int32_t dim, uint64_t seed, float scale = 1.0f) {
    Random random(seed);
    std::vector<float> rows(size_t(kPageTokens) * size_t(dim));
    for (float& x : rows)
        x = f16_to_f32(f32_to_f16_sat(scale * random.normal()));
    return rows;
}

// The shapes that every codec test runs over: each width on both sides, and ladders.
struct Case {
    std::string name;
    PageLayout page;
    std::vector<uint16_t> channels;
};
inline std::vector<Case> codec_cases(const std::vector<int32_t>& dims, const std::vector<int32_t>& groups,
                                     ParamType params = ParamType::f16) {
    std::vector<Case> cases;
    for (int32_t dim : dims) {
        for (int32_t group : groups) {
            for (int bits : {1, 2, 3, 4, 6, 8}) {
                for (Side side : {Side::key, Side::value})
                    cases.push_back({std::string(name_of(side)) + " bits " + std::to_string(bits) + " D " +
                                         std::to_string(dim) + " group " + std::to_string(group),
                                     layout(grid_spec(side, bits, group, params), side, dim),
                                     {}});
            }
            const std::vector<std::vector<int>> mixes = {
                {16, 4, 2}, {16, 8, 6, 4, 3, 2, 1, 0}, {3, 1}, {8, 0}, {16, 2}};
            for (const std::vector<int>& mix : mixes) {
                Ladder ladder;
                int32_t left = dim;
                for (size_t i = 0; i < mix.size(); ++i) {
                    const int32_t n =
                        i + 1 == mix.size() ? left : std::min<int32_t>(left, 1 + dim * int32_t(i + 1) / 20);
                    ladder.push(uint8_t(mix[i]), uint16_t(n));
                    left -= n;
                }
                std::ostringstream name;
                name << "ladder";
                for (int i = 0; i < ladder.count; ++i)
                    name << " " << ladder.tiers[size_t(i)].channels << "x" << int(ladder.tiers[size_t(i)].bits);
                cases.push_back({name.str() + " D " + std::to_string(dim) + " group " + std::to_string(group),
                                 layout(tiered_spec(group, params), Side::key, dim, ladder), shuffled_channels(dim)});
            }
        }
    }
    return cases;
}

} // namespace kvmosaic::testing
