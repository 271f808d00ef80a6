// kvmosaic eval generate: free-running continuation of a text through each cache, beside f16's.
#include <memory>

#include "eval/metrics.h"
#include "eval/texts.h"
#include "kvmosaic/free_run.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    FreeOptions free;
    std::string file;
    int prompts = 16, prompt_tokens = 256;
};

// Beginnings spread evenly over the text, none of which overlap.
std::vector<eval::Prompt> cut(const Options& o, const eval::Model& model, const std::vector<int32_t>& text) {
    const size_t n = size_t(o.prompts), length = size_t(o.prompt_tokens), stride = text.size() / n;
    if (stride < length) {
        bad_usage("--prompts {}, --prompt-tokens {}: {} tokens are needed and the text {} has {}", o.prompts,
                  o.prompt_tokens, n * length, o.file, text.size());
    }
    std::vector<eval::Prompt> out;
    for (size_t i = 0; i < n; ++i) {
        eval::Prompt prompt;
        if (model.begins_with_token()) prompt.tokens.push_back(model.begin_token());
        const auto begin = text.begin() + int64_t(i * stride);
        prompt.tokens.insert(prompt.tokens.end(), begin, begin + int64_t(length));
        prompt.max_tokens = o.free.max_tokens;
        out.push_back(std::move(prompt));
    }
    return out;
}

void generate(const Options& o) {
    check_free(o.free);
    const std::string text = take(eval::read_text(o.file));
    const Prepared prepared = prepare_free(o.free);
    const ordered_json head{{"kind", "kvmosaic generate 1"},
                            {"text_sha256", eval::sha256_of(text)},
                            {"prompts", o.prompts},
                            {"prompt_tokens", o.prompt_tokens},
                            {"max_tokens", o.free.max_tokens}};
    FreeTask free;
    free.pass = "free";
    free.prompts = cut(o, prepared.model, prepared.model.tokenize(text, false, false));
    for (size_t i = 0; i < free.prompts.size(); ++i)
        free.items.push_back(int64_t(i));
    FreeRun run(o.free, prepared, head, "generate results");
    const FreeResults results = run.answer(free);

    // What each cache would have said where f16 said something, were it to read f16's words.
    FreeTask forced;
    forced.pass = "forced";
    for (size_t i = 0; i < free.prompts.size(); ++i) {
        const std::vector<int32_t>& said = results.answers[0][i].tokens;
        if (said.empty()) continue; // f16 ended at once
        eval::Prompt prompt = free.prompts[i];
        prompt.tokens.insert(prompt.tokens.end(), said.begin(), said.end());
        prompt.forced = int32_t(said.size());
        forced.prompts.push_back(std::move(prompt));
        forced.items.push_back(int64_t(i));
    }
    const FreeResults told = run.answer(forced);

    std::string table = fmt::format("{} beginnings of {} tokens of {}, up to {} more\n", o.prompts, o.prompt_tokens,
                                    o.file, o.free.max_tokens);
    table += fmt::format("{:<24}  {:>15}", "cache", "flips") + free_columns();
    ordered_json rows = ordered_json::array();
    for (size_t c = 0; c < results.caches.size(); ++c) {
        std::vector<float> flips; // share of an answer's tokens
        double flipped = 0, all = 0;
        for (size_t i = 0; i < forced.items.size(); ++i) {
            const std::vector<int32_t>& mine = told.answers[c][i].tokens;
            const std::vector<int32_t>& said = results.answers[0][size_t(forced.items[i])].tokens;
            double here = 0;
            for (size_t t = 0; t < said.size(); ++t)
                here += mine[t] != said[t];
            flips.push_back(float(here / double(said.size())));
            flipped += here, all += double(said.size());
        }
        const double share = all > 0 ? flipped / all : 0, error = eval::summarize(flips).error;
        const eval::AnswersSummary sum = results.summary(c);
        ordered_json row = to_json(results.caches[c], sum);
        row["flips"] = share;
        row["flips_error"] = error;
        row["flip_positions"] = int64_t(all);
        rows.push_back(std::move(row));
        table += fmt::format("{:<24}  {:>15}", results.caches[c].spec,
                             fmt::format("{:.2f} +- {:.2f} %", 100 * share, 100 * error)) +
                 free_cells(sum);
    }
    run.finish(rows, table);
}

} // namespace

void add_generate(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    o->free.max_tokens = 128;
    CLI::App* verb = eval.add_subcommand("generate", "continue a text freely; when each cache leaves f16's words");
    verb->add_option("-f,--file", o->file,
                     "text whose pieces are continued (-: standard input), or records (.jsonl, .jsonl.gz)")
        ->required();
    verb->add_option("--prompts", o->prompts, "pieces, spread evenly over the text")
        ->check(CLI::Range(1, 1 << 16))
        ->capture_default_str();
    verb->add_option("--prompt-tokens", o->prompt_tokens, "tokens of a piece")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    add_free(verb, &o->free);
    verb->footer(
        "Examples\n"
        "  kvmosaic eval generate -m tiny -f data/sample.txt --cache mixkvq --cache kivi:bits=2 --prompts 4\n"
        "  kvmosaic eval generate -m small -f wiki.txt --cache f32 --cache kivi:bits=2 --max-tokens 256 --resume "
        "g.jsonl\n"
        "Continuations are greedy. \"flips\": share of f16's own words where this cache, after the same words, would\n"
        "have said another one (its error is over pieces). \"common\": tokens until a continuation leaves f16's\n"
        "(median); \"same\": continuations that never do; \"cut\": ended by --max-tokens; \"rep\": runs of four "
        "tokens\n"
        "that stood before; \"bits\": true bits at the end. JSON: docs/json.md.");
    verb->callback([o] { generate(*o); });
}

} // namespace kvmosaic::tool
