#include "kvmosaic/file.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <new>

#include "cache/state_io.h"
#include "file/atomic.h"
#include "file/frame.h"

namespace kvmosaic {

namespace {

using file::Section;
using state::Tag;

Status corrupt(std::string sentence) { return {StatusCode::corrupt, "load: " + std::move(sentence)}; }

std::span<const uint8_t> bytes_of(const void* p, size_t n) { return {static_cast<const uint8_t*>(p), n}; }

// The sections of one sequence of a file.
struct Parts {
    FileSequence what;
    std::vector<uint8_t> state; // as Cache::load wants it
};

Status read_own(const Section& s, FileSequence* into) {
    switch (s.kind) {
    case file::sequence:
        if (s.bytes.size() != sizeof(into->seq)) return corrupt("sequence: its section has no 4 bytes");
        std::memcpy(&into->seq, s.bytes.data(), sizeof(into->seq));
        return {};
    case file::tokens:
        if (s.bytes.size() % sizeof(int32_t) != 0) return corrupt("tokens: the section ends in one");
        into->tokens.resize(s.bytes.size() / sizeof(int32_t));
        if (!s.bytes.empty()) std::memcpy(into->tokens.data(), s.bytes.data(), s.bytes.size());
        return {};
    default:
        into->note.assign(s.bytes.begin(), s.bytes.end());
        return {};
    }
}

Result<std::vector<Parts>> parts_of(const file::Frame& frame) {
    std::vector<Parts> found;
    for (size_t i = 0; i < frame.sections.size(); ++i) {
        const Section& s = frame.sections[i];
        if (s.kind == file::sequence) {
            if (s.owner != found.size())
                return corrupt("section " + std::to_string(i) + ": sequences are not in order");
            found.emplace_back();
            state::put_head(&found.back().state);
        }
        if (found.empty() || s.owner + 1 != found.size())
            return corrupt("section " + std::to_string(i) + ": it belongs to no sequence");
        if (s.kind == file::sequence || s.kind == file::tokens || s.kind == file::note) {
            if (Status st = read_own(s, &found.back().what); !st) return st;
            continue;
        }
        if (s.kind == 0 || s.kind > state::kLastTag)
            return corrupt("section " + std::to_string(i) + ": there is no kind " + std::to_string(s.kind));
        std::vector<uint8_t>& state = found.back().state;
        state::put_section_head(&state, Tag(s.kind), s.number, s.bytes.size());
        state.insert(state.end(), s.bytes.begin(), s.bytes.end());
    }
    if (found.empty()) return corrupt("sequences: the file holds none");
    return found;
}

// Rows and positions of a state, for those who have no cache for it.
Status read_positions(std::span<const uint8_t> bytes, size_t layers, FileInfo::Sequence* into) {
    state::Reader r(bytes);
    const uint64_t rows = r.get<uint64_t>("rows");
    if (rows > r.left() / sizeof(int32_t)) return corrupt("rows: " + std::to_string(rows) + " do not fit the state");
    std::vector<int32_t> positions(static_cast<size_t>(rows));
    r.bytes(positions.data(), positions.size() * sizeof(int32_t), "positions");
    into->rows = int64_t(rows);
    if (rows > 0) into->first_position = positions.front(), into->last_position = positions.back();
    for (size_t i = 0; r.ok() && i < 2 * layers; ++i)
        into->packed.push_back(int64_t(r.get<uint64_t>("packed rows")));
    return r.ok() ? Status() : corrupt("positions: " + r.wrong());
}

// Whether there can be a plan for each layer, head and side: whoever makes a cache of the model takes memory for them.
bool plausible(const ModelShape& model, size_t bytes) {
    constexpr size_t kLeast = 64; // of a plan
    size_t plans = 0;
    for (const LayerShape& l : model.layers)
        plans += 2 * size_t(std::max(0, l.kv_heads));
    return plans <= bytes / kLeast;
}

template <typename T, typename F>
Result<T> guarded(F f) { // the one way in which the standard library says that there is no memory
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return Status(StatusCode::out_of_memory, "no memory for the bytes of the sequences");
    }
}

} // namespace

Result<std::vector<uint8_t>> write_sequences(const Cache& cache, std::span<const FileSequence> sequences,
                                             const FileOptions& options) {
    if (sequences.empty()) return Status(StatusCode::invalid_argument, "save: no sequence was named");
    if (options.level < 1 || options.level > 19)
        return Status(StatusCode::invalid_argument,
                      "save: level " + std::to_string(options.level) + " is outside 1..19");
    if (options.compress && !can_compress())
        return Status(StatusCode::unsupported, "save: this build has no zstd, so nothing can be compressed");
    return guarded<std::vector<uint8_t>>([&]() -> Result<std::vector<uint8_t>> {
        std::deque<std::vector<uint8_t>> states;
        file::FrameWriter frame(options.compress, options.level);
        for (size_t i = 0; i < sequences.size(); ++i) {
            const FileSequence& s = sequences[i];
            const std::string name = "save: sequence " + std::to_string(s.seq);
            if (states.emplace_back(cache.save(s.seq)).empty())
                return Status(StatusCode::not_found, name + " does not exist");
            if (!s.tokens.empty() && int64_t(s.tokens.size()) < cache.rows(s.seq))
                return Status(StatusCode::invalid_argument, name + " has " + std::to_string(cache.rows(s.seq)) +
                                                                " rows and only " + std::to_string(s.tokens.size()) +
                                                                " tokens");
            for (size_t k = 0; k < i; ++k)
                if (sequences[k].seq == s.seq) return Status(StatusCode::invalid_argument, name + " is named twice");
            const auto owner = uint32_t(i);
            frame.add(file::sequence, owner, 0, bytes_of(&s.seq, sizeof(s.seq)));
            if (!s.tokens.empty())
                frame.add(file::tokens, owner, 0, bytes_of(s.tokens.data(), s.tokens.size() * sizeof(int32_t)));
            if (!s.note.empty()) frame.add(file::note, owner, 0, bytes_of(s.note.data(), s.note.size()));
            const auto sections = state::sections(states.back());
            if (!sections) return sections.status();
            for (const state::Section& part : *sections)
                frame.add(uint32_t(part.tag), owner, part.number, part.bytes);
        }
        return frame.finish();
    });
}

