#include "kvmosaic/layout.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace kvmosaic::tool {

namespace {

const char* kind_name(StoreKind kind) {
    switch (kind) {
    case StoreKind::raw:
        return "raw";
    case StoreKind::grid:
        return "grid";
    case StoreKind::tiered:
        return "tiered";
    case StoreKind::codebook:
        return "codebook";
    }
    return "?";
}

// What runs along the lanes and along the depth of a side's matrix.
const char* lane_word(const PageLayout& page) { return page.side == Side::key ? "tokens" : "channels"; }
const char* depth_word(const PageLayout& page) { return page.side == Side::key ? "channels" : "tokens"; }

const char* role_name(PlaneRole role) {
    switch (role) {
    case PlaneRole::low4:
        return "low4";
    case PlaneRole::high4:
        return "high4";
    case PlaneRole::two:
        return "two";
    case PlaneRole::one:
        return "one";
    }
    return "?";
}

// Pages in planes: one for all widths that have it, and parameters of 8 bits.
void add_planes(const PageLayout& page, std::vector<Part>* parts) {
    const bool key = page.side == Side::key;
    for (int i = 0; i < page.plane_count; ++i) {
        const PlaneLayout& p = page.planes[size_t(i)];
        const std::string dead = p.padded > p.live ? fmt::format(" + {} dead", p.padded - p.live) : "";
        const std::string blocks =
            p.block_count == page.lane_blocks
                ? fmt::format("{} lane blocks", p.block_count)
                : fmt::format("lane blocks {} to {}", p.block_first, p.block_first + p.block_count - 1);
        parts->push_back({fmt::format("plane {}, {} bit{}: {} (of 8 {}), {}{} {} from place {}", role_name(p.role),
                                      width_of(p.role), width_of(p.role) > 1 ? "s" : "", blocks, lane_word(page),
                                      p.live, dead, depth_word(page), p.first),
                          p.offset, p.stride * p.block_count});
    }
    parts->push_back({fmt::format("logarithms of {} [{}] u8", key ? "half ranges" : "steps", page.columns),
                      page.scale_offset, page.columns});
    parts->push_back({fmt::format("{} [{}] i8", key ? "middles" : "means", page.dim), page.zero_offset, page.dim});
    parts->push_back(
        {key ? "unit of the logarithms f16" : "units of logarithms and means f16", page.unit_offset, key ? 2u : 4u});
}

} // namespace

std::vector<Part> parts_of(const PageLayout& page) {
    std::vector<Part> parts;
    const bool planes = in_planes(page.rule);
    if (planes) add_planes(page, &parts);
    if (page.kind == StoreKind::raw) {
        parts.push_back({fmt::format("elements [{} tokens][{} channels] {}", page.tokens, page.dim, name_of(page.raw)),
                         0, uint32_t(page.tokens) * page.dim * bytes_of(page.raw)});
    }
    // Lane blocks differ in nothing but their place, so the first is told tier by tier and the others together.
    for (int i = 0; !planes && i < page.tier_count; ++i) {
        const TierLayout& t = page.tiers[size_t(i)];
        const std::string dead = t.padded > t.live ? fmt::format(" + {} dead", t.padded - t.live) : "";
        const std::string width = page.levels == 3 ? "in three levels, five a byte" : fmt::format("at {} bit", t.bits);
        parts.push_back({fmt::format("codes, lane block 0 (8 {}): {} {}{} {}", lane_word(page), t.live,
                                     depth_word(page), dead, width),
                         t.offset, t.bytes});
    }
    if (page.lane_blocks > 1 && page.lane_block_bytes > 0) {
        parts.push_back({fmt::format("codes, lane blocks 1 to {}, each as above, {} bytes apart", page.lane_blocks - 1,
                                     page.lane_block_bytes),
                         page.lane_block_bytes, (page.lane_blocks - 1u) * page.lane_block_bytes});
    }
    if (page.raw_depth > 0) {
        parts.push_back({fmt::format("raw channels [{}][{} tokens] f16", page.raw_depth, page.lanes), page.raw_offset,
                         uint32_t(page.raw_depth) * page.lanes * bytes_of(RawType::f16)});
    }
    if (page.kind != StoreKind::raw && !planes) {
        const uint32_t each = uint32_t(page.groups) * page.columns * bytes_of(page.params);
        const std::string size = page.edges ? "unequal sizes of" : fmt::format("{}", page.group);
        const std::string shape = fmt::format(
            "[{} groups of {} {}][{} {}] {}", page.groups, size, page.along_depth ? depth_word(page) : lane_word(page),
            page.columns, page.along_depth ? lane_word(page) : depth_word(page), name_of(page.params));
        if (page.has_scales()) parts.push_back({"scales " + shape, page.scale_offset, each});
        if (page.has_offsets()) parts.push_back({"offsets " + shape, page.zero_offset, each});
    }
    if (page.outliers > 0) {
        parts.push_back(
            {fmt::format("values kept apart [{} tokens][{}] channel u16, value f16", page.tokens, page.outliers),
             page.outlier_offset, uint32_t(page.tokens) * page.outliers * 4u});
    }
    if (page.map_bytes > 0) {
        parts.push_back({fmt::format("channel map [{}] u{}", page.dim, 8 * page.map_bytes / page.dim), page.map_offset,
                         page.map_bytes});
    }
    // What no part covers is padding, and it is counted too.
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.offset < b.offset; });
    std::vector<Part> whole;
    uint32_t at = 0;
    for (Part& part : parts) {
        if (part.bytes == 0) continue;
        if (part.offset > at) whole.push_back({"padding", at, part.offset - at});
        at = part.offset + part.bytes;
        whole.push_back(std::move(part));
    }
    if (page.bytes > at) whole.push_back({"padding", at, page.bytes - at});
    return whole;
}

