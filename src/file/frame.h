// The frame of a sequence file. Little-endian. All of its bytes are under a checksum (XXH3, 64 bits):
//
//   head      u8 magic[8] "KVMOSAIC", u32 version, u32 byte-order mark, u32 tokens of a page, u32 number of sections,
//             u64 bytes of the file, u64 checksum of the 32 bytes before
//   section   u32 kind, u32 flags, u32 owner, u32 number, u64 stored, u64 bytes, u64 checksum of what is stored,
//             u64 checksum of the 40 bytes before; then `stored` bytes
//
// kind: state::Tag, or 100 tokens, 101 note, 102 sequence. owner: index of the sequence in the file. flags: 1 the
// stored bytes are a zstd frame of `bytes`; 2 nothing is stored, the section equals the one whose index is in `bytes`.
#pragma once

#include <span>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic::file {

inline constexpr char kMagic[9] = "KVMOSAIC";
inline constexpr uint32_t kVersion = 1;
inline constexpr uint32_t kByteOrder = 0x01020304;
inline constexpr size_t kHeadBytes = 40, kSectionBytes = 48;

enum Kind : uint32_t { tokens = 100, note = 101, sequence = 102 }; // beside those of state::Tag
enum Flag : uint32_t { compressed = 1, same = 2 };
const char* kind_name(uint32_t kind);

uint64_t checksum(std::span<const uint8_t> bytes);

struct Section {
    uint32_t kind = 0, owner = 0, number = 0;
    std::span<const uint8_t> bytes; // as they were before compression
    uint64_t stored = 0;            // 0 for one that is the same as another
    bool shared = false;
};

// Puts sections one after another. What equals an earlier section of its kind and number is stored once, so the caller
// keeps the bytes of all sections until `finish`.
class FrameWriter {
public:
    explicit FrameWriter(bool compress, int level) : compress_(compress), level_(level) {}
    void add(uint32_t kind, uint32_t owner, uint32_t number, std::span<const uint8_t> bytes);
    Result<std::vector<uint8_t>> finish();

private:
    struct Known {
        uint64_t hash;
        uint32_t kind, number, index;
        std::span<const uint8_t> bytes; // of the section, to be compared
    };
    std::vector<uint8_t> out_ = std::vector<uint8_t>(kHeadBytes);
    std::vector<Known> known_;
    uint32_t count_ = 0;
    bool compress_;
    int level_;
    Status failed_;
};

// A frame whose checksums are right. Holds what had to be decompressed; otherwise sections lie in the given bytes.
struct Frame {
    std::vector<Section> sections;
    std::vector<std::vector<uint8_t>> unpacked;
};
Result<Frame> read_frame(std::span<const uint8_t> bytes);

} // namespace kvmosaic::file
