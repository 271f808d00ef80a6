// Fused split-KV attention for many query rows: 32 or 64 columns (query rows times query heads of a KV head).
//
// Bound: arithmetic. A pair of pages of 128 x 128 and 64 columns is 2.1 million multiply-adds, 1024 clocks of an SM's
// tensor cores at their full rate, which only wgmma reaches. Codes are unpacked once for all columns: 576 AND and
// shifts and 64 KiB through shared memory, about as many clocks.
//
// Threads: two teams of eight warps. Four warps bring pages in with bulk copies, unpack their codes and write them as
// operand B; four warps multiply, each its own 8 or 16 columns: queries times the channels' scales with keys, then
// probabilities times the tokens' scales with values, both operand A in registers, so that nothing is exchanged between
// warps until the end. While one team multiplies, the other takes exponents.
//
// Shared memory, of each team: key tile, value tile, parameters of both | ring [slots]{key page, value page} | q
// [D][64]; then sums, barriers and small things of all. At the end partial sums lie in the key tile.
#pragma once

#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/wide_values.cuh"

namespace kvmosaic::cuda {

inline constexpr int kWideTeam = 128 + 32 * kUnpackers;               // threads of a team
inline constexpr int kQueryBytes = 128;                               // of a channel in the q table
inline constexpr int kUnpackRegisters = 64, kMultiplyRegisters = 192; // 128 of 512 threads in sum
inline constexpr int kWideBarriers = 8; // of a team: tiles {full, empty} x 2, then two for each slot

// H: rows of 8 columns of each multiplying warp.
template <class K, class V, int H>
struct WideLayout { // offsets in the part of a team
    static constexpr int kColumns = 32 * H;
    static constexpr uint32_t kKeyTile = (uint32_t(WideKeys<K>::kSteps) * 2 * kKeyCore + 127) / 128 * 128;
    static constexpr uint32_t kPartial = kColumns * V::D * 4;
    static constexpr uint32_t kKeyRoom = kKeyTile > kPartial ? kKeyTile : kPartial;
    static constexpr uint32_t kValueTile = kKeyRoom, kValueRoom = (16 * WideValues<V>::kCore + 127) / 128 * 128;
    static constexpr uint32_t kKeyParams = kValueTile + kValueRoom;
    static constexpr uint32_t kValueParams = kKeyParams + (WideKeys<K>::kParams + 127) / 128 * 128;
    static constexpr uint32_t kBytes = kValueParams + (WideValues<V>::kParams + 127) / 128 * 128;
};

template <class K, class V, int H>
inline SharedPlan wide_shared_plan(uint32_t key_bytes, int teams, int, int slots) {
    SharedPlan s;
    const auto aligned = [](uint32_t n) { return (n + 127u) / 128u * 128u; };
    s.key_slot = aligned(key_bytes);
    s.slot = s.key_slot + aligned(V::kBytes);
    s.team_ring = s.slot * uint32_t(slots);
    s.partial = 0, s.partial_stride = WideLayout<K, V, H>::kBytes;
    uint32_t at = s.partial_stride * uint32_t(teams);
    s.ring = at, at += s.team_ring * uint32_t(teams);
    s.q = at, at += uint32_t(teams) * K::D * kQueryBytes;
    s.ml = at, at += uint32_t(teams) * 32 * H * 8;
    s.scale = at, at += uint32_t(teams) * 32 * H * 4;
    s.barriers = at, at += uint32_t(teams) * (kWideBarriers + 2 * uint32_t(slots)) * 8;
    s.tiers = at, at += uint32_t(teams) * uint32_t(slots + 1) * 4;
    s.block = at = (at + 15) / 16 * 16, at += sizeof(BlockPlan);
    s.bytes = aligned(at);
    return s;
}

// Results of a warp's columns, or partial sums; p.log_sum alike.
template <class V, int H>
__device__ __forceinline__ void emit_wide(const AttendParams& p, const Target& to, int head, int warp, int lane,
                                          const WideState<V, H>& state) {
    const int g = lane >> 2, t = lane & 3, columns = p.rows * p.group;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const int own = 8 * H * warp + g + 8 * h;
        const float l = state.denominator(h, lane);
        float z[V::NG];
#pragma unroll
        for (int k = 0; k < V::NG; ++k)
            z[k] = state.zero(h, k, lane);
        const int64_t row = to.partial ? own : own < columns ? result_row(p, head, own) : -1;
        if (row < 0) continue;
        const float r = to.partial ? 1.0f : inverse_or_zero(l);
        if (t == 0) {
            if (to.partial)
                to.ml[own] = make_float2(l > 0.0f ? state.max[h] : kNoMaximum, l);
            else if (p.log_sum)
                p.log_sum[row] = log_sum_of(state.max[h], l);
        }
        // The words of two tiles hold four neighbouring channels.
#pragma unroll
        for (int c = 0; c < V::D / 32; ++c)
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const float fa = exp2_of(24 - wide_position(V::BITS, 2 * c)),
                            fb = exp2_of(24 - wide_position(V::BITS, 2 * c + 1)), zero = z[c * V::NG / (V::D / 32)];
                const int i = 2 * h + u;
                const float4 v =
                    make_float4(r * fmaf(state.o[4 * c][i], fa, zero), r * fmaf(state.o[4 * c + 1][i], fa, zero),
                                r * fmaf(state.o[4 * c + 2][i], fb, zero), r * fmaf(state.o[4 * c + 3][i], fb, zero));
                const int64_t at = row * V::D + 32 * c + 8 * t + 4 * u;
                if (to.partial)
                    *reinterpret_cast<float4*>(to.partial + at) = v;
                else
                    store_out(p, at, v);
            }
    }
}

