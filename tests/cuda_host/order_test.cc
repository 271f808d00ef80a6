// The GPU's page order and the transcoder, on the CPU: every code, scale, offset, raw channel and map entry goes there
// and back, and a decoder that knows only the GPU order reads the values that the CPU's reference reads.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "kernels/cuda/order.h"
#include "kernels/cuda/transcode.h"
#include "kernels/grid.h"
#include "unit/codec_util.h"

namespace kvmosaic::testing {
namespace {

using cuda::DevicePage;
using cuda::DeviceTier;

struct Case {
    std::string name;
    PageLayout page;
    std::vector<uint16_t> channels; // of tiered pages
};

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const Side side : {Side::key, Side::value})
        for (const int dim : {1, 15, 64, 80, 96, 100, 112, 128, 192, 256, 320, 512})
            for (const int bits : {1, 2, 3, 4, 6, 8})
                for (const int group : {32, 40, 128}) {
                    StoreSpec spec = grid_spec(side, bits, group, group == 40 ? ParamType::bf16 : ParamType::f16);
                    const std::string name = std::string(side == Side::key ? "key" : "value") + " D " +
                                             std::to_string(dim) + " bits " + std::to_string(bits) + " group " +
                                             std::to_string(group);
                    all.push_back({name, layout(spec, side, dim), {}});
                    // Groups along the other axis, with every rule that a grid can have there.
                    spec.axis = side == Side::key ? Axis::channels : Axis::tokens;
                    spec.rule = bits >= 2 && group == 32 ? GridRule::symmetric : GridRule::asym;
                    if (bits == 4 && group == 128) spec.params = ParamType::f8e4m3;
                    all.push_back({name + " other axis", layout(spec, side, dim), {}});
                    if (bits != 2) continue;
                    spec.levels = 3;
                    all.push_back({name + " three levels", layout(spec, side, dim), {}});
                }
    const std::initializer_list<std::pair<int, int>> ladders[] = {
        {{16, 8}, {4, 32}, {2, 88}},
        {{3, 64}, {1, 64}},
        {{4, 16}, {2, 112}},
        {{16, 3}, {8, 5}, {6, 7}, {4, 9}, {3, 11}, {2, 13}, {1, 15}, {0, 65}},
        {{16, 128}},
        {{0, 128}},
        {{2, 128}},
        {{8, 1}, {1, 127}},
    };
    for (const auto& tiers : ladders)
        for (const int group : {32, 128})
            all.push_back({"ladder " + std::to_string(all.size()),
                           layout(tiered_spec(group), Side::key, 128, ladder_of(tiers)), shuffled_channels(128)});
    all.push_back({"ladder D 300",
                   layout(tiered_spec(40, ParamType::bf16), Side::key, 300,
                          ladder_of({{16, 9}, {6, 100}, {3, 77}, {2, 90}, {0, 24}})),
                   shuffled_channels(300)});
    return all;
}

std::vector<uint8_t> encoded(const Case& c, uint64_t seed) {
    Random random(seed);
    std::vector<float> rows(size_t(kPageTokens) * c.page.dim);
    for (float& x : rows)
        x = 2.0f * random.normal();
    std::vector<uint8_t> bytes(c.page.bytes, 0);
    kernels::reference().encode(c.page, c.channels.empty() ? nullptr : c.channels.data(), rows.data(), 0, kPageTokens,
                                bytes.data());
    return bytes;
}

// Value (token, channel) from the GPU order alone.
struct DeviceReader {
    const DevicePage& page;
    const uint8_t* bytes;

    float decode(int bits, uint32_t column, int group, int at, int code) const {
        const uint32_t i = cuda::param_index(page, bits, column, group, at);
        float s = page.scales ? load(page.params, bytes + page.scale_offset, i) : 1.0f;
        float z = page.offsets ? load(page.params, bytes + page.zero_offset, i) : 0.0f;
        kernels::open_grid(page.rule, bits, page.levels, &s, &z);
        return kernels::decode(s, z, float(code));
    }
    int entry(int e) const { // channel of a map entry, -1 without a map
        if (page.map_entries == 0) return -1;
        const uint8_t* at = bytes + page.map_offset + e * page.map_element;
        return page.map_element == 1 ? at[0] : at[0] | at[1] << 8;
    }
    void restore(float* out) const { // [tokens][dim]
        const bool key = page.side == Side::key;
        for (int lane = 0; lane < page.lanes; ++lane) {
            const auto put = [&](int position, int map_entry, float x) {
                const int mapped = entry(map_entry), depth = mapped < 0 ? position : mapped;
                out[key ? lane * page.dim + depth : depth * page.dim + lane] = x;
            };
            for (int r = 0; r < page.raw_live; ++r)
                put(r, r,
                    load(RawType::f16, bytes + cuda::raw_site(page.side, page.raw_offset, page.quads, lane, r), 0));
            for (int t = 0; t < page.tier_count; ++t) {
                const DeviceTier& tier = page.tiers[size_t(t)];
                for (int pos = 0; pos < tier.live; ++pos) {
                    const int group = (page.along_depth ? pos : lane) / page.group;
                    put(tier.first + pos, page.raw_padded + tier.column + pos,
                        decode(tier.bits, tier.column, group, page.along_depth ? lane : pos,
                               cuda::device_code(page, tier, lane, pos, bytes)));
                }
            }
            for (int i = 0; i < page.zero_bits; ++i)
                put(page.dim - page.zero_bits + i, page.raw_padded + page.zero_column + i,
                    decode(0, page.zero_column, lane / page.group, i, 0));
        }
    }
};

