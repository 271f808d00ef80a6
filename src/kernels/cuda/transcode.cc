#include "kernels/cuda/transcode.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace kvmosaic::cuda {
namespace {

constexpr int kDigits = 5; // three levels: five codes in a byte of the CPU's page, two bits each in the GPU's
constexpr int kPower[kDigits] = {1, 3, 9, 27, 81};

// ---- codes ----

// Bits of a code that lie together in both orders.
struct Field {
    uint32_t device; // byte from the start of the tier
    uint16_t host;   // byte from the start of the tier in its lane block
    uint8_t shifts;  // in the host's byte, times 16, plus that in the device's
    uint8_t mask;
};
// The fields of a tier, by lane block; of a block those of the first positions come first, of each position as many.
struct TierFields {
    std::vector<std::vector<Field>> blocks;
    std::vector<uint32_t> each; // [lane blocks] fields of a position
};

std::shared_ptr<const TierFields> make_fields(Side side, int lanes, int quads, int positions, const TierLayout& host,
                                              const DeviceTier& device) {
    auto made = std::make_shared<TierFields>();
    PageLayout page; // of this tier alone, one lane block
    TierLayout alone = host;
    DeviceTier there = device;
    alone.offset = there.offset = 0;
    for (int32_t first = 0; first < lanes; first += kLaneBlock) {
        const int32_t end = std::min(first + kLaneBlock, lanes);
        std::vector<Field>& block = made->blocks.emplace_back();
        for (int32_t pos = 0; pos < positions; ++pos)
            for (int32_t lane = first; lane < end; ++lane) {
                CodeSite from[2];
                Site to[3];
                const int n = code_sites(page, alone, lane % kLaneBlock, pos, from),
                          m = device_sites(side, quads, there, lane, pos, to);
                for (int i = 0; i < n; ++i)
                    for (int j = 0; j < m; ++j) {
                        const int low = std::max(from[i].weight, to[j].weight);
                        const int high = std::min(from[i].weight + from[i].width, to[j].weight + to[j].width);
                        if (low >= high) continue;
                        const int h = from[i].shift + low - from[i].weight, d = to[j].shift + low - to[j].weight;
                        block.push_back({to[j].word + uint32_t(d / 8), uint16_t(from[i].byte), uint8_t(h << 4 | d % 8),
                                         uint8_t((1 << (high - low)) - 1)});
                    }
            }
        made->each.push_back(positions > 0 ? uint32_t(block.size()) / uint32_t(positions) : 0);
    }
    return made;
}

// Made once for tiers of a shape; there are few shapes, because tiers are padded.
std::shared_ptr<const TierFields> fields_of(const PageLayout& page, const TierLayout& host, const DevicePage& dev,
                                            const DeviceTier& device) {
    using Key = std::tuple<Side, int, int, int, int>;
    static std::mutex lock;
    static std::map<Key, std::shared_ptr<const TierFields>> made;
    const Key key{page.side, page.lanes, host.bits, host.padded, device.padded};
    const std::lock_guard guard(lock);
    std::shared_ptr<const TierFields>& found = made[key];
    if (!found)
        found = make_fields(page.side, page.lanes, dev.quads, std::min(host.padded, device.padded), host, device);
    return found;
}

// Calls move(host byte, device byte, field) for the codes of live positions.
template <class Move>
void for_each_field(const PageLayout& page, const DevicePage& dev, Move move) {
    for (int t = 0; t < page.tier_count; ++t) {
        const TierLayout& host = page.tiers[size_t(t)];
        const DeviceTier& device = dev.tiers[size_t(t)];
        const auto fields = fields_of(page, host, dev, device);
        for (size_t b = 0; b < fields->blocks.size(); ++b) {
            const uint32_t from = uint32_t(b) * page.lane_block_bytes + host.offset;
            const Field* f = fields->blocks[b].data();
            for (const Field* end = f + size_t(host.live) * fields->each[b]; f < end; ++f)
                move(from + f->host, device.offset + f->device, *f);
        }
    }
}

// ---- codes of three levels: five a byte there, two bits each here ----

uint32_t digit_byte(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos) {
    return uint32_t(lane / kLaneBlock) * page.lane_block_bytes + tier.offset +
           uint32_t(pos / kDigits * kLaneBlock + lane % kLaneBlock);
}

template <class Move>
void for_each_digit(const PageLayout& page, const DevicePage& dev, Move move) {
    const TierLayout& host = page.tiers[0];
    for (int32_t lane = 0; lane < page.lanes; ++lane)
        for (int32_t pos = 0; pos < host.live; ++pos) {
            Site site[3];
            device_sites(page.side, dev.quads, dev.tiers[0], lane, pos, site);
            move(digit_byte(page, host, lane, pos), kPower[pos % kDigits], site[0].word + site[0].shift / 8u,
                 site[0].shift % 8);
        }
}

// ---- pages in planes ----

// The fields of a plane, both sides' bytes counted from its start.
std::shared_ptr<const std::vector<Field>> plane_fields(Side side, const PlaneLayout& plane) {
    using Key = std::tuple<Side, int, int, int>;
    static std::mutex lock;
    static std::map<Key, std::shared_ptr<const std::vector<Field>>> made;
    const int width = width_of(plane.role), per_vector = 32 / width, lanes = plane.block_count * kLaneBlock;
    const std::lock_guard guard(lock);
    auto& found = made[Key{side, width, plane.padded, lanes}];
    if (found) return found;
    auto fields = std::make_shared<std::vector<Field>>();
    for (int32_t lane = 0; lane < lanes; ++lane)
        for (int32_t pos = 0; pos < plane.padded; ++pos) {
            const int d = pos % per_vector;
            const uint32_t host = uint32_t(lane / kLaneBlock) * plane.stride + uint32_t(pos / per_vector) * 32 +
                                  uint32_t(4 * (lane % kLaneBlock) + d % 4);
            const Site site = plane_site(side, 0, width, plane.padded, lanes / kQuadLanes, lane, pos);
            fields->push_back({site.word + site.shift / 8u, uint16_t(host),
                               uint8_t(width * (d / 4) << 4 | site.shift % 8), uint8_t((1 << width) - 1)});
        }
    found = std::move(fields);
    return found;
}

// Calls move(host byte, device byte, field) for the codes of a page in planes.
template <class Move>
void for_each_plane_field(const PageLayout& page, Move move) {
    for (int i = 0; i < page.plane_count; ++i) {
        const PlaneLayout& plane = page.planes[size_t(i)];
        const auto fields = plane_fields(page.side, plane);
        for (const Field& f : *fields)
            move(plane.offset + f.host, plane.offset + f.device, f);
    }
}
// Channels of each width, for kernels.
void put_ladder(const PageLayout& page, uint8_t* to) {
    uint16_t channels[kUnit / 2] = {};
    for (int i = 0; i < 7; ++i) {
        for (int t = 0; t < page.tier_count; ++t)
            if (page.tiers[size_t(t)].bits == kPlaneWidths[i]) channels[i] = page.tiers[size_t(t)].live;
        if (kPlaneWidths[i] == 0) channels[i] = page.zero_bits;
    }
    std::memcpy(to, channels, sizeof(channels));
}
// Planes of fewer lanes than quads hold stay as they are on the CPU: no kernel reads them.
bool has_quads(const PageLayout& page) {
    for (int i = 0; i < page.plane_count; ++i)
        if (page.planes[size_t(i)].block_count * kLaneBlock % kQuadLanes != 0) return false;
    return true;
}

// ---- everything else is copied, element by element ----

// Calls copy(host offset, device offset, bytes) for each raw channel, scale, offset, outlier and map entry.
template <class Copy>
void for_each_element(const PageLayout& host, const DevicePage& dev, Copy copy) {
    for (int32_t r = 0; r < host.raw_depth; ++r)
        for (int32_t lane = 0; lane < host.lanes; ++lane)
            copy(host.raw_offset + 2 * (uint32_t(r) * host.lanes + uint32_t(lane)),
                 raw_site(dev.side, dev.raw_offset, dev.quads, lane, r), 2u);

    const uint32_t size = bytes_of(host.params);
    const auto params = [&](int32_t group, int32_t from, int bits, uint32_t column, int32_t to) {
        const uint32_t h = (uint32_t(group) * host.columns + uint32_t(from)) * size;
        const uint32_t d = param_index(dev, bits, column, group, to) * size;
        if (dev.scales) copy(host.scale_offset + h, dev.scale_offset + d, size);
        if (dev.offsets) copy(host.zero_offset + h, dev.zero_offset + d, size);
    };
    for (int32_t g = 0; g < host.groups; ++g) {
        if (host.along_depth) {
            for (int32_t lane = 0; lane < host.lanes; ++lane)
                params(g, lane, 0, 0, lane);
            continue;
        }
        for (int t = 0; t < host.tier_count; ++t)
            for (int32_t pos = 0; pos < host.tiers[size_t(t)].live; ++pos)
                params(g, host.tiers[size_t(t)].param_first + pos, dev.tiers[size_t(t)].bits,
                       dev.tiers[size_t(t)].column, pos);
        for (int32_t i = 0; i < host.zero_bits; ++i)
            params(g, host.coded - host.zero_bits + i, 0, dev.zero_column, i);
    }

    if (host.outliers > 0) copy(host.outlier_offset, dev.outlier_offset, uint32_t(host.outliers) * kPageTokens * 4);

    if (host.map_bytes == 0) return;
    const uint32_t element = dev.map_element;
    const auto map = [&](int32_t ladder_pos, int32_t entry) {
        copy(host.map_offset + uint32_t(ladder_pos) * element, dev.map_offset + uint32_t(entry) * element, element);
    };
    for (int32_t r = 0; r < host.raw_depth; ++r)
        map(r, r);
    for (int t = 0; t < host.tier_count; ++t)
        for (int32_t pos = 0; pos < host.tiers[size_t(t)].live; ++pos)
            map(host.tiers[size_t(t)].first + pos, dev.raw_padded + dev.tiers[size_t(t)].column + pos);
    for (int32_t i = 0; i < host.zero_bits; ++i)
        map(host.dim - host.zero_bits + i, dev.raw_padded + dev.zero_column + i);
}

} // namespace

