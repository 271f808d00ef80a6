#include "eval/answers.h"

#include <algorithm>
#include <array>
#include <set>

#include <fmt/format.h>

#include "eval/metrics.h"
#include "kvmosaic/method.h"

namespace kvmosaic::eval {

Result<std::vector<CacheName>> beside_f16(const std::vector<std::string>& specs) {
    std::vector<CacheName> out{{"f16", "f16"}};
    for (const std::string& spec : specs) {
        const auto method = open_method(spec);
        if (!method) return method.status();
        if ((*method)->spec() != "f16") out.push_back({spec, (*method)->spec()});
    }
    return out;
}

Status answer_all(const Model& model, const std::vector<CacheName>& caches, const std::vector<Prompt>& prompts,
                  const AnswersOptions& options, const std::function<bool(size_t, size_t)>& has,
                  const std::function<Status(size_t, const Answer&)>& landed, const Progress& progress) {
    struct Lane {
        std::vector<size_t> open; // prompts without an answer
        std::optional<Batch> batch;
        size_t answered = 0;
        double share = 0; // of `open`
    };
    std::vector<Lane> lanes(caches.size());
    size_t all = 0;
    for (size_t c = 0; c < caches.size(); ++c) {
        for (size_t i = 0; i < prompts.size(); ++i)
            if (!has(c, i)) lanes[c].open.push_back(i);
        lanes[c].answered = prompts.size() - lanes[c].open.size();
        all += lanes[c].open.size();
    }
    const auto named = [&](size_t c, const Status& bad) {
        return Status(bad.code(), fmt::format("cache '{}': {}", caches[c].spec, bad.message()));
    };
    for (size_t end = std::min(options.block, prompts.size()); all > 0;
         end = std::min(end + options.block, prompts.size())) {
        for (size_t c = 0; c < caches.size(); ++c) {
            Lane& lane = lanes[c];
            if (lane.answered >= end) continue;
            if (!lane.batch) {
                BatchOptions wish = options.batch;
                wish.spec = caches[c].spec;
                Result<Batch> made = Batch::make(model, wish, prompts, lane.open);
                if (!made) return named(c, made.status());
                lane.batch = std::move(*made);
            }
            const auto tick = [&] {
                lane.share = lane.batch->share();
                double done = 0;
                for (const Lane& l : lanes)
                    done += l.share * double(l.open.size());
                if (progress) {
                    progress(fmt::format("{}: {} of {} answers", caches[c].spec, lane.answered, prompts.size()),
                             done / double(all));
                }
            };
            const auto done = [&](const Answer& answer) {
                ++lane.answered;
                return landed(c, answer);
            };
            if (Status bad = lane.batch->run(end - lane.answered, done, tick); !bad) return named(c, bad);
            if (lane.batch->finished()) {
                lane.batch.reset();
                lane.share = 1;
            }
        }
        if (end == prompts.size()) break;
    }
    return {};
}

int64_t common_tokens(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    const size_t n = std::min(a.size(), b.size());
    return std::mismatch(a.begin(), a.begin() + int64_t(n), b.begin()).first - a.begin();
}

double repetition(const std::vector<int32_t>& tokens) {
    constexpr size_t kRun = 4;
    if (tokens.size() <= kRun) return 0;
    std::set<std::array<int32_t, kRun>> seen;
    const size_t runs = tokens.size() - kRun + 1;
    for (size_t i = 0; i < runs; ++i) {
        std::array<int32_t, kRun> run;
        std::copy_n(tokens.begin() + int64_t(i), kRun, run.begin());
        seen.insert(run);
    }
    return 1 - double(seen.size()) / double(runs);
}

AnswersSummary summarize(const std::vector<const Answer*>& answers, const std::vector<const Answer*>& reference) {
    AnswersSummary out;
    out.answers = int64_t(answers.size());
    if (answers.empty()) return out;
    std::vector<float> common;
    double tokens = 0, seconds = 0;
    for (size_t i = 0; i < answers.size(); ++i) {
        const Answer &a = *answers[i], &r = *reference[i];
        common.push_back(float(common_tokens(a.tokens, r.tokens)));
        out.identical += a.tokens == r.tokens && a.stop == r.stop;
        out.cut += a.stop == Stop::count;
        out.repetition += repetition(a.tokens);
        out.bits += a.bits;
        out.cache_bytes += double(a.cache_bytes);
        tokens += double(a.tokens.size()), seconds += a.seconds;
        out.path = a.path, out.isa = a.isa;
    }
    const double n = double(answers.size());
    out.common_mean = summarize(common).mean;
    out.common_median = quantile(std::move(common), 0.5);
    out.identical /= n, out.cut /= n, out.repetition /= n, out.bits /= n, out.cache_bytes /= n;
    out.tokens_mean = tokens / n;
    out.tokens_per_second = seconds > 0 ? tokens / seconds : 0;
    return out;
}

} // namespace kvmosaic::eval
