// Encoding of pages, and what appending a row to every sequence adds to attention.
#include "kernels/cuda/encode.h"
#include "kernels/cuda/restore.h"
#include "rows.h"
#include "workload.cuh"

namespace kvmosaic::cuda::bench {
namespace {

__global__ void fill_rows(uint32_t* x, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        const float a = 3.0f * uniform(uint32_t(i), 1) - 1.5f + ((i & 63) == 5 ? 7.0f : 0.0f);
        const float b = 2.0f * uniform(uint32_t(i), 2) - 1.0f;
        const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
        x[i] = *reinterpret_cast<const uint32_t*>(&v);
    }
}

template <class Launch>
void time_encode(const std::string& spec, int pages, int dim, int64_t bytes, const Options& options, Launch launch) {
    if (spec.find(options.filter) == std::string::npos) return;
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    std::vector<double> us;
    for (int r = 0; r < (options.quick ? 5 : 15); ++r) {
        cudaEventRecord(begin);
        launch();
        cudaEventRecord(end);
        KVMOSAIC_CUDA_CHECK(cudaEventSynchronize(end));
        float ms = 0.0f;
        cudaEventElapsedTime(&ms, begin, end);
        us.push_back(double(ms) * 1000.0);
    }
    cudaEventDestroy(begin), cudaEventDestroy(end);
    std::sort(us.begin(), us.end());
    Row row;
    row.spec = spec, row.head_dim = dim, row.median_us = us[us.size() / 2], row.min_us = us[0], row.bytes = bytes;
    row.note = std::to_string(pages) + " pages, bytes of bf16 rows";
    print(row);
}

// Back to bf16 rows; bytes are those written.
void restore_bench(const Options& options) {
    constexpr int kDim = 128, kPages = 16384;
    DeviceArray<uint16_t> rows(size_t(kPages) * 128 * kDim);
    for (const int bits : {2, 4}) {
        StoreSpec spec;
        spec.kind = StoreKind::grid, spec.bits = uint8_t(bits), spec.group = 128;
        RestoreParams p = restore_params(layout(spec, Side::key, kDim));
        DeviceArray<uint8_t> pool(size_t(kPages) * p.page.bytes);
        fill_pages<<<kPages, 128>>>(p.page, pool.data, p.page.bytes, 5);
        std::vector<device::RestoreJob> jobs;
        for (int i = 0; i < kPages; ++i)
            jobs.push_back({int64_t(i) * 128 * kDim, uint32_t(i) * (p.page.bytes / kUnit), 0});
        DeviceArray<device::RestoreJob> device_jobs(jobs);
        p.pool = pool.data, p.jobs = device_jobs.data, p.count = kPages, p.rows = rows.data, p.row_stride = kDim;
        time_encode("restore keys " + std::to_string(bits) + " bits, group 128", kPages, kDim, int64_t(rows.size) * 2,
                    options, [&] { KVMOSAIC_CUDA_CHECK(launch_restore(p, nullptr)); });
    }
}

void append_bench(const Options& options) {
    if (std::string("append").find(options.filter) == std::string::npos) return;
    const AttendInstance* instance = nullptr;
    for (const AttendInstance* row : attend_instances())
        if (std::string(row->name) == "k2_g128_v2_d128") instance = row;
    if (!instance) return;
    for (const Shape& shape : {Shape{32, 8, 8, 32768}, Shape{32, 8, 64, 4096}}) {
        // Keys packed but for half a block, values 128 behind: each append packs one value row.
        Workload w(*instance, shape, {}, {0, 64, 128});
        if (!w.configure(Config{12, 1})) continue;
        std::vector<SequenceState> states = w.host_states;
        for (SequenceState& s : states)
            s.key_before = s.key_packed, s.value_before = s.value_packed - 1;
        w.states.copy_from(states);
        const size_t n = size_t(shape.batch) * size_t(shape.kv_heads) * 128;
        DeviceArray<uint16_t> k(std::vector<uint16_t>(n, 0x3F80)), v(std::vector<uint16_t>(n, 0x3F81));
        AppendParams a;
        a.states = w.states.data, a.sequences = shape.batch, a.kv_heads = shape.kv_heads, a.k = k.data, a.v = v.data;
        a.value_bits = 2, a.value_plane = 4096, a.value_scales = w.value.scale_offset;
        a.value_zeros = w.value.zero_offset, a.value_bytes = w.value.bytes;
        a.key_scales = w.key.scale_offset, a.key_zeros = w.key.zero_offset;
        const int64_t per_set = int64_t(shape.batch) * shape.kv_heads * w.pages;
        const auto append = [&](int set, cudaStream_t stream) {
            a.memory.key = {w.key_pool.data, w.key_table.data + per_set * set, w.params.key_front, w.params.key_recent};
            a.memory.value = {w.value_pool.data, w.value_table.data + per_set * set, w.params.value_front,
                              w.params.value_recent};
            a.memory.table_stride = w.pages;
            KVMOSAIC_CUDA_CHECK(launch_append(w.key, a, stream));
        };
        Row row;
        row.spec = "kivi:bits=2,group=128", row.kernel = instance->name, row.heads = shape.heads;
        row.kv_heads = shape.kv_heads, row.head_dim = 128, row.batch = shape.batch, row.context = shape.context;
        row.query_rows = 1, row.bytes = w.bytes;
        for (const bool with : {false, true}) {
            w.before = with ? std::function<void(int, cudaStream_t)>(append) : nullptr;
            const Workload::Times t = w.time(options.quick ? 5 : 15);
            row.median_us = t.median_us, row.min_us = t.min_us;
            row.note = with ? "append and attend, raw windows" : "attend, raw windows";
            print(row);
        }
    }
}

// Pages one after the other, each with a job of its own: job i takes rows 128 i on, and head 0, page i of a table.
struct PageJobs {
    DeviceArray<uint8_t> pool;
    DeviceArray<EncodeJob> jobs;
    EncodeParams params;

