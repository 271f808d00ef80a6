// Timing of attention: what is measured, on which device, and how calls of all rows are interleaved.
//
// A device (bench_cpu.h) makes one subject a row; this part knows no device. Every row is timed call by call in turn
// with the others, so that a clock that wanders wanders for all, and is checked once against attention in double
// precision over the values it has stored.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "eval/files.h"
#include "kvmosaic/cache.h"
#include "kvmosaic/status.h"

namespace kvmosaic::eval {

struct BenchShape {
    int32_t heads = 32, kv_heads = 8, head_dim = 128; // H, G, D
    int32_t batch = 1;                                // sequences
    int32_t query_rows = 1;                           // new rows of a sequence in a step
    int64_t context = 32768;                          // rows that the last of them sees, itself included
    int32_t threads = 2;
    // Sets of K/V are rotated so that no call finds its own in the processor's caches: together at least so many bytes.
    int64_t working_set = 160'000'000;
    Accuracy accuracy = Accuracy::exact; // of fused pages
    int32_t group() const { return heads / kv_heads; }
    float scale() const;
};
// ok, or the option, its value and the allowed range.
Status validate(const BenchShape& shape);

// The shape of a model with as many equal layers.
ModelShape bench_model(const BenchShape& shape, int32_t layers);
// Sets of `bytes` each that make up the working set; two at least.
int32_t bench_sets(double bytes, const BenchShape& shape);

// Which tokens a row of a cache holds.
enum class Segment : uint8_t {
    packed,  // whole pages only: every window of the method taken away
    windows, // as the method has it: front and recent rows raw
    raw,     // the method packs nothing
};
const char* name_of(Segment segment);

struct BenchRow {
    std::string spec, baseline;                       // baseline: its name, for rows that are not ours
    std::string segment, device, isa, path, accuracy; // accuracy: of the fused path, else empty
    int64_t bytes = 0;                                // of K and V that a call reads, from their layouts
    double error = 0;                                 // relative L2 error over all heads
    std::vector<double> us;
    double median_us() const;
    double min_us() const;
    double bytes_per_second() const { return double(bytes) / median_us() * 1e6; }
};

class BenchSubject {
public:
    virtual ~BenchSubject() = default;
    virtual double call() = 0; // attends once, on the next set; microseconds
    // Against attention in double precision; after the last call.
    virtual double error() = 0;
    BenchRow row;
};

class BenchDevice {
public:
    virtual ~BenchDevice() = default;
    virtual Result<std::unique_ptr<BenchSubject>> cache(const std::string& spec, Segment segment) = 0;
    virtual Result<std::unique_ptr<BenchSubject>> baseline(const std::string& name) = 0;
    virtual double read_bandwidth() = 0; // bytes a second, best of some passes
};

// Segments that rows of this spec have: packed and windows, or raw.
Result<std::vector<Segment>> segments_of(const std::string& spec, const BenchShape& shape);

struct BenchReport {
    BenchShape shape;
    double read_bandwidth = 0;
    std::vector<BenchRow> rows; // baselines first
};
// rounds = 0: about two seconds a row, at least ten calls.
void time_in_turn(const std::vector<std::unique_ptr<BenchSubject>>& subjects, int32_t rounds, const Progress& progress);
Result<BenchReport> bench_attend(BenchDevice& device, const BenchShape& shape, const std::vector<std::string>& specs,
                                 const std::vector<std::string>& baselines, int32_t rounds, const Progress& progress);

std::string to_table(const BenchReport& report);
// The fields of `rows[]`; the caller adds the head.
nlohmann::ordered_json to_json(const BenchReport& report);

} // namespace kvmosaic::eval
