#include "kernels/cuda/transcode.h"

#include <cstring>

namespace kvmosaic::cuda {
namespace {

constexpr int kDigits = 5; // three levels: five codes in a byte of the CPU's page, two bits each in the GPU's
constexpr int kPower[kDigits] = {1, 3, 9, 27, 81};

// ---- codes of the CPU page ----

uint32_t digit_byte(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos) {
    return uint32_t(lane / kLaneBlock) * page.lane_block_bytes + tier.offset +
           uint32_t(pos / kDigits * kLaneBlock + lane % kLaneBlock);
}

int host_code(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, const uint8_t* bytes) {
    if (page.levels == 3) return bytes[digit_byte(page, tier, lane, pos)] / kPower[pos % kDigits] % 3;
    CodeSite sites[2];
    const int n = code_sites(page, tier, lane, pos, sites);
    int code = 0;
    for (int i = 0; i < n; ++i)
        code |= ((bytes[sites[i].byte] >> sites[i].shift) & ((1 << sites[i].width) - 1)) << sites[i].weight;
    return code;
}

void put_host_code(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, int code,
                   uint8_t* bytes) {
    if (page.levels == 3) {
        uint8_t& at = bytes[digit_byte(page, tier, lane, pos)];
        at = uint8_t(at + code * kPower[pos % kDigits]);
        return;
    }
    CodeSite sites[2];
    const int n = code_sites(page, tier, lane, pos, sites);
    for (int i = 0; i < n; ++i)
        bytes[sites[i].byte] |= uint8_t(((code >> sites[i].weight) & ((1 << sites[i].width) - 1)) << sites[i].shift);
}

void put_device_code(const DevicePage& page, const DeviceTier& tier, int32_t lane, int32_t pos, int code,
                     uint8_t* bytes) {
    Site sites[3];
    const int n = device_sites(page.side, page.quads, tier, lane, pos, sites);
    for (int i = 0; i < n; ++i)
        bytes[sites[i].word + sites[i].shift / 8] |=
            uint8_t(((code >> sites[i].weight) & ((1 << sites[i].width) - 1)) << (sites[i].shift % 8));
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

void to_device_order(const PageLayout& page, const uint8_t* from, uint8_t* to) {
    if (same_order(page)) {
        std::memcpy(to, from, page.bytes);
        return;
    }
    const DevicePage dev = device_page(page);
    std::memset(to, 0, dev.bytes);
    for (int t = 0; t < page.tier_count; ++t)
        for (int32_t lane = 0; lane < page.lanes; ++lane)
            for (int32_t pos = 0; pos < page.tiers[size_t(t)].live; ++pos)
                put_device_code(dev, dev.tiers[size_t(t)], lane, pos,
                                host_code(page, page.tiers[size_t(t)], lane, pos, from), to);
    for_each_element(page, dev,
                     [&](uint32_t host, uint32_t device, uint32_t n) { std::memcpy(to + device, from + host, n); });
}

void to_host_order(const PageLayout& page, const uint8_t* from, uint8_t* to) {
    if (same_order(page)) {
        std::memcpy(to, from, page.bytes);
        return;
    }
    const DevicePage dev = device_page(page);
    std::memset(to, 0, page.bytes);
    for (int t = 0; t < page.tier_count; ++t)
        for (int32_t lane = 0; lane < page.lanes; ++lane)
            for (int32_t pos = 0; pos < page.tiers[size_t(t)].live; ++pos)
                put_host_code(page, page.tiers[size_t(t)], lane, pos,
                              device_code(dev, dev.tiers[size_t(t)], lane, pos, from), to);
    for_each_element(page, dev,
                     [&](uint32_t host, uint32_t device, uint32_t n) { std::memcpy(to + host, from + device, n); });
}

} // namespace kvmosaic::cuda
