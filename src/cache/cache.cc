// The public face: creation, names, limits, footprint.
#include "kvmosaic/cache.h"

#include <algorithm>
#include <cstdlib>

#include "cache/impl.h"
#include "cache/scratch.h"
#include "core/hash.h"

namespace kvmosaic {

Scratch& thread_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

const char* name_of(Accuracy a) { return a == Accuracy::exact ? "exact" : "fast"; }

const char* name_of(Path p) {
    switch (p) {
    case Path::raw:
        return "raw";
    case Path::restore:
        return "restore";
    case Path::partly:
        return "partly fused";
    case Path::fused:
        return "fused";
    case Path::reference:
        return "reference";
    }
    return "?";
}

Cache::Impl::Impl(const ModelShape& s, const CacheOptions& o) : shape(s), options(o), arena(o.max_bytes, o.poison) {}

Cache::Impl::~Impl() {
    for (auto& [id, seq] : sequences)
        drop_sequence(seq);
    for (auto& [hash, prefix] : prefixes)
        drop_sequence(prefix.state);
}

void Cache::Impl::scratch_report() {
    const int64_t mine = int64_t(thread_scratch().bytes());
    int64_t seen = scratch_bytes.load(std::memory_order_relaxed);
    while (mine > seen && !scratch_bytes.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
    }
}

namespace {

Status bad_window(int32_t layer, Side side, const std::string& what) {
    return {StatusCode::invalid_argument, "layer " + std::to_string(layer) + ", " + name_of(side) + " side: " + what};
}

Status check(const SidePlan& plan, int32_t layer, Side side, int32_t dim) {
    const Window& w = plan.window;
    if (w.front < 0 || w.front > 4096)
        return bad_window(layer, side, "front=" + std::to_string(w.front) + " is outside 0..4096");
    if (w.keep < 0 || w.keep > 65536 + kPageTokens)
        return bad_window(layer, side, "keep=" + std::to_string(w.keep) + " is outside 0..65536");
    if (w.flush < 0 || w.flush > kPageTokens || (w.flush > 0 && kPageTokens % w.flush != 0))
        return bad_window(layer, side,
                          "flush=" + std::to_string(w.flush) + " is neither 0 nor a divisor of " +
                              std::to_string(kPageTokens));
    if (w.flush == 0) return {};
    if (Status st = validate(plan.store, side, dim); !st) return bad_window(layer, side, st.message());
    if ((plan.store.kind == StoreKind::tiered || in_planes(plan.store.rule)) && w.flush != kPageTokens)
        return bad_window(layer, side, "this store packs whole pages: flush must be " + std::to_string(kPageTokens));
    if (plan.store.axis == Axis::tokens && w.flush % plan.store.group != 0)
        return bad_window(layer, side,
                          "flush=" + std::to_string(w.flush) +
                              " is no multiple of group=" + std::to_string(plan.store.group));
    return {};
}

// What a plan asks of the cache beside its store.
Status check_extras(const Method& method, const SidePlan& plan, const LayerShape& l, int32_t layer, Side side) {
    if (plan.window.flush == 0) return {};
    if (Status st = validate(plan.transform, l.dim(side), l.kv_heads); !st)
        return bad_window(layer, side, st.message());
    if (plan.window.first != 0 && plan.window.first != kPageTokens)
        return bad_window(layer, side, "first=" + std::to_string(plan.window.first) + " is neither 0 nor 128");
    if ((method.freezes(side) || plan.pins > 0) && plan.window.first != kPageTokens)
        return bad_window(layer, side, "what is decided once a sequence needs first=128");
    if (plan.pins < 0 || plan.pins > kPageTokens)
        return bad_window(layer, side, "pins=" + std::to_string(plan.pins) + " is outside 0..128");
    if (plan.transform.joined > 1 && plan.store.kind == StoreKind::tiered)
        return bad_window(layer, side, "joined heads and a tiered store do not go together");
    if (plan.space == KeySpace::centred &&
        (side == Side::value || !plan.transform.identity() || plan.store.kind != StoreKind::tiered))
        return bad_window(layer, side, "centred rows are those of keys in a tiered store without a transform");
    if (plan.space == KeySpace::pre_rope && side == Side::key && !l.rope.known)
        return {StatusCode::unsupported, "layer " + std::to_string(layer) +
                                             ": its rotary embedding is not known, and this method packs keys from "
                                             "before it"};
    return {};
}

// A rotation's table, shared by the layers that turn alike.
template <class Table>
std::shared_ptr<const Table> table_of(const Rope& rope, const std::vector<std::shared_ptr<const Table>>& made) {
    for (const auto& t : made)
        if (t && t->rope() == rope) return t;
    return std::make_shared<const Table>(rope);
}

// Over what a method took from a calibration file, so that a saved state is not read with another.
uint64_t hash_plan(uint64_t h, const SidePlan& plan) {
    const auto add = [&](const void* p, size_t n) { h = fnv1a(p, n, h); };
    const Transform& t = plan.transform;
    add(t.shift.data(), t.shift.size() * sizeof(float));
    add(t.scale.data(), t.scale.size() * sizeof(float));
    add(t.order.data(), t.order.size() * sizeof(uint16_t));
    if (plan.store.book) add(plan.store.book, (size_t(1) << plan.store.bits) * sizeof(float));
    if (plan.store.edges) add(plan.store.edges, (size_t(plan.store.edge_groups) + 1) * sizeof(uint16_t));
    add(&plan.store.bits, sizeof(plan.store.bits));
    return h;
}

} // namespace

Status read_environment(CacheOptions* options) {
    if (const char* named = std::getenv("KVMOSAIC_ACCURACY"); named && *named) {
        const std::string_view wish = named;
        if (wish != "exact" && wish != "fast")
            return {StatusCode::invalid_argument,
                    "KVMOSAIC_ACCURACY = '" + std::string(wish) + "': must be exact or fast"};
        options->accuracy = wish == "fast" ? Accuracy::fast : Accuracy::exact;
    }
    if (const char* named = std::getenv("KVMOSAIC_RESTORE"); named && *named && std::string_view(named) != "0")
        options->restore = true;
    return {};
}

// Pages hold one head's keys as they are attended: what a transform of one head's channels does is folded into the
// query and undone on the output; joined heads, turned keys and pinned rows are restored.
bool Cache::Impl::can_fuse(const SidePlan& plan, Side side, int32_t dim) const {
    if (plan.window.flush == 0 || options.reference || options.restore) return false;
    if (plan.space == KeySpace::pre_rope || plan.transform.joined > 1 || plan.pins > 0) return false;
    const bool tiered = plan.store.kind == StoreKind::tiered;
    return table->reads_codes(layout(plan.store, side, dim, tiered ? Ladder::uniform(1, uint16_t(dim)) : Ladder()));
}

Path Cache::Impl::fused_path() const {
    int64_t packing = 0, reading = 0;
    for (size_t i = 0; i < plans.size(); ++i)
        packing += plans[i].window.flush > 0, reading += fused[i];
    return reading == packing ? Path::fused : reading > 0 ? Path::partly : Path::restore;
}

Result<std::unique_ptr<Cache>> Cache::create(const ModelShape& shape, std::string_view spec,
                                             const CacheOptions& options) {
    if (Status st = validate(shape); !st) return st;
    auto method = open_method(spec);
    if (!method) return method.status();
    return create(shape, std::move(*method), options);
}

Result<std::unique_ptr<Cache>> Cache::create(const ModelShape& shape, std::unique_ptr<Method> method,
                                             const CacheOptions& options) {
    if (Status st = validate(shape); !st) return st;
    if (!method) return Status(StatusCode::invalid_argument, "method: a method is needed, not a null pointer");
    auto im = std::make_unique<Impl>(shape, options);
    im->method = std::move(method);
    if (Status st = im->method->accept(shape); !st) return st;

    if (options.rollback < 0 || options.rollback > 65536)
        return Status(StatusCode::invalid_argument,
                      "rollback = " + std::to_string(options.rollback) + " is outside 0..65536");
    if (Status st = read_environment(&im->options); !st) return st;
    if (options.reference) {
        im->table = &kernels::reference();
    } else if (im->table = kernels::find(options.isa); !im->table) {
        const char* forced = std::getenv("KVMOSAIC_ISA");
        std::string list;
        for (const kernels::Table* t : kernels::available())
            list += (list.empty() ? "" : ", ") + std::string(t->isa);
        return Status(StatusCode::unsupported, "instruction set '" +
                                                   (options.isa.empty() && forced ? std::string(forced) : options.isa) +
                                                   "' is not available here; this machine has: " + list);
    }

    im->side_first.assign(shape.layers.size(), -1);
    bool packs = false;
    for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
        const LayerShape& l = shape.layers[size_t(layer)];
        im->side_first[size_t(layer)] = im->side_count;
        im->side_count += 2 * l.kv_heads;
        for (int32_t head = 0; head < l.kv_heads; ++head)
            for (const Side side : {Side::key, Side::value}) {
                SidePlan plan = im->method->initial(side, layer, head, l.dim(side));
                if (Status st = check(plan, layer, side, l.dim(side)); !st) return st;
                if (Status st = check_extras(*im->method, plan, l, layer, side); !st) return st;
                const bool tiered = plan.window.flush > 0 && plan.store.kind == StoreKind::tiered;
                const int32_t d = l.dim(side);
                im->raw_layouts.push_back(im->intern(raw_layout(plan.raw, side, d)));
                im->front_layouts.push_back(
                    plan.window.front ? im->intern(raw_layout(plan.raw, side, d, plan.window.front)) : nullptr);
                im->grid_layouts.push_back(plan.window.flush > 0 && !tiered ? im->intern(layout(plan.store, side, d))
                                                                            : nullptr);
                im->pin_layouts.push_back(plan.pins > 0 ? im->intern(raw_layout(plan.raw, side, d, plan.pins))
                                                        : nullptr);
                im->worst.push_back(tiered ? worst_page_bytes(plan.store, side, d, im->method->widths(side)) : 0);
                packs = packs || plan.window.flush > 0;
                im->fused.push_back(im->can_fuse(plan, side, d));
                im->calibration = hash_plan(im->calibration, plan);
                im->plans.push_back(std::move(plan));
            }
        const KeySpace space =
            l.has_kv() ? im->plans[size_t(im->side_index(layer, 0, Side::key))].space : KeySpace::post_rope;
        im->turns.push_back(space == KeySpace::pre_rope ? table_of(l.rope, im->turns) : nullptr);
        im->means.push_back(space == KeySpace::centred ? table_of(l.rope, im->means) : nullptr);
        for (int32_t i = im->side_first[size_t(layer)]; i < im->side_count; ++i) {
            const Window& w = im->plans[size_t(i)].window;
            const Side side = (i - im->side_first[size_t(layer)]) % 2 ? Side::value : Side::key;
            if (!(w == im->window(layer, side)) || w.front != im->window(layer, Side::key).front)
                return bad_window(layer, side, "all heads of a layer need one window, and both sides one front");
            if (im->plans[size_t(i)].transform.joined != im->joined(layer, side))
                return bad_window(layer, side, "all heads of a layer need the same number of joined heads");
        }
    }
    im->path = !packs ? Path::raw : options.reference ? Path::reference : im->fused_path();
    return std::unique_ptr<Cache>(new Cache(std::move(im)));
}

