// Caches and steps.
#include "capi/capi.h"

using namespace kvmosaic;
using capi::bad;
using capi::close_step;
using capi::guarded;

namespace {

Status take_model(const kvmosaic_model* given, ModelShape* shape) {
    kvmosaic_model model{};
    if (!given) return bad("model: it is null");
    if (Status st = capi::take_struct(given, "model", &model); !st) return st;
    if (!model.layers || model.layer_count < 1 || model.layer_count > 65536)
        return bad("model: layers are null or layer_count is outside 1..65536");
    if (model.name) shape->name = model.name;
    if (model.fingerprint) shape->fingerprint = model.fingerprint;
    for (int32_t i = 0; i < model.layer_count; ++i) {
        const kvmosaic_layer& l = model.layers[i];
        LayerShape& to = shape->layers.emplace_back();
        to.heads = l.heads;
        to.kv_heads = l.kv_heads;
        to.key_dim = l.key_dim;
        to.value_dim = l.value_dim;
        if (!l.rope) continue;
        const kvmosaic_rope& r = *l.rope;
        if (r.rotary < 0 || r.rotary > l.key_dim || r.rotary % 2 != 0)
            return bad("layer " + std::to_string(i) + ": rotary = " + std::to_string(r.rotary) +
                       " is not even or outside 0.." + std::to_string(l.key_dim));
        to.rope.known = true;
        to.rope.halves = r.halves != 0;
        to.rope.rotary = r.rotary;
        to.rope.original_context = r.original_context;
        to.rope.base = r.base;
        to.rope.freq_scale = r.freq_scale;
        to.rope.ext_factor = r.ext_factor;
        to.rope.attn_factor = r.attn_factor;
        to.rope.beta_fast = r.beta_fast;
        to.rope.beta_slow = r.beta_slow;
        if (r.factors) to.rope.factors.assign(r.factors, r.factors + r.rotary / 2);
    }
    return {};
}

Status check_layer(const kvmosaic_cache* cache, int32_t layer) {
    if (!cache) return bad("cache: it is null");
    if (!cache->open) return bad("layer " + std::to_string(layer) + ": there is no open step (kvmosaic_begin_step)");
    const auto& layers = cache->cache->shape().layers;
    if (layer < 0 || size_t(layer) >= layers.size())
        return bad("layer: " + std::to_string(layer) + " is outside 0.." + std::to_string(layers.size() - 1));
    if (!layers[size_t(layer)].has_kv())
        return bad("layer " + std::to_string(layer) + ": it keeps no keys and values; name the layer that it reads");
    return {};
}

Status check_threads(int32_t thread, int32_t threads) {
    if (threads < 1 || threads > 4096 || thread < 0 || thread >= threads)
        return bad("thread " + std::to_string(thread) + " of " + std::to_string(threads) +
                   ": must be 0 to threads - 1");
    return {};
}

Status take_rows(const kvmosaic_rows* given, const char* name, RowsF32* rows) {
    if (!given || !given->base) return bad(std::string(name) + ": it is null");
    *rows = {given->base, given->row_stride, given->head_stride};
    return {};
}

} // namespace

extern "C" {

int32_t kvmosaic_abi(void) { return KVMOSAIC_ABI; }
const char* kvmosaic_version(void) { return KVMOSAIC_VERSION; }

int32_t kvmosaic_create(const kvmosaic_model* model, const char* spec, const kvmosaic_options* options,
                        kvmosaic_cache** cache, kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!cache) return bad("cache: it is null");
        *cache = nullptr;
        if (!spec) return bad("spec: it is null");
        ModelShape shape;
        if (Status st = take_model(model, &shape); !st) return st;
        kvmosaic_options given = KVMOSAIC_OPTIONS_INIT;
        if (Status st = capi::take_struct(options, "options", &given); !st) return st;
        if (given.max_rows < 0 || given.max_bytes < 0)
            return bad("options: max_rows and max_bytes must not be negative");
        CacheOptions wish;
        wish.max_rows = given.max_rows;
        wish.max_bytes = given.max_bytes;
        wish.step = given.chunk ? StepMode::chunk : StepMode::decode;
        wish.accuracy = given.fast ? Accuracy::fast : Accuracy::exact;
        wish.restore = given.restore != 0;
        if (given.isa) wish.isa = given.isa;
        wish.rollback = given.rollback;
        auto made = Cache::create(shape, spec, wish);
        if (!made) return made.status();
        auto handle = std::make_unique<kvmosaic_cache>();
        handle->cache = std::move(*made);
        handle->written = std::make_unique<std::atomic<int32_t>[]>(shape.layers.size());
        *cache = handle.release();
        return {};
    });
}

