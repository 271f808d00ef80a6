// Launch of the page encoders of one row type and head size; each pair is compiled in a file of its own.
#pragma once

#include "kernels/cuda/encode_page.cuh"

namespace kvmosaic::cuda {

template <class T, int D, bool KEYS, int BITS, int NG>
__global__ void __launch_bounds__((RowRing<D, KEYS>::kThreads), (RowRing<D, KEYS>::kBlocks))
    encode_pages(const EncodeParams p, uint32_t scales, uint32_t zeros) {
    extern __shared__ __align__(128) uint8_t memory[];
    using Ring = RowRing<D, KEYS>;
    wait_for_previous_kernel();
    Ring::walk(p, memory, [&](const typename Ring::Rows& rows, const EncodeJob& job) {
        uint8_t* page = p.pool + int64_t(job.unit) * kUnit;
        if constexpr (KEYS)
            encode_key_page<T, D, BITS, NG>(rows, page, scales, zeros);
        else
            encode_value_page<T, D, BITS, NG>(rows, page, scales, zeros);
    });
}

template <class T, int D, int BITS>
cudaError_t launch_encode_width(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    const auto launch = [&](auto keys, auto groups) {
        constexpr bool kKeys = decltype(keys)::value != 0;
        constexpr int kGroups = decltype(groups)::value;
        return RowRing<D, kKeys>::launch(encode_pages<T, D, kKeys, BITS, kGroups>, p, stream, page.scale_offset,
                                         page.zero_offset);
    };
    const auto grouped = [&](auto keys) {
        if (page.groups == 1) return launch(keys, Dim<1>());
        if (page.groups == 2) return launch(keys, Dim<2>());
        if constexpr (decltype(keys)::value != 0 || D >= 128)
            return launch(keys, Dim<4>());
        else
            return cudaErrorNotSupported;
    };
    return page.side == Side::key ? grouped(Dim<1>()) : grouped(Dim<0>());
}

template <class T, int D>
cudaError_t launch_encode_dim(const DevicePage& page, const EncodeParams& p, cudaStream_t stream) {
    switch (page.tiers[0].bits) {
    case 2:
        return launch_encode_width<T, D, 2>(page, p, stream);
#ifndef KVMOSAIC_CUDA_SMOKE
    case 1:
        return launch_encode_width<T, D, 1>(page, p, stream);
    case 3:
        return launch_encode_width<T, D, 3>(page, p, stream);
    case 4:
        return launch_encode_width<T, D, 4>(page, p, stream);
    case 6:
        return launch_encode_width<T, D, 6>(page, p, stream);
    case 8:
        return launch_encode_width<T, D, 8>(page, p, stream);
#endif
    default:
        return cudaErrorNotSupported;
    }
}

} // namespace kvmosaic::cuda
