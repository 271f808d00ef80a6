// Fused split-KV decode attention over packed pages.
//
// Bound: bytes. A pair of 2-bit pages of 128 x 128 (9216 bytes) must pass every 480 clocks of an SM (4.7 TB/s on 132
// SMs at 1.87 GHz). Measured, two warps a scheduler: 2460 clocks of a scheduler a pair by fp16 products, of which 144
// HMMA with their ANDs are 1400 (9.7 each, bench/ladder/cuda-attend.md); by integer products (limbs.cuh, up to 4
// columns) 1980, and with three warps the bytes are what is waited for. Below about 100 MB a call the fixed costs count
// as much: start, first page, merge.
//
// Threads: a block of up to 16 warps on each SM. A *team* (one warp; two or four where the query rows of a KV head
// fill more columns than a warp can keep) walks a contiguous range of items. Its leader keeps `slots` page pairs in
// flight with bulk copies; no block-wide barrier until the end. Columns are query rows times query heads of one KV
// head: 8 * NT in a warp.
//
// Shared memory: ring [teams][slots]{key page, value page} | q tables [warps][D][8 NT] fp16 | partial sums [warps]
// where teams are wider than one warp, else in the ring | barriers and small things.
//
// Merge: a head that lies in one team is written by it. Others: partial sums of teams meet in shared memory, those of
// blocks in global scratch, and the last block to arrive adds them up in a fixed order.
#pragma once

#include "kernels/cuda/attend.h"
#include "kernels/cuda/limbs.cuh"
#include "kernels/cuda/merge_threads.cuh"
#include "kernels/cuda/quarter.cuh"

namespace kvmosaic::cuda {

inline constexpr float kLargestP = 16.0f; // p beyond it moves the running maximum
inline constexpr float kNoMaximum = -1e30f;

// References of the next items of a team, one in each lane: lane i holds item `base + i` of the team's range.
struct ItemBatch {
    uint32_t key = 0, value = 0, tiers = 0, page = 0; // of a page item
    uint32_t pages = 0;                               // lanes whose item is a page

