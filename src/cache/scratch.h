// Working memory of one thread: grows to the largest tile once and is then reused. Bounded by the tile sizes, never
// by the context.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "kvmosaic/method.h"

namespace kvmosaic {

struct Scratch {
    enum Buffer { rows, query, tile, scores, raw_scores, partial, total, basis, joined, folded, mixed, mean, buffers };

    float* floats(Buffer which, size_t n) {
        auto& b = memory[which];
        if (b.size() < n) b.resize(n);
        return b.data();
    }
    // Ranges [0, n) for `count` rows: lower ends, then upper ends.
    int32_t* bounds(int32_t count, int32_t n) {
        whole.assign(size_t(count), 0);
        whole.resize(size_t(count) * 2, n);
        return whole.data();
    }
    // What kernels::Table::weigh works in, aligned to 64.
    uint8_t* codes_work() {
        if (codes.empty()) codes.resize(kernels::kCodesWorkBytes + 64);
        return codes.data() + (64 - reinterpret_cast<uintptr_t>(codes.data()) % 64) % 64;
    }
    size_t bytes() const {
        size_t n = codes.capacity();
        for (const auto& b : memory)
            n += b.capacity() * sizeof(float);
        return n;
    }

    // What a query row sees, in rows of its sequence; packed boundaries in rows beyond the front.
    struct Seen {
        int64_t lo = 0, hi = 0, k_packed = 0, v_packed = 0;
    };

    std::array<std::vector<float>, buffers> memory;
    std::vector<uint8_t> codes;
    std::vector<int32_t> ranges, whole;
    std::vector<Seen> seen;
    std::vector<kernels::RowState> states;
    SidePlan plan;
};

Scratch& thread_scratch();

} // namespace kvmosaic
