// Reading what state.cc writes. Nothing of the cache changes before all of it has been read and found sound.
#include <algorithm>
#include <cmath>

#include "cache/impl.h"
#include "cache/state_page.h"
#include "cache/state_plan.h"

namespace kvmosaic {

using state::extent;
using state::Extent;
using state::Reader;
using state::Section;
using state::Tag;

// Reads one state into a fresh sequence; what it has made stays there for the caller to free when it fails.
class Cache::Impl::Loader {
public:
    Loader(Impl& im, Sequence* seq, std::vector<Section> sections)
        : im_(im), seq_(*seq), sections_(std::move(sections)) {}

    const std::vector<Section>& sections() const { return sections_; }
    const Sequence& sequence() const { return seq_; }

    // `earlier`: states that were read before, whose equal pages are shared.
    Status read(const std::vector<Loader>& earlier) {
        Status st = part(Tag::model, 0, [&](Reader& r) { model(r); });
        if (st) st = part(Tag::method, 0, [&](Reader& r) { method(r); });
        if (st) st = part(Tag::plans, 0, [&](Reader& r) { plans(r); });
        if (st) st = part(Tag::positions, 0, [&](Reader& r) { positions(r); });
        if (st) st = part(Tag::statistics, 0, [&](Reader& r) { statistics(r); });
        if (st) st = part(Tag::decided, 0, [&](Reader& r) { decided(r); });
        if (st && !share_front(earlier)) st = part(Tag::front, 0, [&](Reader& r) { front(r); });
        size_t pages = 0;
        for (size_t i = 0; st && i < seq_.sides.size(); ++i) {
            SideState& side = seq_.sides[i];
            const int64_t beyond = seq_.rows() - im_.plans[i].window.front;
            side.slots.resize(size_t(std::max<int64_t>(0, beyond + kPageTokens - 1) / kPageTokens));
            pages = std::max(pages, side.slots.size());
        }
        for (size_t i = 0; st && i < 2 * pages; ++i) {
            const auto side = Side(i % 2);
            if (share_page(earlier, side, i / 2)) continue;
            st = part(state::pages_of(side), uint32_t(i / 2), [&](Reader& r) { page(r, side, i / 2); });
        }
        if (st && next_ < sections_.size())
            st = Status(StatusCode::corrupt, std::string("section ") + state::name_of(sections_[next_].tag) +
                                                 ": there is one more than the state has room for");
        return st;
    }

private:
    template <typename F>
    Status part(Tag tag, uint32_t number, F f) {
        const std::string where =
            std::string(state::name_of(tag)) + (tag >= Tag::keys ? " " + std::to_string(number) : std::string());
        if (next_ >= sections_.size() || sections_[next_].tag != tag || sections_[next_].number != number)
            return {StatusCode::corrupt, "section " + where + ": it is missing"};
        Reader r(sections_[next_++].bytes);
        f(r);
        if (!memory_) return {StatusCode::out_of_memory, "no memory for the pages of the state"};
        if (r.ok() && r.left() > 0) r.refuse("length: " + std::to_string(r.left()) + " bytes too many");
        if (r.ok()) return {};
        return {StatusCode::corrupt, where + ": " + r.wrong()};
    }

    void model(Reader& r) {
        ModelShape saved;
        state::get_model(&r, &saved);
        if (r.ok()) r.refuse(state::model_gap(saved, im_.shape));
    }

    void method(Reader& r) {
        std::string spec;
        r.text(&spec, 4096, "spec");
        if (r.ok() && state::portable(spec) != state::portable(im_.method->spec()))
            r.refuse("spec: the state was saved with '" + spec + "', this cache is '" + im_.method->spec() + "'");
        const uint64_t hash = r.get<uint64_t>("calibration");
        r.expect(hash == im_.calibration, "calibration: the state was saved with another calibration file");
    }

    void plans(Reader& r) {
        im_.each_side([&](int32_t layer, int32_t head, Side side, int32_t index) {
            if (!r.ok()) return;
            state::StoredPlan saved;
            state::get_plan(&r, &saved);
            if (!r.ok()) return;
            const std::string gap = state::plan_gap(saved, im_.plans[size_t(index)]);
            if (!gap.empty())
                r.refuse("layer " + std::to_string(layer) + ", head " + std::to_string(head) + ", " + name_of(side) +
                         " side: " + gap);
        });
    }

