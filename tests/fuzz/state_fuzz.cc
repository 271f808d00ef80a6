// Fuzz target: saved states and sequence files. The first byte chooses a method and whether the rest is a state, a
// file, or a file whose checksums are put right first (so that what lies behind them is reached). Whatever the bytes
// are: a sentence, or a cache that holds what they say and works on.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "file/frame.h"
#include "fuzz/state_subject.h"
#include "kvmosaic/file.h"

using namespace kvmosaic;
using Bytes = std::vector<uint8_t>;

namespace {

void require(bool good, int line = __builtin_LINE()) {
    if (good) return;
    std::fprintf(stderr, "state_fuzz.cc:%d\n", line);
    std::abort();
}

void put_checksum(Bytes* bytes, size_t from, size_t count, size_t to) {
    const uint64_t sum = file::checksum({bytes->data() + from, count});
    std::memcpy(bytes->data() + to, &sum, sizeof(sum));
}

// Makes every checksum that has its place in the bytes right, and the length in the head.
Bytes repaired(Bytes bytes) {
    if (bytes.size() < file::kHeadBytes) return bytes;
    const uint64_t size = bytes.size();
    std::memcpy(bytes.data() + 24, &size, sizeof(size));
    put_checksum(&bytes, 0, file::kHeadBytes - 8, file::kHeadBytes - 8);
    for (size_t at = file::kHeadBytes; bytes.size() - at >= file::kSectionBytes;) {
        uint64_t stored = 0;
        std::memcpy(&stored, bytes.data() + at + 16, sizeof(stored));
        const size_t data = at + file::kSectionBytes;
        if (stored > bytes.size() - data) break;
        put_checksum(&bytes, data, size_t(stored), at + 32);
        put_checksum(&bytes, at, file::kSectionBytes - 8, at + file::kSectionBytes - 8);
        at = data + size_t(stored);
    }
    return bytes;
}

// A sequence that was accepted is like any other.
void use(Cache& cache, SeqId seq) {
    const LayerShape& l = cache.shape().layers[0];
    const int64_t rows = cache.rows(seq);
    const Bytes saved = cache.save(seq);
    require(cache.load(1000, saved).ok());
    require(cache.save(1000) == saved);
    std::vector<float> x(size_t(std::max<int64_t>(rows, 1)) * size_t(std::max(l.key_dim, l.value_dim)));
    for (const Side side : {Side::key, Side::value}) {
        cache.decode(seq, 0, 0, side, 0, rows, x.data());
        for (int64_t i = 0; i < rows * l.dim(side); ++i)
            require(!std::isnan(x[size_t(i)]));
    }
    std::vector<float> row(size_t(l.heads * std::max(l.key_dim, l.value_dim)), 0.5f), out(row.size());
    const RowsF32 in{row.data(), 0, l.key_dim};
    for (int i = 0; i < 3; ++i) {
        const int32_t last = cache.rows(1000) > 0 ? cache.positions(1000).back() : 0;
        const StepRow step{last, {&seq, 1}}; // its position may be the largest that there is
        if (!cache.append_and_attend(0, {&step, 1}, in, in, {row.data(), 0, l.value_dim}, {}, out.data())) break;
    }
    for (int64_t cut = cache.rows(seq); cut > 0; cut -= std::max<int64_t>(1, cut / 3))
        require(cache.truncate(seq, cut).ok());
    cache.remove(1000);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 1) return 0;
    static const std::vector<fuzz::Subject> subjects = fuzz::subjects();
    Cache& cache = *subjects[data[0] % subjects.size()].cache;
    const int form = data[0] / int(subjects.size()) % 3;
    Bytes bytes(data + 1, data + size);
    Status st;
    if (form == 0) {
        st = cache.load(0, bytes);
    } else {
        if (form == 2) bytes = repaired(std::move(bytes));
        const auto info = file_info(bytes);
        const auto read = read_sequences(&cache, bytes);
        st = read.status();
        require(info.ok() || !read.ok()); // who can be read can be told about
    }
    require(st.ok() || st.message().find('\n') == std::string::npos);
    require(st.ok() || st.message().starts_with("load: "));
    require(st.ok() || cache.sequences().empty()); // a refusal changes nothing
    for (const SeqId seq : cache.sequences())
        if (seq != 1000) use(cache, seq);
    cache.clear();
    require(cache.footprint().allocated == 0);
    return 0;
}
