// Sequences from a device: as states, which a cache loads like any other, so nothing of it changes before all is sound.
#include <algorithm>
#include <cstring>

#include "cache/device_impl.h"
#include "cache/state_io.h"
#include "cache/state_write.h"
#include "kernels/cuda/order.h"
#include "kernels/cuda/transcode.h"

namespace kvmosaic::device {

namespace {

// Rows and pages of a slot, copied to the host a side at a time.
class ReadBack : public RowSource {
public:
    struct Half { // of one layer and side
        std::vector<uint8_t> front, recent, pages;
        std::vector<PageRef> refs; // [kv_heads][pages]
        int64_t first = 0;         // unit of pages[0]
        const SideStore* store = nullptr;
        size_t each = 0; // pages of a head
    };
    struct At {
        const Half* half;
        int32_t head;
        std::vector<const PageLayout*> layouts;
        std::vector<uint8_t> pages; // in the host's order
        std::vector<size_t> first;  // byte of each
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
        return {a.layouts[page], a.pages.data() + a.first[page], 0};
    }
    void reorder(int32_t index) {
        At& a = sides[size_t(index)];
        size_t end = 0;
        for (const PageLayout* l : a.layouts)
            a.first.push_back(end), end += l->bytes;
        a.pages.resize(end);
        for (size_t p = 0; p < a.layouts.size(); ++p)
            cuda::to_host_order(*a.layouts[p], bytes(a, p), a.pages.data() + a.first[p]);
    }
    const uint8_t* bytes(const At& a, size_t page) const {
        const PageRef& ref = a.half->refs[size_t(a.head) * a.half->each + page];
        return a.half->pages.data() + (int64_t(ref.unit) - a.half->first) * kPageUnit;
    }

private:
    static size_t rows_before(const At& a, const RawRows& rows) {
        return size_t(a.head) * size_t(rows.capacity) * size_t(a.half->store->dim) * 2;
    }
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
            const uint32_t most = s.page_units * kPageUnit;
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
            at.half = &half, at.head = h;
            for (size_t p = 0; p < half.each; ++p) {
                const PageRef& ref = half.refs[size_t(h) * half.each + p];
                at.layouts.push_back(im.page_layout(s, held, index, int64_t(p), ref.tiers, back.bytes(at, p)));
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
    parallel(im.options.threads, back.sides.size(), [&](size_t i) { back.reorder(int32_t(i)); });
    state::Writer w;
    host.put_identity(&w);
    Cache::Impl::put_positions(&w, positions, packed);
    host.put_statistics(&w, statistics);
    w.bytes(held.decided.data(), held.decided.size());
    host.put_rows(&w, rows, packed, back);
    return to->load(id, w.out);
}

Result<int64_t> DeviceCache::rows(int32_t slot) const {
    if (Status bad = impl_->check_slot(slot); !bad) return bad;
    std::vector<SequenceState> states;
    if (Status bad = impl_->read_states(slot, &states); !bad) return bad;
    return int64_t(states.front().rows);
}

} // namespace kvmosaic::device
