// kvmosaic eval: measurements other than compare, one subcommand each.
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

void add_eval(CLI::App& app) {
    CLI::App* verb = app.add_subcommand("eval", "measurements on a model: answers, perplexity, tasks");
    verb->require_subcommand(1);
    add_perplexity(*verb);
    add_generate(*verb);
    add_passkey(*verb);
    add_gsm8k(*verb);
    add_longbench(*verb);
    add_ifeval(*verb);
    add_component(*verb);
    add_channels(*verb);
    verb->footer(
        "Examples\n"
        "  kvmosaic eval kl -m tiny -f data/sample.txt --cache mixkvq --cache kivi:bits=2 --chunks 4\n"
        "  kvmosaic eval generate -m tiny -f data/sample.txt --cache mixkvq --prompts 4\n"
        "  kvmosaic eval passkey -m tiny --cache mixkvq --cache kivi:bits=2\n"
        "  kvmosaic eval gsm8k -m small --cache mixkvq --questions 200 --resume math.jsonl\n"
        "  kvmosaic eval gsm8k --help\n"
        "f16 is always measured beside the caches asked for. Data for gsm8k, longbench, ifeval and humaneval is\n"
        "not shipped: docs/eval.md says where it comes from; KVMOSAIC_DATA names its folder.");
}

} // namespace kvmosaic::tool
