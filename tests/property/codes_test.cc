// Attention straight from codes (kernels::Table::weigh) of every instruction set, against double over the values that
// the reference decodes: every width, both sides, groups along lanes and depth, ladders, head sizes and numbers of
// rows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/kernels.h"

namespace kvmosaic::test {
namespace {

using kernels::CodeRows;
using kernels::Table;

struct Work { // aligned, and full of what no result may depend on
    Work() : memory(kernels::kCodesWorkBytes + 64, 0xFF) {}
    uint8_t* at() { return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64; }
    std::vector<uint8_t> memory;
};

struct Case {
    std::string name;
    PageLayout page;
};

std::vector<Case> cases(int32_t dim) {
    std::vector<Case> out;
    const auto add = [&](const StoreSpec& spec, Side side, const Ladder& ladder = {}) {
        if (!validate(spec, side, dim)) return;
        out.push_back({std::string("D ").append(std::to_string(dim)) + " " + name_of(side) + " bits " +
                           std::to_string(spec.bits) + " group " + std::to_string(spec.group) +
                           (spec.axis == Axis::tokens ? " tokens" : " channels") + " rule " +
                           std::to_string(int(spec.rule)) + " tiers " + std::to_string(ladder.count),
                       layout(spec, side, dim, ladder)});
    };
    for (const Side side : {Side::key, Side::value})
        for (const Axis axis : {Axis::tokens, Axis::channels})
            for (const uint16_t group : {uint16_t(32), uint16_t(128)}) {
                StoreSpec spec;
                spec.kind = StoreKind::grid;
                spec.axis = axis;
                spec.group = group;
                for (const uint8_t bits : {1, 2, 3, 4, 6, 8})
                    for (const GridRule rule : {GridRule::asym, GridRule::symmetric, GridRule::hybrid_4level,
                                                GridRule::extreme, GridRule::integer}) {
                        spec.bits = bits;
                        spec.rule = rule;
                        add(spec, side);
                    }
            }
    StoreSpec spec;
    spec.kind = StoreKind::tiered;
    for (const bool map : {true, false}) {
        spec.page_map = map;
        for (const uint16_t group : {uint16_t(64), uint16_t(128)}) {
            spec.group = group;
            Ladder mix, pair, all;
            mix.push(16, 3), mix.push(4, 20), mix.push(2, uint16_t(dim - 23));
            pair.push(3, uint16_t(dim / 2)), pair.push(1, uint16_t(dim - dim / 2));
            all.push(16, 1), all.push(8, 9), all.push(6, 5), all.push(4, 7), all.push(3, 11), all.push(2, 3);
            all.push(1, 12), all.push(0, uint16_t(dim - 48));
            spec.rule = GridRule::asym;
            add(spec, Side::key, mix);
            add(spec, Side::key, all);
            spec.rule = GridRule::midpoint;
            add(spec, Side::key, pair);
        }
    }
    // In planes: ladders with every width, some of whose tiers are no multiple of a vector.
    StoreSpec searched;
    searched.kind = StoreKind::tiered;
    searched.group = kPageTokens;
    searched.rule = GridRule::searched;
    for (const bool map : {true, false}) {
        searched.page_map = map;
        Ladder all, low, wide;
        all.push(8, 5), all.push(4, 11), all.push(6, 3), all.push(2, 7), all.push(3, 9), all.push(1, 13);
        all.push(0, uint16_t(dim - 48));
        low.push(2, uint16_t(dim / 3)), low.push(1, uint16_t(dim - dim / 3));
        wide.push(8, 8), wide.push(6, uint16_t(dim - 8));
        for (const Ladder& ladder : {all, low, wide})
            add(searched, Side::key, ladder);
    }
    StoreSpec fitted;
    fitted.kind = StoreKind::grid;
    fitted.axis = Axis::channels;
    fitted.rule = GridRule::fitted;
    for (const uint8_t bits : {1, 2, 3, 4, 5, 6})
        for (const int32_t wide : {0, dim / 16 * 8}) {
            fitted.bits = bits;
            fitted.wide = uint16_t(wide);
            add(fitted, Side::value);
        }
    return out;
}

std::vector<uint8_t> encoded(const PageLayout& page, int32_t tokens, std::mt19937* random) {
    std::normal_distribution<float> normal;
    std::vector<float> rows(size_t(tokens) * page.dim);
    for (size_t i = 0; i < rows.size(); ++i) {
        const size_t d = i % page.dim;
        rows[i] = d % 21 == 3 ? 6.0f + 3.0f * normal(*random) : d % 21 == 8 ? 1.5f : normal(*random);
    }
    std::vector<uint16_t> channels(page.dim);
    for (uint16_t i = 0; i < page.dim; ++i)
        channels[i] = uint16_t(page.dim - 1 - i);
    std::vector<uint8_t> bytes(page.bytes + 1, 0); // exactly the page: a sanitizer sees reads behind it
    bytes.resize(page.bytes);
    kernels::reference().encode(page, channels.data(), rows.data(), 0, tokens, bytes.data());
    return bytes;
}

double l2(const float* got, const float* want, int32_t from, int32_t to) {
    double error = 0, size = 0;
    for (int32_t i = from; i < to; ++i) {
        error += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
        size += double(want[i]) * want[i];
    }
    return std::sqrt(error / std::max(1e-20, size));
}

// One page's sum may nearly vanish against its terms (one bit, large offsets), so these are twice and five times what
// is promised of attention as a whole; a wrong weight, code or group is off by tens of percent.
class Codes : public testing::TestWithParam<int32_t> {};

TEST_P(Codes, AgreeWithDoubleAndRowsStandAlone) {
    std::mt19937 random{uint32_t(GetParam())};
    std::normal_distribution<float> normal;
    int32_t ran = 0;
    for (const Case& c : cases(GetParam())) {
        const PageLayout& page = c.page;
        const bool value = page.side == Side::value;
        // An open page where rows come one by one: the rest of it is zero, and its weights are none.
        const int32_t tokens = value && !page.along_depth && !in_planes(page.rule) ? 77 : kPageTokens;
        const std::vector<uint8_t> bytes = encoded(page, tokens, &random);
        for (const Table* table : kernels::available()) {
            if (!table->reads_codes(page)) continue;
            ++ran;
            Work work;
            for (const int32_t n : {1, 3, 6}) {
                std::vector<float> w(size_t(n) * page.depth);
                for (float& x : w)
                    x = value ? std::exp(normal(random) - 2.0f) : normal(random);
                std::vector<int32_t> lo(static_cast<size_t>(n), 0),
                    hi(static_cast<size_t>(n), value ? tokens : page.depth);
                if (value && n > 2) lo[1] = 13, hi[1] = 61, lo[2] = hi[2] = 5;
                std::vector<float> got(size_t(n) * page.lanes, value ? 0.5f : std::nanf(""));
                std::vector<float> want(size_t(n) * page.lanes, 0.5f), alone = got;
                CodeRows rows{.w = w.data(),
                              .stride = page.depth,
                              .n = n,
                              .lo = value ? lo.data() : nullptr,
                              .hi = value ? hi.data() : nullptr,
                              .depth = value ? tokens : page.depth,
                              .lane_first = value ? 0 : 16,
                              .lane_end = value ? page.lanes : 117,
                              .scale = 0.37f,
                              .add = value,
                              .out = got.data(),
                              .out_stride = page.lanes};
                CodeRows exact = rows;
                exact.out = want.data();
                kernels::reference().weigh(page, bytes.data(), exact, nullptr);
                for (const bool fast : {false, true}) {
                    std::fill(got.begin(), got.end(), value ? 0.5f : std::nanf(""));
                    rows.fast = fast;
                    rows.n = n, rows.w = w.data(), rows.out = got.data();
                    rows.lo = value ? lo.data() : nullptr, rows.hi = value ? hi.data() : nullptr;
                    table->weigh(page, bytes.data(), rows, work.at());
                    for (int32_t r = 0; r < n; ++r)
                        ASSERT_LT(l2(&got[size_t(r) * page.lanes], &want[size_t(r) * page.lanes], rows.lane_first,
                                     rows.lane_end),
                                  fast ? 0.25 : 1e-3)
                            << table->isa << " " << c.name << " row " << r << " of " << n;
                    std::fill(alone.begin(), alone.end(), value ? 0.5f : std::nanf(""));
                    for (int32_t r = n - 1; r >= 0; --r) {
                        rows.n = 1, rows.w = &w[size_t(r) * page.depth], rows.out = &alone[size_t(r) * page.lanes];
                        rows.lo = value ? &lo[size_t(r)] : nullptr, rows.hi = value ? &hi[size_t(r)] : nullptr;
                        table->weigh(page, bytes.data(), rows, work.at());
                    }
                    ASSERT_EQ(0, std::memcmp(got.data(), alone.data(), got.size() * sizeof(float)))
                        << table->isa << " " << c.name << " rows " << n;
                }
            }
        }
    }
    EXPECT_GT(ran, 50);
}
INSTANTIATE_TEST_SUITE_P(Dims, Codes, testing::Values(64, 80, 96, 100, 112, 128, 192, 256),
                         [](const auto& i) { return std::string("D").append(std::to_string(i.param)); });

// What is no number in a weight must not become one.
TEST(CodesNumbers, NaNStaysInItsRowAndZeroWeightsGiveZero) {
    std::mt19937 random(1);
    for (const Case& c : cases(64)) {
        const PageLayout& page = c.page;
        const std::vector<uint8_t> bytes = encoded(page, kPageTokens, &random);
        for (const Table* table : kernels::available()) {
            if (!table->reads_codes(page)) continue;
            Work work;
            std::vector<float> w(3 * size_t(page.depth), 0.25f), out(3 * size_t(page.lanes), 7.0f);
            w[5] = std::nanf("");
            std::fill(w.begin() + page.depth, w.begin() + 2 * page.depth, 0.0f);
            const CodeRows rows{.w = w.data(),
                                .stride = page.depth,
                                .n = 3,
                                .depth = page.depth,
                                .lane_end = page.lanes,
                                .out = out.data(),
                                .out_stride = page.lanes};
            table->weigh(page, bytes.data(), rows, work.at());
            for (int32_t i = 0; i < page.lanes; ++i) {
                ASSERT_TRUE(std::isnan(out[size_t(i)])) << table->isa << " " << c.name;
                ASSERT_EQ(out[size_t(page.lanes + i)], 0.0f) << table->isa << " " << c.name;
                ASSERT_TRUE(std::isfinite(out[size_t(2 * page.lanes + i)])) << table->isa << " " << c.name;
            }
        }
    }
}

} // namespace
} // namespace kvmosaic::test
