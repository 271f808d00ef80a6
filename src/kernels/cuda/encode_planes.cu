// Key pages in planes (mosaic): the mean is taken off, channels are weighed, ranked and given their widths, ranges are
// searched, and the codes packed, all in one block of D threads, one a channel, whose 128 values stay in registers.
//
// Bound: instructions. A value meets about ten for its mean and its weight, ten for each range that is tried (three to
// five), and twelve for its code and its place: about 10,000 clocks of a multiprocessor a page of 128 x 128, and as
// many more of latency while the ladder is chosen (ladder_search.cuh), which other blocks fill.
#include <cstddef>

#include "kernels/cuda/ladder_search.cuh"
#include "kernels/cuda/planes_grid.cuh"

namespace kvmosaic::cuda {
namespace {

__device__ __constant__ const float kDeviceShrink[7] = {1.0f, 0.9f, 0.8f, 0.7f, 0.6f, 0.5f, 0.4f}; // kShrink

struct SearchedGrid {
    float z, inverse, s, top;
    int code, offset;
    __device__ __forceinline__ uint32_t code_of(float x) const { return device_code_of(x, z, inverse, top); }
};

// Range `a` of a channel with this middle and half range: open_searched of planes.h.
__device__ __forceinline__ SearchedGrid searched_grid(const float* powers, float unit, float middle, float half, int a,
                                                      int bits) {
    SearchedGrid grid;
    grid.code = device_log_code<false>(powers, unit, __fmul_rn(kDeviceShrink[a], half));
    const float h = device_log_decode(powers, unit, 2 * grid.code);
    grid.offset = h < 0x1p-126f ? 0 : device_offset_code(middle, __fdiv_rn(16.0f, h));
    const float c = __fmul_rn(float(grid.offset), __fmul_rn(h, 0.0625f));
    grid.top = float((1 << bits) - 1);
    grid.s = bits == 0 ? 0.0f : __fdiv_rn(__fmul_rn(2.0f, h), grid.top);
    grid.z = __fsub_rn(c, h);
    grid.inverse = grid.s < 0x1p-126f ? 0.0f : __frcp_rn(grid.s);
    return grid;
}

template <int D>
struct KeyShared {
    static constexpr int kMostPage = 16 * D * 8 + 2 * D + 2 + D + 2 * int(kUnit);
    float x[128 * D]; // [token][channel]
    float weight[D], average[D], variance[D], most[D / 32], powers[16];
    uint32_t slot[D]; // of the pair that a channel turns in; then channels by ladder position
    int in_tier[7][D / 32];
    uint32_t unit;
    union { // the page last, as far as the vectors of a ladder reach
        typename LadderSearch<D>::Shared search;
        __align__(16) uint8_t page[(kMostPage + 15) / 16 * 16];
    };
    static uint32_t bytes(int vectors) {
        const uint32_t page = uint32_t(vectors) * 512 + 2 * D + 2 + D + 2 * kUnit;
        const auto search_bytes = uint32_t(sizeof(typename LadderSearch<D>::Shared));
        const uint32_t most = page > search_bytes ? page : search_bytes;
        return uint32_t(offsetof(KeyShared, page)) + (most + 15) / 16 * 16;
    }
};

template <class T, int D>
__global__ void __launch_bounds__(D, D == 128 ? 3 : 6) encode_planes(const __grid_constant__ PlanesParams p) {
    extern __shared__ __align__(16) uint8_t memory[];
    auto& sm = *reinterpret_cast<KeyShared<D>*>(memory);
    wait_for_previous_kernel();
    const EncodeJob job = p.pages.jobs[blockIdx.x];
    const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    if (thread < 16) sm.powers[thread] = kDeviceSixteenths[thread];
    int rank = 0;
    { // thread c has channel c, until the ladder is known
        const int c = thread;
        const device::KeyMean& mean = p.mean;
        // What is taken off: of the pair (a, b) of the mean, turned to the page's first row, this channel's share.
        float cosine_part = 0.0f, sine_part = 0.0f;
        const float2* near = nullptr;
        bool first_of_pair = true;
        if (mean.mean) {
            sm.slot[c] = ~0u;
            __syncthreads();
            for (int s = c; s < mean.slots; s += D) { // slots without a pair repeat the first one's channels
                const uint32_t pair = static_cast<const uint32_t*>(mean.channels)[s];
                atomicMin(&sm.slot[pair & 0xFFFFu], uint32_t(2 * s));
                atomicMin(&sm.slot[pair >> 16], uint32_t(2 * s + 1));
            }
            __syncthreads();
            const int slot = int(sm.slot[c] >> 1);
            first_of_pair = (sm.slot[c] & 1) == 0;
            const float2 m = unpack_half2(mean.mean[int64_t(job.head) * mean.slots + slot]);
            const float2 turn = static_cast<const float2*>(mean.turns)[int64_t(job.page) * mean.slots + slot];
            const float a = __fsub_rn(__fmul_rn(-m.x, turn.x), __fmul_rn(-m.y, turn.y));
            const float b = __fadd_rn(__fmul_rn(-m.x, turn.y), __fmul_rn(-m.y, turn.x));
            cosine_part = first_of_pair ? a : b, sine_part = first_of_pair ? b : a;
            near = static_cast<const float2*>(mean.near) + slot;
        }
        const uint16_t* rows = static_cast<const uint16_t*>(p.pages.rows) + job.row + c;
        // Weight: channel_weights of methods/ladder.cc.
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 1
        for (int t0 = 0; t0 < 128; t0 += 32) { // loads first: none may pass a store
            float x[32];
            float2 by[32];
#pragma unroll
            for (int t = 0; t < 32; ++t) {
                x[t] = T::unpack(__ldcs(rows + (t0 + t) * p.pages.row_stride)).x;
                by[t] = near ? __ldg(near + (t0 + t) * mean.slots) : make_float2(0.0f, 0.0f);
            }
#pragma unroll
            for (int t = 0; t < 32; ++t) {
                const float cosine = __fmul_rn(cosine_part, by[t].x), sine = __fmul_rn(sine_part, by[t].y);
                // The first of a pair: a cos - b sin; the second: a sin + b cos.
                if (near) x[t] = __fadd_rn(x[t], first_of_pair ? __fsub_rn(cosine, sine) : __fadd_rn(sine, cosine));
                sm.x[(t0 + t) * D + c] = x[t];
                sum = __fadd_rn(sum, x[t]);
            }
        }
        const float average = __fmul_rn(sum, 1.0f / 128.0f);
#pragma unroll 16
        for (int t = 0; t < 128; ++t) {
            const float e = __fsub_rn(sm.x[t * D + c], average);
            squares = __fadd_rn(squares, __fmul_rn(e, e));
        }
        const float variance = __fmul_rn(squares, 1.0f / 128.0f);
        const int32_t seen = p.pages.query_count ? p.pages.query_count[job.head] : 0;
        const float query =
            seen > 0 && p.pages.query_sum ? __fdiv_rn(p.pages.query_sum[int64_t(job.head) * D + c], float(seen)) : 1.0f;
        float weight = __fdiv_rn(__fmul_rn(query, variance), float(D));
        if (!(weight >= 0.0f)) weight = 0.0f;
        sm.weight[c] = weight, sm.average[c] = average, sm.variance[c] = variance;
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < D; ++i) {
            const float other = sm.weight[i];
            rank += other > weight || (other == weight && i < c);
        }
        sm.search.sorted[rank] = weight;
    }
    __syncthreads();
    LadderSearch<D>::make_gains(sm.search);
    if (thread == 0) {
        double total = 0.0;
        sm.search.sums[0] = 0.0;
#pragma unroll 8
        for (int i = 0; i < D; ++i)
            sm.search.sums[i + 1] = total = __dadd_rn(total, double(sm.search.sorted[i]));
    }
    __syncthreads();
    // The ladder; a guard asks for more vectors where the error is above it.
    LadderMix mix;
    for (int budget = p.vectors;; ++budget) {
        LadderSearch<D>::run(sm.search, budget);
        __syncthreads();
        const bool steep = sm.search.least[1] < sm.search.least[0];
        mix = sm.search.best[steep ? 1 : 0];
        const double error = sm.search.least[steep ? 1 : 0];
        if (!(p.guard > 0.0 && error > p.guard && budget < p.most_vectors)) break;
        __syncthreads();
    }
    int n[kLadderWidths]; // of 8, 6, 4, 3, 2, 1, 0 bits
    LadderSearch<D>::counts(mix, n);
    // Tiers as the page lists them: 8, 4, 6, 2, 3, 1, 0 bits (kPlaneWidths).
    const int live[7] = {n[0], n[2], n[1], n[4], n[3], n[5], n[6]};
    int end[7];
    {
        int at = 0;
#pragma unroll
        for (int k = 0; k < 7; ++k)
            end[k] = at += live[k];
        constexpr int kKind[kLadderWidths] = {0, 2, 1, 4, 3, 5, 6};
        int kind = 6, below = 0;
        bool open = true;
#pragma unroll
        for (int i = 0; i < kLadderWidths; ++i) {
            below += n[i];
            if (open && rank < below) kind = kKind[i], open = false;
        }
        uint32_t before = 0; // channels of this width and warp before this one
#pragma unroll
        for (int k = 0; k < 7; ++k) {
            const uint32_t mine = __ballot_sync(~0u, kind == k);
            if (k == kind) before = uint32_t(__popc(mine & ((1u << lane) - 1)));
            if (lane == 0) sm.in_tier[k][warp] = __popc(mine);
        }
        __syncthreads(); // the search is over, too: the page may lie there now
        int position = int(before);
#pragma unroll
        for (int k = 0; k < 7; ++k) {
            if (k < kind) position += live[k];
#pragma unroll
            for (int w = 0; w < D / 32; ++w)
                if (k == kind && w < warp) position += sm.in_tier[k][w];
        }
        sm.slot[position] = uint32_t(thread);
        // Columns into ladder order, so that every later read is free of conflicts.
#pragma unroll 1
        for (int t0 = 0; t0 < 128; t0 += 32) {
            float own[32];
#pragma unroll
            for (int t = 0; t < 32; ++t)
                own[t] = sm.x[(t0 + t) * D + thread];
            __syncthreads();
#pragma unroll
            for (int t = 0; t < 32; ++t)
                sm.x[(t0 + t) * D + position] = own[t];
        }
    }
    // Thread i has ladder position i from here on: neighbours have the same width, and walk alike.
    const int position = thread;
    int bits = 0;
#pragma unroll
    for (int k = 5; k >= 0; --k)
        if (position < end[k]) bits = k == 0 ? 8 : k == 1 ? 4 : k == 2 ? 6 : k == 3 ? 2 : k == 4 ? 3 : 1;
    PlanePlace four, high, two, one;
    const bool has_four = bits >= 4, has_high = bits == 8, has_two = bits == 2 || bits == 3 || bits == 6,
               has_one = bits == 1 || bits == 3;
    uint32_t scales;
    { // As KeyPlanes::sizes of planes.cuh.
        const auto padded = [](int count, int granule) { return (count + granule - 1) & ~(granule - 1); };
        const int d4 = padded(end[2], 8), d8 = padded(end[0], 8), d2 = padded(end[4] - end[1], 16),
                  d1 = padded(end[5] - end[3], 32);
        const uint32_t at8 = uint32_t(d4) * 64, at2 = at8 + uint32_t(d8) * 64, at1 = at2 + uint32_t(d2) * 32;
        scales = at1 + uint32_t(d1) * 16;
        if (has_four) four = PlanePlace::of<4>(0, d4, 2, position);
        if (has_high) high = PlanePlace::of<4>(at8, d8, 2, position);
        if (has_two) two = PlanePlace::of<2>(at2, d2, 2, position - end[1]);
        if (has_one) one = PlanePlace::of<1>(at1, d1, 2, position - end[3]);
    }
    const uint32_t map = scales + 2 * D + 2, ladder = (map + D + kUnit - 1) / kUnit * kUnit, bytes = ladder + kUnit;
    for (uint32_t i = uint32_t(thread); i < bytes / 16; i += D)
        reinterpret_cast<uint4*>(sm.page)[i] = make_uint4(0, 0, 0, 0);
    if (thread == 0) {
        uint32_t unit = job.unit;
        if (p.pages.pool_used) {
            unit = atomicAdd(p.pages.pool_used, bytes / kUnit);
            if (unit + bytes / kUnit > p.pages.pool_units) *p.pages.exhausted = 1, unit = ~0u;
        }
        sm.unit = unit;
        if (unit != ~0u && p.pages.table)
            p.pages.table[int64_t(job.head) * p.pages.table_stride + job.page] = PageRef{unit, bytes / kUnit};
    }
    __syncthreads();
    const int channel = int(sm.slot[position]);
    const float* x = sm.x + position;
    // Middle and half range.
    float middle = sm.average[channel], half = __fsqrt_rn(sm.variance[channel]);
    if (bits > 0) {
        float low = x[0], top = x[0];
#pragma unroll 16
        for (int t = 1; t < 128; ++t)
            low = fminf(low, x[t * D]), top = fmaxf(top, x[t * D]);
        middle = __fadd_rn(__fmul_rn(0.5f, top), __fmul_rn(0.5f, low));
        half = __fsub_rn(__fmul_rn(0.5f, top), __fmul_rn(0.5f, low));
    }
    half = fmaxf(half, __fdiv_rn(fabsf(middle), 7.9f));
    float most = half;
#pragma unroll
    for (int s = 16; s >= 1; s >>= 1)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
    if (lane == 0) sm.most[warp] = most;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < D / 32; ++w)
        most = fmaxf(most, sm.most[w]);
    const __half stored_unit = half_saturated(most);
    const float unit = __half2float(stored_unit);

