// Skips, visibly, where no GPU can run the kernels of this build.
#pragma once

#include <gtest/gtest.h>

#include "bench/cuda/support.cuh"
#include "kvmosaic/device.h"

#define KVMOSAIC_NEEDS_GPU()                                                                                           \
    do {                                                                                                               \
        const auto found_ = kvmosaic::device::devices();                                                               \
        if (found_.empty() || !found_[0].runs) GTEST_SKIP() << "no GPU that runs these kernels";                       \
    } while (0)
