#!/bin/bash
# Installs the project's packages on Debian or Ubuntu, and .venv with requirements.txt for data preparation and tests. It lists the missing
# packages and installs no others; without root it prints the command instead, and fails before changing anything. Then it copies headers
# and sources to build/deps (3 MB), from which a machine with a compiler but no network can build the project:
#   tar czf train_llama.tar.gz $(git ls-files) build/deps
set -euo pipefail
cd "$(dirname "$0")/.."

# Each package with its purpose.
packages=(
    "g++                 compiles the programs"
    "make                runs the Makefile"
    "libcli11-dev        parses the command line (needed to build)"
    "nlohmann-json3-dev  reads and writes JSON (needed to build)"
    "libxxhash-dev       checksums (needed to build)"
    "libdnnl-dev         oneDNN: fast matrix products on the CPU, also in bf16"
    "libopenblas-dev     fast matrix products in float, without oneDNN"
    "libopenmpi-dev      ranks that are processes: the library"
    "openmpi-bin         ranks that are processes: mpirun"
    "libgtest-dev        GoogleTest, for the C++ tests"
    "libboost-context-dev  the emulator that runs CUDA kernels on the CPU"
    "patch               the workshop's exercises: scripts/exercise.py"
    "clang               a second compiler, with the fuzzers of make test-all"
    "clang-format        make format"
    "clang-tidy          make tidy"
    "python3             data preparation, plots and tests"
    "python3-venv        creates .venv for its packages"
)
missing=()
purposes=
for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "${p%% *}" 2> /dev/null || true)" = installed ] && continue
    missing+=("${p%% *}")
    purposes+="    $p"$'\n'
done

if [ ${#missing[@]} = 0 ]; then
    echo "Debian packages: nothing to install"
else
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    if ! command -v apt-get > /dev/null; then
        printf 'This is not Debian or Ubuntu, so packages are not checked. Their equivalents are needed:\n%s' "$purposes"
    elif [ "$(id -u)" != 0 ]; then
        printf 'make deps: packages are missing, and only root may install them\n%s  fix: sudo apt-get update && sudo %s\n' "$purposes" "$install" >&2
        exit 1
    else
        printf 'Installing:\n%s' "$purposes"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive $install -o Dpkg::Use-Pty=0 > /dev/null
    fi
fi

if cmp -s requirements.txt .venv/installed.txt; then
    echo ".venv: nothing to install"
else
    echo "Installing into .venv: $(grep -v '^#' requirements.txt | tr '\n' ' ')"
    [ -x .venv/bin/python ] || python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/installed.txt
fi

deps=build/deps
rm -rf $deps
mkdir -p $deps/include $deps/lib $deps/googletest
left_out=()
# carry NAME DIRECTORY FILE...: copies them, or notes that this machine has no NAME
carry() {
    local name=$1 to=$deps/$2
    shift 2
    if [ $# = 0 ] || ! cp -r "$@" "$to" 2> /dev/null; then left_out+=("$name"); fi
}
carry CLI11 include /usr/include/CLI
carry nlohmann/json include /usr/include/nlohmann
carry xxHash include /usr/include/xxhash.h
carry GoogleTest include /usr/include/gtest
carry "GoogleTest's sources" googletest /usr/src/googletest/googletest/src
boost=$(echo '#include <boost/context/detail/fcontext.hpp>' | g++ -x c++ -M - 2> /dev/null | grep -o '/usr/include/boost/[^ ]*' || true)
for header in $boost; do
    mkdir -p "$deps/include/$(dirname "${header#/usr/include/}")"
    cp "$header" "$deps/include/${header#/usr/include/}"
done
carry boost.context lib "$(g++ -print-file-name=libboost_context.a)"
echo "build/deps: $(du -sh $deps | cut -f 1) to carry along${left_out:+, without ${left_out[*]}}"
