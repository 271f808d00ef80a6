// One attention call to be measured or checked: pools, tables, states, queries, plan and scratch.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "kernels/cuda/launch.h"
#include "support.cuh"

namespace kvmosaic::cuda::bench {

struct Shape {
    int heads = 32, kv_heads = 8, batch = 1, context = 32768, rows = 1;
};

// How the rows of a sequence are kept.
struct Regions {
    int front = 0;
    int key_recent = 0, value_recent = 0; // raw rows at the end
};

struct Config {
    int warps = 12; // units of the instance
    int slots = 2, blocks_per_sm = 1;
    bool early = true;
};

struct Workload {
    const AttendInstance& instance;
    Shape shape;
    DevicePage key, value;
    uint32_t key_tiers = 0;
    int sets = 1, pages = 0; // table columns
    DeviceArray<uint8_t> key_pool, value_pool, raw;
    DeviceArray<PageRef> key_table, value_table; // [sets][batch * kv_heads * pages]
    DeviceArray<SequenceState> states;
    DeviceArray<uint16_t> q;
    DeviceArray<float> out;
    std::vector<SequenceState> host_states;
    AttendParams params;
    int64_t bytes = 0; // read by one call

    DeviceArray<SequencePlan> plans;
    DeviceArray<TeamPlan> team_plans;
    DeviceArray<BlockPlan> block_plans;
    DeviceArray<int32_t> prefix, arrivals;
    DeviceArray<float> warp_partial, block_partial;
    DeviceArray<float2> warp_ml, block_ml;
    int blocks = 0;
    bool early = true;
    std::function<void(int, cudaStream_t)> before; // what runs before each call, in time()

    // contexts: rows of each sequence (empty: all shape.context).
    Workload(const AttendInstance& i, const Shape& s, const Ladder& ladder, const Regions& regions,
             std::vector<int> contexts = {}, int max_sets = 24, int64_t working_set = 1000000000)
        : instance(i), shape(s) {
        key = device_page(layout(i.key, Side::key, i.dim, ladder));
        value = device_page(layout(i.value, Side::value, i.dim));
        for (size_t w = 0; w < i.widths.size(); ++w)
            for (int t = 0; t < ladder.count; ++t)
                if (ladder.tiers[size_t(t)].bits == i.widths[w]) {
                    const int n = ladder.tiers[size_t(t)].channels;
                    const int granule = i.widths[w] == 16 ? 8 : device_granule(i.widths[w]);
                    key_tiers |= uint32_t((n + granule - 1) / granule) << (8 * w);
                }
        if (contexts.empty()) contexts.assign(size_t(s.batch), s.context);
        int64_t key_count = 0, value_count = 0, raw_bytes = 0;
        for (int b = 0; b < s.batch; ++b) {
            SequenceState state;
            state.slot = (b * 5 + 3) % s.batch; // any permutation that is not the identity
            if (std::gcd(5, s.batch) != 1) state.slot = s.batch - 1 - b;
            state.rows = contexts[size_t(b)];
            state.front = std::min(regions.front, state.rows);
            const int beyond = state.rows - state.front;
            state.key_packed = std::max(0, beyond - regions.key_recent);
            state.value_packed = std::max(0, beyond - regions.value_recent);
            if (regions.key_recent) state.key_packed = state.key_packed / 32 * 32;
            state.stable_pages = std::min(state.key_packed, state.value_packed) / kPageTokens;
            host_states.push_back(state);
            pages = std::max(pages, (std::max(state.key_packed, state.value_packed) + 127) / 128);
            key_count += (state.key_packed + 127) / 128, value_count += (state.value_packed + 127) / 128;
            raw_bytes += int64_t(2 * state.rows - state.key_packed - state.value_packed) * i.dim * 2;
        }
        pages = std::max(pages, 1);
        bytes = (key_count * key.bytes + value_count * value.bytes + raw_bytes) * s.kv_heads;
        sets = int(std::clamp<int64_t>((working_set + bytes - 1) / std::max<int64_t>(bytes, 1), 1, max_sets));
        const int64_t per_set = int64_t(s.batch) * s.kv_heads * pages, all = per_set * sets;
        key_pool = DeviceArray<uint8_t>(size_t(all * key.bytes));
        value_pool = DeviceArray<uint8_t>(size_t(all * value.bytes));
        fill_pages<<<unsigned(all), 128>>>(key, key_pool.data, key.bytes, 11);
        fill_pages<<<unsigned(all), 128>>>(value, value_pool.data, value.bytes, 12);
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        std::vector<int64_t> order(static_cast<size_t>(all));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(1));
        std::vector<PageRef> refs(size_t(all), PageRef{});
        for (size_t k = 0; k < order.size(); ++k)
            refs[k] = {uint32_t(order[k] * int64_t(key.bytes / kUnit)), key_tiers};
        key_table = DeviceArray<PageRef>(refs);
        for (size_t k = 0; k < order.size(); ++k)
            refs[k] = {uint32_t(order[order.size() - 1 - k] * int64_t(value.bytes / kUnit)), 0};
        value_table = DeviceArray<PageRef>(refs);
        states = DeviceArray<SequenceState>(host_states);

