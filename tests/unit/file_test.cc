// Sequence files: the frame, its refusals, writing that is whole or not at all. Over every method: bugcases/e_*.
#include "kvmosaic/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "cache/state_io.h"
#include "file/atomic.h"
#include "file/frame.h"
#include "rig.h"

namespace kvmosaic::test {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

struct Folder {
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "kvmosaic-file-XXXXXX").string();
        path = ::mkdtemp(name.data());
    }
    ~Folder() { fs::remove_all(path); }
    std::string at(const char* name) const { return (path / name).string(); }
    size_t files() const { return size_t(std::distance(fs::directory_iterator(path), fs::directory_iterator())); }
};

ModelShape shape() {
    ModelShape s = one_layer(2, 1, 32);
    s.fingerprint = "0123456789abcdef";
    return s;
}

std::vector<int32_t> ids(int64_t n) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; ++i)
        tokens.push_back(int32_t(i * 7 % 1000));
    return tokens;
}

std::unique_ptr<Cache> filled(const std::string& spec, int64_t rows, SeqId seq = 0) {
    auto cache = make(shape(), spec);
    const Text text(cache->shape().layers[0], rows, 3);
    feed(*cache, text, 0, rows, seq);
    return cache;
}

Bytes file_of(const Cache& cache, const FileOptions& options = {}) {
    const std::vector<FileSequence> all = {{0, ids(cache.rows(0)), "a note"}};
    auto bytes = write_sequences(cache, all, options);
    EXPECT_TRUE(bytes.ok()) << bytes.status().message();
    return bytes ? *bytes : Bytes();
}

std::string refusal(Cache* cache, const Bytes& bytes) {
    const auto read = read_sequences(cache, bytes);
    return read ? "" : read.status().message();
}

// The same file with one section changed, and sound checksums: what damage never makes, but another program could.
template <typename F>
Bytes changed(const Bytes& bytes, uint32_t kind, F change) {
    const auto frame = file::read_frame(bytes);
    EXPECT_TRUE(frame.ok()) << frame.status().message();
    std::vector<Bytes> parts;
    for (const file::Section& s : frame->sections) {
        parts.emplace_back(s.bytes.begin(), s.bytes.end());
        if (s.kind == kind) change(parts.back());
    }
    file::FrameWriter writer(false, 1);
    for (size_t i = 0; i < parts.size(); ++i)
        writer.add(frame->sections[i].kind, frame->sections[i].owner, frame->sections[i].number, parts[i]);
    return *writer.finish();
}

// A head field, with the checksum that fits it.
Bytes with_head(Bytes bytes, size_t at, uint32_t value) {
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    const uint64_t sum = file::checksum({bytes.data(), file::kHeadBytes - 8});
    std::memcpy(bytes.data() + file::kHeadBytes - 8, &sum, sizeof(sum));
    return bytes;
}

TEST(SequenceFile, BringsBackRowsTokensAndNotes) {
    const auto cache = filled("mixkvq", 300);
    ASSERT_TRUE(cache->fork(0, 7).ok());
    const Text more(cache->shape().layers[0], 400, 4);
    feed(*cache, more, 300, 50, 7);
    const std::vector<FileSequence> all = {{7, ids(352), "what was said"}, {0, {}, ""}};
    for (const bool compress : {false, true}) {
        if (compress && !can_compress()) continue;
        const auto bytes = write_sequences(*cache, all, {.compress = compress});
        ASSERT_TRUE(bytes.ok()) << bytes.status().message();
        auto other = make(shape(), "mixkvq");
        const auto read = read_sequences(other.get(), *bytes);
        ASSERT_TRUE(read.ok()) << read.status().message();
        ASSERT_EQ(read->size(), 2u);
        EXPECT_EQ((*read)[0].seq, 7);
        EXPECT_EQ((*read)[0].tokens, ids(352)); // two more than there are rows
        EXPECT_EQ((*read)[0].note, "what was said");
        EXPECT_TRUE((*read)[1].tokens.empty());
        EXPECT_TRUE(other->save(7) == cache->save(7));
        EXPECT_TRUE(other->save(0) == cache->save(0));
        EXPECT_EQ(other->footprint().tokens, cache->footprint().tokens); // what they share is held once
        const SeqId names[] = {3, 4};
        ASSERT_TRUE(read_sequences(other.get(), *bytes, names).ok());
        EXPECT_TRUE(other->save(3) == cache->save(7));
        feed(*other, more, 350, 20, 3); // a shared page is copied before it changes
        feed(*other, more, 300, 20, 4);
        feed(*cache, more, 350, 20, 7);
        feed(*cache, more, 300, 20, 0);
        EXPECT_TRUE(other->save(3) == cache->save(7));
        EXPECT_TRUE(other->save(4) == cache->save(0));
        ASSERT_TRUE(cache->truncate(7, 350).ok());
        ASSERT_TRUE(cache->truncate(0, 300).ok());
    }
}

