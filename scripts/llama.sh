#!/usr/bin/env bash
# Fetches llama.cpp, inserts the seam and builds its static libraries once, in the user's cache folder, where every
# clone of kvmosaic finds them. Safe to interrupt, to repeat and to start twice.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/llama.sh [--tools] [--print-dir]

  (nothing)     the libraries that the kvmosaic program needs
  --tools       also those of llama-perplexity, llama-bench, llama-completion and llama-server
  --print-dir   print the folder (src/ and build/ in it) and do nothing else

The folder lies in ${XDG_CACHE_HOME:-~/.cache}/kvmosaic. JOBS=N sets the number of compilers at once.
EOF
}

readonly kVersion=0.3.36
readonly kPackage="llama_cpp_python-$kVersion.tar.gz"
readonly kSha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
readonly kLibraries=(libllama.a libllama-common.a)
readonly kToolLibraries=(libllama-perplexity-impl.a libllama-bench-impl.a libllama-server-impl.a libllama-completion-impl.a)
readonly kNeedMiB=700 # package, sources and build

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvmosaic

fail() {
    echo "llama.sh: $*" >&2
    exit 1
}

tools=no print_dir=no
for arg in "$@"; do
    case $arg in
        --tools) tools=yes ;;
        --print-dir) print_dir=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; fail "unknown option '$arg'" ;;
    esac
done

# The seam is part of the sources, so another seam is another folder.
hash=$(cat "$root/src/llama/seam.h" "$root/cmake/apply_seam.cmake" | sha256sum | cut -c 1-12)
dir=$cache/llama.cpp-$kVersion-$hash
if [[ $print_dir == yes ]]; then
    echo "$dir"
    exit 0
fi