        // Raw rows: front 128 and recent ring of 512 rows for each side.
        const int front_rows = 128, ring = 512;
        const int64_t heads = int64_t(s.batch) * s.kv_heads, part = heads * i.dim * 2;
        std::vector<uint16_t> rows(size_t(part / 2 * (2 * front_rows + 2 * ring)));
        std::mt19937 rng(3);
        std::uniform_real_distribution<float> uniform_value(-1.2f, 1.2f);
        for (uint16_t& x : rows)
            x = half_bits(uniform_value(rng));
        if (regions.front == 0 && regions.key_recent == 0 && regions.value_recent == 0) rows.resize(64);
        raw = DeviceArray<uint8_t>(rows.size() * 2);
        KVMOSAIC_CUDA_CHECK(cudaMemcpy(raw.data, rows.data(), rows.size() * 2, cudaMemcpyHostToDevice));
        params.key_front = {raw.data, front_rows};
        params.value_front = {raw.data + part * front_rows, front_rows};
        params.key_recent = {raw.data + part * 2 * front_rows, ring};
        params.value_recent = {raw.data + part * (2 * front_rows + ring), ring};

        const size_t n = size_t(s.batch) * size_t(s.rows) * size_t(s.heads) * size_t(i.dim);
        std::vector<uint16_t> queries(n);
        std::normal_distribution<float> normal(0.0f, 1.5f);
        for (uint16_t& x : queries)
            x = bf16_bits(normal(rng));
        q = DeviceArray<uint16_t>(queries);
        out = DeviceArray<float>(n);
        params.key_pool = key_pool.data, params.value_pool = value_pool.data;
        params.table_stride = pages;
        params.book = book_table(i.key);
        set_tier_first(ladder, i.widths, params.tier_first);
        params.q = q.data, params.out = out.data;
        params.sequences = s.batch, params.rows = s.rows, params.heads = s.heads, params.kv_heads = s.kv_heads;
        params.scale_log2 = float(1.4426950408889634 / std::sqrt(double(i.dim)));
    }
    static uint16_t half_bits(float x) {
        const __half h = __float2half(x);
        return __half_as_ushort(h);
    }
    static uint16_t bf16_bits(float x) {
        const __nv_bfloat16 h = __float2bfloat16(x);
        return __bfloat16_as_ushort(h);
    }

