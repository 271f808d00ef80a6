// q8_0, q4_0: the cache formats of those names in llama.cpp (ggml, MIT): 8 or 4 bits and one f16 scale for 32 channels
// of a token.
//
// What differs from llama.cpp:
// - q8_0 has the levels of ggml's block_q8_0: s = max|x| / 127, codes -127 .. 127. Codes are made with the stored f16
//   scale and round half to even; ggml divides by the fp32 scale and rounds half away from zero. Both decode within
//   half a step; bytes may differ where a value lies at the border of two codes.
// - q4_0 has the levels of ggml's block_q4_0: s = e / -8 with e the value of largest magnitude and its sign, levels
//   -8 s .. 7 s, so that e itself is a level. Codes are made with the stored f16 scale and round half to even; ggml
//   multiplies with the inverse of the fp32 scale, adds 8.5 and cuts. Bytes may differ where a value lies at the border
//   of two codes. Where the largest magnitude occurs with both signs e is the positive one; ggml takes the first.
// - A page is in this project's own order, not in ggml's array of blocks; the bits are the same 8.5 and 4.5 a value.
// - llama.cpp needs head sizes that 32 divides. Here the last group of a token is shorter instead.
// - `hadamard=1` packs keys and values in a rotated basis, as recent llama.cpp does for its low-bit caches; `front` and
//   `keep` are additions.
#include "methods/method.h"

namespace kvmosaic {

namespace {

class Ggml final : public Method {
public:
    Ggml(const MethodEntry& entry, GridRule rule, uint8_t bits, const OptionValues& values)
        : entry_(entry), rule_(rule), bits_(bits), values_(values) {}
    const MethodInfo& info() const override { return entry_.info; }

    SidePlan initial(Side, int32_t, int32_t, int32_t dim) const override {
        SidePlan plan;
        plan.window = {.front = values_.integer("front"), .keep = values_.integer("keep"), .flush = 1};
        plan.store = token_store(StoreKind::grid, rule_, bits_, 32, dim, params_of(values_));
        if (values_.integer("hadamard") == 1) plan.transform.hadamard = dim;
        return plan;
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    const MethodEntry& entry_;
    GridRule rule_;
    uint8_t bits_;
    OptionValues values_;
};

template <const MethodEntry& (*entry)(), GridRule rule, uint8_t bits>
Result<std::unique_ptr<Method>> make(const OptionValues& values) {
    return std::unique_ptr<Method>(new Ggml(entry(), rule, bits, values));
}

MethodInfo describe(const char* name, const char* summary) {
    return {
        .name = name,
        .summary = summary,
        .paper = "-",
        .options = {switch_option("hadamard", "0", "1: pack in the basis of a Walsh-Hadamard transform of each head"),
                    front_option("0"), keep_option(), params_option()}};
}

} // namespace

const MethodEntry& q8_0_method() {
    static const MethodEntry entry{
        describe("q8_0", "llama.cpp's 8-bit format: symmetric, 32 channels of a token share a scale"),
        make<q8_0_method, GridRule::symmetric, 8>};
    return entry;
}

const MethodEntry& q4_0_method() {
    static const MethodEntry entry{
        describe("q4_0", "llama.cpp's 4-bit format: 32 channels of a token share a scale that hits the largest"),
        make<q4_0_method, GridRule::extreme, 4>};
    return entry;
}

} // namespace kvmosaic
