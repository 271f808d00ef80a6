// A context on a method that no spec names.
#pragma once

#include <functional>
#include <memory>

#include "kvmosaic/method.h"

namespace kvmosaic {

// Makes a method of one's own (Cache::create), once for each cache that a context tries.
using MethodMaker = std::function<Result<std::unique_ptr<Method>>()>;

} // namespace kvmosaic
