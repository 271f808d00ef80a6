// kvmosaic bench: what attention and encoding cost on this machine, beside ggml's own attention.
#include <memory>
#include <set>

#include <nlohmann/json.hpp>

#include "eval/bench_cpu.h"
#include "eval/bench_cuda.h"
#include "eval/bench_encode.h"
#include "eval/build.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

struct Options {
    eval::BenchShape shape;
    std::vector<std::string> specs, baselines;
    std::string device = "cpu", accuracy = "exact", json, commit;
    int rounds = 0;
    double working_set = 160;
    bool force = false;
};

// Devices are sources of src/eval that make a BenchDevice; this is where they are named.
std::unique_ptr<eval::BenchDevice> open_device(const Options& o) {
    if (o.device == "cpu") return std::make_unique<eval::CpuDevice>(o.shape);
    return take(eval::open_cuda_device(o.shape));
}

void check_device(const Options& o) {
    if (o.device != "cpu" && o.device != "cuda") bad_usage("--device {}: cpu or cuda", o.device);
    if (o.device == "cpu") return;
    if (!o.baselines.empty())
        bad_usage("--baseline {}: on a GPU other attention is measured by bench/cuda/baseline.py", o.baselines[0]);
    if (o.accuracy != "exact") bad_usage("--accuracy {}: the kernels of a GPU have one form, exact", o.accuracy);
}

void check_options(Options& o) {
    if (!(o.working_set >= 0 && o.working_set <= 16000)) bad_usage("--working-set {}: 0 to 16000", o.working_set);
    o.shape.working_set = int64_t(o.working_set * 1e6);
    if (o.accuracy != "exact" && o.accuracy != "fast") bad_usage("--accuracy {}: exact or fast", o.accuracy);
    o.shape.accuracy = o.accuracy == "fast" ? Accuracy::fast : Accuracy::exact;
    check(eval::validate(o.shape));
    check_device(o);
    check_specs(o.specs);
    for (const std::string& spec : o.specs)
        check(eval::segments_of(spec, o.shape).status());
    std::set<std::string> seen;
    for (const std::string& name : o.baselines) {
        check(eval::check_cpu_baseline(name, o.shape));
        if (!seen.insert(name).second) bad_usage("--baseline {}: is given twice", name);
    }
    if (o.rounds < 0 || o.rounds > 100000) bad_usage("--rounds {}: 0 to 100000", o.rounds);
    check_new_file("--json", o.json, o.force);
}

// The command that measures the same again, defaults spelled out.
std::string command(const char* verb, const Options& o, bool attend) {
    const eval::BenchShape& s = o.shape;
    std::string out = fmt::format("kvmosaic bench {} --device {} --heads {} --kv-heads {} --head-dim {}", verb,
                                  o.device, s.heads, s.kv_heads, s.head_dim);
    if (attend) out += fmt::format(" --batch {} --query-rows {}", s.batch, s.query_rows);
    out += fmt::format(" --context {}", s.context);
    if (attend) out += fmt::format(" --threads {}", s.threads);
    for (const std::string& spec : o.specs)
        out += " --cache " + spec;
    for (const std::string& name : o.baselines)
        out += " --baseline " + name;
    if (o.accuracy != "exact") out += " --accuracy " + o.accuracy;
    if (o.working_set != 160) out += fmt::format(" --working-set {}", o.working_set);
    if (o.rounds > 0) out += fmt::format(" --rounds {}", o.rounds);
    return out;
}

ordered_json head(const char* kind, const Options& o, const std::string& line) {
    return {{"kind", kind},
            {"version", KVMOSAIC_VERSION},
            {"machine", eval::machine_name()},
            {"commit", o.commit.empty() ? eval::build_commit() : o.commit},
            {"command", line}};
}

void show(const Options& o, const std::string& table, const ordered_json& document) {
    if (o.json != "-") fmt::print("{}\n{}", build_text(), table);
    if (!o.json.empty()) write_json(o.json, document.dump(2), o.force);
}

void attend(Options& o) {
    check_options(o);
    ProgressBar bar;
    const auto device = open_device(o);
    const eval::BenchReport report =
        take(eval::bench_attend(*device, o.shape, o.specs, o.baselines, o.rounds, bar.receiver()));
    bar.finish();
    ordered_json out = head("kvmosaic bench attend 1", o, command("attend", o, true));
    out["read_bandwidth"] = report.read_bandwidth;
    out["rows"] = eval::to_json(report);
    show(o, eval::to_table(report), out);
}

