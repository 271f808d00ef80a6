// Channels of a model's keys: how far each one's values reach, how large the queries are there, and which of them a
// cache gave how many bits.
#pragma once

#include <string>
#include <vector>

#include "eval/capture.h"

namespace kvmosaic::eval {

// Over channels: NaN where one of the two does not vary.
double pearson(const std::vector<double>& x, const std::vector<double>& y);
double spearman(const std::vector<double>& x, const std::vector<double>& y); // equal values share their mean rank

// One KV head, its query heads pooled; all after RoPE.
struct HeadChannels {
    std::vector<double> range;        // [D] largest minus smallest key in a page of 128 rows, mean over the pages
    std::vector<double> query;        // [D] mean |q|
    double pearson = 0, spearman = 0; // between the two
    double range_ratio = 0;           // largest range by the median one
    double top_share = 0;             // of salience, range * query: the kTopChannels largest of all
};
inline constexpr int32_t kTopChannels = 8;

struct LayerChannels {
    int32_t layer = 0;
    std::vector<HeadChannels> heads;
    // Means over the KV heads.
    double pearson = 0, spearman = 0, range_ratio = 0, top_share = 0;
};

struct ChannelOptions {
    int64_t tokens = 2048; // of the text, in windows that start anew
    int32_t window = 2048;
    int32_t layer = -1; // -1: all
    int32_t threads = 0;
};
Status validate(const ChannelOptions& options);
// Sums over rows that come in any number of captures of one model; whole pages only, of each window anew.
class ChannelSums {
public:
    void add(const Capture& seen);
    std::vector<LayerChannels> means() const;

private:
    struct Head {
        std::vector<double> range, query;
        int64_t pages = 0, queries = 0;
    };
    std::vector<std::pair<int32_t, std::vector<Head>>> layers_; // number of a layer, its KV heads
};
Result<std::vector<LayerChannels>> channels(const Model& model, const std::vector<int32_t>& text,
                                            const ChannelOptions& options, const Progress& progress);

// The same head page by page, [pages][D].
struct HeatMap {
    using Matrix = std::vector<std::vector<double>>;
    int32_t layer = 0, kv_head = 0;
    int64_t rows = 0;
    Matrix range;    // of the page's keys
    Matrix query;    // mean |q| of all rows up to the page's end, as methods see it
    Matrix salience; // product of the two
    struct Tiers {
        std::string spec;
        Matrix bits; // that the channel has in the page's keys
    };
    std::vector<Tiers> caches; // those that give channels different widths
};
// `seen` has q, k and v of the layer. Fills a cache of each spec with the rows and reads its pages.
Result<HeatMap> heat_map(const Capture& seen, int32_t layer, int32_t kv_head, const std::vector<std::string>& specs);

// The head with the lowest rank correlation: where range alone says least about what matters.
std::pair<int32_t, int32_t> telling_head(const std::vector<LayerChannels>& layers); // layer, KV head

} // namespace kvmosaic::eval