Ladder ladder_of_planes(const uint8_t* counts) {
    uint16_t channels[7];
    std::memcpy(channels, counts, sizeof(channels));
    Ladder ladder;
    for (int i = 0; i < 7; ++i)
        ladder.push(kPlaneWidths[i], channels[i]);
    return ladder;
}

void to_device_order(const PageLayout& page, const uint8_t* from, uint8_t* to) {
    if (same_order(page)) {
        std::memcpy(to, from, page.bytes);
        return;
    }
    const DevicePage dev = device_page(page);
    const auto move = [&](uint32_t host, uint32_t device, const Field& f) {
        to[device] = uint8_t(to[device] | ((from[host] >> (f.shifts >> 4)) & f.mask) << (f.shifts & 15));
    };
    if (dev.planes) {
        std::memcpy(to, from, page.bytes);
        if (has_quads(page)) {
            std::memset(to, 0, page.scale_offset);
            for_each_plane_field(page, move);
        }
        if (page.side == Side::key) put_ladder(page, to + dev.ladder_offset);
        return;
    }
    std::memset(to, 0, dev.bytes);
    if (page.levels == 3) {
        for_each_digit(page, dev, [&](uint32_t host, int power, uint32_t device, int shift) {
            to[device] = uint8_t(to[device] | from[host] / power % 3 << shift);
        });
    } else {
        for_each_field(page, dev, move);
    }
    for_each_element(page, dev,
                     [&](uint32_t host, uint32_t device, uint32_t n) { std::memcpy(to + device, from + host, n); });
}

void to_host_order(const PageLayout& page, const uint8_t* from, uint8_t* to) {
    if (same_order(page)) {
        std::memcpy(to, from, page.bytes);
        return;
    }
    const DevicePage dev = device_page(page);
    const auto move = [&](uint32_t host, uint32_t device, const Field& f) {
        to[host] = uint8_t(to[host] | ((from[device] >> (f.shifts & 15)) & f.mask) << (f.shifts >> 4));
    };
    if (dev.planes) {
        std::memcpy(to, from, page.bytes);
        if (has_quads(page)) {
            std::memset(to, 0, page.scale_offset);
            for_each_plane_field(page, move);
        }
        return;
    }
    std::memset(to, 0, page.bytes);
    if (page.levels == 3) {
        for_each_digit(page, dev, [&](uint32_t host, int power, uint32_t device, int shift) {
            to[host] = uint8_t(to[host] + (from[device] >> shift & 3) * power);
        });
    } else {
        for_each_field(page, dev, move);
    }
    for_each_element(page, dev,
                     [&](uint32_t host, uint32_t device, uint32_t n) { std::memcpy(to + host, from + device, n); });
}

} // namespace kvmosaic::cuda
