// A llama_context whose KV cache is kvmosaic's. The only header of this folder that others include.
#pragma once

#include <string>

#include "kvmosaic/cache.h"
#include "llama.h"
#include "llama/context_memory.h"
#include "llama/maker.h"
#include "llama/probe.h"

namespace kvmosaic {

// How a context's cache is made. `cache.max_rows` = 0 takes the context's own limit per sequence.
struct AdapterOptions {
    std::string spec = "f16";
    MethodMaker method; // in place of `spec` where it is set
    CacheOptions cache;
    Probe probe;
};

// llama_init_from_model on our cache; free it with llama_free. When there is no context, the status says why: a spec
// or option out of range, or what of this model the cache cannot serve. Not meant to run while another thread changes
// llama.cpp's log callback.
Result<llama_context*> make_context(llama_model* model, llama_context_params params, const AdapterOptions& options);

// The cache of a context, or null when the context runs on llama.cpp's own. Valid as long as the context, and only to
// be used between calls of llama_decode. Ends the step under way, so that what it tells is final.
Cache* cache_of(llama_context* context);

// Sizes of every layer as the cache will see them, and the fingerprint, before any context exists. Rotations depend on
// the context: its cache's shape has them.
ModelShape shape_of(const llama_model* model);

ContextMemory memory_beside_cache(const llama_context* context);

// Rotation of a layer's keys as the graph states it; null when the context is not on our cache or there is no such
// layer, `known` = false when the keys are not the direct result of a plain rotation.
const Rope* rope_of(llama_context* context, int32_t layer);

// With KVMOSAIC_CHECK_ROPE=1 in the environment at creation: the largest difference so far between a key of the graph
// and the un-rotated key turned by our own Rope; -1 when the check is off.
float rope_gap(llama_context* context);

} // namespace kvmosaic
