#include "eval/kept.h"

#include <algorithm>
#include <utility>

#include "kvmosaic/numeric.h"

namespace kvmosaic::eval {

void KeptLogits::begin(int64_t positions, int64_t vocabulary) {
    vocabulary_ = vocabulary;
    next_.clear();
    next_.reserve(size_t(positions * vocabulary));
}

void KeptLogits::add(const float* logits) {
    const float most = *std::max_element(logits, logits + vocabulary_);
    for (int64_t i = 0; i < vocabulary_; ++i)
        next_.push_back(f32_to_f16_sat(logits[i] - most));
}

void KeptLogits::finish() { windows_.push_back(std::exchange(next_, {})); }

void KeptLogits::read(int32_t window, int64_t position, float* out) const {
    const uint16_t* from = windows_[size_t(window)].data() + position * vocabulary_;
    for (int64_t i = 0; i < vocabulary_; ++i)
        out[i] = f16_to_f32(from[i]);
}

} // namespace kvmosaic::eval
