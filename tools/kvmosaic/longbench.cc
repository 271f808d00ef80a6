// kvmosaic eval longbench: long prompts answered through each cache, scored as LongBench does.
#include <algorithm>
#include <map>
#include <memory>

#include "eval/longbench.h"
#include "eval/metrics.h"
#include "kvmosaic/chat.h"
#include "kvmosaic/free_run.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    FreeOptions free;
    std::string file;
    std::vector<std::string> tasks;
    int prompts = 0, ctx = 4096;
    bool raw = false;
};

// Long texts keep their beginning and end, which hold the instruction and the question; the frame of a conversation is
// put around what is left.
eval::Prompt shaped(const Options& o, const eval::Model& model, const eval::LongItem& item, bool* cut) {
    eval::Prompt out;
    out.max_tokens = std::min(item.task->max_tokens, int32_t(o.free.max_tokens));
    const auto frame = [&](const std::string& text) {
        if (o.raw) return model.tokenize(text, true, false);
        Chat chat = take(Chat::open(model.get()));
        chat.add("user", text);
        return model.tokenize(take(chat.render()), true, true);
    };
    const int64_t most = o.ctx - out.max_tokens - int64_t(frame("").size());
    if (most < 64) bad_usage("--ctx {}: no room for a prompt beside an answer of {} tokens", o.ctx, out.max_tokens);
    const std::vector<int32_t> tokens = model.tokenize(item.prompt, false, false);
    *cut = int64_t(tokens.size()) > most;
    std::string text;
    // Text that is cut between tokens and put together again may need some tokens more.
    for (int64_t room = most; out.tokens.empty() || int64_t(out.tokens.size()) + out.max_tokens > o.ctx; room -= 8) {
        if (*cut) {
            text.clear();
            for (const int32_t token : eval::without_middle(tokens, size_t(room)))
                text += model.piece(token);
        } else {
            text = item.prompt;
        }
        out.tokens = frame(text);
        *cut = *cut || int64_t(out.tokens.size()) + out.max_tokens > o.ctx;
        if (room < 32) bad_usage("--ctx {}: too small for these prompts", o.ctx);
    }
    return out;
}

struct Chosen {
    std::vector<eval::LongItem> items;
    std::vector<int64_t> places; // in the file
};

Chosen choose(const Options& o, const eval::LongItems& all) {
    for (const std::string& name : o.tasks) {
        if (eval::find_long_task(name)) continue;
        std::vector<std::string> names;
        for (const eval::LongTask& task : eval::long_tasks())
            names.push_back(task.name);
        bad_usage("--task {}: one of {}", name, fmt::join(names, ", "));
    }
    Chosen out;
    std::map<std::string, int> taken;
    for (size_t i = 0; i < all.items.size(); ++i) {
        const std::string& name = all.items[i].task->name;
        if (!o.tasks.empty() && std::find(o.tasks.begin(), o.tasks.end(), name) == o.tasks.end()) continue;
        if (o.prompts > 0 && taken[name] >= o.prompts) continue;
        ++taken[name];
        out.items.push_back(all.items[i]);
        out.places.push_back(int64_t(i));
    }
    if (out.items.empty()) bad_usage("--task: the file has no prompt of these tasks");
    return out;
}