// Lanes of a warp that arrive at a barrier for it. The racecheck tool does not see that a lane stands for its warp;
// built with KVMOSAIC_RACECHECK each arrives for itself, and the tool finds nothing.
#ifdef KVMOSAIC_RACECHECK
inline constexpr int kArrivals = 32;
#else
inline constexpr int kArrivals = 1;
#endif

template <class K, class V, int H>
__global__ void __launch_bounds__(2 * kWideTeam, 1) attend_wide_kernel(const __grid_constant__ AttendParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) uint8_t memory[];
    using Keys = WideKeys<K>;
    using Values = WideValues<V>;
    using Layout = WideLayout<K, V, H>;
    constexpr int kColumns = Layout::kColumns;
    const int lane = threadIdx.x & 31, teams = p.teams_per_block;
    const int index = __shfl_sync(~0u, int(threadIdx.x) >> 5, 0); // of the warp; those that multiply come first
    const bool multiplies = index < 8;
    const int team = index >> 2 & 1, warp = index & 3;
    const bool idle = team >= teams; // where shared memory holds one team only
    const uint32_t base = shared_address(memory);
    const uint32_t own = base + uint32_t(team) * p.shared.partial_stride;
    const uint32_t ring = base + p.shared.ring + uint32_t(team) * p.shared.team_ring;
    const uint32_t barriers = base + p.shared.barriers + uint32_t(team) * uint32_t(kWideBarriers + 2 * p.slots) * 8;
    // Side 0: keys, 1: values.
    const auto tile_full = [&](int side) { return barriers + uint32_t(side * 8); };
    const auto tile_empty = [&](int side) { return barriers + 16 + uint32_t(side * 8); };
    const auto page_full = [&](int slot, int side) {
        return barriers + kWideBarriers * 8 + uint32_t(slot * 16 + side * 8);
    };
    uint32_t* tiers = reinterpret_cast<uint32_t*>(memory + p.shared.tiers) + team * (p.slots + 1);
    uint32_t* tile_tiers = tiers + p.slots; // of the keys in the tile
    const TeamPlan plan = idle ? TeamPlan{} : p.teams[blockIdx.x * teams + team];

    if (!multiplies && warp == 0 && lane == 0 && !idle) {
        for (int side = 0; side < 2; ++side) {
            barrier_init(tile_full(side), kUnpackers * kArrivals), barrier_init(tile_empty(side), 4 * kArrivals);
            for (int s = 0; s < p.slots; ++s)
                barrier_init(page_full(s, side), 1);
        }
        barrier_init_fence();
    }
    for (uint32_t i = threadIdx.x; i < sizeof(BlockPlan) / 4; i += blockDim.x)
        reinterpret_cast<uint32_t*>(memory + p.shared.block)[i] =
            reinterpret_cast<const uint32_t*>(p.blocks + blockIdx.x)[i];
    __syncthreads();

    int sequence = plan.sequence, head = plan.head, item = plan.item, pages = plan.pages, items = plan.items;
    const auto next_item = [&]() { // true: the item was the last of its head
        if (++item < items) return false;
        item = 0;
        return true;
    };
    const auto next_head = [&]() {
        if (++head < p.kv_heads) return;
        head = 0, ++sequence;
        pages = p.plans[sequence].pages, items = p.plans[sequence].items;
    };
    if (!multiplies) {
        // ---- brings pages in and unpacks them ----
        give_registers<kUnpackRegisters>();
        const uint64_t policy = evict_first_policy();
        ItemBatch batch;
        int batch_base = -32, fetched = 31;
        const auto advance = [&]() {
            while (true) {
                const uint32_t later = fetched >= 31 ? 0u : batch.pages & (~0u << (fetched + 1));
                if (later) {
                    fetched = __ffs(int(later)) - 1;
                    return true;
                }
                if (batch_base + 32 >= plan.count) return false;
                batch_base += 32, fetched = -1;
                batch.load(p, plan, batch_base, lane);
            }
        };
        const auto send = [&](int s) {
            const uint32_t key = __shfl_sync(~0u, batch.key, fetched), value = __shfl_sync(~0u, batch.value, fetched);
            const uint32_t code = K::kTiered ? __shfl_sync(~0u, batch.tiers, fetched) : 0u;
            if (lane != 0) return;
            if constexpr (K::kTiered) tiers[s] = code;
            const uint32_t bytes = K::bytes(code), to = ring + uint32_t(s) * p.shared.slot;
            barrier_expect(page_full(s, 0), bytes);
            copy_bulk(to, p.key_pool + uint64_t(key) * kUnit, bytes, page_full(s, 0), policy);
            barrier_expect(page_full(s, 1), V::kBytes);
            copy_bulk(to + p.shared.key_slot, p.value_pool + uint64_t(value) * kUnit, V::kBytes, page_full(s, 1),
                      policy);
        };
        bool more = warp == 0 && advance();
        int sent = 0;
#pragma unroll 1
        for (int round = 0; round < 2; ++round) {
            const int limit = round == 0 ? min(plan.stable, p.slots) : p.slots;
            while (more && sent < limit) {
                send(sent);
                ++sent;
                more = advance();
            }
            if (round == 0) wait_for_previous_kernel(), let_next_kernel_start();
        }
        const int thread = 32 * warp + lane;
        const auto words_at = [](uint32_t page) { return [page](uint32_t i) { return load_shared4(page + 4 * i); }; };
        const auto words_of = [](const uint8_t* page) {
            return [page](uint32_t i) { return reinterpret_cast<const uint32_t*>(page)[i]; };
        };
        const auto deliver = [&](int side) {
            shared_write_fence();
            __syncwarp();
            if (lane < kArrivals) barrier_arrive(tile_full(side));
        };
        int slot = 0;
        uint32_t phase = 0, tile_phase = 1; // the first wait for an empty tile passes
        for (int left = plan.count; left > 0; --left, tile_phase ^= 1) {
            if (item < pages) {
                const uint32_t page = ring + uint32_t(slot) * p.shared.slot, values = page + p.shared.key_slot;
                barrier_wait(page_full(slot, 0), phase);
                barrier_wait(tile_empty(0), tile_phase);
                const uint32_t code = K::kTiered ? tiers[slot] : 0u;
                if (K::kTiered && warp == 0 && lane == 0) *tile_tiers = code;
                Keys::params(words_at(page), code, own + Layout::kKeyParams, thread);
                Keys::unpack(page, code, own, warp, lane);
                deliver(0);
                barrier_wait(page_full(slot, 1), phase);
                barrier_wait(tile_empty(1), tile_phase);
                Values::params(words_at(values), own + Layout::kValueParams, thread);
                Values::unpack(values, own + Layout::kValueTile, warp, lane);
                deliver(1);
                named_barrier(1 + team, 32 * kUnpackers); // all have read the pages
                if (more) send(slot), more = advance();
                if (++slot == p.slots) slot = 0, phase ^= 1;
            } else {
                const SequencePlan& of = p.plans[sequence];
                const QuarterPlace at = quarter_place(of, item - pages);
                const int64_t row = int64_t(of.state.slot) * p.kv_heads + head;
                const bool bf16 = p.raw_type == ElementType::bf16, any = at.high > at.low;
                barrier_wait(tile_empty(0), tile_phase);
                if (any && at.key_raw) {
                    unpack_raw_keys<K::D>(raw_block(at.front ? p.key_front : p.key_recent, row, of.state, at, K::D * 2),
                                          at, bf16, own, warp, lane);
                } else if (any) {
                    const PageRef ref = p.key_pages[row * p.table_stride + at.page];
                    const uint8_t* page = p.key_pool + int64_t(ref.unit) * kUnit;
                    if (K::kTiered && warp == 0 && lane == 0) *tile_tiers = ref.tiers;
                    Keys::params(words_of(page), ref.tiers, own + Layout::kKeyParams, thread);
                    Keys::unpack_quarter(page, ref.tiers, own, warp, lane, at.quarter);
                }
                deliver(0);
                barrier_wait(tile_empty(1), tile_phase);
                if (any && at.value_raw) {
                    Values::unpack_raw(
                        raw_block(at.front ? p.value_front : p.value_recent, row, of.state, at, V::D * 2), at, bf16,
                        own + Layout::kValueTile, warp, lane);
                } else if (any) {
                    const PageRef ref = p.value_pages[row * p.table_stride + at.page];
                    const uint8_t* page = p.value_pool + int64_t(ref.unit) * kUnit;
                    Values::params(words_of(page), own + Layout::kValueParams, thread);
                    Values::unpack_quarter(page, own + Layout::kValueTile, warp, lane, at.quarter);
                }
                deliver(1);
            }
            if (next_item() && left > 1) next_head();
        }
    } else {
        // ---- multiplies ----
        take_registers<kMultiplyRegisters>();
        wait_for_previous_kernel();
        let_next_kernel_start();
        const int g = lane >> 2, t = lane & 3;
        const uint32_t q = base + p.shared.q + uint32_t(team) * K::D * kQueryBytes;
        float* scale = reinterpret_cast<float*>(memory + p.shared.scale) + team * kColumns + 8 * H * warp;
        const uint64_t keys = wgmma_operand(own, kKeyCore),
                       values = wgmma_operand(own + Layout::kValueTile, Values::kCore);
        const uint32_t key_params = own + Layout::kKeyParams, value_params = own + Layout::kValueParams;
        const auto release = [&](int side) {
            __syncwarp();
            if (lane < kArrivals) barrier_arrive(tile_empty(side));
        };
        WideState<V, H> state;
        bool opening = true;
        uint32_t phase = 0;
        for (int left = plan.count; left > 0; --left, phase ^= 1) {
            if (opening) {
                opening = false;
                state.clear();
                load_queries<K::D, H, false>(
                    p, false, sequence, head, 8 * H * warp,
                    [&](int channel, int n) { return query_place(q, uint32_t(channel), uint32_t(H * warp + n)); },
                    scale, lane);
#pragma unroll
                for (int h = 0; h < H; ++h)
                    state.scale[h] = scale[g + 8 * h];
            }
            barrier_wait(tile_full(0), phase);
            if (item < pages) {
                WideScores<16> s;
                Keys::template score<H, 16>(key_params, K::kTiered ? *tile_tiers : 0u, q, keys, warp, lane, 0, s);
                wgmma_wait<0>();
                hold(s.x);
                release(0);
#pragma unroll
                for (int h = 0; h < H; ++h)
#pragma unroll
                    for (int k = 0; k < Keys::NG; ++k) {
                        const float z = Keys::NG == 1
                                            ? s.zero[2 * h]
                                            : __shfl_sync(~0u, s.zero[2 * h + (k & 1)], (lane & ~3) + (k >> 1));
                        const float add = fmaf(z, state.scale[h], -state.max[h]);
#pragma unroll
                        for (int i = 16 / Keys::NG * k; i < 16 / Keys::NG * (k + 1); ++i) {
                            const float c = Keys::scale(2 * (i >> 2 & 1) + (t >> 1)) * state.scale[h];
                            s.x[i][2 * h] = fmaf(s.x[i][2 * h], c, add);
                            s.x[i][2 * h + 1] = fmaf(s.x[i][2 * h + 1], c, add);
                        }
                    }
                uint4 pr[8];
                wide_softmax<V, H, 16>(s.x, state, pr);
                barrier_wait(tile_full(1), phase);
                wide_mix<V, H, 8>(value_params, false, 0, values, lane, pr, state);
                release(1);
            } else {
                const SequencePlan& of = p.plans[sequence];
                const QuarterPlace at = quarter_place(of, item - pages);
                if (at.high > at.low) {
                    WideScores<4> s;
                    if (at.key_raw) {
                        s.zero[0] = s.zero[1] = s.zero[2] = s.zero[3] = 0.0f;
#pragma unroll 1
                        for (int step = 0; step < K::D / 16; ++step) {
                            const int channel = 32 * (step >> 1) + 8 * (step & 1) + query_lane_place<H>(lane);
                            const uint4 a = load_query<H>(q, uint32_t(channel), warp, lane);
                            wgmma_fence();
                            wgmma<4>(s.x, a, keys + uint64_t(step) * (2 * kKeyCore / 16), step > 0);
                            wgmma_commit();
                            wgmma_wait<0>();
                        }
                    } else {
                        Keys::template score<H, 4>(key_params, K::kTiered ? *tile_tiers : 0u, q, keys, warp, lane,
                                                   at.quarter, s);
                    }
                    wgmma_wait<0>();
                    hold(s.x);
#pragma unroll
                    for (int h = 0; h < H; ++h) {
                        const int row = row_of_column(p, 8 * H * warp + g + 8 * h);
                        const int end = min(at.high, of.state.rows - (p.rows - 1 - row) - at.start);
                        const float c = (at.key_raw ? 1.0f : Keys::quarter_scale()) * state.scale[h];
                        const float add = fmaf(s.zero[2 * h], state.scale[h], -state.max[h]);
#pragma unroll
                        for (int i = 0; i < 4; ++i)
#pragma unroll
                            for (int u = 0; u < 2; ++u) {
                                const int token = token_of_score(i, t, u);
                                const float logit = fmaf(s.x[i][2 * h + u], c, add);
                                s.x[i][2 * h + u] = token >= at.low && token < end ? logit : -INFINITY;
                            }
                    }
                    uint4 pr[2];
                    wide_softmax<V, H, 4>(s.x, state, pr);
                    barrier_wait(tile_full(1), phase);
                    // Raw values are plain numbers: the powers of two come off and go on again, which is exact.
                    const auto move = [&](int sign) {
                        if (at.value_raw)
#pragma unroll
                            for (int i = 0; i < WideState<V, H>::kTiles; ++i)
#pragma unroll
                                for (int r = 0; r < 4; ++r)
                                    state.o[i][r] *= exp2_of(sign * (24 - wide_position(V::BITS, i >> 1)));
                    };
                    move(1);
                    wide_mix<V, H, 2>(value_params, at.value_raw, at.quarter, values, lane, pr, state);
                    move(-1);
                } else {
                    barrier_wait(tile_full(1), phase);
                }
                release(0), release(1);
            }
            const bool ends = next_item();
            if (ends || left == 1) {
                const bool joins = !ends || (sequence == plan.sequence && head == plan.head && plan.item > 0);
                Target to;
                if (joins && left == 1) {
                    named_barrier(3 + team, 128); // the team is done with the tile
                    to.partial = reinterpret_cast<float*>(memory + uint32_t(team) * p.shared.partial_stride);
                    to.ml = reinterpret_cast<float2*>(memory + p.shared.ml) + team * kColumns;
                } else if (joins) {
                    const int64_t w = int64_t(blockIdx.x) * teams + team;
                    to.partial = p.warp_partial + w * kColumns * V::D;
                    to.ml = p.warp_ml + w * kColumns;
                }
                emit_wide<V, H>(p, to, sequence * p.kv_heads + head, warp, lane, state);
                opening = true;
                if (left > 1) next_head();
            }
        }
        if (plan.count == 0 && lane < 8 * H && !idle)
            (reinterpret_cast<float2*>(memory + p.shared.ml) + team * kColumns)[8 * H * warp + lane] =
                make_float2(kNoMaximum, 0.0f);
    }
    __syncthreads();
    merge_block_by_threads<V, kColumns>(p, memory, *reinterpret_cast<const BlockPlan*>(memory + p.shared.block), 1);
#endif
}

} // namespace kvmosaic::cuda
