// How calls from C become calls of the library: arguments are checked, exceptions and Status become codes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "kvmosaic.h"
#include "kvmosaic/file.h"

struct kvmosaic_cache {
    std::unique_ptr<kvmosaic::Cache> cache;
    bool open = false;                                  // a step
    std::unique_ptr<std::atomic<int32_t>[]> written {}; // [L] parts of the layer that have been written in this step
};

struct kvmosaic_contents {
    std::vector<kvmosaic::FileSequence> found;
};

namespace kvmosaic::capi {

inline int32_t report(kvmosaic_error* error, int32_t code, const char* message) {
    if (error) {
        error->code = code;
        std::snprintf(error->message, sizeof(error->message), "%s", message);
    }
    return code;
}

// StatusCode in the order of the codes of kvmosaic.h, which never changes.
inline int32_t code_of(StatusCode code) {
    switch (code) {
    case StatusCode::ok:
        return KVMOSAIC_OK;
    case StatusCode::invalid_argument:
        return KVMOSAIC_INVALID_ARGUMENT;
    case StatusCode::not_found:
        return KVMOSAIC_NOT_FOUND;
    case StatusCode::out_of_capacity:
        return KVMOSAIC_OUT_OF_CAPACITY;
    case StatusCode::out_of_memory:
        return KVMOSAIC_OUT_OF_MEMORY;
    case StatusCode::unsupported:
        return KVMOSAIC_UNSUPPORTED;
    case StatusCode::corrupt:
        return KVMOSAIC_CORRUPT;
    }
    return KVMOSAIC_INTERNAL;
}

inline Status bad(std::string sentence) { return {StatusCode::invalid_argument, std::move(sentence)}; }

inline void close_step(kvmosaic_cache* cache) {
    cache->cache->end_step();
    cache->open = false;
}

// f() returns a Status.
template <typename F>
int32_t guarded(kvmosaic_error* error, F f) {
    try {
        const Status st = f();
        return report(error, code_of(st.code()), st.message().c_str());
    } catch (const std::bad_alloc&) {
        return report(error, KVMOSAIC_OUT_OF_MEMORY, "no memory");
    } catch (const std::exception& e) {
        return report(error, KVMOSAIC_INTERNAL, e.what());
    } catch (...) {
        return report(error, KVMOSAIC_INTERNAL, "an unknown error");
    }
}

// What the caller's structure holds, which may be an older and shorter one; the rest keeps its defaults.
template <typename T>
Status take_struct(const T* given, const char* name, T* into) {
    if (!given) return {};
    if (given->size < sizeof(size_t) || given->size > 4096)
        return bad(std::string(name) + ": its size field must be sizeof(kvmosaic_" + name + ")");
    std::memcpy(static_cast<void*>(into), given, std::min(given->size, sizeof(T)));
    return {};
}

} // namespace kvmosaic::capi