void longbench(const Options& o) {
    check_free(o.free);
    const std::string file = find_data("--file", o.file, "longbench_mini.jsonl.gz");
    const eval::LongItems all = take(eval::read_longbench(file));
    const Chosen chosen = choose(o, all);
    const Prepared prepared = prepare_free(o.free);
    if (o.ctx > prepared.model.trained_context()) {
        bad_usage("--ctx {}: this model was trained for 1 to {}", o.ctx, prepared.model.trained_context());
    }
    FreeTask task;
    int cuts = 0;
    for (const eval::LongItem& item : chosen.items) {
        bool cut = false;
        task.prompts.push_back(shaped(o, prepared.model, item, &cut));
        cuts += cut;
    }
    task.items = chosen.places;
    task.judge = [&](size_t i, const eval::Answer& answer) {
        return ordered_json{{"task", chosen.items[i].task->name},
                            {"prompt_tokens", task.prompts[i].tokens.size()},
                            {"score", eval::score(chosen.items[i], answer.text)}};
    };
    FreeRun run(o.free, prepared,
                {{"kind", "kvmosaic longbench 1"},
                 {"file_sha256", all.sha256},
                 {"ctx", o.ctx},
                 {"max_tokens", o.free.max_tokens},
                 {"chat", !o.raw}},
                "longbench results");
    const FreeResults results = run.answer(task);

    std::vector<std::string> names; // of tasks, in the order of the benchmark
    for (const eval::LongTask& t : eval::long_tasks()) {
        const auto is = [&](const eval::LongItem& item) { return item.task == &t; };
        if (std::any_of(chosen.items.begin(), chosen.items.end(), is)) names.push_back(t.name);
    }
    std::string table = fmt::format("{} prompts, {} of them cut to {} tokens{}\n{:<22}  {:>9}  {:>3}",
                                    chosen.items.size(), cuts, o.ctx, o.raw ? "" : ", chat", "task", "metric", "n");
    for (const eval::CacheName& cache : results.caches)
        table += fmt::format("  {:>16}", cache.spec);
    table += "\n";
    ordered_json rows = ordered_json::array();
    for (size_t c = 0; c < results.caches.size(); ++c) {
        rows.push_back(to_json(results.caches[c], results.summary(c)));
        rows.back()["tasks"] = ordered_json::array();
    }
    std::vector<double> sums(results.caches.size(), 0);
    for (const std::string& name : names) {
        const eval::LongTask& t = *eval::find_long_task(name);
        std::string line;
        for (size_t c = 0; c < results.caches.size(); ++c) {
            std::vector<float> scores;
            for (size_t i = 0; i < chosen.items.size(); ++i)
                if (chosen.items[i].task == &t)
                    scores.push_back(float(score(chosen.items[i], results.answers[c][i].text)));
            const eval::Summary s = eval::summarize(scores);
            if (c == 0) line = fmt::format("{:<22}  {:>9}  {:>3}", name, name_of(t.metric), scores.size());
            line += fmt::format("  {:>16}", fmt::format("{:.1f} +- {:.1f}", 100 * s.mean, 100 * s.error));
            sums[c] += s.mean;
            rows[c]["tasks"].push_back({{"task", name},
                                        {"metric", name_of(t.metric)},
                                        {"prompts", scores.size()},
                                        {"score", s.mean},
                                        {"error", s.error}});
        }
        table += line + "\n";
    }
    std::string mean = fmt::format("{:<22}  {:>9}  {:>3}", "mean of tasks", "", chosen.items.size());
    std::string bits = fmt::format("{:<22}  {:>9}  {:>3}", "true bits", "", "");
    for (size_t c = 0; c < results.caches.size(); ++c) {
        rows[c]["score"] = sums[c] / double(names.size());
        mean += fmt::format("  {:>16.1f}", 100 * sums[c] / double(names.size()));
        bits += fmt::format("  {:>16.2f}", results.summary(c).bits);
    }
    run.finish(rows, table + mean + "\n" + bits + "\n");
}

} // namespace

void add_longbench(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    o->free.max_tokens = 512;
    o->free.batch = 4;
    CLI::App* verb = eval.add_subcommand("longbench", "questions on long texts, scored as LongBench does");
    add_free(verb, &o->free);
    verb->add_option("--file", o->file,
                     "JSON lines of task, prompt, answers (default: $KVMOSAIC_DATA/longbench_mini.jsonl.gz)");
    verb->add_option("--task", o->tasks, "only this task; repeat for more")->allow_extra_args(false);
    verb->add_option("--prompts", o->prompts, "of each task, from the file's start (0: all)")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    verb->add_option("--ctx", o->ctx, "tokens of a prompt and its answer; longer prompts lose their middle")
        ->check(CLI::Range(128, 1 << 24))
        ->capture_default_str();
    verb->add_flag("--raw", o->raw, "without the model's chat template");
    verb->footer(
        "Examples\n"
        "  kvmosaic eval longbench -m small --cache mixkvq --cache kivi:bits=2 --prompts 3 --resume long.jsonl\n"
        "  kvmosaic eval longbench -m base --cache mixkvq --task hotpotqa --task qasper --ctx 8192\n"
        "Scores are 0 to 100 with the standard error over prompts: F1 of words for questions, ROUGE-L for summaries,\n"
        "share of right numbers for passage retrieval and count. An answer has as many tokens as the benchmark\n"
        "allows the task, --max-tokens at most. JSON: docs/json.md.");
    verb->callback([o] { longbench(*o); });
}

} // namespace kvmosaic::tool
