// A method in one layer of a model, with an f16 cache in all others: how much of the loss is that layer's?
#pragma once

#include <memory>
#include <string>

#include "kvmosaic/method.h"

namespace kvmosaic::eval {

Result<std::unique_ptr<Method>> only_layer(const std::string& spec, int32_t layer);

} // namespace kvmosaic::eval