    // sequence .. items: of the team's first item.
    __device__ __forceinline__ void load(const AttendParams& p, const TeamPlan& plan, int base, int lane) {
        int sequence = plan.sequence, slot = plan.slot, count = plan.pages, items = plan.items;
        int item = plan.item + base + lane;
        bool live = base + lane < plan.count;
        int head = plan.head;
        if (live && item >= items) {
            // Behind the first head. Sequences differ in length, so this walks them.
            head += item / items, item %= items;
            while (head >= p.kv_heads) {
                item += (head - p.kv_heads) * items, head = 0, ++sequence;
                const SequencePlan& next = p.plans[sequence];
                items = next.items, count = next.pages, slot = next.state.slot;
                head += item / items, item %= items;
            }
        }
        live = live && item < count;
        if (live) {
            const int64_t at = int64_t(slot * p.kv_heads + head) * p.table_stride + item;
            const PageRef k = p.key_pages[at];
            key = k.unit, tiers = k.tiers, value = p.value_pages[at].unit, page = uint32_t(item);
        }
        pages = __ballot_sync(~0u, live);
    }
};

template <class K, class V, int NT>
inline SharedPlan shared_plan(uint32_t key_bytes, int warps, int team, int slots) {
    SharedPlan s;
    const auto aligned = [](uint32_t n) { return (n + 127u) / 128u * 128u; };
    s.key_slot = aligned(key_bytes) + K::kTurnBytes;
    s.slot = s.key_slot + aligned(V::kBytes);
    s.team_ring = s.slot * uint32_t(slots);
    s.q = s.team_ring * uint32_t(warps / team);
    uint32_t at = s.q + uint32_t(warps) * K::D * 16 * NT;
    const uint32_t partial = 8 * NT * V::D * 4;
    if (team == 1 && s.team_ring >= partial) {
        s.partial = 0, s.partial_stride = s.team_ring; // the ring is idle by then
    } else {
        s.partial = at, s.partial_stride = partial;
        at += partial * uint32_t(warps);
    }
    s.ml = at, at += uint32_t(warps) * 8 * NT * 8;
    s.scale = at, at += uint32_t(warps) * 8 * NT * 4;
    s.barriers = at, at += uint32_t(warps / team) * uint32_t(slots) * 32;
    s.tiers = at, at += uint32_t(warps / team) * uint32_t(slots) * 4;
    s.block = at = (at + 15) / 16 * 16, at += sizeof(BlockPlan);
    s.ones = at = (at + 15) / 16 * 16, at += kOnesBytes;
    s.scratch = at = (at + 15) / 16 * 16, s.scratch_stride = K::kScratch, at += uint32_t(warps) * K::kScratch;
    s.tables = at, at += K::kTables;
    s.bytes = aligned(at);
    return s;
}

// q of one (sequence, KV head) into the warp's table, each column divided by the power of two of its largest value.
// place(channel, n): address of the 16 bytes of a channel and 8 columns. packed: those for packed keys, where they
// differ.
template <int D, int NT, bool LIMBS, class Place>
__device__ __forceinline__ void load_queries(const AttendParams& p, bool packed, int sequence, int head,
                                             int first_column, Place place, float* scale, int lane) {
    // A lane has four neighbouring channels out of 16 of one column: two words of two 8 x 8 matrices, which are stored
    // transposed.
    constexpr int kParts = D / 16;
    const int columns = p.rows * p.group, t = lane & 3;
    packed = packed && p.q_packed;
    const bool bf16 = !packed && p.q_type == ElementType::bf16;
    const uint16_t* q = static_cast<const uint16_t*>(packed ? p.q_packed : p.q) +
                        (int64_t(sequence) * p.rows * p.heads + head * p.group) * D + 4 * t;
    const int stored = 4 * (lane >> 1 & 3) + 2 * (lane >> 3 & 1) + (lane & 1) + 16 * (lane >> 4); // of 32 channels
#pragma unroll 1
    for (int n = 0; n < NT; ++n) {
        const int column = first_column + (LIMBS ? 4 * n + (lane >> 3) : 8 * n + (lane >> 2)),
                  row = row_of_column(p, column);
        const uint2* from = reinterpret_cast<const uint2*>(q + (row * (p.heads - p.group) + column) * D);
        uint2 w[kParts];
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            w[i] = column < columns ? from[4 * i] : make_uint2(0u, 0u);
        // The largest magnitude's bits; those of either type grow with it.
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            top = __vmaxu2(top, __vmaxu2(w[i].x & 0x7FFF7FFFu, w[i].y & 0x7FFF7FFFu));
#pragma unroll
        for (int s = 1; s < 4; s <<= 1)
            top = __vmaxu2(top, __shfl_xor_sync(~0u, top, s));
        const uint32_t bits = max(top & 0xFFFFu, top >> 16);
        int exponent = bf16 ? min(max(int(bits >> 7), 14), 240) : int(bits >> 10) + 112; // biased, of fp32
        if (bits == 0) exponent = 127;
        const float down = __uint_as_float(uint32_t(254 - exponent) << 23);
        if (t == 0) scale[8 * n + (lane >> 2)] = p.scale_log2 * __uint_as_float(uint32_t(exponent) << 23);
        const auto scaled_pair = [&](uint32_t v) {
            const float2 f = bf16 ? unpack_bf162(v) : unpack_half2(v);
            return pack_half2(f.x * down, f.y * down);
        };
#pragma unroll
        for (int i = 0; i < kParts; i += 2)
            stmatrix4_trans(place(16 * i + stored, n), scaled_pair(w[i].x), scaled_pair(w[i].y),
                            scaled_pair(w[i + 1].x), scaled_pair(w[i + 1].y));
    }
    __syncwarp();
}

// exp2 of the logits as operands for the mix; moves the maximum when it has grown too far. LIMBS: a lane's two columns
// are the same query column, and x[.][.][0] and [2] are read.
// `fresh`: bit 2n + i of a column that has no maximum yet; until it has one it counts from 0.
template <int TILES, int D, int NT, bool LIMBS>
__device__ __forceinline__ void softmax(float (&x)[TILES][NT][4], Columns<NT>& col, uint32_t& fresh,
                                        MixState<D, NT>& state, uint32_t (&p)[TILES][NT][2]) {
    const auto most = [&](int n, float& m0, float& m1) {
        m0 = m1 = kNoMaximum;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
            m0 = fmaxf(m0, fmaxf(x[j][n][0], x[j][n][2])), m1 = LIMBS ? m1 : fmaxf(m1, fmaxf(x[j][n][1], x[j][n][3]));
#pragma unroll
        for (int s = 4; s < 32; s <<= 1) {
            m0 = fmaxf(m0, __shfl_xor_sync(~0u, m0, s));
            if (!LIMBS) m1 = fmaxf(m1, __shfl_xor_sync(~0u, m1, s));
        }
        if (LIMBS) m1 = m0;
    };
    if (__any_sync(~0u, fresh != 0)) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float m[2];
            most(n, m[0], m[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t bit = 1u << (2 * n + i);
                if (!(fresh & bit) || m[i] == kNoMaximum) continue; // nothing of it visible so far
                fresh &= ~bit;
                col.max[n][i] = m[i];
#pragma unroll
                for (int j = 0; j < TILES; ++j)
                    x[j][n][i] -= m[i], x[j][n][i + 2] -= m[i];
            }
        }
    }
    uint32_t top = 0;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float a = fast_exp2(x[j][n][0]), b = fast_exp2(x[j][n][2]);
            p[j][n][0] = pack_half2(a, LIMBS ? a : fast_exp2(x[j][n][1]));
            p[j][n][1] = pack_half2(b, LIMBS ? b : fast_exp2(x[j][n][3]));
            top = hmax2(top, hmax2(p[j][n][0], p[j][n][1]));
        }
    const float2 tops = unpack_half2(top);
    if (__any_sync(~0u, fmaxf(tops.x, tops.y) > kLargestP)) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float m0, m1;
            most(n, m0, m1);
            m0 = fmaxf(m0, 0.0f), m1 = fmaxf(m1, 0.0f);
            col.max[n][0] += m0, col.max[n][1] += m1;
            state.rescale(n, fast_exp2(-m0), fast_exp2(-m1));
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const float a = fast_exp2(x[j][n][0] - m0), b = fast_exp2(x[j][n][2] - m0);
                p[j][n][0] = pack_half2(a, LIMBS ? a : fast_exp2(x[j][n][1] - m1));
                p[j][n][1] = pack_half2(b, LIMBS ? b : fast_exp2(x[j][n][3] - m1));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int n = 0; n < NT; ++n)
            p[j][n][0] = transpose8(p[j][n][0]), p[j][n][1] = transpose8(p[j][n][1]);
}

