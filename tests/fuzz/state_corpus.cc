// Writes sound states and files of every subject as a start for state_fuzz. Usage: state_corpus FOLDER
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "fuzz/state_subject.h"
#include "kvmosaic/file.h"

using namespace kvmosaic;

namespace {

void feed(Cache& cache, SeqId seq, int64_t rows) {
    const LayerShape& l = cache.shape().layers[0];
    std::vector<float> q(size_t(l.heads * l.key_dim)), k(size_t(l.key_dim)), v(size_t(l.value_dim)), out(q.size());
    for (int64_t t = cache.rows(seq); rows > 0; ++t, --rows) {
        for (size_t i = 0; i < q.size(); ++i)
            q[i] = std::sin(float(t) + 3.0f * float(i));
        for (size_t i = 0; i < k.size(); ++i)
            k[i] = std::cos(2.0f * float(t) + float(i)) + (i == 3 ? 4.0f : 0.0f),
            v[i] = std::sin(float(t * 7) + float(i));
        const StepRow row{int32_t(t), {&seq, 1}};
        if (!cache.append_and_attend(0, {&row, 1}, {q.data(), 0, l.key_dim}, {k.data(), 0, l.key_dim},
                                     {v.data(), 0, l.value_dim}, {}, out.data()))
            std::abort();
    }
}

void write(const std::string& path, uint8_t first, const std::vector<uint8_t>& bytes) {
    std::ofstream out(path, std::ios::binary);
    out.put(char(first));
    out.write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 2) return 1;
    std::filesystem::create_directories(argv[1]);
    const auto subjects = fuzz::subjects();
    for (size_t i = 0; i < subjects.size(); ++i) {
        Cache& cache = *subjects[i].cache;
        const std::string base = std::string(argv[1]) + "/" + std::to_string(i);
        const auto mode = [&](size_t form) { return uint8_t(i + form * subjects.size()); };
        for (const int64_t rows : {3, 133, 261}) {
            cache.clear();
            feed(cache, 0, rows);
            write(base + "-state-" + std::to_string(rows), mode(0), cache.save(0));
        }
        cache.clear();
        feed(cache, 0, 140);
        if (!cache.fork(0, 3).ok()) return 1;
        feed(cache, 3, 2);
        const std::vector<FileSequence> all = {{0, std::vector<int32_t>(140, 7), "note"}, {3}};
        for (const bool compress : {false, true}) {
            if (compress && !can_compress()) continue;
            const auto bytes = write_sequences(cache, all, {.compress = compress});
            if (!bytes) return 1;
            write(base + (compress ? "-small" : "-file"), mode(compress ? 2 : 1), *bytes);
            write(base + (compress ? "-small-r" : "-file-r"), mode(2), *bytes);
        }
    }
    return 0;
}
