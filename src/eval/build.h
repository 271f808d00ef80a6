// Which source this program was built from.
#pragma once

namespace kvmosaic::eval {

// What `git describe --always --dirty` said when it was built; "unknown" for a source tree without its history.
const char* build_commit(); // made by cmake/commit.cmake

} // namespace kvmosaic::eval
