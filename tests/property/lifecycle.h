// A cache driven by random operations beside a model that knows no pages: for each sequence the list of what was done
// to it, in its simplest form. Rows that an exact cut took away are struck from the list, forks copy it, prefixes are
// copies of it; replayed on a fresh cache, in one chunk, without a rollback window and without company, it must end in
// the same bytes, and its last row in the same bits of attention.
#pragma once

#include <algorithm>
#include <barrier>
#include <map>
#include <thread>

#include "rig.h"

namespace kvmosaic::test {

// Every spec of the rig and every registered method at its defaults.
inline std::vector<std::string> lifecycle_specs() {
    std::vector<std::string> specs = all_specs();
    for (const MethodInfo* m : methods())
        if (std::find(specs.begin(), specs.end(), m->name) == specs.end()) specs.push_back(m->name);
    return specs;
}

struct Row {
    int32_t token = 0, position = 0;
};

// What was done to a sequence.
struct Deed {
    enum Kind { append, cut, remove, reposition, load } kind = append;
    std::vector<Row> rows;          // append
    int64_t first = 0, last = 0;    // cut (to `first` rows), remove
    std::vector<int32_t> positions; // reposition
    std::vector<uint8_t> bytes;     // load
};

struct Story {
    std::vector<Deed> deeds;
    std::vector<Row> rows;      // now
    int64_t floor = 0;          // cuts to so many rows or more are exact
    std::vector<uint8_t> bytes; // as last seen
    int32_t next() const { return rows.empty() ? 0 : rows.back().position + 1; }

    void add(const std::vector<Row>& more, int64_t rollback) {
        if (deeds.empty() || deeds.back().kind != Deed::append) deeds.emplace_back();
        deeds.back().rows.insert(deeds.back().rows.end(), more.begin(), more.end());
        rows.insert(rows.end(), more.begin(), more.end());
        floor = std::max(floor, int64_t(rows.size()) - rollback);
    }
    void cut(int64_t to, int64_t rollback) {
        const int64_t gone = int64_t(rows.size()) - to;
        rows.resize(size_t(to));
        if (to > 0 && to >= floor && rollback > 0) { // as if they had never come
            deeds.back().rows.resize(deeds.back().rows.size() - size_t(gone));
            if (deeds.back().rows.empty()) deeds.pop_back();
            return;
        }
        if (to == 0)
            deeds.clear();
        else
            deeds.push_back({Deed::cut, {}, to, 0, {}, {}});
        floor = to;
    }
};

class Life {
public:
    static constexpr int32_t kTokens = 61;

    // layers > 1: all layers get the same rows; attention is looked at on the first one.
    Life(const std::string& spec, uint32_t seed, CacheOptions options, int32_t thread_count = 1, int32_t layers = 1)
        : shape(one_layer(4, 2, 64, 64, layers)), text(shape.layers[0], kTokens, seed + 1), rng(seed),
          threads(thread_count), rollback(options.rollback), bounded(options.max_bytes > 0),
          cache(make(shape, spec, options)), reference(make(shape, spec)) {}

    int64_t below(int64_t n) { return n <= 0 ? 0 : int64_t(rng() % uint64_t(n)); }

    // Appends to several sequences in one step, rows taken in turn; then looks at all of them.
    void append(const std::vector<std::pair<std::vector<SeqId>, int64_t>>& parts) {
        std::vector<std::vector<Row>> fresh(parts.size());
        for (size_t p = 0; p < parts.size(); ++p) {
            int32_t position = 0;
            for (const SeqId id : parts[p].first)
                position = std::max(position, stories[id].next());
            if (below(8) == 0) position += int32_t(below(5)); // a gap
            for (int64_t i = 0; i < parts[p].second; ++i)
                fresh[p].push_back({int32_t(below(kTokens)), position + int32_t(i)});
        }
        std::vector<StepRow> rows;
        std::vector<Row> what;
        std::vector<size_t> last(parts.size());
        for (size_t i = 0, left = 1; left > 0; ++i) {
            left = 0;
            for (size_t p = 0; p < parts.size(); ++p) {
                if (i >= fresh[p].size()) continue;
                ++left;
                last[p] = rows.size();
                rows.push_back({fresh[p][i].position, parts[p].first});
                what.push_back(fresh[p][i]);
            }
        }
        if (rows.empty()) return;
        const Status fits = cache->can_append(rows);
        const std::vector<float> out = step(*cache, rows, what, threads);
        if (out.empty()) { // refused
            EXPECT_TRUE(bounded) << "refused without a limit";
            EXPECT_FALSE(fits.ok()) << "begin_step refused what can_append had promised";
            for (auto& [id, story] : stories)
                EXPECT_TRUE(cache->save(id) == story.bytes) << "a refused step changed sequence " << id;
            ++refusals;
            return;
        }
        for (size_t p = 0; p < parts.size(); ++p)
            for (const SeqId id : parts[p].first)
                stories[id].add(fresh[p], rollback);
        const size_t width = size_t(shape.layers[0].heads) * size_t(shape.layers[0].value_dim);
        for (size_t p = 0; p < parts.size(); ++p) {
            const std::vector<float> seen(out.begin() + int64_t(last[p] * width),
                                          out.begin() + int64_t((last[p] + 1) * width));
            for (const SeqId id : parts[p].first)
                check(id, id == parts[p].first.front() ? &seen : nullptr);
        }
    }

