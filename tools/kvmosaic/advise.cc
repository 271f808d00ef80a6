// kvmosaic advise: which method, which bits? From memory or bits that may be spent to a cache, with what it costs.
#include <algorithm>
#include <cmath>
#include <memory>

#include "eval/advise_report.h"
#include "eval/attention_loss.h"
#include "eval/build.h"
#include "eval/bytes.h"
#include "eval/compare.h"
#include "eval/texts.h"
#include "kvmosaic/app.h"
#include "llama/adapter.h"
#include "llama/gguf_check.h"

namespace kvmosaic::tool {

namespace {

using eval::AdviseWish;

struct Options {
    std::string model, weights, memory, cache_memory, file, json;
    double bits = 0;
    int ctx = 0, parallel = 1, tokens = 1024;
    bool quick = false, force = false;
    Common common;
};
constexpr int64_t kContext = 32768;

AdviseWish wish_of(const Options& o, bool by_bits) {
    const int asked = int(!o.memory.empty()) + int(!o.cache_memory.empty()) + int(by_bits);
    if (asked != 1) {
        bad_usage("what may the cache cost? Exactly one of --memory SIZE (weights, buffers and cache together), "
                  "--cache-memory SIZE (the cache alone) and --bits B (true bits a value)");
    }
    AdviseWish wish;
    wish.context = o.ctx, wish.sequences = o.parallel;
    if (by_bits) {
        if (!(o.bits > 0 && o.bits <= 64)) bad_usage("--bits {}: more than 0, up to 64", o.bits);
        wish.by = AdviseWish::By::bits, wish.bits = o.bits;
        return wish;
    }
    const bool all = !o.memory.empty();
    const std::string& size = all ? o.memory : o.cache_memory;
    const Result<int64_t> bytes = eval::parse_bytes(size);
    if (!bytes) bad_usage("{} {}: {}", all ? "--memory" : "--cache-memory", size, bytes.status().message());
    wish.by = all ? AdviseWish::By::memory : AdviseWish::By::cache_memory, wish.bytes = *bytes;
    return wish;
}

// The methods in the order of their table, without looking at the model.
Result<double> in_order(const std::string& spec) {
    const std::vector<std::string> names = eval::free_methods();
    return double(std::find(names.begin(), names.end(), spec.substr(0, spec.find(':'))) - names.begin());
}

class Advisor {
public:
    Advisor(const Options& o, const AdviseWish& wish) : o_(o) {
        r_.wanted = o.model, r_.wish = wish, r_.asked_context = o.ctx;
        r_.head.machine = eval::machine_name(), r_.head.version = KVMOSAIC_VERSION;
        r_.head.commit = eval::build_commit(), r_.head.command = command_line();
    }

    const eval::AdviceReport& run() {
        const std::string text = o_.file.empty() ? eval::sample_text() : take(eval::read_text(o_.file));
        r_.head.model = find_model(o_.model);
        eval::set_verbose(o_.common.verbose);
        check(check_gguf(r_.head.model));
        ProgressBar bar;
        r_.head.model_sha256 = take(eval::sha256_of_file(r_.head.model, bar.receiver()));
        bar.finish();
        look();
        int64_t context = r_.wish.context;
        size_choices(context);
        const int64_t budget = eval::cache_budget(r_.wish, r_.beside, choices_);
        const int64_t longest =
            r_.wish.by == AdviseWish::By::bits ? 0 : eval::longest_context(r_.wish, budget, choices_);
        if (longest > 0 && longest < context) size_choices(context = longest);
        r_.f16 = choices_.f16;
        if (o_.quick)
            r_.advice = take(eval::advise(r_.wish, context, r_.beside, choices_, in_order));
        else
            measure(text, context);
        if (clamped_.empty()) return r_;
        r_.advice.reasons.insert(r_.advice.reasons.begin(), clamped_);
        r_.advice.met = false;
        return r_;
    }

private:
    // The model as `run` would load it: what stands beside the cache, and the shape that the cache gets.
    void look() {
        const eval::Model model = load_model(r_.head.model);
        r_.trained = model.trained_context();
        const int64_t most = r_.trained > 0 ? r_.trained : int64_t(1) << 24;
        int64_t& context = r_.wish.context;
        if (context > most)
            clamped_ =
                fmt::format("the model was trained for {} tokens; more than that ({}) is not possible", most, context);
        r_.wish.trained = r_.trained;
        context = std::min(context > 0 ? context : kContext, most);
        eval::ContextOptions options;
        options.context = int32_t(context), options.sequences = r_.wish.sequences, options.threads = o_.common.threads;
        const eval::Context made = take(eval::Context::make(model, options));
        r_.beside = memory_beside_cache(made.get());
        shape_ = made.cache()->shape();
    }

    void size_choices(int64_t context) {
        std::vector<eval::Setting> settings;
        for (const std::string& method : eval::free_methods())
            for (eval::Setting& s : take(eval::settings_of(method)))
                settings.push_back(std::move(s));
        const eval::SizeOptions options{context, r_.wish.sequences, o_.common.threads};
        ProgressBar bar;
        choices_.settings = eval::size_settings(shape_, settings, options, nullptr, bar.receiver());
        choices_.f16 = eval::size_settings(shape_, {{"f16", "f16"}}, options, nullptr, {}).at(0);
        choices_.values = std::llround(8.0 * double(choices_.f16.bytes) / choices_.f16.bits);
        if (choices_.settings.empty()) fail("{}: no method can pack this model's cache", r_.head.model);
    }

