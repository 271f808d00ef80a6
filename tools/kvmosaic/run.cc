// kvmosaic run: text from a model on our cache, streamed, then one line on what the cache cost. A sequence may come
// from a file and go into one.
#include <memory>
#include <optional>

#include "kvmosaic/app.h"
#include "kvmosaic/runner.h"

namespace kvmosaic::tool {

namespace {

void check_options(const RunOptions& o, bool has_text) {
    check_spec(o.spec);
    check_new_file("--json", o.json, o.force);
    check_new_file("--save", o.save, o.force);
    if (o.count < -1) bad_usage("-n {}: -1 (until the model ends) or more", o.count);
    if (!has_text && !o.chat && o.load.empty()) {
        bad_usage("run: give a text with -p TEXT or -f FILE, or talk with --chat");
    }
    if (o.chat && o.raw) bad_usage("--chat and --raw exclude each other");
    if (o.chat && o.samples > 1) bad_usage("--chat and --samples exclude each other");
    if (o.samples > 1 && o.count < 0) bad_usage("--samples needs a number of tokens: -n 1 or more");
    if (o.against && o.samples < 2) bad_usage("--against-separate compares several samples: give --samples N");
    if (o.against && !o.load.empty()) bad_usage("--against-separate reads the prompt anew, so --load excludes it");
    if (o.samples > 1 && !o.save.empty()) bad_usage("--save keeps one answer, so --samples excludes it");
    if (o.compress && o.save.empty()) bad_usage("--compress is for --save");
    if (o.save == "-") bad_usage("--save -: a file is needed, standard output is for text");
}

void run(RunOptions o, bool has_prompt, bool has_spec) {
    std::optional<SavedFile> file;
    if (!o.load.empty()) file = take(open_saved(o.load));
    if (file && !has_spec) o.spec = file->info.spec;
    const bool has_text = has_prompt || !o.file.empty();
    check_options(o, has_text);
    const std::string text = has_text ? take_text(o.prompt, has_prompt, o.file) : "";
    Opened opened = open_model(o.model, o.spec, o.ctx, o.common, o.samples, o.rollback);
    const eval::Model& model = opened.model;
    const Path way = opened.context.cache()->path();
    if (o.require_fused && way != Path::fused && way != Path::raw) {
        fail("--require-fused: '{}' runs on the {} path here", o.spec, name_of(way));
    }
    Runner runner(o, model, std::move(opened.context));
    std::optional<Saved> saved;
    if (file) saved = runner.load(*file);
    file.reset();
    if (saved && o.chat && !saved->shaped) bad_usage("--load {}: it holds no conversation to go on with", o.load);
    // A file of raw text is gone on with as raw text, a conversation as a conversation.
    const bool shaped = o.chat || (saved ? saved->shaped && !o.raw : !o.raw && !model.chat_template().empty());
    std::optional<Talk> talk;
    if (shaped) talk.emplace(runner.open_talk(saved ? &*saved : nullptr));
    if (o.chat) {
        runner.converse(&*talk, text);
    } else if (!has_text) {
        runner.resume(talk ? &*talk : nullptr);
    } else if (talk) {
        runner.turn(&*talk, text);
    } else {
        runner.read(text, !saved, false);
        if (o.samples > 1)
            runner.answer_all();
        else
            runner.answer();
    }
    runner.save(talk ? &*talk : nullptr);
    runner.finish();
    if (o.against) runner.compare_with_separate_runs(runner.tokens());
}

} // namespace

void add_run(CLI::App& app) {
    auto o = std::make_shared<RunOptions>();
    CLI::App* verb = app.add_subcommand("run", "generate text on a quantized cache, or chat");
    verb->add_option("-m,--model", o->model, "GGUF file, or a fetched name")->required();
    CLI::Option* prompt = verb->add_option("-p,--prompt", o->prompt, "the text, or what you say to a chat model");
    verb->add_option("-f,--file", o->file, "the text from a file (-: standard input)");
    CLI::Option* spec =
        verb->add_option("--cache", o->spec, "cache spec (kvmosaic methods; with --load, that of the file)")
            ->capture_default_str();
    verb->add_option("-n", o->count, "most tokens to generate (-1: until the model ends)")->capture_default_str();
    verb->add_flag("--chat", o->chat, "interactive conversation with the model's template");
    verb->add_option("--system", o->system, "system message of the conversation");
    verb->add_flag("--raw", o->raw, "take the text as it is, without the chat template");
    verb->add_option("--ctx", o->ctx, "context in tokens (0: as trained)")->check(CLI::Range(0, 1 << 24));
    verb->add_option("--temp", o->sampling.temp, "temperature (0: always the most likely token)")
        ->check(CLI::Range(0.0, 10.0))
        ->capture_default_str();
    verb->add_option("--top-p", o->sampling.top_p, "sample from the most likely tokens of this total probability")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    verb->add_option("--samples", o->samples,
                     "as many answers to the prompt, side by side; its tokens are read and stored once, answer i is "
                     "sampled with seed + i")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    verb->add_flag("--against-separate", o->against,
                   "then run the samples one after the other, and tell the throughput of both");
    verb->add_option("--rollback", o->rollback,
                     "dropping up to this many newest tokens (a rewritten turn) leaves the cache exactly as it was "
                     "before them; their 16-bit rows are kept, and counted")
        ->check(CLI::Range(0, 65536));
    verb->add_option("--seed", o->sampling.seed, "of the sampling; the same seed repeats a text")
        ->capture_default_str();
    verb->add_flag("--require-fused", o->require_fused, "fail when attention cannot run on the packed codes");
    verb->add_option("--json", o->json, "summary and text as JSON into a file (-: standard output)");
    verb->add_option("--save", o->save, "at the end, save the sequence as it is, quantized, into a file");
    verb->add_option("--load", o->load, "begin with a saved sequence: nothing of it is read by the model again");
    verb->add_flag("--compress", o->compress, "compress the --save file (zstd)");
    verb->add_flag("--force", o->force, "replace an existing --json or --save file");
    add_common(verb, &o->common);
    verb->footer("Examples\n"
                 "  kvmosaic run -m tiny -p \"What is the capital of France?\"\n"
                 "  kvmosaic run -m tiny --chat --cache kivi:bits=4\n"
                 "  kvmosaic run -m tiny -p \"Name a colour.\" --samples 4 -n 20\n"
                 "  kvmosaic run -m tiny -p \"My name is Ada.\" --save chat.kv\n"
                 "  kvmosaic run -m tiny --load chat.kv -p \"What is my name?\" --save chat.kv --force\n"
                 "  kvmosaic run -m model.gguf -f story.txt --raw -n 100 --temp 0 --cache mixkvq:hi=12,mid=1.6\n"
                 "The last line tells tokens per second, the cache's MiB and true bits per value now (raw windows and\n"
                 "metadata included, so a short text stands near 16), and the path that attention took.");
    verb->callback([o, prompt, spec] { run(*o, prompt->count() > 0, spec->count() > 0); });
}

} // namespace kvmosaic::tool
