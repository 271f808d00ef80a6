// The caches that states are fuzzed against, the same for the target and for the maker of its first corpus.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"
#include "unit/methods_calibration.h"

namespace kvmosaic::fuzz {

struct Subject {
    std::string spec;
    std::unique_ptr<Cache> cache;
};

inline ModelShape shape() {
    ModelShape s;
    Rope rope;
    rope.known = rope.halves = true;
    rope.rotary = 16;
    s.layers = {{2, 1, 16, 16, rope}};
    return s;
}

// A method of every store, rule, window and decision.
inline std::vector<Subject> subjects() {
    std::vector<Subject> made;
    CacheOptions options;
    options.max_rows = 4096;
    options.max_bytes = int64_t(64) << 20;
    options.reference = true; // plain kernels, which sanitizers look into
    for (const char* spec : {"f16", "f32", "bf16", "kivi:bits=2,group=32", "kivi:bits=3,group=32,residual=32,front=4",
                             "mixkvq", "kitty", "pnmix", "innerq", "innerq:variant=hybrid,asym=4level",
                             "innerq:variant=small", "turboquant:skip=0", "q8_0", "q4_0:hadamard=1,front=4",
                             "rotatekv:bits=3,pins=3", "kvquant:outliers=0.05", "skvq:v=1.5", "kvtuner", "mosaic"}) {
        auto cache = Cache::create(shape(), calibrations::with_file(spec, shape()), options);
        if (!cache) {
            std::fprintf(stderr, "%s: %s\n", spec, cache.status().message().c_str());
            std::abort();
        }
        made.push_back({spec, std::move(*cache)});
    }
    return made;
}

} // namespace kvmosaic::fuzz