void encode(Options& o) {
    check_options(o);
    ProgressBar bar;
    if (o.device != "cpu") bad_usage("--device {}: encoding is measured on the CPU; see kvmosaic_cuda_bench", o.device);
    const eval::EncodeReport report = take(eval::bench_encode(o.shape, o.specs, o.rounds, bar.receiver()));
    bar.finish();
    ordered_json out = head("kvmosaic bench encode 1", o, command("encode", o, false));
    out["rows"] = eval::to_json(report);
    show(o, eval::to_table(report), out);
}

void add_options(CLI::App* verb, const std::shared_ptr<Options>& o) {
    verb->add_option("--device", o->device, "where: cpu or cuda")->capture_default_str();
    verb->add_option("--heads", o->shape.heads, "query heads")->capture_default_str();
    verb->add_option("--kv-heads", o->shape.kv_heads, "KV heads")->capture_default_str();
    verb->add_option("--head-dim", o->shape.head_dim, "head size")->capture_default_str();
    verb->add_option("--context", o->shape.context, "tokens of a sequence")->capture_default_str();
    verb->add_option("--cache", o->specs, "cache spec (kvmosaic methods); repeat for more rows")
        ->required()
        ->allow_extra_args(false);
    verb->add_option("--accuracy", o->accuracy, "of attention straight from codes: exact or fast")
        ->capture_default_str();
    verb->add_option("--rounds", o->rounds, "calls of each row (0: about two seconds of them, at least ten)")
        ->capture_default_str();
    verb->add_option("--working-set", o->working_set, "MB of K/V that the calls of a row walk over, at least two sets")
        ->capture_default_str();
    verb->add_option("--commit", o->commit,
                     "written into the results in place of the commit that this program was built from");
    add_json(verb, &o->json, &o->force);
}

void add_attend(CLI::App* bench) {
    auto o = std::make_shared<Options>();
    CLI::App* verb = bench->add_subcommand("attend", "attention of one layer in a long context, beside ggml's own");
    add_options(verb, o);
    verb->add_option("--batch", o->shape.batch, "sequences")->capture_default_str();
    verb->add_option("--query-rows", o->shape.query_rows, "new rows of a sequence, the last tokens of its context")
        ->capture_default_str();
    verb->add_option("--threads", o->shape.threads, "threads of ggml's pool, for both sides")->capture_default_str();
    verb->add_option("--baseline", o->baselines,
                     "ggml:f16, ggml:bf16, ggml:q8_0 or ggml:q4_0; with ,cells behind it in the order of llama.cpp's "
                     "cache, where a token's heads lie together; repeat for more")
        ->allow_extra_args(false);
    verb->footer(
        "Examples\n"
        "  kvmosaic bench attend --cache kivi:bits=2,group=128 --cache mixkvq --baseline ggml:f16\n"
        "  kvmosaic bench attend --heads 9 --kv-heads 3 --head-dim 64 --context 8192 --cache pnmix --json r.json\n"
        "Two rows a cache: packed (pages only) and windows (with the rows that the method keeps raw). Calls of all\n"
        "rows take turns and walk over sets of 160 MB or more. GB/s: counted bytes; of bw: share of what a plain\n"
        "read loop on the same threads reaches; x NAME: how many times faster than that row; error: relative, against\n"
        "attention in double precision over the same stored values. JSON: docs/json.md.");
    verb->callback([o] { attend(*o); });
}

void add_encode(CLI::App* bench) {
    auto o = std::make_shared<Options>();
    o->shape.context = 4096;
    CLI::App* verb =
        bench->add_subcommand("encode", "packing of a page, against the attention of the steps that fill it");
    add_options(verb, o);
    verb->footer(
        "Examples\n"
        "  kvmosaic bench encode --cache kivi:bits=2 --cache mixkvq\n"
        "One KV head on one thread: the write of 128 rows (copy, statistics, plan, codes) of its keys, its values and\n"
        "both, and the share of that in the attention of 128 decode steps at --context. JSON: docs/json.md.");
    verb->callback([o] { encode(*o); });
}

} // namespace

void add_bench(CLI::App& app) {
    CLI::App* bench = app.add_subcommand("bench", "speed of attention and encoding: attend, encode");
    bench->require_subcommand(1);
    bench->footer("Examples\n"
                  "  kvmosaic bench attend --cache mixkvq --baseline ggml:f16 --baseline ggml:q8_0\n"
                  "  kvmosaic bench encode --cache mixkvq\n"
                  "  kvmosaic bench attend --help");
    add_attend(bench);
    add_encode(bench);
}

} // namespace kvmosaic::tool
