// The instructions that the kernels are made of, one wrapper each (PTX ISA 8.x).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvmosaic::cuda {

// 2^e; a constant where e is one.
__device__ __forceinline__ float exp2_of(int e) { return __uint_as_float(uint32_t(127 + e) << 23); }

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// D[16][8] += A[16][16] B[16][8], fp16 operands, fp32 sums. Thread (g = lane / 4, t = lane % 4) holds
// a: rows g, g + 8, g, g + 8; k 2t, 2t+1 (first two) and 2t+8, 2t+9. b: k as a, column g. d: rows g, g, g+8, g+8;
// columns 2t, 2t+1.
__device__ __forceinline__ void mma16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                      uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same with D = A B.
__device__ __forceinline__ void mma16_first(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
// The same with D = A B + C, where C has c0 in the first column of each thread's two and c1 in the other.
__device__ __forceinline__ void mma16_from(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t b0, uint32_t b1, float c0, float c1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%10,%11};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c0), "f"(c1));
}
__device__ __forceinline__ void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ uint32_t transpose8(uint32_t a) {
    uint32_t d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
    return d;
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&d)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix2_trans(uint32_t& d0, uint32_t& d1, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                 : "=r"(d0), "=r"(d1)
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix1_trans(uint32_t& d0, uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0},[%1];" : "=r"(d0) : "r"(address) : "memory");
}

// Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ uint32_t hmul2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ uint32_t hmax2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("max.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float2 unpack_half2(uint32_t a) {
    return __half22float2(*reinterpret_cast<const __half2*>(&a));
}
__device__ __forceinline__ float2 unpack_bf162(uint32_t a) {
    return make_float2(__uint_as_float(a << 16), __uint_as_float(a & 0xFFFF0000u));
}
__device__ __forceinline__ float fast_exp2(float a) {
    float d;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(d) : "f"(a));
    return d;
}

__device__ __forceinline__ uint4 load_shared16(uint32_t a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
__device__ __forceinline__ uint32_t load_shared_half(uint32_t a) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0,[%1];" : "=h"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ uint32_t load_shared_byte(uint32_t a) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0,[%1];" : "=r"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ void store_shared16(uint32_t a, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t a, uint32_t v) {
    asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared2(uint32_t a, uint32_t v) {
    asm volatile("st.shared.u16 [%0],%1;" ::"r"(a), "h"(uint16_t(v)) : "memory");
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t a) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a));
    return v;
}

__device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t phase) {
    asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 p,[%0],%1;\n@p bra DONE;\nbra "
                 "WAIT;\nDONE:\n}" ::"r"(bar),
                 "r"(phase)
                 : "memory");
}
// The block's warps meet; one that only arrives does not wait. The race detector follows whole barriers alone.
__device__ __forceinline__ void join_block(bool only_arrives) {
#ifdef KVMOSAIC_RACECHECK
    __syncthreads();
#else
    if (only_arrives)
        asm volatile("barrier.cta.arrive.aligned 1,%0;" ::"r"(blockDim.x) : "memory");
    else
        asm volatile("barrier.cta.sync.aligned 1,%0;" ::"r"(blockDim.x) : "memory");
#endif
}
__device__ __forceinline__ uint64_t evict_first_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
    return policy;
}
// Bulk copy global -> shared; completes on the barrier. Addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t bar,
                                          uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0],[%1],%2,[%3],%4;" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

// Programmatic dependent launch: what precedes the kernel in its stream is complete and visible after the wait.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ int add_acq_rel(int* p, int v) {
    int old;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0,[%1],%2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

} // namespace kvmosaic::cuda
