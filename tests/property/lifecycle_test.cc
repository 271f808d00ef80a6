// The whole life of sequences, for every method: random operations against the model of lifecycle.h.
//
// KVMOSAIC_LIFECYCLE=N runs N operations for each method (and a fifth of that on threads), instead of a short share.
#include <cstdlib>

#include "property/lifecycle.h"

namespace kvmosaic::test {
namespace {

int64_t operations(int64_t few) {
    const char* asked = std::getenv("KVMOSAIC_LIFECYCLE");
    return asked && *asked ? std::max<int64_t>(1, std::atoll(asked)) : few;
}

float round_f16(float x) { return f16_to_f32(f32_to_f16(x)); }

// Random operations on a Life. Each leaves the cache checked.
class Player {
public:
    Player(Life& life, const std::string& foreign)
        : life_(life), other_(make(life.shape, foreign)), raw_(life.cache->method().initial(Side::key, 0, 0, 64).raw) {}

    void play(int64_t count) {
        for (int64_t i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
            const int64_t dice = life_.below(100);
            SCOPED_TRACE("operation " + std::to_string(i) + ", dice " + std::to_string(dice));
            if (life_.stories.empty() || dice < 40)
                append();
            else if (dice < 50)
                fork();
            else if (dice < 66)
                truncate();
            else if (dice < 72)
                prefix();
            else if (dice < 79)
                remove_rows();
            else if (dice < 85)
                reposition();
            else if (dice < 89)
                save_and_load();
            else if (dice < 93)
                requantize();
            else if (dice < 95)
                compact();
            else
                remove();
            life_.check_others();
        }
    }

    void end() {
        life_.cache->clear();
        life_.cache->drop_prefixes();
        EXPECT_TRUE(life_.cache->prefixes().empty());
        EXPECT_EQ(life_.cache->footprint().allocated, 0) << "pages leaked";
        EXPECT_EQ(life_.cache->footprint().raw[0] + life_.cache->footprint().packed[0], 0);
    }

private:
    static constexpr SeqId kIds = 6;
    static constexpr int64_t kLongest = 560;

    SeqId any() { return std::next(life_.stories.begin(), life_.below(int64_t(life_.stories.size())))->first; }

    int64_t length() { // one token, a few, a ragged run, a prompt
        const int64_t kind = life_.below(10);
        return kind < 5 ? 1 : kind < 7 ? 1 + life_.below(6) : kind < 9 ? 1 + life_.below(70) : 1 + life_.below(300);
    }

    void append() {
        std::vector<std::pair<std::vector<SeqId>, int64_t>> parts;
        std::vector<SeqId> ids;
        for (SeqId id = 0; id < kIds; ++id)
            ids.push_back(id);
        std::shuffle(ids.begin(), ids.end(), life_.rng);
        const int64_t count = 1 + life_.below(3);
        for (int64_t p = 0; p < count; ++p) {
            std::vector<SeqId> names{ids[size_t(2 * p)]};
            if (life_.below(5) == 0) names.push_back(ids[size_t(2 * p + 1)]); // a row of two sequences
            int64_t n = length();
            for (const SeqId id : names)
                n = std::min(n, kLongest - int64_t(life_.stories[id].rows.size()));
            if (n > 0) parts.emplace_back(names, n);
        }
        life_.append(parts);
        std::erase_if(life_.stories, [](const auto& s) { return s.second.rows.empty(); });
    }

    void fork() {
        const SeqId from = any(), to = SeqId(life_.below(kIds));
        ASSERT_TRUE(life_.cache->fork(from, to).ok());
        if (from != to) life_.stories[to] = life_.stories[from];
        life_.check(to);
    }

    void truncate() {
        const SeqId id = any();
        Story& story = life_.stories[id];
        const int64_t rows = int64_t(story.rows.size());
        const int64_t to =
            life_.below(3) ? std::max<int64_t>(0, rows - life_.below(2 * life_.rollback + 3)) : life_.below(rows + 1);
        const auto keys = life_.decoded(id, Side::key), values = life_.decoded(id, Side::value);
        if (!allowed(life_.cache->truncate(id, to))) return;
        const bool exact = to >= story.floor || to == rows;
        if (to < rows) story.cut(to, life_.rollback);
        if (to == 0) {
            life_.cache->remove(id);
            life_.stories.erase(id);
            return;
        }
        life_.check(id);
        if (!exact) same_rows(id, keys, values, to, rows, rows);
    }

