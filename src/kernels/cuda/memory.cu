#include "kernels/cuda/memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

namespace kvmosaic::device {
namespace {

Status failed(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return {};
    cudaGetLastError();
    return {error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::unsupported,
            std::string(what) + ": " + cudaGetErrorString(error)};
}

class DeviceMemory : public Memory {
public:
    Result<void*> allocate(size_t bytes) override {
        void* at = nullptr;
        if (Status bad = failed("memory of the GPU", cudaMalloc(&at, std::max<size_t>(bytes, 1))); !bad) return bad;
        if (Status bad = failed("memory of the GPU", cudaMemset(at, 0, bytes)); !bad) {
            cudaFree(at);
            return bad;
        }
        return at;
    }
    void free(void* at) override { cudaFree(at); }
    Status copy_in(void* to, const void* from, size_t bytes) override {
        return transfer("copy to the GPU", to, from, bytes, cudaMemcpyHostToDevice);
    }
    Status copy_out(void* to, const void* from, size_t bytes) override {
        return transfer("copy from the GPU", to, from, bytes, cudaMemcpyDeviceToHost);
    }
    // Pieces no longer than the distance do not overlap.
    Status copy(void* to, const void* from, size_t bytes) override {
        const auto* source = static_cast<const uint8_t*>(from);
        auto* target = static_cast<uint8_t*>(to);
        const size_t distance = size_t(source - target);
        for (size_t done = 0; done < bytes;) {
            const size_t n = std::min(bytes - done, distance);
            if (Status bad = transfer("copy on the GPU", target + done, source + done, n, cudaMemcpyDeviceToDevice);
                !bad)
                return bad;
            done += n;
        }
        return {};
    }

private:
    static Status transfer(const char* what, void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
        if (bytes == 0) return {};
        if (Status bad = failed(what, cudaDeviceSynchronize()); !bad) return bad;
        return failed(what, cudaMemcpy(to, from, bytes, kind));
    }
};

} // namespace

Memory* device_memory() {
    static DeviceMemory memory;
    return &memory;
}

} // namespace kvmosaic::device
