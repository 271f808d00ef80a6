// kvmosaic_cuda_bench [attend|encode|move ...] [--filter TEXT] [--quick] [--json FILE] [--commit HASH]
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <fstream>

#include "kvmosaic/device.h"
#include "rows.h"

namespace kvmosaic::cuda::bench {

std::vector<Row> rows;

void print(const Row& r) {
    std::printf("%-34s %2d/%-2d D%-3d B%-3d L%-6d rows %-2d %9.2f us (min %9.2f) %6.2f TB/s", r.spec.c_str(), r.heads,
                r.kv_heads, r.head_dim, r.batch, r.context, r.query_rows, r.median_us, r.min_us,
                double(r.bytes) / r.median_us * 1e-6);
    if (r.error >= 0) std::printf("  error %.1e", r.error);
    std::printf("  %s %s\n", r.kernel.c_str(), r.note.c_str());
    std::fflush(stdout);
    rows.push_back(r);
}

namespace {

std::string quoted(const std::string& s) {
    std::string out = "\"";
    for (const char c : s)
        out += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out + "\"";
}
std::string number(double x, bool applies = true) {
    char text[64];
    std::snprintf(text, sizeof text, "%.9g", x);
    return applies ? text : "null";
}

bool write_json(const char* path, const std::string& command, const std::string& commit) {
    std::ofstream out(path);
    const auto found = device::devices();
    out << "{\n  \"machine\": " << quoted(found.empty() ? "" : found[0].name) << ",\n  \"commit\": " << quoted(commit)
        << ",\n  \"command\": " << quoted(command) << ",\n  \"rows\": [";
    for (size_t i = 0; i < rows.size(); ++i) {
        const Row& r = rows[i];
        const auto whole = [](int x) { return number(x, x > 0); };
        out << (i ? "," : "") << "\n    {\"spec\": " << quoted(r.spec)
            << ", \"baseline\": " << (r.baseline.empty() ? "null" : quoted(r.baseline))
            << ", \"device\": " << quoted(found.empty() ? "" : found[0].name)
            << ", \"isa\": " << (r.kernel.empty() ? "null" : quoted(r.kernel)) << ", \"heads\": " << whole(r.heads)
            << ", \"kv_heads\": " << whole(r.kv_heads) << ", \"head_dim\": " << whole(r.head_dim)
            << ", \"batch\": " << whole(r.batch) << ", \"context\": " << whole(r.context)
            << ", \"query_rows\": " << whole(r.query_rows) << ", \"threads\": " << whole(r.threads)
            << ", \"median_us\": " << number(r.median_us) << ", \"min_us\": " << number(r.min_us)
            << ", \"bytes\": " << r.bytes << ", \"tb_s\": " << number(double(r.bytes) / r.median_us * 1e-6)
            << ", \"error\": " << number(r.error, r.error >= 0)
            << ", \"note\": " << (r.note.empty() ? "null" : quoted(r.note)) << "}";
    }
    out << "\n  ]\n}\n";
    return bool(out);
}

} // namespace
} // namespace kvmosaic::cuda::bench

int main(int argc, char** argv) {
    using namespace kvmosaic::cuda::bench;
    Options options;
    std::string json, commit, command = "kvmosaic_cuda_bench";
    bool attend = false, encode = false, move = false;
    for (int i = 1; i < argc; ++i) {
        const std::string a = argv[i];
        const bool value = i + 1 < argc;
        command += " " + a;
        if (a == "attend") {
            attend = true;
        } else if (a == "encode") {
            encode = true;
        } else if (a == "move") {
            move = true;
        } else if (a == "--quick") {
            options.quick = true;
        } else if (a == "--filter" && value) {
            options.filter = argv[++i], command += " " + options.filter;
        } else if (a == "--json" && value) {
            json = argv[++i], command += " FILE";
        } else if (a == "--commit" && value) {
            commit = argv[++i], command += " HASH";
        } else {
            std::fprintf(a == "--help" ? stdout : stderr,
                         "kvmosaic_cuda_bench [attend] [encode] [move] [--filter TEXT] [--quick] [--json FILE] "
                         "[--commit HASH]\n  attend   fused attention: stores, shapes, query rows; with the error "
                         "against double "
                         "precision\n  encode   pages from raw rows, and what appending adds to a step\n  move     "
                         "sequences of a whole model to the device and back, by the host\n");
            return a == "--help" ? 0 : 2;
        }
    }
    const auto found = kvmosaic::device::devices();
    if (found.empty() || !found[0].runs) {
        std::fprintf(stderr, "no GPU that runs the kernels of this build\n");
        return 1;
    }
    std::printf("%s, %d multiprocessors, compute capability %d.%d\n", found[0].name.c_str(), found[0].multiprocessors,
                found[0].major, found[0].minor);
    const bool all = !attend && !encode && !move;
    if (all || attend) attend_bench(options);
    if (all || encode) encode_bench(options);
    if (all || move) move_bench(options);
    if (!json.empty() && !write_json(json.c_str(), command, commit)) {
        std::fprintf(stderr, "cannot write %s\n", json.c_str());
        return 1;
    }
    return 0;
}