    // The story of a sequence, told to a fresh cache, gives the bytes that the sequence has.
    void check(SeqId id, const std::vector<float>* seen = nullptr) {
        Story& story = stories[id];
        story.bytes = cache->save(id);
        ASSERT_EQ(cache->rows(id), int64_t(story.rows.size())) << "sequence " << id;
        for (size_t i = 0; i < story.rows.size(); ++i)
            ASSERT_EQ(cache->positions(id)[i], story.rows[i].position) << "sequence " << id << " row " << i;
        const std::vector<float> out = replay(story.deeds);
        ASSERT_TRUE(reference->save(0) == story.bytes)
            << "sequence " << id << " of " << story.rows.size() << " rows is not what its story makes";
        if (!seen) return;
        EXPECT_TRUE(out == *seen) << "attention of sequence " << id << " at row " << story.rows.size() - 1;
        const int64_t rows = int64_t(story.rows.size());
        Text one(shape.layers[0], 1);
        std::copy_n(text.q.at(story.rows.back().token, 0), one.q.x.size(), one.q.x.data());
        EXPECT_LT(error_of(seen->data(), expected(*cache, one, 0, 0, rows, id)), bound_of(*cache))
            << "sequence " << id << " row " << rows - 1;
    }

    // What the others hold is not touched by what is done to one.
    void check_others() {
        for (auto& [id, story] : stories)
            EXPECT_TRUE(cache->save(id) == story.bytes) << "sequence " << id << " changed with another one";
    }

    std::vector<float> decoded(SeqId id, Side side, int32_t head = 1) const {
        std::vector<float> x(size_t(cache->rows(id)) * 64);
        cache->decode(id, 0, head, side, 0, cache->rows(id), x.data());
        return x;
    }

    ModelShape shape;
    Text text; // row t: what token t stands for
    std::mt19937 rng;
    int32_t threads;
    int64_t rollback;
    bool bounded;
    int64_t refusals = 0;
    std::unique_ptr<Cache> cache, reference;
    std::map<SeqId, Story> stories;

private:
    // Attention on the first layer, or nothing when the step is refused.
    std::vector<float> step(Cache& on, std::span<const StepRow> rows, const std::vector<Row>& what, int32_t n) {
        const LayerShape& l = shape.layers[0];
        const int64_t count = int64_t(rows.size());
        Tensor q(count, l.heads, 64), k(count, l.kv_heads, 64), v(count, l.kv_heads, 64);
        for (int64_t i = 0; i < count; ++i) {
            const int32_t token = what[size_t(i)].token;
            std::copy_n(text.q.at(token, 0), l.heads * 64, q.at(i, 0));
            std::copy_n(text.k.at(token, 0), l.kv_heads * 64, k.at(i, 0));
            std::copy_n(text.v.at(token, 0), l.kv_heads * 64, v.at(i, 0));
        }
        if (const Status st = on.begin_step(rows); !st) {
            EXPECT_TRUE(st.code() == StatusCode::out_of_capacity) << st.message();
            return {};
        }
        const AttendArgs args{.scale = default_scale(l)};
        std::vector<float> out(size_t(count) * size_t(l.heads) * 64), others(out.size());
        std::barrier meet(n);
        const auto work = [&](int32_t index) {
            for (int32_t layer = 0; layer < int32_t(shape.layers.size()); ++layer) {
                on.write(layer, q.rows(), k.rows(), v.rows(), {index, n});
                meet.arrive_and_wait();
                on.attend(layer, q.rows(), args, layer == 0 ? out.data() : others.data(), {index, n});
                meet.arrive_and_wait();
            }
        };
        std::vector<std::thread> helpers;
        for (int32_t i = 1; i < n; ++i)
            helpers.emplace_back(work, i);
        work(0);
        for (std::thread& t : helpers)
            t.join();
        on.end_step();
        return out;
    }

    std::vector<float> replay(const std::vector<Deed>& deeds) {
        reference->clear();
        static constexpr SeqId kSeq = 0;
        std::vector<float> last;
        for (const Deed& deed : deeds)
            switch (deed.kind) {
            case Deed::append: {
                std::vector<StepRow> rows;
                for (const Row& r : deed.rows)
                    rows.push_back({r.position, {&kSeq, 1}});
                last = step(*reference, rows, deed.rows, 1);
                last.erase(last.begin(), last.end() - shape.layers[0].heads * shape.layers[0].value_dim);
                break;
            }
            case Deed::cut:
                EXPECT_TRUE(reference->truncate(kSeq, deed.first).ok());
                break;
            case Deed::remove:
                EXPECT_TRUE(reference->remove_rows(kSeq, deed.first, deed.last).ok());
                break;
            case Deed::reposition:
                EXPECT_TRUE(reference->reposition(kSeq, deed.first, deed.positions).ok());
                break;
            case Deed::load:
                EXPECT_TRUE(reference->load(kSeq, deed.bytes).ok());
                break;
            }
        return last;
    }
};

} // namespace kvmosaic::test
