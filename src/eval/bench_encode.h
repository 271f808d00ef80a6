// What packing a page costs: the write of 128 rows of one KV head, against the attention of the 128 steps that bring
// them.
#pragma once

#include <string>
#include <vector>

#include "eval/bench.h"

namespace kvmosaic::eval {

struct EncodeRow {
    std::string spec, side, device, isa; // side: "key", "value", or "both" together
    int64_t bytes = 0;                   // of the page, or of both
    int64_t values = 0;                  // that it stands for
    std::vector<double> us;              // each page
    double median_us = 0, min_us = 0;
    double attend_us = 0; // 128 steps' attention of the KV head's query heads, one thread
    double ns_per_value() const { return median_us * 1e3 / double(values); }
    double share() const { return median_us / attend_us; }
};

struct EncodeReport {
    BenchShape shape; // as asked for; what runs is one KV head on one thread
    std::vector<EncodeRow> rows;
};

// rounds = 0: about two seconds a row. Sides that a method leaves raw have no row of their own.
Result<EncodeReport> bench_encode(const BenchShape& shape, const std::vector<std::string>& specs, int32_t rounds,
                                  const Progress& progress);

std::string to_table(const EncodeReport& report);
nlohmann::ordered_json to_json(const EncodeReport& report);

} // namespace kvmosaic::eval