TEST(SequenceFile, StoresCommonPagesOnce) {
    auto cache = filled("kivi:bits=4", 1000);
    const size_t one = file_of(*cache).size();
    ASSERT_TRUE(cache->fork(0, 1).ok());
    ASSERT_TRUE(cache->fork(0, 2).ok());
    const Text more(cache->shape().layers[0], 1100, 5);
    feed(*cache, more, 1000, 10, 1);
    const std::vector<FileSequence> all = {{0}, {1}, {2}};
    const auto bytes = write_sequences(*cache, all);
    ASSERT_TRUE(bytes.ok());
    EXPECT_LT(bytes->size(), one + one / 2);
    const auto info = file_info(*bytes);
    ASSERT_TRUE(info.ok()) << info.status().message();
    for (const FileInfo::Section& s : info->sections) {
        if (s.name != "keys" && s.name != "values") continue;
        // Pages before the tail of one, and all of the other; value rows are packed one by one, so two pages differ.
        EXPECT_EQ(s.shared, (s.name == "keys" ? 7 : 6) + 8) << s.name;
    }
    auto other = make(shape(), "kivi:bits=4");
    ASSERT_TRUE(read_sequences(other.get(), *bytes).ok());
    EXPECT_EQ(other->footprint().tokens, cache->footprint().tokens);
    for (const SeqId seq : {0, 1, 2})
        EXPECT_TRUE(other->save(seq) == cache->save(seq));
    other->clear();
    EXPECT_EQ(other->footprint().allocated, 0);
}

TEST(SequenceFile, TellsWhatItHolds) {
    const auto cache = filled("kivi:bits=2", 300);
    const auto info = file_info(file_of(*cache));
    ASSERT_TRUE(info.ok()) << info.status().message();
    EXPECT_EQ(info->spec, cache->method().spec());
    EXPECT_EQ(info->model.fingerprint, shape().fingerprint);
    EXPECT_EQ(info->model.layers[0].rope, shape().layers[0].rope);
    ASSERT_EQ(info->sequences.size(), 1u);
    EXPECT_EQ(info->sequences[0].rows, 300);
    EXPECT_EQ(info->sequences[0].last_position, 299);
    EXPECT_EQ(info->sequences[0].tokens, 300);
    EXPECT_EQ(info->sequences[0].note, "a note");
    EXPECT_EQ(info->sequences[0].packed[1], cache->packed_rows(0, 0, Side::value));
    uint64_t stored = file::kHeadBytes;
    for (const FileInfo::Section& s : info->sections)
        stored += s.stored + uint64_t(s.count) * file::kSectionBytes;
    EXPECT_EQ(stored, info->bytes); // nothing lies outside
    // The model and spec of a file are enough for a cache that reads it.
    auto made = Cache::create(info->model, info->spec);
    ASSERT_TRUE(made.ok());
    EXPECT_TRUE(read_sequences(made->get(), file_of(*cache)).ok());
}

