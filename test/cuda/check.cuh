// For the tests of kernels, which g++ compiles for the emulator and nvcc for a GPU.
#pragma once
#include "../../llmc/core/memory.cuh"
#include "../check.h"

using CudaDevices = testing::Types<CudaF32, CudaBf16>;

#ifdef LLMC_EMULATE
// Runs the body with a stream that runs concurrently with others, in an order drawn from the seed.
template <class Dev, class Body> void in_random_order(unsigned seed, Body body) {
    SCOPED_TRACE(format("threads and streams in order %u", seed));
    const RandomStreams streams(seed);
    const CudaStream stream;
    cudaStream_t(stream)->order = seed;
    body(Dev{stream, nullptr});
    if (const cudaError_t error = cudaDeviceSynchronize()) die("%s", cudaGetErrorString(error));
}
#endif

// Runs the body once for each order of threads; once on a GPU. A failed EXPECT_... names its order.
template <class Dev, class Body> void for_each_order(Body body) {
#ifdef LLMC_EMULATE
    for (const unsigned order : {0, 1}) {
        SCOPED_TRACE(format("threads in order %u", order));
        CUstream_st stream{order};
        body(Dev{&stream, nullptr});
    }
    in_random_order<Dev>(20260, body);
#else
    body(Dev{});
#endif
}

// For code with several streams: runs the body in the orders of streams [first, last); once on a GPU.
template <class Dev, class Body>
void for_each_order_of_streams(Body body, [[maybe_unused]] unsigned first = 2, [[maybe_unused]] unsigned last = 8) {
#ifdef LLMC_EMULATE
    for (unsigned seed = first; seed < last; seed++) in_random_order<Dev>(seed, body);
#else
    const CudaStream stream;
    body(Dev{stream, nullptr});
#endif
}

inline namespace CUDA_BACKEND {
// An array in device memory: a copy of a vector, or full of NaN. values() copies it to the host.
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
        check(cudaDeviceSynchronize());  // before non-blocking streams access it
    }
    explicit DeviceArray(const std::vector<T> &v) : DeviceArray(v.size()) {
        check(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());  // cudaMemcpy may return before the copy has ended
    }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;
    ~DeviceArray() { cudaFree(p); }

    operator T *() { return p; }
    T *data() { return p; }
    size_t size() const { return n; }
    std::vector<T> values() const {
        std::vector<T> out(n);
        check(cudaDeviceSynchronize());  // non-blocking streams may still write to it
        check(cudaMemcpy(out.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return out;
    }
};

// The arrays of Floats<X> in device memory.
template <class X> struct DeviceFloats {
    DeviceArray<X> rounded;
    DeviceArray<int16_t> lower;

    explicit DeviceFloats(const HostFloats<X> &host) : rounded(host.rounded), lower(host.lower) {}
    explicit DeviceFloats(const std::vector<float> &values) : DeviceFloats(HostFloats<X>(values)) {}

    Floats<X> where() { return {rounded.data(), lower.data()}; }
    std::vector<float> values() const { return HostFloats<X>(rounded.values(), lower.values()).values(); }
};
}  // namespace CUDA_BACKEND
