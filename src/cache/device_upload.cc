// Sequences to a device: pages change their byte order, nothing else.
#include <algorithm>
#include <cstring>

#include "cache/device_impl.h"
#include "cache/state_page.h"
#include "kernels/cuda/order.h"
#include "kernels/cuda/transcode.h"

namespace kvmosaic::device {

// Pages of one layer and side on their way.
struct DeviceCache::Impl::Moved {
    std::vector<uint8_t> pages;
    std::vector<PageRef> refs; // [kv_heads][pages of a head], units from the first
};

Status DeviceCache::Impl::write_rows(int32_t layer, Side which, int32_t slot, const Sequence& seq) {
    const SideStore& s = side(layer, which);
    const int32_t heads = kv_heads(layer);
    const size_t row = size_t(s.dim) * 2;
    const int64_t rows = seq.rows(), front = std::min<int64_t>(like->impl_->window(layer, which).front, rows);
    const int64_t packed = seq.packed[Host::packed_index(layer, which)];
    const Stripe fronts = stripe(s.memory.front, slot, heads, s.dim),
                 recents = stripe(s.memory.recent, slot, heads, s.dim);
    std::vector<uint8_t> f(fronts.bytes, 0), r(recents.bytes, 0);
    std::vector<float> sums;
    std::vector<int32_t> counts;
    for (int32_t h = 0; h < heads; ++h) {
        const SideState& held = seq.sides[size_t(s.first + 2 * h)];
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
    Status done = memory->copy_in(fronts.at, f.data(), f.size());
    if (done) done = memory->copy_in(recents.at, r.data(), r.size());
    if (!done || !s.sums) return done;
    const size_t first = size_t(slot) * size_t(heads);
    done = memory->copy_in(s.sums + first * size_t(s.dim), sums.data(), sums.size() * sizeof(float));
    return done ? memory->copy_in(s.counts + first, counts.data(), counts.size() * sizeof(int32_t)) : done;
}

Status DeviceCache::Impl::write_basis(int32_t layer, int32_t slot, const Sequence& seq) {
    const SideStore& s = side(layer, Side::key);
    const size_t heads = size_t(kv_heads(layer)), dim = size_t(s.dim), first = size_t(slot) * heads * dim;
    if (s.means) {
        std::vector<uint32_t> means;
        for (size_t h = 0; h < heads; ++h) {
            const int32_t index = s.first + 2 * int32_t(h);
            const std::vector<float>& mean = like->impl_->plan_of(seq.sides[size_t(index)], index).mean;
            for (const uint32_t pair : s.pairs)
                means.push_back(mean.empty() || pair == kNoPair ? 0u
                                                                : uint32_t(f32_to_f16_sat(mean[pair & 0xFFFF])) |
                                                                      uint32_t(f32_to_f16_sat(mean[pair >> 16])) << 16);
        }
        return memory->copy_in(s.means + size_t(slot) * means.size(), means.data(), means.size() * sizeof(uint32_t));
    }
    if (!s.factor && !s.order) return {};
    std::vector<float> factor(heads * dim, 1.0f);
    std::vector<uint16_t> order(heads * dim);
    for (size_t h = 0; h < heads; ++h) {
        const int32_t index = s.first + 2 * int32_t(h);
        const Transform& t = like->impl_->plan_of(seq.sides[size_t(index)], index).transform;
        std::copy(t.scale.begin(), t.scale.end(), factor.begin() + int64_t(h * dim));
        for (size_t i = 0; i < dim; ++i)
            order[h * dim + i] = t.order.empty() ? uint16_t(i) : t.order[i];
    }
    Status done;
    if (s.factor) done = memory->copy_in(s.factor + first, factor.data(), factor.size() * sizeof(float));
    if (done && s.order) done = memory->copy_in(s.order + first, order.data(), order.size() * sizeof(uint16_t));
    return done;
}

Status DeviceCache::Impl::write_pages(int32_t layer, Side which, int32_t slot, const Moved& moved) {
    const SideStore& s = side(layer, which);
    const int32_t heads = kv_heads(layer);
    const size_t each = moved.refs.size() / size_t(heads);
    Status done;
    if (!s.varies) { // at their places in the table
        const size_t bytes = each * s.page_units * kPageUnit;
        for (int32_t h = 0; h < heads && done; ++h)
            done = memory->copy_in(s.memory.pool + (int64_t(slot) * heads + h) * stride * s.page_units * kPageUnit,
                                   moved.pages.data() + size_t(h) * bytes, bytes);
        return done;
    }
    uint32_t used = 0;
    done = memory->copy_out(&used, s.used, sizeof(used));
    std::vector<PageRef> refs = moved.refs;
    for (PageRef& ref : refs)
        ref.unit += used;
    for (int32_t h = 0; h < heads && done; ++h)
        done = memory->copy_in(s.memory.pages + (int64_t(slot) * heads + h) * stride, refs.data() + size_t(h) * each,
                               each * sizeof(PageRef));
    if (done) done = memory->copy_in(s.memory.pool + int64_t(used) * kPageUnit, moved.pages.data(), moved.pages.size());
    used += uint32_t(moved.pages.size() / kPageUnit);
    return done ? memory->copy_in(s.used, &used, sizeof(used)) : done;
}

namespace {

bool counts_up(const std::vector<int32_t>& positions) {
    for (size_t i = 0; i < positions.size(); ++i)
        if (positions[i] != int32_t(i)) return false;
    return true;
}

} // namespace

Status DeviceCache::upload(int32_t slot, const Cache& from, SeqId id) {
    Impl& im = *impl_;
    Cache::Impl& host = *im.like->impl_;
    const Cache::Impl& source = *from.impl_;
    if (Status bad = im.check_slot(slot); !bad) return bad;
    const Sequence* seq = source.find(id);
    if (!seq) return refuse(StatusCode::not_found, "there is no sequence " + std::to_string(id));
    if (seq->rows() > im.options.max_rows)
        return refuse(StatusCode::out_of_capacity, "sequence " + std::to_string(id) + " has " +
                                                       std::to_string(seq->rows()) + " rows, max_rows is " +
                                                       std::to_string(im.options.max_rows));
    // A cache of the same model, method and calibration has the same head of a state.
    state::Writer mine, theirs;
    host.put_identity(&mine);
    source.put_identity(&theirs);
    if (mine.out != theirs.out)
        return refuse(StatusCode::invalid_argument, "sequence " + std::to_string(id) + " is of a cache '" +
                                                        source.method->spec() + "', this one is '" +
                                                        host.method->spec() + "', or their models differ");
    for (int32_t layer = 0; layer < int32_t(im.group_of.size()); ++layer)
        for (const Side which : {Side::key, Side::value}) {
            if (im.kv_heads(layer) == 0) continue;
            const int64_t raw =
                seq->rows() - source.window(layer, which).front - seq->packed[Cache::Impl::packed_index(layer, which)];
            const int32_t room = im.side(layer, which).memory.recent.capacity;
            if (raw > room) // behind a removal of rows
                return refuse(StatusCode::unsupported, "sequence " + std::to_string(id) + " has " +
                                                           std::to_string(raw) +
                                                           " raw rows that wait to be packed, there is room for " +
                                                           std::to_string(room) + "; append a row first");
        }

    // All pages first, in host memory: what can fail for lack of room fails before the slot changes.
    struct Job { // one page
        const Page* page;
        Impl::Moved* to;
        size_t at;
    };
    std::vector<Impl::Moved> moved(im.sides.size());
    std::vector<Job> jobs;
    Slot next;
    next.taken = true;
    next.positions = seq->positions;
    next.shifted = !counts_up(next.positions);
    next.counts.resize(size_t(host.side_count));
    next.ladder.resize(size_t(host.side_count));
    next.pages.resize(size_t(host.side_count));
    state::Writer decided;
    source.put_decided(&decided, seq->sides);
    next.decided = std::move(decided.out);
    host.each_side([&](int32_t layer, int32_t, Side which, int32_t index) {
        const SideState& held = seq->sides[size_t(index)];
        SideStore& s = im.side(layer, which);
        next.counts[size_t(index)] = held.query_count;
        next.undecided |= host.method->freezes(which) && s.packs && !held.decided;
        if (!s.packs) return;
        next.ladder[size_t(index)] = source.plan_of(held, index).ladder;
        next.uneven |=
            s.varies && !s.store.page_map && !(next.ladder[size_t(index)] == host.plans[size_t(index)].ladder);
        Impl::Moved& to = moved[size_t(layer) * 2 + size_t(which)];
        const int64_t packed = seq->packed[Cache::Impl::packed_index(layer, which)];
        const auto count = size_t((packed + kPageTokens - 1) / kPageTokens);
        for (size_t p = 0; p < count; ++p) {
            const Page& page = *held.slots[p].packed;
            const uint32_t bytes = cuda::device_page(*page.layout).bytes;
            to.refs.push_back({uint32_t(to.pages.size() / kPageUnit), 0});
            if (s.varies) {
                const PageLayout* mine_too = host.intern(*page.layout);
                next.pages[size_t(index)].push_back(mine_too);
                to.refs.back().tiers =
                    in_planes(s.store.rule) ? bytes / kPageUnit : ladder_code(state::ladder_of(*mine_too), s.widths);
            }
            jobs.push_back({&page, &to, to.pages.size()});
            to.pages.resize(to.pages.size() + bytes);
        }
    });
    parallel(im.options.threads, jobs.size(), [&](size_t i) {
        const Job& job = jobs[i];
        cuda::to_device_order(*job.page->layout, job.page->bytes(), job.to->pages.data() + job.at);
    });
    for (size_t i = 0; i < moved.size(); ++i) {
        if (!im.sides[i].varies) continue;
        const auto units = uint32_t(moved[i].pages.size() / kPageUnit);
        if (Status bad = im.make_room(int32_t(i / 2), Side(i % 2), units); !bad) return bad;
    }

    // From here on only the device itself can fail; then the slot is empty.
    if (Status bad = clear(slot); !bad) return bad;
    for (size_t i = 0; i < moved.size(); ++i) {
        const auto layer = int32_t(i / 2);
        const auto which = Side(i % 2);
        if (im.kv_heads(layer) == 0) continue;
        if (Status bad = im.write_rows(layer, which, slot, *seq); !bad) return bad;
        if (which == Side::key)
            if (Status bad = im.write_basis(layer, slot, *seq); !bad) return bad;
        if (moved[i].refs.empty()) continue;
        if (Status bad = im.write_pages(layer, which, slot, moved[i]); !bad) return bad;
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

} // namespace kvmosaic::device
