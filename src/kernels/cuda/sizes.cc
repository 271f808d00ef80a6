// The part of include/kvmosaic/device.h that needs no GPU.
#include "kernels/cuda/order.h"
#include "kvmosaic/device.h"

namespace kvmosaic::device {

uint32_t page_bytes(const StoreSpec& spec, Side side, int32_t dim, const Ladder& ladder) {
    return cuda::device_page(layout(spec, side, dim, ladder)).bytes;
}

uint32_t ladder_code(const Ladder& ladder, const std::vector<uint8_t>& widths) {
    uint32_t code = 0;
    for (size_t w = 0; w < widths.size() && w < 4; ++w)
        for (int t = 0; t < ladder.count; ++t) {
            if (ladder.tiers[size_t(t)].bits != widths[w]) continue;
            const uint32_t granule = widths[w] == 16 ? 8 : uint32_t(cuda::device_granule(widths[w]));
            code |= (ladder.tiers[size_t(t)].channels + granule - 1) / granule << (8 * w);
        }
    return code;
}

} // namespace kvmosaic::device
