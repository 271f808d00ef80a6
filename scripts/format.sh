#!/usr/bin/env bash
# Formats the C++ and CUDA sources that git tracks; with --check only says which would change.
# The style is that of clang-format 14: other versions break some lines differently.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tool=clang-format
command -v clang-format-14 > /dev/null && tool=clang-format-14
command -v "$tool" > /dev/null || { echo "format.sh: clang-format is missing. On Debian: apt-get install clang-format" >&2; exit 1; }
# seam.h becomes part of llama.cpp's sources and keeps their style.
mapfile -d '' -t files < <(git ls-files -z ':!src/llama/seam.h' '*.cc' '*.h' '*.cu' '*.cuh' '*.inc')
((${#files[@]})) || { echo "format.sh: git lists no sources here" >&2; exit 1; }
case ${1:-} in
    '') "$tool" -i "${files[@]}" ;;
    --check)
        "$tool" --dry-run -Werror "${files[@]}" || { echo "format.sh: run 'make format'" >&2; exit 1; }
        echo "format: ${#files[@]} files are clean"
        ;;
    *) echo "usage: scripts/format.sh [--check]" >&2; exit 1 ;;
esac
