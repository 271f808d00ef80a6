// Bug cases of scales and bases, and traps of released quantizers, on the pages of every rule.
#include "kvmosaic/transform.h"
#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

float as_param(ParamType type, float x) {
    uint8_t byte[2];
    store(type, byte, 0, x);
    return load(type, byte, 0);
}

StoreSpec spec_of(Side side, Axis axis, GridRule rule, int bits, int group = 32) {
    StoreSpec spec = grid_spec(side, bits, group);
    spec.axis = axis;
    spec.rule = rule;
    return spec;
}
const GridRule kGrids[] = {GridRule::asym,      GridRule::midpoint, GridRule::integer,
                           GridRule::symmetric, GridRule::extreme,  GridRule::hybrid_4level};

// Keys whose channels reach from 0.01 to 900, no calibration: every scale comes from the data. Groups of one channel
// keep each channel's relative precision; groups across channels keep theirs to the largest of the group.
TEST(BugCase, A8_ScalesComeFromData) {
    const int32_t dim = 64;
    Random random(17);
    std::vector<float> rows(size_t(kPageTokens) * dim), most(dim);
    for (int32_t c = 0; c < dim; ++c)
        most[size_t(c)] = 0.01f * std::pow(90000.0f, float(c) / float(dim - 1)); // 0.01 .. 900
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = f16_to_f32(f32_to_f16(random.uniform(-1.0f, 1.0f) * most[i % dim]));
    for (GridRule rule : kGrids) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            const PageLayout l = layout(spec_of(Side::key, axis, rule, 8), Side::key, dim);
            for (const Table* table : tables()) {
                const Page page = encoded(*table, l, {}, rows);
                const std::vector<float> back = restored(*table, page);
                int ones = 0;
                for (int32_t i = 0; i < l.groups * l.columns; ++i)
                    ones += std::fabs(scale_at(page, 0, i)) == 1.0f;
                EXPECT_LE(ones, 3) << table->isa << " " << name_of(rule); // no default
                for (size_t i = 0; i < rows.size(); ++i) {
                    const size_t c = i % dim, last = c / 32 * 32 + 31;
                    const float range = axis == Axis::tokens ? most[c] : most[last];
                    ASSERT_LE(std::fabs(back[i] - rows[i]), range * 0.0085f)
                        << table->isa << " " << name_of(rule) << " at " << i;
                }
            }
        }
    }
}

// A basis cannot be left on one side: what leaves a page has gone through the inverse of what went in, so keys come
// back as keys and meet unturned queries, whatever steps a transform has and however the rows came.
TEST(BugCase, A15_TheBasisIsUndoneWhereRowsLeave) {
    const int32_t dim = 128;
    const std::vector<float> rows = normal_rows(dim, 71);
    Random random(72);
    std::vector<float> q(dim);
    for (float& x : q)
        x = random.normal();
    for (int hadamard : {0, 32, 128}) {
        for (int steps = 0; steps < 4; ++steps) {
            Transform basis;
            basis.hadamard = hadamard;
            for (int32_t c = 0; c < dim && steps % 2 != 0; ++c) {
                basis.scale.push_back(random.uniform(0.5f, 2.0f));
                basis.shift.push_back(random.normal());
            }
            if (steps / 2 != 0) basis.order = shuffled_channels(dim);
            ASSERT_TRUE(validate(basis, dim, 1));
            for (Axis axis : {Axis::tokens, Axis::channels}) {
                const PageLayout l = layout(spec_of(Side::key, axis, GridRule::asym, 8), Side::key, dim);
                for (const Table* table : tables()) {
                    std::vector<float> turned = rows, scratch(dim), s(kPageTokens);
                    for (int32_t t = 0; t < kPageTokens; ++t)
                        basis.forward(turned.data() + t * dim, dim, scratch.data());
                    std::vector<float> back = restored(*table, encoded(*table, l, {}, turned));
                    for (int32_t t = 0; t < kPageTokens; ++t)
                        basis.inverse(back.data() + t * dim, dim, scratch.data());
                    table->scores(q.data(), 1, back.data(), dim, kPageTokens, dim, 1.0f, s.data(), kPageTokens);
                    for (int32_t t = 0; t < kPageTokens; ++t) {
                        double want = 0.0;
                        for (int32_t c = 0; c < dim; ++c)
                            want += double(q[size_t(c)]) * double(rows[size_t(t * dim + c)]);
                        ASSERT_NEAR(double(s[size_t(t)]), want, 0.75) << table->isa << " " << hadamard << " " << steps;
                    }
                }
            }
        }
    }
}

