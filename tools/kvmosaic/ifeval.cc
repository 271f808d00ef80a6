// kvmosaic eval ifeval: whether answers through each cache keep to instructions that a program can check.
#include <map>
#include <memory>

#include "eval/ifeval.h"
#include "eval/shares.h"
#include "kvmosaic/chat.h"
#include "kvmosaic/free_run.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    FreeOptions free;
    std::string file;
    int prompts = 50, skip = 0;
};

struct Score {
    int64_t kept = 0, all = 0; // instructions
    bool hit() const { return kept == all; }
};

Score score(const eval::InstructedPrompt& prompt, const eval::Answer& answer) {
    Score out;
    for (const eval::Instruction& instruction : prompt.instructions)
        out.kept += kept(instruction, answer.text), ++out.all;
    return out;
}

void ifeval(const Options& o) {
    check_free(o.free);
    const eval::InstructedPrompts all = take(eval::read_ifeval(find_data("--file", o.file, "ifeval_prompts.jsonl")));
    if (o.skip >= int(all.items.size())) {
        bad_usage("--skip {}: the file has {} prompts that can be checked", o.skip, all.items.size());
    }
    const size_t first = size_t(o.skip), n = std::min(size_t(o.prompts), all.items.size() - first);
    const Prepared prepared = prepare_free(o.free);
    FreeTask task;
    for (size_t i = first; i < first + n; ++i) {
        Chat chat = take(Chat::open(prepared.model.get()));
        chat.add("user", all.items[i].prompt);
        task.prompts.push_back({prepared.model.tokenize(take(chat.render()), true, true), o.free.max_tokens});
        task.items.push_back(all.items[i].key);
    }
    task.judge = [&](size_t i, const eval::Answer& answer) {
        ordered_json kinds = ordered_json::array(), kept = ordered_json::array();
        for (const eval::Instruction& instruction : all.items[first + i].instructions) {
            kinds.push_back(instruction.kind);
            kept.push_back(eval::kept(instruction, answer.text));
        }
        return ordered_json{
            {"instructions", kinds}, {"kept", kept}, {"hit", score(all.items[first + i], answer).hit()}};
    };
    FreeRun run(o.free, prepared,
                {{"kind", "kvmosaic ifeval 1"}, {"file_sha256", all.sha256}, {"max_tokens", o.free.max_tokens}},
                "ifeval results");
    const FreeResults results = run.answer(task);

    std::string table = fmt::format("{} prompts ({} of the file have instructions that are not checked "
                                    "here), chat\n",
                                    n, all.left_out);
    table += fmt::format("{:<24}  {:>7}  {:>13}  {:>7}  {:>9}  {:>6}", "cache", "prompts", "95 %", "instr.", "lost/won",
                         "p") +
             free_columns();
    ordered_json rows = ordered_json::array();
    for (size_t c = 0; c < results.caches.size(); ++c) {
        int64_t hits = 0, lost = 0, won = 0;
        Score sum;
        std::map<std::string, Score> by_kind;
        for (size_t i = 0; i < n; ++i) {
            const eval::InstructedPrompt& prompt = all.items[first + i];
            const Score mine = score(prompt, results.answers[c][i]), theirs = score(prompt, results.answers[0][i]);
            hits += mine.hit(), lost += theirs.hit() && !mine.hit(), won += mine.hit() && !theirs.hit();
            sum.kept += mine.kept, sum.all += mine.all;
            for (const eval::Instruction& instruction : prompt.instructions) {
                Score& kind = by_kind[instruction.kind];
                kind.kept += kept(instruction, results.answers[c][i].text), ++kind.all;
            }
        }
        const eval::Interval range = eval::wilson(hits, int64_t(n));
        const double share = double(hits) / double(n), single = double(sum.kept) / double(sum.all);
        const double p = eval::mcnemar(lost, won);
        const eval::AnswersSummary summary = results.summary(c);
        ordered_json row = to_json(results.caches[c], summary);
        row.update(ordered_json{{"prompts_kept", share},
                                {"prompts_low", range.low},
                                {"prompts_high", range.high},
                                {"instructions_kept", single},
                                {"lost", lost},
                                {"won", won},
                                {"p", p},
                                {"kinds", ordered_json::array()}});
        for (const auto& [kind, count] : by_kind)
            row["kinds"].push_back({{"kind", kind}, {"kept", count.kept}, {"instructions", count.all}});
        rows.push_back(std::move(row));
        table += fmt::format("{:<24}  {:>5.1f} %  {:>13}  {:>5.1f} %  {:>9}  {:>6.3f}", results.caches[c].spec,
                             100 * share, fmt::format("{:.1f} - {:.1f}", 100 * range.low, 100 * range.high),
                             100 * single, fmt::format("{}/{}", lost, won), p) +
                 free_cells(summary);
    }
    run.finish(rows, table);
}

} // namespace

void add_ifeval(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    o->free.max_tokens = 512;
    CLI::App* verb =
        eval.add_subcommand("ifeval", "instructions that a program can check: does an answer keep to them?");
    add_free(verb, &o->free);
    verb->add_option("--prompts", o->prompts, "prompts from the file's start that can be checked")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb->add_option("--skip", o->skip, "of these, how many are left out at the start")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    verb->add_option("--file", o->file,
                     "JSON lines of key, prompt, instruction_id_list, kwargs (default: "
                     "$KVMOSAIC_DATA/ifeval_prompts.jsonl)");
    verb->footer(fmt::format(
        "Examples\n"
        "  kvmosaic eval ifeval -m small --cache mixkvq --cache kivi:bits=2 --prompts 100 --resume rules.jsonl\n"
        "Checked strictly, on the answer as it is: \"prompts\" are answers that keep to all of their instructions,\n"
        "\"instr.\" single instructions. \"lost/won\": kept with one of this cache and f16 only, p by McNemar's exact\n"
        "test. Prompts with {} are left out. Kinds that are checked:\n  {}\nJSON: docs/json.md.",
        fmt::join(eval::unchecked_kinds(), " or "), fmt::join(eval::checkable_kinds(), "\n  ")));
    verb->callback([o] { ifeval(*o); });
}

} // namespace kvmosaic::tool
