// What the host side of the GPU backend shares.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kvmosaic/device.h"

namespace kvmosaic::device {

inline Status bad(const std::string& what) { return Status(StatusCode::invalid_argument, what); }
inline Status failed(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return Status();
    const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory
                            : error == cudaErrorNotSupported   ? StatusCode::unsupported
                                                               : StatusCode::invalid_argument;
    return Status(code, std::string(what) + ": " + cudaGetErrorString(error));
}
inline cudaStream_t stream_of(Stream s) { return static_cast<cudaStream_t>(s); }

// Of tiered pages whose own ladders the pages tell: one that their store takes.
inline Ladder any_ladder(const std::vector<uint8_t>& widths, int32_t dim) {
    return widths.empty() ? Ladder{} : Ladder::uniform(widths.back(), uint16_t(dim));
}

// A store that exists, and that kernels of this backend can be for.
inline Status served(const StoreSpec& spec, Side side, int32_t dim) {
    if (Status s = validate(spec, side, dim); !s) return s;
    if (in_planes(spec.rule))
        return Status(StatusCode::unsupported,
                      std::string(name_of(side)) +
                          " side: pages in planes are encoded by encode_planes, and restored on the CPU");
    return Status();
}

} // namespace kvmosaic::device