// Trap: KIVI, InnerQ and QServe divide by a range of zero. A constant group has scale 0 and comes back as its constant,
// under a clip too; rules without offsets keep it to half a step.
TEST(Trap, ConstantGroups) {
    for (const RuleCase& c : rule_cases(64, {32})) {
        if (c.page.kind == StoreKind::tiered) continue;
        for (float constant : {0.0f, -0.0f, 9.0f, -100.0f, as_param(ParamType::f16, 0.001f), 20000.0f}) {
            const std::vector<float> rows(size_t(kPageTokens) * 64, constant);
            for (const Table* table : tables()) {
                const std::vector<float> back = restored(*table, encoded(*table, c, rows));
                const GridRule rule = c.spec.rule;
                float allowed = 0.0f;
                if (rule == GridRule::symmetric || rule == GridRule::extreme)
                    allowed = std::fabs(constant) * (1.0f - c.spec.clip + 0.001f) + 0x1p-20f;
                if (rule == GridRule::codebook_fixed) continue; // its levels reach from -2.75 to 2.6875
                if (rule == GridRule::codebook_norm) allowed = std::fabs(constant) * 0.01f + 0x1p-20f;
                for (float x : back) {
                    ASSERT_TRUE(std::isfinite(x)) << table->isa << " " << c.name;
                    if (rule == GridRule::codebook_norm && constant != 0.0f) {
                        ASSERT_NEAR(x, constant, allowed) << table->isa << " " << c.name; // the norm is kept
                        continue;
                    }
                    ASSERT_NEAR(x, constant, allowed) << table->isa << " " << c.name;
                }
            }
        }
    }
}

// Trap: released code rounds half up (Kitty), half away (BitDecoding), before or after the clamp. Here it is half to
// even of the distance in steps, from the offset or, without one, from 0; then the clamp.
TEST(Trap, HalvesGoToEvenThenClamp) {
    for (Side side : {Side::key, Side::value}) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            for (int bits : {2, 3, 4}) {
                for (GridRule rule : {GridRule::asym, GridRule::integer, GridRule::symmetric, GridRule::extreme}) {
                    const int top = (1 << bits) - 1, m = (1 << (bits - 1)) - 1;
                    // Levels are whole numbers: 0 .. top, -m .. m, or -2^(b-1) .. 2^(b-1) - 1.
                    const float lo = rule == GridRule::symmetric ? float(-m)
                                     : rule == GridRule::extreme ? float(-(1 << (bits - 1)))
                                                                 : 0.0f;
                    const float hi = rule == GridRule::symmetric ? float(m) : lo + float(top);
                    std::vector<float> group; // the ends, then every tie
                    for (float x = lo; x < hi; x += 1.0f)
                        group.push_back(x + 0.5f);
                    group.push_back(lo);
                    group.push_back(hi);
                    const int32_t dim = 32;
                    std::vector<float> rows(size_t(kPageTokens) * dim);
                    for (int32_t t = 0; t < kPageTokens; ++t)
                        for (int32_t c = 0; c < dim; ++c)
                            rows[size_t(t * dim + c)] = group[size_t(t + c) % group.size()];
                    const PageLayout l = layout(spec_of(side, axis, rule, bits), side, dim);
                    for (const Table* table : tables()) {
                        const std::vector<float> back = restored(*table, encoded(*table, l, {}, rows));
                        for (size_t i = 0; i < rows.size(); ++i) {
                            const float even = std::min(std::max(std::nearbyint(rows[i]), lo), hi);
                            ASSERT_EQ(back[i], even)
                                << table->isa << " " << name_of(rule) << " bits " << bits << " x " << rows[i];
                        }
                    }
                }
            }
        }
    }
}

