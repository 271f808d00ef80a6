// One sequence as bytes. Little-endian; every count is checked against the bytes that are left before it is believed.
//
//   u32 magic "KVMS", u32 version, u32 byte-order mark, u32 length + spec, u64 hash of the calibration,
//   u32 L, L x (i32 H, G, Dk, Dv),
//   u64 rows, i32 positions[rows], L x (u64 packed key, value), then for every layer, KV head and side:
//     statistics (u32 D or 0, f32 sums[D], i64 count), what the sequence decided once (u8 1 or 0; if 1: u8 tiers,
//     tiers x (u8 bits, u16 channels), u32 n + f32 shift[n], u32 n + f32 scale[n], u32 n + u16 order[n], u32 n + u16
//     pinned[n], u8 1 and n raw rows, or u8 0), front rows, and for every page:
//     packed part (u8 tiers, tiers x (u8 bits, u16 channels), u32 bytes, page) if any row of it is packed, raw rows
//     behind.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cache/impl.h"

namespace kvmosaic {

namespace {

constexpr uint32_t kMagic = 0x534d564b; // "KVMS"
constexpr uint32_t kVersion = 2;
constexpr uint32_t kByteOrder = 0x01020304;

struct Writer {
    std::vector<uint8_t> out;
    void bytes(const void* p, size_t n) {
        const auto* b = static_cast<const uint8_t*>(p);
        out.insert(out.end(), b, b + n);
    }
    template <typename T>
    void put(T v) {
        bytes(&v, sizeof(v));
    }
};

struct Reader {
    std::span<const uint8_t> in;
    size_t at = 0;
    std::string wrong; // the first field that did not fit

