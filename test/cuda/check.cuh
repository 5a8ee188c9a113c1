// What the tests of kernels share. They are compiled by g++ for the emulator and by nvcc for a GPU.
#pragma once
#include "../../llmc/core/memory.cuh"
#include "../check.h"

using CudaDevices = testing::Types<CudaF32, CudaBf16>;

#ifdef LLMC_EMULATE
// Runs the body with a stream that runs beside others, in an order by the seed.
template <class Dev, class Body> void in_random_order(unsigned seed, Body body) {
    SCOPED_TRACE(format("threads and streams in order %u", seed));
    const RandomStreams streams(seed);
    const CudaStream stream;
    cudaStream_t(stream)->order = seed;
    body(Dev{stream, nullptr});
    if (const cudaError_t error = cudaDeviceSynchronize()) die("%s", cudaGetErrorString(error));
}
#endif

// Runs the body once per order of threads; on a GPU once. EXPECT_... inside it say which order failed.
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

// For code with several streams: runs the body in the orders of streams [first, last); on a GPU once.
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
        check(cudaDeviceSynchronize());  // before streams that do not block touch it
    }
    explicit DeviceArray(const std::vector<T> &v) : DeviceArray(v.size()) {
        check(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());  // cudaMemcpy returns when it has read v
    }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;
    ~DeviceArray() { cudaFree(p); }

    operator T *() { return p; }
    T *data() { return p; }
    size_t size() const { return n; }
    std::vector<T> values() const {
        std::vector<T> out(n);
        check(cudaDeviceSynchronize());  // a stream that does not block has other work, too
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