Cache::Cache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Cache::~Cache() { impl_->end_step(); }

const ModelShape& Cache::shape() const { return impl_->shape; }
const Method& Cache::method() const { return *impl_->method; }
Path Cache::path() const { return impl_->path; }
Accuracy Cache::accuracy() const { return impl_->options.accuracy; }
const char* Cache::isa() const { return impl_->table->isa; }
void Cache::end_step() { impl_->end_step(); }
Status Cache::begin_step(std::span<const StepRow> rows) { return impl_->begin_step(rows); }

std::vector<SeqId> Cache::sequences() const {
    std::vector<SeqId> ids;
    for (const auto& [id, seq] : impl_->sequences)
        ids.push_back(id);
    return ids;
}

int64_t Cache::rows(SeqId seq) const {
    const Sequence* s = impl_->find(seq);
    return s ? s->rows() : 0;
}

std::span<const int32_t> Cache::positions(SeqId seq) const {
    const Sequence* s = impl_->find(seq);
    return s ? std::span<const int32_t>(s->positions) : std::span<const int32_t>();
}

Status Cache::fork(SeqId from, SeqId to) {
    impl_->end_step();
    const auto it = impl_->sequences.find(from);
    if (it == impl_->sequences.end())
        return {StatusCode::not_found, "fork: there is no sequence " + std::to_string(from)};
    if (from == to) return {};
    const std::shared_ptr<Sequence> seq = it->second; // one object, two names; it is cloned when one of them moves on
    remove(to);
    impl_->sequences[to] = seq;
    return {};
}

