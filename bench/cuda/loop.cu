// What decode_loop.py calls of kvmosaic in its loop: a cache of a whole model on the device, full of random pages, one
// call a step and one a layer. Plain C, so that PyTorch's own graph capture records it.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "kernels/cuda/order.h"
#include "kvmosaic/device_cache.h"

using namespace kvmosaic;

namespace {

struct Loop {
    ModelShape shape;
    std::unique_ptr<device::DeviceCache> cache;
    std::unique_ptr<device::Attention> attention;
    StoreSpec key, value;
    float scale = 1.0f;
};

int refuse(const std::string& what, char* error, int room) {
    std::snprintf(error, size_t(room), "%s", what.c_str());
    return 1;
}

// Fills one layer's side of every slot with pages of `source` rows, f16, and its recent rows with some of them.
Status fill_side(const Loop& loop, const device::SideMemory& memory, Side side, int64_t packed, int32_t stride,
                 const uint16_t* source, int64_t source_rows) {
    const StoreSpec& spec = side == Side::key ? loop.key : loop.value;
    const LayerShape& l = loop.shape.layers[0];
    const int32_t dim = l.dim(side);
    const uint32_t units = device::page_bytes(spec, side, dim) / device::kPageUnit;
    const int64_t heads = int64_t(loop.cache->slots()) * l.kv_heads, pages = (packed + kPageTokens - 1) / kPageTokens;
    std::vector<device::EncodeJob> jobs;
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t p = 0; p < pages; ++p) {
            device::EncodeJob job;
            job.row = (h * 131 + p * 17) % (source_rows - kPageTokens) * dim;
            job.unit = uint32_t(h * stride + p) * units;
            jobs.push_back(job);
        }
    device::EncodeJob* list = nullptr;
    if (cudaMalloc(&list, jobs.size() * sizeof(jobs[0]) + 1) != cudaSuccess)
        return {StatusCode::out_of_memory, "no memory for the jobs"};
    cudaMemcpy(list, jobs.data(), jobs.size() * sizeof(jobs[0]), cudaMemcpyHostToDevice);
    device::EncodeCall call;
    call.rows = source, call.row_stride = dim, call.type = device::ElementType::f16;
    call.jobs = list, call.count = int32_t(jobs.size()), call.pool = memory.pool;
    Status done = device::encode(spec, side, dim, call, nullptr);
    const size_t ring = size_t(memory.recent.capacity) * size_t(dim) * 2;
    for (int64_t h = 0; h < heads && done; ++h)
        cudaMemcpyAsync(static_cast<uint8_t*>(memory.recent.base) + size_t(h) * ring, source, ring,
                        cudaMemcpyDeviceToDevice, nullptr);
    cudaDeviceSynchronize();
    cudaFree(list);
    return done;
}

} // namespace

extern "C" {

// 0, or 1 with a sentence in `error`.
int kvmosaic_loop_create(const char* spec, int layers, int heads, int kv_heads, int dim, int slots, int64_t max_rows,
                         void** out, char* error, int room) {
    auto loop = std::make_unique<Loop>();
    loop->shape.layers.assign(size_t(layers), {heads, kv_heads, dim, dim, {}});
    auto cache = device::DeviceCache::create(loop->shape, spec, {slots, max_rows, 0.0, 1});
    if (!cache) return refuse(cache.status().message(), error, room);
    loop->cache = std::move(*cache);
    auto method = open_method(spec);
    if (!method) return refuse(method.status().message(), error, room);
    loop->key = (*method)->initial(Side::key, 0, 0, dim).store;
    loop->value = (*method)->initial(Side::value, 0, 0, dim).store;
    loop->scale = 1.0f / std::sqrt(float(dim));
    device::AttentionShape shape;
    shape.heads = heads, shape.kv_heads = kv_heads, shape.dim = dim, shape.max_sequences = slots;
    shape.key = loop->key, shape.value = loop->value, shape.expected_rows = slots * max_rows;
    auto attention = device::Attention::create(shape);
    if (!attention) return refuse(attention.status().message(), error, room);
    loop->attention = std::move(*attention);
    *out = loop.release();
    return 0;
}
void kvmosaic_loop_destroy(void* loop) { delete static_cast<Loop*>(loop); }
int64_t kvmosaic_loop_bytes(const void* loop) {
    const Loop& l = *static_cast<const Loop*>(loop);
    return l.cache->bytes() + l.attention->scratch_bytes();
}

// Every sequence gets `rows` rows. source: [source_rows][dim] f16 on the device.
int kvmosaic_loop_fill(void* loop, int64_t rows, const void* source, int64_t source_rows, char* error, int room) {
    Loop& l = *static_cast<Loop*>(loop);
    for (int32_t g = 0; g < l.cache->groups(); ++g) {
        const auto packed = [&](Side side) {
            const device::RowWindow w = l.cache->window(g, side);
            const Window rule{.front = w.front, .keep = w.keep, .flush = w.flush, .first = w.first};
            return int32_t(rule.packed_after(0, std::max<int64_t>(0, rows - w.front)));
        };
        std::vector<device::SequenceState> states(size_t(l.cache->slots()));
        for (size_t s = 0; s < states.size(); ++s) {
            states[s].slot = int32_t(s), states[s].rows = int32_t(rows);
            states[s].front = std::min(l.cache->window(g, Side::key).front, int32_t(rows));
            states[s].key_packed = states[s].key_before = packed(Side::key);
            states[s].value_packed = states[s].value_before = packed(Side::value);
        }
        cudaMemcpy(l.cache->states(g), states.data(), states.size() * sizeof(states[0]), cudaMemcpyHostToDevice);
        for (int32_t layer = 0; layer < int32_t(l.shape.layers.size()); ++layer)
            for (const Side side : {Side::key, Side::value}) {
                const device::LayerMemory memory = l.cache->layer(layer);
                const Status done = fill_side(l, side == Side::key ? memory.key : memory.value, side, packed(side),
                                              memory.table_stride, static_cast<const uint16_t*>(source), source_rows);
                if (!done) return refuse(done.message(), error, room);
            }
    }
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : refuse("the device failed while pages were made", error, room);
}

int kvmosaic_loop_step(void* loop, void* stream, char* error, int room) {
    Loop& l = *static_cast<Loop*>(loop);
    device::SequenceState* states = l.cache->states(0);
    Status done = device::advance(states, l.cache->slots(), 1, l.cache->window(0, Side::key),
                                  l.cache->window(0, Side::value), stream);
    if (done) done = l.attention->plan(states, l.cache->slots(), stream);
    return done ? 0 : refuse(done.message(), error, room);
}

// q, out: [slots][heads][dim]; k, v: [slots][kv_heads][dim]; bf16
int kvmosaic_loop_layer(void* loop, int layer, const void* q, const void* k, const void* v, void* out, void* stream,
                        char* error, int room) {
    Loop& l = *static_cast<Loop*>(loop);
    const LayerShape& shape = l.shape.layers[0];
    device::AppendCall append;
    append.memory = l.cache->layer(layer), append.states = l.cache->states(0), append.sequences = l.cache->slots();
    append.kv_heads = shape.kv_heads, append.dim = shape.key_dim, append.k = k, append.v = v;
    append.key = l.key, append.value = l.value;
    Status done = device::append(append, stream);
    device::AttendCall attend;
    attend.memory = append.memory, attend.q = q, attend.out = out, attend.scale = l.scale;
    if (done) done = l.attention->attend(attend, stream);
    return done ? 0 : refuse(done.message(), error, room);
}

} // extern "C"
