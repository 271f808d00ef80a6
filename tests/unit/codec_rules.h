// Pages of every rule, axis and kind beyond the common ones (codec_util.h has those), for the tests of all tables.
#pragma once

#include <map>

#include "unit/codec_util.h"

namespace kvmosaic::testing {

// Ascending, neither even nor symmetric, so that a table read backwards or by steps shows. 2^bits levels.
inline const float* book_of(int bits) {
    static const float levels[4][16] = {{-0.75f, 0.9375f},
                                        {-1.5f, -0.4375f, 0.5f, 1.625f},
                                        {-2.125f, -1.3125f, -0.75f, -0.25f, 0.1875f, 0.6875f, 1.375f, 2.25f},
                                        {-2.75f, -2.0625f, -1.625f, -1.25f, -0.9375f, -0.6875f, -0.40625f, -0.125f,
                                         0.15625f, 0.375f, 0.65625f, 0.96875f, 1.25f, 1.59375f, 2.09375f, 2.6875f}};
    return levels[bits - 1];
}

// Unequal groups of `dim` channels: some of one channel, edges inside lane blocks, one long group.
inline const std::vector<uint16_t>& edges_of(int32_t dim) {
    static std::map<int32_t, std::vector<uint16_t>> all;
    std::vector<uint16_t>& edges = all[dim];
    if (edges.empty()) {
        for (int32_t edge : {0, 1, 6, 7, 20, 32, 61, 64, 111})
            if (edge < dim) edges.push_back(uint16_t(edge));
        edges.push_back(uint16_t(dim));
    }
    return edges;
}

inline const char* name_of(GridRule rule) {
    static const char* names[] = {"asym",           "midpoint",       "integer",       "symmetric",
                                  "extreme",        "hybrid_1bit",    "hybrid_4level", "codebook_norm",
                                  "codebook_range", "codebook_fixed", "searched",      "fitted"};
    return names[size_t(rule)];
}

struct RuleCase {
    std::string name;
    StoreSpec spec;
    PageLayout page;
    std::vector<uint16_t> channels; // of tiered pages with a map
};

// `groups` are taken where the axis allows them. Everything valid that differs from codec_cases in some way.
inline std::vector<RuleCase> rule_cases(int32_t dim, const std::vector<int32_t>& groups,
                                        ParamType params = ParamType::f16) {
    std::vector<RuleCase> cases;
    const auto add = [&](Side side, StoreSpec spec) {
        if (!validate(spec, side, dim)) return;
        if (spec.edge_groups > 0) spec.edges = edges_of(dim).data();
        std::ostringstream name;
        name << kvmosaic::name_of(side) << (spec.axis == Axis::tokens ? " along tokens " : " along channels ")
             << name_of(spec.rule) << " bits " << int(spec.bits) << " levels " << int(spec.levels) << " D " << dim
             << " group " << spec.group << " edges " << int(spec.edge_groups) << " clip " << spec.clip << " outliers "
             << int(spec.outliers) << " " << kvmosaic::name_of(params);
        cases.push_back({name.str(), spec, layout(spec, side, dim), {}});
    };
    for (Side side : {Side::key, Side::value}) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            for (int32_t group : groups) {
                StoreSpec spec = grid_spec(side, 2, group, params);
                spec.axis = axis;
                for (int bits : {1, 2, 3, 4, 6, 8}) {
                    for (int rule = 0; rule <= int(GridRule::hybrid_4level); ++rule) {
                        spec.bits = uint8_t(bits);
                        spec.rule = GridRule(rule);
                        spec.clip = rule == int(GridRule::extreme) || (bits + rule) % 3 != 0 ? 1.0f : 0.92f;
                        add(side, spec);
                    }
                }
                spec.bits = 2;
                spec.levels = 3;
                for (GridRule rule : {GridRule::asym, GridRule::symmetric}) {
                    spec.rule = rule;
                    spec.clip = rule == GridRule::asym ? 0.92f : 1.0f;
                    add(side, spec);
                }
            }
        }
        StoreSpec spec = grid_spec(side, 2, groups.front(), params);
        spec.axis = Axis::channels;
        spec.edges = edges_of(dim).data();
        spec.edge_groups = uint8_t(edges_of(dim).size() - 1);
        for (GridRule rule : {GridRule::asym, GridRule::integer, GridRule::symmetric, GridRule::hybrid_4level}) {
            for (int bits : {2, 4, 8}) {
                spec.rule = rule;
                spec.bits = uint8_t(bits);
                add(side, spec);
            }
        }
        spec.bits = 2, spec.levels = 3, spec.rule = GridRule::asym;
        add(side, spec);
        spec.levels = 0;
        for (int32_t group : groups) {
            StoreSpec coded = grid_spec(side, 2, group, params);
            coded.axis = Axis::channels;
            coded.kind = StoreKind::codebook;
            for (int bits : {1, 2, 3, 4}) {
                coded.bits = uint8_t(bits);
                coded.book = book_of(bits);
                for (GridRule rule : {GridRule::codebook_norm, GridRule::codebook_range, GridRule::codebook_fixed}) {
                    coded.rule = rule;
                    for (int outliers : {0, 3}) {
                        coded.outliers = uint8_t(outliers);
                        add(side, coded);
                    }
                }
            }
            coded.rule = GridRule::codebook_range;
            coded.bits = 3, coded.book = book_of(3);
            if (dim <= 64) coded.outliers = 255; // all of a token's values, and slots left over
            add(side, coded);
            coded.edges = edges_of(dim).data();
            coded.edge_groups = uint8_t(edges_of(dim).size() - 1);
            add(side, coded);
        }
    }
    for (int32_t group : groups) {
        for (const bool map : {true, false}) {
            StoreSpec spec = tiered_spec(std::min(group, kPageTokens), params);
            spec.page_map = map;
            spec.rule = map ? GridRule::midpoint : GridRule::asym;
            spec.clip = map ? 1.0f : 0.92f;
            Ladder ladder;
            int32_t left = dim;
            for (uint8_t bits : {16, 8, 3, 2, 1, 0}) {
                const int32_t n = bits == 0 ? left : std::min(left, 1 + dim / 7);
                ladder.push(bits, uint16_t(n));
                left -= n;
            }
            const std::string name = map ? "ladder midpoint" : "ladder without a map, clip 0.92";
            cases.push_back({name + " D " + std::to_string(dim) + " group " + std::to_string(group),
                             spec,
                             layout(spec, Side::key, dim, ladder),
                             {}});
            if (map) cases.back().channels = shuffled_channels(dim);
        }
    }
    return cases;
}

