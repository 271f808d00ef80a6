// From a wish (so much memory, or so many bits) to a cache: what fits, what of it harms the model's attention least,
// and what stands beside it. Sizes come from the layouts (settings.h); the measuring of the few that are listed is
// compare.h's.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "eval/settings.h"
#include "llama/context_memory.h"

namespace kvmosaic::eval {

struct AdviseWish {
    enum class By : uint8_t { memory, cache_memory, bits }; // weights, buffers and cache together; the cache; true bits
    By by = By::memory;
    int64_t bytes = 0;
    double bits = 0;
    int64_t context = 32768; // tokens of each sequence
    int64_t trained = 0;     // most tokens that the model was trained for; 0: unknown
    int32_t sequences = 1;
};

// The wish, then where in the answer a setting stands.
enum class AdviceRole : uint8_t { recommended, smaller, larger, other, reference };
const char* name_of(AdviceRole role);

struct AdvicePick {
    AdviceRole role = AdviceRole::recommended;
    SizedSetting setting;
    bool fits = false;
    int64_t tokens =
        0; // of each sequence that fit into the wish's memory; 0 where bits are asked for, or where none do
};

struct Advice {
    int64_t context = 0;              // that the sizes are for: the wish's or the nearest possible one
    int64_t budget = 0;               // bytes for the cache
    bool met = true;                  // whether the recommended one fits what was asked for
    std::vector<std::string> reasons; // sentences on what was not as asked for, and why this one
    std::vector<AdvicePick> picks;    // the recommended one first, f16 last unless it is that
};

// What caches of this model weigh at a context: all settings, and f16.
struct SizedChoices {
    std::vector<SizedSetting> settings;
    SizedSetting f16;
    int64_t values = 0; // that the f16 cache stands for, all sequences
};

inline constexpr size_t kTriedSettings = 2; // of each method, the largest that fit

// How much a spec harms; smaller is better.
using Harm = std::function<Result<double>(const std::string& spec)>;

// Bytes that the wish leaves for the cache; may be negative.
int64_t cache_budget(const AdviseWish& wish, const ContextMemory& beside, const SizedChoices& choices);

// The longest context that fits at two bits or more where the wish's own does not fit at any setting, else the wish's
// own; 0: none does.
int64_t longest_context(const AdviseWish& wish, int64_t budget, const SizedChoices& choices);

// `choices` are for `context`, which is the wish's unless that was impossible.
Result<Advice> advise(const AdviseWish& wish, int64_t context, const ContextMemory& beside, const SizedChoices& choices,
                      const Harm& harm);

// After measuring, in the order of the picks: the other method takes the first place where it fits and its KL is lower
// by more than both errors.
struct MeasuredLoss {
    double kl = 0, error = 0;
};
void settle(const std::vector<MeasuredLoss>& measured, Advice* advice);

} // namespace kvmosaic::eval
