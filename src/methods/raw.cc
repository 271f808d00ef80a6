// f16, bf16, f32: every token stays raw. f16 is what llama.cpp's own cache holds and the baseline of everything;
// f32 is the reference that tests and the noise floor of `compare` are measured against.
#include "methods/method.h"

namespace kvmosaic {

namespace {

class Raw final : public Method {
public:
    Raw(const MethodEntry& entry, RawType type) : entry_(entry), type_(type) {}
    const MethodInfo& info() const override { return entry_.info; }

    SidePlan initial(Side, int32_t, int32_t, int32_t) const override {
        SidePlan plan;
        plan.store = raw_store(type_);
        plan.raw = type_;
        plan.window = {}; // flush 0: nothing is ever packed, so front and keep would mean nothing
        return plan;
    }
    Status accept(const ModelShape& shape) override { return accept_stores(*this, shape); }

private:
    const MethodEntry& entry_;
    RawType type_;
};

template <const MethodEntry& (*entry)(), RawType type>
Result<std::unique_ptr<Method>> make(const OptionValues&) {
    return std::unique_ptr<Method>(new Raw(entry(), type));
}

MethodInfo describe(const char* name, const char* summary) {
    return {.name = name, .summary = summary, .paper = "-", .options = {}};
}

} // namespace

const MethodEntry& f16_method() {
    static const MethodEntry entry{describe("f16", "raw IEEE half precision, 16 bits a value"),
                                   make<f16_method, RawType::f16>};
    return entry;
}

const MethodEntry& bf16_method() {
    static const MethodEntry entry{describe("bf16", "raw bfloat16, 16 bits a value"), make<bf16_method, RawType::bf16>};
    return entry;
}

const MethodEntry& f32_method() {
    static const MethodEntry entry{describe("f32", "raw single precision, for references and tests"),
                                   make<f32_method, RawType::f32>};
    return entry;
}

} // namespace kvmosaic
