// Raw rows on their way to the encoders: a block packs one page while the rows of its next ones fly.
//
// Bound: bytes. A multiprocessor needs about 30 KiB in flight for the card's bandwidth; a block that loads, packs and
// ends has nothing in flight for most of its life, so blocks stay and walk over the pages.
#pragma once

#include "kernels/cuda/encode.h"
#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {

// Sixteen bytes global -> shared, in groups that complete in order.
__device__ __forceinline__ void fetch16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most PENDING of this thread's groups are on their way.
template <int PENDING>
__device__ __forceinline__ void wait_fetches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Rows in shared memory, from a lane's own first element on. Rows lie kPitch apart at slots whose order makes the eight
// bytes that each lane of half a warp reads fall into different banks: keys are read at rows 4 (g / 2) + g % 2, values
// at rows 4 t, for lanes 4 g + t.
template <int D, bool KEYS>
struct StagedRows {
    static constexpr int kPitch = 2 * D + 32;
    const uint8_t* at;
    // Of sums of rows that have no bit in common: the sum of the slots.
    static __host__ __device__ constexpr int slot(int row) {
        return KEYS ? (row & ~6) | (row & 2) << 1 | (row & 4) >> 1 : (row & ~15) | (row & 3) << 2 | (row & 12) >> 2;
    }
    __device__ __forceinline__ StagedRows from(int row, int channel) const {
        return {at + slot(row) * kPitch + 2 * channel};
    }
    __device__ __forceinline__ uint2 get(int row, int channel) const {
        return *reinterpret_cast<const uint2*>(at + slot(row) * kPitch + 2 * channel);
    }
    __device__ __forceinline__ uint32_t pair(int row, int channel) const {
        return *reinterpret_cast<const uint32_t*>(at + slot(row) * kPitch + 2 * channel);
    }
    __device__ __forceinline__ uint32_t one(int row, int channel) const {
        return *reinterpret_cast<const uint16_t*>(at + slot(row) * kPitch + 2 * channel);
    }
};
// The same where they lie.
struct GlobalRows {
    const uint16_t* at;
    int64_t stride;
    __device__ __forceinline__ GlobalRows from(int row, int channel) const {
        return {at + row * stride + channel, stride};
    }
    __device__ __forceinline__ uint2 get(int row, int channel) const {
        return __ldcs(reinterpret_cast<const uint2*>(at + row * stride + channel));
    }
};

template <int D, bool KEYS>
struct RowRing {
    using Rows = StagedRows<D, KEYS>;
    static constexpr int kThreads = KEYS ? D : 128, kPage = 128 * Rows::kPitch;
    static constexpr int kStages = D == 256 ? 3 : 2, kBytes = kStages * kPage;
    static constexpr int kBlocks = 227 * 1024 / (kBytes + 3328);    // of a multiprocessor
    static constexpr int kParts = D / 8, kStep = kThreads / kParts; // 16 bytes each; rows of a pass

    __device__ static void fetch(uint8_t* to, const uint16_t* rows, int64_t stride) {
        const int row = threadIdx.x / kParts, part = threadIdx.x % kParts;
        const uint16_t* from = rows + row * stride + part * 8;
        const uint32_t place = shared_address(to) + uint32_t(Rows::slot(row) * Rows::kPitch + part * 16);
#pragma unroll
        for (int i = 0; i < 128 / kStep; ++i)
            fetch16(place + uint32_t(Rows::slot(i * kStep) * Rows::kPitch), from + i * kStep * stride);
    }

    // Calls pack(rows, job) for each page of this block, all threads at once. `memory`: kBytes.
    template <class Pack>
    __device__ static void walk(const EncodeParams& p, uint8_t* memory, Pack pack) {
        static_assert(kThreads % kParts == 0 && (kStep & (kStep - 1)) == 0, "slots add up");
        const auto* rows = static_cast<const uint16_t*>(p.rows);
        const auto fetch_page = [&](int stage, int page, int64_t row) {
            if (page < p.count) fetch(memory + stage * kPage, rows + row, p.row_stride);
            end_fetches();
        };
        const auto row_of = [&](int page) { return page < p.count ? p.jobs[page].row : 0; };
        const int by = int(gridDim.x);
        int page = int(blockIdx.x);
        for (int k = 0; k + 1 < kStages; ++k)
            fetch_page(k, page + k * by, row_of(page + k * by));
        int64_t ahead = row_of(page + (kStages - 1) * by);
        for (int stage = 0; page < p.count; page += by) {
            fetch_page((stage + kStages - 1) % kStages, page + (kStages - 1) * by, ahead);
            ahead = row_of(page + kStages * by);
            const EncodeJob job = p.jobs[page];
            wait_fetches<kStages - 1>();
            __syncthreads();
            pack(Rows{memory + stage * kPage}, job);
            __syncthreads();
            stage = (stage + 1) % kStages;
        }
    }

    template <class Kernel, class... Args>
    static cudaError_t launch(Kernel kernel, const EncodeParams& p, cudaStream_t stream, const Args&... args) {
        int device = 0, multiprocessors = 0;
        cudaError_t error = cudaGetDevice(&device);
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
        if (error != cudaSuccess) return error;
        const int blocks = kBlocks * multiprocessors;
        kernel<<<unsigned(p.count < blocks ? p.count : blocks), kThreads, kBytes, stream>>>(p, args...);
        return cudaGetLastError();
    }
};

} // namespace kvmosaic::cuda
