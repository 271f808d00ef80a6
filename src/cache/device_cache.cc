// What a DeviceCache allocates, and how pages of different sizes share a pool. Moves: device_upload.cc and
// device_download.cc.
#include "kvmosaic/device_cache.h"

#include <algorithm>
#include <cstring>

#include "cache/device_impl.h"
#include "kernels/cuda/order.h"
#include "kernels/cuda/transcode.h"

namespace kvmosaic::device {

namespace {

constexpr int32_t kMostSlots = 4096, kMostThreads = 256;
constexpr int64_t kMostRows = int64_t(1) << 24;
constexpr int32_t kFrontStep = 32; // rows; capacities of raw rows are multiples (device.h)

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

std::string place(int32_t layer, Side side) {
    return "layer " + std::to_string(layer) + ", " + name_of(side) + " side: ";
}

} // namespace

DeviceCache::DeviceCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceCache::~DeviceCache() = default;
DeviceCache::Impl::~Impl() {
    for (void* block : blocks)
        memory->free(block);
}

Result<std::unique_ptr<DeviceCache>> DeviceCache::create(const ModelShape& shape, std::string_view spec,
                                                         const DeviceCacheOptions& options) {
    auto like = Cache::create(shape, spec);
    if (!like) return like.status();
    return create(std::move(*like), options);
}

Result<std::unique_ptr<DeviceCache>> DeviceCache::create(std::unique_ptr<Cache> like,
                                                         const DeviceCacheOptions& options) {
    Memory* memory = device_memory();
    if (!memory) return refuse(StatusCode::unsupported, "this build has no GPU backend (KVMOSAIC_CUDA is off)");
    return create(std::move(like), options, memory);
}

Result<std::unique_ptr<DeviceCache>> DeviceCache::create(std::unique_ptr<Cache> like, const DeviceCacheOptions& options,
                                                         Memory* memory) {
    const auto outside = [](const std::string& field, const std::string& value, const std::string& range) {
        return refuse(StatusCode::invalid_argument, field + " = " + value + ": must be " + range);
    };
    if (options.slots < 1 || options.slots > kMostSlots)
        return outside("slots", std::to_string(options.slots), "1 to " + std::to_string(kMostSlots));
    if (options.max_rows < 1 || options.max_rows > kMostRows)
        return outside("max_rows", std::to_string(options.max_rows), "1 to " + std::to_string(kMostRows));
    if (!(options.expected_bits >= 0.0 && options.expected_bits <= 32.0))
        return outside("expected_bits", std::to_string(options.expected_bits), "0 to 32");
    if (options.step_rows < 1 || options.step_rows > kPageTokens)
        return outside("step_rows", std::to_string(options.step_rows), "1 to " + std::to_string(kPageTokens));
    if (options.threads < 1 || options.threads > kMostThreads)
        return outside("threads", std::to_string(options.threads), "1 to " + std::to_string(kMostThreads));
    if (!like->sequences().empty())
        return refuse(StatusCode::invalid_argument, "the cache that it is to be like holds sequences");
    auto impl = std::make_unique<Impl>();
    impl->options = options;
    impl->memory = memory;
    impl->like = std::move(like);
    if (Status bad = impl->set_up(); !bad) return bad;
    return std::unique_ptr<DeviceCache>(new DeviceCache(std::move(impl)));
}

Status DeviceCache::Impl::set_up() {
    const Host& host = *like->impl_;
    const auto layers = int32_t(host.shape.layers.size());
    sides.resize(size_t(layers) * 2);
    group_of.assign(size_t(layers), -1);
    slots.resize(size_t(options.slots));
    for (int32_t l = 0; l < layers; ++l) {
        if (kv_heads(l) == 0) continue;
        const Window &key = host.window(l, Side::key), &value = host.window(l, Side::value);
        if (key.front != value.front)
            return refuse(StatusCode::unsupported, "layer " + std::to_string(l) + ": the sides keep different fronts");
        for (const Window& w : {key, value})
            if (w.flush > 0)
                stride =
                    std::max(stride, int32_t(round_up(std::max<int64_t>(options.max_rows - w.front, 1), kPageTokens) /
                                             kPageTokens));
        for (size_t g = 0; g < leaders.size() && group_of[size_t(l)] < 0; ++g)
            if (host.window(leaders[g], Side::key) == key && host.window(leaders[g], Side::value) == value)
                group_of[size_t(l)] = int32_t(g);
        if (group_of[size_t(l)] >= 0) continue;
        group_of[size_t(l)] = int32_t(leaders.size());
        leaders.push_back(l);
    }
    for (size_t g = 0; g < leaders.size(); ++g) {
        states.emplace_back();
        if (Status bad = take(slots.size(), &states.back()); !bad) return bad;
        std::vector<SequenceState> empty(slots.size());
        for (size_t s = 0; s < slots.size(); ++s)
            empty[s].slot = int32_t(s);
        if (Status bad = memory->copy_in(states.back(), empty.data(), empty.size() * sizeof(SequenceState)); !bad)
            return bad;
    }
    for (int32_t l = 0; l < layers; ++l)
        for (const Side which : {Side::key, Side::value})
            if (kv_heads(l) > 0)
                if (Status bad = set_up_side(l, which); !bad) return bad;
    return {};
}

Status DeviceCache::Impl::set_up_side(int32_t layer, Side which) {
    const Host& host = *like->impl_;
    SideStore& s = side(layer, which);
    s.first = host.side_index(layer, 0, which);
    const SidePlan& plan = host.plans[size_t(s.first)];
    s.dim = host.shape.layers[size_t(layer)].dim(which);
    s.store = plan.store;
    s.packs = plan.window.flush > 0;
    if (plan.raw == RawType::f32)
        return refuse(StatusCode::unsupported, place(layer, which) + "raw rows of a device are f16 or bf16");
    const Window& w = plan.window;
    const int64_t heads = int64_t(options.slots) * kv_heads(layer);
    const int64_t beyond = std::max<int64_t>(options.max_rows - w.front, 1);
    // A step's rows come before what they push out is packed.
    const int64_t raw = std::max<int64_t>(int64_t(w.keep) + w.flush, w.first) - 1 + options.step_rows;
    s.memory.front.capacity = int32_t(round_up(w.front, kFrontStep));
    s.memory.recent.capacity = int32_t(round_up(s.packs ? std::min(raw, beyond) : beyond, kPageTokens));
    const auto rows_of = [&](RawRows* rows) {
        uint16_t* at = nullptr;
        Status made = take(size_t(heads * rows->capacity) * size_t(s.dim), &at);
        rows->base = at;
        return made;
    };
    if (Status bad = rows_of(&s.memory.front); !bad) return bad;
    if (Status bad = rows_of(&s.memory.recent); !bad) return bad;
    if (which == Side::key && host.method->info().uses_query) {
        if (Status bad = take(size_t(heads) * size_t(s.dim), &s.sums); !bad) return bad;
        if (Status bad = take(size_t(heads), &s.counts); !bad) return bad;
    }
    if (!s.packs) return {};
    if (which == Side::key)
        if (Status bad = set_up_basis(layer); !bad) return bad;
    const int64_t pages = heads * stride;
    s.varies = s.store.kind == StoreKind::tiered;
    if (s.varies) {
        s.widths = host.method->widths(which);
        if (Status bad = take(1, &s.used); !bad) return bad;
        if (Status bad = take(1, &s.exhausted); !bad) return bad;
    }
    const uint32_t largest = !s.varies ? cuda::device_page(layout(s.store, which, s.dim)).bytes
                                       : cuda::worst_device_page_bytes(s.store, which, s.dim, s.widths);
    s.page_units = (largest + kPageUnit - 1) / kPageUnit;
    const double page =
        s.varies && options.expected_bits > 0.0 ? options.expected_bits / 8.0 * kPageTokens * s.dim : double(largest);
    const double units = double(pages) * page / kPageUnit;
    if (units >= double(UINT32_MAX))
        return refuse(StatusCode::out_of_capacity, place(layer, which) + "a pool of " + std::to_string(units) +
                                                       " units; page references reach " + std::to_string(UINT32_MAX));
    s.units = uint32_t(units);
    if (Status bad = take(size_t(s.units) * kPageUnit, &s.memory.pool); !bad) return bad;
    if (Status bad = take(size_t(pages), &s.memory.pages); !bad) return bad;
    if (s.varies) return {};
    std::vector<PageRef> table(static_cast<size_t>(pages)); // where kernels pack new pages
    for (size_t i = 0; i < table.size(); ++i)
        table[i].unit = uint32_t(i) * s.page_units;
    return memory->copy_in(s.memory.pages, table.data(), table.size() * sizeof(PageRef));
}

// Memory for what a sequence may decide of its keys' basis, or why there is none for queries.
Status DeviceCache::Impl::set_up_basis(int32_t layer) {
    const Host& host = *like->impl_;
    SideStore& s = side(layer, Side::key);
    const SidePlan& plan = host.plans[size_t(s.first)];
    const bool later = host.method->freezes(Side::key);
    if (plan.space == KeySpace::pre_rope)
        s.no_basis = "keys are packed without their rotation";
    else if (plan.space == KeySpace::centred)
        return set_up_mean(layer);
    else if (plan.transform.joined != 1 || !plan.transform.shift.empty())
        s.no_basis = "keys are packed in a basis that joins heads or shifts channels";
    if (s.no_basis || (plan.transform.identity() && !later)) return {};
    s.basis.hadamard = plan.transform.hadamard;
    const size_t n = size_t(options.slots) * size_t(kv_heads(layer)) * size_t(s.dim);
    if (later || !plan.transform.scale.empty())
        if (Status bad = take(n, &s.factor); !bad) return bad;
    if (later || !plan.transform.order.empty())
        if (Status bad = take(n, &s.order); !bad) return bad;
    s.basis.factor = s.factor, s.basis.order = s.order;
    return {};
}

Status DeviceCache::Impl::check_slot(int32_t slot) const {
    if (slot >= 0 && slot < options.slots) return {};
    return refuse(StatusCode::invalid_argument,
                  "slot = " + std::to_string(slot) + ": must be 0 to " + std::to_string(options.slots - 1));
}

Status DeviceCache::Impl::read_states(int32_t slot, std::vector<SequenceState>* out) const {
    out->resize(states.size());
    for (size_t g = 0; g < states.size(); ++g)
        if (Status bad = memory->copy_out(&(*out)[g], states[g] + slot, sizeof(SequenceState)); !bad) return bad;
    for (const SequenceState& s : *out)
        if (s.rows != out->front().rows)
            return refuse(StatusCode::corrupt, "slot " + std::to_string(slot) + ": its layers have " +
                                                   std::to_string(out->front().rows) + " and " +
                                                   std::to_string(s.rows) + " rows; advance all groups alike");
    return {};
}

int64_t DeviceCache::Impl::pages(int32_t layer, Side which, const std::vector<SequenceState>& of) const {
    const SequenceState& s = of[size_t(group_of[size_t(layer)])];
    const int64_t packed = which == Side::key ? s.key_packed : s.value_packed;
    return (packed + kPageTokens - 1) / kPageTokens;
}

Ladder ladder_of_device_page(const StoreSpec& store, int32_t dim, const std::vector<uint8_t>& widths, uint32_t tiers,
                             const uint8_t* bytes) {
    // Where the map lies depends on padded sizes alone: a page whose dead channels are live finds it.
    PageLayout page = layout(store, Side::key, dim, Ladder::uniform(widths.back(), uint16_t(dim)));
    page.tier_count = 0;
    page.raw_depth = page.zero_bits = 0;
    std::vector<std::pair<uint8_t, int32_t>> padded; // bits, entries of the map
    for (size_t w = 0; w < widths.size() && w < 4; ++w) {
        const int32_t granules = int32_t(tiers >> (8 * w) & 0xFF);
        if (granules == 0) continue;
        const int32_t entries = granules * (widths[w] == 16 ? 8 : cuda::device_granule(widths[w]));
        padded.emplace_back(widths[w], entries);
        if (widths[w] == 16) {
            page.raw_depth = uint16_t(entries);
            continue;
        }
        TierLayout& tier = page.tiers[page.tier_count++];
        tier = {};
        tier.bits = widths[w], tier.live = tier.padded = uint16_t(entries);
    }
    const cuda::DevicePage device = cuda::device_page(page);
    const uint8_t* map = bytes + device.map_offset;
    Ladder ladder;
    for (const auto& [bits, entries] : padded) {
        int32_t live = 1;
        for (int32_t i = 1; i < entries; ++i) {
            uint16_t channel = 0;
            std::memcpy(&channel, map + i * device.map_element, device.map_element);
            if (channel != 0) live = i + 1;
        }
        map += entries * device.map_element;
        ladder.push(bits, uint16_t(live));
    }
    return ladder;
}

const PageLayout* DeviceCache::Impl::page_layout(const SideStore& s, const Slot& slot, int32_t index, int64_t page,
                                                 uint32_t tiers, const uint8_t* bytes) const {
    Host& host = *like->impl_;
    const auto which = Side(index % 2);
    if (!s.varies) return host.intern(layout(s.store, which, s.dim));
    const auto& known = slot.pages[size_t(index)];
    if (size_t(page) < known.size()) return known[size_t(page)];
    const bool planes = in_planes(s.store.rule); // their last unit lists the widths
    if (planes && (tiers < 1 || tiers > s.page_units)) return nullptr;
    const Ladder ladder = planes             ? cuda::ladder_of_planes(bytes + (tiers - 1) * size_t{kPageUnit})
                          : s.store.page_map ? ladder_of_device_page(s.store, s.dim, s.widths, tiers, bytes)
                                             : slot.ladder[size_t(index)];
    if (!validate(ladder, s.dim, s.store)) return nullptr;
    return host.intern(layout(s.store, which, s.dim, ladder));
}

// Moves pages to the front of a pool until `units` are free behind them.
Status DeviceCache::Impl::make_room(int32_t layer, Side which, uint32_t units) {
    SideStore& s = side(layer, which);
    uint32_t used = 0;
    if (Status bad = memory->copy_out(&used, s.used, sizeof(used)); !bad) return bad;
    if (used <= s.units && s.units - used >= units) return {};
    std::vector<PageRef> table(size_t(options.slots) * size_t(kv_heads(layer)) * size_t(stride));
    if (Status bad = memory->copy_out(table.data(), s.memory.pages, table.size() * sizeof(PageRef)); !bad) return bad;
    struct Held {
        size_t entry;
        uint32_t bytes;
    };
    std::vector<Held> held;
    std::vector<uint8_t> page;
    for (int32_t slot = 0; slot < options.slots; ++slot) {
        if (!slots[size_t(slot)].taken) continue;
        std::vector<SequenceState> of;
        if (Status bad = read_states(slot, &of); !bad) return bad;
        for (int32_t h = 0; h < kv_heads(layer); ++h)
            for (int64_t p = 0; p < pages(layer, which, of); ++p) {
                const size_t entry = size_t((int64_t(slot) * kv_heads(layer) + h) * stride + p);
                const auto& known = slots[size_t(slot)].pages[size_t(s.first + 2 * h)];
                if (size_t(p) >= known.size() && s.store.page_map) { // its map tells its size
                    const uint32_t most = s.page_units * kPageUnit;
                    const int64_t at = int64_t(table[entry].unit) * kPageUnit;
                    page.assign(most, 0);
                    const int64_t there = std::min<int64_t>(most, int64_t(s.units) * kPageUnit - at);
                    if (Status bad = memory->copy_out(page.data(), s.memory.pool + at, size_t(there)); !bad) return bad;
                }
                const PageLayout* l =
                    page_layout(s, slots[size_t(slot)], s.first + 2 * h, p, table[entry].tiers, page.data());
                if (!l) return refuse(StatusCode::corrupt, place(layer, which) + "a page's map is broken");
                held.push_back({entry, cuda::device_page(*l).bytes});
            }
    }
    std::sort(held.begin(), held.end(),
              [&](const Held& a, const Held& b) { return table[a.entry].unit < table[b.entry].unit; });
    uint32_t end = 0;
    for (const Held& h : held) {
        PageRef& ref = table[h.entry];
        if (ref.unit != end) {
            const auto at = [&](uint32_t unit) { return s.memory.pool + int64_t(unit) * kPageUnit; };
            if (Status bad = memory->copy(at(end), at(ref.unit), h.bytes); !bad) return bad;
            ref.unit = end;
        }
        end += h.bytes / kPageUnit;
    }
    if (Status bad = memory->copy_in(s.memory.pages, table.data(), table.size() * sizeof(PageRef)); !bad) return bad;
    if (Status bad = memory->copy_in(s.used, &end, sizeof(end)); !bad) return bad;
    if (s.units - end >= units) return {};
    return refuse(StatusCode::out_of_capacity,
                  place(layer, which) + "pages need " + std::to_string(int64_t(units) * kPageUnit) + " bytes, " +
                      std::to_string(int64_t(s.units - end) * kPageUnit) + " of " +
                      std::to_string(int64_t(s.units) * kPageUnit) + " are free; raise expected_bits");
}

// ---- what kernels are given ----

LayerMemory DeviceCache::layer(int32_t layer) const {
    LayerMemory out;
    out.key = impl_->side(layer, Side::key).memory;
    out.value = impl_->side(layer, Side::value).memory;
    out.table_stride = impl_->stride;
    const int32_t first = impl_->side(layer, Side::key).first;
    out.raw = impl_->like->impl_->plans[size_t(first)].raw == RawType::bf16 ? ElementType::bf16 : ElementType::f16;
    return out;
}
int32_t DeviceCache::groups() const { return int32_t(impl_->leaders.size()); }
int32_t DeviceCache::group_of(int32_t layer) const { return impl_->group_of[size_t(layer)]; }
SequenceState* DeviceCache::states(int32_t group) const { return impl_->states[size_t(group)]; }
RowWindow DeviceCache::window(int32_t group, Side side) const {
    const Window& w = impl_->like->impl_->window(impl_->leaders[size_t(group)], side);
    return {w.front, w.keep, w.flush, w.first};
}
float* DeviceCache::query_sums(int32_t layer) const { return impl_->side(layer, Side::key).sums; }
int32_t* DeviceCache::query_counts(int32_t layer) const { return impl_->side(layer, Side::key).counts; }
Result<AttentionShape> DeviceCache::attention(int32_t layer, int32_t rows) const {
    const SideStore &key = impl_->side(layer, Side::key), &value = impl_->side(layer, Side::value);
    const LayerShape& l = impl_->like->shape().layers[size_t(layer)];
    const Result<KeyBasis> basis = key_basis(layer);
    if (!basis) return basis.status();
    const Transform& turned = impl_->like->impl_->plans[size_t(value.first)].transform;
    const bool rotated = turned.hadamard == value.dim && turned.joined == 1 && turned.scale.empty() &&
                         turned.shift.empty() && turned.order.empty() && value.store.rule == GridRule::fitted;
    if (!turned.identity() && !rotated)
        return refuse(StatusCode::unsupported,
                      place(layer, Side::value) + "values are packed in another basis than raw ones");
    if (l.key_dim != l.value_dim)
        return refuse(StatusCode::unsupported, "layer " + std::to_string(layer) + ": the sides differ in head size");
    AttentionShape shape;
    shape.heads = l.heads, shape.kv_heads = l.kv_heads, shape.dim = l.key_dim, shape.rows = rows;
    shape.max_sequences = impl_->options.slots;
    shape.key = key.store, shape.value = value.store;
    shape.widths = key.widths;
    shape.key_basis = basis->any();
    shape.value_hadamard = rotated ? value.dim : 0;
    if (key.varies && !key.store.page_map) {
        shape.ladder = impl_->like->impl_->plans[size_t(key.first)].ladder;
        shape.key_bytes = page_bytes(key.store, Side::key, shape.dim, shape.ladder);
    }
    return shape;
}
Result<KeyBasis> DeviceCache::key_basis(int32_t layer) const {
    const SideStore& s = impl_->side(layer, Side::key);
    if (s.no_basis) return refuse(StatusCode::unsupported, place(layer, Side::key) + s.no_basis);
    for (size_t i = 0; i < impl_->slots.size(); ++i) {
        const Slot& slot = impl_->slots[i];
        const char* why = s.means && slot.shifted                        ? "its rows are not at positions 0, 1, ..."
                          : s.varies && !s.store.page_map && slot.uneven ? "its heads have ladders of their own"
                                                                         : nullptr;
        if (why)
            return refuse(StatusCode::unsupported,
                          place(layer, Side::key) + "slot " + std::to_string(i) + " cannot be attended: " + why);
    }
    return s.basis;
}
KeyMean DeviceCache::key_mean(int32_t layer) const { return impl_->side(layer, Side::key).mean; }
DeviceCache::Pool DeviceCache::key_pool(int32_t layer) const {
    const SideStore& s = impl_->side(layer, Side::key);
    return s.varies ? Pool{s.used, s.units, s.exhausted} : Pool{};
}
int32_t DeviceCache::slots() const { return impl_->options.slots; }
int64_t DeviceCache::bytes() const { return impl_->allocated; }

} // namespace kvmosaic::device
