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
#include "cache/state_write.h"

namespace kvmosaic {

using state::extent;
using state::Extent;
using state::Tag;
using state::Writer;

namespace {

void save_decided(Writer* w, const SideState& side, size_t bytes_of_row) {
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
    if (side.pins) w->bytes(side.pins->bytes(), plan.pinned.size() * bytes_of_row);
}

class HeldRows : public RowSource {
public:
    explicit HeldRows(const Sequence& seq) : seq_(seq) {}
    const uint8_t* front(int32_t index) const override { return seq_.sides[size_t(index)].front->bytes(); }
    PageView packed(int32_t index, size_t page) const override {
        const Page& at = *seq_.sides[size_t(index)].slots[page].packed;
        return {at.layout, at.bytes(), 0};
    }
    const uint8_t* raw(int32_t index, size_t page) const override {
        return seq_.sides[size_t(index)].slots[page].raw->bytes();
    }

private:
    const Sequence& seq_;
};

} // namespace

size_t Cache::Impl::raw_row_bytes(int32_t index) const {
    return size_t(raw_layouts[size_t(index)]->dim) * bytes_of(plans[size_t(index)].raw);
}

void Cache::Impl::put_identity(Writer* w) const {
    state::put_head(&w->out);
    w->begin(Tag::model);
    state::put_model(w, shape);
    w->end();
    w->begin(Tag::method);
    w->text(method->spec());
    w->put(calibration);
    w->end();
    w->begin(Tag::plans);
    each_side([&](int32_t, int32_t, Side, int32_t index) { state::put_plan(w, plans[size_t(index)]); });
    w->end();
}

void Cache::Impl::put_positions(Writer* w, std::span<const int32_t> positions, const std::vector<int64_t>& packed) {
    w->begin(Tag::positions);
    w->put(uint64_t(positions.size()));
    w->bytes(positions.data(), positions.size_bytes());
    for (const int64_t rows : packed)
        w->put(uint64_t(rows));
    w->end();
}

void Cache::Impl::put_statistics(Writer* w, const std::vector<SideState>& sides) const {
    w->begin(Tag::statistics);
    each_side([&](int32_t, int32_t, Side, int32_t index) {
        w->array(sides[size_t(index)].abs_sum);
        w->put(sides[size_t(index)].query_count);
    });
    w->end();
}

void Cache::Impl::put_decided(Writer* w, const std::vector<SideState>& sides) const {
    w->begin(Tag::decided);
    each_side(
        [&](int32_t, int32_t, Side, int32_t index) { save_decided(w, sides[size_t(index)], raw_row_bytes(index)); });
    w->end();
}

void Cache::Impl::put_rows(Writer* w, int64_t rows, const std::vector<int64_t>& packed, const RowSource& source) const {
    w->begin(Tag::front);
    int64_t pages = 0;
    each_side([&](int32_t, int32_t, Side, int32_t index) {
        const int64_t front = std::min<int64_t>(plans[size_t(index)].window.front, rows);
        if (front > 0) w->bytes(source.front(index), size_t(front) * raw_row_bytes(index));
        pages = std::max(pages, (rows - front + kPageTokens - 1) / kPageTokens);
    });
    w->end();
    for (int64_t i = 0; i < 2 * pages; ++i) {
        const int64_t at = i / 2;
        const auto which = Side(i % 2);
        w->begin(state::pages_of(which), uint32_t(at));
        each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
            const int64_t beyond = rows - plans[size_t(index)].window.front;
            const Extent e = extent(packed[packed_index(layer, side)], beyond, at);
            if (side != which || e.rows == 0) return;
            if (e.coded > 0) {
                const PageView page = source.packed(index, size_t(at));
                state::put_ladder(w, state::ladder_of(*page.layout));
                w->put(page.layout->bytes);
                w->bytes(page.bytes, page.layout->bytes);
            }
            if (e.coded < e.rows)
                w->bytes(source.raw(index, size_t(at)) + size_t(e.coded) * raw_row_bytes(index),
                         size_t(e.rows - e.coded) * raw_row_bytes(index));
        });
        w->end();
    }
}

std::vector<uint8_t> Cache::save(SeqId id) const {
    const Impl& im = *impl_;
    const Sequence* seq = im.find(id);
    if (!seq) return {};
    Writer w;
    im.put_identity(&w);
    Impl::put_positions(&w, seq->positions, seq->packed);
    im.put_statistics(&w, seq->sides);
    im.put_decided(&w, seq->sides);
    im.put_rows(&w, seq->rows(), seq->packed, HeldRows(*seq));
    return std::move(w.out);
}

} // namespace kvmosaic
