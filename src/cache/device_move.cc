// Sequences to a device and back: pages change their byte order, nothing else.
#include <algorithm>
#include <cstring>

#include "cache/device_impl.h"
#include "cache/state_page.h"
#include "cache/state_write.h"
#include "kernels/cuda/order.h"
#include "kernels/cuda/transcode.h"

namespace kvmosaic::device {

namespace {

Status refuse(StatusCode code, const std::string& what) { return {code, "device cache: " + what}; }

// Row i of a sequence beyond its front lies at i % capacity, so the rows of a page lie together.
int64_t ring_row(const RawRows& rows, int64_t beyond) { return beyond % rows.capacity; }

// Bytes of a side's slot that go or come as one piece: rows of all its KV heads.
struct Stripe {
    uint8_t* at;
    size_t bytes;
};
Stripe stripe(const RawRows& rows, int32_t slot, int32_t kv_heads, int32_t dim) {
    const size_t bytes = size_t(kv_heads) * size_t(rows.capacity) * size_t(dim) * 2;
    return {static_cast<uint8_t*>(rows.base) + size_t(slot) * bytes, bytes};
}

} // namespace

Status DeviceCache::upload(int32_t slot, const Cache& from, SeqId id) {
    Impl& im = *impl_;
    Cache::Impl& host = *im.like->impl_;
    const Cache::Impl& source = *from.impl_;
    if (Status bad = im.check_slot(slot); !bad) return bad;
    const Sequence* seq = source.find(id);
    if (!seq) return refuse(StatusCode::invalid_argument, "there is no sequence " + std::to_string(id));
    if (seq->rows() > im.options.max_rows)
        return refuse(StatusCode::out_of_capacity, "sequence " + std::to_string(id) + " has " +
                                                       std::to_string(seq->rows()) + " rows, max_rows is " +
                                                       std::to_string(im.options.max_rows));
    // A cache of the same model, method and calibration has the same head of a state.
    state::Writer mine, theirs;
    host.put_identity(&mine);
    source.put_identity(&theirs);
    if (mine.out != theirs.out)
        return refuse(StatusCode::invalid_argument,
                      "sequence " + std::to_string(id) + " is of a cache '" + source.method->spec() +
                          "', this one is '" + host.method->spec() + "', or their models differ");

    // All pages first, in host memory: what can fail for lack of room fails before the slot changes.
    struct Moved {
        std::vector<uint8_t> pages;
        std::vector<PageRef> refs; // [kv_heads][pages of a head], units from the first
    };
    std::vector<Moved> moved(im.sides.size());
    Slot next;
    next.taken = true;
    next.positions = seq->positions;
    next.counts.resize(size_t(host.side_count));
    next.ladder.resize(size_t(host.side_count));
    next.pages.resize(size_t(host.side_count));
    state::Writer decided;
    source.put_decided(&decided, seq->sides);
    next.decided = std::move(decided.out);
    host.each_side([&](int32_t layer, int32_t head, Side which, int32_t index) {
        const SideState& held = seq->sides[size_t(index)];
        SideStore& s = im.side(layer, which);
        next.counts[size_t(index)] = held.query_count;
        next.undecided |= host.method->freezes(which) && s.packs && !held.decided;
        if (!s.packs) return;
        next.ladder[size_t(index)] = source.plan_of(held, index).ladder;
        Moved& to = moved[size_t(layer) * 2 + size_t(which)];
        const int64_t packed = seq->packed[Cache::Impl::packed_index(layer, which)];
        const auto count = size_t((packed + kPageTokens - 1) / kPageTokens);
        if (head == 0) to.pages.reserve(count * size_t(im.kv_heads(layer)) * s.page_units * kPageUnit);
        for (size_t p = 0; p < count; ++p) {
            const Page& page = *held.slots[p].packed;
            const uint32_t bytes = cuda::device_page(*page.layout).bytes;
            to.refs.push_back({uint32_t(to.pages.size() / kPageUnit), 0});
            if (s.varies) {
                const PageLayout* mine_too = host.intern(*page.layout);
                next.pages[size_t(index)].push_back(mine_too);
                to.refs.back().tiers = ladder_code(state::ladder_of(*mine_too), s.widths);
            }
            to.pages.resize(to.pages.size() + bytes);
            cuda::to_device_order(*page.layout, page.bytes(), to.pages.data() + to.pages.size() - bytes);
        }
    });
    for (size_t i = 0; i < moved.size(); ++i) {
        if (!im.sides[i].varies) continue;
        const auto units = uint32_t(moved[i].pages.size() / kPageUnit);
        if (Status bad = im.make_room(int32_t(i / 2), Side(i % 2), units); !bad) return bad;
    }

    // From here on only the device itself can fail; then the slot is empty.
    if (Status bad = clear(slot); !bad) return bad;
    for (int32_t layer = 0; layer < int32_t(host.shape.layers.size()); ++layer)
        for (const Side which : {Side::key, Side::value}) {
            if (im.kv_heads(layer) == 0) continue;
            SideStore& s = im.side(layer, which);
            const Moved& m = moved[size_t(layer) * 2 + size_t(which)];
            const int32_t kv_heads = im.kv_heads(layer);
            const Window& window = host.window(layer, which);
            const size_t row = size_t(s.dim) * 2;
            const int64_t rows = seq->rows(), front = std::min<int64_t>(window.front, rows);
            const int64_t packed = seq->packed[Cache::Impl::packed_index(layer, which)];
            const Stripe fronts = stripe(s.memory.front, slot, kv_heads, s.dim),
                         recents = stripe(s.memory.recent, slot, kv_heads, s.dim);
            std::vector<uint8_t> f(fronts.bytes, 0), r(recents.bytes, 0);
            std::vector<float> sums;
            std::vector<int32_t> counts;
            for (int32_t h = 0; h < kv_heads; ++h) {
                const SideState& held = seq->sides[size_t(s.first + 2 * h)];
                if (front > 0)
                    std::memcpy(f.data() + size_t(h) * size_t(s.memory.front.capacity) * row, held.front->bytes(),
                                size_t(front) * row);
                for (int64_t at = packed; at < rows - front; ++at) {
                    const uint8_t* page = held.slots[size_t(at / kPageTokens)].raw->bytes();
                    const int64_t to = h * int64_t(s.memory.recent.capacity) + ring_row(s.memory.recent, at);
                    std::memcpy(r.data() + size_t(to) * row, page + size_t(at % kPageTokens) * row, row);
                }
                sums.insert(sums.end(), held.abs_sum.begin(), held.abs_sum.end());
                counts.push_back(int32_t(held.query_count));
            }
            if (Status bad = im.memory->copy_in(fronts.at, f.data(), f.size()); !bad) return bad;
            if (Status bad = im.memory->copy_in(recents.at, r.data(), r.size()); !bad) return bad;
            if (s.sums) {
                const size_t first = size_t(slot) * size_t(kv_heads);
                if (Status bad = im.memory->copy_in(s.sums + first * size_t(s.dim), sums.data(), sums.size() * 4); !bad)
                    return bad;
                if (Status bad = im.memory->copy_in(s.counts + first, counts.data(), counts.size() * 4); !bad)
                    return bad;
            }
            const size_t each = m.refs.size() / size_t(kv_heads); // pages of a head
            uint32_t used = 0;
            if (s.varies)
                if (Status bad = im.memory->copy_out(&used, s.used, 4); !bad) return bad;
            for (int32_t h = 0; h < kv_heads && each > 0; ++h) {
                const int64_t entry = (int64_t(slot) * kv_heads + h) * im.stride;
                if (s.varies) {
                    std::vector<PageRef> refs(m.refs.begin() + int64_t(h * each), m.refs.begin() + int64_t((h + 1) * each));
                    for (PageRef& ref : refs)
                        ref.unit += used;
                    if (Status bad = im.memory->copy_in(s.memory.pages + entry, refs.data(), each * sizeof(PageRef)); !bad)
                        return bad;
                    continue;
                }
                const size_t bytes = each * s.page_units * kPageUnit;
                if (Status bad = im.memory->copy_in(s.memory.pool + entry * s.page_units * kPageUnit,
                                                    m.pages.data() + size_t(h) * bytes, bytes);
                    !bad)
                    return bad;
            }
            if (s.varies && !m.pages.empty()) {
                if (Status bad = im.memory->copy_in(s.memory.pool + int64_t(used) * kPageUnit, m.pages.data(),
                                                    m.pages.size());
                    !bad)
                    return bad;
                used += uint32_t(m.pages.size() / kPageUnit);
                if (Status bad = im.memory->copy_in(s.used, &used, 4); !bad) return bad;
            }
        }
    for (size_t g = 0; g < im.leaders.size(); ++g) {
        const int32_t layer = im.leaders[g];
        SequenceState state;
        state.slot = slot;
        state.rows = int32_t(seq->rows());
        state.front = int32_t(std::min<int64_t>(host.window(layer, Side::key).front, seq->rows()));
        state.key_packed = state.key_before = int32_t(seq->packed[Cache::Impl::packed_index(layer, Side::key)]);
        state.value_packed = state.value_before = int32_t(seq->packed[Cache::Impl::packed_index(layer, Side::value)]);
        state.stable_pages = std::min(state.key_packed, state.value_packed) / kPageTokens;
        if (Status bad = im.memory->copy_in(im.states[g] + slot, &state, sizeof(state)); !bad) return bad;
    }
    im.slots[size_t(slot)] = std::move(next);
    return {};
}

namespace {

// Rows and pages of a slot, copied to the host a side at a time.
class ReadBack : public RowSource {
public:
    struct Half { // of one layer and side
        std::vector<uint8_t> front, recent, pages;
        std::vector<PageRef> refs; // [kv_heads][pages]
        int64_t first = 0;         // unit of pages[0]
        const SideStore* store = nullptr;
        size_t each = 0;           // pages of a head
    };
    struct At {
        const Half* half;
        int32_t head;
        std::vector<const PageLayout*> layouts;
    };
    std::vector<Half> halves;
    std::vector<At> sides; // [side_count]

