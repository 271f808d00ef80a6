// The part of include/kvmosaic/device.h that needs no GPU.
#include "kernels/cuda/attend.h"
#include "kernels/cuda/order.h"
#include "kvmosaic/device.h"
#include "kvmosaic/numeric.h"

namespace kvmosaic::cuda {

BookTable book_table(const StoreSpec& spec) {
    BookTable table;
    if (spec.kind != StoreKind::codebook) return table;
    for (int i = 0; i < 1 << spec.bits; ++i) {
        const uint32_t level = f32_to_f16_sat(spec.book[i]), shift = uint32_t(8 * (i % 4));
        table.low[i / 4] |= (level & 255u) << shift, table.high[i / 4] |= (level >> 8) << shift;
    }
    return table;
}

void set_tier_first(const Ladder& ladder, const std::vector<uint8_t>& widths, uint32_t (&first)[4]) {
    for (size_t w = 0; w < widths.size() && w < 4; ++w) {
        uint32_t channel = 0;
        for (int t = 0; t < ladder.count; channel += ladder.tiers[size_t(t)].channels, ++t)
            if (ladder.tiers[size_t(t)].bits == widths[w]) first[w] = channel;
    }
}

} // namespace kvmosaic::cuda

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
