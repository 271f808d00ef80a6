// FNV-1a, 64 bits (Fowler, Noll, Vo): for telling files and states apart, not for security.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmosaic {

inline constexpr uint64_t kFnvStart = 0xcbf29ce484222325u;

// Hash of what `hash` stands for followed by n bytes.
inline uint64_t fnv1a(const void* bytes, size_t n, uint64_t hash = kFnvStart) {
    const auto* b = static_cast<const uint8_t*>(bytes);
    for (size_t i = 0; i < n; ++i)
        hash = (hash ^ b[i]) * 0x100000001b3u;
    return hash;
}

} // namespace kvmosaic
