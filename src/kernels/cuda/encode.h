// Encoding of pages on the device: arguments and launches.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/attend.h"

namespace kvmosaic::cuda {

using device::EncodeJob;

struct EncodeParams {
    const void* rows = nullptr; // raw rows, f16 or bf16, finite
    int64_t row_stride = 0;     // elements from a row to the next
    ElementType type = ElementType::f16;
    const EncodeJob* jobs = nullptr; // [count]
    int32_t count = 0;
    uint8_t* pool = nullptr;
    const uint16_t* order = nullptr; // [heads][D] channel at each ladder position, or null: rows lie in ladder order

    // Tiered pages whose tiers are chosen here: the score of a channel is its mean |q| times its step at 2 bits.
    const float* query_sum = nullptr;         // [heads][D] sum of |q|
    const int32_t* query_count = nullptr;     // [heads]
    float raw_above = 0.0f, mid_above = 0.0f; // thresholds: score above -> raw, else above -> 4 bits, else 2 bits
    PageRef* table = nullptr;                 // [heads][table_stride]
    int32_t table_stride = 0;
    uint32_t* pool_used = nullptr; // units; grows
    uint32_t pool_units = 0;       // capacity
    uint32_t* exhausted = nullptr; // set to 1 when a page found no room; the page is then not written
};

// Grids with groups along the lanes (key: tokens; value: channels of a token): D of 64, 128, 256; any width; groups of
// 32, 64 or 128 tokens, or D / {1, 2, 4} channels. cudaErrorNotSupported otherwise.
cudaError_t launch_encode_grid(const DevicePage& page, const EncodeParams& params, cudaStream_t stream);
// Key pages in given tiers, without a map, one group of tokens: D of 64, 128, 256, widths of 1 to 8 bits.
cudaError_t launch_encode_tiers(const DevicePage& page, const EncodeParams& params, cudaStream_t stream);
// Groups along the depth: D up to 256, even; rules asym, symmetric, both hybrids and codebook_norm (then with its
// book).
cudaError_t launch_encode_depth(const DevicePage& page, const float* book, const EncodeParams& params,
                                cudaStream_t stream);
// Key pages of 16-, 4- and 2-bit tiers, D = 128, one group.
cudaError_t launch_encode_mix(const EncodeParams& params, cudaStream_t stream);

struct PlanesParams {
    EncodeParams pages; // keys: query_sum of q^2
    // keys
    device::KeyMean mean;
    int32_t vectors = 0, most_vectors = 0, shrinks = 7; // without and with what the guard may add
    double guard = 0.0;                                 // 0: none
    // values
    int32_t bits = 0;
    bool hadamard = false;
};
// Pages in planes, D of 64 and 128. Values of 2, 3 and 4 bits.
cudaError_t launch_encode_planes(int dim, const PlanesParams& params, cudaStream_t stream);
cudaError_t launch_encode_fitted(int dim, const PlanesParams& params, cudaStream_t stream);

struct AppendParams {
    device::LayerMemory memory;
    const SequenceState* states = nullptr;
    int32_t sequences = 0, new_rows = 1, kv_heads = 0;
    const void* k = nullptr;
    const void* v = nullptr;
    ElementType type = ElementType::bf16;
    // of the value store; 0 bits: another kernel packs them
    int32_t value_bits = 0, value_groups = 1;
    uint32_t value_plane = 0, value_scales = 0, value_zeros = 0, value_bytes = 0;
    // of the key store
    uint32_t key_scales = 0, key_zeros = 0;
};
// Packs keys of this page (uniform grid); values of any width, D / {1, 2, 4} channels a group.
cudaError_t launch_append(const DevicePage& key, const AppendParams& params, cudaStream_t stream);

cudaError_t launch_add_queries(const device::QueryCall& call, cudaStream_t stream);

// D of 64, 128 or 256; runs of the Hadamard transform are powers of two.
cudaError_t launch_to_key_basis(const device::BasisCall& call, cudaStream_t stream);

struct AdvanceParams {
    SequenceState* states = nullptr;
    int32_t sequences = 0, new_rows = 1;
    device::RowWindow key, value;
};
cudaError_t launch_advance(const AdvanceParams& params, cudaStream_t stream);

} // namespace kvmosaic::cuda
