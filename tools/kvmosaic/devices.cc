// kvmosaic devices: what this machine offers to the cache.
#include <memory>
#include <thread>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "eval/files.h"
#include "kernels/kernels.h"
#include "kvmosaic/app.h"

namespace kvmosaic::tool {

namespace {

void devices(bool json) {
    std::vector<std::string> names;
    for (const kernels::Table* table : kernels::available())
        names.push_back(table->isa);
    const char* forced = std::getenv("KVMOSAIC_ISA");
    const kernels::Table* used = kernels::find("");
    if (!used) fail("KVMOSAIC_ISA={}: this machine has {}", forced ? forced : "", fmt::join(names, ", "));
    const double memory = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGE_SIZE));
    const unsigned threads = std::thread::hardware_concurrency();
    if (json) {
        const nlohmann::ordered_json out{{"devices",
                                          {{{"device", "cpu"},
                                            {"machine", eval::machine_name()},
                                            {"isas", names},
                                            {"isa", used->isa},
                                            {"threads", threads},
                                            {"memory_bytes", int64_t(memory)}}}},
                                         {"version", KVMOSAIC_VERSION}};
        fmt::print("{}\n", out.dump(2));
        return;
    }
    fmt::print("cpu      {}\n", eval::machine_name());
    fmt::print("kernels  {} in use{}; available: {}\n", used->isa, forced && *forced ? " (KVMOSAIC_ISA)" : "",
               fmt::join(names, ", "));
    fmt::print("threads  {}\n", threads);
    fmt::print("memory   {:.1f} GiB\n", memory / (1 << 30));
}

} // namespace

void add_devices(CLI::App& app) {
    auto json = std::make_shared<bool>(false);
    CLI::App* verb = app.add_subcommand("devices", "instruction sets, threads and memory of this machine");
    verb->add_flag("--json", *json, "as JSON");
    verb->footer("Examples\n  kvmosaic devices\n  KVMOSAIC_ISA=scalar kvmosaic devices    force the plain kernels");
    verb->callback([json] { devices(*json); });
}

} // namespace kvmosaic::tool
