// squared_norm = sum_i x[i]^2, in double, the global norm of the gradients                          Contract: llmc/ops/reduce.h
//
// Timed with 2^26 floats. The op reads 4 n bytes, and these should determine the time. The order of the sum must depend only on n, so
// that runs are reproducible bit for bit; this excludes atomics. (Sums are double, because n float terms lose log2(n) bits. On a GPU
// with few units for double, an add and a multiply for each 4 bytes are another limit.)
#include "../../llmc/ops/reduce.cuh"
#include "common.h"

namespace CUDA_BACKEND::workshop {

constexpr unsigned tree_threads = 512;
struct Tree {
    double sum[tree_threads];
};

// Returns the sum over the block in thread 0. Each level of the tree halves the working threads, and all threads wait at its barrier.
__device__ inline double tree_sum(double v, double *sum) {
    sum[threadIdx.x] = v;
    for (unsigned half = tree_threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sum[threadIdx.x] += sum[threadIdx.x + half];
    }
    return sum[threadIdx.x];
}

inline double fetch(Cuda<float> dev, const double *from) {  // after waiting for the stream
    double out;
    cudaError_t error = cudaMemcpyAsync(&out, from, sizeof out, cudaMemcpyDeviceToHost, dev.stream);
    if (!error) error = cudaStreamSynchronize(dev.stream);
    if (error) die("%s", cudaGetErrorString(error));
    return out;
}

// ---- version 1: one block ------------------------------------------------------------------------------------------------------
//
// Each thread adds every 512th element, and a tree adds the 512 sums. Neighbouring threads read neighbouring elements, but only one SM
// works, so only the loads of one SM are in flight.

__global__ void squared_norm_kernel1(double *out, const float *x, size_t n) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += tree_threads) sum += double(x[i]) * double(x[i]);
    sum = tree_sum(sum, shared_mem<Tree>().sum);
    if (threadIdx.x == 0) out[0] = sum;
}

inline double squared_norm1(Cuda<float> dev, double *scratch, const float *x, size_t n) {
    launch(dev, squared_norm_kernel1, Grid{1}, tree_threads, sizeof(Tree), scratch, x, n);
    return fetch(dev, scratch);
}

// ---- version 2: two kernels ----------------------------------------------------------------------------------------------------
//
// A block for each part of 65536 elements writes its sum to scratch; then one block adds the parts. The size of a part is fixed and
// does not depend on the number of SMs, so every GPU gives the same bits. All SMs load data, but the small blocks spend part of their
// time in the tree.

__global__ void squared_norm_kernel2(double *parts, const float *x, size_t n) {
    const size_t begin = blockIdx.x * squared_norm_part, end = min(n, begin + squared_norm_part);
    double sum = 0;
    for (size_t i = begin + threadIdx.x; i < end; i += tree_threads) sum += double(x[i]) * double(x[i]);
    sum = tree_sum(sum, shared_mem<Tree>().sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void sum_parts_kernel2(double *parts, size_t n) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < n; i += tree_threads) sum += parts[i];
    sum = tree_sum(sum, shared_mem<Tree>().sum);
    if (threadIdx.x == 0) parts[0] = sum;
}

inline double squared_norm2(Cuda<float> dev, double *scratch, const float *x, size_t n) {
    const size_t parts = squared_norm_scratch(n);
    launch(dev, squared_norm_kernel2, Grid{parts}, tree_threads, sizeof(Tree), scratch, x, n);
    launch(dev, sum_parts_kernel2, Grid{1}, tree_threads, sizeof(Tree), scratch, parts);
    return fetch(dev, scratch);
}

// ---- version 3: shuffles instead of the tree -----------------------------------------------------------------------------------
//
// Within a warp, shuffles move values from register to register (warp_sum). Only the sums of the 16 warps go through shared memory,
// with 2 barriers instead of 9.

__global__ void squared_norm_kernel3(double *parts, const float *x, size_t n) {
    const size_t begin = blockIdx.x * squared_norm_part, end = min(n, begin + squared_norm_part);
    double sum = 0;
    for (size_t i = begin + threadIdx.x; i < end; i += blockDim.x) sum += double(x[i]) * double(x[i]);
    sum = block_sum(sum, shared_mem<WarpSums<double>>().partial);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

inline double squared_norm3(Cuda<float> dev, double *scratch, const float *x, size_t n) {
    const size_t parts = squared_norm_scratch(n);
    launch(dev, squared_norm_kernel3, Grid{parts}, 512, sizeof(WarpSums<double>), scratch, x, n);
    launch(dev, sum_parts_kernel3<double>, Grid{1}, 512, sizeof(WarpSums<double>), scratch, scratch, parts, false);
    return fetch(dev, scratch);
}

// ---- version 4: llmc/ops/reduce.cuh --------------------------------------------------------------------------------------------
//
// Loads have 16 bytes, so there are a quarter as many. The memory bandwidth is the limit; for small n the limit is the time of two launches
// and of the wait for the result.

template <class X> struct SquaredNorm {
    size_t n;
    std::vector<float> x;
    DeviceArray<float> d_x;
    DeviceArray<double> scratch;
    double sum = NAN;

    explicit SquaredNorm(const Sizes &s) : n(s[0]), x(random_values<float>(n, 1)), d_x(x), scratch(squared_norm_scratch(n)) {}

    static constexpr double (*versions[])(Cuda<float>, double *scratch, const float *x, size_t n) = {squared_norm1, squared_norm2,
                                                                                                     squared_norm3, squared_norm};

    void run(Cuda<X> dev, size_t version) { sum = versions[version - 1](dev, scratch.data(), d_x.data(), n); }

    // The squares of floats are exact in double; n 2^-53 bounds the error of a sum of n positive terms in any order.
    void check(Check &check) const {
        double want = 0;
        for (float v : x) want += double(v) * double(v);
        check("sum", std::vector<double>{sum}, std::vector<double>{want}, 2 * double(n + 1) * 0x1p-53 * want);
    }

    Work work() const { return {.bytes = 4.0 * double(n)}; }
};

static const Ladder<SquaredNorm, float> ladder({.name = "reduce",
                                                .sizes = {{"n", "floats", size_t(1) << 26, size_t(1) << 21}},
                                                .checked = {{1}, {1003}, {2 * squared_norm_part}, {3 * squared_norm_part + 17}},
                                                .ideas = {"one block, a tree in shared memory", "partial sums, then their sum",
                                                          "shuffles instead of the tree", "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
