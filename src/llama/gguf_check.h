// A look at a GGUF file before libllama sees it. libllama answers most broken files with an error, but some
// with an assertion that ends the process; this check turns every broken file we know of into one sentence.
// It needs nothing of libllama, reads only the metadata, and bounds every count by the bytes that are left.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic {

// What a loader should know about a file that passed.
struct GgufInfo {
    // libllama's memory-mapped loading asserts that weights lie on multiples of 32 bytes. Files with
    // general.alignment 8 or 16 are legal and load when read instead (LLAMA_LOAD_MODE_NONE).
    bool mappable = true;
    std::vector<std::string> shards;   // every file of the model, in order; one entry when it is not split
    std::vector<std::string> warnings; // one sentence each: the file loads, but something in it will hurt
};

// Ok, or one sentence that names the file, the field, its value and what is allowed.
//   not_found    no such file, or a shard of a split model is missing
//   unsupported  a sound file that this libllama cannot load (big-endian, version, alignment 24, …)
//   corrupt      anything else: truncated, foreign, contradicting itself
Status check_gguf(const std::string& path, GgufInfo* info = nullptr);

} // namespace kvmosaic