// Trap: codes from the exact scale, decoded with the stored one. A scale in f8e4m3 is off by up to a sixteenth; codes
// from it are still the nearest, so that inside the levels no value is farther than half a stored step.
TEST(Trap, CodesComeFromWhatIsStored) {
    for (Side side : {Side::key, Side::value}) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            for (GridRule rule : {GridRule::asym, GridRule::symmetric, GridRule::extreme}) {
                const int32_t dim = 64;
                StoreSpec spec = spec_of(side, axis, rule, 8);
                spec.params = ParamType::f8e4m3;
                const PageLayout l = layout(spec, side, dim);
                const std::vector<float> rows = normal_rows(dim, 33);
                for (const Table* table : tables()) {
                    const Page page = encoded(*table, l, {}, rows);
                    const std::vector<float> back = restored(*table, page);
                    for (int32_t t = 0; t < kPageTokens; ++t) {
                        for (int32_t c = 0; c < dim; ++c) {
                            const bool tokens = axis == Axis::tokens;
                            const float s = std::fabs(scale_at(page, (tokens ? t : c) / 32, tokens ? c : t));
                            const float x = rows[size_t(t * dim + c)];
                            if (std::fabs(x) > 0.5f) continue; // inside the levels of every group here
                            ASSERT_LE(std::fabs(back[size_t(t * dim + c)] - x), 0.5001f * s)
                                << table->isa << " " << name_of(rule);
                        }
                    }
                }
            }
        }
    }
}

// Traps: 3 bits in 8 steps instead of 7 (RotateKV); groups that run on into the next channel where 32 does not divide
// the length (KVTuner); history that is quantized again and drifts (KVTuner).
TEST(Trap, ThreeBitsAreSevenSteps) {
    std::vector<float> rows(size_t(kPageTokens) * 32);
    for (size_t i = 0; i < rows.size(); ++i)
        rows[i] = float(i * 5 % 8);
    for (Side side : {Side::key, Side::value}) {
        for (GridRule rule : {GridRule::asym, GridRule::integer}) {
            const PageLayout l = layout(spec_of(side, Axis::channels, rule, 3), side, 32);
            for (const Table* table : tables()) {
                const Page page = encoded(*table, l, {}, rows);
                EXPECT_EQ(scale_at(page, 0, 0), 1.0f) << table->isa;
                EXPECT_EQ(restored(*table, page), rows) << table->isa; // all eight levels, exactly
            }
        }
    }
}

TEST(Trap, GroupsStayInTheirChannelOrToken) {
    const int32_t dim = 80; // no multiple of 32, and 128 is none of 48
    const std::vector<float> rows = normal_rows(dim, 41);
    for (const RuleCase& c : rule_cases(dim, {48})) {
        const bool by_token = in_token(c.page);
        if (c.page.kind == StoreKind::tiered && c.spec.page_map) continue;
        std::vector<float> changed = rows;
        const int32_t count = by_token ? dim : kPageTokens;
        for (int32_t i = 0; i < count; ++i) // one token, or one channel, a hundred times as far
            changed[size_t(by_token ? 50 * dim + i : i * dim + 50)] *= 100.0f;
        for (const Table* table : tables()) {
            const std::vector<float> a = restored(*table, encoded(*table, c, rows));
            const std::vector<float> b = restored(*table, encoded(*table, c, changed));
            int differ = 0;
            for (int32_t t = 0; t < kPageTokens; ++t) {
                for (int32_t d = 0; d < dim; ++d) {
                    const bool own = by_token ? t == 50 : d == 50;
                    const size_t i = size_t(t * dim + d);
                    differ += own && a[i] != b[i];
                    ASSERT_TRUE(own || a[i] == b[i]) << table->isa << " " << c.name << " " << t << "," << d;
                }
            }
            EXPECT_GT(differ, 0) << table->isa << " " << c.name;
        }
    }
}

TEST(Trap, WhatIsDecodedPacksToItself) {
    const int32_t dim = 64;
    const std::vector<float> rows = normal_rows(dim, 43, 3.0f);
    for (Side side : {Side::key, Side::value}) {
        for (Axis axis : {Axis::tokens, Axis::channels}) {
            for (GridRule rule : {GridRule::asym, GridRule::integer, GridRule::symmetric, GridRule::extreme}) {
                for (int bits : {2, 3, 4, 8}) {
                    const PageLayout l = layout(spec_of(side, axis, rule, bits), side, dim);
                    for (const Table* table : tables()) {
                        const std::vector<float> once = restored(*table, encoded(*table, l, {}, rows));
                        std::vector<float> again = once;
                        for (int round = 0; round < 3; ++round)
                            again = restored(*table, encoded(*table, l, {}, again));
                        // Offsets and scales are rounded again; what remains is that rounding, not a drift by steps.
                        for (size_t i = 0; i < once.size(); ++i)
                            ASSERT_NEAR(again[i], once[i], 0.04f) << table->isa << " " << name_of(rule) << bits;
                    }
                }
            }
        }
    }
}

} // namespace
} // namespace kvmosaic
