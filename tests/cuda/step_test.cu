// A decode loop on the device, one captured graph replayed for every step: advance, plan, append, attend. Its pages are
// those of the CPU, its results those of double precision over what the CPU's reference decodes.
#include <cmath>
#include <random>

#include "gpu.h"
#include "kernels/cuda/transcode.h"
#include "kernels/kernels.h"
#include "kvmosaic/method.h"
#include "unit/codec_util.h"

namespace kvmosaic::testing {
namespace {

using cuda::bench::DeviceArray;

TEST(CudaStep, CapturedDecodeLoopKeepsPagesAndResults) {
    KVMOSAIC_NEEDS_GPU();
    const int sequences = 3, kv_heads = 2, group = 4, heads = kv_heads * group, dim = 128, steps = 420, pages = 4;
    const Window key_rule{.front = 4, .keep = 0, .flush = 128}, value_rule{.front = 4, .keep = 128, .flush = 1};
    const device::RowWindow key_window{.front = 4, .keep = 0, .flush = 128};
    const device::RowWindow value_window{.front = 4, .keep = 128, .flush = 1};
    const StoreSpec key = grid_spec(Side::key, 2, 128), value = grid_spec(Side::value, 2, 128);
    const uint32_t key_bytes = device::page_bytes(key, Side::key, dim),
                   value_bytes = device::page_bytes(value, Side::value, dim);
    const float scale = 1.0f / std::sqrt(float(dim));

    // Rows of all steps: [step][sequence][kv_heads][D].
    Random random(17);
    const size_t row = size_t(sequences * kv_heads * dim), q_row = size_t(sequences * heads * dim);
    std::vector<uint16_t> k(row * steps), v(row * steps), q(q_row * steps);
    for (auto* x : {&k, &v, &q})
        for (uint16_t& y : *x)
            y = f32_to_bf16(random.normal());
    DeviceArray<uint16_t> dk(row), dv(row), dq(q_row);
    DeviceArray<float> out(q_row);

    // Sequences start with 0, 0 and 0 rows but lie in slots of their own.
    std::vector<device::SequenceState> states(sequences);
    for (int s = 0; s < sequences; ++s)
        states[size_t(s)].slot = (s + 1) % sequences;
    DeviceArray<device::SequenceState> dstates(states);
    const size_t per = size_t(sequences * kv_heads);
    DeviceArray<uint8_t> key_pool(per * pages * key_bytes), value_pool(per * pages * value_bytes);
    key_pool.poison(), value_pool.poison();
    std::vector<device::PageRef> key_refs(per * pages), value_refs(per * pages);
    for (size_t i = 0; i < key_refs.size(); ++i) {
        key_refs[i].unit = uint32_t(key_refs.size() - 1 - i) * key_bytes / device::kPageUnit;
        value_refs[i].unit = uint32_t(i) * value_bytes / device::kPageUnit;
    }
    DeviceArray<device::PageRef> key_table(key_refs), value_table(value_refs);
    DeviceArray<uint16_t> key_front(per * 32 * dim), value_front(per * 32 * dim), key_recent(per * 256 * dim),
        value_recent(per * 256 * dim);
    for (auto* x : {&key_front, &value_front, &key_recent, &value_recent})
        x->poison();

    device::LayerMemory memory;
    memory.key = {key_pool.data, key_table.data, {key_front.data, 32}, {key_recent.data, 256}};
    memory.value = {value_pool.data, value_table.data, {value_front.data, 32}, {value_recent.data, 256}};
    memory.table_stride = pages;
    device::AttentionShape shape;
    shape.heads = heads, shape.kv_heads = kv_heads, shape.dim = dim, shape.max_sequences = sequences;
    shape.key = key, shape.value = value;
    auto attention = device::Attention::create(shape);
    ASSERT_TRUE(attention.ok()) << attention.status().message();
    EXPECT_GT((*attention)->scratch_bytes(), 0);

    device::AppendCall append;
    append.memory = memory, append.states = dstates.data, append.sequences = sequences, append.kv_heads = kv_heads;
    append.dim = dim, append.k = dk.data, append.v = dv.data, append.key = key, append.value = value;
    device::AttendCall attend;
    attend.memory = memory, attend.q = dq.data, attend.out = out.data, attend.out_type = device::ElementType::f32;
    attend.scale = scale;

    cudaStream_t stream;
    KVMOSAIC_CUDA_CHECK(cudaStreamCreate(&stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    KVMOSAIC_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    ASSERT_TRUE(device::advance(dstates.data, sequences, 1, key_window, value_window, stream).ok());
    ASSERT_TRUE((*attention)->plan(dstates.data, sequences, stream).ok());
    const Status appended = device::append(append, stream);
    ASSERT_TRUE(appended.ok()) << appended.message();
    const Status attended = (*attention)->attend(attend, stream);
    ASSERT_TRUE(attended.ok()) << attended.message();
    KVMOSAIC_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    KVMOSAIC_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));

    const PageLayout key_page = layout(key, Side::key, dim), value_page = layout(value, Side::value, dim);
    const auto half = [](uint16_t bf16) { return f16_to_f32(f32_to_f16_sat(bf16_to_f32(bf16))); };
    for (int step = 0; step < steps; ++step) {
        KVMOSAIC_CUDA_CHECK(cudaMemcpy(dk.data, k.data() + row * step, row * 2, cudaMemcpyHostToDevice));
        KVMOSAIC_CUDA_CHECK(cudaMemcpy(dv.data, v.data() + row * step, row * 2, cudaMemcpyHostToDevice));
        KVMOSAIC_CUDA_CHECK(cudaMemcpy(dq.data, q.data() + q_row * step, q_row * 2, cudaMemcpyHostToDevice));
        out.poison();
        KVMOSAIC_CUDA_CHECK(cudaGraphLaunch(exec, stream));
        KVMOSAIC_CUDA_CHECK(cudaStreamSynchronize(stream));
        const bool look = step < 6 || step % 97 == 3 || (step >= 130 && step <= 134) || step + 1 == steps;
        if (!look) continue;

        const int rows = step + 1, beyond = std::max(0, rows - 4);
        const int key_packed = int(key_rule.packed_after(0, beyond)),
                  value_packed = int(value_rule.packed_after(0, beyond));
        const std::vector<float> got = out.to_host();
        const std::vector<uint8_t> keys = key_pool.to_host(), values = value_pool.to_host();
        double d2 = 0.0, n2 = 0.0;
        for (int s = 0; s < sequences; ++s)
            for (int h = 0; h < kv_heads; ++h) {
                std::vector<float> kr(size_t(rows) * dim), vr(kr.size());
                for (int t = 0; t < rows; ++t)
                    for (int c = 0; c < dim; ++c) {
                        const size_t at = row * t + size_t((s * kv_heads + h) * dim + c);
                        kr[size_t(t * dim + c)] = half(k[at]), vr[size_t(t * dim + c)] = half(v[at]);
                    }
                const size_t head = size_t(states[size_t(s)].slot * kv_heads + h) * pages;
                for (int p = 0; p * 128 < std::max(key_packed, value_packed); ++p) {
                    float* kp = kr.data() + size_t(4 + 128 * p) * dim;
                    float* vp = vr.data() + size_t(4 + 128 * p) * dim;
                    if (128 * (p + 1) <= key_packed) {
                        std::vector<uint8_t> want(key_page.bytes, 0), back(key_page.bytes);
                        kernels::reference().encode(key_page, nullptr, kp, 0, 128, want.data());
                        cuda::to_host_order(
                            key_page, keys.data() + int64_t(key_refs[head + p].unit) * device::kPageUnit, back.data());
                        ASSERT_EQ(want, back) << "key page " << p << " at step " << step;
                        kernels::reference().restore(key_page, want.data(), 0, 128, kp, dim);
                    }
                    const int n = std::min(128, value_packed - 128 * p);
                    if (n > 0) {
                        std::vector<uint8_t> want(value_page.bytes, 0), back(value_page.bytes);
                        kernels::reference().encode(value_page, nullptr, vp, 0, n, want.data());
                        cuda::to_host_order(value_page,
                                            values.data() + int64_t(value_refs[head + p].unit) * device::kPageUnit,
                                            back.data());
                        ASSERT_EQ(want, back) << "value page " << p << " at step " << step;
                        kernels::reference().restore(value_page, want.data(), 0, n, vp, dim);
                    }
                }
                for (int g = 0; g < group; ++g) {
                    const uint16_t* qh = q.data() + q_row * step + size_t((s * heads + h * group + g) * dim);
                    std::vector<double> p(static_cast<size_t>(rows)), o(dim, 0.0);
                    double m = -1e300, l = 0.0;
                    for (int t = 0; t < rows; ++t) {
                        double x = 0.0;
                        for (int c = 0; c < dim; ++c)
                            x += double(bf16_to_f32(qh[c])) * double(kr[size_t(t * dim + c)]);
                        p[size_t(t)] = x * double(scale);
                        m = std::max(m, p[size_t(t)]);
                    }
                    for (int t = 0; t < rows; ++t) {
                        const double e = std::exp(p[size_t(t)] - m);
                        l += e;
                        for (int c = 0; c < dim; ++c)
                            o[size_t(c)] += e * double(vr[size_t(t * dim + c)]);
                    }
                    for (int c = 0; c < dim; ++c) {
                        const double want = o[size_t(c)] / l;
                        const double d = double(got[size_t((s * heads + h * group + g) * dim + c)]) - want;
                        d2 += d * d, n2 += want * want;
                    }
                }
            }
        EXPECT_LT(std::sqrt(d2 / n2), 2e-3) << "step " << step;
    }
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

} // namespace
} // namespace kvmosaic::testing
