// Logits of the reference cache at the scored positions of a comparison, kept so that one more cache costs its own pass
// only. Two bytes each: what a row's largest logit is above it, as f16, so that the likely tokens lose least. The KL to
// a row as it was before that is below 1e-6 nats.
#pragma once

#include <cstdint>
#include <vector>

namespace kvmosaic::eval {

class KeptLogits {
public:
    static int64_t bytes(int64_t positions, int64_t vocabulary) { return positions * vocabulary * 2; }

    bool has(int32_t window) const { return window < int32_t(windows_.size()); }
    // The next window, one row after the other; begin() drops what an earlier try left unfinished.
    void begin(int64_t positions, int64_t vocabulary);
    void add(const float* logits);
    void finish();
    // Row `position` of a window, shifted by its largest logit, into out [vocabulary].
    void read(int32_t window, int64_t position, float* out) const;

private:
    int64_t vocabulary_ = 0;
    std::vector<std::vector<uint16_t>> windows_; // [windows][positions * vocabulary]
    std::vector<uint16_t> next_;
};

} // namespace kvmosaic::eval
