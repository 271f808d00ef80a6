// Memory under load: sequences that grow, fork, are cut and begin anew from a kept prefix, for a long time. What the
// arena has handed out depends on the rows alive, not on how long the cache has run, and working memory does not grow.
//
// KVMOSAIC_LOAD=N appends N rows to 64 sequences instead of a short share to 8.
#include <cstdio>
#include <cstdlib>

#if defined(__linux__)
#include <unistd.h>
#endif

#include "property/lifecycle.h"

namespace kvmosaic::test {
namespace {

// Resident MiB of this process; 0 where nobody tells.
double resident_mib() {
    long pages = 0;
#if defined(__linux__)
    if (FILE* file = std::fopen("/proc/self/statm", "r")) {
        if (std::fscanf(file, "%*s %ld", &pages) != 1) pages = 0;
        std::fclose(file);
    }
    return double(pages) * double(sysconf(_SC_PAGESIZE)) / 1048576.0;
#else
    return double(pages);
#endif
}

struct Peak { // over a stretch of the run
    int64_t allocated = 0, arena = 0, scratch = 0, tables = 0;
    void see(const Footprint& f) {
        allocated = std::max(allocated, f.allocated);
        arena = std::max(arena, f.arena);
        scratch = std::max(scratch, f.scratch);
        tables = std::max(tables, f.tables);
    }
};

class Load : public ::testing::TestWithParam<const char*> {};

TEST_P(Load, MemoryIsFlat) {
    const char* asked = std::getenv("KVMOSAIC_LOAD");
    const int64_t total = asked && *asked ? std::atoll(asked) : 12000;
    const int32_t count = asked && *asked ? 64 : 8;
    const int64_t longest = asked && *asked ? 700 : 300;
    const ModelShape shape = one_layer(4, 2, 64);
    const LayerShape& l = shape.layers[0];
    const Text text(l, 2048, 1);
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 2048; ++i)
        tokens.push_back(i);
    CacheOptions options;
    options.rollback = 16;
    options.poison = false; // memory that nobody touched stays out of the process
    auto made = Cache::create(shape, calibrations::with_file(GetParam(), shape), options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    Cache& cache = **made;
    std::mt19937 rng(7);
    const auto below = [&](int64_t n) { return int64_t(rng() % uint64_t(n)); };

    std::vector<float> out;
    const auto step = [&](const std::vector<SeqId>& ids, const std::vector<int64_t>& counts) {
        std::vector<StepRow> rows;
        std::vector<int64_t> source;
        for (size_t i = 0; i < ids.size(); ++i) {
            const int64_t at = cache.rows(ids[i]);
            const int32_t next = at ? cache.positions(ids[i])[size_t(at - 1)] + 1 : 0;
            for (int64_t r = 0; r < counts[i]; ++r) {
                rows.push_back({next + int32_t(r), {&ids[i], 1}});
                source.push_back((at + r) % 2048);
            }
        }
        Tensor q(int64_t(rows.size()), l.heads, 64), k(int64_t(rows.size()), l.kv_heads, 64);
        for (size_t i = 0; i < rows.size(); ++i) {
            std::copy_n(text.q.at(source[i], 0), l.heads * 64, q.at(int64_t(i), 0));
            std::copy_n(text.k.at(source[i], 0), l.kv_heads * 64, k.at(int64_t(i), 0));
        }
        out.resize(rows.size() * size_t(l.heads) * 64);
        EXPECT_TRUE(
            cache.append_and_attend(0, rows, q.rows(), k.rows(), k.rows(), {.scale = default_scale(l)}, out.data())
                .ok());
        return int64_t(rows.size());
    };

    // The largest steps that will come: longer sequences, and as many rows as are still split over the context.
    std::vector<SeqId> eight;
    for (SeqId id = 0; id < 8; ++id)
        eight.push_back(id);
    step(eight, std::vector<int64_t>(8, longest + longest / 3 + 40));
    step(eight, std::vector<int64_t>(8, 2));
    ASSERT_TRUE(cache.truncate(0, cache.rows(0) - 12).ok());
    ASSERT_TRUE(cache.truncate(1, 200).ok());
    step({0, 1}, {100, 1});
    cache.clear();
    const int64_t scratch = cache.footprint().scratch;

    constexpr int kStretches = 6; // the first two warm up
    Peak peaks[kStretches];
    double resident[kStretches] = {};
    int64_t appended = 0, forks = 0, cuts = 0, taken = 0;
    while (appended < total) {
        std::vector<SeqId> ids;
        std::vector<int64_t> counts;
        for (int i = 0; i < count / 4 && i < 8; ++i) { // a step of some sequences
            const SeqId id = SeqId(below(count));
            const int64_t rows = cache.rows(id);
            if (std::find(ids.begin(), ids.end(), id) != ids.end()) continue;
            const int64_t dice = below(400);
            if (rows > longest || dice < 1) {
                cache.remove(id);
                if (below(2)) taken += cache.take_prefix(id, tokens) > 0;
            } else if (dice < 4 && rows > 0) {
                ASSERT_TRUE(cache.truncate(id, below(rows)).ok());
                ++cuts;
            } else if (dice < 20 && rows > 12) {
                ASSERT_TRUE(cache.truncate(id, rows - below(12)).ok());
                ++cuts;
            } else if (dice < 28 && rows > 0) {
                const SeqId to = SeqId(below(count));
                if (std::find(ids.begin(), ids.end(), to) == ids.end()) {
                    ASSERT_TRUE(cache.fork(id, to).ok());
                    ++forks;
                }
            } else if (dice < 30 && rows > 100) {
                ASSERT_TRUE(cache.keep_prefix(id, std::span(tokens).first(size_t(rows))).ok());
                while (cache.prefixes().size() > 4 && cache.drop_prefixes() > 0) {
                }
            }
            ids.push_back(id);
            counts.push_back(cache.rows(id) < 64 ? 1 + below(longest / 3) : 1 + (below(10) == 0) * below(20));
        }
        appended += step(ids, counts);
        const size_t stretch = size_t(std::min<int64_t>(kStretches - 1, appended * kStretches / total));
        peaks[stretch].see(cache.footprint());
        resident[stretch] = std::max(resident[stretch], resident_mib());
    }
    std::printf("    %s: %lld rows, %lld forks, %lld cuts, %lld begun from a prefix\n", GetParam(),
                static_cast<long long>(appended), static_cast<long long>(forks), static_cast<long long>(cuts),
                static_cast<long long>(taken));
    for (int i = 0; i < kStretches; ++i)
        std::printf("      stretch %d: handed out %.2f MiB, held %.0f MiB, scratch %.1f KiB, tables %.1f KiB, process "
                    "%.1f MiB\n",
                    i, double(peaks[i].allocated) / 1048576, double(peaks[i].arena) / 1048576,
                    double(peaks[i].scratch) / 1024, double(peaks[i].tables) / 1024, resident[i]);
    EXPECT_GT(forks, 0);
    EXPECT_GT(cuts, 0);
    for (int i = 3; i < kStretches; ++i) {
        EXPECT_LT(double(peaks[i].allocated), 1.5 * double(peaks[2].allocated)) << "stretch " << i;
        EXPECT_LE(peaks[i].arena, peaks[2].arena + 2 * (int64_t(4) << 20)) << "stretch " << i;
        EXPECT_EQ(peaks[i].scratch, scratch) << "stretch " << i;
        if (total >= 100000) {
            EXPECT_LT(resident[i], resident[2] + 8) << "stretch " << i;
        }
    }
    cache.clear();
    cache.drop_prefixes();
    EXPECT_EQ(cache.footprint().allocated, 0);
    (void)cache.compact();
    EXPECT_EQ(cache.footprint().arena, 0);
}

INSTANTIATE_TEST_SUITE_P(Methods, Load, ::testing::Values("f16", "kivi:bits=2", "mixkvq", "rotatekv:bits=3,pins=3"),
                         [](const auto& p) { return std::string(p.param).substr(0, 4); });

} // namespace
} // namespace kvmosaic::test