// Whether a group's values are channels of one token: such pages take any number of rows at a time.
inline bool in_token(const PageLayout& page) { return (page.side == Side::key) == page.along_depth; }

inline const uint16_t* map_of(const RuleCase& c) { return c.channels.empty() ? nullptr : c.channels.data(); }

inline Page encoded(const kernels::Table& table, const RuleCase& c, const std::vector<float>& rows) {
    Page out(c.page);
    table.encode(c.page, map_of(c), rows.data(), 0, kPageTokens, out.bytes());
    return out;
}

// Outliers, constants, tiny and huge values, zeros of both signs, next to ordinary channels and tokens.
inline std::vector<float> hostile_rows(int32_t dim, uint64_t seed) {
    Random random(seed);
    std::vector<float> rows = normal_rows(dim, seed, 2.0f);
    const auto at = [&](int32_t token, int32_t channel) -> float& { return rows[size_t(token * dim + channel)]; };
    for (int32_t t = 0; t < kPageTokens; ++t) {
        for (int32_t d = 0; d < dim; ++d) {
            switch (d % 16) {
            case 3: // constant
                at(t, d) = 9.0f;
                break;
            case 5: // almost constant, far from zero
                at(t, d) = 1000.0f + 0x1p-6f * float(random.below(4));
                break;
            case 7: // below the smallest f16 step of a scale
                at(t, d) = 0x1p-24f * float(random.below(3));
                break;
            case 9: // a large bias, as of biased key projections
                at(t, d) = f16_to_f32(f32_to_f16(-300.0f + random.normal()));
                break;
            case 11:
                at(t, d) = random.below(2) ? -0.0f : 0.0f;
                break;
            default:
                break;
            }
        }
    }
    for (int i = 0; i < 6; ++i) // at places that the seed picks
        at(random.below(kPageTokens), random.below(dim)) = i % 2 ? -65504.0f : 60000.0f;
    return rows;
}

} // namespace kvmosaic::testing