    void positions(Reader& r) {
        const uint64_t rows = r.get<uint64_t>("rows");
        if (rows > r.left() / sizeof(int32_t)) r.refuse("rows: " + std::to_string(rows) + " do not fit the state");
        if (im_.options.max_rows > 0 && rows > uint64_t(im_.options.max_rows))
            r.refuse("rows: the state holds " + std::to_string(rows) + ", the context at most " +
                     std::to_string(im_.options.max_rows));
        if (!r.ok()) return;
        seq_.positions.resize(size_t(rows));
        r.bytes(seq_.positions.data(), size_t(rows) * sizeof(int32_t), "positions");
        r.expect(std::is_sorted(seq_.positions.begin(), seq_.positions.end()), "positions: they decrease");
        r.expect(rows == 0 || seq_.positions.front() >= 0, "positions: one is negative");
        for (size_t i = 0; r.ok() && i < seq_.packed.size(); ++i) {
            const int32_t layer = int32_t(i / 2);
            const bool has = im_.shape.layers[size_t(layer)].has_kv();
            const Window w = has ? im_.window(layer, Side(i % 2)) : Window();
            const uint64_t packed = r.get<uint64_t>("packed rows");
            const bool fits = packed == 0 || (w.flush > 0 && packed % uint64_t(w.flush) == 0 &&
                                              packed <= uint64_t(std::max<int64_t>(0, int64_t(rows) - w.front)));
            if (!fits)
                r.refuse("packed rows: " + std::to_string(packed) + " of layer " + std::to_string(layer) +
                         " do not fit " + std::to_string(rows) + " rows");
            else
                seq_.packed[i] = int64_t(packed);
        }
    }

    void statistics(Reader& r) {
        im_.each_side([&](int32_t, int32_t, Side, int32_t index) {
            SideState& side = seq_.sides[size_t(index)];
            const size_t channels = side.abs_sum.size();
            r.array(&side.abs_sum, channels, "sums");
            r.expect(side.abs_sum.size() == channels, "sums: not as many as the method keeps");
            for (const float x : side.abs_sum)
                if (!(x >= 0.0f) || !std::isfinite(x)) r.refuse("sums: one is negative or not finite");
            side.query_count = r.get<int64_t>("count");
            r.expect(side.query_count >= 0, "count: it is negative");
        });
    }

