// Saving and loading.
#include <cstdlib>

#include "capi/capi.h"

using namespace kvmosaic;
using capi::bad;
using capi::close_step;
using capi::guarded;

namespace {

Status take_saved(const kvmosaic_saved* what, int32_t count, std::vector<FileSequence>* into) {
    if (!what || count < 1) return bad("what: it is null, or count = " + std::to_string(count) + " is not above 0");
    for (int32_t i = 0; i < count; ++i) {
        const kvmosaic_saved& s = what[i];
        if (s.token_count < 0 || (s.token_count > 0 && !s.tokens))
            return bad("sequence " + std::to_string(s.sequence) + ": its tokens are null or token_count is negative");
        FileSequence& to = into->emplace_back();
        to.seq = s.sequence;
        if (s.token_count > 0) to.tokens.assign(s.tokens, s.tokens + s.token_count);
        if (s.note) to.note = s.note;
    }
    return {};
}

// read(cache, names) is one of the two ways of loading.
template <typename F>
int32_t load(kvmosaic_cache* cache, const int32_t* into, int32_t count, kvmosaic_contents** contents,
             kvmosaic_error* error, F read) {
    return guarded(error, [&]() -> Status {
        if (contents) *contents = nullptr;
        if (!cache) return bad("cache: it is null");
        if (count < 0 || (count > 0 && !into)) return bad("into: it is null, or count is negative");
        auto handle = std::make_unique<kvmosaic_contents>(); // before anything changes
        cache->open = false;
        auto found = read(cache->cache.get(), std::span<const SeqId>(into, size_t(count)));
        if (!found) return found.status();
        handle->found = std::move(*found);
        if (contents) *contents = handle.release();
        return {};
    });
}

const FileSequence* entry(const kvmosaic_contents* contents, int32_t index) {
    return contents && index >= 0 && size_t(index) < contents->found.size() ? &contents->found[size_t(index)] : nullptr;
}

} // namespace

extern "C" {

int32_t kvmosaic_save(kvmosaic_cache* cache, const kvmosaic_saved* what, int32_t count, int32_t compress,
                      uint8_t** bytes, size_t* size, kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!cache || !bytes || !size) return bad("cache, bytes or size: it is null");
        *bytes = nullptr;
        *size = 0;
        std::vector<FileSequence> sequences;
        if (Status st = take_saved(what, count, &sequences); !st) return st;
        close_step(cache);
        auto made = write_sequences(*cache->cache, sequences, {.compress = compress != 0});
        if (!made) return made.status();
        *bytes = static_cast<uint8_t*>(std::malloc(made->size()));
        if (!*bytes)
            return {StatusCode::out_of_memory, "save: no memory for " + std::to_string(made->size()) + " bytes"};
        std::memcpy(*bytes, made->data(), made->size());
        *size = made->size();
        return {};
    });
}

int32_t kvmosaic_save_file(kvmosaic_cache* cache, const kvmosaic_saved* what, int32_t count, int32_t compress,
                           const char* path, kvmosaic_error* error) {
    return guarded(error, [&]() -> Status {
        if (!cache || !path) return bad("cache or path: it is null");
        std::vector<FileSequence> sequences;
        if (Status st = take_saved(what, count, &sequences); !st) return st;
        close_step(cache);
        return save_file(*cache->cache, path, sequences, {.compress = compress != 0});
    });
}

void kvmosaic_free(uint8_t* bytes) { std::free(bytes); }

int32_t kvmosaic_load(kvmosaic_cache* cache, const uint8_t* bytes, size_t size, const int32_t* into, int32_t count,
                      kvmosaic_contents** contents, kvmosaic_error* error) {
    if (!bytes && size > 0) return capi::report(error, KVMOSAIC_INVALID_ARGUMENT, "bytes: it is null");
    return load(cache, into, count, contents, error, [&](Cache* c, std::span<const SeqId> names) {
        return read_sequences(c, {bytes, size}, names);
    });
}

int32_t kvmosaic_load_file(kvmosaic_cache* cache, const char* path, const int32_t* into, int32_t count,
                           kvmosaic_contents** contents, kvmosaic_error* error) {
    if (!path) return capi::report(error, KVMOSAIC_INVALID_ARGUMENT, "path: it is null");
    return load(cache, into, count, contents, error,
                [&](Cache* c, std::span<const SeqId> names) { return load_file(c, path, names); });
}

int32_t kvmosaic_contents_count(const kvmosaic_contents* contents) {
    return contents ? int32_t(contents->found.size()) : 0;
}

int32_t kvmosaic_contents_sequence(const kvmosaic_contents* contents, int32_t index) {
    const FileSequence* s = entry(contents, index);
    return s ? s->seq : -1;
}

const int32_t* kvmosaic_contents_tokens(const kvmosaic_contents* contents, int32_t index, int64_t* count) {
    const FileSequence* s = entry(contents, index);
    if (count) *count = s ? int64_t(s->tokens.size()) : 0;
    return s && !s->tokens.empty() ? s->tokens.data() : nullptr;
}

const char* kvmosaic_contents_note(const kvmosaic_contents* contents, int32_t index) {
    const FileSequence* s = entry(contents, index);
    return s ? s->note.c_str() : "";
}

void kvmosaic_contents_free(kvmosaic_contents* contents) { delete contents; }

} // extern "C"