    void prefix() {
        const SeqId id = any();
        const std::vector<int32_t> tokens = tokens_of(life_.stories[id]);
        if (life_.below(2)) {
            ASSERT_TRUE(life_.cache->keep_prefix(id, tokens).ok());
            kept_.emplace(tokens, life_.stories[id]);
            life_.check(id);
            return;
        }
        const bool drops = life_.below(6) == 0;
        if (drops) {
            life_.cache->drop_prefixes();
            for (const PrefixInfo& p : life_.cache->prefixes())
                EXPECT_TRUE(p.in_use);
        }
        const size_t gone = std::erase_if(
            kept_, [&](const auto& k) { return life_.cache->find_prefix(k.first) != int64_t(k.first.size()); });
        EXPECT_TRUE(gone == 0 || drops || life_.bounded) << gone << " prefixes were lost";
        std::vector<int32_t> wanted = tokens;
        if (!kept_.empty()) wanted = std::next(kept_.begin(), life_.below(int64_t(kept_.size())))->first;
        for (int64_t i = life_.below(4); i > 0; --i)
            wanted.push_back(int32_t(life_.below(Life::kTokens)));
        const Story* longest = nullptr;
        for (const auto& [known, story] : kept_)
            if (known.size() <= wanted.size() && std::equal(known.begin(), known.end(), wanted.begin()) &&
                (!longest || known.size() > longest->rows.size()))
                longest = &story;
        const SeqId to = SeqId(life_.below(kIds));
        const int64_t rows = life_.cache->take_prefix(to, wanted);
        ASSERT_EQ(rows, longest ? int64_t(longest->rows.size()) : 0);
        if (!longest) return;
        life_.stories[to] = *longest;
        life_.check(to);
    }

    void remove_rows() {
        const SeqId id = any();
        Story& story = life_.stories[id];
        const int64_t rows = int64_t(story.rows.size());
        int64_t first = life_.below(rows), last = std::min(rows, first + 1 + life_.below(200));
        if (life_.below(4) == 0) first = std::min<int64_t>(first, 140), last = std::min(rows, first + 1); // early rows
        if (last == rows) return;                                                                         // truncate
        const auto keys = life_.decoded(id, Side::key), values = life_.decoded(id, Side::value);
        if (!allowed(life_.cache->remove_rows(id, first, last))) return;
        story.rows.erase(story.rows.begin() + first, story.rows.begin() + last);
        story.deeds.push_back({Deed::remove, {}, first, last, {}, {}});
        story.floor = int64_t(story.rows.size());
        life_.check(id);
        same_rows(id, keys, values, first, last, rows);
    }

    // Rows of a middle range move down to close a gap, or the last rows move on.
    void reposition() {
        const SeqId id = any();
        Story& story = life_.stories[id];
        const int64_t rows = int64_t(story.rows.size()), first = life_.below(rows);
        const int32_t before = first ? story.rows[size_t(first - 1)].position : -1;
        const int32_t room = story.rows[size_t(first)].position - before - 1;
        const int32_t delta = room > 0 && life_.below(4) ? -room : 1 + int32_t(life_.below(300));
        std::vector<int32_t> positions;
        for (int64_t i = first; i < rows; ++i)
            positions.push_back(story.rows[size_t(i)].position + delta);
        const auto keys = life_.decoded(id, Side::key), values = life_.decoded(id, Side::value);
        if (!allowed(life_.cache->reposition(id, first, positions))) return;
        for (int64_t i = first; i < rows; ++i)
            story.rows[size_t(i)].position += delta;
        story.deeds.push_back({Deed::reposition, {}, first, 0, positions, {}});
        story.floor = rows;
        life_.check(id);
        EXPECT_TRUE(life_.decoded(id, Side::value) == values) << "values changed with positions";
        auto turned = keys;
        for (int64_t i = first; i < rows; ++i)
            life_.shape.layers[0].rope.turn(turned.data() + i * 64, delta);
        near(life_.decoded(id, Side::key), turned, 4e-3f);
    }

    void save_and_load() {
        const SeqId from = any(), to = SeqId(life_.below(kIds));
        const std::vector<uint8_t> bytes = life_.cache->save(from);
        if (!allowed(life_.cache->load(to, bytes))) return;
        Story story = life_.stories[from];
        story.floor = int64_t(story.rows.size());
        life_.stories[to] = story;
        life_.check(to);
    }

    // To another method's cache and back.
    void requantize() {
        const SeqId from = any(), to = SeqId(life_.below(kIds));
        ASSERT_TRUE(other_->adopt(0, *life_.cache, from).ok());
        Story story = life_.stories[from];
        const int64_t rows = int64_t(story.rows.size());
        ASSERT_EQ(other_->rows(0), rows);
        if (!allowed(life_.cache->adopt(to, *other_, 0))) return;
        story.deeds.assign(1, {Deed::load, {}, 0, 0, {}, life_.cache->save(to)});
        story.floor = rows;
        life_.stories[to] = story;
        life_.check(to);
        std::vector<float> there(size_t(rows) * 64);
        for (const Side side : {Side::key, Side::value}) { // raw rows of the new cache are the old one's values
            other_->decode(0, 0, 1, side, 0, rows, there.data());
            const auto here = life_.decoded(to, side);
            for (int64_t i = rows - 1; i >= 0 && i >= life_.cache->packed_rows(to, 0, side) + front(); --i)
                for (int64_t d = 0; d < 64; ++d)
                    ASSERT_EQ(here[size_t(i * 64 + d)], stored(there[size_t(i * 64 + d)])) << "row " << i;
        }
        other_->clear();
    }

