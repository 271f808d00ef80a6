#include "store/planes.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kvmosaic {
namespace {

uint32_t round_up(uint32_t n, uint32_t to) { return (n + to - 1) / to * to; }
uint32_t ceil_div(uint32_t n, uint32_t by) { return (n + by - 1) / by; }

constexpr int32_t kDigits = 5; // codes of three levels in a byte: 3^5 = 243

// Adds a coded tier behind the ones that are there.
void add_tier(PageLayout* page, uint8_t bits, uint16_t live, uint16_t first) {
    TierLayout& tier = page->tiers[page->tier_count++];
    const bool digits = page->levels == 3;
    tier.bits = bits;
    tier.live = live;
    tier.padded = uint16_t(round_up(live, uint32_t(digits ? kDigits : granule(bits))));
    tier.first = first;
    tier.param_first = page->coded;
    tier.offset = page->lane_block_bytes;
    tier.bytes = digits ? tier.padded / kDigits * kLaneBlock : uint32_t(tier.padded) * bits;
    page->coded = uint16_t(page->coded + tier.padded);
    page->lane_block_bytes += tier.bytes;
}

// Offsets of everything behind the codes. Codes are a multiple of 8 bytes and raw channels of 2 * lanes.
void place_arrays(PageLayout* page) {
    page->columns = page->along_depth ? page->lanes : page->coded;
    page->raw_offset = page->lane_blocks * page->lane_block_bytes;
    page->scale_offset = page->raw_offset + uint32_t(page->raw_depth) * page->lanes * bytes_of(RawType::f16);
    const uint32_t params = uint32_t(page->groups) * page->columns * bytes_of(page->params);
    page->zero_offset = page->scale_offset + (page->has_scales() ? params : 0);
    page->outlier_offset = round_up(page->zero_offset + (page->has_offsets() ? params : 0), 2);
    page->map_offset = page->outlier_offset + uint32_t(page->outliers) * kPageTokens * 4;
    if (page->map_bytes > 0) page->map_offset = round_up(page->map_offset, page->map_bytes / page->dim);
    page->bytes = round_up(page->map_offset + page->map_bytes, kPageAlign);
}

uint32_t map_element(int32_t dim) { return dim > 256 ? 2 : 1; }
Axis along_lanes(Side side) { return side == Side::key ? Axis::tokens : Axis::channels; }

PageLayout empty_layout(const StoreSpec& spec, Side side, int32_t dim) {
    PageLayout page;
    page.kind = spec.kind;
    page.side = side;
    page.raw = spec.raw;
    page.params = spec.params;
    page.dim = uint16_t(dim);
    page.lanes = uint16_t(side == Side::key ? kPageTokens : dim);
    page.depth = uint16_t(side == Side::key ? dim : kPageTokens);
    page.lane_blocks = uint16_t(ceil_div(page.lanes, kLaneBlock));
    page.rule = spec.rule;
    page.levels = spec.levels;
    page.clip = spec.clip;
    page.book = spec.book;
    page.outliers = spec.outliers;
    page.along_depth = spec.axis != along_lanes(side);
    page.group = spec.group;
    if (spec.edge_groups > 0) {
        page.edges = spec.edges;
        page.groups = spec.edge_groups;
    } else {
        page.groups = uint16_t(ceil_div(page.along_depth ? page.depth : page.lanes, spec.group));
    }
    if (spec.kind == StoreKind::tiered && spec.page_map) page.map_bytes = uint32_t(dim) * map_element(dim);
    return page;
}

Status bad(const std::string& what) { return Status(StatusCode::invalid_argument, what); }

bool is_hybrid(GridRule rule) { return rule == GridRule::hybrid_1bit || rule == GridRule::hybrid_4level; }
bool is_codebook(GridRule rule) {
    return rule == GridRule::codebook_norm || rule == GridRule::codebook_range || rule == GridRule::codebook_fixed;
}

Status validate_book(const StoreSpec& spec) {
    if (spec.book == nullptr) return bad("book: a codebook store needs its levels");
    if (spec.bits > 4) return bad("bits = " + std::to_string(spec.bits) + " of a codebook: must be 1, 2, 3 or 4");
    if (spec.axis != Axis::channels) return bad("axis = tokens of a codebook: must be channels");
    if (spec.clip != 1.0f) return bad("clip: not in a codebook store");
    for (int i = 0; i < 1 << spec.bits; ++i)
        if (!std::isfinite(spec.book[i]) || (i > 0 && !(spec.book[i] > spec.book[i - 1])))
            return bad("book: its levels must ascend and be finite");
    return Status();
}

Status validate_rule(const StoreSpec& spec) {
    if ((spec.kind == StoreKind::codebook) != is_codebook(spec.rule))
        return bad("rule: a codebook rule and a codebook store need each other");
    if (spec.kind == StoreKind::codebook) {
        if (Status s = validate_book(spec); !s) return s;
    }
    if (spec.outliers > 0 && (spec.kind != StoreKind::codebook || spec.rule == GridRule::codebook_norm))
        return bad("outliers: only in a codebook store with a range");
    if ((spec.rule == GridRule::symmetric || is_hybrid(spec.rule)) && spec.kind == StoreKind::grid && spec.bits < 2)
        return bad("bits = 1: symmetric levels need at least 2");
    if (spec.kind == StoreKind::tiered && spec.rule != GridRule::asym && spec.rule != GridRule::midpoint &&
        spec.rule != GridRule::searched)
        return bad("rule: a tiered store is asymmetric");
    if (spec.rule == GridRule::searched && (spec.kind != StoreKind::tiered || spec.group != kPageTokens))
        return bad("rule: searched ranges are those of a tiered store with groups of a page");
    if (spec.rule == GridRule::searched && (spec.shrinks < 1 || spec.shrinks > 7))
        return bad("shrinks = " + std::to_string(spec.shrinks) + ": must be 1 to 7");
    if (spec.rule == GridRule::fitted) {
        if (spec.kind != StoreKind::grid || spec.axis != Axis::channels || spec.bits > 6 ||
            (spec.wide > 0 && spec.bits > 5))
            return bad("rule: fitted steps are those of a grid of 1 to 6 bits with groups of channels");
        if (spec.wide % kLaneBlock != 0) return bad("wide = " + std::to_string(spec.wide) + ": no multiple of 8");
    }
    if (in_planes(spec.rule) && (spec.clip != 1.0f || spec.levels != 0 || spec.edge_groups != 0))
        return bad("clip, levels and edges: not in a store in planes");
    if (is_hybrid(spec.rule) && spec.params == ParamType::f8e4m3)
        return bad("params = f8e4m3: a hybrid grid needs f16 or bf16");
    if (spec.rule == GridRule::hybrid_1bit && spec.bits != 2)
        return bad("bits = " + std::to_string(spec.bits) + ": the hybrid with two levels is one of 2 bits");
    if (spec.levels != 0 && (spec.levels != 3 || spec.bits != 2 || spec.kind != StoreKind::grid ||
                             (spec.rule != GridRule::asym && spec.rule != GridRule::symmetric)))
        return bad("levels = " + std::to_string(spec.levels) +
                   ": must be 0, or 3 in a grid of 2 bits, asymmetric or symmetric");
    if (!(spec.clip > 0.0f && spec.clip <= 1.0f))
        return bad("clip = " + std::to_string(spec.clip) + ": must be above 0 and at most 1");
    return Status();
}

// Unequal groups of channels: ascending, from 0 to dim.
Status validate_edges(const StoreSpec& spec, int32_t dim) {
    if (spec.edge_groups == 0) return Status();
    if (spec.axis != Axis::channels || spec.edges == nullptr) return bad("edges: only for groups along channels");
    for (int32_t g = 0; g < spec.edge_groups; ++g)
        if (spec.edges[g] >= spec.edges[g + 1]) return bad("edges: must ascend");
    if (spec.edges[0] != 0 || spec.edges[spec.edge_groups] != dim)
        return bad("edges: must run from 0 to " + std::to_string(dim));
    return Status();
}

} // namespace