    bool bytes(void* p, size_t n, const char* field) {
        if (!wrong.empty()) return false;
        if (in.size() - at < n) {
            wrong = std::string(field) + ": the state ends at byte " + std::to_string(in.size()) + ", " +
                    std::to_string(n) + " more are needed at byte " + std::to_string(at);
            return false;
        }
        if (n > 0) std::memcpy(p, in.data() + at, n); // an empty vector's data may be null
        at += n;
        return true;
    }
    template <typename T>
    T get(const char* field) {
        T v{};
        bytes(&v, sizeof(v), field);
        return v;
    }
    void expect(bool good, const std::string& sentence) {
        if (wrong.empty() && !good) wrong = sentence;
    }
    bool ok() const { return wrong.empty(); }
};

template <typename T>
void put_array(Writer* w, const std::vector<T>& values) {
    w->put(uint32_t(values.size()));
    w->bytes(values.data(), values.size() * sizeof(T));
}

// An array of no elements, or of as many as `n`.
template <typename T>
void get_array(Reader* r, size_t n, const char* field, std::vector<T>* values) {
    const uint32_t count = r->get<uint32_t>(field);
    r->expect(count == 0 || count == n,
              std::string(field) + ": has " + std::to_string(count) + " elements, expected " + std::to_string(n));
    if (!r->ok()) return;
    values->resize(count);
    r->bytes(values->data(), count * sizeof(T), field);
}

void save_decided(Writer* w, const SideState& state, size_t row_bytes) {
    const bool decided = state.frozen && state.decided;
    w->put(uint8_t(decided));
    if (!decided) return;
    const SidePlan& plan = *state.frozen;
    w->put(plan.ladder.count);
    for (int t = 0; t < plan.ladder.count; ++t)
        w->put(plan.ladder.tiers[size_t(t)].bits), w->put(plan.ladder.tiers[size_t(t)].channels);
    put_array(w, plan.transform.shift);
    put_array(w, plan.transform.scale);
    put_array(w, plan.transform.order);
    put_array(w, plan.mean);
    put_array(w, plan.pinned);
    w->put(uint8_t(state.pins != nullptr)); // not before the first page is packed
    if (state.pins) w->bytes(state.pins->bytes(), plan.pinned.size() * row_bytes);
}

// Into a fresh side. `pins`: where pinned rows go, made on demand.
template <typename MakePins>
void load_decided(Reader* r, const SidePlan& initial, int32_t dim, int32_t kv_heads, SideState* state,
                  MakePins make_pins) {
    const int decided = r->get<uint8_t>("decided");
    r->expect(decided == 0 || (decided == 1 && initial.window.first > 0), "decided: not of this method");
    if (!r->ok() || decided == 0) return;
    auto plan = std::make_shared<SidePlan>(initial);
    const size_t width = size_t(dim) * size_t(initial.transform.joined);
    plan->ladder = Ladder();
    const int tiers = r->get<uint8_t>("decided tiers");
    r->expect(tiers <= kMaxTiers, "decided tiers: " + std::to_string(tiers) + " are more than 8");
    for (int t = 0; r->ok() && t < tiers; ++t) {
        const uint8_t bits = r->get<uint8_t>("tier bits");
        plan->ladder.push(bits, r->get<uint16_t>("tier channels"));
    }
    if (initial.store.kind == StoreKind::tiered && r->ok()) {
        const Status st = validate(plan->ladder, dim, initial.store);
        r->expect(st.ok(), "decided tiers: " + st.message());
    }
    get_array(r, width, "shift", &plan->transform.shift);
    get_array(r, width, "scale", &plan->transform.scale);
    get_array(r, width, "order", &plan->transform.order);
    get_array(r, width, "mean", &plan->mean);
    for (const float m : plan->mean)
        r->expect(std::isfinite(m), "mean: it holds what is no number");
    if (r->ok()) {
        const Status st = validate(plan->transform, dim, kv_heads);
        r->expect(st.ok(), st.message());
    }
    const uint32_t pins = r->get<uint32_t>("pinned");
    r->expect(pins <= uint32_t(initial.pins),
              "pinned: " + std::to_string(pins) + " rows, at most " + std::to_string(initial.pins));
    if (!r->ok()) return;
    plan->pinned.resize(pins);
    r->bytes(plan->pinned.data(), pins * sizeof(uint16_t), "pinned");
    for (size_t i = 0; i < pins; ++i)
        r->expect(plan->pinned[i] < kPageTokens && (i == 0 || plan->pinned[i - 1] < plan->pinned[i]),
                  "pinned: rows must ascend within 0..127");
    const int kept = r->get<uint8_t>("pinned rows");
    r->expect(kept == 0 || (kept == 1 && initial.pins > 0), "pinned rows: not of this method");
    if (kept == 1 && r->ok() && make_pins(&state->pins))
        r->bytes(state->pins->bytes(), pins * size_t(dim) * bytes_of(initial.raw), "pinned rows");
    state->frozen = std::move(plan);
    state->decided = true;
}

} // namespace

std::vector<uint8_t> Cache::save(SeqId id) const {
    const Impl& im = *impl_;
    Writer w;
    const Sequence* seq = im.find(id);
    if (!seq) return {};
    w.put(kMagic);
    w.put(kVersion);
    w.put(kByteOrder);
    const std::string& spec = im.method->spec();
    w.put(uint32_t(spec.size()));
    w.bytes(spec.data(), spec.size());
    w.put(im.calibration);
    w.put(uint32_t(im.shape.layers.size()));
    for (const LayerShape& l : im.shape.layers)
        for (const int32_t v : {l.heads, l.kv_heads, l.key_dim, l.value_dim})
            w.put(v);
    w.put(uint64_t(seq->rows()));
    w.bytes(seq->positions.data(), seq->positions.size() * sizeof(int32_t));
    for (const int64_t packed : seq->packed)
        w.put(uint64_t(packed));
    for (size_t layer = 0; layer < im.shape.layers.size(); ++layer)
        for (int32_t head = 0; head < im.shape.layers[layer].kv_heads; ++head)
            for (const Side side : {Side::key, Side::value}) {
                const int32_t index = im.side_index(int32_t(layer), head, side);
                const SidePlan& plan = im.plans[size_t(index)];
                const SideState& state = seq->sides[size_t(index)];
                const size_t row_bytes = size_t(im.raw_layouts[size_t(index)]->dim) * bytes_of(plan.raw);
                w.put(uint32_t(state.abs_sum.size()));
                w.bytes(state.abs_sum.data(), state.abs_sum.size() * sizeof(float));
                w.put(state.query_count);
                save_decided(&w, state, row_bytes);
                const int64_t front = std::min<int64_t>(plan.window.front, seq->rows());
                if (front > 0) w.bytes(state.front->bytes(), size_t(front) * row_bytes);
                const int64_t packed = seq->packed[Impl::packed_index(int32_t(layer), side)];
                const int64_t beyond = seq->rows() - front;
                for (size_t i = 0; i < state.slots.size(); ++i) {
                    const int64_t base = int64_t(i) * kPageTokens;
                    const int64_t rows = std::min<int64_t>(kPageTokens, beyond - base);
                    const int64_t coded = std::clamp<int64_t>(packed - base, 0, rows);
                    if (coded > 0) {
                        const PageLayout& page = *state.slots[i].packed->layout;
                        const bool tiered = page.kind == StoreKind::tiered;
                        const int zero_tier = page.zero_bits > 0, raw_tier = page.raw_depth > 0;
                        w.put(uint8_t(tiered ? page.tier_count + zero_tier + raw_tier : 0));
                        if (tiered && raw_tier) w.put(uint8_t(16)), w.put(page.raw_depth);
                        for (int t = 0; tiered && t < page.tier_count; ++t)
                            w.put(page.tiers[size_t(t)].bits), w.put(page.tiers[size_t(t)].live);
                        if (tiered && zero_tier) w.put(uint8_t(0)), w.put(page.zero_bits);
                        w.put(page.bytes);
                        w.bytes(state.slots[i].packed->bytes(), page.bytes);
                    }
                    if (coded < rows)
                        w.bytes(state.slots[i].raw->bytes() + size_t(coded) * row_bytes,
                                size_t(rows - coded) * row_bytes);
                }
            }
    return std::move(w.out);
}

Status Cache::load(SeqId id, std::span<const uint8_t> bytes) {
    Impl& im = *impl_;
    im.end_step();
    Reader r;
    r.in = bytes;
    r.expect(r.get<uint32_t>("magic") == kMagic, "magic: these bytes are not a saved sequence");
    const uint32_t version = r.get<uint32_t>("version");
    r.expect(version == kVersion,
             "version: " + std::to_string(version) + ", this build reads " + std::to_string(kVersion));
    r.expect(r.get<uint32_t>("byte order") == kByteOrder, "byte order: the state comes from another kind of machine");
    std::string spec;
    const uint32_t length = r.get<uint32_t>("spec length");
    r.expect(length <= 4096, "spec length: " + std::to_string(length) + " is outside 0..4096");
    if (r.ok()) {
        spec.resize(length);
        r.bytes(spec.data(), length, "spec");
        r.expect(spec == im.method->spec(),
                 "spec: the state was saved with '" + spec + "', this cache is '" + im.method->spec() + "'");
    }
    r.expect(r.get<uint64_t>("calibration") == im.calibration,
             "calibration: the state was saved with another calibration file");
    const uint32_t layers = r.get<uint32_t>("layers");
    r.expect(layers == im.shape.layers.size(), "layers: the state has " + std::to_string(layers) + ", the model " +
                                                   std::to_string(im.shape.layers.size()));
    for (size_t i = 0; r.ok() && i < layers; ++i) {
        LayerShape l;
        for (int32_t* v : {&l.heads, &l.kv_heads, &l.key_dim, &l.value_dim})
            *v = r.get<int32_t>("layer shape");
        r.expect(l.same_sizes(im.shape.layers[i]),
                 "layer " + std::to_string(i) + ": the state comes from another model");
    }
    const uint64_t rows = r.get<uint64_t>("rows");
    r.expect(rows <= (bytes.size() - r.at) / sizeof(int32_t),
             "rows: " + std::to_string(rows) + " do not fit the state");
    r.expect(im.options.max_rows <= 0 || rows <= uint64_t(im.options.max_rows),
             "rows: the state holds " + std::to_string(rows) + ", the context at most " +
                 std::to_string(im.options.max_rows));
    if (!r.ok()) return {StatusCode::corrupt, "load: " + r.wrong};

    auto seq = im.make_sequence();
    seq->positions.resize(rows);
    r.bytes(seq->positions.data(), rows * sizeof(int32_t), "positions");
    r.expect(std::is_sorted(seq->positions.begin(), seq->positions.end()), "positions: they decrease");
    for (size_t i = 0; i < seq->packed.size(); ++i) {
        const int32_t layer = int32_t(i / 2);
        const uint64_t packed = r.get<uint64_t>("packed rows");
        const int64_t front = im.shape.layers[size_t(layer)].has_kv() ? im.window(layer, Side(i % 2)).front : 0;
        const int32_t flush = im.shape.layers[size_t(layer)].has_kv() ? im.window(layer, Side(i % 2)).flush : 0;
        const bool fits = packed == 0 || (flush > 0 && packed % uint64_t(flush) == 0 &&
                                          packed <= uint64_t(std::max<int64_t>(0, int64_t(rows) - front)));
        r.expect(fits, "packed rows: " + std::to_string(packed) + " of layer " + std::to_string(layer) +
                           " do not fit " + std::to_string(rows) + " rows");
        seq->packed[i] = fits ? int64_t(packed) : 0;
    }
    bool memory = true;
    const auto page = [&](Page** at, const PageLayout* layout) {
        if (r.ok() && memory) memory = (*at = im.new_page(layout, layout->bytes, false)) != nullptr;
        return r.ok() && memory;
    };
    for (size_t layer = 0; layer < im.shape.layers.size(); ++layer)
        for (int32_t head = 0; head < im.shape.layers[layer].kv_heads; ++head)
            for (const Side side : {Side::key, Side::value}) {
                const int32_t index = im.side_index(int32_t(layer), head, side);
                const SidePlan& plan = im.plans[size_t(index)];
                SideState& state = seq->sides[size_t(index)];
                const int32_t dim = im.raw_layouts[size_t(index)]->dim;
                const size_t row_bytes = size_t(dim) * bytes_of(plan.raw);
                const uint32_t sums = r.get<uint32_t>("statistics");
                r.expect(sums == state.abs_sum.size(), "statistics: " + std::to_string(sums) + " channels, expected " +
                                                           std::to_string(state.abs_sum.size()));
                if (r.ok()) r.bytes(state.abs_sum.data(), sums * sizeof(float), "statistics");
                state.query_count = r.get<int64_t>("query count");
                r.expect(state.query_count >= 0, "query count: it is negative");
                load_decided(&r, plan, dim, im.shape.layers[layer].kv_heads, &state,
                             [&](Page** at) { return page(at, im.pin_layouts[size_t(index)]); });
                const int64_t front = std::min<int64_t>(plan.window.front, int64_t(rows));
                if (front > 0 && page(&state.front, im.front_layouts[size_t(index)]))
                    r.bytes(state.front->bytes(), size_t(front) * row_bytes, "front rows");
                const int64_t packed = seq->packed[Impl::packed_index(int32_t(layer), side)];
                const int64_t beyond = int64_t(rows) - front;
                if (r.ok() && memory) state.slots.resize(size_t((beyond + kPageTokens - 1) / kPageTokens));
                for (size_t i = 0; r.ok() && memory && i < state.slots.size(); ++i) {
                    const int64_t base = int64_t(i) * kPageTokens;
                    const int64_t count = std::min<int64_t>(kPageTokens, beyond - base);
                    const int64_t coded = std::clamp<int64_t>(packed - base, 0, count);
                    if (coded > 0) {
                        Ladder ladder;
                        const int tiers = r.get<uint8_t>("tiers");
                        const bool tiered = plan.store.kind == StoreKind::tiered;
                        r.expect(tiered ? tiers > 0 && tiers <= kMaxTiers : tiers == 0,
                                 "tiers: not those of the store");
                        for (int t = 0; r.ok() && t < tiers; ++t) {
                            const uint8_t bits = r.get<uint8_t>("tier bits");
                            const uint16_t channels = r.get<uint16_t>("tier channels");
                            ladder.push(bits, channels);
                        }
                        if (tiered && r.ok()) {
                            const Status st = validate(ladder, dim, plan.store);
                            r.expect(st.ok(), "tiers: " + st.message());
                        }
                        if (!r.ok()) break;
                        const PageLayout* l = im.intern(layout(plan.store, side, dim, ladder));
                        r.expect(r.get<uint32_t>("page bytes") == l->bytes, "page bytes: not those of the layout");
                        if (page(&state.slots[i].packed, l)) {
                            uint8_t* to = state.slots[i].packed->bytes();
                            r.bytes(to, l->bytes, "page");
                            const bool map = l->map_bytes > 0; // it indexes channels
                            for (int32_t c = 0; r.ok() && map && c < dim; ++c) {
                                uint16_t wide = 0;
                                if (l->map_bytes == uint32_t(dim))
                                    wide = to[l->map_offset + size_t(c)];
                                else
                                    std::memcpy(&wide, to + l->map_offset + size_t(c) * 2, 2);
                                r.expect(wide < dim, "channel map: " + std::to_string(wide) + " is outside 0.." +
                                                         std::to_string(dim - 1));
                            }
                        }
                    }
                    if (coded < count && page(&state.slots[i].raw, im.raw_page(index, count)))
                        r.bytes(state.slots[i].raw->bytes() + size_t(coded) * row_bytes,
                                size_t(count - coded) * row_bytes, "raw rows");
                }
            }
    r.expect(!memory || r.at == bytes.size(), "length: " + std::to_string(bytes.size() - r.at) + " bytes too many");
    if (!r.ok() || !memory) {
        im.free_pages(*seq);
        if (!memory) return {StatusCode::out_of_memory, "load: no memory for the pages of the state"};
        return {StatusCode::corrupt, "load: " + r.wrong};
    }
    remove(id);
    im.sequences[id] = std::move(seq);
    return {};
}

} // namespace kvmosaic
