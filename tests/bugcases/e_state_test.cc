// E9 and relatives: saved states and files of every registered method, whole and damaged.
#include "kvmosaic/file.h"
#include "rig.h"

#include <algorithm>

#include "cache/state_io.h"

namespace kvmosaic::test {
namespace {

using Bytes = std::vector<uint8_t>;

std::vector<std::string> every_method() {
    std::vector<std::string> specs = all_specs();
    for (const MethodInfo* m : methods())
        if (std::find(specs.begin(), specs.end(), m->name) == specs.end()) specs.push_back(m->name);
    return specs;
}

// Small, so that each byte of a file can be tried.
ModelShape small() { return one_layer(2, 1, 32); }

Bytes file_of(const Cache& cache) {
    std::vector<int32_t> tokens(size_t(cache.rows(0)), 5);
    const auto bytes = write_sequences(cache, std::vector<FileSequence>{{0, tokens, "note"}});
    EXPECT_TRUE(bytes.ok()) << bytes.status().message();
    return bytes ? *bytes : Bytes();
}

class EveryMethod : public ::testing::TestWithParam<std::string> {
protected:
    void fill(int64_t rows) {
        cache = make(shape, GetParam());
        ASSERT_TRUE(cache);
        feed(*cache, text, 0, rows);
        other = make(shape, GetParam());
        feed(*other, text, 0, 5); // what a refusal must leave alone
        kept = other->save(0);
    }
    const ModelShape shape = small();
    const Text text{shape.layers[0], 600, 9};
    std::unique_ptr<Cache> cache, other;
    Bytes kept;
};

TEST_P(EveryMethod, E9EveryFlippedByteOfAFileIsRefused) {
    fill(140);
    Bytes bytes = file_of(*cache);
    for (size_t i = 0; i < bytes.size(); ++i) {
        const auto bit = uint8_t(1u << (i % 8));
        bytes[i] ^= bit;
        const auto read = read_sequences(other.get(), bytes);
        ASSERT_FALSE(read.ok()) << "byte " << i;
        ASSERT_NE(read.status().message().find(':', 6), std::string::npos) << read.status().message();
        bytes[i] ^= bit;
        if (i % 64 == 0) {
            ASSERT_TRUE(other->save(0) == kept) << "byte " << i;
        }
    }
    EXPECT_TRUE(other->save(0) == kept);
    EXPECT_TRUE(read_sequences(other.get(), bytes).ok());
}

TEST_P(EveryMethod, E9EveryTruncatedFileIsRefused) {
    fill(140);
    const Bytes bytes = file_of(*cache);
    for (size_t n = 0; n < bytes.size(); ++n) {
        const auto read = read_sequences(other.get(), {bytes.data(), n});
        ASSERT_FALSE(read.ok()) << "cut at " << n;
        ASSERT_NE(read.status().message().find(':', 6), std::string::npos) << read.status().message();
    }
    Bytes longer = bytes;
    longer.push_back(0);
    EXPECT_FALSE(read_sequences(other.get(), longer).ok());
    EXPECT_TRUE(other->save(0) == kept);
}

// Without checksums a state may say something else; then the cache holds exactly that, and goes on with it.
TEST_P(EveryMethod, E9EveryFlippedByteOfAStateIsRefusedOrHarmless) {
    fill(140);
    Bytes bytes = cache->save(0);
    const auto parts = state::sections(bytes);
    ASSERT_TRUE(parts.ok());
    const size_t names = size_t((*parts)[3].bytes.data() - bytes.data()); // from the rows on; before stand descriptions
    int refused = 0;
    for (size_t i = 0; i < bytes.size(); i += i < names + 600 ? 1 : 5) {
        const auto bit = uint8_t(1u << (i % 8));
        bytes[i] ^= bit;
        const Status st = other->load(0, bytes);
        if (st) {
            if (i >= names) {
                ASSERT_TRUE(other->save(0) == bytes) << "byte " << i;
            }
            if (i % 16 == 0 && other->positions(0).back() <= 140) {
                for (const float x : feed(*other, text, 140, 1))
                    ASSERT_TRUE(std::isfinite(x)) << "byte " << i;
            }
        } else {
            ++refused;
            ASSERT_FALSE(st.message().empty());
        }
        bytes[i] ^= bit;
    }
    EXPECT_GT(refused, 16); // the head and the length of the first section alone
    for (size_t n = 0; n < bytes.size(); ++n)
        ASSERT_FALSE(other->load(0, {bytes.data(), n}).ok()) << "cut at " << n;
    ASSERT_TRUE(other->load(0, bytes).ok());
    ASSERT_TRUE(other->load(0, bytes).ok());
    other->clear();
    EXPECT_EQ(other->footprint().allocated, 0); // refusals have lost no page
}

// An open group, other page numbers, another cache and name, memory that held something else.
TEST_P(EveryMethod, E9E11GoesOnAsIfNothingHadBeen) {
    for (const int64_t rows : {1, 127, 128, 129, 200, 300}) {
        fill(rows);
        const Bytes file = file_of(*cache);
        feed(*other, text, 5, 200);
        other->remove(0); // its pages are free and poisoned
        feed(*other, text, 0, 70, 3);
        const SeqId name[] = {8};
        const auto read = read_sequences(other.get(), file, name);
        ASSERT_TRUE(read.ok()) << read.status().message();
        EXPECT_TRUE(other->save(8) == cache->save(0)) << rows;
        for (int64_t t = 0; t < 20; ++t) {
            const auto a = feed(*cache, text, rows + t, 1), b = feed(*other, text, rows + t, 1, 8);
            ASSERT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float))) << rows << " + " << t;
        }
        EXPECT_TRUE(other->save(8) == cache->save(0)) << rows;
        EXPECT_EQ(file_of(*cache).size(), [&] {
            const auto again = write_sequences(
                *other, std::vector<FileSequence>{{8, std::vector<int32_t>(size_t(rows + 20), 5), "note"}});
            return again ? again->size() : 0;
        }());
    }
}