TEST(SequenceFile, RefusesByField) {
    const auto cache = filled("kivi:bits=2", 200);
    const Bytes good = file_of(*cache);
    const auto expect = [&](const Bytes& bytes, Cache* into, const std::string& field) {
        const Bytes before = into->save(0);
        const std::string said = refusal(into, bytes);
        EXPECT_NE(said.find(field), std::string::npos) << field << ": " << said;
        EXPECT_TRUE(into->save(0) == before) << field;
    };
    expect(with_head(good, 8, 2), cache.get(), "version: 2");
    expect(with_head(good, 12, 0x04030201), cache.get(), "byte order");
    expect(with_head(good, 12, 77), cache.get(), "byte order");
    expect(with_head(good, 16, 64), cache.get(), "page size: pages of 64");
    expect(with_head(good, 20, 3), cache.get(), "length");
    expect(with_head(good, 0, 77), cache.get(), "magic");
    Bytes state = cache->save(0);
    for (const auto& [at, value, field] : std::vector<std::tuple<size_t, uint32_t, const char*>>{
             {0, 1, "magic"}, {4, 9, "version: 9"}, {8, state::kSwapped, "byte order"}, {12, 64, "page size"}}) {
        Bytes bad = state;
        std::memcpy(bad.data() + at, &value, sizeof(value));
        EXPECT_NE(cache->load(0, bad).message().find(field), std::string::npos) << field;
    }

    ModelShape other = shape();
    other.fingerprint = "fedcba9876543210";
    expect(good, make(other, "kivi:bits=2").get(), "fingerprint");
    other = shape();
    other.layers[0].rope.base = 500.0f;
    expect(good, make(other, "kivi:bits=2").get(), "rotation of layer 0: base is 10000");
    other = shape();
    other.layers.push_back(other.layers[0]);
    expect(good, make(other, "kivi:bits=2").get(), "layers");
    expect(good, make(one_layer(2, 1, 64), "kivi:bits=2").get(), "layer 0");
    other = shape();
    other.fingerprint.clear(); // nobody can tell
    EXPECT_EQ(refusal(make(other, "kivi:bits=2").get(), good), "");
    expect(good, make(shape(), "kivi:bits=4").get(), "spec");
    expect(good, make(shape(), "mixkvq").get(), "spec");
    CacheOptions small;
    small.max_rows = 100;
    expect(good, make(shape(), "kivi:bits=2", small).get(), "rows");

    const auto word = [](size_t at, int32_t value) {
        return [=](Bytes& b) { std::memcpy(b.data() + at, &value, sizeof(value)); };
    };
    const auto tag = [](state::Tag t) { return uint32_t(t); };
    expect(changed(good, tag(state::Tag::plans), word(4, 17)), cache.get(), "keep is 17 in the state");
    expect(changed(good, tag(state::Tag::positions), word(8, -5)), cache.get(),
           "positions: positions: one is negative");
    expect(changed(good, tag(state::Tag::positions), word(12, 1 << 30)), cache.get(), "they decrease");
    expect(changed(good, tag(state::Tag::positions), word(0, 1 << 30)), cache.get(), "rows");
    expect(changed(good, tag(state::Tag::method), [](Bytes& b) { b[5] = '\n'; }), cache.get(), "control characters");
    expect(changed(good, file::tokens, [](Bytes& b) { b.resize(b.size() - 4); }), cache.get(), "tokens: 199");
    expect(changed(good, file::tokens, [](Bytes& b) { b.pop_back(); }), cache.get(), "tokens");
    expect(changed(good, file::sequence, [](Bytes& b) { b.clear(); }), cache.get(), "sequence");
    expect(changed(good, tag(state::Tag::keys), [](Bytes& b) { b.push_back(0); }), cache.get(), "1 bytes too many");
    expect(changed(good, tag(state::Tag::keys), [](Bytes& b) { b.pop_back(); }), cache.get(), "are needed");
    file::FrameWriter none(false, 1);
    expect(*none.finish(), cache.get(), "sequences");
    file::FrameWriter stray(false, 1);
    stray.add(file::note, 0, 0, {});
    expect(*stray.finish(), cache.get(), "belongs to no sequence");

    const SeqId twice[] = {4, 4};
    ASSERT_TRUE(cache->fork(0, 5).ok());
    const auto two = write_sequences(*cache, std::vector<FileSequence>{{0}, {5}});
    EXPECT_NE(read_sequences(cache.get(), *two, twice).status().message().find("twice"), std::string::npos);
    EXPECT_NE(read_sequences(cache.get(), *two, {twice, 1}).status().message().find("names"), std::string::npos);
    EXPECT_EQ(cache->rows(4), 0);
}

