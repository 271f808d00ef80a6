// mosaic's pages made on the GPU from raw rows are those that a cache packed: mean, ladder, channel order, ranges,
// steps and every code.
#include <cmath>

#include "gpu.h"
#include "kvmosaic/device_cache.h"
#include "rig.h"

namespace kvmosaic::testing {
namespace {

using cuda::bench::DeviceArray;

constexpr int kHeads = 8, kKvHeads = 4, kFront = 4;
constexpr int64_t kPages = 4, kRows = kFront + kPages * 128 + 5;

// Rows that f16 holds. Some channels are constant, some tiny, and some hardly looked at.
test::Text made_text(const ModelShape& shape, uint32_t seed) {
    test::Text text(shape.layers[0], kRows, seed);
    const int dim = shape.layers[0].key_dim;
    for (auto* t : {&text.q, &text.k, &text.v})
        for (size_t i = 0; i < t->x.size(); ++i) {
            float& x = t->x[i];
            const int c = int(i) % dim;
            if (t == &text.q && c % 3 == 0) x *= 0.02f;
            if (t == &text.k && c % 5 == 1) x *= 6.0f;
            if (t != &text.q && c % 43 == 9) x *= 1e-5f;
            if (t == &text.k && c % 31 == 7) x = 2.5f;
            if (t != &text.q && i % 977 == 3) x *= 40.0f;
            x = f16_to_f32(f32_to_f16_sat(x));
        }
    return text;
}

struct Options {
    bool queries = true, mean = true, hadamard = true;
    double k = 2.0, guard = 0.0;
};

void expect_the_caches_pages(const std::string& spec, int dim, const Options& o) {
    const ModelShape shape = test::one_layer(kHeads, kKvHeads, dim);
    auto cache = test::make(shape, spec);
    const test::Text text = made_text(shape, uint32_t(dim + spec.size()));
    test::write_layers(*cache, text, 0, kRows, 1, 0);
    cache->end_step();
    auto made = device::DeviceCache::create(shape, cache->method().spec(), {1, kRows, 0.0, 1});
    ASSERT_TRUE(made.ok()) << made.status().message();
    device::DeviceCache& moved = **made;
    ASSERT_TRUE(moved.upload(0, *cache, 0).ok());
    const device::LayerMemory memory = moved.layer(0);
    const StoreSpec key = cache->plan(0, 0, 0, Side::key).store, value = cache->plan(0, 0, 0, Side::value).store;

    // What the cache was given, a head after the other.
    std::vector<uint16_t> k, v;
    for (int h = 0; h < kKvHeads; ++h)
        for (int64_t r = 0; r < kRows; ++r)
            for (int c = 0; c < dim; ++c) {
                k.push_back(f32_to_f16_sat(text.k.at(r, h)[c]));
                v.push_back(f32_to_f16_sat(text.v.at(r, h)[c]));
            }
    DeviceArray<uint16_t> keys(k), values(v);
    const auto stride = int32_t(memory.table_stride);
    const auto theirs = [&](const device::SideMemory& side) {
        std::vector<device::PageRef> table(size_t(kKvHeads) * size_t(stride));
        KVMOSAIC_CUDA_CHECK(
            cudaMemcpy(table.data(), side.pages, table.size() * sizeof(table[0]), cudaMemcpyDeviceToHost));
        return table;
    };
    const auto bytes_of = [](const uint8_t* pool, uint32_t unit, uint32_t bytes) {
        std::vector<uint8_t> page(bytes);
        KVMOSAIC_CUDA_CHECK(
            cudaMemcpy(page.data(), pool + size_t(unit) * device::kPageUnit, bytes, cudaMemcpyDeviceToHost));
        return page;
    };

    // Keys page by page, since each is planned from the queries that had been seen.
    const std::vector<device::PageRef> key_table = theirs(memory.key);
    std::vector<float> sums(size_t(kKvHeads) * size_t(dim), 0.0f);
    std::vector<int32_t> counts(size_t{kKvHeads}, 0);
    const uint32_t units = uint32_t(kKvHeads * kPages) * 700;
    DeviceArray<uint8_t> pool(size_t(units) * device::kPageUnit);
    pool.poison();
    DeviceArray<uint32_t> used(std::vector<uint32_t>(2, 0u));
    DeviceArray<device::PageRef> table(std::vector<device::PageRef>(size_t(kKvHeads) * size_t(stride)));
    int64_t seen = 0;
    for (int64_t page = 0; page < kPages; ++page) {
        for (const int64_t due = kFront + (page + 1) * 128; seen < due; ++seen)
            for (int h = 0; h < kHeads; ++h)
                for (int c = 0; c < dim; ++c) {
                    const float q = text.q.at(seen, h)[c], square = q * q;
                    sums[size_t(h / (kHeads / kKvHeads) * dim + c)] += square;
                    counts[size_t(h / (kHeads / kKvHeads))] += c == 0;
                }
        std::vector<device::EncodeJob> jobs;
        for (int h = 0; h < kKvHeads; ++h)
            jobs.push_back({(h * kRows + kFront + page * 128) * dim, 0, h, int32_t(page)});
        DeviceArray<device::EncodeJob> device_jobs(jobs);
        DeviceArray<float> query_sum(sums);
        DeviceArray<int32_t> query_count(counts);
        device::PlannedCall call;
        call.pages.rows = keys.data, call.pages.row_stride = dim, call.pages.jobs = device_jobs.data;
        call.pages.count = kKvHeads, call.pages.pool = pool.data;
        if (o.queries) call.query_sum = query_sum.data, call.query_count = query_count.data;
        if (o.mean) call.mean = moved.key_mean(0);
        call.vectors = int32_t(o.k * dim / 32), call.guard = o.guard;
        call.table = table.data, call.table_stride = stride;
        call.pool_used = used.data, call.pool_units = units, call.exhausted = used.data + 1;
        const Status status = device::encode_planes(key, Side::key, dim, call, nullptr);
        ASSERT_TRUE(status.ok()) << spec << ": " << status.message();
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
    }
    const std::vector<device::PageRef> refs = table.to_host();
    uint32_t total = 0;
    for (int h = 0; h < kKvHeads; ++h)
        for (int64_t page = 0; page < kPages; ++page) {
            const device::PageRef want = key_table[size_t(h * stride + page)], got = refs[size_t(h * stride + page)];
            ASSERT_EQ(want.tiers, got.tiers) << spec << " D " << dim << " head " << h << " page " << page;
            total += got.tiers;
            const uint32_t bytes = got.tiers * device::kPageUnit;
            ASSERT_EQ(bytes_of(memory.key.pool, want.unit, bytes), bytes_of(pool.data, got.unit, bytes))
                << spec << " D " << dim << " head " << h << " page " << page;
        }
    EXPECT_EQ(total, used.to_host()[0]);
    EXPECT_EQ(0u, used.to_host()[1]);

    const std::vector<device::PageRef> value_table = theirs(memory.value);
    const uint32_t bytes = device::page_bytes(value, Side::value, dim);
    DeviceArray<uint8_t> value_pool(size_t(bytes) * kKvHeads * kPages);
    value_pool.poison();
    std::vector<device::EncodeJob> jobs;
    for (int h = 0; h < kKvHeads; ++h)
        for (int64_t page = 0; page < kPages; ++page)
            jobs.push_back({(h * kRows + kFront + page * 128) * dim,
                            uint32_t(h * kPages + page) * bytes / device::kPageUnit, h, int32_t(page)});
    DeviceArray<device::EncodeJob> device_jobs(jobs);
    device::PlannedCall call;
    call.pages.rows = values.data, call.pages.row_stride = dim, call.pages.jobs = device_jobs.data;
    call.pages.count = int32_t(jobs.size()), call.pages.pool = value_pool.data, call.hadamard = o.hadamard;
    const Status status = device::encode_planes(value, Side::value, dim, call, nullptr);
    ASSERT_TRUE(status.ok()) << spec << ": " << status.message();
    KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
    for (int h = 0; h < kKvHeads; ++h)
        for (int64_t page = 0; page < kPages; ++page)
            ASSERT_EQ(bytes_of(memory.value.pool, value_table[size_t(h * stride + page)].unit, bytes),
                      bytes_of(value_pool.data, jobs[size_t(h * kPages + page)].unit, bytes))
                << spec << " D " << dim << " values, head " << h << " page " << page;
}

TEST(CudaEncodePlanes, PagesAreThoseOfTheCache) {
    KVMOSAIC_NEEDS_GPU();
#ifdef KVMOSAIC_CUDA_SMOKE
    const std::vector<int> dims = {128};
#else
    const std::vector<int> dims = {64, 128};
#endif
    for (const int dim : dims) {
        expect_the_caches_pages("mosaic:k=2,v=2", dim, {});
        expect_the_caches_pages("mosaic:k=2.5,v=3", dim, {.k = 2.5});
        expect_the_caches_pages("mosaic:k=3.5,v=4", dim, {.k = 3.5});
        expect_the_caches_pages("mosaic:k=1,v=2,mean=0", dim, {.mean = false, .k = 1.0});
        expect_the_caches_pages("mosaic:k=6,v=3,query=0", dim, {.queries = false, .k = 6.0});
        expect_the_caches_pages("mosaic:k=8,v=3,search=0", dim, {.k = 8.0});
        expect_the_caches_pages("mosaic:k=0.5,v=2,hadamard=0", dim, {.hadamard = false, .k = 0.5});
        expect_the_caches_pages("mosaic:k=2,v=2,guard=0.05", dim, {.k = 2.0, .guard = 0.05});
        if (HasFatalFailure()) return;
    }
}

TEST(CudaEncodePlanes, RefusesWhatItCannotEncode) {
    KVMOSAIC_NEEDS_GPU();
    auto cache = test::make(test::one_layer(kHeads, kKvHeads, 128), "mosaic:k=2,v=2.5");
    const StoreSpec key = cache->plan(0, 0, 0, Side::key).store, value = cache->plan(0, 0, 0, Side::value).store;
    device::PlannedCall call;
    EXPECT_EQ(StatusCode::unsupported, device::encode_planes(value, Side::value, 128, call, nullptr).code());
    EXPECT_EQ(StatusCode::invalid_argument, device::encode_planes(key, Side::key, 128, call, nullptr).code());
    call.vectors = key.vectors;
    EXPECT_EQ(StatusCode::unsupported, device::encode_planes(key, Side::key, 256, call, nullptr).code());
    call.pages.row_stride = 100;
    EXPECT_EQ(StatusCode::invalid_argument, device::encode_planes(key, Side::key, 128, call, nullptr).code());
}

} // namespace
} // namespace kvmosaic::testing
