// The ladder of a page in planes, found on the device: Search of src/methods/ladder.cc step by step, in the same double
// precision operations, so that both find the same ladder.
//
// Bound: latency. A round tries 36 moves of vectors, one a thread, each some forty dependent loads and products; a page
// takes two to eight rounds. The two beginnings run side by side in the halves of a block.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace kvmosaic::cuda {

// Vectors of the planes low4, high4, two, one; channels of 6 and of 3 bits.
struct LadderMix {
    int vectors[4];
    int six, three;
};

// by widths 8, 6, 4, 3, 2, 1, 0
inline constexpr int kLadderWidths = 7;
__host__ __device__ constexpr double ladder_distortion(int bits) { // distortion_of of methods/ladder.h
    return bits == 0   ? 1.0
           : bits == 1 ? 0.3634
           : bits == 2 ? 0.1188
           : bits == 3 ? 0.03744
           : bits == 4 ? 0.01154
           : bits == 6 ? 0.00104
                       : 0.0000909;
}

template <int D>
struct LadderSearch {
    struct Shared {
        float sorted[D];        // weights, descending
        double sums[D + 1];     // of the first i
        double gains[4][D + 2]; // weights times what a bit more is worth (gain_of), by rank + 1; 0 at both ends
        LadderMix best[2];
        double least[2];
        double found[D / 32];
        int move[D / 32];
    };
    const Shared& sm;

    // Distortion that a channel loses from one width to the next: 0 to 1 bits, 1 to 2, 2 to 3, 4 to 6.
    __host__ __device__ static constexpr double gain_of(int i) {
        return i == 0   ? ladder_distortion(0) - ladder_distortion(1)
               : i == 1 ? ladder_distortion(1) - ladder_distortion(2)
               : i == 2 ? ladder_distortion(2) - ladder_distortion(3)
                        : ladder_distortion(4) - ladder_distortion(6);
    }
    // After `sorted`, before a barrier: thread i of the block makes the entries of rank i.
    __device__ static void make_gains(Shared& sm) {
        const int i = threadIdx.x;
        const double w = double(sm.sorted[i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            sm.gains[k][i + 1] = __dmul_rn(gain_of(k), w);
            if (i == 0) sm.gains[k][0] = sm.gains[k][D + 1] = 0.0;
        }
    }
    __device__ __forceinline__ double gain(int k, int rank) const { return sm.gains[k][max(min(rank, D), -1) + 1]; }
    __device__ static void counts(const LadderMix& mix, int (&n)[kLadderWidths]) {
        const int low = 8 * mix.vectors[0], high = 8 * mix.vectors[1], two = 16 * mix.vectors[2],
                  one = 32 * mix.vectors[3];
        n[0] = high, n[1] = mix.six, n[2] = low - high - mix.six, n[3] = mix.three;
        n[4] = two - mix.six - mix.three, n[5] = one - mix.three, n[6] = 0;
        int left = D;
#pragma unroll
        for (int i = 0; i < kLadderWidths; ++i)
            n[i] = min(n[i], left), left -= n[i];
        n[6] = left;
    }
    __device__ double error(const LadderMix& mix) const {
        constexpr int kBits[kLadderWidths] = {8, 6, 4, 3, 2, 1, 0};
        int n[kLadderWidths], at = 0;
        counts(mix, n);
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < kLadderWidths; ++i) {
            sum = __dadd_rn(sum, __dmul_rn(ladder_distortion(kBits[i]), __dsub_rn(sm.sums[at + n[i]], sm.sums[at])));
            at += n[i];
        }
        return sum;
    }
    template <class Helps>
    __device__ static int border(int most, Helps helps) {
        int from = 0, to = most / 4;
        while (from < to) {
            const int middle = (from + to) / 2;
            if (helps(middle * 4 + 2))
                from = middle + 1;
            else
                to = middle;
        }
        return from * 4;
    }
    // The error of these vectors with their best borders; infinity where there are none.
    __device__ double tried(LadderMix& mix) const {
        const int low = 8 * mix.vectors[0], high = 8 * mix.vectors[1], two = 16 * mix.vectors[2],
                  one = 32 * mix.vectors[3];
        if (min(min(low, high), min(two, one)) < 0 || high > low) return __longlong_as_double(0x7FF0000000000000ll);
        mix.six = mix.three = 0;
        for (int round = 0; round < 2; ++round) {
            mix.three = border(min(two - mix.six, one),
                               [&](int n) { return gain(2, low + n) > gain(0, low + two - mix.six + one - n - 1); });
            mix.six = border(min(low - high, two - mix.three), [&](int n) {
                return gain(3, high + n) >
                       __dadd_rn(gain(1, low + two - n - 1), gain(0, low + two - n + one - mix.three - 1));
            });
        }
        return error(mix);
    }
    // Moves in the order in which ladder.cc tries them: a vector from a plane to another, and perhaps a second one.
    __device__ static void move_of(int index, LadderMix& mix) {
        const int from = index / 9, which = index % 9;
        // Of the other three planes in ascending order: where to, and where a second one goes; 3: nowhere.
        const int to = which < 4 ? 0 : which < 7 ? 1 : 2, also = which < 4 ? which : which < 7 ? which - 3 : which - 5;
        const int to_plane = to + (to >= from ? 1 : 0), also_plane = also + (also >= from ? 1 : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) // without an index that registers do not have
            mix.vectors[i] += (i == to_plane) + (also < 3 && i == also_plane) - (i == from) * (also < 3 ? 2 : 1);
    }

    // All threads of the block; the first half begins with 2 bits, the other with 4. Leaves both ends in `best`.
    __device__ static void run(Shared& sm, int budget) {
        constexpr int kHalf = D / 2;
        const LadderSearch search{sm};
        const int side = threadIdx.x / kHalf, own = threadIdx.x % kHalf, warp = threadIdx.x >> 5;
        const int two = min(budget, (D + 15) / 16);
        LadderMix best{{side == 0 ? budget - two : budget, 0, side == 0 ? two : 0, 0}, 0, 0};
        double least = search.tried(best);
        if (own == 0) sm.best[side] = best;
        bool open = true;
        while (__syncthreads_or(open)) { // one side may go on alone
            LadderMix mine;
            double found = __longlong_as_double(0x7FF0000000000000ll);
            int move = 36;
            for (int m = own; open && m < 36; m += kHalf) {
                LadderMix mix = best;
                move_of(m, mix);
                const double e = search.tried(mix);
                if (e < found) found = e, move = m, mine = mix;
            }
            double winner = found;
            int index = move;
            const auto take = [&](double e, int m) {
                if (e < winner || (e == winner && m < index)) winner = e, index = m;
            };
#pragma unroll
            for (int s = 16; s >= 1; s >>= 1) {
                const double e = __shfl_xor_sync(~0u, winner, s);
                take(e, __shfl_xor_sync(~0u, index, s));
            }
            if (kHalf > 32) { // two warps
                if ((threadIdx.x & 31) == 0) sm.found[warp] = winner, sm.move[warp] = index;
                __syncthreads();
                take(sm.found[warp ^ 1], sm.move[warp ^ 1]);
            }
            open = open && winner < least;
            if (open) least = winner;
            if (open && move == index) sm.best[side] = mine;
            __syncthreads();
            best = sm.best[side];
        }
        if (own == 0) sm.least[side] = least;
    }
};

} // namespace kvmosaic::cuda
