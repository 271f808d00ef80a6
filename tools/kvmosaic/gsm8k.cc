// kvmosaic eval gsm8k: word problems answered freely through each cache, exact match of the number.
#include <memory>

#include "eval/gsm8k.h"
#include "eval/shares.h"
#include "kvmosaic/chat.h"
#include "kvmosaic/free_run.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    FreeOptions free;
    std::string file, train;
    int questions = 100, skip = 0, shots = -1;
    bool chat = false;
};

constexpr const char* kInstruction = "\n\nPlease reason step by step, and put your final answer within \\boxed{}.";

// What the model is to continue: solved problems, then one that is not.
std::vector<eval::Prompt> prompts_of(const Options& o, const eval::Model& model,
                                     const std::vector<eval::MathProblem>& problems,
                                     const std::vector<eval::MathProblem>& shots) {
    std::vector<eval::Prompt> out;
    for (const eval::MathProblem& problem : problems) {
        eval::Prompt prompt;
        prompt.max_tokens = o.free.max_tokens;
        if (o.chat) {
            Chat chat = take(Chat::open(model.get()));
            for (const eval::MathProblem& shot : shots) {
                chat.add("user", shot.question + kInstruction);
                chat.add("assistant", fmt::format("{}\n\n\\boxed{{{}}}", shot.solution, shot.number));
            }
            chat.add("user", problem.question + kInstruction);
            prompt.tokens = model.tokenize(take(chat.render()), true, true);
        } else {
            prompt.tokens = model.tokenize(few_shot(shots, problem), true, false);
        }
        out.push_back(std::move(prompt));
    }
    return out;
}

struct Score {
    int64_t hits = 0, agree = 0, lost = 0, won = 0; // lost: f16 was right and this is wrong
};

void gsm8k(Options o) {
    check_free(o.free);
    if (o.shots < 0) o.shots = o.chat ? 0 : 4;
    const eval::MathProblems all = take(eval::read_math(find_data("--file", o.file, "gsm8k_test.jsonl")));
    eval::MathProblems train;
    if (o.shots > 0) train = take(eval::read_math(find_data("--train", o.train, "gsm8k_train_200.jsonl")));
    if (o.shots > int(train.items.size())) {
        bad_usage("--shots {}: the training file has {} problems", o.shots, train.items.size());
    }
    if (o.skip >= int(all.items.size())) bad_usage("--skip {}: the file has {} problems", o.skip, all.items.size());
    const size_t first = size_t(o.skip), count = std::min(size_t(o.questions), all.items.size() - first);
    if (count < size_t(o.questions)) warn(fmt::format("--questions {}: only {} are there", o.questions, count));
    const std::vector<eval::MathProblem> problems(all.items.begin() + int64_t(first),
                                                  all.items.begin() + int64_t(first + count));
    train.items.resize(size_t(o.shots));

    const Prepared prepared = prepare_free(o.free);
    const bool marked = o.shots > 0 && !o.chat;
    const ordered_json head{{"kind", "kvmosaic gsm8k 1"},
                            {"file_sha256", all.sha256},
                            {"train_sha256", train.sha256},
                            {"shots", o.shots},
                            {"chat", o.chat},
                            {"max_tokens", o.free.max_tokens},
                            {"match", marked ? "number behind ####" : "last number"}};
    FreeRun run(o.free, prepared, head, "gsm8k results");
    FreeTask task;
    task.prompts = prompts_of(o, prepared.model, problems, train.items);
    for (size_t i = 0; i < count; ++i)
        task.items.push_back(int64_t(first + i));
    if (!o.chat) task.stops = {eval::kNextQuestion};
    const auto number = [&](const eval::Answer& answer) {
        return marked ? eval::marked_number(answer.text) : eval::last_number(answer.text);
    };
    task.judge = [&](size_t i, const eval::Answer& answer) {
        return ordered_json{
            {"number", number(answer)}, {"gold", problems[i].number}, {"hit", number(answer) == problems[i].number}};
    };
    const FreeResults results = run.answer(task);

    std::string table = fmt::format("{} problems, {} shots{}, {}\n", count, o.shots, o.chat ? ", chat" : "",
                                    marked ? "number behind ####" : "last number");
    table += fmt::format("{:<24}  {:>7}  {:>13}  {:>5}  {:>9}  {:>6}", "cache", "correct", "95 %", "agree", "lost/won",
                         "p") +
             free_columns();
    ordered_json rows = ordered_json::array();
    for (size_t c = 0; c < results.caches.size(); ++c) {
        Score s;
        for (size_t i = 0; i < count; ++i) {
            const std::string mine = number(results.answers[c][i]), theirs = number(results.answers[0][i]);
            const bool hit = mine == problems[i].number, reference = theirs == problems[i].number;
            s.hits += hit, s.agree += mine == theirs, s.lost += reference && !hit, s.won += hit && !reference;
        }
        const double n = double(count), p = eval::mcnemar(s.lost, s.won);
        const eval::Interval range = eval::wilson(s.hits, int64_t(count));
        const eval::AnswersSummary sum = results.summary(c);
        ordered_json row = to_json(results.caches[c], sum);
        row.update(ordered_json{{"hits", s.hits},
                                {"accuracy", double(s.hits) / n},
                                {"accuracy_low", range.low},
                                {"accuracy_high", range.high},
                                {"agree", double(s.agree) / n},
                                {"lost", s.lost},
                                {"won", s.won},
                                {"p", p}});
        rows.push_back(std::move(row));
        table +=
            fmt::format("{:<24}  {:>5.1f} %  {:>13}  {:>3.0f} %  {:>9}  {:>6.3f}", results.caches[c].spec,
                        100 * double(s.hits) / n, fmt::format("{:.1f} - {:.1f}", 100 * range.low, 100 * range.high),
                        100 * double(s.agree) / n, fmt::format("{}/{}", s.lost, s.won), p) +
            free_cells(sum);
    }
    run.finish(rows, table);
}

} // namespace

