// kvmosaic inspect FILE: what a sequence file holds, without its model.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "kvmosaic/app.h"
#include "kvmosaic/file.h"
#include "kvmosaic/saved.h"

namespace kvmosaic::tool {

namespace {

using nlohmann::ordered_json;

// One side of a layer, over its heads.
struct LayerSide {
    Window window;
    int64_t packed = 0, pages = 0; // pages over all heads
    double page_bits = 0;          // mean
};

LayerSide side_of(const Cache& cache, SeqId seq, int32_t layer, Side side) {
    LayerSide out;
    out.window = cache.plan(seq, layer, 0, side).window;
    out.packed = cache.packed_rows(seq, layer, side);
    const int32_t heads = cache.shape().layers[size_t(layer)].kv_heads;
    for (int32_t head = 0; head < heads; ++head)
        for (int64_t i = 0; i < cache.pages(seq, layer, side); ++i, ++out.pages)
            out.page_bits += cache.page(seq, layer, head, side, i).layout->true_bits();
    out.page_bits /= double(std::max<int64_t>(1, out.pages));
    return out;
}

std::string text_of(const LayerSide& s) {
    if (s.window.flush == 0) return "raw";
    return fmt::format("{}/{}/{}: {} packed, {} pages of {:.3f}", s.window.front, s.window.keep, s.window.flush,
                       s.packed, s.pages, s.page_bits);
}

ordered_json to_json(const LayerSide& s) {
    return {{"window_front", s.window.front},
            {"window_keep", s.window.keep},
            {"window_flush", s.window.flush},
            {"packed", s.packed},
            {"pages", s.pages},
            {"page_bits", s.page_bits}};
}

std::vector<std::pair<const char*, int64_t>> parts_of(const Footprint& f) {
    return {{"packed keys", f.packed[0]}, {"packed values", f.packed[1]}, {"raw keys", f.raw[0]},
            {"raw values", f.raw[1]},     {"tables", f.tables},           {"statistics", f.statistics}};
}

ordered_json head_json(const std::string& path, const FileInfo& info) {
    ordered_json out{{"file", path},
                     {"version", KVMOSAIC_VERSION},
                     {"file_version", info.version},
                     {"file_bytes", info.bytes},
                     {"model", info.model.name},
                     {"fingerprint", info.model.fingerprint},
                     {"spec", info.spec},
                     {"sequences", ordered_json::array()},
                     {"sections", ordered_json::array()}};
    for (const FileInfo::Sequence& s : info.sequences)
        out["sequences"].push_back({{"sequence", s.seq},
                                    {"rows", s.rows},
                                    {"first_position", s.first_position},
                                    {"last_position", s.last_position},
                                    {"tokens", s.tokens},
                                    {"note_bytes", s.note.size()},
                                    {"state_bytes", s.state_bytes}});
    for (const FileInfo::Section& s : info.sections)
        out["sections"].push_back(
            {{"section", s.name}, {"count", s.count}, {"shared", s.shared}, {"bytes", s.bytes}, {"stored", s.stored}});
    return out;
}

void print_head(const std::string& path, const FileInfo& info) {
    const auto kv = std::count_if(info.model.layers.begin(), info.model.layers.end(),
                                  [](const LayerShape& l) { return l.has_kv(); });
    fmt::print("{}: sequence file, version {}, {} bytes\n", path, info.version, info.bytes);
    fmt::print("model {}, fingerprint {}, {} layers, {} with keys and values\nmethod {}\n",
               info.model.name.empty() ? "without a name" : info.model.name,
               info.model.fingerprint.empty() ? "unknown" : info.model.fingerprint, info.model.layers.size(), kv,
               info.spec);
    for (const FileInfo::Sequence& s : info.sequences)
        fmt::print("sequence {}: {} rows (positions {} to {}), {} tokens, note of {} bytes\n", s.seq, s.rows,
                   s.first_position, s.last_position, s.tokens, s.note.size());
    fmt::print("\n{:<11} {:>6} {:>7} {:>13} {:>13}\n", "section", "count", "shared", "bytes", "stored");
    for (const FileInfo::Section& s : info.sections)
        fmt::print("{:<11} {:>6} {:>7} {:>13} {:>13}\n", s.name, s.count, s.shared, s.bytes, s.stored);
}

void print_layers(const Cache& cache, SeqId seq) {
    fmt::print("\nsequence {}\n{:>5} {:>5} {:>5} {:>9}  {:<46} {}\n", seq, "layer", "heads", "KV", "head size",
               "keys (window front/keep/flush; bits of pages)", "values");
    const auto& layers = cache.shape().layers;
    for (int32_t layer = 0; layer < int32_t(layers.size()); ++layer) {
        const LayerShape& l = layers[size_t(layer)];
        if (!l.has_kv()) continue;
        const std::string sizes = fmt::format("{}/{}", l.key_dim, l.value_dim);
        fmt::print("{:>5} {:>5} {:>5} {:>9}  {:<46} {}\n", layer, l.heads, l.kv_heads, sizes,
                   text_of(side_of(cache, seq, layer, Side::key)), text_of(side_of(cache, seq, layer, Side::value)));
    }
}

} // namespace

void inspect_saved(const std::string& path, bool json) {
    const std::vector<uint8_t> bytes = take(read_file(path));
    const auto info = file_info(bytes);
    if (!info) fail("{}: {}", path, info.status().message());
    ordered_json out = head_json(path, *info);
    if (!json) print_head(path, *info);

    // The file names its method and carries the model's sizes: that makes a cache, which then tells the rest.
    auto cache = Cache::create(info->model, info->spec);
    const auto read = cache ? read_sequences(cache->get(), bytes) : Result<std::vector<FileSequence>>(cache.status());
    if (!read) {
        if (json) {
            out["unread"] = read.status().message();
            fmt::print("{}\n", out.dump(2));
            return;
        }
        fmt::print("\n");
        return warn(fmt::format("the pages cannot be read here: {}", read.status().message()));
    }
    const Cache& c = **cache;
    const Footprint f = c.footprint();
    if (!json) {
        fmt::print("\n{} tokens (shared ones once), {} bytes, {:.3f} true bits per value (keys {:.3f}, values {:.3f}), "
                   "{:.2f}x smaller than 16 bit\n",
                   f.tokens, f.cache_bytes(), f.true_bits(), f.true_bits(0), f.true_bits(1), f.times_smaller());
        for (const auto& [name, size] : parts_of(f))
            fmt::print("{:<14} {:>13}\n", name, size);
        for (const FileInfo::Sequence& s : info->sequences)
            print_layers(c, s.seq);
        return;
    }
    out["tokens"] = f.tokens;
    out["cache_bytes"] = f.cache_bytes();
    out["true_bits"] = f.true_bits();
    out["true_bits_k"] = f.true_bits(0);
    out["true_bits_v"] = f.true_bits(1);
    out["times_smaller"] = f.times_smaller();
    for (const auto& [name, size] : parts_of(f))
        out["parts"].push_back({{"part", name}, {"bytes", size}});
    for (size_t i = 0; i < info->sequences.size(); ++i) {
        ordered_json& layers = out["sequences"][i]["layers"] = ordered_json::array();
        for (int32_t layer = 0; layer < int32_t(c.shape().layers.size()); ++layer) {
            const LayerShape& l = c.shape().layers[size_t(layer)];
            if (!l.has_kv()) continue;
            const SeqId seq = info->sequences[i].seq;
            layers.push_back({{"layer", layer},
                              {"heads", l.heads},
                              {"kv_heads", l.kv_heads},
                              {"key_dim", l.key_dim},
                              {"value_dim", l.value_dim},
                              {"keys", to_json(side_of(c, seq, layer, Side::key))},
                              {"values", to_json(side_of(c, seq, layer, Side::value))}});
        }
    }
    fmt::print("{}\n", out.dump(2));
}

} // namespace kvmosaic::tool