    const uint8_t* front(int32_t index) const override {
        const At& a = sides[size_t(index)];
        return a.half->front.data() + rows_before(a, a.half->store->memory.front);
    }
    const uint8_t* raw(int32_t index, size_t page) const override {
        const At& a = sides[size_t(index)];
        const RawRows& ring = a.half->store->memory.recent;
        return a.half->recent.data() + rows_before(a, ring) +
               size_t(ring_row(ring, int64_t(page) * kPageTokens)) * size_t(a.half->store->dim) * 2;
    }
    PageView packed(int32_t index, size_t page) const override {
        const At& a = sides[size_t(index)];
        const PageLayout* l = a.layouts[page];
        scratch_.resize(l->bytes);
        cuda::to_host_order(*l, bytes(a, page), scratch_.data());
        return {l, scratch_.data(), 0};
    }
    const uint8_t* bytes(const At& a, size_t page) const {
        const PageRef& ref = a.half->refs[size_t(a.head) * a.half->each + page];
        return a.half->pages.data() + (int64_t(ref.unit) - a.half->first) * kPageUnit;
    }

private:
    static size_t rows_before(const At& a, const RawRows& rows) {
        return size_t(a.head) * size_t(rows.capacity) * size_t(a.half->store->dim) * 2;
    }
    mutable std::vector<uint8_t> scratch_;
};

} // namespace

Status DeviceCache::download(int32_t slot, Cache* to, SeqId id, std::span<const int32_t> grown) const {
    const Impl& im = *impl_;
    Cache::Impl& host = *im.like->impl_;
    if (Status bad = im.check_slot(slot); !bad) return bad;
    const Slot& held = im.slots[size_t(slot)];
    const std::string name = "slot " + std::to_string(slot);
    if (!held.taken) return refuse(StatusCode::invalid_argument, name + " is empty");
    std::vector<SequenceState> states;
    if (Status bad = im.read_states(slot, &states); !bad) return bad;
    const int64_t rows = states.front().rows, more = rows - int64_t(held.positions.size());
    if (more < 0 || rows > im.options.max_rows)
        return refuse(StatusCode::corrupt, name + " says it has " + std::to_string(rows) + " rows; it came with " +
                                               std::to_string(held.positions.size()) + ", max_rows is " +
                                               std::to_string(im.options.max_rows));
    if (!grown.empty() && int64_t(grown.size()) != more)
        return refuse(StatusCode::invalid_argument, name + " has " + std::to_string(more) + " new rows, " +
                                                        std::to_string(grown.size()) + " positions are given");
    const int64_t beyond = rows - states.front().front;
    if (more > 0 && held.undecided && beyond >= kPageTokens)
        return refuse(StatusCode::unsupported, name + ": '" + host.method->spec() +
                                                   "' decides once a sequence, and it grew past those rows here");
    std::vector<int32_t> positions = held.positions;
    for (int64_t i = 0; i < more; ++i)
        positions.push_back(!grown.empty() ? grown[size_t(i)] : positions.empty() ? 0 : positions.back() + 1);

    ReadBack back;
    back.halves.resize(im.sides.size());
    back.sides.resize(size_t(host.side_count));
    std::vector<int64_t> packed(im.sides.size(), 0);
    std::vector<SideState> statistics(static_cast<size_t>(host.side_count));
    for (size_t i = 0; i < im.sides.size(); ++i) {
        const auto layer = int32_t(i / 2);
        const auto which = Side(i % 2);
        const int32_t kv_heads = im.kv_heads(layer);
        if (kv_heads == 0) continue;
        const SideStore& s = im.sides[i];
        const SequenceState& state = states[size_t(im.group_of[size_t(layer)])];
        packed[i] = which == Side::key ? state.key_packed : state.value_packed;
        ReadBack::Half& half = back.halves[i];
        half.store = &s;
        half.each = size_t(im.pages(layer, which, states));
        if (int64_t(half.each) > im.stride || packed[i] > beyond || beyond - packed[i] > s.memory.recent.capacity)
            return refuse(StatusCode::corrupt, name + " says that " + std::to_string(packed[i]) + " of " +
                                                   std::to_string(rows) + " rows are packed");
        const auto fetch = [&](const RawRows& from, std::vector<uint8_t>* into) {
            const Stripe piece = stripe(from, slot, kv_heads, s.dim);
            into->resize(piece.bytes);
            return im.memory->copy_out(into->data(), piece.at, piece.bytes);
        };
        if (Status bad = fetch(s.memory.front, &half.front); !bad) return bad;
        if (Status bad = fetch(s.memory.recent, &half.recent); !bad) return bad;
        half.refs.resize(size_t(kv_heads) * half.each);
        for (int32_t h = 0; h < kv_heads && half.each > 0; ++h) {
            const int64_t entry = (int64_t(slot) * kv_heads + h) * im.stride;
            if (Status bad = im.memory->copy_out(half.refs.data() + size_t(h) * half.each, s.memory.pages + entry,
                                                 half.each * sizeof(PageRef));
                !bad)
                return bad;
        }
        if (half.each > 0) {
            // One piece from the first page to the end of the last, with what lies between.
            const auto [low, high] = std::minmax_element(half.refs.begin(), half.refs.end(),
                                                         [](PageRef a, PageRef b) { return a.unit < b.unit; });
            const uint32_t most = s.varies ? in_planes(s.store.rule)
                                                 ? worst_page_bytes(s.store, which, s.dim, s.widths)
                                                 : cuda::worst_device_page_bytes(s.store, which, s.dim, s.widths)
                                           : s.page_units * kPageUnit;
            half.first = low->unit;
            const int64_t end = std::min<int64_t>(int64_t(high->unit) * kPageUnit + most, int64_t(s.units) * kPageUnit);
            if (int64_t(high->unit) >= int64_t(s.units))
                return refuse(StatusCode::corrupt, name + ": a page lies behind the pool; was it exhausted?");
            half.pages.assign(size_t(int64_t(high->unit - low->unit) * kPageUnit) + most, 0);
            if (Status bad = im.memory->copy_out(half.pages.data(), s.memory.pool + half.first * kPageUnit,
                                                 size_t(end - half.first * kPageUnit));
                !bad)
                return bad;
        }
        std::vector<float> sums(s.sums ? size_t(kv_heads) * size_t(s.dim) : 0);
        std::vector<int32_t> counts(s.sums ? size_t(kv_heads) : 0);
        if (s.sums) {
            const size_t first = size_t(slot) * size_t(kv_heads);
            if (Status bad = im.memory->copy_out(sums.data(), s.sums + first * size_t(s.dim), sums.size() * 4); !bad)
                return bad;
            if (Status bad = im.memory->copy_out(counts.data(), s.counts + first, counts.size() * 4); !bad) return bad;
        }
        const int64_t queries = host.shape.layers[size_t(layer)].heads / kv_heads * more;
        for (int32_t h = 0; h < kv_heads; ++h) {
            const int32_t index = s.first + 2 * h;
            ReadBack::At& at = back.sides[size_t(index)];
            at = {&half, h, {}};
            for (size_t p = 0; p < half.each; ++p) {
                const PageRef& ref = half.refs[size_t(h) * half.each + p];
                at.layouts.push_back(
                    im.page_layout(s, held, index, int64_t(p), ref.tiers, back.bytes(at, p)));
                if (!at.layouts.back())
                    return refuse(StatusCode::corrupt, name + ": the channel map of a page is broken");
            }
            SideState& counted = statistics[size_t(index)];
            if (!s.sums) {
                counted.query_count = held.counts[size_t(index)];
                continue;
            }
            counted.abs_sum.assign(sums.begin() + int64_t(h) * s.dim, sums.begin() + int64_t(h + 1) * s.dim);
            counted.query_count = counts[size_t(h)];
            if (counted.query_count != held.counts[size_t(index)] + queries)
                return refuse(StatusCode::invalid_argument,
                              name + ", layer " + std::to_string(layer) + ": " + std::to_string(more) +
                                  " new rows, but the statistics know " +
                                  std::to_string(counted.query_count - held.counts[size_t(index)]) + " of " +
                                  std::to_string(queries) + " query vectors (add_queries)");
        }
    }
    state::Writer w;
    host.put_identity(&w);
    Cache::Impl::put_positions(&w, positions, packed);
    host.put_statistics(&w, statistics);
    w.bytes(held.decided.data(), held.decided.size());
    host.put_rows(&w, rows, packed, back);
    return to->load(id, w.out);
}

Status DeviceCache::clear(int32_t slot) {
    Impl& im = *impl_;
    if (Status bad = im.check_slot(slot); !bad) return bad;
    im.slots[size_t(slot)] = Slot();
    SequenceState empty;
    empty.slot = slot;
    for (SequenceState* at : im.states)
        if (Status bad = im.memory->copy_in(at + slot, &empty, sizeof(empty)); !bad) return bad;
    for (int32_t layer = 0; layer < int32_t(im.group_of.size()); ++layer) {
        SideStore& s = im.side(layer, Side::key);
        if (!s.sums) continue;
        const size_t heads = size_t(im.kv_heads(layer)), first = size_t(slot) * heads;
        const std::vector<float> zeros(heads * size_t(s.dim), 0.0f);
        if (Status bad = im.memory->copy_in(s.sums + first * size_t(s.dim), zeros.data(), zeros.size() * 4); !bad)
            return bad;
        if (Status bad = im.memory->copy_in(s.counts + first, zeros.data(), heads * 4); !bad) return bad;
    }
    return {};
}

Result<int64_t> DeviceCache::rows(int32_t slot) const {
    if (Status bad = impl_->check_slot(slot); !bad) return bad;
    std::vector<SequenceState> states;
    if (Status bad = impl_->read_states(slot, &states); !bad) return bad;
    return int64_t(states.front().rows);
}

} // namespace kvmosaic::device