// Layouts of pages in planes: ladders that fill their vectors and such that do not, values of every width.
std::vector<PageLayout> plane_layouts() {
    std::vector<PageLayout> all;
    StoreSpec key = tiered_spec(kPageTokens);
    key.rule = GridRule::searched, key.shrinks = 7;
    const std::initializer_list<std::pair<int, int>> ladders[] = {
        {{8, 8}, {4, 16}, {6, 8}, {2, 40}, {3, 16}, {1, 16}, {0, 24}},
        {{8, 3}, {4, 5}, {6, 7}, {2, 11}, {3, 13}, {1, 17}, {0, 72}},
        {{4, 24}, {2, 48}, {1, 32}, {0, 24}},
        {{2, 16}, {1, 96}, {0, 16}},
        {{8, 128}},
        {{2, 128}},
        {{1, 128}},
        {{0, 128}},
    };
    for (const auto& tiers : ladders)
        all.push_back(layout(key, Side::key, 128, ladder_of(tiers)));
    all.push_back(layout(key, Side::key, 80, ladder_of({{4, 8}, {2, 40}, {3, 8}, {0, 24}})));
    for (const int dim : {64, 80, 128, 256})
        for (const int bits : {2, 3, 4, 5})
            for (const int wide : {0, dim / 2}) {
                if (wide > 0 && bits > 4) continue;
                StoreSpec value = grid_spec(Side::value, bits, dim, ParamType::f16);
                value.rule = GridRule::fitted, value.wide = uint16_t(wide / 8 * 8);
                all.push_back(layout(value, Side::value, dim));
            }
    return all;
}

TEST(CudaOrder, PlanesGoThereAndBackExactly) {
    uint32_t seed = 1;
    for (const PageLayout& page : plane_layouts()) {
        std::vector<uint8_t> bytes(page.bytes);
        for (uint8_t& b : bytes)
            b = uint8_t((seed = seed * 1664525u + 1013904223u) >> 24);
        const DevicePage device = cuda::device_page(page);
        ASSERT_TRUE(device.planes);
        std::vector<uint8_t> there(device.bytes, 0xAA), back(page.bytes, 0x55);
        cuda::to_device_order(page, bytes.data(), there.data());
        cuda::to_host_order(page, there.data(), back.data());
        ASSERT_EQ(bytes, back) << "D " << page.dim << ", planes " << int(page.plane_count);
        if (page.side == Side::value) continue;
        // Kernels find the ladder behind the page, and every field where plane_site says.
        const Ladder read = cuda::ladder_of_planes(there.data() + device.ladder_offset);
        int32_t coded = 0;
        for (int i = 0; i < read.count; ++i) {
            if (read.tiers[size_t(i)].bits == 0) {
                EXPECT_EQ(page.zero_bits, read.tiers[size_t(i)].channels);
                continue;
            }
            ASSERT_LT(coded, page.tier_count);
            EXPECT_EQ(page.tiers[size_t(coded)].bits, read.tiers[size_t(i)].bits);
            EXPECT_EQ(page.tiers[size_t(coded)].live, read.tiers[size_t(i)].channels);
            ++coded;
        }
        EXPECT_EQ(page.tier_count, coded);
        uint16_t ladder[16];
        std::memcpy(ladder, there.data() + device.ladder_offset, sizeof(ladder));
        int32_t channels = 0;
        for (int i = 0; i < 7; ++i)
            channels += ladder[i];
        EXPECT_EQ(page.dim, channels);
        for (int i = 0; i < page.plane_count; ++i) {
            const PlaneLayout& plane = page.planes[size_t(i)];
            const int width = width_of(plane.role), per = 32 / width;
            std::set<uint32_t> taken;
            for (int32_t lane = 0; lane < 128; ++lane)
                for (int32_t pos = 0; pos < plane.padded; ++pos) {
                    const uint32_t host = plane.offset + uint32_t(lane / 8) * plane.stride + uint32_t(pos / per) * 32 +
                                          uint32_t(4 * (lane % 8) + pos % per % 4);
                    const int code = bytes[host] >> (width * (pos % per / 4)) & ((1 << width) - 1);
                    const cuda::Site site =
                        cuda::plane_site(Side::key, plane.offset, width, plane.padded, 2, lane, pos);
                    ASSERT_LT(site.word, plane.offset + plane.stride * plane.block_count);
                    ASSERT_TRUE(taken.insert(site.word * 8 + site.shift).second);
                    ASSERT_EQ(code, there[site.word + site.shift / 8u] >> (site.shift % 8) & ((1 << width) - 1));
                }
        }
    }
}

