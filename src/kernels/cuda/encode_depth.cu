// Pages whose groups run along the depth: channels of a key token, tokens of a value channel (InnerQ, TurboQuant). A
// page a block. What encode_lines.cuh packs faster goes there.
//
// Bound: instructions. A thread takes a group at a time, in the order of the reference, because the choice between two
// grids and the norm of a vector depend on the order of sums; the codes then wait in shared memory, a byte each, until
// the words of the page are put together: about twenty instructions a code for both.
#include "kernels/cuda/encode.cuh"

namespace kvmosaic::cuda {
namespace {

constexpr int kThreads = 256;

struct DepthParams {
    EncodeParams call;
    DevicePage page;
    float book[16];
};

// What code_of of src/kernels/grid.h needs of a grid.
struct GroupGrid {
    float s = 0.0f, z = 0.0f, inverse = 0.0f, top = 0.0f, middle = 0.0f;
    __half stored_s = __ushort_as_half(0), stored_z = __ushort_as_half(0);
    __device__ uint32_t code(float x) const {
        if (middle == 0.0f) return device_code_of(x, z, inverse, top);
        const float c = __fadd_rn(rintf(__fmul_rn(x, inverse)), middle);
        return uint32_t(fminf(fmaxf(c, 0.0f), top));
    }
    __device__ float decode(uint32_t code) const { return __fadd_rn(z, __fmul_rn(s, float(code))); }
};

__device__ GroupGrid symmetric_grid(float low, float high, int bits) {
    constexpr float kLimit = 0x1p125f; // kGridLimit
    const float m = float((1 << (bits - 1)) - 1);
    const float most = fmaxf(fabsf(fminf(fmaxf(low, -kLimit), kLimit)), fabsf(fminf(fmaxf(high, -kLimit), kLimit)));
    GroupGrid grid;
    grid.stored_s = half_saturated(__fdiv_rn(most, m));
    grid.s = __half2float(grid.stored_s);
    grid.z = __fmul_rn(-m, grid.s);
    grid.inverse = grid.s == 0.0f ? 0.0f : __frcp_rn(grid.s);
    grid.top = 2.0f * m, grid.middle = m;
    return grid;
}
__device__ GroupGrid asym_grid(float low, float high, int bits) {
    GroupGrid grid;
    grid.top = float((1 << bits) - 1);
    const DeviceGrid g = make_device_grid(low, high, grid.top);
    grid.stored_s = g.stored_s, grid.stored_z = g.stored_z;
    grid.s = __half2float(g.stored_s), grid.z = g.z, grid.inverse = g.inverse;
    return grid;
}

// Eight partial sums, then halves onto each other: sum_squares of grid.h.
template <class At>
__device__ float sum_squares(int n, At at) {
    float part[8] = {};
    for (int i = 0; i < n; i += 8)
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (i + k < n) {
                const float x = at(i + k);
                part[k] = __fadd_rn(part[k], __fmul_rn(x, x));
            }
#pragma unroll
    for (int half = 4; half >= 1; half /= 2)
#pragma unroll
        for (int k = 0; k < half; ++k)
            part[k] = __fadd_rn(part[k], part[k + half]);
    return part[0];
}

template <class T>
__global__ void __launch_bounds__(kThreads) encode_depth(const __grid_constant__ DepthParams p) {
    extern __shared__ __align__(16) uint8_t memory[];
    wait_for_previous_kernel();
    const DevicePage& page = p.page;
    const EncodeJob job = p.call.jobs[blockIdx.x];
    const int dim = page.dim, row_bytes = 2 * dim + 8, tid = threadIdx.x;
    const bool key = page.side == Side::key;
    uint8_t* codes = memory + kPageTokens * row_bytes; // [depth][lanes]
    const uint16_t* rows = static_cast<const uint16_t*>(p.call.rows) + job.row;
    uint8_t* to = p.call.pool + int64_t(job.unit) * kUnit;
    for (int i = tid; i < kPageTokens * dim / 2; i += kThreads) {
        const int row = i / (dim / 2), part = i % (dim / 2);
        *reinterpret_cast<uint32_t*>(memory + row * row_bytes + part * 4) =
            *reinterpret_cast<const uint32_t*>(rows + row * p.call.row_stride + 2 * part);
    }
    // Words are written below, every one; the rest has holes.
    const DeviceTier& tier = page.tiers[0];
    for (uint32_t i = tier.offset + tier.bytes + uint32_t(tid) * 4; i < page.bytes; i += kThreads * 4)
        *reinterpret_cast<uint32_t*>(to + i) = 0u;
    __syncthreads();
    const int lanes = page.lanes, depth = page.depth, bits = tier.bits;
    for (int task = tid; task < page.groups * lanes; task += kThreads) {
        const int lane = task % lanes, group = task / lanes, first = group * page.group;
        const int n = min(int(page.group), depth - first);
        const auto at = [&](int i) {
            const int row = key ? lane : first + i, channel = key ? first + i : lane;
            return T::unpack(*reinterpret_cast<const uint16_t*>(memory + row * row_bytes + 2 * channel)).x;
        };
        const auto code_at = [&](int i) -> uint8_t& { return codes[(first + i) * lanes + lane]; };
        GroupGrid grid;
        if (page.rule == GridRule::codebook_norm) {
            const float norm = __fsqrt_rn(sum_squares(n, at));
            const bool flat = !(norm >= 0x1p-126f) || norm > 0x1p125f;
            const float unit = flat ? 0.0f : __fdiv_rn(float(sqrt(double(n))), norm);
            for (int i = 0; i < n; ++i) {
                const float y = __fmul_rn(at(i), unit);
                int code = 0;
                for (int k = 0; !flat && k + 1 < 1 << bits; ++k)
                    code += y > __fmul_rn(0.5f, __fadd_rn(p.book[k], p.book[k + 1]));
                code_at(i) = uint8_t(code);
            }
            if (!flat) {
                const float levels = __fsqrt_rn(sum_squares(n, [&](int i) { return p.book[code_at(i)]; }));
                grid.stored_s = half_saturated(__fdiv_rn(norm, levels));
            }
        } else {
            float low = at(0), high = low;
            for (int i = 1; i < n; ++i)
                low = fminf(low, at(i)), high = fmaxf(high, at(i));
            if (page.rule == GridRule::asym) {
                grid = asym_grid(low, high, bits);
            } else {
                grid = symmetric_grid(low, high, bits);
                if (page.rule != GridRule::symmetric) { // the better of two; equal sums go to the asymmetric one
                    GroupGrid other = asym_grid(low, high, page.rule == GridRule::hybrid_1bit ? 1 : bits);
                    float mine = 0.0f, its = 0.0f;
                    for (int i = 0; i < n; ++i) {
                        const float x = at(i);
                        mine = __fadd_rn(mine, fabsf(__fsub_rn(grid.decode(grid.code(x)), x)));
                        its = __fadd_rn(its, fabsf(__fsub_rn(other.decode(other.code(x)), x)));
                    }
                    if (!(mine < its)) {
                        other.stored_s = __hneg(other.stored_s); // the flag, of a scale of 0 too
                        grid = other;
                    }
                }
            }
            for (int i = 0; i < n; ++i)
                code_at(i) = uint8_t(grid.code(at(i)));
        }
        const uint32_t index = param_index(page, bits, 0, group, lane);
        reinterpret_cast<__half*>(to + page.scale_offset)[index] = grid.stored_s;
        if (page.offsets) reinterpret_cast<__half*>(to + page.zero_offset)[index] = grid.stored_z;
    }
    __syncthreads();
    uint32_t offset = tier.offset;
    for (int weight = 0; weight < bits;) { // plane by plane
        const int width = bits == 4 || bits == 8 ? 4 : bits - weight == 1 ? 1 : 2;
        const int steps = 4 / width, words = tier.padded / (16 * steps) * page.quads * 128;
        for (int w = tid; w < words; w += kThreads) {
            const int set = w >> 7, thread = w >> 2 & 31, reg = w & 3;
            const int quad = set % page.quads, step0 = set / page.quads * steps;
            const int row = (thread >> 2) + 8 * (reg & 1), k = 2 * (thread & 3) + 8 * (reg >> 1);
            uint32_t word = 0;
            for (int e = 0; e < steps; ++e)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int d = 16 * (step0 + e) + place_of_row(k + i);
                    if (d >= depth) continue;
                    const int place = 16 * i + (width == 4 ? 0 : width == 2 ? 8 * e : 8 * (e >> 1) + (e & 1));
#pragma unroll
                    for (int f = 0; f < 4; ++f) {
                        const int lane = 64 * quad + (key ? 16 * f + place_of_row(row)
                                                          : 32 * (f >> 1) + 4 * (row & 7) + 2 * (f & 1) + (row >> 3));
                        if (lane >= lanes) continue;
                        const uint32_t code = codes[d * lanes + lane];
                        word |= (code >> weight & ((1u << width) - 1)) << (place + (width == 4 ? 4 : 2) * f);
                    }
                }
            reinterpret_cast<uint32_t*>(to + offset)[w] = word;
        }
        offset += uint32_t(words) * 4;
        weight += width;
    }
}

template <class T>
cudaError_t launch(const DepthParams& p, cudaStream_t stream) {
    const int bytes = kPageTokens * (2 * p.page.dim + 8) + int(p.page.depth) * p.page.lanes;
    const cudaError_t error = cudaFuncSetAttribute(encode_depth<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    encode_depth<T><<<unsigned(p.call.count), kThreads, size_t(bytes), stream>>>(p);
    return cudaGetLastError();
}

} // namespace

template <class T, int D>
cudaError_t launch_lines(const DevicePage& page, const EncodeParams& p, cudaStream_t stream);
extern template cudaError_t launch_lines<HalfRows, 128>(const DevicePage&, const EncodeParams&, cudaStream_t);
extern template cudaError_t launch_lines<Bf16Rows, 128>(const DevicePage&, const EncodeParams&, cudaStream_t);
#ifndef KVMOSAIC_CUDA_SMOKE
extern template cudaError_t launch_lines<HalfRows, 64>(const DevicePage&, const EncodeParams&, cudaStream_t);
extern template cudaError_t launch_lines<Bf16Rows, 64>(const DevicePage&, const EncodeParams&, cudaStream_t);
#endif

cudaError_t launch_encode_depth(const DevicePage& page, const float* book, const EncodeParams& call,
                                cudaStream_t stream) {
    const bool rule = page.rule == GridRule::asym || page.rule == GridRule::symmetric ||
                      page.rule == GridRule::hybrid_1bit || page.rule == GridRule::hybrid_4level ||
                      (page.rule == GridRule::codebook_norm && book);
    if (!page.along_depth || !rule || page.levels != 0 || page.clip != 1.0f || page.params != ParamType::f16 ||
        page.group == 0 || page.outliers > 0 || page.tier_count != 1 || page.dim % 2 != 0 || page.dim > 256)
        return cudaErrorNotSupported;
    if (call.count == 0) return cudaSuccess;
    if (page.dim == 64 || page.dim == 128) {
        const cudaError_t error = with_rows(call.type, page.dim, [&](auto rows, auto dim) {
            if constexpr (decltype(dim)::value <= 128)
                return launch_lines<typename decltype(rows)::Type, decltype(dim)::value>(page, call, stream);
            else
                return cudaErrorNotSupported;
        });
        if (error != cudaErrorNotSupported) return error;
    }
    DepthParams p{call, page, {}};
    for (int i = 0; book && i < 1 << page.tiers[0].bits; ++i)
        p.book[i] = book[i];
    return call.type == ElementType::bf16 ? launch<Bf16Rows>(p, stream) : launch<HalfRows>(p, stream);
}

} // namespace kvmosaic::cuda