    // False where the shape does not fit the configuration.
    bool configure(const Config& config) {
        const int columns = shape.rows * shape.heads / shape.kv_heads;
        const int team = (columns + instance.columns - 1) / instance.columns;
        const int warps = config.warps / team * team;
        if (warps == 0 || warps * instance.unit > instance.threads) return false;
        if (instance.unit > 32 && team > 1) return false;
        params.shared = instance.shared(instance.key_bytes(key_tiers), warps, team, config.slots);
        const uint32_t shared = params.shared.bytes;
        const uint32_t limit = shared_limit(instance), blocks_of = unsigned(config.blocks_per_sm);
        if (shared > limit / blocks_of - 1024u * unsigned(blocks_of > 1)) return false;
        KVMOSAIC_CUDA_CHECK(
            cudaFuncSetAttribute(instance.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
        cudaDeviceProp device;
        KVMOSAIC_CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
        blocks = device.multiProcessorCount * config.blocks_per_sm;
        early = config.early;
        const int teams = warps / team;
        plans = DeviceArray<SequencePlan>(size_t(shape.batch));
        team_plans = DeviceArray<TeamPlan>(size_t(blocks * teams));
        block_plans = DeviceArray<BlockPlan>(size_t(blocks));
        prefix = DeviceArray<int32_t>(size_t(shape.batch + 1));
        arrivals = DeviceArray<int32_t>(size_t(shape.batch * shape.kv_heads * columns));
        KVMOSAIC_CUDA_CHECK(cudaMemset(arrivals.data, 0, arrivals.size * 4));
        const size_t partial = size_t(blocks * warps * instance.columns), shares = size_t(blocks * 2 * columns);
        warp_partial = DeviceArray<float>(partial * size_t(instance.dim));
        warp_ml = DeviceArray<float2>(partial);
        block_partial = DeviceArray<float>(shares * size_t(instance.dim));
        block_ml = DeviceArray<float2>(shares);
        warp_partial.poison(), warp_ml.poison(), block_partial.poison(), block_ml.poison(), out.poison();
        params.plans = plans.data, params.teams = team_plans.data, params.blocks = block_plans.data;
        params.group = shape.heads / shape.kv_heads, params.group_inverse = 65536 / params.group + 1;
        params.warps_per_block = warps, params.teams_per_block = teams, params.team = team, params.slots = config.slots;
        params.warp_partial = warp_partial.data, params.warp_ml = warp_ml.data;
        params.block_partial = block_partial.data, params.block_ml = block_ml.data;
        params.arrivals = arrivals.data;
        PlanParams plan;
        plan.states = states.data, plan.plans = plans.data, plan.teams_plan = team_plans.data;
        plan.blocks_plan = block_plans.data;
        plan.prefix = prefix.data, plan.sequences = shape.batch, plan.kv_heads = shape.kv_heads, plan.rows = shape.rows;
        plan.blocks = blocks, plan.teams = teams;
        KVMOSAIC_CUDA_CHECK(launch_plan(plan, nullptr));
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        return true;
    }
    cudaError_t launch(int set, cudaStream_t stream) {
        AttendParams p = params;
        const int64_t per_set = int64_t(shape.batch) * shape.kv_heads * pages;
        p.key_pages = key_table.data + per_set * set, p.value_pages = value_table.data + per_set * set;
        return launch_attend(instance, p, blocks, early, stream);
    }

    // Relative L2 error of the heads of the first and last sequence, or of all.
    double error(bool all) {
        out.poison();
        KVMOSAIC_CUDA_CHECK(launch(0, nullptr));
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        std::vector<int> heads;
        const int per = shape.rows * shape.heads;
        for (int b = 0; b < shape.batch; ++b)
            if (all || b == 0 || b == shape.batch - 1)
                for (int h = 0; h < per; ++h)
                    if (all || h % std::max(1, per / 8) == h / std::max(1, per / 8) % std::max(1, per / 8))
                        heads.push_back(b * per + h);
        int longest = 1;
        for (const SequenceState& s : host_states)
            longest = std::max(longest, s.rows);
        DeviceArray<int> ids(heads);
        DeviceArray<double> logits(heads.size() * size_t(longest)), want(heads.size() * size_t(instance.dim));
        ReferenceInput in;
        in.attend = params;
        in.attend.key_pages = key_table.data, in.attend.value_pages = value_table.data;
        in.key = key, in.value = value, in.states = states.data, in.dim = instance.dim;
        reference_scores<<<dim3(unsigned(std::min(64, (longest + 127) / 128)), unsigned(heads.size())), 128>>>(
            in, ids.data, logits.data, longest);
        reference_mix<<<unsigned(heads.size()), 1024, 2 * 1024 * 8>>>(in, ids.data, logits.data, want.data, longest);
        KVMOSAIC_CUDA_CHECK(cudaDeviceSynchronize());
        const std::vector<double> w = want.to_host();
        const std::vector<float> got = out.to_host();
        double d2 = 0.0, n2 = 0.0;
        for (size_t i = 0; i < heads.size(); ++i)
            for (int c = 0; c < instance.dim; ++c) {
                const double x = w[i * size_t(instance.dim) + size_t(c)];
                const double e = double(got[size_t(heads[i]) * size_t(instance.dim) + size_t(c)]) - x;
                d2 += e * e, n2 += x * x;
            }
        if (!(d2 == d2)) return NAN;
        return n2 > 0.0 ? std::sqrt(d2 / n2) : std::sqrt(d2);
    }

    struct Times {
        double median_us = 0, min_us = 0;
    };
    Times time(int replays = 11) {
        cudaStream_t stream;
        KVMOSAIC_CUDA_CHECK(cudaStreamCreate(&stream));
        const int calls = std::max(sets, 12);
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        KVMOSAIC_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        for (int i = 0; i < calls; ++i) {
            if (before) before(i % sets, stream);
            KVMOSAIC_CUDA_CHECK(launch(i % sets, stream));
        }
        KVMOSAIC_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        KVMOSAIC_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
        cudaEvent_t begin, end;
        cudaEventCreate(&begin), cudaEventCreate(&end);
        std::vector<double> us;
        for (int r = 0; r < replays + 2; ++r) {
            cudaEventRecord(begin, stream);
            KVMOSAIC_CUDA_CHECK(cudaGraphLaunch(exec, stream));
            cudaEventRecord(end, stream);
            KVMOSAIC_CUDA_CHECK(cudaEventSynchronize(end));
            float ms = 0.0f;
            cudaEventElapsedTime(&ms, begin, end);
            if (r >= 2) us.push_back(double(ms) * 1000.0 / calls);
        }
        std::sort(us.begin(), us.end());
        cudaEventDestroy(begin), cudaEventDestroy(end);
        cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
        return {us[us.size() / 2], us[0]};
    }
};

} // namespace kvmosaic::cuda::bench
