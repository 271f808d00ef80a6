#include "file/frame.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cache/state_io.h"
#include "file/compress.h"

namespace kvmosaic::file {

namespace {

constexpr size_t kHeadHashed = kHeadBytes - 8, kSectionHashed = kSectionBytes - 8;

struct Head {
    char magic[8];
    uint32_t version, order, page_tokens, sections;
    uint64_t bytes, sum;
};
struct SectionHead {
    uint32_t kind, flags, owner, number;
    uint64_t stored, bytes, sum, head_sum;
};
static_assert(sizeof(Head) == kHeadBytes && sizeof(SectionHead) == kSectionBytes);

uint64_t sum_of(const void* p, size_t n) { return checksum({static_cast<const uint8_t*>(p), n}); }

Status corrupt(std::string sentence) { return {StatusCode::corrupt, std::move(sentence)}; }

// "section 7 (page 2 of sequence 0)"
std::string place(size_t index, const SectionHead& h) {
    return "section " + std::to_string(index) + " (" + kind_name(h.kind) + " " + std::to_string(h.number) +
           " of sequence " + std::to_string(h.owner) + ")";
}

Status check_head(std::span<const uint8_t> bytes, Head* head) {
    const auto shown = [&](size_t n) { return std::min(n, bytes.size()); };
    if (bytes.size() < sizeof(kMagic) - 1 || std::memcmp(bytes.data(), kMagic, shown(8)) != 0)
        return corrupt("magic: this is no sequence file");
    if (bytes.size() < kHeadBytes)
        return corrupt("head: " + std::to_string(kHeadBytes) + " bytes are needed, the file has " +
                       std::to_string(bytes.size()));
    std::memcpy(head, bytes.data(), sizeof(*head));
    if (head->order == 0x04030201) return corrupt("byte order: the file comes from a machine with the other one");
    if (head->order != kByteOrder) return corrupt("byte order: the mark is damaged");
    if (head->version != kVersion)
        return corrupt("version: " + std::to_string(head->version) + ", this build reads " + std::to_string(kVersion));
    if (head->page_tokens != uint32_t(kPageTokens))
        return corrupt("page size: pages of " + std::to_string(head->page_tokens) + " tokens, this build has " +
                       std::to_string(kPageTokens));
    if (sum_of(head, kHeadHashed) != head->sum) return corrupt("head: its checksum is wrong");
    if (head->bytes != bytes.size())
        return corrupt("length: the file has " + std::to_string(bytes.size()) + " bytes and should have " +
                       std::to_string(head->bytes));
    return {};
}

} // namespace

const char* kind_name(uint32_t kind) {
    switch (kind) {
    case tokens:
        return "tokens";
    case note:
        return "note";
    case sequence:
        return "sequence";
    default:
        return state::name_of(state::Tag(kind));
    }
}

void FrameWriter::add(uint32_t kind, uint32_t owner, uint32_t number, std::span<const uint8_t> bytes) {
    SectionHead h{kind, 0, owner, number, bytes.size(), bytes.size(), 0, 0};
    const uint64_t hash = checksum(bytes);
    std::span<const uint8_t> stored = bytes;
    std::vector<uint8_t> packed;
    const auto twin = std::find_if(known_.begin(), known_.end(), [&](const Known& k) {
        return k.kind == kind && k.number == number && k.hash == hash && std::ranges::equal(k.bytes, bytes);
    });
    if (twin != known_.end()) {
        h.flags = same;
        h.stored = 0;
        h.bytes = twin->index;
        stored = {};
    } else {
        known_.push_back({hash, kind, number, count_, bytes});
        if (compress_ && !bytes.empty()) {
            auto made = compress(bytes, level_);
            if (!made && failed_) failed_ = made.status();
            if (made && made->size() < bytes.size()) { // what does not shrink stays as it is
                packed = std::move(*made);
                stored = packed;
                h.flags = compressed;
                h.stored = stored.size();
            }
        }
    }
    h.sum = checksum(stored);
    h.head_sum = sum_of(&h, kSectionHashed);
    const auto* b = reinterpret_cast<const uint8_t*>(&h);
    out_.insert(out_.end(), b, b + sizeof(h));
    out_.insert(out_.end(), stored.begin(), stored.end());
    ++count_;
}

Result<std::vector<uint8_t>> FrameWriter::finish() {
    if (!failed_) return failed_;
    Head head{};
    std::memcpy(head.magic, kMagic, sizeof(head.magic));
    head.version = kVersion;
    head.order = kByteOrder;
    head.page_tokens = uint32_t(kPageTokens);
    head.sections = count_;
    head.bytes = out_.size();
    head.sum = sum_of(&head, kHeadHashed);
    std::memcpy(out_.data(), &head, sizeof(head));
    return std::move(out_);
}

Result<Frame> read_frame(std::span<const uint8_t> bytes) {
    Head head{};
    if (Status st = check_head(bytes, &head); !st) return st;
    Frame frame;
    size_t at = kHeadBytes;
    for (size_t i = 0; i < head.sections; ++i) {
        SectionHead h{};
        if (bytes.size() - at < sizeof(h)) return corrupt("section " + std::to_string(i) + ": the file ends in it");
        std::memcpy(&h, bytes.data() + at, sizeof(h));
        at += sizeof(h);
        if (sum_of(&h, kSectionHashed) != h.head_sum)
            return corrupt("section " + std::to_string(i) + ": the checksum of its head is wrong");
        if (h.stored > bytes.size() - at)
            return corrupt(place(i, h) + ": " + std::to_string(h.stored) + " bytes are needed and " +
                           std::to_string(bytes.size() - at) + " are left");
        const std::span<const uint8_t> stored = bytes.subspan(at, size_t(h.stored));
        at += size_t(h.stored);
        if (checksum(stored) != h.sum) return corrupt(place(i, h) + ": its checksum is wrong");
        Section section{h.kind, h.owner, h.number, stored, h.stored, false};
        if (h.flags == same) {
            if (h.bytes >= i || h.stored != 0)
                return corrupt(place(i, h) + ": it equals section " + std::to_string(h.bytes) + ", not an earlier one");
            section.bytes = frame.sections[size_t(h.bytes)].bytes;
            section.shared = true;
        } else if (h.flags == compressed) {
            auto plain = decompress(stored, h.bytes);
            if (!plain) return Status(plain.status().code(), place(i, h) + ": " + plain.status().message());
            frame.unpacked.push_back(std::move(*plain)); // vectors that move keep their bytes where they are
            section.bytes = frame.unpacked.back();
        } else if (h.flags != 0 || h.bytes != h.stored) {
            return corrupt(place(i, h) + ": flags " + std::to_string(h.flags) + " or the length are not possible");
        }
        frame.sections.push_back(section);
    }
    if (at != bytes.size())
        return corrupt("length: " + std::to_string(bytes.size() - at) + " bytes behind the last section");
    return Result<Frame>(std::move(frame)); // sections point into `unpacked`, which must not be copied
}

} // namespace kvmosaic::file
