// From the basis in which a page is packed back to rows of the model: undo the transform, turn keys forward, put pinned
// rows in their places. Plain pages pass through untouched.
#pragma once

#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "kvmosaic/method.h"

namespace kvmosaic {

struct Scratch;
struct Page;
struct SideState;
class MeanTable;

// Cosines and sines of the first kPageTokens positions of one rotary embedding. A position is turned by the product of
// the rotations of its page's first position and of the difference, so that no table grows with the context.
struct TurnTable {
    explicit TurnTable(const Rope& r);
    const Rope& rope() const { return embedding; }
    Rope embedding;
    int32_t pairs = 0;
    std::vector<double> angles;       // [pairs] a position
    std::vector<double> cosine, sine; // [kPageTokens][pairs]
    // Turns n rows by the positions (sign +1) or back (sign -1); base: the position of the page's first row.
    void turn(float* rows, int32_t n, int64_t stride, const int32_t* positions, int32_t base, int sign) const;
};

struct Basis {
    const SidePlan* plan = nullptr;
    const TurnTable* turn = nullptr;    // null: keys are packed as they are attended
    const MeanTable* mean = nullptr;    // null: keys are not centred
    const int32_t* positions = nullptr; // of the page's rows
    int32_t base = 0;                   // position of the page's first row
    int32_t head = 0;                   // among the joined ones
    const uint8_t* pins = nullptr;      // raw rows of plan->pinned, or null
    RawType pin_type = RawType::f16;
    const SideState* group = nullptr; // of the first joined head; the others lie two apart
    int64_t slot = 0;                 // of the page in each of them
    const Page& page(int32_t joined_head) const;
};

// Decodes rows first .. first + n - 1 of the page to rows of the model. out: [n][stride], dim values a row.
void restore_rows(const kernels::Table& table, const Basis& basis, int32_t first, int32_t n, int32_t dim, float* out,
                  int64_t stride, Scratch& scratch);

} // namespace kvmosaic
