// Files as evaluation and the program need them: whole reads, writes that are never half done, SHA-256, folders.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

// Share done, 0..1, of the work named by `what`. Called often; the receiver thins it out.
using Progress = std::function<void(const std::string& what, double share)>;

bool exists(const std::string& path);
int64_t file_size(const std::string& path); // -1 when there is none

// The whole file, at most `limit` bytes; "-" reads standard input. Says why it could not.
Result<std::string> read_file(const std::string& path, int64_t limit = int64_t(1) << 30);

// Writes beside the target, flushes, then renames, so that a reader sees the old file or the new one.
Status write_file(const std::string& path, const std::string& text);

// Name for a file under construction: same folder, so that rename stays on one file system.
std::string temporary_name(const std::string& path);

// Lower-case hexadecimal.
Result<std::string> sha256_of_file(const std::string& path, const Progress& progress = {});
std::string sha256_of(const std::string& bytes);

// $XDG_CACHE_HOME or ~/.cache, then /kvmosaic. Not created.
std::string cache_folder();
Status make_folder(const std::string& path); // and its parents

// Processor, threads and system of this machine, as results name it.
std::string machine_name();

} // namespace kvmosaic::eval