Status Cache::truncate(SeqId seq, int64_t rows) {
    impl_->end_step();
    const auto it = impl_->sequences.find(seq);
    if (it == impl_->sequences.end())
        return {StatusCode::not_found, "truncate: there is no sequence " + std::to_string(seq)};
    if (rows < 0 || rows > it->second->rows())
        return {StatusCode::invalid_argument, "truncate: " + std::to_string(rows) + " rows asked of sequence " +
                                                  std::to_string(seq) + ", which has " +
                                                  std::to_string(it->second->rows())};
    if (rows == it->second->rows()) return {};
    return impl_->cut(it->second, rows);
}

void Cache::remove(SeqId seq) {
    impl_->end_step();
    const auto it = impl_->sequences.find(seq);
    if (it == impl_->sequences.end()) return;
    impl_->drop_sequence(it->second);
    impl_->sequences.erase(it);
}

void Cache::clear() {
    for (const SeqId id : sequences())
        remove(id);
}

Status Cache::append_and_attend(int32_t layer, std::span<const StepRow> rows, RowsF32 q, RowsF32 k, RowsF32 v,
                                const AttendArgs& args, float* out) {
    if (Status st = begin_step(rows); !st) return st;
    write(layer, q, k, v);
    attend(layer, q, args, out);
    end_step();
    return {};
}