    // Down from where the least error usually is while the next range is better, else up: walk_ranges of planes.h.
    const auto error = [&](int a) {
        const SearchedGrid grid = searched_grid(sm.powers, unit, middle, half, a, bits);
        float part[8] = {};
#pragma unroll 4
        for (int t = 0; t < 128; t += 8)
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float y = __fmul_rn(__fsub_rn(x[(t + k) * D], grid.z), grid.inverse);
                const float code = __fadd_rn(__fadd_rn(fminf(fmaxf(y, 0.0f), grid.top), 12582912.0f), -12582912.0f);
                const float e = __fsub_rn(y, code), square = __fmul_rn(e, e);
                part[k] = __fadd_rn(part[k], __fmul_rn(square, square));
            }
        const float square = __fmul_rn(grid.s, grid.s);
        return __fmul_rn(join_eights(part), __fmul_rn(square, square));
    };
    const int usual = bits == 1 ? 5 : bits == 2 ? 4 : bits == 3 ? 3 : bits == 4 ? 2 : 0;
    const int first = min(usual, p.shrinks - 1);
    int best = first, next = first, step = 0; // the first try is that of `first` itself
    float least = __int_as_float(0x7F800000);
    bool done = bits == 0;
    if (done) best = 0;
#pragma unroll 1
    while (__any_sync(~0u, !done)) {
        const float e = error(min(max(next, 0), 6));
        if (done) continue;
        if (step == 0) {
            least = e, step = 1;
        } else if (e < least) {
            least = e, best = next;
        } else if (step == 1 && best == first) {
            step = -1;
        } else {
            done = true;
        }
        next = best + step;
        if (!done && step == 1 && next >= p.shrinks) {
            if (best == first)
                step = -1, next = best - 1;
            else
                done = true;
        }
        if (step == -1 && next < 0) done = true;
    }
    const SearchedGrid grid = searched_grid(sm.powers, unit, middle, half, best, bits);
    sm.page[scales + uint32_t(position)] = uint8_t(grid.code);
    sm.page[scales + uint32_t(D + position)] = uint8_t(int8_t(grid.offset));
    sm.page[map + uint32_t(position)] = uint8_t(channel);
    if (thread == 0) {
        *reinterpret_cast<__half*>(sm.page + scales + 2 * D) = stored_unit;
#pragma unroll
        for (int k = 0; k < 7; ++k)
            reinterpret_cast<uint16_t*>(sm.page + ladder)[k] = uint16_t(live[k]);
    }
    if (bits > 0) {
#pragma unroll 1
        for (int quad = 0; quad < 2; ++quad)
#pragma unroll 4
            for (int row = 0; row < 16; ++row) {
                uint32_t code[4];
#pragma unroll
                for (int f = 0; f < 4; ++f)
                    code[f] = grid.code_of(x[(64 * quad + 16 * f + place_of_row(row)) * D]);
                const auto fields = [&](int shift, uint32_t mask, int by) {
                    uint32_t word = 0;
#pragma unroll
                    for (int f = 0; f < 4; ++f)
                        word |= (code[f] >> shift & mask) << (by * f);
                    return word;
                };
                if (has_four) *reinterpret_cast<uint16_t*>(sm.page + four.at(quad, row)) = uint16_t(fields(0, 15u, 4));
                if (has_high) *reinterpret_cast<uint16_t*>(sm.page + high.at(quad, row)) = uint16_t(fields(4, 15u, 4));
                if (has_two) sm.page[two.at(quad, row)] = uint8_t(fields(bits == 6 ? 4 : 0, 3u, 2));
                if (has_one) { // two steps share the byte
                    const uint32_t at = one.at(quad, row);
                    atomicOr(reinterpret_cast<uint32_t*>(sm.page + (at & ~3u)),
                             fields(bits == 3 ? 2 : 0, 1u, 2) << (8 * (at & 3u) + uint32_t(one.bit)));
                }
            }
    }
    __syncthreads();
    if (sm.unit == ~0u) return;
    uint4* to = reinterpret_cast<uint4*>(p.pages.pool + int64_t(sm.unit) * kUnit);
    for (uint32_t i = uint32_t(thread); i < bytes / 16; i += D)
        to[i] = reinterpret_cast<const uint4*>(sm.page)[i];
}

template <class T, int D>
cudaError_t launch(const PlanesParams& p, cudaStream_t stream) {
    const uint32_t bytes = KeyShared<D>::bytes(p.most_vectors);
    const cudaError_t error =
        cudaFuncSetAttribute(encode_planes<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (error != cudaSuccess) return error;
    encode_planes<T, D><<<unsigned(p.pages.count), D, bytes, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_encode_planes(int dim, const PlanesParams& p, cudaStream_t stream) {
    if (dim != 64 && dim != 128) return cudaErrorNotSupported;
    if (p.pages.count == 0) return cudaSuccess;
    return with_rows(p.pages.type, dim, [&](auto rows, auto size) {
        constexpr int kD = decltype(size)::value;
        if constexpr (kD <= 128) {
            return launch<typename decltype(rows)::Type, kD>(p, stream);
        } else {
            return cudaErrorNotSupported;
        }
    });
}

} // namespace kvmosaic::cuda
