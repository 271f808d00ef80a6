#include "file/compress.h"

#include <algorithm>
#include <memory>

#include "kvmosaic/file.h"

#ifdef KVMOSAIC_HAVE_ZSTD
#include <zstd.h>
#endif

namespace kvmosaic {

#ifdef KVMOSAIC_HAVE_ZSTD

bool can_compress() { return true; }

namespace file {

Result<std::vector<uint8_t>> compress(std::span<const uint8_t> bytes, int level) {
    std::vector<uint8_t> out(ZSTD_compressBound(bytes.size()));
    const size_t n = ZSTD_compress(out.data(), out.size(), bytes.data(), bytes.size(), level);
    if (ZSTD_isError(n)) return Status(StatusCode::out_of_memory, std::string("zstd: ") + ZSTD_getErrorName(n));
    out.resize(n);
    return out;
}

Result<std::vector<uint8_t>> decompress(std::span<const uint8_t> stored, uint64_t bytes) {
    struct Free {
        void operator()(ZSTD_DCtx* c) const { ZSTD_freeDCtx(c); }
    };
    const std::unique_ptr<ZSTD_DCtx, Free> context(ZSTD_createDCtx());
    if (!context) return Status(StatusCode::out_of_memory, "no memory to decompress");
    std::vector<uint8_t> out;
    ZSTD_inBuffer in{stored.data(), stored.size(), 0};
    size_t more = 1;
    while (more != 0) {
        const size_t have = out.size();
        out.resize(size_t(std::min<uint64_t>(bytes, have + std::max<size_t>(have, size_t(1) << 16))));
        ZSTD_outBuffer part{out.data(), out.size(), have};
        const size_t eaten = in.pos;
        more = ZSTD_decompressStream(context.get(), &part, &in);
        if (ZSTD_isError(more)) return Status(StatusCode::corrupt, std::string("zstd: ") + ZSTD_getErrorName(more));
        const bool stuck = part.pos == have && in.pos == eaten;
        out.resize(part.pos);
        if (more != 0 && stuck) break; // the frame is longer than `bytes`, or not whole
    }
    if (more != 0 || in.pos != in.size || out.size() != bytes)
        return Status(StatusCode::corrupt,
                      "the compressed bytes do not give the " + std::to_string(bytes) + " that the section has");
    return out;
}

} // namespace file

#else

bool can_compress() { return false; }

namespace file {

Result<std::vector<uint8_t>> compress(std::span<const uint8_t> /*bytes*/, int /*level*/) {
    return Status(StatusCode::unsupported, "compress: this build has no zstd");
}

Result<std::vector<uint8_t>> decompress(std::span<const uint8_t> /*stored*/, uint64_t /*bytes*/) {
    return Status(StatusCode::unsupported, "it is compressed, and this build has no zstd");
}

} // namespace file

#endif

} // namespace kvmosaic
