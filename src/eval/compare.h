// Teacher-forced comparison of caches over texts: windows outside, specs inside, one loaded model, one context a
// spec. All contexts advance together, one step of the window at a time, so that only one step of logits is alive.
#pragma once

#include <array>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "eval/engine.h"
#include "eval/kept.h"

namespace kvmosaic::eval {

struct CompareOptions {
    std::vector<std::string> specs;
    int32_t window = 2048;           // tokens a window; windows follow each other in a text
    std::vector<int32_t> windows{4}; // of each text
    int32_t score_from = 256;        // first token of a window whose prediction is scored
    int32_t ubatch = 128;            // tokens a step
    int32_t threads = 0;
    StepMode step = StepMode::decode;
    int64_t context = 0; // true bits are told for it too, where it is set
    int32_t all_windows() const { return std::accumulate(windows.begin(), windows.end(), 0); }
};

// Contexts for which true bits are worked out whatever the window's length, and where in them some lie.
inline constexpr int64_t kCurve[] = {512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
inline constexpr size_t kAt2K = 2, kAt8K = 4, kAt32K = 6;
using BitsCurve = std::array<double, std::size(kCurve)>; // NaN where nothing tells
inline constexpr BitsCurve kNoCurve = [] {
    BitsCurve out;
    out.fill(std::numeric_limits<double>::quiet_NaN());
    return out;
}();

// What one cache did in one window.
struct WindowResult {
    std::vector<float> nll; // of each scored token, nats
    std::vector<float> kl;  // KL(reference || this) where it was predicted, nats
    int64_t agree = 0;      // positions whose most likely token is the reference's
    int64_t tokens = 0;     // put in
    double seconds = 0;     // of the model's work on them
    int64_t cache_bytes = 0;
    double bits = 0, bits_key = 0, bits_value = 0;
    BitsCurve curve = kNoCurve; // at kCurve; of a row of all layers
    double bits_context = 0;    // at CompareOptions::context
    int64_t non_finite = 0;
    std::string path, isa;
};

// One line of the result: all windows of a cache.
struct Row {
    std::string spec;      // as it was asked for; "floor" is the f16 cache measured against the f32 cache
    std::string canonical; // what the spec means, without defaults
    std::string reference; // spec of the cache it is measured against
    std::vector<WindowResult> windows;
    int32_t layer = -1; // the only layer that has the spec, all others f16 (layers.h); -1: all have it
};

struct RowSummary {
    int64_t tokens = 0; // scored
    double bits = 0, bits_key = 0, bits_value = 0;
    BitsCurve curve{};
    double bits_context = 0;
    int64_t cache_bytes = 0; // at the end of a window, mean over the windows
    // Perplexity by that of `base` on the same positions, NaN where it has none; its error is that of the pairs.
    double ppl_ratio = 0, ppl_ratio_error = 0;
    double ppl = 0, ppl_error = 0, kl_mean = 0, kl_error = 0, kl_p99 = 0, top1 = 0, tokens_per_second = 0;
    int64_t non_finite = 0;
    std::string path, isa;
};
RowSummary summarize(const Row& row, const Row& base);

// Equal parts of the scored positions of a window, at most `most`: their first positions, then the window's length.
std::vector<int32_t> position_edges(const CompareOptions& options, int32_t most);
// Mean KL of each part, over all windows; a token's KL counts at the position of the token.
std::vector<double> kl_by_position(const Row& row, const std::vector<int32_t>& edges);

// Rows in the order: f16 (the reference), floor, then the specs. A spec "f16" among them is the reference itself.
std::vector<Row> plan_rows(const std::vector<std::string>& specs);

// ok, or the field, its value and its range.
// `names` of the texts are for the message.
Status validate(const CompareOptions& options, const std::vector<std::string>& names,
                const std::vector<std::vector<int32_t>>& texts, int32_t trained_context);

// Fills the windows that `rows` do not have yet; a window that every row has is skipped. `landed` is called after each
// finished window and may store the rows. With `kept` the reference's logits are those kept there, and put there first
// where a window has none yet.
Status compare(const Model& model, const std::vector<std::vector<int32_t>>& texts, const CompareOptions& options,
               std::vector<Row>* rows, const std::function<Status()>& landed, const Progress& progress,
               KeptLogits* kept = nullptr);

} // namespace kvmosaic::eval
