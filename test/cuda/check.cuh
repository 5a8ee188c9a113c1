// What the tests of kernels share. They are compiled by g++ for the emulator and by nvcc for a GPU.
#pragma once
#include "../../llmc/core/launch.cuh"
#include "../check.h"

using CudaDevices = testing::Types<CudaF32, CudaBf16>;

// Runs the body once per order of threads; on a GPU once. EXPECT_... inside it say which order failed.
template <class Dev, class Body> void for_each_order(Body body) {
#ifdef LLMC_EMULATE
    for (const unsigned order : {0, 1, 20260}) {
        SCOPED_TRACE(format("threads in order %u", order));
        CUstream_st stream{order};
        body(Dev{&stream, nullptr});
    }
#else
    body(Dev{});
#endif
}

inline namespace CUDA_BACKEND {
// An array in device memory: copied in from a vector, or full of NaN; values() copies it out.
template <class T> class DeviceArray {
    T *p = nullptr;
    size_t n = 0;

    static void check(cudaError_t error) {
        if (error) die("a test's device memory: %s", cudaGetErrorString(error));
    }

  public:
    explicit DeviceArray(size_t n) : n(n) {
        if (n == 0) return;
        check(cudaMalloc(&p, n * sizeof(T)));
        check(cudaMemsetAsync(p, 0xff, n * sizeof(T)));
    }
    explicit DeviceArray(const std::vector<T> &v) : DeviceArray(v.size()) {
        check(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;
    ~DeviceArray() { cudaFree(p); }

    operator T *() { return p; }
    T *data() { return p; }
    size_t size() const { return n; }
    std::vector<T> values() const {
        std::vector<T> out(n);
        check(cudaMemcpy(out.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return out;
    }
};

// What Floats<X> points to, in device memory.
template <class X> struct DeviceFloats {
    DeviceArray<X> rounded;
    DeviceArray<int16_t> lower;

    explicit DeviceFloats(const HostFloats<X> &host) : rounded(host.rounded), lower(host.lower) {}
    explicit DeviceFloats(const std::vector<float> &values) : DeviceFloats(HostFloats<X>(values)) {}

    Floats<X> where() { return {rounded.data(), lower.data()}; }
    std::vector<float> values() const { return HostFloats<X>(rounded.values(), lower.values()).values(); }
};
}  // namespace CUDA_BACKEND
