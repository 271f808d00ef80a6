// Sequences, and looking into caches.
#include "capi/capi.h"

using namespace kvmosaic;
using capi::bad;
using capi::close_step;
using capi::guarded;

namespace {

// f() returns a Status; the step ends before it.
template <typename F>
int32_t between_steps(kvmosaic_cache* cache, kvmosaic_error* error, F f) {
    return guarded(error, [&]() -> Status {
        if (!cache) return bad("cache: it is null");
        close_step(cache);
        return f();
    });
}

Status check_list(const int32_t* list, int64_t count, const char* name) {
    if (count >= 0 && (list || count == 0)) return {};
    return bad(std::string(name) + ": they are null, or count = " + std::to_string(count) + " is negative");
}

template <typename T>
int64_t copy_out(const T& from, int32_t* to, int64_t room) {
    const auto n = int64_t(from.size());
    if (to && room > 0) std::copy_n(from.begin(), std::min(n, room), to);
    return n;
}

} // namespace

extern "C" {

int64_t kvmosaic_row_count(const kvmosaic_cache* cache, int32_t sequence) {
    return cache ? cache->cache->rows(sequence) : 0;
}

int64_t kvmosaic_positions(const kvmosaic_cache* cache, int32_t sequence, int32_t* positions, int64_t room) {
    return cache ? copy_out(cache->cache->positions(sequence), positions, room) : 0;
}

int64_t kvmosaic_sequences(const kvmosaic_cache* cache, int32_t* sequences, int64_t room) {
    if (!cache) return 0;
    int64_t count = 0;
    guarded(nullptr, [&] { return count = copy_out(cache->cache->sequences(), sequences, room), Status(); });
    return count;
}

int32_t kvmosaic_fork(kvmosaic_cache* cache, int32_t from, int32_t to, kvmosaic_error* error) {
    return between_steps(cache, error, [&] { return cache->cache->fork(from, to); });
}

int32_t kvmosaic_truncate(kvmosaic_cache* cache, int32_t sequence, int64_t rows, kvmosaic_error* error) {
    return between_steps(cache, error, [&] { return cache->cache->truncate(sequence, rows); });
}

void kvmosaic_remove(kvmosaic_cache* cache, int32_t sequence) {
    if (!cache) return;
    close_step(cache);
    cache->cache->remove(sequence);
}

void kvmosaic_clear(kvmosaic_cache* cache) {
    if (!cache) return;
    close_step(cache);
    guarded(nullptr, [&] { return cache->cache->clear(), Status(); });
}

int32_t kvmosaic_remove_rows(kvmosaic_cache* cache, int32_t sequence, int64_t first, int64_t last,
                             kvmosaic_error* error) {
    return between_steps(cache, error, [&] { return cache->cache->remove_rows(sequence, first, last); });
}

int32_t kvmosaic_reposition(kvmosaic_cache* cache, int32_t sequence, int64_t first, const int32_t* positions,
                            int64_t count, kvmosaic_error* error) {
    return between_steps(cache, error, [&]() -> Status {
        if (Status st = check_list(positions, count, "positions"); !st) return st;
        return cache->cache->reposition(sequence, first, {positions, size_t(count)});
    });
}

int32_t kvmosaic_adopt(kvmosaic_cache* cache, int32_t to, kvmosaic_cache* from, int32_t sequence,
                       kvmosaic_error* error) {
    return between_steps(cache, error, [&]() -> Status {
        if (!from) return bad("from: it is null");
        close_step(from);
        return cache->cache->adopt(to, *from->cache, sequence);
    });
}

int64_t kvmosaic_compact(kvmosaic_cache* cache) {
    int64_t bytes = 0;
    between_steps(cache, nullptr, [&] { return bytes = cache->cache->compact(), Status(); });
    return bytes;
}

int32_t kvmosaic_keep_prefix(kvmosaic_cache* cache, int32_t sequence, const int32_t* tokens, int64_t count,
                             kvmosaic_error* error) {
    return between_steps(cache, error, [&]() -> Status {
        if (Status st = check_list(tokens, count, "tokens"); !st) return st;
        return cache->cache->keep_prefix(sequence, {tokens, size_t(count)});
    });
}

int32_t kvmosaic_take_prefix(kvmosaic_cache* cache, int32_t sequence, const int32_t* tokens, int64_t count,
                             int64_t* rows, kvmosaic_error* error) {
    return between_steps(cache, error, [&]() -> Status {
        if (!rows) return bad("rows: it is null");
        *rows = 0;
        if (Status st = check_list(tokens, count, "tokens"); !st) return st;
        *rows = cache->cache->take_prefix(sequence, {tokens, size_t(count)});
        return {};
    });
}

int64_t kvmosaic_drop_prefixes(kvmosaic_cache* cache) {
    int64_t dropped = 0;
    between_steps(cache, nullptr, [&] { return dropped = cache->cache->drop_prefixes(), Status(); });
    return dropped;
}

int32_t kvmosaic_decode(kvmosaic_cache* cache, int32_t sequence, int32_t layer, int32_t kv_head, int32_t side,
                        int64_t first, int64_t count, float* out, kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!cache) return bad("cache: it is null");
        if (!out) return bad("out: it is null");
        const auto& layers = cache->cache->shape().layers;
        if (layer < 0 || size_t(layer) >= layers.size() || kv_head < 0 || kv_head >= layers[size_t(layer)].kv_heads)
            return bad("layer " + std::to_string(layer) + ", KV head " + std::to_string(kv_head) + ": there is none");
        if (side != 0 && side != 1) return bad("side: " + std::to_string(side) + " is neither 0 (keys) nor 1 (values)");
        const int64_t rows = cache->cache->rows(sequence);
        if (first < 0 || count < 0 || first > rows || count > rows - first)
            return bad("rows " + std::to_string(first) + " to " + std::to_string(first + count) + ": sequence " +
                       std::to_string(sequence) + " has " + std::to_string(rows));
        close_step(cache);
        cache->cache->decode(sequence, layer, kv_head, Side(side), first, count, out);
        return {};
    });
}

int32_t kvmosaic_get_footprint(kvmosaic_cache* cache, kvmosaic_footprint* footprint, kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!cache || !footprint) return bad("cache or footprint: it is null");
        kvmosaic_footprint f{};
        if (Status st = capi::take_struct(footprint, "footprint", &f); !st) return st;
        const Footprint now = cache->cache->footprint();
        f.tokens = now.tokens;
        for (int side = 0; side < 2; ++side) {
            f.values[side] = now.values[side];
            f.packed[side] = now.packed[side];
            f.raw[side] = now.raw[side];
        }
        f.tables = now.tables;
        f.statistics = now.statistics;
        f.reserved = now.reserved;
        f.scratch = now.scratch;
        f.cache_bytes = now.cache_bytes();
        f.true_bits = now.true_bits();
        std::memcpy(static_cast<void*>(footprint), &f, std::min(footprint->size, sizeof(f)));
        return {};
    });
}

} // extern "C"
