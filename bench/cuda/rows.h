// Rows of results and their JSON: the schema of `bench` on every device (docs/json.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvmosaic::cuda::bench {

struct Row {
    std::string spec, baseline; // baseline: what a row of another program stands for, empty for our own
    std::string kernel;
    int heads = 0, kv_heads = 0, head_dim = 0, batch = 0, context = 0, query_rows = 0; // 0: does not apply
    int threads = 0;                                                                   // of the host, likewise
    double median_us = 0, min_us = 0;
    int64_t bytes = 0;
    double error = -1; // relative L2 against double precision; below 0: not taken
    std::string note;
};

void print(const Row& row);
extern std::vector<Row> rows; // of this run
struct Options {
    std::string filter; // of `spec`
    bool quick = false; // fewer repetitions and shapes
};
void attend_bench(const Options& options);
void encode_bench(const Options& options);
void move_bench(const Options& options);

} // namespace kvmosaic::cuda::bench
