#!/usr/bin/env bash
# Runs clang-tidy over the sources that git tracks, or over those named, with the flags of the preset release.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v clang-tidy > /dev/null || { echo "tidy.sh: clang-tidy is missing. On Debian: apt-get install clang-tidy" >&2; exit 1; }
build=${BUILD_DIR:-build/release}
if [[ ! -f $build/compile_commands.json ]]; then
    echo "tidy.sh: $build/compile_commands.json is missing: run 'make build' first" >&2
    exit 1
fi
if (($#)); then
    files=("$@")
else
    mapfile -d '' -t files < <(git ls-files -z 'src/*.cc' 'tools/*.cc')
fi
# Only what this build compiles, and no kernels: their builtins are those of g++.
known=()
for file in "${files[@]}"; do
    [[ $file == src/kernels/cpu/* ]] && continue
    grep -qF "\"$PWD/$file\"" "$build/compile_commands.json" && known+=("$file")
done
((${#known[@]})) || { echo "tidy.sh: none of the files is part of $build" >&2; exit 1; }
printf '%s\0' "${known[@]}" | xargs -0 -n 4 -P "${JOBS:-$(nproc)}" clang-tidy -p "$build" --quiet 2> >(grep -vE 'warnings generated|^Suppressed|^Use -header' >&2 || true)
echo "tidy: ${#known[@]} files are clean"
