// kvmosaic devices: what this machine offers to the cache.
#include <memory>
#include <thread>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "eval/files.h"
#include "kernels/kernels.h"
#include "kvmosaic/app.h"
#include "kvmosaic/device.h"

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
    const std::vector<device::DeviceInfo> gpus = device::devices();
    if (json) {
        nlohmann::ordered_json out{{"devices",
                                    {{{"device", "cpu"},
                                      {"machine", eval::machine_name()},
                                      {"isas", names},
                                      {"isa", used->isa},
                                      {"threads", threads},
                                      {"memory_bytes", int64_t(memory)}}}},
                                   {"version", KVMOSAIC_VERSION}};
        for (const device::DeviceInfo& gpu : gpus)
            out["devices"].push_back(
                {{"device", "cuda"},
                 {"machine", gpu.name},
                 {"compute_capability", fmt::format("{}.{}", gpu.major, gpu.minor)},
                 {"multiprocessors", gpu.multiprocessors},
                 {"memory_bytes", gpu.memory},
                 {"kernels", gpu.runs ? device::attention_kernels() : std::vector<std::string>()}});
        fmt::print("{}\n", out.dump(2));
        return;
    }
    fmt::print("cpu      {}\n", eval::machine_name());
    fmt::print("kernels  {} in use{}; available: {}\n", used->isa, forced && *forced ? " (KVMOSAIC_ISA)" : "",
               fmt::join(names, ", "));
    fmt::print("threads  {}\n", threads);
    fmt::print("memory   {:.1f} GiB\n", memory / (1 << 30));
    for (const device::DeviceInfo& gpu : gpus) {
        fmt::print("\ncuda     {}, compute capability {}.{}, {} multiprocessors, {:.1f} GiB\n", gpu.name, gpu.major,
                   gpu.minor, gpu.multiprocessors, double(gpu.memory) / (1 << 30));
        fmt::print("kernels  {}\n", gpu.runs ? fmt::format("{}", fmt::join(device::attention_kernels(), ", "))
                                             : "none of this build runs on it");
    }
}

} // namespace

void add_devices(CLI::App& app) {
    auto json = std::make_shared<bool>(false);
    CLI::App* verb = app.add_subcommand("devices", "instruction sets, threads, memory and GPUs of this machine");
    verb->add_flag("--json", *json, "as JSON");
    verb->footer("Examples\n  kvmosaic devices\n  KVMOSAIC_ISA=scalar kvmosaic devices    force the plain kernels");
    verb->callback([json] { devices(*json); });
}

} // namespace kvmosaic::tool
