// Fuzz target: specs. Any text is one sentence, or a method whose canonical spec is its own; a cache of it can be made
// or is refused in a sentence.
#include <cstdlib>
#include <string_view>

#include "kvmosaic/cache.h"

using namespace kvmosaic;

namespace {

void require(bool good) {
    if (!good) std::abort();
}

void sentence(const Status& st) {
    require(!st.ok() && !st.message().empty() && st.message().find('\n') == std::string::npos);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view spec(reinterpret_cast<const char*>(data), size);
    if (spec.find('/') != std::string_view::npos) return 0; // files of this machine are no part of the input
    auto method = open_method(spec);
    if (!method) return sentence(method.status()), 0;
    const std::string canonical = (*method)->spec();
    auto again = open_method(canonical);
    require(again.ok() && (*again)->spec() == canonical);
    ModelShape shape;
    shape.layers = {{2, 1, 64, 64}, {4, 2, 40, 48}};
    const auto cache = Cache::create(shape, spec);
    if (!cache) return sentence(cache.status()), 0;
    require((*cache)->method().spec() == canonical);
    return 0;
}
