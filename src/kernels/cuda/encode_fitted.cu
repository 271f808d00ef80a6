// Value pages in planes (mosaic): rotated, without their mean, at a step fitted to each token. A block of 128 threads,
// one a token, whose D values stay in registers.
//
// Bound: instructions. A value meets seven additions of the rotation, two sums over its channel, two rounds of eleven
// for the step and nine for its code and place: 45, about 6,000 clocks of a multiprocessor a page of 128 x 128.
#include "kernels/cuda/planes_grid.cuh"

namespace kvmosaic::cuda {
namespace {

// kNormalStep and kNormalInverse of planes.h.
template <int BITS>
struct Fitted {
    static constexpr float kStep = BITS == 2 ? 0.9957f : BITS == 3 ? 0.5860f : 0.3352f, kInverse = 1.0f / kStep;
    static constexpr float kMiddle = 0.5f * float((1 << BITS) - 1), kTop = float((1 << BITS) - 1);
    // x in steps of the grid, clamped; the code is the nearest whole number.
    static __device__ __forceinline__ float place(float x, float inverse) {
        return fminf(fmaxf(__fadd_rn(__fmul_rn(x, inverse), kMiddle), 0.0f), kTop);
    }
    static __device__ __forceinline__ float level(float x, float inverse) {
        const float code = __fadd_rn(__fadd_rn(place(x, inverse), 12582912.0f), -12582912.0f);
        return __fmul_rn(code - kMiddle, kStep);
    }
    static __device__ __forceinline__ uint32_t code(float x, float inverse) {
        return __float_as_uint(__fadd_rn(place(x, inverse), 12582912.0f)) & 0xFFu;
    }
};

__device__ __forceinline__ float inverse_of_step(float s) { return s < 0x1p-126f ? 0.0f : __frcp_rn(s); }

template <int D, int BITS>
struct FittedShared {
    static constexpr int kRow = 2 * D + 16;     // of raw rows
    static constexpr int kColumn = 4 * 64 + 16; // of 64 rotated channels
    static constexpr uint32_t kCodes = D * 128 * BITS / 8, kMeans = kCodes + 128, kUnits = kMeans + D;
    static constexpr uint32_t kBytes = (kUnits + 4 + kUnit - 1) / kUnit * kUnit;
    union {
        uint8_t rows[128 * kRow];
        uint8_t turned[128 * kColumn];
        uint8_t page[kBytes];
    };
    float sums[2][D]; // of each channel, and of its squares; then its mean
    float most[4], powers[16];
    float unit;
};

template <class T, int D, int BITS>
__global__ void __launch_bounds__(128, D == 128 ? 3 : 4) encode_fitted(const __grid_constant__ PlanesParams p) {
    extern __shared__ __align__(16) uint8_t memory[];
    using Shared = FittedShared<D, BITS>;
    using Fit = Fitted<BITS>;
    auto& sm = *reinterpret_cast<Shared*>(memory);
    wait_for_previous_kernel();
    const EncodeJob job = p.pages.jobs[blockIdx.x];
    const int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    const uint16_t* rows = static_cast<const uint16_t*>(p.pages.rows) + job.row;
    if (t < 16) sm.powers[t] = kDeviceSixteenths[t];
    constexpr int kParts = D / 8;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const int row = (i * 128 + t) / kParts, part = (i * 128 + t) % kParts;
        *reinterpret_cast<uint4*>(sm.rows + row * Shared::kRow + part * 16) =
            __ldcs(reinterpret_cast<const uint4*>(rows + row * p.pages.row_stride) + part);
    }
    __syncthreads();
    float x[D];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const uint4 w = *reinterpret_cast<const uint4*>(sm.rows + t * Shared::kRow + i * 16);
        const uint32_t v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 f = T::unpack(v[k]);
            x[8 * i + 2 * k] = f.x, x[8 * i + 2 * k + 1] = f.y;
        }
    }
    if (p.hadamard) { // hadamard_block of transform.cc
#pragma unroll
        for (int h = 1; h < D; h *= 2)
#pragma unroll
            for (int i = 0; i < D; ++i)
                if ((i & h) == 0) {
                    const float a = x[i], b = x[i + h];
                    x[i] = __fadd_rn(a, b), x[i + h] = __fsub_rn(a, b);
                }
        constexpr float kNorm = D == 64 ? 0.125f : 0x1.6a09e6p-4f; // 1 / sqrt(D)
#pragma unroll
        for (int i = 0; i < D; ++i)
            x[i] = __fmul_rn(x[i], kNorm);
    }
    // Sums over the tokens of each channel, in their order.