// What a sequence decided once has a mean of keys where the method takes one off, and nowhere else.
TEST(SequenceFile, MeansBelongToTheirMethod) {
    const auto with_mean = [](Bytes& b) { // of the first side: u8 1, tiers, three arrays, then the mean
        size_t at = 2 + 3 * size_t(b[1]);
        for (const size_t width : {4, 4, 2}) {
            uint32_t count = 0;
            std::memcpy(&count, b.data() + at, sizeof(count));
            at += 4 + width * count;
        }
        const uint32_t none = 0, count = 32;
        ASSERT_EQ(std::memcmp(b.data() + at, &none, 4), 0);
        std::memcpy(b.data() + at, &count, sizeof(count));
        b.insert(b.begin() + ptrdiff_t(at) + 4, 32 * sizeof(float), 0);
    };
    for (const char* spec : {"pnmix", "innerq"}) {
        const auto cache = filled(spec, 200);
        const Bytes good = file_of(*cache);
        const std::string said = refusal(cache.get(), changed(good, uint32_t(state::Tag::decided), with_mean));
        EXPECT_NE(said.find("decided: mean: not of this method"), std::string::npos) << said;
    }
}

TEST(SequenceFile, RefusesWhatCannotBeSaved) {
    const auto cache = filled("f16", 20);
    const auto said = [&](const std::vector<FileSequence>& what, const FileOptions& options = {}) {
        return write_sequences(*cache, what, options).status().message();
    };
    EXPECT_NE(said({}).find("no sequence"), std::string::npos);
    EXPECT_NE(said({{3}}).find("sequence 3 does not exist"), std::string::npos);
    EXPECT_NE(said({{0, ids(19)}}).find("only 19"), std::string::npos);
    EXPECT_NE(said({{0}, {0}}).find("twice"), std::string::npos);
    EXPECT_NE(said({{0}}, {.compress = false, .level = 40}).find("1..19"), std::string::npos);
}

TEST(SequenceFile, CompressedSectionsAreChecked) {
    if (!can_compress()) GTEST_SKIP() << "built without zstd";
    auto cache = make(shape(), "f16");
    Text text(cache->shape().layers[0], 256, 1);
    std::fill(text.k.x.begin(), text.k.x.end(), 1.0f); // compresses well
    std::fill(text.v.x.begin(), text.v.x.end(), 2.0f);
    feed(*cache, text, 0, 256);
    const Bytes plain = file_of(*cache), small = file_of(*cache, {.compress = true});
    EXPECT_LT(small.size(), plain.size() / 4);
    auto other = make(shape(), "f16");
    EXPECT_EQ(refusal(other.get(), small), "");
    EXPECT_TRUE(other->save(0) == cache->save(0));
    const auto frame = file::read_frame(small);
    ASSERT_TRUE(frame.ok());
    for (size_t i = 0, at = file::kHeadBytes; i < frame->sections.size();
         ++i) { // a length that the frame does not give
        const uint64_t length = frame->sections[i].bytes.size();
        for (const uint64_t lie : {length + 1, length - 1, uint64_t(1) << 50}) {
            Bytes bad = small;
            std::memcpy(bad.data() + at + 24, &lie, sizeof(lie));
            const uint64_t sum = file::checksum({bad.data() + at, 40});
            std::memcpy(bad.data() + at + 40, &sum, sizeof(sum));
            EXPECT_NE(refusal(other.get(), bad), "") << i << " " << lie;
        }
        at += file::kSectionBytes + frame->sections[i].stored;
    }
}

