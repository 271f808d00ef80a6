// Attention over packed pages. Page tables are random permutations of the pool; page sets are rotated so that nothing
// useful stays in the L2; times are medians over replays of a captured graph of back-to-back calls, divided by their
// number, once with programmatic dependent launch and once without.
#include "rows.h"
#include "workload.cuh"

namespace kvmosaic::cuda::bench {
namespace {

// The kernel for this many columns among those named `name` and `name`_cCOLUMNS, as Attention::create chooses.
const AttendInstance* find(const std::string& name, int columns) {
    const AttendInstance* best = nullptr;
    for (const AttendInstance* row : attend_instances()) {
        const std::string own = row->name;
        if (own != name && own.rfind(name + "_c", 0) != 0) continue;
        if (!best || instance_rank(*row, columns) < instance_rank(*best, columns)) best = row;
    }
    return best;
}

Ladder ladder_of(std::initializer_list<std::pair<int, int>> tiers) {
    Ladder ladder;
    for (const auto& [bits, channels] : tiers)
        ladder.push(uint8_t(bits), uint16_t(channels));
    return ladder;
}

struct Store {
    const char* spec;
    const char* kernel;
    Ladder ladder;
};

void measure(const Store& store, const Shape& shape, const Regions& regions, const Options& options,
             const char* note = "") {
    if (std::string(store.spec).find(options.filter) == std::string::npos) return;
    const AttendInstance* instance = find(store.kernel, shape.rows * shape.heads / shape.kv_heads);
    if (!instance) return; // not in this build's set
    Workload w(*instance, shape, store.ladder, regions);
    const int64_t pages = int64_t(shape.batch) * shape.kv_heads * shape.context / kPageTokens;
    const int warps = instance_units(*instance, pages, 132); // as Attention::create
    const bool wide = instance->unit > 32 || shape.rows * shape.heads / shape.kv_heads > instance->columns;
    if (!w.configure(Config{warps, wide ? 2 : 1}) && !w.configure(Config{warps, 1}) && !w.configure(Config{8, 1}) &&
        !w.configure(Config{4, 1}) && !w.configure(Config{1, 1}))
        return;
    Row row;
    row.spec = store.spec, row.kernel = instance->name;
    row.heads = shape.heads, row.kv_heads = shape.kv_heads, row.head_dim = instance->dim, row.batch = shape.batch;
    row.context = shape.context, row.query_rows = shape.rows, row.bytes = w.bytes;
    row.error = w.error(false);
    for (const bool early : {true, false}) {
        w.early = early;
        const Workload::Times t = w.time(options.quick ? 5 : 15);
        row.median_us = t.median_us, row.min_us = t.min_us;
        row.note = std::string(early ? "dependent launch" : "plain launch") + (*note ? std::string(", ") + note : "");
        print(row);
    }
}

} // namespace

void attend_bench(const Options& options) {
    const Shape shapes[] = {{32, 8, 1, 32768}, {32, 8, 1, 131072}, {32, 8, 8, 4096},   {32, 8, 8, 32768},
                            {32, 8, 64, 4096}, {40, 40, 8, 32768}, {40, 40, 64, 4096}, {40, 8, 8, 32768}};
    const Store kivi = {"kivi:bits=2,group=128", "k2_g128_v2_d128", {}};
    const Ladder mix_ladder = ladder_of({{16, 8}, {4, 32}, {2, 88}});
    const Store mix = {"mixkvq (8 x 16, 32 x 4, 88 x 2)", "mix_v2_d128", mix_ladder};
    for (const Shape& s : shapes)
        measure(kivi, s, {}, options);
    const Shape middle = {32, 8, 8, 32768};
    measure(mix, middle, {}, options);
    // The method's windows: keys 0/0/128, values 0/128/1, half a block of keys still raw.
    measure(kivi, middle, {0, 64, 128}, options, "with raw windows");
    measure(kivi, {32, 8, 64, 4096}, {0, 64, 128}, options, "with raw windows");
    for (const int rows : {2, 4, 8, 16}) {
        Shape s = middle;
        s.rows = rows;
        measure(kivi, s, {}, options);
        if (rows == 4) measure(mix, s, {}, options);
    }
    const Store stores[] = {
        {"kivi:bits=2,group=32", "k2_g32_v2_d128", {}},
        {"kivi:bits=4,group=128", "k4_g128_v4_d128", {}},
        {"kivi:bits=4,group=32", "k4_g32_v4_d128", {}},
        {"kivi:k=4,v=2,group=128", "k4_g128_v2_d128", {}},
        {"kivi:bits=3,group=128", "k3_g128_v3_d128", {}},
        {"kivi:bits=1,group=128", "k1_g128_v1_d128", {}},
        {"kivi:bits=6,group=128", "k6_g128_v6_d128", {}},
        {"kivi:bits=8,group=128", "k8_g128_v8_d128", {}},
        {"kitty (16 x 4, 112 x 2)", "kitty_v2_d128", ladder_of({{4, 16}, {2, 112}})},
        {"pnmix (64 x 3, 64 x 1)", "pn_v2_d128", ladder_of({{3, 64}, {1, 64}})},
        {"2 bits, groups of 128 along the other axis", "depth2_d128", {}},
        {"innerq", "inner_base_d128", {}},
        {"innerq:variant=small", "inner_small_d128", {}},
        {"innerq:variant=hybrid", "inner_hyb_d128", {}},
        {"innerq:variant=hybrid,asym=4level", "inner_hyb4_d128", {}},
        {"turboquant", "turbo4_d128", {}},
        {"turboquant:k=3,v=3", "turbo3_d128", {}},
        {"kivi:bits=2,group=128", "k2_g128_v2_d64", {}},
        {"kivi:bits=2,group=32", "k2_g32_v2_d64", {}},
        {"kivi:bits=4,group=128", "k4_g128_v4_d64", {}},
        {"mixkvq (4 x 16, 16 x 4, 44 x 2)", "mix_v2_d64", ladder_of({{16, 4}, {4, 16}, {2, 44}})},
        {"kitty (8 x 4, 56 x 2)", "kitty_v2_d64", ladder_of({{4, 8}, {2, 56}})},
        {"pnmix (32 x 3, 32 x 1)", "pn_v2_d64", ladder_of({{3, 32}, {1, 32}})},
        {"2 bits, groups along the other axis", "depth2_d64", {}},
        {"innerq", "inner_base_d64", {}},
        {"innerq:variant=small", "inner_small_d64", {}},
        {"innerq:variant=hybrid", "inner_hyb_d64", {}},
        {"turboquant", "turbo4_d64", {}},
        {"turboquant:k=3,v=3", "turbo3_d64", {}},
        {"kivi:bits=2,group=128", "k2_g128_v2_d256", {}},
        {"kivi:bits=4,group=128", "k4_g128_v4_d256", {}},
        {"mixkvq (16 x 16, 64 x 4, 176 x 2)", "mix_v2_d256", ladder_of({{16, 16}, {4, 64}, {2, 176}})},
        {"kitty (32 x 4, 224 x 2)", "kitty_v2_d256", ladder_of({{4, 32}, {2, 224}})},
        {"pnmix (128 x 3, 128 x 1)", "pn_v2_d256", ladder_of({{3, 128}, {1, 128}})},
        {"innerq", "inner_base_d256", {}},
        {"innerq:variant=hybrid", "inner_hyb_d256", {}},
        {"turboquant", "turbo4_d256", {}},
    };
    for (const Store& s : stores)
        measure(s, middle, {}, options);
}

} // namespace kvmosaic::cuda::bench