Result<std::vector<FileSequence>> read_sequences(Cache* cache, std::span<const uint8_t> bytes,
                                                 std::span<const SeqId> into) {
    return guarded<std::vector<FileSequence>>([&]() -> Result<std::vector<FileSequence>> {
        const auto frame = file::read_frame(bytes);
        if (!frame) return Status(frame.status().code(), "load: " + frame.status().message());
        auto parts = parts_of(*frame);
        if (!parts) return parts.status();
        if (!into.empty() && into.size() != parts->size())
            return Status(StatusCode::invalid_argument, "load: the file holds " + std::to_string(parts->size()) +
                                                            " sequences, names were given for " +
                                                            std::to_string(into.size()));
        std::vector<SavedSequence> saved;
        for (size_t i = 0; i < parts->size(); ++i) {
            Parts& p = (*parts)[i];
            if (!into.empty()) p.what.seq = into[i];
            saved.push_back({p.what.seq, p.state});
            FileInfo::Sequence seen;
            const auto sections = state::sections(p.state);
            if (!sections) return corrupt(sections.status().message());
            for (const state::Section& s : *sections) {
                if (s.tag != Tag::positions) continue;
                if (Status st = read_positions(s.bytes, 0, &seen); !st) return st;
            }
            if (!p.what.tokens.empty() && int64_t(p.what.tokens.size()) < seen.rows)
                return corrupt("tokens: " + std::to_string(p.what.tokens.size()) + " of them for " +
                               std::to_string(seen.rows) + " rows");
        }
        if (Status st = cache->load(saved); !st) return st;
        std::vector<FileSequence> out;
        for (Parts& p : *parts)
            out.push_back(std::move(p.what));
        return out;
    });
}

Result<FileInfo> file_info(std::span<const uint8_t> bytes) {
    return guarded<FileInfo>([&]() -> Result<FileInfo> {
        const auto frame = file::read_frame(bytes);
        if (!frame) return Status(frame.status().code(), "load: " + frame.status().message());
        auto parts = parts_of(*frame);
        if (!parts) return parts.status();
        FileInfo info;
        info.version = file::kVersion;
        info.bytes = bytes.size();
        std::map<uint32_t, size_t> kinds;
        for (const Section& s : frame->sections) {
            const auto [at, fresh] = kinds.emplace(s.kind, info.sections.size());
            if (fresh) info.sections.push_back({file::kind_name(s.kind)});
            FileInfo::Section& sum = info.sections[at->second];
            ++sum.count;
            sum.shared += s.shared;
            sum.bytes += s.bytes.size();
            sum.stored += s.stored;
        }
        for (const Parts& p : *parts) {
            FileInfo::Sequence seq;
            seq.seq = p.what.seq;
            seq.tokens = int64_t(p.what.tokens.size());
            seq.note = p.what.note;
            seq.state_bytes = p.state.size();
            const auto sections = state::sections(p.state);
            if (!sections) return corrupt(sections.status().message());
            ModelShape model;
            for (const state::Section& s : *sections) {
                state::Reader r(s.bytes);
                if (s.tag == Tag::model) state::get_model(&r, &model);
                if (s.tag == Tag::method) r.text(&info.spec, 4096, "spec");
                if (!r.ok()) return corrupt(std::string(state::name_of(s.tag)) + ": " + r.wrong());
                if (s.tag == Tag::plans && !plausible(model, s.bytes.size()))
                    return corrupt("plans: not as many as the model's layers and heads have");
                if (s.tag != Tag::positions) continue;
                if (Status st = read_positions(s.bytes, model.layers.size(), &seq); !st) return st;
            }
            info.model = std::move(model);
            info.sequences.push_back(std::move(seq));
        }
        return info;
    });
}

Status save_file(const Cache& cache, const std::string& path, std::span<const FileSequence> sequences,
                 const FileOptions& options) {
    auto bytes = write_sequences(cache, sequences, options);
    return bytes ? file::replace_file(path, *bytes) : bytes.status();
}

Result<std::vector<FileSequence>> load_file(Cache* cache, const std::string& path, std::span<const SeqId> into) {
    auto bytes = read_file(path);
    if (!bytes) return bytes.status();
    auto read = read_sequences(cache, *bytes, into);
    if (!read) return Status(read.status().code(), path + ": " + read.status().message());
    return read;
}

} // namespace kvmosaic
