// One sequence as bytes: a head (magic, version, byte order, page size) and sections in the order of state::Tag, see
// state_io.h. Little-endian. Pages come last, by page number a section of keys and one of values, so that sequences
// with a common beginning have equal sections there. What a section holds for each layer, KV head and side:
//
//   statistics  u32 D or 0, f32 sums[D], i64 count
//   decided     u8 1 or 0; if 1: u8 tiers, tiers x (u8 bits, u16 channels), f32 shift[], f32 scale[], u16 order[],
//               f32 mean[], u16 pinned[], each behind its u32 length, u8 1 and the pinned raw rows, or u8 0
//   front       min(front, rows) raw rows
//   keys i, values i
//               if any row of it is packed: u8 tiers, tiers x (u8 bits, u16 channels), u32 bytes, the page; raw rows
#include <algorithm>
#include <cstring>

#include "cache/impl.h"
#include "cache/state_page.h"
#include "cache/state_plan.h"

namespace kvmosaic {

namespace {

using state::extent;
using state::Extent;
using state::Tag;
using state::Writer;

void save_decided(Writer* w, const SideState& side, size_t row_bytes) {
    const bool decided = side.frozen && side.decided;
    w->put(uint8_t(decided));
    if (!decided) return;
    const SidePlan& plan = *side.frozen;
    state::put_ladder(w, plan.ladder);
    w->array(plan.transform.shift);
    w->array(plan.transform.scale);
    w->array(plan.transform.order);
    w->array(plan.mean);
    w->array(plan.pinned);
    w->put(uint8_t(side.pins != nullptr)); // not before the first page is packed
    if (side.pins) w->bytes(side.pins->bytes(), plan.pinned.size() * row_bytes);
}

} // namespace

std::vector<uint8_t> Cache::save(SeqId id) const {
    const Impl& im = *impl_;
    const Sequence* seq = im.find(id);
    if (!seq) return {};
    Writer w;
    state::put_head(&w.out);
    w.begin(Tag::model);
    state::put_model(&w, im.shape);
    w.end();
    w.begin(Tag::method);
    w.text(im.method->spec());
    w.put(im.calibration);
    w.end();
    w.begin(Tag::plans);
    im.each_side([&](int32_t, int32_t, Side, int32_t index) { state::put_plan(&w, im.plans[size_t(index)]); });
    w.end();
    w.begin(Tag::positions);
    w.put(uint64_t(seq->rows()));
    w.bytes(seq->positions.data(), seq->positions.size() * sizeof(int32_t));
    for (const int64_t packed : seq->packed)
        w.put(uint64_t(packed));
    w.end();
    const auto row_bytes = [&](int32_t index) {
        return size_t(im.raw_layouts[size_t(index)]->dim) * bytes_of(im.plans[size_t(index)].raw);
    };
    w.begin(Tag::statistics);
    im.each_side([&](int32_t, int32_t, Side, int32_t index) {
        w.array(seq->sides[size_t(index)].abs_sum);
        w.put(seq->sides[size_t(index)].query_count);
    });
    w.end();
    w.begin(Tag::decided);
    im.each_side(
        [&](int32_t, int32_t, Side, int32_t index) { save_decided(&w, seq->sides[size_t(index)], row_bytes(index)); });
    w.end();
    w.begin(Tag::front);
    size_t pages = 0;
    im.each_side([&](int32_t, int32_t, Side, int32_t index) {
        const int64_t front = std::min<int64_t>(im.plans[size_t(index)].window.front, seq->rows());
        if (front > 0) w.bytes(seq->sides[size_t(index)].front->bytes(), size_t(front) * row_bytes(index));
        pages = std::max(pages, seq->sides[size_t(index)].slots.size());
    });
    w.end();
    for (size_t i = 0; i < 2 * pages; ++i) {
        const size_t at = i / 2;
        const auto which = Side(i % 2);
        w.begin(state::pages_of(which), uint32_t(at));
        im.each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
            const SideState& held = seq->sides[size_t(index)];
            if (side != which || at >= held.slots.size()) return;
            const int64_t beyond = seq->rows() - im.plans[size_t(index)].window.front;
            const Extent e = extent(seq->packed[Impl::packed_index(layer, side)], beyond, int64_t(at));
            if (e.coded > 0) {
                const Page& page = *held.slots[at].packed;
                state::put_ladder(&w, state::ladder_of(*page.layout));
                w.put(page.layout->bytes);
                w.bytes(page.bytes(), page.layout->bytes);
            }
            if (e.coded < e.rows)
                w.bytes(held.slots[at].raw->bytes() + size_t(e.coded) * row_bytes(index),
                        size_t(e.rows - e.coded) * row_bytes(index));
        });
        w.end();
    }
    return std::move(w.out);
}

} // namespace kvmosaic
