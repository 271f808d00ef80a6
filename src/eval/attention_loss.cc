#include "eval/attention_loss.h"

#include <algorithm>
#include <chrono>

#include "llama/adapter.h"

namespace kvmosaic::eval {

namespace {

constexpr int32_t kDecoded = 12; // rows that are measured
constexpr size_t kFirst = 4, kLayers = 16;

// Layers with K/V that are looked at: all of a small model.
std::vector<int32_t> chosen_layers(const ModelShape& shape) {
    std::vector<int32_t> all;
    for (size_t i = 0; i < shape.layers.size(); ++i)
        if (shape.layers[i].has_kv()) all.push_back(int32_t(i));
    if (all.size() <= kLayers) return all;
    std::vector<int32_t> out(all.begin(), all.begin() + kFirst);
    for (size_t i = 0; i < kLayers - kFirst; ++i)
        out.push_back(all[kFirst + i * (all.size() - 1 - kFirst) / (kLayers - kFirst - 1)]);
    return out;
}

} // namespace

Result<AttentionLoss> AttentionLoss::make(const Model& model, const std::vector<int32_t>& text, int32_t threads,
                                          const Progress& progress) {
    AttentionLoss out;
    out.layers_ = chosen_layers(shape_of(model.get()));
    CaptureOptions options;
    options.tokens = options.window = kRows;
    options.threads = threads;
    options.query = true;
    options.layers = out.layers_;
    const auto start = std::chrono::steady_clock::now();
    Result<Capture> seen = capture(model, text, options, progress);
    if (!seen) return seen.status();
    out.seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out.input_.seen = std::move(*seen);
    return out;
}

Result<double> AttentionLoss::of(const std::string& spec) {
    ComponentOptions options;
    options.prefill = kRows - kDecoded, options.decode = kDecoded, options.alone = true;
    double sum = 0;
    for (const int32_t layer : layers_) {
        input_.layer = layer;
        const Result<ComponentResult> result = component(input_, spec, options);
        if (!result) return result.status();
        sum += result->kl + 1 - result->cosine;
    }
    return sum / double(layers_.size());
}

} // namespace kvmosaic::eval