    PageJobs(const uint32_t* rows, int pages, int dim, uint32_t page_bytes)
        : pool(size_t(pages) * page_bytes), jobs(make(pages, dim, page_bytes)) {
        params.rows = rows, params.row_stride = dim, params.type = ElementType::bf16, params.jobs = jobs.data;
        params.count = pages, params.pool = pool.data;
    }
    static std::vector<EncodeJob> make(int pages, int dim, uint32_t page_bytes) {
        std::vector<EncodeJob> out(static_cast<size_t>(pages));
        for (int i = 0; i < pages; ++i)
            out[size_t(i)] = {int64_t(i) * 128 * dim, uint32_t(i) * (page_bytes / kUnit), 0, i};
        return out;
    }
};

// mosaic's pages: keys about a mean that turns, planned and searched; values rotated and fitted.
void planes_bench(const uint32_t* rows, int pages, int dim, const Options& options) {
    const size_t bytes = size_t(pages) * 128 * size_t(dim) * 2;
    const int pairs = dim / 2;
    const auto turns = [&](int n, float step) {
        std::vector<float> out;
        for (int t = 0; t < n; ++t)
            for (int i = 0; i < pairs; ++i) {
                const float angle = float(t) * step * std::pow(1e4f, -float(i) / float(pairs));
                out.push_back(std::cos(angle)), out.push_back(std::sin(angle));
            }
        return out;
    };
    std::vector<uint32_t> channels;
    for (int i = 0; i < pairs; ++i)
        channels.push_back(uint32_t(i) | uint32_t(i + pairs) << 16);
    DeviceArray<float> far(turns(pages, 128.0f)), near(turns(128, 1.0f));
    DeviceArray<uint32_t> device_channels(channels), mean(std::vector<uint32_t>(size_t(pairs), 0x38003C00u));
    std::vector<float> sums(static_cast<size_t>(dim));
    for (int c = 0; c < dim; ++c)
        sums[size_t(c)] = 1000.0f * (0.05f + uniform(uint32_t(c), 3) * uniform(uint32_t(c), 4));
    DeviceArray<float> query_sum(sums);
    DeviceArray<int32_t> query_count(std::vector<int32_t>(1, 1000));
    DeviceArray<PageRef> table(static_cast<size_t>(pages));
    for (const int k : {2, 3}) {
        const uint32_t most = uint32_t(dim * 16 * k + 4 * dim + 128);
        PageJobs work(rows, pages, dim, (most + kUnit - 1) / kUnit * kUnit);
        PlanesParams p;
        p.pages = work.params;
        p.pages.query_sum = query_sum.data, p.pages.query_count = query_count.data;
        p.pages.table = table.data, p.pages.table_stride = pages;
        p.mean.mean = mean.data, p.mean.turns = far.data, p.mean.near = near.data;
        p.mean.channels = device_channels.data, p.mean.slots = pairs;
        p.vectors = p.most_vectors = k * dim / 32;
        time_encode("encode keys mosaic: k=" + std::to_string(k), pages, dim, int64_t(bytes), options,
                    [&] { KVMOSAIC_CUDA_CHECK(launch_encode_planes(dim, p, nullptr)); });
        p.bits = k, p.hadamard = true;
        time_encode("encode values mosaic: v=" + std::to_string(k), pages, dim, int64_t(bytes), options,
                    [&] { KVMOSAIC_CUDA_CHECK(launch_encode_fitted(dim, p, nullptr)); });
    }
}

} // namespace

