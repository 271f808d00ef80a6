// A page's layout is plain data: computed on the host, copied to a kernel by value, read there. Needs no GPU to build;
// without one the program checks the host part only and says so.
#include <cstdio>

#include "kvmosaic/cache.h"

__global__ void read_layout(kvmosaic::PageLayout page, unsigned* out) {
    out[0] = page.bytes;
    out[1] = page.scale_offset;
    out[2] = page.lane_blocks; // page.tiers is a std::array: device code needs --expt-relaxed-constexpr to index it
}

int main() {
    kvmosaic::StoreSpec store;
    store.kind = kvmosaic::StoreKind::grid;
    store.bits = 2;
    const kvmosaic::PageLayout page = kvmosaic::layout(store, kvmosaic::Side::key, 128);
    // 2 bits and, per 32 tokens and channel, a 16-bit scale and offset: 3 true bits.
    if (page.bytes != 128u * 128u * 3u / 8u || page.tiers[0].bits != 2) {
        std::fprintf(stderr, "layout of a 2-bit page: %u bytes\n", page.bytes);
        return 1;
    }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("host part passed; no CUDA device here, the device part was skipped\n");
        return 0;
    }
    unsigned* seen = nullptr;
    if (cudaMallocManaged(&seen, 3 * sizeof(unsigned)) != cudaSuccess) return 1;
    read_layout<<<1, 1>>>(page, seen);
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
        std::fprintf(stderr, "kernel: %s\n", cudaGetErrorString(status));
        return 1;
    }
    if (seen[0] != page.bytes || seen[1] != page.scale_offset || seen[2] != page.lane_blocks) {
        std::fprintf(stderr, "the device read %u, %u, %u\n", seen[0], seen[1], seen[2]);
        return 1;
    }
    cudaFree(seen);
    std::printf("host and device part passed\n");
    return 0;
}
