// Encode and restore of one page and raw rows. Pages rotate, so that the codes come from the second cache.
#include <numeric>
#include <string>

#include "bench_util.h"

namespace kvmosaic::bench {
namespace {

constexpr int kPages = 16;

struct Case {
    std::string name;
    PageLayout page;
    std::vector<uint16_t> channels;
};

// The other rules, axes and kinds, one of each that a method uses.
std::vector<Case> other_cases(int32_t dim) {
    static const float book[16] = {-2.73f, -2.07f, -1.62f, -1.26f, -0.94f, -0.66f, -0.39f, -0.13f,
                                   0.13f,  0.39f,  0.66f,  0.94f,  1.26f,  1.62f,  2.07f,  2.73f};
    static const uint16_t edges[5] = {0, 13, 30, 50, 64}, wide_edges[5] = {0, 25, 61, 99, 128};
    const std::string d = "/D" + std::to_string(dim);
    std::vector<Case> all;
    StoreSpec spec;
    spec.kind = StoreKind::grid;
    const auto add = [&](const std::string& name, Side side) {
        all.push_back({name_of(side) + std::string("/") + name + "/b" + std::to_string(spec.bits) + d,
                       layout(spec, side, dim),
                       {}});
    };
    for (int bits : {2, 3, 4, 8}) {
        spec.bits = uint8_t(bits);
        spec.rule = GridRule::asym;
        spec.axis = Axis::channels, spec.group = 32;
        add("token-asym", Side::key);
        spec.rule = GridRule::symmetric;
        add("token-symmetric", Side::key);
        spec.axis = Axis::tokens;
        add("along-symmetric", Side::value);
        spec.rule = GridRule::hybrid_4level;
        add("along-hybrid", Side::value);
    }
    spec.axis = Axis::channels, spec.rule = GridRule::extreme, spec.bits = 4, spec.group = 32;
    add("token-extreme", Side::key);
    add("token-extreme", Side::value);
    spec.rule = GridRule::integer, spec.bits = 2, spec.clip = 0.8f, spec.group = 128;
    add("token-integer", Side::key);
    spec.rule = GridRule::asym, spec.clip = 0.92f;
    spec.edges = dim == 64 ? edges : wide_edges;
    spec.edge_groups = 4;
    for (Side side : {Side::key, Side::value})
        add("edges", side);
    spec.levels = 3;
    for (Side side : {Side::key, Side::value})
        add("edges-3levels", side);
    spec.edge_groups = 0;
    for (Side side : {Side::key, Side::value})
        add("token-3levels", side);
    spec = StoreSpec();
    spec.kind = StoreKind::codebook;
    spec.book = book;
    spec.bits = 4, spec.axis = Axis::channels, spec.group = uint16_t(dim);
    for (Side side : {Side::key, Side::value}) {
        spec.rule = GridRule::codebook_norm, spec.outliers = 0;
        add("book-norm", side);
        spec.rule = GridRule::codebook_range, spec.outliers = 2;
        add("book-range-2", side);
    }
    spec.rule = GridRule::codebook_fixed;
    add("book-fixed-2", Side::key);
    return all;
}

std::vector<Case> cases(int32_t dim) {
    std::vector<Case> all;
    const std::string d = "/D" + std::to_string(dim);
    for (Side side : {Side::key, Side::value}) {
        for (int bits : {1, 2, 3, 4, 6, 8}) {
            for (int group : {32, 128}) {
                StoreSpec spec;
                spec.kind = StoreKind::grid;
                spec.bits = uint8_t(bits);
                spec.group = uint16_t(group);
                spec.axis = side == Side::key ? Axis::tokens : Axis::channels;
                all.push_back(
                    {std::string(name_of(side)) + "/b" + std::to_string(bits) + "/g" + std::to_string(group) + d,
                     layout(spec, side, dim),
                     {}});
            }
        }
    }
    for (Case& c : other_cases(dim))
        all.push_back(std::move(c));
    StoreSpec spec;
    spec.kind = StoreKind::tiered;
    spec.group = 128;
    Ladder ladder; // the shape of a MixKVQ page: a sixteenth raw, a quarter at 4 bits
    ladder.push(16, uint16_t(dim / 16));
    ladder.push(4, uint16_t(dim / 4));
    ladder.push(2, uint16_t(dim - dim / 16 - dim / 4));
    std::vector<uint16_t> channels(static_cast<size_t>(dim));
    std::iota(channels.begin(), channels.end(), uint16_t(0));
    for (size_t i = 0; i < channels.size(); ++i)
        std::swap(channels[i], channels[(i * 37 + 11) % channels.size()]);
    all.push_back({"key/16-4-2/g128" + d, layout(spec, Side::key, dim, ladder), channels});
    return all;
}

void encode(benchmark::State& state, const kernels::Table& table, const Case& c, int32_t step) {
    const std::vector<float> rows = numbers(size_t(kPageTokens) * c.page.dim * kPages, 1);
    std::vector<uint8_t> bytes(c.page.bytes);
    const uint16_t* channels = c.channels.empty() ? nullptr : c.channels.data();
    size_t i = 0;
    for (auto _ : state) {
        const float* from = rows.data() + (i++ % kPages) * kPageTokens * c.page.dim;
        if (step < kPageTokens) std::fill(bytes.begin(), bytes.end(), uint8_t(0));
        for (int32_t t = 0; t < kPageTokens; t += step)
            table.encode(c.page, channels, from + t * c.page.dim, t, step, bytes.data());
        benchmark::DoNotOptimize(bytes.data());
        benchmark::ClobberMemory();
    }
    report(state, double(kPageTokens) * c.page.dim, c.page.bytes);
}

void restore(benchmark::State& state, const kernels::Table& table, const Case& c) {
    const std::vector<float> rows = numbers(size_t(kPageTokens) * c.page.dim * kPages, 1);
    std::vector<uint8_t> bytes(size_t(c.page.bytes) * kPages);
    std::vector<float> out(size_t(kPageTokens) * c.page.dim);
    const uint16_t* channels = c.channels.empty() ? nullptr : c.channels.data();
    for (size_t i = 0; i < kPages; ++i)
        table.encode(c.page, channels, rows.data() + i * out.size(), 0, kPageTokens, bytes.data() + i * c.page.bytes);
    size_t i = 0;
    for (auto _ : state) {
        table.restore(c.page, bytes.data() + (i++ % kPages) * c.page.bytes, 0, kPageTokens, out.data(), c.page.dim);
        benchmark::DoNotOptimize(out.data());
        benchmark::ClobberMemory();
    }
    report(state, double(out.size()), c.page.bytes);
}

void load_raw(benchmark::State& state, const kernels::Table& table, RawType type, int32_t dim) {
    const std::vector<float> x = numbers(size_t(kPageTokens) * size_t(dim), 1);
    std::vector<uint8_t> rows(x.size() * bytes_of(type));
    std::vector<float> out(x.size());
    kernels::Counters counters;
    for (int32_t t = 0; t < kPageTokens; ++t)
        table.store_raw(type, x.data() + t * dim, dim, rows.data() + size_t(t * dim) * bytes_of(type), &counters);
    for (auto _ : state) {
        table.load_raw(type, rows.data(), kPageTokens, dim, out.data(), dim);
        benchmark::DoNotOptimize(out.data());
        benchmark::ClobberMemory();
    }
    report(state, double(out.size()), double(rows.size()));
}

void store_raw(benchmark::State& state, const kernels::Table& table, RawType type, int32_t dim) {
    const std::vector<float> x = numbers(size_t(kPageTokens) * size_t(dim), 1);
    std::vector<uint8_t> rows(x.size() * bytes_of(type));
    kernels::Counters counters;
    for (auto _ : state) {
        for (int32_t t = 0; t < kPageTokens; ++t)
            table.store_raw(type, x.data() + t * dim, dim, rows.data() + size_t(t * dim) * bytes_of(type), &counters);
        benchmark::DoNotOptimize(rows.data());
        benchmark::ClobberMemory();
    }
    report(state, double(x.size()), double(rows.size()));
}

} // namespace

void register_codecs(const kernels::Table& table) {
    const auto name = [&](const char* what, const std::string& rest) {
        return std::string(table.isa) + "/" + what + "/" + rest;
    };
    for (int32_t dim : {64, 128}) {
        for (const Case& c : cases(dim)) {
            benchmark::RegisterBenchmark(name("encode", c.name).c_str(),
                                         [&table, c](benchmark::State& s) { encode(s, table, c, kPageTokens); });
            benchmark::RegisterBenchmark(name("restore", c.name).c_str(),
                                         [&table, c](benchmark::State& s) { restore(s, table, c); });
            const bool in_token = (c.page.side == Side::key) == c.page.along_depth;
            if (in_token && (c.page.tiers[0].bits == 2 || c.page.book != nullptr))
                benchmark::RegisterBenchmark(name("encode_single", c.name).c_str(),
                                             [&table, c](benchmark::State& s) { encode(s, table, c, 1); });
        }
        for (RawType type : {RawType::f16, RawType::bf16, RawType::f32}) {
            const std::string rest = std::string(name_of(type)) + "/D" + std::to_string(dim);
            benchmark::RegisterBenchmark(name("load_raw", rest).c_str(),
                                         [&table, type, dim](benchmark::State& s) { load_raw(s, table, type, dim); });
            benchmark::RegisterBenchmark(name("store_raw", rest).c_str(),
                                         [&table, type, dim](benchmark::State& s) { store_raw(s, table, type, dim); });
        }
    }
}

} // namespace kvmosaic::bench