std::string ladder_text(const PageLayout& page) {
    if (page.kind == StoreKind::raw) return fmt::format("{}:{}", 8 * bytes_of(page.raw), page.dim);
    std::string text;
    const auto add = [&text](int bits, int channels) {
        if (channels > 0) text += fmt::format("{}{}:{}", text.empty() ? "" : " ", bits, channels);
    };
    add(16, page.raw_depth);
    if (page.wide > 0) {
        add(page.tiers[0].bits + 1, page.wide);
        add(page.tiers[0].bits, page.dim - page.wide);
        return text;
    }
    // Grids and codebooks have one width for all channels; on the value side the depth is the tokens.
    for (int i = 0; i < page.tier_count; ++i) {
        add(page.tiers[size_t(i)].bits, page.kind != StoreKind::tiered ? page.dim : page.tiers[size_t(i)].live);
    }
    add(0, page.zero_bits);
    return text;
}

std::string draw(const PageLayout& page) {
    constexpr int kBar = 24;
    std::string out =
        fmt::format("{} page, {} store: {} tokens x {} channels, {} bytes, {:.3f} true bits per value\n",
                    name_of(page.side), kind_name(page.kind), page.tokens, page.dim, page.bytes, page.true_bits());
    out += fmt::format("  {:>7} {:>7} {:>6}  {:<{}}  {}\n", "offset", "bytes", "%", "", kBar, "part");
    for (const Part& part : parts_of(page)) {
        const double share = double(part.bytes) / page.bytes;
        const int full = std::max(1, int(std::lround(share * kBar)));
        out += fmt::format("  {:>7} {:>7} {:>6.2f}  {:#<{}}{:<{}}  {}\n", part.offset, part.bytes, 100 * share, "",
                           full, "", kBar - full, part.what);
    }
    return out + fmt::format("  {:>7} end\n", page.bytes);
}

nlohmann::ordered_json to_json(const PageLayout& page) {
    nlohmann::ordered_json parts = nlohmann::ordered_json::array();
    for (const Part& part : parts_of(page)) {
        parts.push_back({{"offset", part.offset}, {"bytes", part.bytes}, {"what", part.what}});
    }
    return {{"side", name_of(page.side)},  {"store", kind_name(page.kind)}, {"tokens", page.tokens},
            {"channels", page.dim},        {"bytes", page.bytes},           {"true_bits", page.true_bits()},
            {"ladder", ladder_text(page)}, {"parts", std::move(parts)}};
}

} // namespace kvmosaic::tool
