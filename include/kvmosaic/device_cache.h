// Sequences of a cache on a GPU: where their pages, raw rows, states and statistics lie, and the way there and back.
//
// A move transcodes: every code, scale, offset, map entry and raw row is kept, nothing is encoded again, so a sequence
// that went to the device and came back is the same to the byte. On the device it may be attended and grow by the calls
// of device.h; what grew there comes back too.
//
// Sequences lie in slots; states of layers with equal windows are one array over all slots, an empty slot having no
// rows.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "kvmosaic/cache.h"
#include "kvmosaic/device.h"

namespace kvmosaic::device {

class Memory; // kernels/cuda/memory.h

struct DeviceCacheOptions {
    int32_t slots = 1;    // sequences, 1..4096
    int64_t max_rows = 0; // of a sequence, 1..2^24
    // Tiered stores whose ladders depend on the data: bits a value that the pool has room for, over all pages of a
    // side; 0: the worst ladder. Other pages have a fixed size and always find room.
    double expected_bits = 0.0;
    int32_t step_rows = 128; // most new rows of a sequence in one step, 1..128: raw rows have room for them
    int32_t threads = 1;     // that change the byte order of pages in a move, 1..256
};

class DeviceCache {
public:
    // Allocates everything on the current device. Refuses by name: models or methods whose raw rows are f32, or whose
    // sides keep different fronts; sizes out of range; builds without a GPU backend; too little memory.
    static Result<std::unique_ptr<DeviceCache>> create(const ModelShape& shape, std::string_view spec,
                                                       const DeviceCacheOptions& options);
    // For the model and method of `like`, which holds no sequences.
    static Result<std::unique_ptr<DeviceCache>> create(std::unique_ptr<Cache> like, const DeviceCacheOptions& options);
    // In a memory of the caller's, which outlives the cache (tests).
    static Result<std::unique_ptr<DeviceCache>> create(std::unique_ptr<Cache> like, const DeviceCacheOptions& options,
                                                       Memory* memory);
    ~DeviceCache();
    DeviceCache(const DeviceCache&) = delete;
    DeviceCache& operator=(const DeviceCache&) = delete;

    // ---- moves; they wait for the device. What is refused changes nothing; a failing device leaves the slot empty
    // ----

    // The slot becomes a copy of sequence `seq` of a cache of the same model and spec, in place of what it held (whose
    // pages make no room for it before `clear`). Pages that the cache shares with others become the slot's own. Rows
    // that a rollback window keeps beside their codes stay behind.
    Status upload(int32_t slot, const Cache& from, SeqId seq);
    // Sequence `seq` of `to` becomes what lies in the slot, which keeps it. Rows that were appended on the device have
    // the positions after the last one, or those of `grown` (one for each, ascending).
    Status download(int32_t slot, Cache* to, SeqId seq, std::span<const int32_t> grown = {}) const;
    Status clear(int32_t slot);
    // Rows of the slot now, those that were appended on the device included.
    Result<int64_t> rows(int32_t slot) const;

    // ---- for the calls of device.h; device memory, valid while the cache lives ----

    LayerMemory layer(int32_t layer) const;
    int32_t groups() const;                     // of layers with equal windows
    int32_t group_of(int32_t layer) const;      // -1: the layer has no K/V of its own
    SequenceState* states(int32_t group) const; // [slots]; `advance` each group once a step
    RowWindow window(int32_t group, Side side) const;
    // Statistics of queries of a layer where the method keeps them, else null: sums [slots * kv_heads][D] and counts
    // [slots * kv_heads], as encode_mix and add_queries take them.
    float* query_sums(int32_t layer) const;
    int32_t* query_counts(int32_t layer) const;
    // What `Attention::create` asks for, for steps of `rows` new rows; key_bytes of pages that differ is left to the
    // caller. Refuses by name what no kernel could read: see key_basis; values in a basis of their own.
    Result<AttentionShape> attention(int32_t layer, int32_t rows = 1) const;
    // The basis of the layer's packed keys, for `to_key_basis`; of an empty slot it means nothing. Refuses by name what
    // queries cannot be brought to: keys without their rotation, joined heads, shifts; and as long as a slot holds it,
    // a sequence that kernels would misread (keys about a mean behind a context shift). Ask again after an upload.
    Result<KeyBasis> key_basis(int32_t layer) const;
    // Of keys that were packed about a mean, for AttendCall; else without a mean.
    KeyMean key_mean(int32_t layer) const;
    // Pool of tiered key pages whose ladders depend on the data, else null: units in use (grows on the device), units
    // there are, and whether a page found no room.
    struct Pool {
        uint32_t* used = nullptr;
        uint32_t units = 0;
        uint32_t* exhausted = nullptr;
    };
    Pool key_pool(int32_t layer) const;

    int32_t slots() const;
    int64_t bytes() const; // allocated on the device

private:
    struct Impl;
    explicit DeviceCache(std::unique_ptr<Impl> impl);
    std::unique_ptr<Impl> impl_;
};

} // namespace kvmosaic::device
