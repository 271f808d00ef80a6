// q8_0: the cache format of that name in llama.cpp (ggml, MIT): 8 bits and one f16 scale for 32 channels of a token.
//
// What differs from llama.cpp:
// - The levels are those of ggml's block_q8_0: s = max|x| / 127, codes -127 .. 127. Codes are made with the stored f16
//   scale and round half to even; ggml divides by the fp32 scale and rounds half away from zero. Both decode within
//   half a step; bytes may differ where a value lies at the border of two codes.
// - A page is in this project's own order, not in ggml's array of blocks; the bits are the same 8.5 a value.
// - llama.cpp needs head sizes that 32 divides. Here the last group of a token is shorter instead.
// - `hadamard=1` packs in a rotated basis, as llama.cpp can do with its caches; `front` and `keep` are additions.
#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& q8_0_method();

namespace {

class Q8 final : public Method {
public:
    explicit Q8(const OptionValues& values) : values_(values) {}
    const MethodInfo& info() const override { return q8_0_method().info; }

    SidePlan initial(Side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        plan.store = token_store(StoreKind::grid, GridRule::symmetric, 8, 32, dim, params_of(values_));
        if (values_.integer("hadamard") == 1) plan.transform.hadamard = dim;
        return plan;
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    OptionValues values_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) { return std::unique_ptr<Method>(new Q8(values)); }

} // namespace

const MethodEntry& q8_0_method() {
    static const MethodEntry entry{
        {.name = "q8_0",
         .summary = "llama.cpp's 8-bit format: symmetric, 32 channels of a token share a scale",
         .paper = "-",
         .options = {switch_option("hadamard", "0", "1: pack in the basis of a Walsh-Hadamard transform of each head"),
                     front_option("0"), keep_option(), params_option()}},
        make};
    return entry;
}

} // namespace kvmosaic
