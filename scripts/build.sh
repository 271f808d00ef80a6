#!/usr/bin/env bash
# Configures a CMake preset and builds targets of it (all of them without names). Quiet unless something is wrong.
#   scripts/build.sh PRESET [TARGET ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=${1:?usage: scripts/build.sh PRESET [TARGET ...]}
shift
mkdir -p "build/$preset"
log=build/$preset/configure.log
# Named each time: a build folder remembers the llama.cpp of an older seam.
llama=${KVMOSAIC_LLAMA_DIR:-$(scripts/llama.sh --print-dir)}
if ! cmake --preset "$preset" -DKVMOSAIC_LLAMA_DIR="$llama" > "$log" 2>&1; then
    grep -A 8 'CMake Error' "$log" >&2 || cat "$log" >&2
    echo "build.sh: preset '$preset' could not be configured; the whole output is in $log" >&2
    exit 1
fi
jobs=${JOBS:-$(nproc)}
if [[ -t 1 ]]; then
    exec cmake --build "build/$preset" -j "$jobs" ${1:+--target "$@"}
fi
# Without a terminal ninja would print a line for each file.
log=build/$preset/build.log
echo "building preset '$preset'${1:+: $*}"
if ! cmake --build "build/$preset" -j "$jobs" ${1:+--target "$@"} > "$log" 2>&1; then
    grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking)|^ninja:' "$log" | head -n 60 >&2
    echo "build.sh: preset '$preset' did not build; the whole output is in $log" >&2
    exit 1
fi
if grep -q 'warning:' "$log"; then grep -E 'warning:' "$log" | sort -u | head -n 20; fi
