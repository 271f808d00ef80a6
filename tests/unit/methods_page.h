// A page of a method's plan made and read back by the reference kernels, in the plan's basis: for tests that ask what a
// method does to values. One KV head; joined heads are a matter of the cache.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kvmosaic/method.h"

namespace kvmosaic::pages {

inline std::unique_ptr<Method> open(const std::string& spec) {
    auto method = open_method(spec);
    EXPECT_TRUE(method.ok()) << spec << ": " << method.status().message();
    return std::move(*method);
}

// rows: [128][dim]; the same shape comes back.
inline std::vector<float> round_trip(const SidePlan& plan, Side side, int32_t dim, std::vector<float> rows) {
    EXPECT_EQ(plan.transform.joined, 1);
    const PageLayout page = layout(plan.store, side, dim, plan.ladder);
    std::vector<float> scratch(static_cast<size_t>(dim));
    for (int32_t t = 0; t < kPageTokens; ++t)
        plan.transform.forward(rows.data() + t * dim, dim, scratch.data());
    std::vector<uint8_t> bytes(page.bytes);
    const uint16_t* channels = page.map_bytes > 0 ? plan.channels.data() : nullptr;
    kernels::reference().encode(page, channels, rows.data(), 0, kPageTokens, bytes.data());
    kernels::reference().restore(page, bytes.data(), 0, kPageTokens, rows.data(), dim);
    for (int32_t t = 0; t < kPageTokens; ++t)
        plan.transform.inverse(rows.data() + t * dim, dim, scratch.data());
    return rows;
}

// All rows equal to one vector of `dim` values.
inline std::vector<float> repeated(const std::vector<float>& row) {
    std::vector<float> rows;
    for (int32_t t = 0; t < kPageTokens; ++t)
        rows.insert(rows.end(), row.begin(), row.end());
    return rows;
}

inline std::vector<float> repeated_in_channels(const std::vector<float>& column, int32_t dim) { // column: [128]
    std::vector<float> rows;
    for (const float x : column)
        rows.insert(rows.end(), size_t(dim), x);
    return rows;
}

} // namespace kvmosaic::pages