void encode_bench(const Options& options) {
    constexpr int kDim = 128;
    for (const int pages : {65536, 512}) {
        const size_t words = size_t(pages) * 128 * kDim / 2;
        DeviceArray<uint32_t> rows(words);
        fill_rows<<<4096, 256>>>(rows.data, words);
        for (const Side side : {Side::key, Side::value})
            for (const int bits : {2, 4}) {
                StoreSpec spec;
                spec.kind = StoreKind::grid, spec.bits = uint8_t(bits), spec.group = 128;
                spec.axis = side == Side::key ? Axis::tokens : Axis::channels;
                const DevicePage page = device_page(layout(spec, side, kDim));
                PageJobs work(rows.data, pages, kDim, page.bytes);
                if (launch_encode_grid(page, work.params, nullptr) != cudaSuccess) continue; // not in this build's set
                const std::string name = std::string("encode ") + (side == Side::key ? "keys " : "values ") +
                                         std::to_string(bits) + " bits, group 128";
                time_encode(name, pages, kDim, int64_t(words) * 4, options,
                            [&] { KVMOSAIC_CUDA_CHECK(launch_encode_grid(page, work.params, nullptr)); });
            }
        for (const Side side : {Side::key, Side::value}) { // InnerQ: groups of 32 along the depth
            StoreSpec spec;
            spec.kind = StoreKind::grid, spec.group = 32, spec.bits = side == Side::key ? 3 : 2;
            spec.axis = side == Side::key ? Axis::channels : Axis::tokens;
            spec.rule = side == Side::key ? GridRule::symmetric : GridRule::hybrid_1bit;
            const DevicePage page = device_page(layout(spec, side, kDim));
            PageJobs work(rows.data, pages, kDim, page.bytes);
            time_encode(side == Side::key ? "encode keys innerq: 3 bits symmetric" : "encode values innerq: hybrid",
                        pages, kDim, int64_t(words) * 4, options,
                        [&] { KVMOSAIC_CUDA_CHECK(launch_encode_depth(page, nullptr, work.params, nullptr)); });
        }
        { // PN-Mix as the method stores it
            StoreSpec spec;
            spec.kind = StoreKind::tiered, spec.group = 128, spec.rule = GridRule::midpoint, spec.page_map = false;
            Ladder ladder;
            ladder.push(3, kDim / 2), ladder.push(1, kDim / 2);
            const DevicePage page = device_page(layout(spec, Side::key, kDim, ladder));
            std::vector<uint16_t> order(kDim);
            for (int c = 0; c < kDim; ++c)
                order[size_t(c)] = uint16_t(c * 5 % kDim);
            DeviceArray<uint16_t> device_order(order);
            PageJobs work(rows.data, pages, kDim, page.bytes);
            work.params.order = device_order.data;
            time_encode("encode keys pnmix: 64 x 3, 64 x 1, ordered", pages, kDim, int64_t(words) * 4, options,
                        [&] { KVMOSAIC_CUDA_CHECK(launch_encode_tiers(page, work.params, nullptr)); });
        }
        // Thresholds that make about 8 raw, 32 four-bit and 88 two-bit channels of these rows.
        PageJobs work(rows.data, pages, kDim, 16384);
        std::vector<float> sums(kDim);
        for (int c = 0; c < kDim; ++c)
            sums[size_t(c)] = c % 16 == 3 ? 100.0f : c % 4 == 1 ? 10.0f : 1.0f;
        DeviceArray<float> query_sum(sums);
        DeviceArray<int32_t> query_count(std::vector<int32_t>(1, 1));
        DeviceArray<PageRef> table(static_cast<size_t>(pages));
        EncodeParams& p = work.params;
        p.query_sum = query_sum.data, p.query_count = query_count.data;
        p.raw_above = 30.0f, p.mid_above = 4.0f, p.table = table.data, p.table_stride = pages;
        time_encode("encode keys mixkvq: score, tiers, codes", pages, kDim, int64_t(words) * 4, options,
                    [&] { KVMOSAIC_CUDA_CHECK(launch_encode_mix(p, nullptr)); });
        planes_bench(rows.data, pages, kDim, options);
    }
    restore_bench(options);
    append_bench(options);
}

} // namespace kvmosaic::cuda::bench
