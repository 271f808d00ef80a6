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

// Of a key page in planes, in either order of codes: what lies behind the CPU's bytes (DevicePage::ladder_offset). May
// be no ladder at all where the bytes are broken.
Ladder ladder_of_planes(const uint8_t* counts);

} // namespace kvmosaic::cuda
