#!/bin/bash
# compilers.sh [COMPILER...]: builds train_llama and the C++ tests with each compiler in a separate directory, build/COMPILER, and runs
# the tests. Without arguments it uses the installed compilers of the list below. Programs of aarch64-linux-gnu-g++ run under qemu (Debian
# packages g++-aarch64-linux-gnu and qemu-user-static), without the tests that train on many ranks; these would take an hour there.
#   FILTER='Norms*' scripts/compilers.sh clang++-16   only these tests
set -euo pipefail
cd "$(dirname "$0")/.."

found=("$@")
[ $# != 0 ] || for name in g++-{12,13,14,15} clang++-{16,17,18,19,20,21} aarch64-linux-gnu-g++; do
    if command -v $name > /dev/null; then found+=("$name"); fi
done

fast='-Slow*:*/Slow*'  # the tests of `make test`
failed=()
for name in "${found[@]}"; do
    build=build/$name
    compiler=$name run='' tests=${FILTER:-$fast}
    if [[ $name == aarch64-* ]]; then
        compiler="$name -L$build/lib" run='env OMP_WAIT_POLICY=passive qemu-aarch64-static -L /usr/aarch64-linux-gnu' tests=${FILTER:-$fast:Ranks*:RankPlans*:Worlds/*:Zero/*}
        mkdir -p "$build/lib"
        for part in gtest-all gtest_main; do  # of Debian's package googletest
            [ -f "$build/lib/$part.o" ] || "$name" -std=c++20 -O1 -I/usr/src/googletest/googletest -c "/usr/src/googletest/googletest/src/$part.cc" -o "$build/lib/$part.o"
        done
        ar rcs "$build/lib/libgtest.a" "$build/lib/gtest-all.o"
        ar rcs "$build/lib/libgtest_main.a" "$build/lib/gtest_main.o"
    fi
    echo "== $name: $("$name" --version | head -n 1)"
    make --no-print-directory CXX="$compiler" BUILD="$build" PLACE="$build/" PROBE="$build/probe.mk" "$build/train_llama" "$build/test/test_llmc" &&
        $run "$build/test/test_llmc" --gtest_brief=1 --gtest_filter="$tests" || failed+=("$name")
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
