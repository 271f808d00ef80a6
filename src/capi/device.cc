// Copies of sequences on a GPU.
#include "capi/capi.h"
#include "kvmosaic/device_cache.h"

using namespace kvmosaic;
using capi::bad;
using capi::guarded;

struct kvmosaic_device {
    std::unique_ptr<device::DeviceCache> cache;
};

extern "C" {

int32_t kvmosaic_device_create(const kvmosaic_cache* like, int32_t slots, int64_t max_rows, double bits,
                               kvmosaic_device** device, kvmosaic_error* error) {
    if (device) *device = nullptr;
    return guarded(error, [&]() -> Status {
        if (!like) return bad("like: it is null");
        if (!device) return bad("device: it is null");
        auto made = device::DeviceCache::create(like->cache->shape(), like->cache->method().spec(),
                                                {.slots = slots, .max_rows = max_rows, .expected_bits = bits});
        if (!made) return made.status();
        *device = new kvmosaic_device{std::move(*made)};
        return {};
    });
}

void kvmosaic_device_destroy(kvmosaic_device* device) { delete device; }

int32_t kvmosaic_to_device(kvmosaic_device* device, int32_t slot, kvmosaic_cache* cache, int32_t sequence,
                           kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!device || !cache) return bad(std::string(device ? "cache" : "device") + ": it is null");
        capi::close_step(cache);
        return device->cache->upload(slot, *cache->cache, sequence);
    });
}

int32_t kvmosaic_from_device(const kvmosaic_device* device, int32_t slot, kvmosaic_cache* cache, int32_t sequence,
                             kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!device || !cache) return bad(std::string(device ? "cache" : "device") + ": it is null");
        capi::close_step(cache);
        return device->cache->download(slot, cache->cache.get(), sequence);
    });
}

int64_t kvmosaic_device_bytes(const kvmosaic_device* device) { return device ? device->cache->bytes() : 0; }

} // extern "C"