    void compact() {
        const int64_t before = life_.cache->footprint().allocated;
        EXPECT_GE(life_.cache->compact(), 0);
        EXPECT_LE(life_.cache->footprint().allocated, before);
        const SeqId id = any();
        life_.check(id);
    }

    void remove() {
        const SeqId id = any();
        life_.cache->remove(id);
        life_.stories.erase(id);
    }

    // ---- rules ----

    // Under a limit an operation may be refused; then nothing has changed (check_others looks).
    bool allowed(const Status& st) {
        if (st.ok()) return true;
        EXPECT_TRUE(life_.bounded &&
                    (st.code() == StatusCode::out_of_memory || st.code() == StatusCode::out_of_capacity))
            << st.message();
        return false;
    }

    // The rows that stay are what they were, as raw rows store them.
    void same_rows(SeqId id, const std::vector<float>& keys, const std::vector<float>& values, int64_t first,
                   int64_t last, int64_t rows) {
        for (const Side side : {Side::key, Side::value}) {
            const auto now = life_.decoded(id, side);
            const std::vector<float>& was = side == Side::key ? keys : values;
            for (int64_t i = 0, j = 0; j < rows; ++j) {
                if (j >= first && j < last) continue;
                for (int64_t d = 0; d < 64; ++d) {
                    const float a = now[size_t(i * 64 + d)], b = was[size_t(j * 64 + d)];
                    ASSERT_TRUE(a == b || a == stored(b))
                        << name_of(side) << " row " << j << ": " << a << ", was " << b;
                }
                ++i;
            }
        }
    }

    static void near(const std::vector<float>& got, const std::vector<float>& want, float bound) {
        for (size_t row = 0; row * 64 < want.size(); ++row) {
            float size = 0;
            for (size_t d = 0; d < 64; ++d)
                size = std::max(size, std::fabs(want[row * 64 + d]));
            for (size_t d = 0; d < 64; ++d)
                ASSERT_NEAR(got[row * 64 + d], want[row * 64 + d], bound * size) << "row " << row;
        }
    }

    float stored(float x) const {
        return raw_ == RawType::f32 ? x : raw_ == RawType::bf16 ? bf16_to_f32(f32_to_bf16(x)) : round_f16(x);
    }
    int64_t front() const { return life_.cache->method().initial(Side::key, 0, 0, 64).window.front; }
    static std::vector<int32_t> tokens_of(const Story& story) {
        std::vector<int32_t> tokens;
        for (const Row& r : story.rows)
            tokens.push_back(r.token);
        return tokens;
    }

    Life& life_;
    std::unique_ptr<Cache> other_;
    RawType raw_;
    std::map<std::vector<int32_t>, Story> kept_;
};

class Lifecycle : public ::testing::TestWithParam<std::string> {
protected:
    std::string foreign() const { // the next spec
        const auto specs = lifecycle_specs();
        const auto at = std::find(specs.begin(), specs.end(), GetParam());
        return at + 1 == specs.end() ? specs.front() : *(at + 1);
    }
};

TEST_P(Lifecycle, RandomOperations) {
    for (const int32_t rollback : {0, 40}) {
        SCOPED_TRACE("rollback " + std::to_string(rollback));
        CacheOptions options;
        options.rollback = rollback;
        Life life(GetParam(), uint32_t(11 + rollback), options);
        Player player(life, foreign());
        player.play(operations(60) / 2);
        if (HasFailure()) return;
        player.end();
    }
}

TEST_P(Lifecycle, UnderAByteBudget) {
    CacheOptions options;
    options.rollback = 9;
    options.max_bytes = 420000;
    Life life(GetParam(), 5, options);
    Player player(life, foreign());
    player.play(operations(60));
    if (HasFailure()) return;
    if (operations(0) >= 300) {
        EXPECT_GT(life.refusals, 0) << "the budget never mattered";
    }
    player.end();
}

TEST_P(Lifecycle, OnThreads) {
    CacheOptions options;
    options.rollback = 17;
    Life life(GetParam(), 3, options, 3, 2);
    Player player(life, foreign());
    player.play(std::max<int64_t>(8, operations(40) / 5));
    if (HasFailure()) return;
    player.end();
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
    std::string name = info.param;
    std::replace_if(
        name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
    return name;
}
INSTANTIATE_TEST_SUITE_P(EveryMethod, Lifecycle, ::testing::ValuesIn(lifecycle_specs()), test_name);

} // namespace
} // namespace kvmosaic::test
