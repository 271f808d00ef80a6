// Pages encoded on the GPU are, after transcoding, those of the CPU's reference encoder: every code, scale, offset, raw
// channel and map entry.
#include <cuda_bf16.h>

#include <random>

#include "gpu.h"
#include "kernels/cuda/transcode.h"
#include "kernels/kernels.h"
#include "kvmosaic/method.h"
#include "unit/codec_rules.h"
#include "unit/codec_util.h"

namespace kvmosaic::testing {
namespace {

using cuda::bench::DeviceArray;

// Rows as the raw store keeps them, with outlier channels, constant channels and one tiny one.
struct Rows {
    std::vector<uint16_t> stored;
    std::vector<float> values; // what the stored ones mean
    Rows(int pages, int dim, bool bf16, uint64_t seed) : stored(size_t(pages) * 128 * dim), values(stored.size()) {
        Random random(seed);
        for (size_t i = 0; i < stored.size(); ++i) {
            const int c = int(i) % dim;
            float x = random.normal();
            if (c % 37 == 5) x = 40.0f + 3.0f * x;
            if (c % 41 == 7) x = 2.5f;
            if (c % 43 == 9) x *= 1e-6f;
            if (i % 977 == 3) x *= 100.0f;
            stored[i] = bf16 ? f32_to_bf16_sat(x) : f32_to_f16_sat(x);
            values[i] = bf16 ? bf16_to_f32(stored[i]) : f16_to_f32(stored[i]);
        }
    }
};

void expect_same_pages(const StoreSpec& spec, Side side, int dim, bool bf16) {
    const int pages = 5;
    const PageLayout page = layout(spec, side, dim);
    const uint32_t bytes = device::page_bytes(spec, side, dim);
    const Rows rows(pages, dim, bf16, uint64_t(dim * 100 + spec.bits));
    DeviceArray<uint16_t> input(rows.stored);
    DeviceArray<uint8_t> pool(size_t(bytes) * pages);
    pool.poison();
    std::vector<device::EncodeJob> jobs;
    for (int i = 0; i < pages; ++i) // in an order of its own
        jobs.push_back({int64_t((i * 2 + 1) % pages) * 128 * dim, uint32_t(i) * bytes / device::kPageUnit, 0, 0});
    DeviceArray<device::EncodeJob> device_jobs(jobs);
    device::EncodeCall call;
    call.rows = input.data, call.row_stride = dim;
    call.type = bf16 ? device::ElementType::bf16 : device::ElementType::f16;
    call.jobs = device_jobs.data, call.count = pages, call.pool = pool.data;
    const Status status = device::encode(spec, side, dim, call, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> got = pool.to_host();
    for (int i = 0; i < pages; ++i) {
        std::vector<uint8_t> want(page.bytes, 0), back(page.bytes, 0xEE);
        kernels::reference().encode(page, nullptr, rows.values.data() + jobs[size_t(i)].row, 0, 128, want.data());
        cuda::to_host_order(page, got.data() + size_t(i) * bytes, back.data());
        ASSERT_EQ(want, back) << (side == Side::key ? "key" : "value") << " D " << dim << " bits " << int(spec.bits)
                              << " group " << spec.group << (bf16 ? " bf16" : " f16") << " page " << i;
    }
}

TEST(CudaEncode, GridPagesEqualTheReference) {
    KVMOSAIC_NEEDS_GPU();
#ifdef KVMOSAIC_CUDA_SMOKE
    const std::vector<int> dims = {128}, widths = {2};
#else
    const std::vector<int> dims = {64, 128, 256}, widths = {1, 2, 3, 4, 6, 8};
#endif
    for (const int dim : dims)
        for (const int bits : widths)
            for (const bool bf16 : {false, true}) {
                for (const int group : {32, 64, 128})
                    expect_same_pages(grid_spec(Side::key, bits, group), Side::key, dim, bf16);
                for (const int parts : {1, 2, 4})
                    if (dim / parts >= 32)
                        expect_same_pages(grid_spec(Side::value, bits, dim / parts), Side::value, dim, bf16);
            }
}

// Groups of channels of a key token and of tokens of a value channel: InnerQ's rules and TurboQuant's codebook.
TEST(CudaEncode, GroupsAlongTheDepthEqualTheReference) {
    KVMOSAIC_NEEDS_GPU();
    for (const int dim : {64, 80, 128, 256})
        for (const Side side : {Side::key, Side::value})
            for (const int bits : {2, 3, 4})
                for (const int group : {8, 32, 128})
                    for (const GridRule rule : {GridRule::asym, GridRule::symmetric, GridRule::hybrid_1bit,
                                                GridRule::hybrid_4level, GridRule::codebook_norm}) {
                        StoreSpec spec = grid_spec(side, bits, group);
                        spec.axis = side == Side::key ? Axis::channels : Axis::tokens;
                        spec.rule = rule;
                        if (rule == GridRule::codebook_norm) {
                            spec.kind = StoreKind::codebook, spec.book = book_of(bits);
                            if (side == Side::value) continue; // codebooks have groups of channels
                        }
                        if (!validate(spec, side, dim)) continue;
                        for (const bool bf16 : {false, true})
                            expect_same_pages(spec, side, dim, bf16);
                        if (HasFatalFailure()) return;
                    }
}

// Tiers without a map, with and without an order of the channels.
TEST(CudaEncode, TieredPagesEqualTheReference) {
    KVMOSAIC_NEEDS_GPU();
#ifdef KVMOSAIC_CUDA_SMOKE
    const std::vector<int> dims = {128};
#else
    const std::vector<int> dims = {64, 128, 256};
#endif
    const int pages = 4, heads = 3;
    for (const int dim : dims)
        for (const GridRule rule : {GridRule::asym, GridRule::midpoint})
            for (const bool bf16 : {false, true})
                for (const auto& tiers : std::vector<std::vector<std::pair<int, int>>>{
                         {{3, dim / 2}, {1, dim / 2}},
                         {{4, 16}, {2, dim - 16}},
                         {{8, 5}, {6, 7}, {4, 9}, {3, 11}, {2, 13}, {1, dim - 45}}}) {
                    StoreSpec spec = tiered_spec(128);
                    spec.page_map = false, spec.rule = rule;
                    Ladder ladder;
                    for (const auto& [bits, channels] : tiers)
                        ladder.push(uint8_t(bits), uint16_t(channels));
                    const PageLayout page = layout(spec, Side::key, dim, ladder);
                    const uint32_t bytes = device::page_bytes(spec, Side::key, dim, ladder);
                    const Rows rows(pages, dim, bf16, uint64_t(dim + int(tiers.size())));
                    std::vector<uint16_t> order;
                    for (int h = 0; h < heads; ++h)
                        for (int c = 0; c < dim; ++c)
                            order.push_back(uint16_t((c * (2 * h + 3) + 7 * h) % dim)); // odd factors permute
                    DeviceArray<uint16_t> input(rows.stored), device_order(order);
                    std::vector<device::EncodeJob> jobs;
                    for (int i = 0; i < pages; ++i)
                        jobs.push_back({int64_t(i) * 128 * dim, uint32_t(i) * bytes / device::kPageUnit, i % heads, 0});
                    DeviceArray<device::EncodeJob> device_jobs(jobs);
                    for (const bool ordered : {false, true}) {
                        DeviceArray<uint8_t> pool(size_t(bytes) * pages);
                        pool.poison();
                        device::EncodeCall call;
                        call.rows = input.data, call.row_stride = dim;
                        call.type = bf16 ? device::ElementType::bf16 : device::ElementType::f16;
                        call.jobs = device_jobs.data, call.count = pages, call.pool = pool.data;
                        if (ordered) call.order = device_order.data;
                        const Status status = device::encode(spec, Side::key, dim, call, nullptr, ladder);
                        ASSERT_TRUE(status.ok()) << status.message();
                        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
                        const std::vector<uint8_t> got = pool.to_host();
                        for (int i = 0; i < pages; ++i) {
                            std::vector<float> in(size_t(128) * dim);
                            for (int r = 0; r < 128; ++r)
                                for (int c = 0; c < dim; ++c)
                                    in[size_t(r * dim + c)] = rows.values[size_t(
                                        (i * 128 + r) * dim + (ordered ? order[size_t(i % heads * dim + c)] : c))];
                            std::vector<uint8_t> host(page.bytes, 0), want(bytes, 0);
                            kernels::reference().encode(page, nullptr, in.data(), 0, 128, host.data());
                            cuda::to_device_order(page, host.data(), want.data());
                            ASSERT_EQ(want, std::vector<uint8_t>(got.begin() + int64_t(i) * bytes,
                                                                 got.begin() + int64_t(i + 1) * bytes))
                                << "D " << dim << " tiers " << tiers.size() << " page " << i
                                << (bf16 ? " bf16" : " f16") << (ordered ? " ordered" : "");
                        }
                    }
                }
}

TEST(CudaEncode, RefusesWhatItCannotEncode) {
    KVMOSAIC_NEEDS_GPU();
    StoreSpec spec = grid_spec(Side::key, 2, 128);
    spec.rule = GridRule::symmetric;
    EXPECT_EQ(StatusCode::unsupported, device::encode(spec, Side::key, 128, {}, nullptr).code());
    EXPECT_EQ(StatusCode::unsupported, device::encode(grid_spec(Side::key, 2, 128), Side::key, 96, {}, nullptr).code());
}

// Scores, tiers, places and codes of MixKVQ's plan.
TEST(CudaEncode, MixPagesEqualThePlanAndTheReference) {
    KVMOSAIC_NEEDS_GPU();
    const int dim = 128, heads = 6;
    const float raw_above = 12.0f, mid_above = 1.6f;
    auto method = open_method("mixkvq:group=128");
    ASSERT_TRUE(method.ok());
    for (const bool bf16 : {false, true}) {
        const Rows rows(heads, dim, bf16, 5);
        Random random(6);
        std::vector<float> sums(size_t(heads) * dim);
        for (float& x : sums)
            x = 900.0f * random.uniform(0.2f, 2.0f);
        const std::vector<int32_t> counts = {900, 900, 0, 900, 1, 900};
        DeviceArray<uint16_t> input(rows.stored);
        DeviceArray<float> query_sum(sums);
        DeviceArray<int32_t> query_count(counts);
        const uint32_t units = 1000;
        DeviceArray<uint8_t> pool(size_t(units) * device::kPageUnit * heads);
        pool.poison();
        DeviceArray<device::PageRef> table(std::vector<device::PageRef>(size_t(heads) * 3));
        DeviceArray<uint32_t> used(std::vector<uint32_t>(2, 0u));
        std::vector<device::EncodeJob> jobs;
        for (int i = 0; i < heads; ++i)
            jobs.push_back({int64_t(i) * 128 * dim, 0, i, i % 3});
        DeviceArray<device::EncodeJob> device_jobs(jobs);
        device::PlannedCall call;
        call.pages.rows = input.data, call.pages.row_stride = dim;
        call.pages.type = bf16 ? device::ElementType::bf16 : device::ElementType::f16;
        call.pages.jobs = device_jobs.data, call.pages.count = heads, call.pages.pool = pool.data;
        call.query_sum = query_sum.data, call.query_count = query_count.data;
        call.raw_above = raw_above, call.mid_above = mid_above;
        call.table = table.data, call.table_stride = 3;
        call.pool_used = used.data, call.pool_units = units * heads, call.exhausted = used.data + 1;
        const Status status = device::encode_mix(call, nullptr);
        ASSERT_TRUE(status.ok()) << status.message();
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<uint8_t> got = pool.to_host();
        const std::vector<device::PageRef> refs = table.to_host();
        EXPECT_EQ(0u, used.to_host()[1]);
        uint32_t total = 0;
        for (int i = 0; i < heads; ++i) {
            SidePlan plan = (*method)->initial(Side::key, 0, 0, dim);
            PlanInput in;
            in.rows = rows.values.data() + jobs[size_t(i)].row, in.count = 128, in.dim = dim;
            in.query = {sums.data() + size_t(i) * dim, counts[size_t(i)]};
            (*method)->plan(in, &plan);
            const PageLayout page = layout(plan.store, Side::key, dim, plan.ladder);
            const device::PageRef ref = refs[size_t(i * 3 + i % 3)];
            EXPECT_EQ(device::ladder_code(plan.ladder, {16, 4, 2}), ref.tiers) << i;
            std::vector<uint8_t> host(page.bytes, 0), want(cuda::device_page(page).bytes);
            kernels::reference().encode(page, plan.channels.data(), in.rows, 0, 128, host.data());
            cuda::to_device_order(page, host.data(), want.data());
            total += uint32_t(want.size()) / device::kPageUnit;
            const uint8_t* at = got.data() + size_t(ref.unit) * device::kPageUnit;
            ASSERT_EQ(want, std::vector<uint8_t>(at, at + want.size())) << "head " << i << (bf16 ? " bf16" : " f16");
        }
        EXPECT_EQ(total, used.to_host()[0]);

        // A pool that is too small says so and writes nothing.
        pool.poison();
        used.copy_from({0u, 0u});
        call.pool_units = 100;
        ASSERT_TRUE(device::encode_mix(call, nullptr).ok());
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        EXPECT_EQ(1u, used.to_host()[1]);
        for (const uint8_t b : pool.to_host())
            ASSERT_EQ(0xFF, b);
    }
}

} // namespace
} // namespace kvmosaic::testing
