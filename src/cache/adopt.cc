// Another cache's sequence, packed by this cache's rule.
#include <algorithm>

#include "cache/impl.h"
#include "cache/scratch.h"

namespace kvmosaic {

namespace {

// Rows of all layers are appended as a prompt would be, a page at a time, so that no more than a page is raw at once.
constexpr int64_t kChunk = kPageTokens;

} // namespace

Status Cache::adopt(SeqId to, const Cache& from, SeqId seq) {
    Impl& im = *impl_;
    const Impl& other = *from.impl_;
    im.end_step();
    const Sequence* source = other.find(seq);
    if (!source) return {StatusCode::not_found, "adopt: there is no sequence " + std::to_string(seq)};
    if (other.step.open) return {StatusCode::invalid_argument, "adopt: the other cache is in the middle of a step"};
    if (other.shape.layers.size() != im.shape.layers.size())
        return {StatusCode::invalid_argument, "adopt: the other cache has " +
                                                  std::to_string(other.shape.layers.size()) + " layers, this one " +
                                                  std::to_string(im.shape.layers.size())};
    for (size_t i = 0; i < im.shape.layers.size(); ++i)
        if (!other.shape.layers[i].same_sizes(im.shape.layers[i]))
            return {StatusCode::invalid_argument,
                    "adopt: layer " + std::to_string(i) + " of the other cache belongs to another model"};
    const int64_t rows = source->rows();
    if (im.options.max_rows > 0 && rows > im.options.max_rows)
        return {StatusCode::out_of_capacity, "adopt: the sequence has " + std::to_string(rows) + " rows, " +
                                                 std::to_string(im.options.max_rows) + " fit here"};
    SeqId work = -1; // a name that nobody has
    while (im.find(work))
        --work;
    auto fresh = im.make_sequence();
    // Queries are gone; their sums stand for them where both methods keep the same kind.
    const bool statistics = im.method->info().uses_query && other.method->info().uses_query &&
                            im.method->info().query_sum == other.method->info().query_sum;
    for (size_t i = 0; statistics && i < fresh->sides.size(); ++i) {
        fresh->sides[i].abs_sum = source->sides[i].abs_sum;
        fresh->sides[i].query_count = source->sides[i].query_count;
    }
    im.sequences[work] = std::move(fresh);

    std::vector<float> k, v;
    for (int64_t at = 0; at < rows; at += kChunk) {
        const int64_t n = std::min(kChunk, rows - at);
        std::vector<StepRow> step;
        for (int64_t t = 0; t < n; ++t)
            step.push_back({source->positions[size_t(at + t)], {&work, 1}});
        if (Status st = im.begin_step(step); !st) {
            remove(work);
            return {st.code(), "adopt: " + st.message()};
        }
        im.step.queries = false;
        for (int32_t layer = 0; layer < int32_t(im.shape.layers.size()); ++layer) {
            const LayerShape& l = im.shape.layers[size_t(layer)];
            if (!l.has_kv()) continue;
            for (const Side side : {Side::key, Side::value}) {
                std::vector<float>& x = side == Side::key ? k : v;
                x.resize(size_t(n) * size_t(l.kv_heads) * size_t(l.dim(side)));
                for (int32_t head = 0; head < l.kv_heads; ++head) // [G][rows][D]
                    other.decode(*source, layer, head, side, source->packed[Impl::packed_index(layer, side)], at, n,
                                 x.data() + int64_t(head) * n * l.dim(side));
            }
            write(layer, {}, {k.data(), l.key_dim, n * l.key_dim}, {v.data(), l.value_dim, n * l.value_dim});
        }
        im.end_step();
    }
    std::shared_ptr<Sequence> made = std::move(im.sequences[work]);
    im.sequences.erase(work);
    im.rebase(*made);
    remove(to);
    if (rows > 0) im.sequences[to] = std::move(made);
    return {};
}

} // namespace kvmosaic
