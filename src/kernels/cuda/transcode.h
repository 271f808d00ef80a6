// Pages from the CPU's byte order to the GPU's and back, exactly: every code, scale, offset, raw channel, outlier and
// map entry. Plain C++; needs no GPU.
#pragma once

#include <cstdint>

#include "kernels/cuda/order.h"

namespace kvmosaic::cuda {

// from: page.bytes bytes in CPU order. to: device_page(page).bytes bytes, all written; padding becomes 0.
void to_device_order(const PageLayout& page, const uint8_t* from, uint8_t* to);
// The reverse. Padding of the result is 0, as encoders leave it.
void to_host_order(const PageLayout& page, const uint8_t* from, uint8_t* to);

} // namespace kvmosaic::cuda
