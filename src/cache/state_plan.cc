#include "cache/state_plan.h"

#include <algorithm>

namespace kvmosaic::state {

namespace {

// Every fixed field of two plans, in the order in which they are saved. f(name, a's, b's)
template <typename A, typename B, typename F>
void for_each_field(A& a, B& b, F f) {
    f("front", a.plan.window.front, b.plan.window.front);
    f("keep", a.plan.window.keep, b.plan.window.keep);
    f("flush", a.plan.window.flush, b.plan.window.flush);
    f("first", a.plan.window.first, b.plan.window.first);
    f("raw type", a.plan.raw, b.plan.raw);
    f("key space", a.plan.space, b.plan.space);
    f("pins", a.plan.pins, b.plan.pins);
    f("store", a.plan.store.kind, b.plan.store.kind);
    f("raw store", a.plan.store.raw, b.plan.store.raw);
    f("bits", a.plan.store.bits, b.plan.store.bits);
    f("axis", a.plan.store.axis, b.plan.store.axis);
    f("group", a.plan.store.group, b.plan.store.group);
    f("parameter type", a.plan.store.params, b.plan.store.params);
    f("rule", a.plan.store.rule, b.plan.store.rule);
    f("levels", a.plan.store.levels, b.plan.store.levels);
    f("clip", a.plan.store.clip, b.plan.store.clip);
    f("page map", a.plan.store.page_map, b.plan.store.page_map);
    f("outliers", a.plan.store.outliers, b.plan.store.outliers);
    f("vectors", a.plan.store.vectors, b.plan.store.vectors);
    f("wide channels", a.plan.store.wide, b.plan.store.wide);
    f("shrinks", a.plan.store.shrinks, b.plan.store.shrinks);
    f("codebook", a.book, b.book);
    f("edges", a.edges, b.edges);
    f("joined heads", a.plan.transform.joined, b.plan.transform.joined);
    f("hadamard", a.plan.transform.hadamard, b.plan.transform.hadamard);
    f("shift", a.plan.transform.shift, b.plan.transform.shift);
    f("scale", a.plan.transform.scale, b.plan.transform.scale);
    f("order", a.plan.transform.order, b.plan.transform.order);
}

template <typename T>
struct is_vector : std::false_type {};
template <typename T>
struct is_vector<std::vector<T>> : std::true_type {};

// Of a Rope, likewise.
template <typename A, typename B, typename F>
void for_each_rope_field(A& a, B& b, F f) {
    f("known", a.known, b.known);
    f("halves", a.halves, b.halves);
    f("rotary", a.rotary, b.rotary);
    f("original context", a.original_context, b.original_context);
    f("base", a.base, b.base);
    f("freq_scale", a.freq_scale, b.freq_scale);
    f("ext_factor", a.ext_factor, b.ext_factor);
    f("attn_factor", a.attn_factor, b.attn_factor);
    f("beta_fast", a.beta_fast, b.beta_fast);
    f("beta_slow", a.beta_slow, b.beta_slow);
    f("factors", a.factors, b.factors);
}

struct Put {
    Writer* w;
    template <typename T, typename U>
    void operator()(const char* /*name*/, const T& value, const U& /*same*/) const {
        if constexpr (is_vector<T>::value)
            w->array(value);
        else
            w->put(value);
    }
};

struct Get {
    Reader* r;
    template <typename T, typename U>
    void operator()(const char* name, T& value, const U& /*same*/) const {
        if constexpr (is_vector<T>::value)
            r->array(&value, 1u << 20, name);
        else if constexpr (std::is_enum_v<T>)
            value = T(r->get<std::underlying_type_t<T>>(name));
        else if constexpr (std::is_same_v<T, bool>)
            value = r->flag(name);
        else
            value = r->get<T>(name);
    }
};

struct Gap {
    std::string* text;
    template <typename T>
    void operator()(const char* name, const T& saved, const T& here) const {
        if (!text->empty() || saved == here) return;
        if constexpr (is_vector<T>::value)
            *text = std::string(name) + " differs between the state and this cache";
        else
            *text = std::string(name) + " is " + number(saved) + " in the state and " + number(here) + " here";
    }
    template <typename T>
    static std::string number(T v) {
        if constexpr (std::is_enum_v<T>)
            return std::to_string(std::underlying_type_t<T>(v));
        else
            return std::to_string(v);
    }
};

} // namespace

const char* name_of(Tag tag) {
    static const char* const names[] = {"?",          "model",   "method", "plans", "positions",
                                        "statistics", "decided", "front",  "keys",  "values"};
    return uint32_t(tag) <= kLastTag ? names[uint32_t(tag)] : "?";
}

bool Reader::short_of(size_t n, const char* field) {
    refuse(std::string(field) + ": " + std::to_string(n) + " bytes are needed and " + std::to_string(left()) +
           " are left");
    return false;
}

void put_head(std::vector<uint8_t>* out) {
    for (const uint32_t v : {kMagic, kVersion, kByteOrder, uint32_t(kPageTokens)}) {
        const auto* b = reinterpret_cast<const uint8_t*>(&v);
        out->insert(out->end(), b, b + sizeof(v));
    }
}

void put_section_head(std::vector<uint8_t>* out, Tag tag, uint32_t number, uint64_t length) {
    for (const uint32_t v : {uint32_t(tag), number, uint32_t(length), uint32_t(length >> 32)}) {
        const auto* b = reinterpret_cast<const uint8_t*>(&v);
        out->insert(out->end(), b, b + sizeof(v));
    }
}

Result<std::vector<Section>> sections(std::span<const uint8_t> bytes) {
    Reader r(bytes);
    r.expect(r.get<uint32_t>("magic") == kMagic, "magic: these bytes are not a saved sequence");
    const uint32_t version = r.get<uint32_t>("version");
    const uint32_t order = r.get<uint32_t>("byte order");
    r.expect(order != kSwapped, "byte order: the state comes from a machine with the other one");
    if (version != kVersion)
        r.refuse("version: " + std::to_string(version) + ", this build reads " + std::to_string(kVersion));
    r.expect(order == kByteOrder, "byte order: the mark is damaged");
    const uint32_t tokens = r.get<uint32_t>("page size");
    if (tokens != uint32_t(kPageTokens))
        r.refuse("page size: pages of " + std::to_string(tokens) + " tokens, this build has " +
                 std::to_string(kPageTokens));
    std::vector<Section> found;
    while (r.ok() && r.left() > 0) {
        const uint32_t tag = r.get<uint32_t>("section");
        const uint32_t number = r.get<uint32_t>("section number");
        const uint64_t length = r.get<uint64_t>("section length");
        if (tag == 0 || tag > kLastTag) r.refuse("section: there is no kind " + std::to_string(tag));
        if (r.ok() && length > r.left())
            r.refuse(std::string("section ") + name_of(Tag(tag)) + ": " + std::to_string(length) +
                     " bytes are needed and " + std::to_string(r.left()) + " are left");
        if (!r.ok()) break;
        found.push_back({Tag(tag), number, bytes.subspan(bytes.size() - r.left(), size_t(length))});
        r.skip(size_t(length));
    }
    if (!r.ok()) return Status(StatusCode::corrupt, r.wrong());
    return found;
}

StoredPlan stored(const SidePlan& plan) {
    StoredPlan s{plan, {}, {}};
    const StoreSpec& store = plan.store;
    if (store.book) s.book.assign(store.book, store.book + (size_t(1) << store.bits));
    if (store.edges) s.edges.assign(store.edges, store.edges + store.edge_groups + 1);
    return s;
}

void put_plan(Writer* w, const SidePlan& plan) {
    const StoredPlan s = stored(plan);
    for_each_field(s, s, Put{w});
}

void get_plan(Reader* r, StoredPlan* into) {
    for_each_field(*into, *into, Get{r});
    into->plan.store.book = nullptr; // whoever lays out pages points them at the arrays, once these stay where they are
    into->plan.store.edges = nullptr;
}

std::string plan_gap(const StoredPlan& saved, const SidePlan& here) {
    std::string gap;
    const StoredPlan mine = stored(here);
    for_each_field(saved, mine, Gap{&gap});
    return gap;
}

void put_model(Writer* w, const ModelShape& shape) {
    std::string name = shape.name; // for messages only
    std::replace_if(
        name.begin(), name.end(), [](char c) { return uint8_t(c) < 0x20 || c == 0x7F; }, '?');
    w->text(name);
    w->text(shape.fingerprint);
    w->put(uint32_t(shape.layers.size()));
    for (const LayerShape& l : shape.layers) {
        for (const int32_t v : {l.heads, l.kv_heads, l.key_dim, l.value_dim})
            w->put(v);
        for_each_rope_field(l.rope, l.rope, Put{w});
    }
}

void get_model(Reader* r, ModelShape* shape) {
    r->text(&shape->name, 256, "model name");
    r->text(&shape->fingerprint, 256, "model fingerprint");
    const uint32_t layers = r->get<uint32_t>("layers");
    constexpr size_t kLeast = 4 * sizeof(int32_t); // of a layer
    if (layers > r->left() / kLeast) r->refuse("layers: " + std::to_string(layers) + " do not fit the section");
    for (uint32_t i = 0; r->ok() && i < layers; ++i) {
        LayerShape& l = shape->layers.emplace_back();
        for (int32_t* v : {&l.heads, &l.kv_heads, &l.key_dim, &l.value_dim})
            *v = r->get<int32_t>("layer sizes");
        for_each_rope_field(l.rope, l.rope, Get{r});
        if (!l.rope.known && r->ok()) l.rope = Rope(); // says nothing, whatever else stands there
    }
}

std::string model_gap(const ModelShape& saved, const ModelShape& here) {
    if (saved.layers.size() != here.layers.size())
        return "layers: the state has " + std::to_string(saved.layers.size()) + ", the model " +
               std::to_string(here.layers.size());
    const bool named = !saved.fingerprint.empty() && !here.fingerprint.empty();
    for (size_t i = 0; i < here.layers.size(); ++i)
        if (!saved.layers[i].same_sizes(here.layers[i]))
            return "layer " + std::to_string(i) + ": the state comes from another model, with other sizes";
    if (named && saved.fingerprint != here.fingerprint)
        return "fingerprint: the state comes from another model, " + saved.fingerprint + " and not " + here.fingerprint;
    for (size_t i = 0; i < here.layers.size(); ++i) {
        const Rope &a = saved.layers[i].rope, &b = here.layers[i].rope;
        std::string gap;
        if (here.layers[i].has_kv() && a.known && b.known) for_each_rope_field(a, b, Gap{&gap});
        if (!gap.empty()) return "rotation of layer " + std::to_string(i) + ": " + gap;
    }
    return {};
}

std::string portable(const std::string& spec) {
    std::string out = spec;
    for (const char* mark : {":calib=", ",calib="})
        if (const size_t at = out.find(mark); at != std::string::npos) {
            const size_t end = std::min(out.find(',', at + 1), out.size());
            out.replace(at + 7, end - at - 7, "");
            break;
        }
    return out;
}

} // namespace kvmosaic::state
