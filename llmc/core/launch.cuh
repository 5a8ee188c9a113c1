// launch(): the only place with <<<>>>. With -DLLMC_EMULATE the same kernels run on the CPU: the compiler then includes the emulator before the file,
// with its own launch() and shared_mem() (dev/emulator/simt.h).
//
//     struct Tile { float x[64], y[64]; };
//     template <class X> __global__ void op_kernel(X *out, size_t n) { Tile &tile = shared_mem<Tile>(); ... }
//     launch(dev, op_kernel<X>, Grid{ceil_div(n, 64), H}, 64, sizeof(Tile), out, n);
#pragma once
#include <cstddef>
#include <cstdlib>
#include <source_location>

#include "common.h"
#include "device.h"

inline namespace CUDA_BACKEND {
struct Grid {  // blocks of a launch, and the source line that launches, for messages
    size_t x, y, z;
    std::source_location at;
    Grid(size_t x, size_t y = 1, size_t z = 1, std::source_location at = std::source_location::current())
        : x(x), y(y), z(z), at(at) {}
};
}  // namespace CUDA_BACKEND

#ifndef LLMC_EMULATE
#include <cuda_runtime.h>
#include <cxxabi.h>

inline namespace CUDA_BACKEND {
extern __shared__ __align__(1024) unsigned char shared_bytes[];

// Returns the dynamic shared memory of the block as a T; launch() was given its size.
template <class T> __device__ T &shared_mem() { return *reinterpret_cast<T *>(shared_bytes); }

inline std::string kernel_name(const void *kernel) {
    const char *mangled = nullptr;
    if (cudaFuncGetName(&mangled, kernel) != cudaSuccess || !mangled) return "a kernel";
    int failed;
    char *readable = abi::__cxa_demangle(mangled, nullptr, nullptr, &failed);
    const std::string name = failed ? mangled : readable;
    free(readable);
    return name;
}

// An empty grid runs nothing. Errors of the launch appear here, errors of the kernel itself at a later call.
template <class X, class... Params, class... Args>
void launch(Cuda<X> dev, void (*kernel)(Params...), Grid grid, unsigned threads, size_t shared, Args... args) {
    if (grid.x * grid.y * grid.z == 0) return;
    cudaError_t error = cudaSuccess;
    if (grid.x > 0x7fffffff || grid.y > 0xffff || grid.z > 0xffff) error = cudaErrorInvalidConfiguration;
    if (!error && shared > 48 * 1024) {  // above this limit a kernel must request it
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
        // L1 and shared memory share one memory; without this the driver may leave so much to L1 that fewer blocks fit an SM at a time.
        if (!error)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    }
    if (!error) {
        cudaGetLastError();  // clears the error of an earlier call, which has been reported
        kernel<<<dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), threads, shared, dev.stream>>>(Params(args)...);
        error = cudaGetLastError();
    }
    if (error)
        die("%s at %s:%u does not start: %s; grid %zu x %zu x %zu, %u threads, %zu bytes of shared memory",
            kernel_name(reinterpret_cast<const void *>(kernel)).c_str(), grid.at.file_name(), unsigned(grid.at.line()),
            cudaGetErrorString(error), grid.x, grid.y, grid.z, threads, shared);
}
}  // namespace CUDA_BACKEND
#endif