void kvmosaic_destroy(kvmosaic_cache* cache) { delete cache; }
const char* kvmosaic_spec(const kvmosaic_cache* cache) { return cache ? cache->cache->method().spec().c_str() : ""; }
const char* kvmosaic_path(const kvmosaic_cache* cache) { return cache ? name_of(cache->cache->path()) : ""; }
const char* kvmosaic_isa(const kvmosaic_cache* cache) { return cache ? cache->cache->isa() : ""; }

const char* kvmosaic_method(int32_t index) {
    const auto& all = methods();
    return index >= 0 && size_t(index) < all.size() ? all[size_t(index)]->name.c_str() : nullptr;
}

// ---- steps ----

int32_t kvmosaic_begin_step(kvmosaic_cache* cache, const kvmosaic_step_row* rows, int32_t count,
                            kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!cache) return bad("cache: it is null");
        if (!rows || count < 1)
            return bad("rows: they are null, or count = " + std::to_string(count) + " is not above 0");
        close_step(cache);
        std::vector<StepRow> step;
        step.reserve(size_t(count));
        for (int32_t i = 0; i < count; ++i) {
            if (!rows[i].sequences || rows[i].sequence_count < 1)
                return bad("row " + std::to_string(i) + ": it belongs to no sequence");
            step.push_back({rows[i].position, {rows[i].sequences, size_t(rows[i].sequence_count)}});
        }
        const Status st = cache->cache->begin_step(step);
        if (!st) return st;
        for (size_t l = 0; l < cache->cache->shape().layers.size(); ++l)
            cache->written[l] = 0;
        cache->open = true;
        return {};
    });
}

int32_t kvmosaic_write_part(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q, const kvmosaic_rows* k,
                            const kvmosaic_rows* v, int32_t thread, int32_t threads, kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        RowsF32 rows[3];
        Status st = check_layer(cache, layer);
        if (st) st = check_threads(thread, threads);
        if (st) st = take_rows(q, "q", &rows[0]);
        if (st) st = take_rows(k, "k", &rows[1]);
        if (st) st = take_rows(v, "v", &rows[2]);
        if (!st) return st;
        if (cache->written[size_t(layer)].fetch_add(1) >= threads)
            return bad("layer " + std::to_string(layer) + ": it was written in this step");
        cache->cache->write(layer, rows[0], rows[1], rows[2], {thread, threads});
        return {};
    });
}

int32_t kvmosaic_write(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q, const kvmosaic_rows* k,
                       const kvmosaic_rows* v, kvmosaic_error* error) {
    return kvmosaic_write_part(cache, layer, q, k, v, 0, 1, error);
}

int32_t kvmosaic_attend_part(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q,
                             const kvmosaic_attention* args, float* out, int32_t thread, int32_t threads,
                             kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        RowsF32 rows;
        kvmosaic_attention given = KVMOSAIC_ATTENTION_INIT;
        Status st = check_layer(cache, layer);
        if (st) st = check_threads(thread, threads);
        if (st) st = take_rows(q, "q", &rows);
        if (st) st = capi::take_struct(args, "attention", &given);
        if (!st) return st;
        if (!out) return bad("out: it is null");
        if (cache->written[size_t(layer)] < 1)
            return bad("layer " + std::to_string(layer) + ": it was not written in this step");
        const LayerShape& l = cache->cache->shape().layers[size_t(layer)];
        if (given.heads < 0 || given.heads % l.kv_heads != 0)
            return bad("heads: " + std::to_string(given.heads) + " is no multiple of the layer's " +
                       std::to_string(l.kv_heads) + " KV heads");
        if (given.window < 0) return bad("window: " + std::to_string(given.window) + " is negative");
        AttendArgs to;
        to.scale = given.scale;
        to.soft_cap = given.soft_cap;
        to.sinks = given.sinks;
        to.window = given.window;
        to.causal = given.causal != 0;
        to.heads = given.heads;
        cache->cache->attend(layer, rows, to, out, {thread, threads});
        return {};
    });
}

int32_t kvmosaic_attend(kvmosaic_cache* cache, int32_t layer, const kvmosaic_rows* q, const kvmosaic_attention* args,
                        float* out, kvmosaic_error* error) {
    return kvmosaic_attend_part(cache, layer, q, args, out, 0, 1, error);
}

void kvmosaic_end_step(kvmosaic_cache* cache) {
    if (cache) close_step(cache);
}

} // extern "C"