bool has_offsets(GridRule rule) {
    return rule == GridRule::asym || rule == GridRule::midpoint || rule == GridRule::integer || is_hybrid(rule) ||
           rule == GridRule::codebook_range || in_planes(rule);
}

bool has_scales(GridRule rule) { return rule != GridRule::codebook_fixed; }

// Place of a width in the order of a ladder: descending, or that of the planes.
static int ladder_rank(int bits, bool planes) {
    constexpr int kOrder[] = {8, 4, 6, 2, 3, 1, 0};
    if (!planes) return -bits;
    for (int i = 0; i < 7; ++i)
        if (kOrder[i] == bits) return i;
    return -1;
}

bool is_width(int bits) { return bits == 1 || bits == 2 || bits == 3 || bits == 4 || bits == 6 || bits == 8; }

int32_t granule(int bits) {
    switch (bits) {
    case 1:
    case 3:
        return 32;
    case 2:
    case 6:
        return 16;
    case 4:
    case 8:
        return 8;
    default:
        return 1; // 0 and 16 bits have no code planes
    }
}

Ladder Ladder::uniform(uint8_t bits, uint16_t channels) {
    Ladder ladder;
    ladder.push(bits, channels);
    return ladder;
}

void Ladder::push(uint8_t bits, uint16_t channels) {
    if (channels == 0 || count == kMaxTiers) return;
    tiers[count++] = Tier{bits, channels};
}

