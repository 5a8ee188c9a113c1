#!/bin/bash
# What the project needs on a Debian or Ubuntu machine: packages for building, and .venv with requirements.txt for data preparation and
# tests. Says what it is about to install, installs only what is missing; without root it prints the command instead, and fails before
# it has changed anything. Then copies headers and sources to build/deps (3 MB), with which the project can be built on a machine that has a compiler but no network:
#   tar czf train_llama.tar.gz $(git ls-files) build/deps
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ make libcli11-dev nlohmann-json3-dev libxxhash-dev libdnnl-dev libopenblas-dev libgtest-dev libboost-context-dev libopenmpi-dev openmpi-bin clang clang-format clang-tidy python3 python3-venv)
missing=()
for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2> /dev/null || true)" = installed ] || missing+=("$p")
done

if [ ${#missing[@]} = 0 ]; then
    echo "Debian packages: nothing to install"
else
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    if ! command -v apt-get > /dev/null; then
        echo "This is no Debian machine: packages are not checked. Needed is what corresponds to: ${missing[*]}"
    elif [ "$(id -u)" != 0 ]; then
        printf 'make deps: packages are missing, and only root may install them\n  fix: sudo apt-get update && sudo %s\n' "$install" >&2
        exit 1
    else
        echo "Installing: ${missing[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive $install > /dev/null
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