    void decided(Reader& r) {
        im_.each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
            if (!r.ok() || !memory_) return;
            const int64_t packed = seq_.packed[Impl::packed_index(layer, side)];
            decided_side(r, layer, side, index, packed > 0);
        });
    }

    void decided_side(Reader& r, int32_t layer, Side side, int32_t index, bool packed) {
        const SidePlan& initial = im_.plans[size_t(index)];
        const int32_t dim = im_.raw_layouts[size_t(index)]->dim;
        SideState& held = seq_.sides[size_t(index)];
        const bool decides = im_.method->freezes(side) && initial.window.flush > 0;
        const bool given = r.flag("decided");
        r.expect(!given || decides, "decided: not of this method");
        r.expect(given || !decides || !packed, "decided: it is missing");
        if (!r.ok() || !given) return;
        auto plan = std::make_shared<SidePlan>(initial);
        state::get_ladder(&r, initial.store, dim, &plan->ladder);
        const auto array = [&](auto* values, const char* field) {
            const size_t n = size_t(dim) * size_t(initial.transform.joined);
            r.array(values, n, field);
            if (r.ok() && !values->empty() && values->size() != n)
                r.refuse(std::string(field) + ": has " + std::to_string(values->size()) + " elements, expected " +
                         std::to_string(n));
        };
        array(&plan->transform.shift, "shift");
        array(&plan->transform.scale, "scale");
        array(&plan->transform.order, "order");
        array(&plan->mean, "mean");
        r.expect(plan->mean.empty() == (initial.space != KeySpace::centred), "mean: not of this method, or missing");
        for (const float m : plan->mean)
            r.expect(std::isfinite(m) && m == f16_to_f32(f32_to_f16_sat(m)), "mean: a value is not one of f16");
        if (r.ok()) r.refuse(validate(plan->transform, dim, im_.shape.layers[size_t(layer)].kv_heads).message());
        r.array(&plan->pinned, size_t(initial.pins), "pinned");
        for (size_t i = 0; i < plan->pinned.size(); ++i)
            r.expect(plan->pinned[i] < kPageTokens && (i == 0 || plan->pinned[i - 1] < plan->pinned[i]),
                     "pinned: rows must ascend within 0..127");
        const bool kept = r.flag("pinned rows");
        r.expect(!kept || initial.pins > 0, "pinned rows: not of this method");
        r.expect(kept || !packed || initial.pins == 0, "pinned rows: they are missing");
        if (kept && r.ok() && make(&held.pins, im_.pin_layouts[size_t(index)]))
            raw_rows(r, held.pins->bytes(), plan->pinned.size(), index, "pinned rows");
        held.frozen = std::move(plan);
        held.decided = true;
    }

    void front(Reader& r) {
        im_.each_side([&](int32_t, int32_t, Side, int32_t index) {
            SideState& side = seq_.sides[size_t(index)];
            const int64_t rows = front_rows(index);
            if (rows > 0 && r.ok() && make(&side.front, im_.front_layouts[size_t(index)]))
                raw_rows(r, side.front->bytes(), size_t(rows), index, "front rows");
        });
    }

    void page(Reader& r, Side which, size_t i) {
        im_.each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
            SideState& held = seq_.sides[size_t(index)];
            if (side != which || !r.ok() || !memory_ || i >= held.slots.size()) return;
            const SidePlan& plan = im_.plans[size_t(index)];
            const int32_t dim = im_.raw_layouts[size_t(index)]->dim;
            const Extent e = extent_of(layer, side, index, i);
            if (e.coded > 0) {
                Ladder ladder;
                state::get_ladder(&r, plan.store, dim, &ladder);
                if (!r.ok()) return;
                const PageLayout* l = im_.intern(layout(plan.store, side, dim, ladder));
                r.expect(r.get<uint32_t>("page bytes") == l->bytes, "page bytes: not those of the layout");
                if (!r.ok() || !make(&held.slots[i].packed, l)) return;
                uint8_t* bytes = held.slots[i].packed->bytes();
                if (r.bytes(bytes, l->bytes, "page")) r.refuse(state::page_fault(*l, bytes));
            }
            if (e.coded < e.rows && r.ok() && make(&held.slots[i].raw, im_.raw_page(index, e.rows))) {
                const size_t skip = size_t(e.coded) * size_t(dim) * bytes_of(plan.raw);
                raw_rows(r, held.slots[i].raw->bytes() + skip, size_t(e.rows - e.coded), index, "raw rows");
            }
        });
    }

    void raw_rows(Reader& r, uint8_t* to, size_t rows, int32_t index, const char* field) {
        const RawType type = im_.plans[size_t(index)].raw;
        const size_t values = rows * size_t(im_.raw_layouts[size_t(index)]->dim);
        if (r.bytes(to, values * bytes_of(type), field) && !state::all_finite(type, to, values))
            r.refuse(std::string(field) + ": a value is not finite");
    }

    bool make(Page** at, const PageLayout* layout) {
        if (memory_) memory_ = (*at = im_.new_page(layout, layout->bytes, false)) != nullptr;
        return memory_;
    }

    int64_t front_rows(int32_t index) const {
        return std::min<int64_t>(im_.plans[size_t(index)].window.front, seq_.rows());
    }
    Extent extent_of(int32_t layer, Side side, int32_t index, size_t page) const {
        const int64_t beyond = seq_.rows() - im_.plans[size_t(index)].window.front;
        return extent(seq_.packed[Impl::packed_index(layer, side)], beyond, int64_t(page));
    }

    // Whether the section that comes next has the bytes of one that was read before, and same(earlier, layer, side,
    // index) says for all sides that they stand for the same; then take(from, to) shares their pages.
    template <typename Same, typename Take>
    bool share(const std::vector<Loader>& earlier, Tag tag, uint32_t number, Same same, Take take) {
        if (next_ >= sections_.size() || sections_[next_].tag != tag || sections_[next_].number != number) return false;
        for (const Loader& e : earlier) {
            if (next_ >= e.sections_.size()) continue;
            const Section& s = e.sections_[next_];
            if (s.tag != tag || s.number != number || !std::ranges::equal(s.bytes, sections_[next_].bytes)) continue;
            bool alike = true;
            im_.each_side([&](int32_t layer, int32_t, Side side, int32_t index) {
                alike = alike && same(e, layer, side, index);
            });
            if (!alike) continue;
            im_.each_side([&](int32_t, int32_t, Side side, int32_t index) {
                take(side, e.seq_.sides[size_t(index)], seq_.sides[size_t(index)]);
            });
            ++next_;
            return true;
        }
        return false;
    }

    bool share_front(const std::vector<Loader>& earlier) {
        return share(
            earlier, Tag::front, 0,
            [&](const Loader& e, int32_t, Side, int32_t index) { return e.front_rows(index) == front_rows(index); },
            [&](Side, const SideState& from, SideState& to) { im_.share(to.front = from.front); });
    }

    bool share_page(const std::vector<Loader>& earlier, Side which, size_t i) {
        return share(
            earlier, state::pages_of(which), uint32_t(i),
            [&](const Loader& e, int32_t layer, Side side, int32_t index) {
                return side != which || e.extent_of(layer, side, index, i) == extent_of(layer, side, index, i);
            },
            [&](Side side, const SideState& from, SideState& to) {
                if (side != which || i >= to.slots.size()) return;
                im_.share(to.slots[i].raw = from.slots[i].raw);
                im_.share(to.slots[i].packed = from.slots[i].packed);
            });
    }

    Impl& im_;
    Sequence& seq_;
    std::vector<Section> sections_;
    size_t next_ = 0;
    bool memory_ = true;
};