PageLayout raw_layout(RawType type, Side side, int32_t dim, int32_t tokens) {
    PageLayout page;
    page.kind = StoreKind::raw;
    page.side = side;
    page.raw = type;
    page.dim = uint16_t(dim);
    page.tokens = uint16_t(tokens);
    page.lanes = uint16_t(side == Side::key ? tokens : dim);
    page.depth = uint16_t(side == Side::key ? dim : tokens);
    page.bytes = round_up(uint32_t(tokens) * uint32_t(dim) * bytes_of(type), kPageAlign);
    page.scale_offset = page.zero_offset = page.outlier_offset = page.map_offset = page.bytes;
    return page;
}

PageLayout layout(const StoreSpec& spec, Side side, int32_t dim, const Ladder& ladder) {
    if (spec.kind == StoreKind::raw) return raw_layout(spec.raw, side, dim);
    PageLayout page = empty_layout(spec, side, dim);
    if (in_planes(spec.rule)) return planes_layout(spec, side, ladder, page);
    if (spec.kind != StoreKind::tiered) {
        add_tier(&page, spec.bits, page.depth, 0);
    } else {
        uint16_t first = 0;
        for (int i = 0; i < ladder.count; ++i) {
            const Tier& tier = ladder.tiers[size_t(i)];
            if (tier.bits == 16)
                page.raw_depth = tier.channels;
            else if (tier.bits == 0)
                page.zero_bits = tier.channels;
            else
                add_tier(&page, tier.bits, tier.channels, first);
            first = uint16_t(first + tier.channels);
        }
        page.coded = uint16_t(page.coded + page.zero_bits); // their columns are the last ones
    }
    place_arrays(&page);
    return page;
}

// A page's size is a sum over widths of a cost that grows with the number of channels of that width, and is rounded up
// at the end. So the largest sum is found exactly by dynamic programming over channels spent: a coded tier gains only
// at the first channel of each granule, the widths without padding (16 and 0) take what is left, one of them all of it.
uint32_t worst_page_bytes(const StoreSpec& spec, Side side, int32_t dim, const std::vector<uint8_t>& widths) {
    if (spec.kind != StoreKind::tiered) return layout(spec, side, dim).bytes;
    static const std::vector<uint8_t> kAll = {16, 8, 6, 4, 3, 2, 1, 0};
    const std::vector<uint8_t>& used = widths.empty() ? kAll : widths;
    PageLayout page = empty_layout(spec, side, dim);
    if (in_planes(spec.rule)) { // all planes of every channel, or what the plans promise
        page = planes_layout(spec, side, Ladder::uniform(8, uint16_t(dim)), page);
        const uint32_t codes = page.scale_offset, most = spec.vectors * 32u * page.lane_blocks;
        return round_up(page.map_offset + page.map_bytes - codes + (most > 0 ? std::min(codes, most) : codes),
                        kPageAlign);
    }
    const uint32_t column = 2 * page.groups * bytes_of(page.params);
    std::vector<uint32_t> best(size_t(dim) + 1, 0); // [channels spent] most bytes, at most that many channels
    uint32_t linear = 0;
    for (size_t w = 0; w < used.size(); ++w) {
        const int bits = used[w];
        if (std::find(used.begin(), used.begin() + std::ptrdiff_t(w), used[w]) != used.begin() + std::ptrdiff_t(w))
            continue; // named twice
        if (bits == 16) linear = std::max(linear, page.lanes * bytes_of(RawType::f16));
        if (bits == 0) linear = std::max(linear, column);
        if (!is_width(bits)) continue;
        const int32_t step = granule(bits);
        const uint32_t chunk = uint32_t(step) * (page.lane_blocks * uint32_t(bits) + column);
        for (int32_t spent = dim; spent >= 1; --spent) {
            for (int32_t n = 1, chunks = 1; n <= spent; n += step, ++chunks)
                best[size_t(spent)] = std::max(best[size_t(spent)], best[size_t(spent - n)] + uint32_t(chunks) * chunk);
        }
    }
    uint32_t most = 0;
    for (int32_t spent = 0; spent <= dim; ++spent)
        most = std::max(most, best[size_t(spent)] + uint32_t(dim - spent) * linear);
    const uint32_t element = spec.page_map ? map_element(dim) : 0;
    return round_up(round_up(most, 2) + uint32_t(dim) * element, kPageAlign);
}

