#include "eval/gzip.h"

#include <algorithm>

#include <zlib.h>

namespace kvmosaic::eval {

namespace {

struct Inflater {
    Inflater() { ready = inflateInit2(&z, 15 + 16) == Z_OK; } // 16: gzip, not zlib
    ~Inflater() {
        if (ready) inflateEnd(&z);
    }
    Inflater(const Inflater&) = delete;
    Inflater& operator=(const Inflater&) = delete;
    z_stream z{};
    bool ready = false;
};

} // namespace

Result<std::string> gunzip(const std::string& bytes, size_t limit) {
    constexpr size_t kStep = size_t(1) << 20;
    Inflater inflater;
    z_stream& z = inflater.z;
    if (!inflater.ready) return Status(StatusCode::out_of_capacity, "no memory to decompress");
    std::string input = bytes, out; // zlib's input is not const in old headers
    z.next_in = reinterpret_cast<Bytef*>(input.data());
    size_t left = input.size();
    int code = Z_OK;
    do {
        const size_t at = out.size(), part = std::min(left, kStep);
        out.resize(at + kStep);
        z.avail_in = uInt(part);
        z.next_out = reinterpret_cast<Bytef*>(out.data() + at);
        z.avail_out = uInt(kStep);
        code = inflate(&z, Z_NO_FLUSH);
        left -= part - z.avail_in;
        out.resize(at + kStep - z.avail_out);
        if (code != Z_OK && code != Z_STREAM_END) break;
        if (out.size() > limit) return Status(StatusCode::out_of_capacity, "is too large when decompressed");
        if (code == Z_STREAM_END && left > 0) code = inflateReset(&z);
    } while (code == Z_OK && (left > 0 || z.avail_out == 0));
    if (code != Z_STREAM_END) return Status(StatusCode::corrupt, "is not a whole gzip file");
    return out;
}

} // namespace kvmosaic::eval