Status Cache::load(SeqId id, std::span<const uint8_t> bytes) {
    const SavedSequence one{id, bytes};
    return load({&one, 1});
}

// Sequences under way. Unless they are kept, nothing is left of them, also when memory ran out in an exception.
struct Cache::Impl::Loaded {
    Impl& im;
    size_t layouts = im.layouts.size();
    std::vector<std::shared_ptr<Sequence>> made = {};
    ~Loaded() {
        if (made.empty()) return;
        for (auto& seq : made)
            im.drop_sequence(seq);
        im.forget_layouts(layouts);
    }
};

Status Cache::load(std::span<const SavedSequence> saved) {
    Impl& im = *impl_;
    im.end_step();
    Impl::Loaded loaded{im};
    auto& made = loaded.made;
    made.reserve(saved.size());
    std::vector<Impl::Loader> done;
    done.reserve(saved.size());
    const auto failed = [](const Status& st) { return Status(st.code(), "load: " + st.message()); };
    for (size_t i = 0; i < saved.size(); ++i) {
        const std::span<const SavedSequence> earlier = saved.first(i);
        const SeqId id = saved[i].seq;
        if (std::ranges::any_of(earlier, [id](const SavedSequence& s) { return s.seq == id; }))
            return {StatusCode::invalid_argument, "load: sequence " + std::to_string(id) + " is there twice"};
        const auto twin = std::ranges::find_if(
            earlier, [&](const SavedSequence& s) { return std::ranges::equal(s.bytes, saved[i].bytes); });
        if (twin != earlier.end()) { // a fork that nobody has gone on with
            made.push_back(made[size_t(twin - earlier.begin())]);
            continue;
        }
        auto parts = state::sections(saved[i].bytes);
        if (!parts) return failed(parts.status());
        made.push_back(im.make_sequence());
        Impl::Loader loader(im, made.back().get(), std::move(*parts));
        if (const Status st = loader.read(done); !st) return failed(st);
        im.rebase(*made.back());
        done.push_back(std::move(loader));
    }
    for (const SavedSequence& s : saved)
        remove(s.seq);
    for (size_t i = 0; i < saved.size(); ++i)
        im.sequences[saved[i].seq] = std::move(made[i]);
    made.clear();
    return {};
}

} // namespace kvmosaic
