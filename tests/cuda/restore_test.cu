// Rows that the GPU restores are those of the CPU's reference decoder, for every store, bit for bit before the last
// rounding.
#include "kernels/cuda/restore.h"

#include <cmath>

#include "gpu.h"
#include "kernels/cuda/transcode.h"
#include "kernels/kernels.h"
#include "unit/codec_rules.h"

namespace kvmosaic::testing {
namespace {

using cuda::bench::DeviceArray;

std::vector<uint8_t> device_bytes(const PageLayout& page, const uint8_t* host) {
    std::vector<uint8_t> out(cuda::device_page(page).bytes);
    cuda::to_device_order(page, host, out.data());
    return out;
}

void expect_same_rows(const std::string& name, const PageLayout& page, const uint8_t* host) {
    const int dim = page.dim, stride = dim + 3;
    std::vector<float> want(size_t(kPageTokens) * dim);
    kernels::reference().restore(page, host, 0, kPageTokens, want.data(), dim);
    DeviceArray<uint8_t> pool(device_bytes(page, host));
    DeviceArray<device::RestoreJob> jobs(std::vector<device::RestoreJob>{{5, 0, 0}});
    DeviceArray<float> rows(size_t(kPageTokens) * stride + 5);
    rows.poison();
    cuda::RestoreParams p = cuda::restore_params(page);
    p.pool = pool.data, p.jobs = jobs.data, p.count = 1, p.rows = rows.data, p.row_stride = stride;
    p.type = device::ElementType::f32;
    ASSERT_EQ(cudaSuccess, cuda::launch_restore(p, nullptr)) << name;
    KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
    const std::vector<float> got = rows.to_host();
    for (int t = 0; t < kPageTokens; ++t) {
        for (int c = 0; c < dim; ++c)
            ASSERT_EQ(want[size_t(t * dim + c)], got[size_t(5 + t * stride + c)])
                << name << ", token " << t << ", channel " << c;
        for (int c = dim; c < stride && 5 + t * stride + c < int(got.size()); ++c)
            ASSERT_TRUE(std::isnan(got[size_t(5 + t * stride + c)])) << name << ": wrote beside the row";
    }
}

TEST(CudaRestore, EveryStoreGivesTheReferencesRows) {
    KVMOSAIC_NEEDS_GPU();
    int cases = 0;
    for (const ParamType params : {ParamType::f16, ParamType::bf16, ParamType::f8e4m3}) {
        for (const int dim : {64, 80, 128}) {
            const std::vector<float> rows = normal_rows(dim, uint64_t(dim));
            for (const RuleCase& c : rule_cases(dim, {32, 128}, params)) {
                if (c.page.edges && c.page.groups > cuda::kMostEdges) continue;
                Page page = encoded(kernels::reference(), c, rows);
                expect_same_rows(c.name, c.page, page.bytes());
                if (HasFatalFailure()) return;
                ++cases;
            }
        }
        for (const Case& c : codec_cases({64, 128, 300}, {32, 128}, params)) {
            Page page = encoded(kernels::reference(), c.page, c.channels, normal_rows(c.page.dim, 3));
            expect_same_rows(c.name, c.page, page.bytes());
            if (HasFatalFailure()) return;
            ++cases;
        }
    }
    EXPECT_GT(cases, 500);
}

// Pages whose ladders differ, known by their codes alone; rows in the types of engines.
TEST(CudaRestore, LadderCodesAndNarrowTypes) {
    KVMOSAIC_NEEDS_GPU();
    const int dim = 128;
    const std::vector<uint8_t> widths = {16, 4, 2};
    const StoreSpec spec = tiered_spec(128);
    const std::vector<Ladder> ladders = {ladder_of({{16, 8}, {4, 32}, {2, 88}}),
                                         ladder_of({{16, 3}, {4, 21}, {2, 104}}), ladder_of({{2, 128}}),
                                         ladder_of({{4, 128}}), ladder_of({{16, 128}})};
    std::vector<uint8_t> pool;
    std::vector<device::RestoreJob> jobs;
    std::vector<float> want;
    for (size_t i = 0; i < ladders.size(); ++i) {
        const PageLayout page = layout(spec, Side::key, dim, ladders[i]);
        Page host = encoded(kernels::reference(), page, shuffled_channels(dim, i + 1), normal_rows(dim, i + 9));
        const std::vector<uint8_t> bytes = device_bytes(page, host.bytes());
        jobs.push_back(
            {int64_t(want.size()), uint32_t(pool.size() / device::kPageUnit), device::ladder_code(ladders[i], widths)});
        pool.insert(pool.end(), bytes.begin(), bytes.end());
        want.resize(want.size() + size_t(kPageTokens) * dim);
        kernels::reference().restore(page, host.bytes(), 0, kPageTokens, want.data() + jobs.back().row, dim);
    }
    DeviceArray<uint8_t> device_pool(pool);
    DeviceArray<device::RestoreJob> device_jobs(jobs);
    for (const device::ElementType type : {device::ElementType::f16, device::ElementType::bf16}) {
        DeviceArray<uint16_t> rows(want.size());
        rows.poison();
        device::RestoreCall call;
        call.pool = device_pool.data, call.jobs = device_jobs.data, call.count = int(jobs.size());
        call.rows = rows.data, call.row_stride = dim, call.type = type, call.widths = widths;
        const Status status = device::restore(spec, Side::key, dim, call, nullptr);
        ASSERT_TRUE(status.ok()) << status.message();
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<uint16_t> got = rows.to_host();
        const bool half = type == device::ElementType::f16;
        for (size_t i = 0; i < got.size(); ++i)
            ASSERT_EQ(half ? f16_to_f32(f32_to_f16_sat(want[i])) : bf16_to_f32(f32_to_bf16(want[i])),
                      half ? f16_to_f32(got[i]) : bf16_to_f32(got[i]))
                << i;
    }
    device::RestoreCall call;
    EXPECT_FALSE(device::restore(spec, Side::key, dim, call, nullptr).ok()) << "neither ladder nor widths";
}

} // namespace
} // namespace kvmosaic::testing
