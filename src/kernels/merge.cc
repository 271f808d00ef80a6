#include <cmath>

#include "kernels/kernels.h"

namespace kvmosaic::kernels {

void merge(RowState* a, float* oa, const RowState& b, const float* ob, int32_t dim) {
    if (b.l == 0.0f) return; // empty: adds nothing, and (-inf) - (-inf) must not be formed
    if (a->l == 0.0f) {
        *a = b;
        for (int32_t d = 0; d < dim; ++d)
            oa[d] = ob[d];
        return;
    }
    const float m = a->m > b.m ? a->m : b.m;
    const float wa = std::exp(a->m - m), wb = std::exp(b.m - m);
    a->m = m;
    a->l = a->l * wa + b.l * wb;
    for (int32_t d = 0; d < dim; ++d)
        oa[d] = oa[d] * wa + ob[d] * wb;
}

} // namespace kvmosaic::kernels
