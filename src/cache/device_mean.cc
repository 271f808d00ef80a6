// Tables for the mean of keys on a device: what MeanTable does, as operands of the tensor cores.
#include <algorithm>

#include "cache/device_impl.h"
#include "cache/mean.h"
#include "kernels/cuda/order.h"

namespace kvmosaic::device {
namespace {

constexpr int32_t kStepPairs = 8;         // a step of 16 has the cosine and the sine part of 8 pairs
constexpr float kPolynomialScale = 64.0f; // between the two products, for the range of fp16

uint32_t halves(float low, float high) { return uint32_t(f32_to_f16_sat(low)) | uint32_t(f32_to_f16_sat(high)) << 16; }

// The A operand of 16 x 16: value(row, k). [32 threads][4 registers]
template <class Value>
void put_operand(Value value, uint32_t* to) {
    for (int32_t lane = 0; lane < 32; ++lane)
        for (int32_t r = 0; r < 4; ++r) {
            const int32_t row = lane / 4 + 8 * (r % 2), k = 2 * (lane % 4) + 8 * (r / 2);
            to[lane * 4 + r] = halves(value(row, k), value(row, k + 1));
        }
}

int32_t steps_for(int32_t pairs) { return (pairs + kStepPairs - 1) / kStepPairs; }

} // namespace

Status DeviceCache::Impl::set_up_mean(int32_t layer) {
    const Host& host = *like->impl_;
    SideStore& s = side(layer, Side::key);
    const LayerShape& shape = host.shape.layers[size_t(layer)];
    const MeanTable& table = *host.means[size_t(layer)];
    const int32_t pairs = table.pairs(), fast = table.fast(), slow = pairs - fast, terms = table.terms();
    if (2 * pairs != s.dim)
        s.no_basis = "keys lie about a mean, and not all of their channels turn";
    else if (steps_for(fast) > s.dim / 64 + 1)
        s.no_basis = "keys lie about a mean that turns faster than the kernels' tables";
    else if (!in_planes(s.store.rule))
        s.no_basis = "keys are packed without their mean";
    if (s.no_basis) return {};
    const auto take_means = [&] {
        Status taken = take(size_t(options.slots) * size_t(kv_heads(layer)) * size_t(s.mean.slots), &s.means);
        s.mean.mean = s.means;
        return taken;
    };
    for (int32_t other = 0; other < layer; ++other) {
        const SideStore& known = side(other, Side::key);
        if (known.pairs.empty() || !(host.shape.layers[size_t(other)].rope == shape.rope)) continue;
        s.mean = known.mean, s.pairs = known.pairs;
        return take_means();
    }
    KeyMean& mean = s.mean;
    mean.fast_steps = steps_for(fast), mean.slow_steps = steps_for(slow);
    mean.slots = kStepPairs * (mean.fast_steps + mean.slow_steps);
    const auto pair_at = [&](int32_t slot) { // -1: none
        const int32_t at = slot - kStepPairs * mean.fast_steps;
        if (at < 0) return slot < fast ? slot : -1;
        return at < slow ? fast + at : -1;
    };
    std::vector<uint32_t> channels; // of a slot without a pair any: its mean is 0
    for (int32_t slot = 0; slot < mean.slots; ++slot) {
        const int32_t pair = pair_at(slot);
        const auto [a, b] = table.channels(std::max(pair, 0));
        channels.push_back(uint32_t(a) | uint32_t(b) << 16);
        s.pairs.push_back(pair < 0 ? kNoPair : channels.back());
    }
    const int32_t steps = mean.fast_steps + 1;
    std::vector<uint32_t> features(size_t(8 * steps) * 128), slowly(size_t(std::max(mean.slow_steps, 1)) * 128);
    for (int32_t tile = 0; tile < 8; ++tile)
        for (int32_t step = 0; step < steps; ++step)
            put_operand(
                [&](int32_t row, int32_t k) {
                    const int32_t token = 16 * tile + cuda::place_of_row(row);
                    const auto at = [&](int32_t i) { return table.features()[size_t(i * kPageTokens + token)]; };
                    if (step == mean.fast_steps) return k < terms ? kPolynomialScale * at(2 * fast + k) : 0.0f;
                    const int32_t pair = kStepPairs * step + k / 2;
                    return pair < fast ? at(k % 2 * fast + pair) : 0.0f;
                },
                features.data() + (tile * steps + step) * 128);
    for (int32_t step = 0; step < mean.slow_steps; ++step)
        put_operand(
            [&](int32_t row, int32_t k) {
                const int32_t pair = kStepPairs * step + k / 2;
                if (pair >= slow || row >= terms) return 0.0f;
                return table.slow()[size_t((k % 2 * slow + pair) * terms + row)] / kPolynomialScale;
            },
            slowly.data() + step * 128);
    // Of the first rows of pages, for attention and encoding, and of rows behind it, for encoding.
    std::vector<float> turns, near, turn(size_t(2 * pairs));
    const auto put_turn = [&](int64_t position, std::vector<float>& to) {
        table.angle(position, turn.data());
        for (int32_t slot = 0; slot < mean.slots; ++slot) {
            const int32_t pair = pair_at(slot);
            to.push_back(pair < 0 ? 0.0f : turn[size_t(pair)]);
            to.push_back(pair < 0 ? 0.0f : turn[size_t(pairs + pair)]);
        }
    };
    for (int32_t page = 0; page < stride; ++page)
        put_turn(host.window(layer, Side::key).front + int64_t(page) * kPageTokens, turns);
    for (int32_t token = 0; token < kPageTokens; ++token)
        put_turn(token, near);
    if (Status bad = put(channels, &mean.channels); !bad) return bad;
    if (Status bad = put(features, &mean.features); !bad) return bad;
    if (Status bad = put(slowly, &mean.slow); !bad) return bad;
    if (Status bad = put(turns, &mean.turns); !bad) return bad;
    if (Status bad = put(near, &mean.near); !bad) return bad;
    return take_means();
}

} // namespace kvmosaic::device
