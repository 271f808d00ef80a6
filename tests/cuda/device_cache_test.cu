// Sequences of a CPU cache on the GPU and back: what was moved is attended there, grows there, and comes home to the
// byte as if it had never been away.
#include "kvmosaic/device_cache.h"

#include <cmath>
#include <numeric>

#include "gpu.h"
#include "property/lifecycle.h"

namespace kvmosaic::testing {
namespace {

using cuda::bench::DeviceArray;
using test::Text;

constexpr int kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 128;

// Rows whose elements f16 holds, so that what goes to the GPU in 16 bits is what the CPU was given.
Text halves(const ModelShape& shape, int64_t rows, uint32_t seed) {
    Text text(shape.layers[0], rows, seed);
    for (auto* t : {&text.q, &text.k, &text.v})
        for (float& x : t->x)
            x = f16_to_f32(f32_to_f16_sat(x));
    return text;
}

struct Pair { // the same sequences on both sides
    ModelShape shape;
    std::unique_ptr<Cache> cache;
    std::unique_ptr<device::DeviceCache> moved;
    std::vector<Text> texts;
    std::vector<int64_t> rows;

    Pair(const std::string& spec, const std::vector<int64_t>& lengths, int64_t most, double bits = 0.0, int dim = kDim)
        : shape(test::one_layer(kHeads, kKvHeads, dim, 0, kLayers)), rows(lengths) {
        cache = test::make(shape, spec);
        auto made =
            device::DeviceCache::create(shape, cache->method().spec(), {int32_t(lengths.size()), most, bits, 1});
        EXPECT_TRUE(made.ok()) << made.status().message();
        moved = std::move(*made);
        for (size_t s = 0; s < lengths.size(); ++s) {
            texts.push_back(halves(shape, most, uint32_t(s + 1)));
            write(SeqId(s), 0, lengths[s]);
        }
    }
    void write(SeqId seq, int64_t from, int64_t n) {
        if (n == 0) return;
        test::write_layers(*cache, texts[size_t(seq)], from, n, kLayers, seq);
        cache->end_step();
    }
};

TEST(CudaDeviceCache, EveryMethodComesBackToTheByte) {
    KVMOSAIC_NEEDS_GPU();
    for (const std::string& spec : test::lifecycle_specs()) {
        if (spec == "f32") continue;
        Pair pair(spec, {5, 131, 388, 600}, 600);
        auto back = test::make(pair.shape, spec);
        for (SeqId s = 0; s < 4; ++s) {
            const Status up = pair.moved->upload(3 - s, *pair.cache, s);
            ASSERT_TRUE(up.ok()) << spec << ": " << up.message();
        }
        for (SeqId s = 0; s < 4; ++s) {
            const Status down = pair.moved->download(3 - s, back.get(), s);
            ASSERT_TRUE(down.ok()) << spec << ": " << down.message();
            ASSERT_EQ(pair.cache->save(s), back->save(s)) << spec;
        }
    }
}

// Decode steps on the device beside the same steps on the CPU: outputs agree, pages are equal.
// mix: tiers that are planned on the device; planes: and about a mean, which the host decides first.
void grow_on_device(const std::string& spec, const device::AttentionShape& kernel, bool mix, bool planes = false) {
    const std::vector<int64_t> start =
        planes ? std::vector<int64_t>{132, 140, 255, 700} : std::vector<int64_t>{0, 130, 255, 700};
    const int32_t steps = 300, sequences = int32_t(start.size());
    Pair pair(spec, start, 1100, mix ? 8.0 : 0.0);
    device::DeviceCache& moved = *pair.moved;
    for (SeqId s = planes ? 0 : 1; s < sequences; ++s) { // slot 0 may be a sequence that begins on the device
        const Status up = moved.upload(s, *pair.cache, s);
        ASSERT_TRUE(up.ok()) << up.message();
    }
    if (!planes) {
        pair.write(SeqId(0), 0, 1); // a sequence needs a first row to exist
        ASSERT_TRUE(moved.upload(0, *pair.cache, 0).ok());
        pair.rows[0] = 1;
    }

    device::AttentionShape shape = kernel;
    shape.heads = kHeads, shape.kv_heads = kKvHeads, shape.dim = kDim, shape.max_sequences = sequences;
    shape.key = pair.cache->plan(0, 0, 0, Side::key).store, shape.value = pair.cache->plan(0, 0, 0, Side::value).store;
    auto attention = device::Attention::create(shape);
    ASSERT_TRUE(attention.ok()) << attention.status().message();
    ASSERT_EQ(1, moved.groups());
    const size_t row = size_t(sequences) * kKvHeads * kDim, q_row = size_t(sequences) * kHeads * kDim;
    DeviceArray<uint16_t> k(row), v(row), q(q_row);
    DeviceArray<float> out(q_row);
    std::vector<uint16_t> hk(row), hv(row), hq(q_row);
    double worst = 0.0;
    for (int step = 0; step < steps; ++step) {
        for (int s = 0; s < sequences; ++s) {
            const Text& text = pair.texts[size_t(s)];
            const int64_t at = pair.rows[size_t(s)] + step;
            for (int i = 0; i < kKvHeads * kDim; ++i) {
                hk[size_t(s * kKvHeads * kDim + i)] = f32_to_f16_sat(text.k.at(at, 0)[i]);
                hv[size_t(s * kKvHeads * kDim + i)] = f32_to_f16_sat(text.v.at(at, 0)[i]);
            }
            for (int i = 0; i < kHeads * kDim; ++i)
                hq[size_t(s * kHeads * kDim + i)] = f32_to_f16_sat(text.q.at(at, 0)[i]);
        }
        k.copy_from(hk), v.copy_from(hv), q.copy_from(hq);
        ASSERT_TRUE(device::advance(moved.states(0), sequences, 1, moved.window(0, Side::key),
                                    moved.window(0, Side::value), nullptr)
                        .ok());
        ASSERT_TRUE((*attention)->plan(moved.states(0), sequences, nullptr).ok());
        std::vector<device::EncodeJob> due, due_values; // pages that this step completes and other calls pack
        for (int s = 0; mix && s < sequences; ++s) {
            const device::RowWindow w = moved.window(0, Side::key);
            const Window rule{.front = w.front, .keep = w.keep, .flush = w.flush, .first = w.first};
            const auto packed = [&](int64_t rows) { // as `advance` counts them, from nothing
                int64_t n = 0;
                for (int64_t r = 1; r <= rows; ++r)
                    n = rule.packed_after(n, std::max<int64_t>(0, r - w.front));
                return n;
            };
            const int64_t now = packed(pair.rows[size_t(s)] + step + 1), before = packed(pair.rows[size_t(s)] + step);
            for (int h = 0; now > before && h < kKvHeads; ++h) {
                const int capacity = moved.layer(0).key.recent.capacity;
                device::EncodeJob job;
                job.head = s * kKvHeads + h, job.page = int32_t(before / kPageTokens);
                job.row = (int64_t(job.head) * capacity + before % capacity) * kDim;
                due.push_back(job);
                const int value_capacity = moved.layer(0).value.recent.capacity;
                job.row = (int64_t(job.head) * value_capacity + before % value_capacity) * kDim;
                const uint32_t bytes = planes ? device::page_bytes(shape.value, Side::value, kDim) : 0;
                job.unit = uint32_t(int64_t(job.head) * moved.layer(0).table_stride + job.page) *
                           (bytes / device::kPageUnit); // pages of one size lie in the order of the table
                due_values.push_back(job);
            }
        }
        for (int32_t l = 0; l < kLayers; ++l) {
            device::AppendCall append;
            append.memory = moved.layer(l), append.states = moved.states(0), append.sequences = sequences;
            append.kv_heads = kKvHeads, append.dim = kDim, append.k = k.data, append.v = v.data;
            append.type = device::ElementType::f16, append.key = shape.key, append.value = shape.value;
            const Status appended = device::append(append, nullptr);
            ASSERT_TRUE(appended.ok()) << appended.message();
            if (mix) {
                device::QueryCall queries;
                queries.states = moved.states(0), queries.sequences = sequences, queries.heads = kHeads;
                queries.kv_heads = kKvHeads, queries.dim = kDim, queries.q = q.data;
                queries.type = device::ElementType::f16, queries.raw = append.memory.raw;
                queries.sums = moved.query_sums(l), queries.counts = moved.query_counts(l);
                queries.squares = planes;
                ASSERT_TRUE(device::add_queries(queries, nullptr).ok());
                DeviceArray<device::EncodeJob> jobs(due);
                const device::DeviceCache::Pool pool = moved.key_pool(l);
                device::PlannedCall seal;
                seal.pages = {append.memory.key.recent.base, kDim,   append.memory.raw, jobs.data, int32_t(due.size()),
                              append.memory.key.pool,        nullptr};
                seal.query_sum = moved.query_sums(l), seal.query_count = moved.query_counts(l);
                seal.raw_above = 1.8f, seal.mid_above = 1.2f;
                seal.table = append.memory.key.pages, seal.table_stride = append.memory.table_stride;
                seal.pool_used = pool.used, seal.pool_units = pool.units, seal.exhausted = pool.exhausted;
                seal.mean = moved.key_mean(l), seal.vectors = shape.key.vectors;
                const Status sealed = planes ? device::encode_planes(shape.key, Side::key, kDim, seal, nullptr)
                                             : device::encode_mix(seal, nullptr);
                ASSERT_TRUE(sealed.ok()) << sealed.message();
                DeviceArray<device::EncodeJob> value_jobs(due_values);
                device::PlannedCall values;
                values.pages = {append.memory.value.recent.base,
                                kDim,
                                append.memory.raw,
                                value_jobs.data,
                                int32_t(due_values.size()),
                                append.memory.value.pool,
                                nullptr};
                values.hadamard = true;
                if (planes) {
                    const Status fitted = device::encode_planes(shape.value, Side::value, kDim, values, nullptr);
                    ASSERT_TRUE(fitted.ok()) << fitted.message();
                }
                KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize()); // jobs end with the loop's body
            }
            device::AttendCall attend;
            attend.memory = moved.layer(l), attend.q = q.data, attend.out = out.data;
            attend.q_type = device::ElementType::f16, attend.out_type = device::ElementType::f32;
            attend.scale = test::default_scale(pair.shape.layers[0]);
            if (planes) attend.mean = moved.key_mean(l);
            const Status attended = (*attention)->attend(attend, nullptr);
            ASSERT_TRUE(attended.ok()) << attended.message();
        }
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        for (SeqId s = 0; s < sequences; ++s)
            pair.write(s, pair.rows[size_t(s)] + step, 1);
        if (step % 37 != 5 && step + 1 != steps) continue;
        const std::vector<float> got = out.to_host();
        for (SeqId s = 0; s < sequences; ++s) {
            const int64_t at = pair.rows[size_t(s)] + step;
            const std::vector<double> want = test::expected(*pair.cache, pair.texts[size_t(s)], at, 0, at + 1, s);
            worst = std::max(worst, test::l2_error_of(got.data() + size_t(s) * kHeads * kDim, want));
        }
    }
    EXPECT_LT(worst, 2e-3);
    auto back = test::make(pair.shape, spec);
    for (SeqId s = 0; s < sequences; ++s) {
        const Status down = moved.download(s, back.get(), s);
        ASSERT_TRUE(down.ok()) << down.message();
        ASSERT_EQ(pair.cache->save(s), back->save(s)) << spec << ", sequence " << s;
    }
}

// Every method that a fused kernel reads, windows and all: the queries of the newest rows over what was moved.
TEST(CudaDeviceCache, WhatWasMovedIsAttended) {
    KVMOSAIC_NEEDS_GPU();
    int served = 0;
    for (const int dim : {128, 64})
        for (const char* spec :
             {"kivi:bits=2,group=128", "mixkvq:group=128", "pnmix", "kitty:group=128", "innerq", "innerq:variant=small",
              "innerq:variant=hybrid", "innerq:variant=hybrid,asym=4level", "innerq:front=0,keep=0",
              "turboquant:skip=0", "turboquant:skip=0,k=3,v=3", "mosaic:k=2,v=2", "mosaic", "mosaic:k=3.5,v=4",
              "mosaic:k=2,v=2,keep=64", "mosaic:k=2,v=2,mean=0", "mosaic:k=2,v=2,hadamard=0", "mosaic:k=1.5,v=2",
              "mosaic:k=4.5,v=4"}) {
            const std::vector<int64_t> lengths = {5, 131, 388, 700};
            Pair pair(spec, lengths, 700, 0.0, dim);
            const auto shape = pair.moved->attention(0);
            ASSERT_TRUE(shape.ok()) << spec << ": " << shape.status().message();
            auto attention = device::Attention::create(*shape);
            if (!attention.ok()) { // of this build's set
                EXPECT_NE(std::string::npos, attention.status().message().find("no fused kernel")) << spec;
                continue;
            }
            ++served;
            const int32_t sequences = int32_t(lengths.size());
            const size_t q_row = size_t(sequences) * kHeads * dim;
            std::vector<uint16_t> hq(q_row);
            for (SeqId s = 0; s < sequences; ++s) {
                ASSERT_TRUE(pair.moved->upload(s, *pair.cache, s).ok());
                for (int i = 0; i < kHeads * dim; ++i)
                    hq[size_t(s * kHeads * dim + i)] =
                        f32_to_f16_sat(pair.texts[size_t(s)].q.at(lengths[size_t(s)] - 1, 0)[i]);
            }
            DeviceArray<uint16_t> q(hq), q_packed(q_row);
            DeviceArray<float> out(q_row);
            ASSERT_TRUE((*attention)->plan(pair.moved->states(0), sequences, nullptr).ok());
            for (int32_t l = 0; l < kLayers; ++l) {
                q_packed.poison(), out.poison();
                device::AttendCall attend;
                attend.memory = pair.moved->layer(l), attend.q = q.data, attend.out = out.data;
                attend.q_type = device::ElementType::f16, attend.out_type = device::ElementType::f32;
                attend.scale = test::default_scale(pair.shape.layers[0]);
                attend.mean = pair.moved->key_mean(l);
                if (shape->key_basis) {
                    device::BasisCall basis;
                    basis.basis = *pair.moved->key_basis(l);
                    basis.states = pair.moved->states(0), basis.sequences = sequences, basis.heads = kHeads;
                    basis.kv_heads = kKvHeads, basis.dim = dim, basis.q = q.data, basis.out = q_packed.data;
                    basis.type = device::ElementType::f16;
                    const Status turned = device::to_key_basis(basis, nullptr);
                    ASSERT_TRUE(turned.ok()) << turned.message();
                    attend.q_packed = q_packed.data;
                }
                const Status attended = (*attention)->attend(attend, nullptr);
                ASSERT_TRUE(attended.ok()) << spec << ": " << attended.message();
                KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
                const std::vector<float> got = out.to_host();
                for (SeqId s = 0; s < sequences; ++s) {
                    const int64_t n = lengths[size_t(s)];
                    const std::vector<double> want = test::expected(*pair.cache, pair.texts[size_t(s)], n - 1, 0, n, s);
                    EXPECT_LT(test::l2_error_of(got.data() + size_t(s) * kHeads * dim, want), 2e-3)
                        << spec << ", D " << dim << ", layer " << l << ", " << n << " rows";
                }
            }
        }
    EXPECT_GE(served, 10); // of the smoke set
}

TEST(CudaDeviceCache, UniformPagesGrowThere) {
    KVMOSAIC_NEEDS_GPU();
    grow_on_device("kivi:bits=2,group=128", {}, false);
}

TEST(CudaDeviceCache, PagesInTiersGrowThere) {
    KVMOSAIC_NEEDS_GPU();
    device::AttentionShape shape;
    shape.widths = {16, 4, 2};
    grow_on_device("mixkvq:group=128,hi=1.8,mid=1.2", shape, true);
}

// Keys about a mean, planned and searched there, values rotated and fitted.
TEST(CudaDeviceCache, PagesInPlanesGrowThere) {
    KVMOSAIC_NEEDS_GPU();
    device::AttentionShape shape;
    shape.widths = {8, 6, 4, 3, 2, 1, 0};
    shape.value_hadamard = kDim;
    grow_on_device("mosaic:k=2,v=2", shape, true, true);
}

} // namespace
} // namespace kvmosaic::testing