int64_t Cache::packed_rows(SeqId seq, int32_t layer, Side side) const {
    const Sequence* s = impl_->find(seq);
    return s && impl_->shape.layers[size_t(layer)].has_kv() ? s->packed[Impl::packed_index(layer, side)] : 0;
}

int64_t Cache::pages(SeqId seq, int32_t layer, Side side) const {
    return (packed_rows(seq, layer, side) + kPageTokens - 1) / kPageTokens;
}

PageView Cache::page(SeqId seq, int32_t layer, int32_t kv_head, Side side, int64_t index) const {
    const Sequence* s = impl_->find(seq);
    if (!s || index < 0 || index >= pages(seq, layer, side)) return {};
    const Page* page = s->sides[size_t(impl_->side_index(layer, kv_head, side))].slots[size_t(index)].packed;
    const int64_t rows = packed_rows(seq, layer, side) - index * kPageTokens;
    return {page->layout, page->bytes(), int32_t(std::min<int64_t>(kPageTokens, rows))};
}

void Cache::decode(SeqId seq, int32_t layer, int32_t kv_head, Side side, int64_t first, int64_t count,
                   float* out) const {
    if (const Sequence* s = impl_->find(seq))
        impl_->decode(*s, layer, kv_head, side, packed_rows(seq, layer, side), first, count, out);
}

const SidePlan& Cache::plan(SeqId seq, int32_t layer, int32_t kv_head, Side side) const {
    const int32_t index = impl_->side_index(layer, kv_head, side);
    const Sequence* s = impl_->find(seq);
    return s ? impl_->plan_of(s->sides[size_t(index)], index) : impl_->plans[size_t(index)];
}

} // namespace kvmosaic