template <class K, class V, int NT, bool LIMBS>
__device__ __forceinline__ void attend_quarter(const AttendParams& p, const SequencePlan& plan, const QuarterPlace& at,
                                               const KeySpot& spot, int kv_head, int first_column, uint32_t q, int lane,
                                               Columns<NT>& col, uint32_t& fresh, MixState<V::D, NT>& state) {
    if (at.high <= at.low) return;
    const int64_t head = int64_t(plan.state.slot) * p.kv_heads + kv_head;
    float x[2][NT][4] = {};
    if (at.key_raw) {
        score_raw<K::D, NT>(raw_block(at.front ? p.key_front : p.key_recent, head, plan.state, at, K::D * 2), at,
                            p.raw_type == ElementType::bf16, q, lane, x);
    } else {
        const PageRef ref = p.key_pages[head * p.table_stride + at.page];
        K::template score_quarter<NT>(p, p.key_pool + int64_t(ref.unit) * kUnit, ref.tiers, q, lane, at.quarter, x,
                                      {at.page, 0, spot.scratch, spot.tables});
    }
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = first_column + (LIMBS ? 4 * n + t : 8 * n + 2 * t + (i & 1));
            const int row = row_of_column(p, column);
            const int end = min(at.high, plan.state.rows - (p.rows - 1 - row) - at.start);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int token = 16 * j + place_of_row(g + 8 * (i >> 1));
                const float logit = fmaf(x[j][n][i], col.scale[n][i & 1], -col.max[n][i & 1]);
                x[j][n][i] = token >= at.low && token < end ? logit : -INFINITY;
            }
        }
    uint32_t pr[2][NT][2];
    softmax<2, V::D, NT, LIMBS>(x, col, fresh, state, pr);
    float zero[NT][2];
    if constexpr (LIMBS) open_columns(state, zero);
    if (at.value_raw) {
        mix_raw<V, NT>(raw_block(at.front ? p.value_front : p.value_recent, head, plan.state, at, V::D * 2), at,
                       p.raw_type == ElementType::bf16, lane, pr, state);
    } else {
        const PageRef ref = p.value_pages[head * p.table_stride + at.page];
        V::template mix_quarter<NT>(p.value_pool + int64_t(ref.unit) * kUnit, spot.scratch + K::kValueScales, lane,
                                    at.quarter, pr, state);
    }
    if constexpr (LIMBS) close_columns(state, zero);
}

