#include "kvmosaic/shape.h"

namespace kvmosaic {

namespace {

constexpr int32_t kMaxHeads = 65536;
constexpr int32_t kMaxDim = 512; // kMaxHeadDim of store.h, which this layer may not include

Status range(const ModelShape& shape, size_t layer, const char* field, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return Status();
    return Status(StatusCode::invalid_argument, (shape.name.empty() ? "" : shape.name + ": ") + "layer " +
                                                    std::to_string(layer) + ": " + field + " must be " +
                                                    std::to_string(low) + " to " + std::to_string(high) + ", not " +
                                                    std::to_string(value));
}

} // namespace

Status validate(const ModelShape& shape) {
    const std::string who = shape.name.empty() ? "" : shape.name + ": ";
    bool any = false;
    for (size_t i = 0; i < shape.layers.size(); ++i) {
        const LayerShape& layer = shape.layers[i];
        if (Status s = range(shape, i, "kv_heads", layer.kv_heads, 0, kMaxHeads); !s) return s;
        if (!layer.has_kv()) continue; // sizes of a layer without K/V mean nothing here
        any = true;
        if (Status s = range(shape, i, "heads", layer.heads, 1, kMaxHeads); !s) return s;
        if (layer.heads % layer.kv_heads != 0) {
            return Status(StatusCode::invalid_argument,
                          who + "layer " + std::to_string(i) + ": heads must be a multiple of kv_heads, not " +
                              std::to_string(layer.heads) + " with kv_heads " + std::to_string(layer.kv_heads));
        }
        if (Status s = range(shape, i, "key_dim", layer.key_dim, 1, kMaxDim); !s) return s;
        if (Status s = range(shape, i, "value_dim", layer.value_dim, 1, kMaxDim); !s) return s;
    }
    if (!any) {
        return Status(StatusCode::invalid_argument,
                      who + "none of the " + std::to_string(shape.layers.size()) +
                          " layers keeps keys and values (kv_heads must be 1 or more in at least one)");
    }
    return Status();
}

} // namespace kvmosaic
