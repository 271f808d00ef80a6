// Where pages of the rules in_planes() keep their bits; a part of layout().
#pragma once

#include "kvmosaic/store.h"

namespace kvmosaic {

// page: sizes of the matrix and of the map are set.
PageLayout planes_layout(const StoreSpec& spec, Side side, const Ladder& ladder, PageLayout page);

} // namespace kvmosaic