// LIMBS: packed pages by integer products, 4 NT columns a warp (limbs.cuh).
template <class K, class V, int NT, int THREADS, bool LIMBS>
__global__ void __launch_bounds__(THREADS, 1) attend_kernel(const __grid_constant__ AttendParams p) {
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr int kColumns = (LIMBS ? 4 : 8) * NT; // of a warp
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int width = p.team; // of a team
    const int team = width == 1 ? warp : warp / width, part = warp - team * width;
    const int teams = p.teams_per_block;
    const uint32_t base = shared_address(memory);
    const uint32_t barriers = base + p.shared.barriers + uint32_t(team * p.slots) * 32;
    // Side 0: keys, 1: values. Each slot has {full, full, empty, empty}.
    const auto full = [&](int slot, int side) { return barriers + uint32_t(slot * 32 + side * 8); };
    const auto empty = [&](int slot, int side) { return barriers + uint32_t(slot * 32 + side * 8 + 16); };
    const uint64_t policy = evict_first_policy();
    const auto copy_key = [&](uint32_t bar, uint32_t to, uint32_t unit, uint32_t tiers, uint32_t number) {
        const uint32_t bytes = K::bytes(tiers);
        if (K::kMean && p.mean.mean) { // and what turns the mean there
            const uint32_t turn = uint32_t(p.mean.slots) * 8;
            barrier_expect(bar, bytes + turn);
            copy_bulk(to + p.shared.key_slot - K::kTurnBytes,
                      static_cast<const uint8_t*>(p.mean.turns) + uint64_t(number) * turn, turn, bar, policy);
        } else {
            barrier_expect(bar, bytes);
        }
        copy_bulk(to, p.key_pool + uint64_t(unit) * kUnit, bytes, bar, policy);
    };
    const auto copy_value = [&](uint32_t bar, uint32_t to, uint32_t unit) {
        barrier_expect(bar, V::kBytes);
        copy_bulk(to, p.value_pool + uint64_t(unit) * kUnit, V::kBytes, bar, policy);
    };
    uint32_t* slot_tiers = reinterpret_cast<uint32_t*>(memory + p.shared.tiers) + team * p.slots;
    const uint32_t ring = base + uint32_t(team) * p.shared.team_ring;
    const uint32_t q = base + p.shared.q + uint32_t(warp * K::D * 16 * NT);
    float* scale = reinterpret_cast<float*>(memory + p.shared.scale) + warp * 8 * NT;
    const int first_column = part * kColumns;
    const TeamPlan plan = p.teams[blockIdx.x * teams + team];

    if (part == 0 && lane < p.slots) {
        barrier_init(full(lane, 0), 1), barrier_init(full(lane, 1), 1);
        if (width > 1) barrier_init(empty(lane, 0), uint32_t(width)), barrier_init(empty(lane, 1), uint32_t(width));
        barrier_init_fence();
    }
    __syncwarp();
    ItemBatch batch;                    // the leader's: items [batch_base, batch_base + 32) of its range
    int batch_base = -32, fetched = 31; // item of the batch that is sent next
    // Moves to the next page to send; false when there is none.
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
    const auto send_key = [&](int s) {
        const uint32_t unit = __shfl_sync(~0u, batch.key, fetched);
        const uint32_t tiers = K::kTiered ? __shfl_sync(~0u, batch.tiers, fetched) : 0u;
        const uint32_t number = K::kMean ? __shfl_sync(~0u, batch.page, fetched) : 0u;
        if (lane == 0) {
            if constexpr (K::kTiered) slot_tiers[s] = tiers;
            copy_key(full(s, 0), ring + uint32_t(s) * p.shared.slot, unit, tiers, number);
        }
    };
    const auto send_value = [&](int s) {
        const uint32_t unit = __shfl_sync(~0u, batch.value, fetched);
        if (lane == 0) copy_value(full(s, 1), ring + uint32_t(s) * p.shared.slot + p.shared.key_slot, unit);
    };
    bool more = part == 0 && advance(); // a page is left to send; it is `fetched`
    int sent = 0;
    // First what no kernel still running can be writing, then the rest.
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        const int limit = round == 0 ? min(plan.stable, p.slots) : p.slots;
        while (more && sent < limit) {
            send_key(sent), send_value(sent);
            ++sent;
            more = advance();
        }
        if (round == 1) break;
        for (uint32_t i = threadIdx.x; i < kOnesBytes / 4; i += blockDim.x)
            reinterpret_cast<uint32_t*>(memory + p.shared.ones)[i] = kOne2;
        if constexpr (K::kMean) K::load_tables(p, memory + p.shared.tables);
        for (uint32_t i = threadIdx.x; i < sizeof(BlockPlan) / 4; i += blockDim.x)
            reinterpret_cast<uint32_t*>(memory + p.shared.block)[i] =
                reinterpret_cast<const uint32_t*>(p.blocks + blockIdx.x)[i];
        __syncthreads();
        wait_for_previous_kernel();
        let_next_kernel_start();
    }

    Columns<NT> col;
    MixState<V::D, NT> state;
    uint32_t fresh = 0;
    bool opening = true; // the next item opens a head
    int loaded = 1;      // queries in the table: 1 for packed keys, 0 for raw ones where they differ
    int sequence = plan.sequence, head = plan.head, item = plan.item, pages = plan.pages, items = plan.items;
    int slot = 0;
    uint32_t phase = 0;
    KeySpot spot;
    spot.scratch = base + p.shared.scratch + uint32_t(warp) * p.shared.scratch_stride;
    spot.tables = base + p.shared.tables;
    bool rotated = false, untouched = true; // the sums are in the basis of packed values; nothing is in them

    for (int left = plan.count; left > 0; --left) {
        QuarterPlace place;
        if (K::kBasis && item >= pages) place = quarter_place(p.plans[sequence], item - pages);
        const int wanted = K::kBasis && p.q_packed && item >= pages && place.key_raw ? 0 : 1;
        if (opening || (K::kBasis && loaded != wanted)) {
            if (K::kBasis) __syncwarp();
            load_queries<K::D, NT, LIMBS>(
                p, K::kBasis && wanted, sequence, head, first_column,
                [q](int channel, int n) { return q + uint32_t(channel * 16 * NT + 16 * n); }, scale, lane);
            const int t = lane & 3;
#pragma unroll
            for (int n = 0; n < NT; ++n)
                col.scale[n][0] = scale[8 * n + 2 * t], col.scale[n][1] = scale[8 * n + 2 * t + 1];
            loaded = wanted;
            if constexpr (K::kMean)
                K::open(p, int64_t(p.plans[sequence].state.slot) * p.kv_heads + head, q, spot, lane);
        }
        if (opening) {
            opening = false;
#pragma unroll
            for (int n = 0; n < NT; ++n)
                col.max[n][0] = col.max[n][1] = 0.0f;
            fresh = (1u << (2 * NT)) - 1;
            state.clear();
            untouched = true;
        }
        if constexpr (V::kRotated) {
            if (item >= pages) place = quarter_place(p.plans[sequence], item - pages);
            const bool packed = p.value_hadamard && (item < pages || !place.value_raw);
            if (rotated != packed && !untouched) V::turn(state, lane);
            rotated = packed, untouched = false;
        }
        if (item < pages) {
            spot.turn = ring + uint32_t(slot) * p.shared.slot + p.shared.key_slot - K::kTurnBytes;
            const auto release = [&](int side) {
                __syncwarp();
                if (width > 1) {
                    if (lane == 0) barrier_arrive(empty(slot, side));
                    if (more) barrier_wait(empty(slot, side), phase);
                }
                if (more) {
                    if (side == 0)
                        send_key(slot);
                    else
                        send_value(slot);
                }
            };
            float x[8][NT][4];
            const uint32_t page = ring + uint32_t(slot) * p.shared.slot;
            barrier_wait(full(slot, 0), phase);
            if constexpr (LIMBS && kScoresByLimbs<K>)
                score_limbs<K, NT>(page, q, lane, col, x);
            else
                K::template score<NT>(p, page, K::kTiered ? slot_tiers[slot] : 0u, q, lane, col, x, spot);
            release(0);
            uint32_t pr[8][NT][2];
            softmax<8, V::D, NT, LIMBS>(x, col, fresh, state, pr);
            barrier_wait(full(slot, 1), phase);
            if constexpr (LIMBS)
                mix_limbs<V, NT>(page + p.shared.key_slot, base + p.shared.ones, lane, pr, state);
            else
                V::template mix<NT>(page + p.shared.key_slot, base + p.shared.ones, spot.scratch + K::kValueScales,
                                    lane, pr, state);
            release(1);
            if (more) more = advance();
            if (++slot == p.slots) slot = 0, phase ^= 1;
        } else {
            if (!K::kBasis && !V::kRotated) place = quarter_place(p.plans[sequence], item - pages);
            attend_quarter<K, V, NT, LIMBS>(p, p.plans[sequence], place, spot, head, first_column, q, lane, col, fresh,
                                            state);
        }
        const bool ends = ++item == items;
        if (ends || left == 1) {
            if constexpr (V::kRotated)
                if (rotated) V::turn(state, lane), rotated = false;
            if constexpr (LIMBS) finish_offsets(state);
            const bool joins = !ends || (sequence == plan.sequence && head == plan.head && plan.item > 0);
            Target to;
            if (joins && left == 1) {
                to.partial =
                    reinterpret_cast<float*>(memory + p.shared.partial + uint32_t(warp) * p.shared.partial_stride);
                to.ml = reinterpret_cast<float2*>(memory + p.shared.ml) + warp * kColumns;
            } else if (joins) {
                const int64_t w = int64_t(blockIdx.x) * p.warps_per_block + warp;
                to.partial = p.warp_partial + w * kColumns * V::D;
                to.ml = p.warp_ml + w * kColumns;
            }
            emit<V, NT, LIMBS>(p, to, sequence * p.kv_heads + head, first_column, col, state, lane);
            item = 0, opening = true;
            if (left > 1 && ++head == p.kv_heads) {
                head = 0, ++sequence;
                pages = p.plans[sequence].pages, items = p.plans[sequence].items;
            }
        }
    }
    if (plan.count == 0)
        for (int i = lane; i < kColumns; i += 32)
            (reinterpret_cast<float2*>(memory + p.shared.ml) + warp * kColumns)[i] = make_float2(kNoMaximum, 0.0f);
    BlockPlan& block = *reinterpret_cast<BlockPlan*>(memory + p.shared.block);
    if constexpr (kColumns > 8) {
        __syncthreads();
        merge_block_by_threads<V, kColumns>(p, memory, block, width);
    } else {
        const int order = __shfl_sync(~0u, lane == 0 ? atomicAdd(&block.finished, 1) : 0, 0), warps = blockDim.x >> 5;
        Merger who = {order, warps, false};
        if (warps > 1) who = {max(order - 1, 0), warps - 1, order == 0};
        join_block(who.rehearses);
        merge_block<V, kColumns, 3>(p, memory, block, width, who);
    }
}

} // namespace kvmosaic::cuda