TEST(CudaOrder, TranscodesThereAndBackExactly) {
    for (const Case& c : cases()) {
        const std::vector<uint8_t> host = encoded(c, 11);
        const DevicePage dev = cuda::device_page(c.page);
        std::vector<uint8_t> there(dev.bytes + 32, 0xAB), back(c.page.bytes + 32, 0xCD);
        cuda::to_device_order(c.page, host.data(), there.data());
        cuda::to_host_order(c.page, there.data(), back.data());
        EXPECT_EQ(0, std::memcmp(host.data(), back.data(), c.page.bytes)) << c.name;
        for (int i = 0; i < 32; ++i) { // nothing beyond the declared bytes
            ASSERT_EQ(0xAB, there[dev.bytes + size_t(i)]) << c.name;
            ASSERT_EQ(0xCD, back[c.page.bytes + size_t(i)]) << c.name;
        }
    }
}

TEST(CudaOrder, DecodesToTheSameValues) {
    for (const Case& c : cases()) {
        const std::vector<uint8_t> host = encoded(c, 12);
        const DevicePage dev = cuda::device_page(c.page);
        std::vector<uint8_t> there(dev.bytes);
        cuda::to_device_order(c.page, host.data(), there.data());
        std::vector<float> want(size_t(kPageTokens) * c.page.dim), got(want.size(), NAN);
        kernels::reference().restore(c.page, host.data(), 0, kPageTokens, want.data(), c.page.dim);
        DeviceReader{dev, there.data()}.restore(got.data());
        ASSERT_EQ(0, std::memcmp(want.data(), got.data(), want.size() * 4)) << c.name;
    }
}

TEST(CudaOrder, FieldsOfATierFillItAndDoNotOverlap) {
    for (const Case& c : cases()) {
        const DevicePage dev = cuda::device_page(c.page);
        std::vector<uint8_t> taken(dev.bytes, 0);
        for (int t = 0; t < dev.tier_count; ++t) {
            const DeviceTier& tier = dev.tiers[size_t(t)];
            for (int lane = 0; lane < dev.quads * cuda::kQuadLanes; ++lane)
                for (int pos = 0; pos < tier.padded; ++pos) {
                    cuda::Site sites[3];
                    const int n = cuda::device_sites(dev.side, dev.quads, tier, lane, pos, sites);
                    for (int i = 0; i < n; ++i) {
                        const uint32_t byte = sites[i].word + sites[i].shift / 8u;
                        const uint8_t mask = uint8_t(((1 << sites[i].width) - 1) << (sites[i].shift % 8));
                        ASSERT_LT(byte, tier.offset + tier.bytes) << c.name;
                        ASSERT_GE(byte, tier.offset) << c.name;
                        ASSERT_EQ(0, taken[byte] & mask) << c.name << " lane " << lane << " pos " << pos;
                        taken[byte] |= mask;
                    }
                }
            for (uint32_t b = tier.offset; b < tier.offset + tier.bytes; ++b)
                ASSERT_EQ(0xFF, taken[b]) << c.name << " byte " << b;
        }
    }
}

TEST(CudaOrder, SizesThatTheDocumentationNames) {
    EXPECT_EQ(4608u, cuda::device_page(layout(grid_spec(Side::key, 2, 128), Side::key, 128)).bytes);
    EXPECT_EQ(4608u, cuda::device_page(layout(grid_spec(Side::value, 2, 128), Side::value, 128)).bytes);
    EXPECT_EQ(6144u, cuda::device_page(layout(grid_spec(Side::key, 2, 32), Side::key, 128)).bytes);
    const PageLayout mixed = layout(tiered_spec(128), Side::key, 128, ladder_of({{16, 8}, {4, 32}, {2, 88}}));
    EXPECT_EQ(7840u, cuda::device_page(mixed).bytes);
    EXPECT_EQ(4736u, cuda::device_page(layout(tiered_spec(128), Side::key, 128, ladder_of({{3, 64}, {1, 64}}))).bytes);
}

TEST(CudaOrder, WorstPageIsNeverBelowAPage) {
    Random random(5);
    const std::vector<uint8_t> widths = {16, 8, 6, 4, 3, 2, 1, 0};
    for (const int dim : {64, 100, 128, 256}) {
        const StoreSpec spec = tiered_spec(128);
        const uint32_t worst = cuda::worst_device_page_bytes(spec, Side::key, dim, widths);
        for (int round = 0; round < 300; ++round) {
            Ladder ladder;
            int left = dim;
            for (const uint8_t bits : widths) {
                const int n = bits == 0 ? left : random.below(left + 1);
                ladder.push(bits, uint16_t(n));
                left -= n;
            }
            ASSERT_LE(cuda::device_page(layout(spec, Side::key, dim, ladder)).bytes, worst) << dim;
        }
    }
}

} // namespace
} // namespace kvmosaic::testing