Status validate(const StoreSpec& spec, Side side, int32_t dim) {
    if (dim < 1 || dim > kMaxHeadDim)
        return bad("head size = " + std::to_string(dim) + ": must be from 1 to " + std::to_string(kMaxHeadDim));
    if (spec.kind == StoreKind::raw) return Status();
    const bool five = spec.rule == GridRule::fitted && spec.bits == 5;
    if (spec.kind != StoreKind::tiered && !is_width(spec.bits) && !five)
        return bad("bits = " + std::to_string(spec.bits) + ": must be 1, 2, 3, 4, 6 or 8");
    if (spec.kind == StoreKind::tiered && side == Side::value)
        return Status(StatusCode::unsupported,
                      "store = tiered on the value side: not available yet; allowed: key side");
    if (Status s = validate_rule(spec); !s) return s;
    if (Status s = validate_edges(spec, dim); !s) return s;
    if (spec.kind == StoreKind::tiered && spec.axis != Axis::tokens)
        return bad("axis = channels in a tiered store: must be tokens, each channel has its own scale");
    const int32_t most = spec.axis == Axis::tokens ? kPageTokens : kMaxHeadDim;
    if (spec.group < 8 || spec.group > most || spec.group % 8 != 0)
        return bad("group = " + std::to_string(spec.group) + ": must be a multiple of 8 from 8 to " +
                   std::to_string(most));
    return Status();
}

Status validate(const Ladder& ladder, int32_t dim, const StoreSpec& spec) {
    const bool planes = in_planes(spec.rule);
    if (ladder.count < 1 || ladder.count > kMaxTiers)
        return bad("ladder: has " + std::to_string(ladder.count) + " tiers, must have 1 to " +
                   std::to_string(kMaxTiers));
    int32_t sum = 0;
    for (int i = 0; i < ladder.count; ++i) {
        const Tier& tier = ladder.tiers[size_t(i)];
        const std::string where = "ladder tier " + std::to_string(i) + ": ";
        if (tier.bits != 0 && tier.bits != 16 && !is_width(tier.bits))
            return bad(where + "bits = " + std::to_string(tier.bits) + ", must be 0, 1, 2, 3, 4, 6, 8 or 16");
        if (planes && tier.bits == 16) return bad(where + "bits = 16, not in a store in planes");
        if (i > 0 && ladder_rank(tier.bits, planes) <= ladder_rank(ladder.tiers[size_t(i) - 1].bits, planes))
            return bad(where + "bits = " + std::to_string(tier.bits) + " behind " +
                       std::to_string(ladder.tiers[size_t(i) - 1].bits) +
                       (planes ? ", must be in the order 8, 4, 6, 2, 3, 1, 0" : ", must be below it (widest first)"));
        if (tier.channels < 1) return bad(where + "has no channels, must have at least 1");
        sum += tier.channels;
    }
    if (sum != dim)
        return bad("ladder: its channels add up to " + std::to_string(sum) + ", must be the head size " +
                   std::to_string(dim));
    if (spec.vectors > 0) {
        const PageLayout page = layout(spec, Side::key, dim, ladder);
        uint32_t used = 0;
        for (int i = 0; i < page.plane_count; ++i)
            used += page.planes[size_t(i)].stride / 32;
        if (used > spec.vectors)
            return bad("ladder: needs " + std::to_string(used) + " vectors a lane block, at most " +
                       std::to_string(spec.vectors));
    }
    return Status();
}

int code_sites(const PageLayout& page, const TierLayout& tier, int32_t lane, int32_t pos, CodeSite out[2]) {
    const int32_t chunk = granule(tier.bits);
    const uint32_t base = uint32_t(lane / kLaneBlock) * page.lane_block_bytes + tier.offset +
                          uint32_t(pos / chunk) * uint32_t(chunk) * tier.bits;
    const int32_t in_chunk = pos % chunk;
    // A plane of `width` bits whose first vector lies `start` bytes into the chunk.
    const auto site = [&](uint32_t start, int width, int weight) {
        const int32_t per_vector = 32 / width, d = in_chunk % per_vector;
        const uint32_t vector = base + start + uint32_t(in_chunk / per_vector) * 32;
        return CodeSite{vector + uint32_t(4 * (lane % kLaneBlock) + d % 4), uint8_t(width * (d / 4)), uint8_t(width),
                        uint8_t(weight)};
    };
    switch (tier.bits) {
    case 1:
    case 2:
    case 4:
        out[0] = site(0, tier.bits, 0);
        return 1;
    case 3:
        out[0] = site(0, 2, 0);
        out[1] = site(64, 1, 2);
        return 2;
    case 6:
        out[0] = site(0, 4, 0);
        out[1] = site(64, 2, 4);
        return 2;
    case 8:
        out[0] = site(0, 4, 0);
        out[1] = site(32, 4, 4);
        return 2;
    default:
        return 0;
    }
}

} // namespace kvmosaic
