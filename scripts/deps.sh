#!/usr/bin/env bash
# Installs what kvmosaic is built with, from Debian's packages: shows the list, then installs what is missing.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/deps.sh [--dev] [--list]

  --dev    also what `make format`, `make tidy`, `make neon`, the benchmarks and all of `kvmosaic tune` need
  --list   print the packages, one a line, and do nothing else
EOF
}

packages=(g++ make cmake ninja-build git python3 python3-pip python3-numpy libcli11-dev libfmt-dev nlohmann-json3-dev libssl-dev libgtest-dev
    libxxhash-dev libzstd-dev zlib1g-dev gnuplot-nox)
list=no
for arg in "$@"; do
    case $arg in
        --dev) packages+=(clang-format clang-tidy libbenchmark-dev g++-aarch64-linux-gnu qemu-user-static googletest python3-optuna) ;;
        --list) list=yes ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; echo "deps.sh: unknown option '$arg'" >&2; exit 1 ;;
    esac
done

if [[ $list == yes ]]; then
    printf '%s\n' "${packages[@]}"
    exit 0
fi

need() {
    cat >&2 <<'EOF'
deps.sh: this is no Debian system, so nothing was installed. kvmosaic needs: g++ 12 or another C++20 compiler, make,
CMake 3.23, ninja, git, Python 3.8 with pip, and the libraries CLI11, fmt, nlohmann-json, OpenSSL's libcrypto, xxhash,
zlib and GoogleTest with their headers. With zstd saved sequences can be compressed. One test needs NumPy and is skipped
without it. Reports are drawn by gnuplot.
EOF
}

# On other systems the tools may be there all the same; say what is needed and let the build judge.
if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
    need
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2> /dev/null) == ii* ]] || missing+=("$package")
done

if ((${#missing[@]})); then
    echo "Debian packages: ${packages[*]}"
    echo "to be installed: ${missing[*]}"
    as_root=()
    if ((EUID != 0)); then
        as_root=(sudo)
        [[ -t 0 ]] || as_root+=(-n) # nobody there to type a password
        if ! command -v sudo > /dev/null || ! "${as_root[@]}" true 2> /dev/null; then
            echo "deps.sh: no rights to install packages. Run as root: apt-get install ${missing[*]}" >&2
            exit 1
        fi
    fi
    log=$(mktemp)
    trap 'rm -f "$log"' EXIT
    if ! { "${as_root[@]}" apt-get update -qq &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            "${missing[@]}"; } < /dev/null > "$log" 2>&1; then
        tail -n 5 "$log" >&2
        echo "deps.sh: apt-get could not install the packages (see above). By hand: apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

version_at_least() { [[ $(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }
cmake=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
version_at_least 3.23 "$cmake" || { echo "deps.sh: CMake 3.23 or newer is needed, found $cmake" >&2; exit 1; }
compiler=$(c++ -dumpfullversion 2> /dev/null || true)
if [[ -n $compiler ]] && ! c++ --version | grep -q clang; then
    version_at_least 12 "$compiler" || { echo "deps.sh: g++ 12 or newer is needed, found $compiler" >&2; exit 1; }
fi
