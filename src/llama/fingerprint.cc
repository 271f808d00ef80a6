#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "core/hash.h"
#include "ggml-backend.h"
#include "llama/memory.h"

namespace kvmosaic::seam {

std::string fingerprint_of(const llama_model& model) {
    const auto is_norm = [](const std::string& name) { return name.ends_with("_norm.weight"); };
    std::vector<std::pair<std::string, ggml_tensor*>> norms;
    for (const auto& [name, tensor] : model.tensors_by_name) {
        if (is_norm(name) && tensor->type == GGML_TYPE_F32 && tensor->buffer && tensor->data) {
            norms.emplace_back(name, tensor);
        }
    }
    if (norms.empty()) return {};
    std::sort(norms.begin(), norms.end());
    uint64_t hash = kFnvStart;
    std::vector<uint8_t> bytes;
    for (const auto& [name, tensor] : norms) {
        bytes.resize(ggml_nbytes(tensor));
        ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
        hash = fnv1a(bytes.data(), bytes.size(), hash);
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

} // namespace kvmosaic::seam
