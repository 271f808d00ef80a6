// How sure a share of hits is, alone and beside another on the same items.
#pragma once

#include <cstdint>

namespace kvmosaic::eval {

struct Interval {
    double low = 0, high = 0;
};
// Wilson's 95 % interval of a share; 0 to 1 for no trials.
Interval wilson(int64_t hits, int64_t trials);

// McNemar's exact test, two-sided: how likely is a split as uneven as `a` against `b` among the items on which two
// judgements differ, if neither is better? 1 where none differs.
double mcnemar(int64_t a, int64_t b);

} // namespace kvmosaic::eval
