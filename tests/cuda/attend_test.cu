// Every fused kernel against attention in double precision over the decoded values, in a pool whose scratch and results
// were poisoned, at page borders, ragged lengths, head ratios, query rows, and with raw rows on both ends.
#include "bench/cuda/workload.cuh"
#include "gpu.h"

namespace kvmosaic::cuda::bench {
namespace {

constexpr double kTolerance = 2e-3; // relative L2; queries, probabilities and their products with scales are fp16

Ladder ladder_for(const AttendInstance& row) {
    Ladder ladder;
    int left = row.dim;
    for (size_t i = 0; i + 1 < row.widths.size(); ++i) {
        int n = row.widths[i] == 16 ? row.dim / 16 + 1 : row.dim / 4;
        if (!row.key.page_map && row.unit > 32) n = std::max(n, device_granule(row.widths[i])); // filled
        ladder.push(row.widths[i], uint16_t(n));
        left -= n;
    }
    if (!row.widths.empty()) ladder.push(row.widths.back(), uint16_t(left));
    return ladder;
}

struct Case {
    const char* name;
    Shape shape;
    Regions regions;
    std::vector<int> contexts;
};

std::vector<Case> cases() {
    return {
        {"one page", {8, 8, 2, 128}, {}, {}},
        {"two pages", {8, 2, 2, 256}, {}, {}},
        {"many blocks a head", {4, 1, 1, 20480}, {}, {}},
        {"many heads a team", {8, 8, 40, 384}, {}, {}},
        {"ragged, lengths of 0", {8, 4, 6, 0}, {4, 128, 128}, {0, 1, 5, 130, 1000, 0}},
        {"page borders", {8, 2, 9, 0}, {32, 33, 129}, {31, 32, 33, 127, 128, 129, 160, 161, 1537}},
        {"front alone", {8, 2, 1, 0}, {64, 0, 0}, {50}},
        {"values behind keys", {8, 2, 3, 0}, {0, 0, 128}, {640, 701, 1000}},
        {"keys behind values", {8, 2, 3, 0}, {0, 96, 0}, {640, 700, 1000}},
        {"group 3", {6, 2, 2, 900}, {4, 128, 128}, {}},
        {"group 5", {5, 1, 2, 900}, {4, 128, 128}, {}},
        {"group 6", {6, 1, 2, 900}, {4, 128, 128}, {}},
        {"group 7", {7, 1, 2, 900}, {4, 128, 128}, {}},
        {"group 8", {8, 1, 2, 900}, {4, 128, 128}, {}},
        {"group 12", {12, 1, 2, 900}, {4, 128, 128}, {}},
        {"group 16", {16, 1, 2, 900}, {4, 128, 128}, {}},
    };
}

class Attend : public testing::TestWithParam<const AttendInstance*> {};

TEST_P(Attend, AgreesWithDoublePrecision) {
    KVMOSAIC_NEEDS_GPU();
    const AttendInstance& row = *GetParam();
    for (const Case& c : cases())
        for (const int rows : {1, 2, 4, 16}) {
            Case at = c;
            at.shape.rows = rows;
            for (int& x : at.contexts) // every query row is a row of the sequence
                if (x > 0) x = std::max(x, rows);
            if (at.shape.context > 0 || rows == 1 || at.contexts[0] > 0) {
                Workload w(row, at.shape, ladder_for(row), at.regions, at.contexts, 1);
                const bool wide = row.unit > 32;
                for (const Config config :
                     {Config{wide ? 3 : 12, 1}, Config{wide ? 2 : 8, 2}, Config{wide ? 1 : 4, 3}}) {
                    if (!w.configure(config)) continue;
                    const double first = w.error(true), second = w.error(true);
                    EXPECT_LT(first, kTolerance) << at.name << ", rows " << rows << ", warps " << config.warps;
                    EXPECT_EQ(first, second) << "not repeatable: " << at.name << ", rows " << rows;
                }
            }
        }
}

TEST_P(Attend, ReadsBeyondFourGigabytes) {
    KVMOSAIC_NEEDS_GPU();
    const AttendInstance& row = *GetParam();
    Workload w(row, {8, 2, 2, 640}, ladder_for(row), {}, {}, 1);
    const int64_t shift = (int64_t(1) << 32) + (int64_t(1) << 30);
    DeviceArray<uint8_t> far(size_t(shift) + w.key_pool.size + w.value_pool.size);
    const int64_t values = shift + int64_t(w.key_pool.size);
    KVMOSAIC_CUDA_CHECK(cudaMemcpy(far.data + shift, w.key_pool.data, w.key_pool.size, cudaMemcpyDeviceToDevice));
    KVMOSAIC_CUDA_CHECK(cudaMemcpy(far.data + values, w.value_pool.data, w.value_pool.size, cudaMemcpyDeviceToDevice));
    const auto moved = [](const DeviceArray<PageRef>& table, int64_t by) {
        std::vector<PageRef> refs = table.to_host();
        for (PageRef& r : refs)
            r.unit += uint32_t(by / kUnit);
        return refs;
    };
    w.key_table.copy_from(moved(w.key_table, shift));
    w.value_table.copy_from(moved(w.value_table, values));
    w.params.key_pool = w.params.value_pool = far.data;
    ASSERT_TRUE(w.configure(Config{8, 1}) || w.configure(Config{4, 1}) || w.configure(Config{1, 1}));
    EXPECT_LT(w.error(true), kTolerance);
}

// Pages in planes come from real caches (device_cache_test.cu).
std::vector<const AttendInstance*> of_random_pages() {
    std::vector<const AttendInstance*> rows;
    for (const AttendInstance* row : attend_instances())
        if (!in_planes(row->key.rule)) rows.push_back(row);
    return rows;
}
INSTANTIATE_TEST_SUITE_P(Kernels, Attend, testing::ValuesIn(of_random_pages()),
                         [](const auto& info) { return std::string(info.param->name); });

// What a kernel assumes about its pages is what the page order says.
TEST(AttendTable, PagesAreThoseOfThePageOrder) {
    ASSERT_FALSE(attend_instances().empty());
    for (const AttendInstance* row : attend_instances()) {
        EXPECT_EQ(device_page(layout(row->value, Side::value, row->dim)).bytes, row->value_bytes) << row->name;
        if (in_planes(row->key.rule)) continue; // their references count units
        if (row->widths.empty()) {
            EXPECT_EQ(device_page(layout(row->key, Side::key, row->dim)).bytes, row->key_bytes(0)) << row->name;
            continue;
        }
        const Ladder ladder = ladder_for(*row);
        EXPECT_EQ(device_page(layout(row->key, Side::key, row->dim, ladder)).bytes,
                  row->key_bytes(device::ladder_code(ladder, row->widths)))
            << row->name;
    }
}

} // namespace
} // namespace kvmosaic::cuda::bench