    void measure(const std::string& text, int64_t context) {
        const Prepared prepared = prepare_model(o_.model, o_.weights, o_.common);
        const std::vector<int32_t> tokens = prepared.model.tokenize(text, true, false);
        eval::CompareHead& head = r_.head;
        head.weights = prepared.weights;
        head.texts = {o_.file.empty() ? "data/sample.txt" : o_.file};
        head.texts_sha256 = {eval::sha256_of(text)};
        head.options.window = std::min({o_.tokens, 2048, r_.trained > 0 ? r_.trained : 2048});
        head.options.windows = {o_.tokens / head.options.window};
        head.options.score_from = head.options.window / 2;
        head.options.threads = o_.common.threads;
        const int64_t read = int64_t(head.options.window) * head.options.windows.front();
        constexpr int64_t kRows = eval::AttentionLoss::kRows;
        if (int64_t(tokens.size()) < std::max(read, kRows)) {
            bad_usage("-f {}: has {} tokens, {} are needed (--tokens)", head.texts.front(), tokens.size(),
                      std::max(read, kRows));
        }
        ProgressBar bar;
        // Where the text is long enough, caches are chosen on another part of it than they are measured on.
        const auto rest = tokens.begin() + std::ptrdiff_t(std::min(read, int64_t(tokens.size()) - kRows));
        eval::AttentionLoss loss =
            take(eval::AttentionLoss::make(prepared.model, {rest, tokens.end()}, o_.common.threads, bar.receiver()));
        bar.finish();
        const double most = double(eval::kTriedSettings * eval::free_methods().size());
        double tried = 0;
        const auto harm = [&](const std::string& spec) {
            bar.show("looking at " + spec, std::min(1.0, tried++ / most));
            const Result<double> h = loss.of(spec);
            if (o_.common.verbose && h) notice(fmt::format("{} does {:.5f} to attention", spec, *h));
            return h;
        };
        r_.advice = take(eval::advise(r_.wish, context, r_.beside, choices_, harm));
        bar.finish();
        for (const eval::AdvicePick& p : r_.advice.picks)
            head.options.specs.push_back(p.setting.spec);
        r_.rows = eval::plan_rows(head.options.specs);
        const double expected = loss.seconds() / double(kRows) * double(read) * double(r_.rows.size());
        if (expected > 20) {
            notice(fmt::format(
                "measuring {} caches on {} tokens takes about {} (--quick leaves it out)", r_.rows.size() - 1, read,
                expected < 90 ? fmt::format("{:.0f} s", expected) : fmt::format("{:.0f} min", expected / 60)));
        }
        check(eval::compare(
            prepared.model, {tokens}, head.options, &r_.rows, [] { return Status(); }, bar.receiver()));
        std::vector<eval::MeasuredLoss> losses;
        for (const eval::AdvicePick& p : r_.advice.picks) {
            const eval::RowSummary s = r_.summary(p.setting.spec);
            losses.push_back({s.kl_mean, s.kl_error});
        }
        eval::settle(losses, &r_.advice);
    }

    const Options& o_;
    eval::AdviceReport r_;
    eval::SizedChoices choices_;
    ModelShape shape_;
    std::string clamped_; // why the context is not the one asked for
};

} // namespace

void add_advise(CLI::App& app) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = app.add_subcommand("advise", "which method, which bits? From memory or bits to a cache");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    verb->add_option("--memory", o->memory,
                     "what weights, buffers and cache may take together: 4GiB, 512MiB, 4G (powers of 1024), 4GB (1e9)");
    verb->add_option("--cache-memory", o->cache_memory, "what the cache alone may take");
    CLI::Option* bits = verb->add_option("--bits", o->bits, "at most so many true bits a value at --ctx");
    verb->add_option("--ctx", o->ctx, "tokens of a sequence (default 32768, or as trained where that is less)")
        ->check(CLI::Range(1, 1 << 24));
    verb->add_option("--parallel", o->parallel, "sequences of --ctx tokens at once, which share nothing")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    verb->add_option("-f,--file", o->file, "text to measure on (default: data/sample.txt, which is in the program)");
    verb->add_option("--tokens", o->tokens, "tokens of the text to measure on; the second half of a window counts")
        ->check(CLI::Range(int(eval::AttentionLoss::kRows), 1 << 20))
        ->capture_default_str();
    add_weights(verb, &o->weights);
    verb->add_flag("--quick", o->quick, "sizes alone; nothing is measured");
    verb->add_option("--json", o->json, "the answer into a file (-: standard output, without the text)");
    verb->add_flag("--force", o->force, "replace an existing --json file");
    add_common(verb, &o->common);
    verb->footer(
        "Examples\n"
        "  kvmosaic advise -m tiny --memory 300MiB --ctx 8192\n"
        "  kvmosaic advise -m model.gguf --memory 8GiB --ctx 32768 --parallel 4\n"
        "  kvmosaic advise -m small --bits 3 -f mine.txt --tokens 4096\n"
        "  kvmosaic advise -m small --cache-memory 100MiB --quick\n"
        "Sizes come from the layouts that the cache uses, raw windows and tables in. --memory is meant as of\n"
        "llama.cpp: the weights as they are loaded, the buffers of a step, and a full cache. Methods that need\n"
        "a calibration file are not looked at. Of every method the largest settings that fit are tried on the\n"
        "model's own attention; the best, its neighbours and the best other method are measured.");
    verb->callback([o, bits] {
        const AdviseWish wish = wish_of(*o, bits->count() > 0);
        check_new_file("--json", o->json, o->force);
        Advisor advisor(*o, wish);
        const eval::AdviceReport& report = advisor.run();
        if (o->json != "-") fmt::print("{}", eval::to_text(report));
        if (!o->json.empty()) write_json(o->json, eval::to_json(report).dump(2), o->force);
    });
}

} // namespace kvmosaic::tool