check_tools() {
    local missing=() packages=()
    need() { # command, Debian package
        command -v "$1" > /dev/null || { missing+=("$1"); packages+=("$2"); }
    }
    need cmake cmake
    need ninja ninja-build
    need c++ g++
    need tar tar
    need flock util-linux
    need python3 python3
    if command -v python3 > /dev/null && ! python3 -m pip --version > /dev/null 2>&1; then
        missing+=("python3 -m pip")
        packages+=(python3-pip)
    fi
    if ((${#missing[@]})); then
        fail "missing: $(printf '%s, ' "${missing[@]}" | sed 's/, $//'). On Debian: apt-get install ${packages[*]}"
    fi
}

sha256() { sha256sum "$1" | cut -d ' ' -f 1; }

# pip asks a source package's build backend for its metadata even when it only downloads, and would install that
# backend, in an environment of its own, for this alone (50 seconds). A stand-in that knows the answer takes none.
write_stand_in() { # folder
    mkdir -p "$1/scikit_build_core"
    : > "$1/scikit_build_core/__init__.py"
    cat > "$1/scikit_build_core/build.py" <<EOF
import os


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "llama_cpp_python-$kVersion.dist-info"
    os.makedirs(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as f:
        f.write("Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: $kVersion\n")
    return name


def build_wheel(folder, config_settings=None, metadata_directory=None):
    raise RuntimeError("only the source package is wanted")
EOF
}

download() {
    local package=$cache/packages/$kPackage
    mkdir -p "$cache/packages"
    if [[ -f $package ]]; then
        if [[ $(sha256 "$package") == "$kSha256" ]]; then
            return
        fi
        echo "llama.sh: $package is damaged, fetching it again" >&2
        rm -f "$package"
    fi
    echo "fetching llama.cpp: Python source package llama-cpp-python $kVersion (77 MB)"
    local work=$dir/download
    rm -rf "$work"
    mkdir -p "$work/out" "$work/tmp"
    write_stand_in "$work/backend"
    echo "llama-cpp-python==$kVersion --hash=sha256:$kSha256" > "$work/requirements.txt"
    local progress=off
    [[ -t 1 ]] && progress=on
    if ! TMPDIR=$work/tmp PYTHONPATH=$work/backend${PYTHONPATH:+:$PYTHONPATH} python3 -m pip download --no-deps \
        --no-build-isolation --no-binary llama-cpp-python --no-cache-dir --retries 2 --progress-bar $progress \
        --disable-pip-version-check -d "$work/out" -r "$work/requirements.txt" \
        > >(grep --line-buffered -E '━|MB/s' || true) 2> "$work/log"; then
        explain_pip "$work/log"
    fi
    local got
    got=$(sha256 "$work/out/$kPackage" 2> /dev/null || echo nothing)
    [[ $got == "$kSha256" ]] || fail "wrong checksum of $kPackage: expected $kSha256, got $got"
    mv "$work/out/$kPackage" "$package"
    rm -rf "$work"
}

explain_pip() { # log of a pip that failed
    local got
    got=$(sed -n 's/^ *Got *\([0-9a-f]\{64\}\).*/\1/p' "$1" | head -n 1)
    if [[ -n $got ]]; then
        fail "wrong checksum of $kPackage: expected $kSha256, got $got"
    elif grep -q 'No space left' "$1"; then
        fail "the disk of $cache is full; free $kNeedMiB MiB and run this again"
    elif grep -qE 'ConnectionError|name resolution|ConnectTimeout|Max retries|unreachable|ProxyError' "$1"; then
        fail "no network: the Python package index cannot be reached. Run this again when it can; finished steps are kept"
    fi
    fail "pip could not fetch llama-cpp-python $kVersion: $(grep -m 1 '^ERROR' "$1" || tail -n 1 "$1")"
}

unpack() {
    [[ -d $dir/src ]] && return
    download
    echo "unpacking llama.cpp and inserting the seam"
    rm -rf "$dir"/unpack.*
    local work
    work=$(mktemp -d "$dir/unpack.XXXXXX")
    # Its .git names a repository that the package does not have.
    if ! tar -xzf "$cache/packages/$kPackage" -C "$work" --strip-components=3 --exclude='vendor/llama.cpp/.git' \
        "llama_cpp_python-$kVersion/vendor/llama.cpp" 2> "$dir/unpack.log"; then
        rm -rf "$work"
        fail "could not unpack $kPackage: $(tail -n 1 "$dir/unpack.log")"
    fi
    if ! cmake -DLLAMA_DIR="$work" -P "$root/cmake/apply_seam.cmake" > "$dir/unpack.log" 2>&1; then
        cat "$dir/unpack.log" >&2
        rm -rf "$work"
        fail "the seam does not fit this llama.cpp (see above)"
    fi
    rm -f "$dir/unpack.log"
    mv "$work" "$dir/src"
}

configure() {
    [[ -f $dir/build/configured ]] && return
    echo "configuring llama.cpp"
    rm -rf "$dir/build"
    # The ceiling keeps its version probe out of a repository that the home folder may be.
    if ! GIT_CEILING_DIRECTORIES=$dir cmake -G Ninja -S "$dir/src" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release \
        -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF > "$dir/configure.log" 2>&1; then
        tail -n 20 "$dir/configure.log" >&2
        fail "llama.cpp could not be configured; the whole output is in $dir/configure.log"
    fi
    touch "$dir/build/configured"
}

build() { # name of the set, targets
    local steps stamp=$dir/build/built-$1
    shift
    # Not left to ninja: one of the server's steps is never up to date.
    [[ -f $stamp ]] && return
    steps=$(ninja -C "$dir/build" -n "$@" | grep -cE '^\[' || true)
    ((steps == 0)) || echo "building llama.cpp: $steps files, about $(((steps * 3 + 99) / 100)) min on two cores, only once"
    local run=(nice -n 5 ninja -C "$dir/build" -j "${JOBS:-$(nproc)}" "$@")
    local log=$dir/build.log ok=yes
    if [[ -t 1 ]]; then
        "${run[@]}" 2>&1 | tee "$log" | sed -u -nE 's/^\[([0-9]+)\/([0-9]+)\].*/\1 \2/p' | progress || ok=no
    else
        "${run[@]}" > "$log" 2>&1 || ok=no
    fi
    if [[ $ok == no ]]; then
        grep -q 'No space left' "$log" && fail "the disk of $cache is full; free $kNeedMiB MiB and run this again"
        grep -A 12 -m 1 -E '^FAILED|^ninja: error' "$log" >&2 || tail -n 20 "$log" >&2
        fail "llama.cpp did not build; the whole output is in $log"
    fi
    touch "$stamp"
}

progress() { # reads "done total" lines
    local finished total filled
    while read -r finished total; do
        filled=$((finished * 40 / total))
        printf '\r  %s%s %3d %%' "$(printf '%*s' "$filled" '' | tr ' ' '#')" \
            "$(printf '%*s' $((40 - filled)) '' | tr ' ' '.')" $((finished * 100 / total))
    done
    printf '\r%60s\r' ''
}

check_tools
mkdir -p "$dir" 2> /dev/null || fail "cannot write to $cache"
exec 9> "$dir/lock"
if ! flock -n 9; then
    echo "llama.sh: another run is building in $dir, waiting for it"
    flock 9
fi
if [[ ! -d $dir/src ]]; then
    free=$(df -Pm "$dir" | awk 'NR == 2 { print $4 }')
    ((free >= kNeedMiB)) || fail "the disk of $cache has $free MiB free, $kNeedMiB MiB are needed"
fi
unpack
configure
build libraries "${kLibraries[@]}"
[[ $tools == no ]] || build tools "${kToolLibraries[@]}"
echo "llama.cpp is ready: $dir"
