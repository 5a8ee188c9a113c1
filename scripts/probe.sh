#!/bin/bash
# probe.sh FILE: detects this machine's libraries by compiling and linking a few lines, prints a table, and writes FILE for make.
# Libraries missing from the system are also searched in build/deps, which `make deps` fills (install_deps.sh).
set -u
deps=build/deps
out=$1
mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build/deps contains GoogleTest's sources, because the compilers of two machines may differ.
build_googletest() {
    [ -f $deps/googletest/src/gtest-all.cc ] && [ ! -f $deps/lib/libgtest.a ] || return 0
    for part in gtest-all gtest_main; do
        "$CXX" -std=c++20 -O1 -isystem $deps/include -I$deps/googletest -c $deps/googletest/src/$part.cc -o "$work/$part.o" || return 1
    done
    mkdir -p $deps/lib
    ar rcs $deps/lib/libgtest_main.a "$work/gtest_main.o" && ar rcs $deps/lib/libgtest.a "$work/gtest-all.o"
}

# links "libraries": compiles and links probe.cpp
# shellcheck disable=SC2086
links() { $CXX $CXXFLAGS "$work/probe.cpp" $1 -o "$work/probe" 2> "$work/errors"; }

# try NAME "source" "libraries" "consequence of its absence": sets HAVE_NAME in the file and prints a line.
try() {
    printf '%b\n' "$2" > "$work/probe.cpp"
    if links "$3"; then
        echo "HAVE_$1 := 1" >> "$work/probe.mk"
        printf '  %-14s yes\n' "$1"
    elif [ -d $deps/include ] && mv "$work/errors" "$work/system" && links "-isystem $deps/include -L$deps/lib $3"; then
        echo "HAVE_$1 := 1" >> "$work/probe.mk"
        echo "CARRIED := $deps" >> "$work/probe.mk"
        printf '  %-14s yes   from %s\n' "$1" $deps
    else
        [ ! -f "$work/system" ] || mv "$work/system" "$work/errors"
        echo "HAVE_$1 := 0" >> "$work/probe.mk"
        why=$(grep -m 1 -oE '(fatal error|error|cannot find|unrecognized|not found).*' "$work/errors")
        printf '  %-14s no    %s -> %s\n' "$1" "${why:-$CXX does not run}" "$4"
        return 1
    fi
}

needed=0
CXXFLAGS="$CXXFLAGS -O0"  # compiles faster
echo "PROBED_COMPILER := $COMPILER" > "$work/probe.mk"
echo "On this machine, with $COMPILER"
if try COMPILER '#include <omp.h>\n#include <compare>\n#include <span>\ntypedef float Pair __attribute__((vector_size(8)));\nint main(int n, char **) { Pair a = {float(n), 0}; a = __builtin_shufflevector(a, a, 1, 0); return omp_get_max_threads() + a[0] < 1; }' '' 'needed: g++ 12 or newer, or clang 16 or newer with its OpenMP (package libomp-dev)'
then
    try CLI11 '#include <CLI/CLI.hpp>\nint main() { CLI::App app; }' '' 'needed: package libcli11-dev' || needed=1
    try JSON '#include <nlohmann/json.hpp>\nint main() { return int(nlohmann::json::array().size()); }' '' 'needed: package nlohmann-json3-dev' || needed=1
    try XXHASH '#define XXH_INLINE_ALL\n#include <xxhash.h>\nint main() { return int(XXH3_64bits(nullptr, 0)); }' '' 'needed: package libxxhash-dev' || needed=1
    matmul='our own sgemm, which is slower' unless=
    try OPENBLAS '#include <cblas.h>\nint main() { return int(cblas_sdot(0, nullptr, 1, nullptr, 1)); }' '-lopenblas' 'package libopenblas-dev' && matmul=OpenBLAS unless=', unless OPENBLAS=0'
    try ONEDNN '#include <dnnl.hpp>\nint main() { return dnnl::engine::get_count(dnnl::engine::kind::cpu) == 0; }' '-ldnnl' "using $matmul; package libdnnl-dev" && matmul=oneDNN unless=', unless ONEDNN=0'
    build_googletest
    try GTEST '#include <gtest/gtest.h>\nTEST(A, B) {}' '-lgtest_main -lgtest -lpthread' 'no C++ tests; package libgtest-dev'
    try BOOST_CONTEXT '#include <boost/context/detail/fcontext.hpp>\nint main() { return boost::context::detail::make_fcontext(nullptr, 0, nullptr) != nullptr; }' '-lboost_context' 'no tests of CUDA kernels on the CPU; package libboost-context-dev'
    mpi=$(mpicc --showme 2> /dev/null || mpicc -show 2> /dev/null)  # the compiler's own command: Open MPI, MPICH
    mpi_headers=" -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX$(grep -oE -- '(^| )-I[^ ]+' <<< "$mpi" | tr -d '\n')" # not the C++ bindings of old
    mpi_libraries=$(grep -oE -- '(^| )(-L|-l|-Wl,)[^ ]+' <<< "$mpi" | tr -d '\n')
    try MPI '#include <mpi.h>\nint main() { return MPI_Finalize(); }' "$mpi_headers $mpi_libraries" 'no mpirun; packages libopenmpi-dev openmpi-bin' &&
        echo "MPI_HEADERS :=${mpi_headers// -I/ -isystem }"$'\n'"MPI_LIBRARIES :=$mpi_libraries" >> "$work/probe.mk"
    cuda=$(dirname "$(command -v "${NVCC:-nvcc}" || echo /usr/local/cuda/bin/nvcc)")/..
    cuda_paths="-I$cuda/include -L$cuda/lib64 -L$cuda/lib"
    # NCCL is the system's, or pip's (nvidia-nccl-cu13), whose library has a version in its name.
    nccl_source='#include <nccl.h>\nint main() { return ncclCommFinalize(nullptr) == ncclSuccess; }'
    nccl_headers='' nccl_libraries=-lnccl
    printf '%b\n' "$nccl_source" > "$work/probe.cpp"
    links "$cuda_paths $nccl_libraries" || for python in .venv/bin/python python3; do
        found=$($python -c 'import importlib.util as u; print(u.find_spec("nvidia.nccl").submodule_search_locations[0])' 2> /dev/null) || continue
        nccl_headers="-isystem $found/include" nccl_libraries="$found/lib/libnccl.so.2 -Wl,-rpath,$found/lib"
        break
    done
    try CUDA '#include <cublasLt.h>\nint main() { cublasLtHandle_t handle; return cublasLtCreate(&handle) == 0; }' "$cuda_paths -lcublasLt -lcudart_static -ldl -lrt -lpthread" 'no GPUs; the CUDA toolkit with cuBLAS' &&
        try NCCL "$nccl_source" "$cuda_paths $nccl_headers $nccl_libraries" 'a GPU for one process only; .venv/bin/pip install nvidia-nccl-cu13, or NVIDIA'"'"'s packages libnccl2 libnccl-dev' &&
        echo "NCCL_HEADERS := $nccl_headers"$'\n'"NCCL_LIBRARIES := $nccl_libraries" >> "$work/probe.mk"
    echo "  Matrices are multiplied by $matmul$unless."
else
    needed=1
fi

if [ $needed = 1 ]; then
    echo 'Something needed is missing: make deps installs it' >&2
    exit 1
fi
cp "$work/probe.mk" "$out"
