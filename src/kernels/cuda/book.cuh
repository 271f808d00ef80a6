// Scores of keys that are vectors of a fixed codebook times their norm (TurboQuant).
//
// Bound: instructions. A code is looked up by byte permutes, whose table of eight bytes fits 3-bit codes; the low and
// the high bytes of the fp16 levels are two tables, and 4-bit codes pick between two of each: about 3.5 instructions a
// code against 0.7 of a grid, so a page of 128 x 128 takes some 2000 warp instructions, four times its bytes at the
// memory's speed.
#pragma once

#include "kernels/cuda/depth.cuh"

namespace kvmosaic::cuda {

// fp16 levels of four codes, which are the four low nibbles of `codes` (3 bits each where BITS is 3): low bytes and
// high bytes.
template <int BITS>
__device__ __forceinline__ void look_up(const BookTable& book, uint32_t codes, uint32_t& low, uint32_t& high) {
    const uint32_t pick = codes & 0x7777u;
    low = __byte_perm(book.low[0], book.low[1], pick);
    high = __byte_perm(book.high[0], book.high[1], pick);
    if constexpr (BITS == 4) {
        const uint32_t upper = __byte_perm(0x0000FF00u, 0u, (codes >> 3) & 0x1111u); // FF where bit 3 is set
        const uint32_t l = __byte_perm(book.low[2], book.low[3], pick),
                       h = __byte_perm(book.high[2], book.high[3], pick);
        low = (low & ~upper) | (l & upper);
        high = (high & ~upper) | (h & upper);
    }
}

// Operand words of the four tiles of a quad, from the nibbles of a word: nibble f of each half is the code of tile f.
template <int BITS>
__device__ __forceinline__ void look_up_tiles(const BookTable& book, uint32_t nibbles, uint32_t (&to)[4]) {
    uint32_t low_e, high_e, low_o, high_o;
    look_up<BITS>(book, nibbles, low_e, high_e);
    look_up<BITS>(book, nibbles >> 16, low_o, high_o);
    const uint32_t e01 = __byte_perm(low_e, high_e, 0x5140), e23 = __byte_perm(low_e, high_e, 0x7362);
    const uint32_t o01 = __byte_perm(low_o, high_o, 0x5140), o23 = __byte_perm(low_o, high_o, 0x7362);
    to[0] = __byte_perm(e01, o01, 0x5410), to[1] = __byte_perm(e01, o01, 0x7632);
    to[2] = __byte_perm(e23, o23, 0x5410), to[3] = __byte_perm(e23, o23, 0x7632);
}

// Fields at 2f of the low byte of each half become nibbles f.
__device__ __forceinline__ uint32_t spread(uint32_t w) {
    w = (w | w << 4) & 0x0F0F0F0Fu;
    return (w | w << 2) & 0x33333333u;
}

// Keys of `bits` bits in one group of all D channels.
template <int D_, int BITS_>
struct KeyBook {
    static constexpr int D = D_, BITS = BITS_;
    static constexpr bool kTiered = false, kBasis = true, kMean = false;
    static_assert(BITS == 3 || BITS == 4);
    static constexpr uint32_t kPlane = D * 128 * 2 / 8, kScales = D * 128 * BITS / 8, kBytes = kScales + 256;
    __host__ __device__ static uint32_t bytes(uint32_t) { return kBytes; }
    static StoreSpec spec() {
        static constexpr float kAny[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        StoreSpec s = grid_spec(BITS, Axis::channels, D, GridRule::codebook_norm);
        s.kind = StoreKind::codebook;
        s.book = kAny; // levels come with the call
        return s;
    }
    static constexpr uint32_t kScratch = 0, kTables = 0, kValueScales = 0, kTurnBytes = 0; // see KeyPlanes
    static std::vector<uint8_t> widths() { return {}; }

    // Nibbles of a step and quad, of the word in register r.
    template <class Words>
    __device__ static __forceinline__ uint4 nibbles(const Words& words, int step, int quad, int lane) {
        const uint32_t at = uint32_t(lane) * 16;
        if constexpr (BITS == 4) {
            return words.get(uint32_t(step * 2 + quad) * kSetBytes + at);
        } else {
            uint4 w = words.get(uint32_t((step >> 1) * 2 + quad) * kSetBytes + at);
            uint4 b = words.get(kPlane + uint32_t((step >> 2) * 2 + quad) * kSetBytes + at);
            w = shift_right(w, 8 * (step & 1));
            b = shift_right(b, 8 * ((step >> 1) & 1) + (step & 1));
            const auto join = [](uint32_t two, uint32_t one) {
                return spread(two & 0x00FF00FFu) | spread(one & 0x00550055u) << 2;
            };
            return make_uint4(join(w.x, b.x), join(w.y, b.y), join(w.z, b.z), join(w.w, b.w));
        }
    }

    // Operands of the four tiles of a quad. [register][tile]
    template <class Words>
    __device__ static __forceinline__ void operands(const AttendParams& params, const Words& words, int step, int quad,
                                                    int lane, uint32_t (&a)[4][4]) {
        const uint4 w = nibbles(words, step, quad, lane);
        look_up_tiles<BITS>(params.book, w.x, a[0]), look_up_tiles<BITS>(params.book, w.y, a[1]);
        look_up_tiles<BITS>(params.book, w.z, a[2]), look_up_tiles<BITS>(params.book, w.w, a[3]);
    }

    template <int NT>
    __device__ static void score(const AttendParams& params, uint32_t page, uint32_t, uint32_t q, int lane,
                                 const Columns<NT>& col, float (&x)[8][NT][4], const KeySpot&) {
        const SharedWords words{page};
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT);
#pragma unroll 2
        for (int p = 0; p < D / 32; ++p) {
            uint32_t qs[2][NT][2];
            load_q_pair<NT>(qs[0], qs[1], q_row + uint32_t(p * 32 * 16 * NT));
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int quad = 0; quad < 2; ++quad) {
                    uint32_t a[4][4]; // [register][tile]
                    operands(params, words, 2 * p + e, quad, lane, a);
#pragma unroll
                    for (int f = 0; f < 4; ++f)
#pragma unroll
                        for (int n = 0; n < NT; ++n) {
                            if (p == 0 && e == 0)
                                mma16_first(x[4 * quad + f][n], a[0][f], a[1][f], a[2][f], a[3][f], qs[e][n][0],
                                            qs[e][n][1]);
                            else
                                mma16(x[4 * quad + f][n], a[0][f], a[1][f], a[2][f], a[3][f], qs[e][n][0], qs[e][n][1]);
                        }
                }
        }
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
            const uint4 s = words.get(kScales + uint32_t(quad * 128 + (lane >> 2) * 16));
#pragma unroll
            for (int f = 0; f < 4; ++f) {
                const float2 norm = unpack_half2(word_of(s, f));
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[4 * quad + f][n][i] *= i < 2 ? norm.x : norm.y;
            }
        }
        finish_scores<16, NT>(x, col);
    }

    template <int NT>
    __device__ static void score_quarter(const AttendParams& params, const uint8_t* page, uint32_t, uint32_t q,
                                         int lane, int quarter, float (&x)[2][NT][4], const KeySpot&) {
        const GlobalWords words{page};
        const uint32_t q_row = q + uint32_t(gather_place(lane) * 16 * NT);
        const int quad = quarter >> 1;
        const bool high = quarter & 1;
#pragma unroll 1
        for (int p = 0; p < D / 32; ++p) {
            uint32_t qs[2][NT][2];
            load_q_pair<NT>(qs[0], qs[1], q_row + uint32_t(p * 32 * 16 * NT));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                uint32_t a[4][4]; // [register][tile]
                operands(params, words, 2 * p + e, quad, lane, a);
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
                        mma16(x[j][n], high ? a[0][2 + j] : a[0][j], high ? a[1][2 + j] : a[1][j],
                              high ? a[2][2 + j] : a[2][j], high ? a[3][2 + j] : a[3][j], qs[e][n][0], qs[e][n][1]);
            }
        }
        const uint4 s = words.get(kScales + uint32_t(quad * 128 + (lane >> 2) * 16));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 norm = unpack_half2(high ? word_of(s, 2 + j) : word_of(s, j));
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    x[j][n][i] *= i < 2 ? norm.x : norm.y;
        }
    }
};

} // namespace kvmosaic::cuda
