#!/bin/bash
# What the project needs on a Debian or Ubuntu machine: packages for building, and .venv with requirements.txt for data preparation and
# tests. Says what it is about to install, installs only what is missing; without root it prints the command instead.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ make libcli11-dev nlohmann-json3-dev libdnnl-dev libopenblas-dev libgtest-dev libboost-context-dev clang-format clang-tidy python3 python3-venv)
missing=()
for p in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2> /dev/null || true)" = installed ] || missing+=("$p")
done

if [ ${#missing[@]} = 0 ]; then
    echo "Debian packages: nothing to install"
else
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    if ! command -v apt-get > /dev/null; then
        echo "This is no Debian machine. Install what corresponds to: ${missing[*]}"
    elif [ "$(id -u)" != 0 ]; then
        echo "Not root, so please run:  sudo apt-get update && sudo $install"
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
