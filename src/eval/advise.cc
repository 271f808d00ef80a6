#include "eval/advise.h"

#include <algorithm>
#include <map>

#include <fmt/format.h>

#include "eval/bytes.h"

namespace kvmosaic::eval {

namespace {

constexpr int64_t kShortest = 256; // tokens, of a context that is offered in place of the wish's
constexpr double kSoundBits = 2;   // true bits of pages; no context is made longer by fewer, which is a ruin
constexpr double kStep = 0.07;     // a neighbour differs by so much of the bytes at least

bool by_size(const SizedSetting& a, const SizedSetting& b) { return a.bytes < b.bytes; }

const SizedSetting& smallest(const SizedChoices& choices) {
    return *std::min_element(choices.settings.begin(), choices.settings.end(), by_size);
}

struct Ranked {
    double harm = 0;
    SizedSetting setting;
};

// The best of each method among its largest settings that fit into `limit`, the least harmful method first.
class Ranking {
public:
    Ranking(const SizedChoices& choices, const Harm& harm) : choices_(choices), harm_(harm) {}

    Result<std::vector<Ranked>> under(int64_t limit) {
        std::map<std::string, std::vector<SizedSetting>> by_method;
        for (const SizedSetting& s : choices_.settings)
            if (s.bytes <= limit) by_method[s.method].push_back(s);
        std::vector<Ranked> out;
        for (auto& [method, settings] : by_method) {
            std::stable_sort(settings.begin(), settings.end(),
                             [](const auto& a, const auto& b) { return by_size(b, a); });
            settings.resize(std::min(settings.size(), kTriedSettings));
            std::vector<Ranked> own;
            for (const SizedSetting& s : settings) {
                const Result<double> h = of(s.spec);
                if (!h) return h.status();
                own.push_back({*h, s});
            }
            out.push_back(*std::min_element(own.begin(), own.end(), less));
        }
        std::stable_sort(out.begin(), out.end(), less);
        return out;
    }

private:
    static bool less(const Ranked& a, const Ranked& b) { return a.harm < b.harm; }
    Result<double> of(const std::string& spec) {
        const auto found = known_.find(spec);
        if (found != known_.end()) return found->second;
        const Result<double> h = harm_(spec);
        if (h) known_[spec] = *h;
        return h;
    }
    const SizedChoices& choices_;
    const Harm& harm_;
    std::map<std::string, double> known_;
};

// The next setting of the same method that is smaller, or larger, by kStep at least.
const SizedSetting* neighbour(const SizedChoices& choices, const SizedSetting& of, bool larger) {
    const SizedSetting* best = nullptr;
    for (const SizedSetting& s : choices.settings) {
        if (s.method != of.method) continue;
        const double by = double(s.bytes) / double(of.bytes) - 1;
        if (larger ? by < kStep : by > -kStep) continue;
        if (!best || (larger ? s.bytes < best->bytes : s.bytes > best->bytes)) best = &s;
    }
    return best;
}

std::string each(int32_t sequences) { return sequences > 1 ? fmt::format(" for each of {} sequences", sequences) : ""; }

} // namespace

const char* name_of(AdviceRole role) {
    switch (role) {
    case AdviceRole::recommended:
        return "recommended";
    case AdviceRole::smaller:
        return "smaller";
    case AdviceRole::larger:
        return "larger";
    case AdviceRole::other:
        return "other";
    case AdviceRole::reference:
        return "reference";
    }
    return "";
}

int64_t cache_budget(const AdviseWish& wish, const ContextMemory& beside, const SizedChoices& choices) {
    if (wish.by == AdviseWish::By::bits) return int64_t(wish.bits * double(choices.values) / 8);
    return wish.by == AdviseWish::By::memory ? wish.bytes - beside.all() : wish.bytes;
}

namespace {

int64_t tokens_within(const SizedSetting& s, int64_t context, int64_t budget) {
    const int64_t over = s.bytes - budget;
    const int64_t pages = over > 0 ? -((over + s.growth - 1) / s.growth) : -over / s.growth;
    return std::max<int64_t>(0, context + pages * kPageTokens);
}

} // namespace

int64_t longest_context(const AdviseWish& wish, int64_t budget, const SizedChoices& choices) {
    const double values = double(choices.values) / double(wish.context) * double(kPageTokens); // what `growth` is for
    if (smallest(choices).bytes <= budget) return wish.context;
    int64_t best = 0;
    for (const SizedSetting& s : choices.settings)
        if (8 * double(s.growth) / values >= kSoundBits) best = std::max(best, tokens_within(s, wish.context, budget));
    best = best / kShortest * kShortest;
    return best >= kShortest ? best : 0;
}

Result<Advice> advise(const AdviseWish& wish, int64_t context, const ContextMemory& beside, const SizedChoices& choices,
                      const Harm& harm) {
    using By = AdviseWish::By;
    Advice out;
    out.context = context;
    out.budget = cache_budget(wish, beside, choices);
    const std::string tokens = fmt::format("{} tokens{}", context, each(wish.sequences));
    const auto add = [&](AdviceRole role, const SizedSetting& s) {
        for (const AdvicePick& p : out.picks)
            if (p.setting.spec == s.spec) return;
        const bool limited = wish.by != By::bits && out.budget > 0;
        const int64_t room = limited ? tokens_within(s, context, out.budget) : 0;
        out.picks.push_back({role, s, s.bytes <= out.budget, wish.trained > 0 ? std::min(room, wish.trained) : room});
    };
    Ranking ranking(choices, harm);

    if (choices.f16.bytes <= out.budget) {
        out.reasons.push_back(
            wish.by == By::bits
                ? fmt::format("{:.4g} bits are as many as the 16-bit cache has ({:.2f}), which loses nothing",
                              wish.bits, choices.f16.bits)
                : fmt::format("the 16-bit cache of {} fits ({}), and loses nothing; the others here leave room", tokens,
                              bytes_text(choices.f16.bytes)));
        add(AdviceRole::recommended, choices.f16);
        for (const int64_t parts : {2, 4}) {
            const Result<std::vector<Ranked>> best = ranking.under(choices.f16.bytes / parts);
            if (!best) return best.status();
            if (!best->empty()) add(AdviceRole::smaller, best->front().setting);
        }
        return out;
    }

    int64_t limit = out.budget;
    const SizedSetting& least = smallest(choices);
    if (context < wish.context) {
        out.reasons.push_back(fmt::format("{} tokens{} do not fit; {} is the most that does at two bits or more",
                                          wish.context, each(wish.sequences), context));
        out.met = false;
    }
    if (least.bytes > limit) {
        out.met = false;
        limit = least.bytes;
        const std::string need = fmt::format("the smallest cache of {} takes {} ({:.2f} true bits)", tokens,
                                             bytes_text(least.bytes), least.bits);
        if (wish.by == By::bits)
            out.reasons.push_back(fmt::format("{:.4g} bits are below all settings: {}", wish.bits, need));
        else if (wish.by == By::cache_memory)
            out.reasons.push_back(fmt::format("{} are too little: {}", bytes_text(wish.bytes), need));
        else
            out.reasons.push_back(
                fmt::format("{} are too little: weights take {}, the buffers of a step {}, and {}; {} "
                            "is the least that works",
                            bytes_text(wish.bytes), bytes_text(beside.weights), bytes_text(beside.compute), need,
                            bytes_text(beside.all() + least.bytes)));
    }
    const Result<std::vector<Ranked>> ranked = ranking.under(limit);
    if (!ranked) return ranked.status();
    const SizedSetting& first = ranked->front().setting;
    add(AdviceRole::recommended, first);
    if (const SizedSetting* s = neighbour(choices, first, false)) add(AdviceRole::smaller, *s);
    if (const SizedSetting* s = neighbour(choices, first, true)) add(AdviceRole::larger, *s);
    if (ranked->size() > 1) add(AdviceRole::other, (*ranked)[1].setting);
    add(AdviceRole::reference, choices.f16);
    return out;
}

void settle(const std::vector<MeasuredLoss>& measured, Advice* advice) {
    std::vector<AdvicePick>& picks = advice->picks;
    for (size_t i = 1; i < picks.size() && i < measured.size(); ++i) {
        const bool clear = measured[i].kl + measured[i].error < measured[0].kl - measured[0].error;
        if (picks[i].role != AdviceRole::other || !picks[i].fits || !clear) continue;
        advice->reasons.push_back(
            fmt::format("of what fits, {} looked best in attention alone, but {} lost less on the "
                        "whole model",
                        picks[0].setting.spec, picks[i].setting.spec));
        picks[0].role = AdviceRole::other, picks[i].role = AdviceRole::recommended;
        std::rotate(picks.begin(), picks.begin() + std::ptrdiff_t(i), picks.begin() + std::ptrdiff_t(i) + 1);
        return;
    }
}

} // namespace kvmosaic::eval