// ---- writing ----

TEST(SequenceFile, AnInterruptedSaveLeavesTheOldFileWhole) {
    const Folder folder;
    const std::string path = folder.at("chat.kv");
    const auto old = filled("kivi:bits=2", 150), fresh = filled("kivi:bits=2", 160);
    const std::vector<FileSequence> what = {{0}};
    ASSERT_TRUE(save_file(*old, path, what).ok());
    const Bytes before = *read_file(path), after = *write_sequences(*fresh, what);
    const auto whole = [&](const Bytes& bytes) {
        EXPECT_TRUE(*read_file(path) == bytes);
        EXPECT_EQ(folder.files(), 1u); // nothing is left beside it
    };
    for (size_t limit = 0; limit < after.size(); limit += limit < 100 ? 1 : 61) {
        file::System full; // a disk with room for `limit` bytes
        size_t room = limit;
        full.write = [&](int fd, const void* p, size_t n) -> ssize_t {
            if (room == 0) return errno = ENOSPC, -1;
            n = std::min(n, room);
            room -= n;
            return ::write(fd, p, n);
        };
        const Status st = file::replace_file(path, after, full);
        ASSERT_FALSE(st.ok()) << limit;
        EXPECT_NE(st.message().find(path), std::string::npos) << st.message();
        EXPECT_NE(st.message().find("No space"), std::string::npos) << st.message();
        whole(before);
    }
    file::System broken;
    broken.sync = [](int) { return errno = EIO, -1; };
    EXPECT_FALSE(file::replace_file(path, after, broken).ok());
    whole(before);
    broken = {};
    broken.rename = [](const char*, const char*) { return errno = EACCES, -1; };
    EXPECT_FALSE(file::replace_file(path, after, broken).ok());
    whole(before);

    file::System slow; // three bytes at a time, every other call interrupted
    int calls = 0;
    slow.write = [&](int fd, const void* p, size_t n) -> ssize_t {
        if (++calls % 2 == 0) return errno = EINTR, -1;
        return ::write(fd, p, std::min<size_t>(n, 3));
    };
    EXPECT_TRUE(file::replace_file(path, after, slow).ok());
    whole(after);
}

TEST(SequenceFile, FilesKeepModeAndLinks) {
    const Folder folder;
    const auto cache = filled("f16", 10);
    const std::vector<FileSequence> what = {{0}};
    const std::string path = folder.at("a.kv"), link = folder.at("link.kv");
    ASSERT_TRUE(save_file(*cache, path, what).ok());
    ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
    fs::create_symlink("a.kv", link);
    ASSERT_TRUE(save_file(*cache, link, what).ok());
    EXPECT_TRUE(fs::is_symlink(link));
    struct stat about {};
    ASSERT_EQ(::stat(path.c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 0777, 0600u);
    EXPECT_EQ(folder.files(), 2u);
    auto other = make(shape(), "f16");
    EXPECT_TRUE(load_file(other.get(), link).ok());

    EXPECT_FALSE(save_file(*cache, folder.path.string(), what).ok());
    EXPECT_EQ(save_file(*cache, folder.at("none/x.kv"), what).code(), StatusCode::not_found);
    EXPECT_EQ(load_file(other.get(), folder.at("none.kv")).status().code(), StatusCode::not_found);
    EXPECT_FALSE(load_file(other.get(), folder.path.string()).ok());
    std::ofstream(folder.at("empty.kv"));
    const Status empty = load_file(other.get(), folder.at("empty.kv")).status();
    EXPECT_NE(empty.message().find("empty.kv: load: magic"), std::string::npos) << empty.message();
}

} // namespace
} // namespace kvmosaic::test