// Rows that a sliding window no longer shows are saved too, and stay out of sight.
TEST_P(EveryMethod, E11SavedPastTheWindow) {
    AttendArgs args;
    args.window = 128;
    for (const int64_t rows : {127, 129, 500}) {
        cache = make(shape, GetParam());
        other = make(shape, GetParam());
        feed(*cache, text, 0, rows, 0, args);
        ASSERT_TRUE(read_sequences(other.get(), file_of(*cache)).ok());
        for (int64_t t = 0; t < 16; ++t) {
            const auto a = feed(*cache, text, rows + t, 1, 0, args), b = feed(*other, text, rows + t, 1, 0, args);
            ASSERT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float))) << rows << " + " << t;
        }
    }
}

// E4 and E7 across the trip: cut and forked sequences come back as they were.
TEST_P(EveryMethod, E4E7CutAndForkedSequencesComeBack) {
    fill(300);
    ASSERT_TRUE(cache->truncate(0, 210).ok());
    ASSERT_TRUE(cache->fork(0, 1).ok());
    feed(*cache, text, 210, 30, 1);
    const auto file = write_sequences(*cache, std::vector<FileSequence>{{0}, {1}});
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(read_sequences(other.get(), *file).ok());
    for (const SeqId seq : {0, 1}) {
        const int64_t at = cache->rows(seq);
        const auto a = feed(*cache, text, at, 90, seq), b = feed(*other, text, at, 90, seq);
        EXPECT_EQ(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float))) << seq;
        EXPECT_TRUE(other->save(seq) == cache->save(seq)) << seq;
    }
    cache->clear();
    other->clear();
    EXPECT_EQ(cache->footprint().allocated, 0);
    EXPECT_EQ(other->footprint().allocated, 0);
}

// F8: what belongs to a method's pages is there before they are read, or the load is refused; never zeros.
TEST_P(EveryMethod, F8StatesDoNotPassBetweenMethods) {
    fill(140);
    const Bytes state = cache->save(0), file = file_of(*cache);
    for (const std::string& spec : every_method()) {
        auto foreign = make(shape, spec);
        if (foreign->method().spec() == cache->method().spec()) continue;
        const Status st = foreign->load(0, state);
        ASSERT_FALSE(st.ok()) << spec;
        EXPECT_NE(st.message().find("spec"), std::string::npos) << st.message();
        EXPECT_FALSE(read_sequences(foreign.get(), file).ok());
        EXPECT_EQ(foreign->rows(0), 0);
        EXPECT_EQ(foreign->footprint().allocated, 0);
    }
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
    std::string name = info.param;
    std::replace_if(
        name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
    return name;
}
INSTANTIATE_TEST_SUITE_P(SavedState, EveryMethod, ::testing::ValuesIn(every_method()), test_name);

// A state whose pages do not fit the arena changes nothing.
TEST(SavedState, ALoadThatFindsNoMemoryChangesNothing) {
    const ModelShape shape = small();
    const Text text(shape.layers[0], 2000, 2);
    auto big = make(shape, "f16");
    feed(*big, text, 0, 2000);
    CacheOptions tight;
    tight.max_bytes = 100000;
    auto cache = make(shape, "f16", tight);
    feed(*cache, text, 0, 100);
    const Bytes before = cache->save(0);
    const int64_t held = cache->footprint().allocated;
    const Bytes state = big->save(0);
    EXPECT_EQ(cache->load(0, state).code(), StatusCode::out_of_memory);
    EXPECT_TRUE(cache->save(0) == before);
    EXPECT_EQ(cache->footprint().allocated, held);
}

// Several states are loaded together or not at all.
TEST(SavedState, AllOfThemOrNone) {
    const ModelShape shape = small();
    const Text text(shape.layers[0], 400, 2);
    auto cache = make(shape, "mixkvq");
    feed(*cache, text, 0, 300, 1);
    feed(*cache, text, 0, 200, 2);
    const Bytes one = cache->save(1);
    Bytes two = cache->save(2);
    auto other = make(shape, "mixkvq");
    feed(*other, text, 0, 10, 1);
    const Bytes before = other->save(1);
    const Footprint weight = other->footprint();
    two.pop_back();
    EXPECT_FALSE(other->load(std::vector<SavedSequence>{{1, one}, {2, two}}).ok());
    EXPECT_TRUE(other->save(1) == before);
    EXPECT_EQ(other->rows(2), 0);
    EXPECT_EQ(other->footprint().tables, weight.tables); // nor is anything left of the pages that were read
    EXPECT_EQ(other->footprint().allocated, weight.allocated);
    two = cache->save(2);
    EXPECT_TRUE(other->load(std::vector<SavedSequence>{{1, one}, {2, two}, {3, one}}).ok());
    EXPECT_TRUE(other->save(1) == one);
    EXPECT_TRUE(other->save(2) == two);
    EXPECT_TRUE(other->save(3) == one);
    EXPECT_EQ(other->footprint().tokens, 500 - 132); // the third is the first, which begins with 132 rows of the second
}

} // namespace
} // namespace kvmosaic::test