#pragma unroll
    for (int h = 0; h < D / 64; ++h) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 16; ++i)
            *reinterpret_cast<float4*>(sm.turned + t * Shared::kColumn + i * 16) =
                make_float4(x[64 * h + 4 * i], x[64 * h + 4 * i + 1], x[64 * h + 4 * i + 2], x[64 * h + 4 * i + 3]);
        __syncthreads();
        const bool square = t >= 64;
        float sum = 0.0f;
#pragma unroll 16
        for (int i = 0; i < 128; ++i) {
            const float v = *reinterpret_cast<const float*>(sm.turned + i * Shared::kColumn + (t & 63) * 4);
            sum = __fadd_rn(sum, square ? __fmul_rn(v, v) : v);
        }
        sm.sums[square][64 * h + (t & 63)] = sum;
    }
    __syncthreads();
    for (uint32_t i = uint32_t(t); i < Shared::kBytes / 16; i += 128)
        reinterpret_cast<uint4*>(sm.page)[i] = make_uint4(0, 0, 0, 0);
    float part[8];
    if (t == 0) {
#pragma unroll
        for (int k = 0; k < 8; ++k)
            part[k] = 0.0f;
#pragma unroll 2
        for (int i = 0; i < D; i += 8)
#pragma unroll
            for (int k = 0; k < 8; ++k)
                part[k] = __fadd_rn(part[k], sm.sums[1][i + k]);
        const float rms = __fsqrt_rn(__fdiv_rn(join_eights(part), float(128 * D)));
        sm.unit = __half2float(half_saturated(__fmul_rn(rms, 0.0625f)));
    }
    __syncthreads();
    const float mean_unit = sm.unit;
    if (t < D) {
        const float inverse = mean_unit > 0.0f ? __fdiv_rn(1.0f, mean_unit) : 0.0f;
        const int code = device_offset_code(__fmul_rn(sm.sums[0][t], 1.0f / 128.0f), inverse);
        sm.page[Shared::kMeans + uint32_t(t)] = uint8_t(int8_t(code));
        sm.sums[0][t] = __fmul_rn(float(code), mean_unit);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D; i += 4) {
        const float4 m = *reinterpret_cast<const float4*>(&sm.sums[0][i]);
        x[i] = __fsub_rn(x[i], m.x), x[i + 1] = __fsub_rn(x[i + 1], m.y);
        x[i + 2] = __fsub_rn(x[i + 2], m.z), x[i + 3] = __fsub_rn(x[i + 3], m.w);
    }
    // fit_step of kernels/ref/planes.cc.
#pragma unroll
    for (int k = 0; k < 8; ++k)
        part[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < D; ++i)
        part[i & 7] = __fadd_rn(part[i & 7], __fmul_rn(x[i], x[i]));
    float step = __fsqrt_rn(__fdiv_rn(join_eights(part), float(D)));
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
        const float inverse = __fmul_rn(inverse_of_step(step), Fit::kInverse);
        float size[8];
#pragma unroll
        for (int k = 0; k < 8; ++k)
            part[k] = size[k] = 0.0f;
#pragma unroll
        for (int i = 0; i < D; ++i) {
            const float level = Fit::level(x[i], inverse);
            part[i & 7] = __fadd_rn(part[i & 7], __fmul_rn(x[i], level));
            size[i & 7] = __fadd_rn(size[i & 7], __fmul_rn(level, level));
        }
        const float dot = join_eights(part), all = join_eights(size);
        step = dot > 0.0f ? __fdiv_rn(dot, all) : 0.0f;
    }
    float most = step;
