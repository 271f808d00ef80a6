#include "eval/passkey.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "eval/answers.h"

namespace kvmosaic::eval {

namespace {

constexpr int32_t kAnswerTokens = 16, kSmallest = 96;

const char* const kWho[] = {"The gardener",  "A young teacher", "The old captain", "My neighbour",  "The baker",
                            "A tall farmer", "The librarian",   "Her cousin",      "The carpenter", "A tired doctor"};
const char* const kDid[] = {"walked slowly along", "painted a picture of", "told a long story about",
                            "was often seen near", "never forgot",         "wrote a letter about",
                            "looked for",          "dreamed of",           "spoke quietly about"};
const char* const kWhat[] = {"the river behind the mill", "the empty market square", "a garden full of pears",
                             "the bridge in the valley",  "the harbour at dusk",     "a house with green windows",
                             "the road to the mountains", "the forest in autumn",    "a boat without sails"};
const char* const kWhen[] = {"before breakfast",    "after the long rain", "on a quiet evening", "in early spring",
                             "when the bells rang", "during the harvest",  "on market days"};

// xorshift; the same sequence on every machine.
class Random {
public:
    Random(uint32_t seed, uint32_t a, uint32_t b, uint32_t c) {
        state_ = 0x9e3779b97f4a7c15u;
        for (const uint32_t x : {seed, a, b, c}) {
            state_ ^= x + 0x632be59bd9b4e019u;
            for (int i = 0; i < 4; ++i)
                next();
        }
    }
    uint32_t below(uint32_t n) { return uint32_t((next() >> 33) % n); }
    template <size_t N>
    const char* of(const char* const (&words)[N]) {
        return words[below(uint32_t(N))];
    }

private:
    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_;
    }
    uint64_t state_;
};

Status wrong(const std::string& text) { return {StatusCode::invalid_argument, text}; }

bool same_place(const PasskeyResult& r, const std::string& canonical, int32_t length, double depth, int32_t trial) {
    return r.canonical == canonical && r.length == length && r.depth == depth && r.trial == trial;
}

} // namespace

Result<PasskeyTask> make_passkey(const Model& model, int32_t length, double depth, int32_t trial, uint32_t seed) {
    Random random(seed, uint32_t(length), uint32_t(std::lround(depth * 1000)), uint32_t(trial));
    PasskeyTask task;
    task.length = length, task.depth = depth, task.trial = trial;
    task.key = fmt::format("{}", 10000 + random.below(90000));
    const auto tokens_of = [&](const std::string& text) { return model.tokenize(text, false, false); };
    const std::vector<int32_t> head =
        model.tokenize("There is a pass key hidden in the following text. Find it and remember it.", true, false);
    const std::vector<int32_t> needle =
        tokens_of(fmt::format(" The pass key is {0}. Remember it: {0} is the pass key.", task.key));
    const std::vector<int32_t> question = tokens_of("\n\nWhat is the pass key? The pass key is");
    int64_t room = length - int64_t(head.size() + needle.size() + question.size());
    if (room < 0) {
        return wrong(fmt::format("--lengths {}: key and question alone take {} tokens", length, length - room));
    }
    std::vector<std::vector<int32_t>> filler;
    int64_t filled = 0;
    while (true) {
        std::vector<int32_t> next = tokens_of(
            fmt::format(" {} {} {} {}.", random.of(kWho), random.of(kDid), random.of(kWhat), random.of(kWhen)));
        if (int64_t(next.size()) > room) break;
        room -= int64_t(next.size());
        filled += int64_t(next.size());
        filler.push_back(std::move(next));
    }
    task.tokens = head;
    const auto put = [&](const std::vector<int32_t>& part) {
        task.tokens.insert(task.tokens.end(), part.begin(), part.end());
    };
    int64_t before = 0;
    bool hidden = false;
    for (const std::vector<int32_t>& sentence : filler) {
        // at the end of the sentence that lies nearest to the depth
        if (!hidden && double(before) + double(sentence.size()) / 2 >= depth * double(filled)) {
            put(needle);
            hidden = true;
        }
        put(sentence);
        before += int64_t(sentence.size());
    }
    if (!hidden) put(needle);
    put(question);
    return task;
}

bool holds_key(const std::string& answer, const std::string& key) {
    const auto digit = [&](size_t i) { return i < answer.size() && answer[i] >= '0' && answer[i] <= '9'; };
    for (size_t i = 0; i < answer.size(); ++i) {
        if (!digit(i)) continue;
        size_t end = i;
        while (digit(end))
            ++end;
        if (answer.compare(i, end - i, key) == 0) return true;
        i = end;
    }
    return false;
}

Status validate(const PasskeyOptions& o, int32_t trained) {
    for (const int32_t length : o.lengths) {
        if (length < kSmallest || (trained > 0 && length > trained - kAnswerTokens)) {
            return wrong(fmt::format("--lengths {}: {} to {} tokens are possible with this model", length, kSmallest,
                                     trained - kAnswerTokens));
        }
    }
    for (const double depth : o.depths) {
        if (!(depth >= 0 && depth <= 1)) return wrong(fmt::format("--depths {}: 0 to 1", depth));
    }
    if (o.lengths.empty()) return wrong("--lengths: at least one");
    if (o.depths.empty()) return wrong("--depths: at least one");
    if (o.trials < 1) return wrong(fmt::format("--trials {}: at least 1", o.trials));
    return {};
}

Status passkey(const Model& model, const PasskeyOptions& options, std::vector<PasskeyResult>* results,
               const std::function<Status(const PasskeyResult&)>& landed, const Progress& progress) {
    const Result<std::vector<CacheName>> caches = beside_f16(options.specs);
    if (!caches) return caches.status();
    std::vector<PasskeyTask> tasks;
    std::vector<Prompt> prompts;
    for (const int32_t length : options.lengths) {
        for (const double depth : options.depths) {
            for (int32_t trial = 0; trial < options.trials; ++trial) {
                Result<PasskeyTask> task = make_passkey(model, length, depth, trial, options.seed);
                if (!task) return task.status();
                prompts.push_back({task->tokens, kAnswerTokens});
                tasks.push_back(std::move(*task));
            }
        }
    }
    AnswersOptions wish;
    wish.batch.batch = options.batch;
    wish.batch.chunk = options.ubatch;
    wish.batch.threads = options.threads;
    const auto has = [&](size_t cache, size_t item) {
        const PasskeyTask& task = tasks[item];
        return std::any_of(results->begin(), results->end(), [&](const PasskeyResult& r) {
            return same_place(r, (*caches)[cache].canonical, task.length, task.depth, task.trial);
        });
    };
    const auto take = [&](size_t cache, const Answer& answer) {
        const PasskeyTask& task = tasks[answer.item];
        PasskeyResult out;
        out.spec = (*caches)[cache].spec, out.canonical = (*caches)[cache].canonical;
        out.length = task.length, out.depth = task.depth, out.trial = task.trial, out.key = task.key;
        out.tokens = int32_t(task.tokens.size());
        out.answer = answer.text;
        out.hit = holds_key(answer.text, task.key);
        out.bits = answer.bits, out.cache_bytes = answer.cache_bytes;
        out.path = answer.path, out.isa = answer.isa;
        results->push_back(out);
        return landed(out);
    };
    return answer_all(model, *caches, prompts, wish, has, take, progress);
}

} // namespace kvmosaic::eval
