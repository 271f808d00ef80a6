// One row per kernel and table that this machine can run: --benchmark_filter=avx2/scores picks.
#include "bench_util.h"

int main(int argc, char** argv) {
    for (const kvmosaic::kernels::Table* table : kvmosaic::kernels::available()) {
        kvmosaic::bench::register_codecs(*table);
        kvmosaic::bench::register_attention(*table);
    }
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
