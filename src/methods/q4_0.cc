// q4_0: the cache format of that name in llama.cpp (ggml, MIT): 4 bits and one f16 scale for 32 channels of a token.
//
// What differs from llama.cpp:
// - The levels are those of ggml's block_q4_0: s = e / -8 with e the value of largest magnitude and its sign, levels
//   -8 s .. 7 s, so that e itself is a level. Codes are made with the stored f16 scale and round half to even; ggml
//   multiplies with the inverse of the fp32 scale, adds 8.5 and cuts. Bytes may differ where a value lies at the border
//   of two codes. Where the largest magnitude occurs with both signs e is the positive one; ggml takes the first.
// - A page is in this project's own order, not in ggml's array of blocks; the bits are the same 4.5 a value.
// - llama.cpp needs head sizes that 32 divides. Here the last group of a token is shorter instead.
// - `hadamard=1` packs keys and values in a rotated basis, as recent llama.cpp does for its low-bit caches; `front` and
//   `keep` are additions.
#include "methods/method.h"

namespace kvmosaic {

const MethodEntry& q4_0_method();

namespace {

class Q4 final : public Method {
public:
    explicit Q4(const OptionValues& values) : values_(values) {}
    const MethodInfo& info() const override { return q4_0_method().info; }

    SidePlan initial(Side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        plan.store = token_store(StoreKind::grid, GridRule::extreme, 4, 32, dim, params_of(values_));
        if (values_.integer("hadamard") == 1) plan.transform.hadamard = dim;
        return plan;
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    OptionValues values_;
};

Result<std::unique_ptr<Method>> make(const OptionValues& values) { return std::unique_ptr<Method>(new Q4(values)); }

} // namespace

const MethodEntry& q4_0_method() {
    static const MethodEntry entry{
        {.name = "q4_0",
         .summary = "llama.cpp's 4-bit format: 32 channels of a token share a scale that hits the largest",
         .paper = "-",
         .options = {switch_option("hadamard", "0", "1: pack in the basis of a Walsh-Hadamard transform of each head"),
                     front_option("0"), keep_option(), params_option()}},
        make};
    return entry;
}

} // namespace kvmosaic