#pragma unroll
    for (int s = 16; s >= 1; s >>= 1)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
    if (lane == 0) sm.most[warp] = most;
    __syncthreads();
    most = fmaxf(fmaxf(sm.most[0], sm.most[1]), fmaxf(sm.most[2], sm.most[3]));
    const __half stored_unit = half_saturated(most);
    const float unit = __half2float(stored_unit);
    const int code = device_log_code<true>(sm.powers, unit, step);
    sm.page[Shared::kCodes + uint32_t(t)] = uint8_t(code);
    if (t == 0) {
        __half* units = reinterpret_cast<__half*>(sm.page + Shared::kUnits);
        units[0] = stored_unit, units[1] = __float2half_rn(mean_unit); // exact
    }
    const float inverse = __fmul_rn(inverse_of_step(device_log_decode(sm.powers, unit, code)), Fit::kInverse);
    constexpr int kQuads = D / 64;
    constexpr uint32_t kOnePlane = D * 32; // behind the plane of two bits
    const PlanePlace wide = PlanePlace::of < BITS == 4 ? 4 : 2 > (0, 128, kQuads, t);
    const PlanePlace thin = PlanePlace::of<1>(kOnePlane, 128, kQuads, t);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad)
#pragma unroll
        for (int row = 0; row < 16; ++row) {
            uint32_t low = 0, high = 0;
#pragma unroll
            for (int f = 0; f < 4; ++f) { // lane_site of order.h
                const uint32_t c =
                    Fit::code(x[64 * quad + 32 * (f >> 1) + 4 * (row & 7) + 2 * (f & 1) + (row >> 3)], inverse);
                low |= (BITS == 4 ? c : c & 3u) << ((BITS == 4 ? 4 : 2) * f);
                if constexpr (BITS == 3) high |= (c >> 2) << (2 * f);
            }
            if constexpr (BITS == 4)
                *reinterpret_cast<uint16_t*>(sm.page + wide.at(quad, row)) = uint16_t(low);
            else
                sm.page[wide.at(quad, row)] = uint8_t(low);
            if constexpr (BITS == 3) { // tokens 16 apart share the byte
                const uint32_t other = __shfl_xor_sync(~0u, high, 16);
                if (lane < 16) sm.page[thin.at(quad, row)] = uint8_t(high | other << 1);
            }
        }
    __syncthreads();
    uint4* to = reinterpret_cast<uint4*>(p.pages.pool + int64_t(job.unit) * kUnit);
    for (uint32_t i = uint32_t(t); i < Shared::kBytes / 16; i += 128)
        to[i] = reinterpret_cast<const uint4*>(sm.page)[i];
}

template <class T, int D, int BITS>
cudaError_t launch(const PlanesParams& p, cudaStream_t stream) {
    constexpr int kBytes = int(sizeof(FittedShared<D, BITS>));
    const cudaError_t error =
        cudaFuncSetAttribute(encode_fitted<T, D, BITS>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    encode_fitted<T, D, BITS><<<unsigned(p.pages.count), 128, kBytes, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_encode_fitted(int dim, const PlanesParams& p, cudaStream_t stream) {
    if ((dim != 64 && dim != 128) || p.bits < 2 || p.bits > 4) return cudaErrorNotSupported;
    if (p.pages.count == 0) return cudaSuccess;
    return with_rows(p.pages.type, dim, [&](auto rows, auto size) {
        using T = typename decltype(rows)::Type;
        constexpr int kD = decltype(size)::value;
        if constexpr (kD <= 128)
            return p.bits == 2   ? launch<T, kD, 2>(p, stream)
                   : p.bits == 3 ? launch<T, kD, 3>(p, stream)
                                 : launch<T, kD, 4>(p, stream);
        else
            return cudaErrorNotSupported;
    });
}

} // namespace kvmosaic::cuda