void add_gsm8k(CLI::App& eval) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = eval.add_subcommand("gsm8k", "word problems answered freely, exact match of the number");
    add_free(verb, &o->free);
    verb->add_option("--questions", o->questions, "problems from the file's start")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    verb->add_option("--skip", o->skip, "problems that are left out at the file's start")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
    verb->add_option("--shots", o->shots, "solved problems before each (default 4; with --chat 0)")
        ->check(CLI::Range(0, 64));
    verb->add_flag("--chat", o->chat, "the model's chat template, problem and solution as turns");
    verb->add_option("--file", o->file,
                     "problems, JSON lines of question and answer (default: "
                     "$KVMOSAIC_DATA/gsm8k_test.jsonl)");
    verb->add_option("--train", o->train,
                     "where the solved ones come from (default: "
                     "$KVMOSAIC_DATA/gsm8k_train_200.jsonl)");
    verb->footer(
        "Examples\n"
        "  kvmosaic eval gsm8k -m small --cache mixkvq --cache kivi:bits=2 --questions 200 --resume math.jsonl\n"
        "  kvmosaic eval gsm8k -m base --cache innerq --chat --file test.jsonl --json math.json\n"
        "Answers are greedy, each the same whatever is answered beside it. After solved problems\n"
        "an answer counts when the number behind \"####\" is right; with --chat or --shots 0 when its last number is.\n"
        "\"agree\": same number as with the f16 cache; \"lost/won\": right with one of the two only, and p how likely\n"
        "so uneven a split is by chance (McNemar, exact). \"common\": tokens until an answer leaves that of f16\n"
        "(median); \"same\": answers that never do; \"cut\": ended by --max-tokens; \"rep\": runs of four tokens that\n"
        "stood before; \"bits\": true bits when the answer was there. JSON: docs/json.md.");
    verb->callback([o] { gsm8k(*o); });
}

} // namespace kvmosaic::tool
