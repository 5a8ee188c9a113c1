// Timings of the workshop on a GPU, and the rates of a copy and of a product, to which all others are compared. Only nvcc compiles this file.
#include <cuda_profiler_api.h>

#include <chrono>

#include "../../test/cuda/matmul_context.cuh"
#include "common.h"

namespace CUDA_BACKEND::workshop {
static void must(cudaError_t error, const char *what) {
    if (error) die("%s: %s", what, cudaGetErrorString(error));
}

// Reads everything and writes nothing, so that no cache line must be written back during the next timed kernel.
__global__ void read_kernel1(uint4 *bytes, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * size_t(blockDim.x)) {
        const uint4 v = bytes[i];
        if (v.x == 1 && v.y == 2 && v.z == 3 && v.w == 4) bytes[i] = {};  // never: all are NaN
    }
}

struct Stopwatch {
    cudaEvent_t begin, end;
    Stopwatch() {
        must(cudaEventCreate(&begin), "an event");
        must(cudaEventCreate(&end), "an event");
    }
    ~Stopwatch() {
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
    }
    double operator()(const std::function<void()> &run) {
        must(cudaEventRecord(begin), "the start of a run");
        run();
        must(cudaEventRecord(end), "the end of a run");
        must(cudaEventSynchronize(end), "a timed run");
        float milliseconds;
        must(cudaEventElapsedTime(&milliseconds, begin, end), "the time of a run");
        return milliseconds * 1e-3;
    }
};

struct ThisGpu : Gpu {
    static constexpr size_t large = size_t(512) << 20;  // bytes: several times any L2 cache

    ThisGpu() { the_gpu = this; }

    std::string name() const override {
        int count;
        cudaDeviceProp properties;
        if (cudaGetDeviceCount(&count) || count == 0 || cudaGetDeviceProperties(&properties, 0)) return "";
        return properties.name;
    }

    Seconds time(const std::function<void()> &run) const override {
        using std::chrono::steady_clock;
        constexpr size_t warm_up = 3, runs = 31, least_runs = 3;
        constexpr auto until_clocks_are_up = std::chrono::milliseconds(50);  // after the GPU was idle
        constexpr auto long_enough = std::chrono::seconds(1);                // for the slow first versions of a ladder
        DeviceArray<uint4> other(large / sizeof(uint4));
        Stopwatch stopwatch;
        const auto cold = [&] {
            launch(Cuda<float>{}, read_kernel1, Grid{2048}, 256, 0, other.data(), other.size());
            return stopwatch(run);
        };
        const auto start = steady_clock::now();
        const auto elapsed = [&] { return steady_clock::now() - start; };
        for (size_t i = 0; (i < warm_up && elapsed() < long_enough) || elapsed() < until_clocks_are_up; i++) cold();
        std::vector<double> seconds;
        while (seconds.size() < runs && (seconds.size() < least_runs || elapsed() < long_enough)) seconds.push_back(cold());
        std::sort(seconds.begin(), seconds.end());

        // `ncu --profile-from-start off` profiles only this run.
        must(cudaProfilerStart(), "the profiler's start");
        run();
        must(cudaProfilerStop(), "the profiler's end");
        return {seconds[seconds.size() / 2], seconds[0]};
    }

    double copied_per_second() const override {
        DeviceArray<char> from(large), to(large);
        const auto copy = [&] { must(cudaMemcpyAsync(to.data(), from.data(), large, cudaMemcpyDeviceToDevice), "a copy"); };
        return 2.0 * double(large) / time(copy).median;
    }

    double multiplied_per_second() const override {
        constexpr size_t n = 8192;
        const MatmulContext context;
        std::vector<bf16> values = random_values<bf16>(1 << 20, 1);  // random values, because zeros take less power
        while (values.size() < n * n) values.insert(values.end(), values.begin(), values.begin() + (1 << 20));
        DeviceArray<bf16> x(values), w(values), out(n * n);
        const bf16 *no_bias = nullptr;
        const auto multiply = [&] {
            matmul_forward(CudaBf16{nullptr, context.get()}, out.data(), x.data(), w.data(), no_bias, n, n, n);
        };
        return 2.0 * n * n * n / time(multiply).median;
    }
};
static const ThisGpu this_gpu;
}  // namespace CUDA_BACKEND::workshop
