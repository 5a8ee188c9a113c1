// rmsnorm_forward: out[t,c] = x[t,c] * rstd[t] * w[c] with rstd[t] = 1 / sqrt(mean_c x[t,c]^2 + eps).  Contract: llmc/ops/rmsnorm.h
//
// Timed with T 8192, C 4096 in bf16. The op has a few FLOP per element, so two things matter: each byte of x and out crosses the bus
// once, 2 T C elements, and enough bytes are in flight at any time.
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../test/reference_rmsnorm.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a thread per row -----------------------------------------------------------------------------------------------
//
// The loop of the CPU, in T threads. Neighbouring threads read addresses a row apart, so each load of a warp touches 32 lines of 128
// bytes and uses 2 bytes of each. The next loads from these lines hit L1 as long as L1 has room for 32 lines of each warp of its SM,
// but each load still costs 32 sectors. And T threads are few: 8192 of the 270 000 that a large GPU can hold.

template <class X>
__global__ void rmsnorm_forward_kernel1(X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    const size_t t = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (t >= T) return;
    float squares = 0;
    for (size_t c = 0; c < C; c++) squares += float(x[t * C + c]) * float(x[t * C + c]);
    const float r = rsqrtf(squares / float(C) + eps);
    for (size_t c = 0; c < C; c++) out[t * C + c] = float(x[t * C + c]) * r * float(w[c]);
    rstd[t] = r;
}

template <class X>
void rmsnorm_forward1(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    launch(dev, rmsnorm_forward_kernel1<X>, Grid{ceil_div(T, 128)}, 128, 0, out, rstd, x, w, T, C, eps);
}

// ---- version 2: a block per row ------------------------------------------------------------------------------------------------
//
// Neighbouring threads read neighbouring elements, so a warp's load is contiguous. The price is a sum over threads with a tree in
// shared memory. Each level ends with a barrier, 8 barriers for 256 threads, and no data is loaded during the
// sum.

constexpr unsigned tree_threads = 256;
struct Tree {
    float sum[tree_threads];
};

template <class X> __global__ void rmsnorm_forward_kernel2(X *out, float *rstd, const X *x, const X *w, size_t C, float eps) {
    float *sum = shared_mem<Tree>().sum;
    const size_t t = blockIdx.x;
    float squares = 0;
    for (size_t c = threadIdx.x; c < C; c += tree_threads) squares += float(x[t * C + c]) * float(x[t * C + c]);
    sum[threadIdx.x] = squares;
    for (unsigned half = tree_threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sum[threadIdx.x] += sum[threadIdx.x + half];
    }
    __syncthreads();
    const float r = rsqrtf(sum[0] / float(C) + eps);
    for (size_t c = threadIdx.x; c < C; c += tree_threads) out[t * C + c] = float(x[t * C + c]) * r * float(w[c]);
    if (threadIdx.x == 0) rstd[t] = r;
}

template <class X>
void rmsnorm_forward2(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    launch(dev, rmsnorm_forward_kernel2<X>, Grid{T}, tree_threads, sizeof(Tree), out, rstd, x, w, C, eps);
}

// ---- version 3: a warp per row -------------------------------------------------------------------------------------------------
//
// The lanes of a warp exchange values without shared memory or a barrier (warp_sum, 5 shuffles), and during the sum of one warp the
// other warps of the SM load. As in version 2, x is read twice, the second time from L2 if it is still there.

constexpr unsigned row_warps = 4;  // rows per block

template <class X>
__global__ void rmsnorm_forward_kernel3(X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) return;
    float squares = 0;
    for (size_t c = lane; c < C; c += 32) squares += float(x[t * C + c]) * float(x[t * C + c]);
    const float r = rsqrtf(warp_sum(squares) / float(C) + eps);
    for (size_t c = lane; c < C; c += 32) out[t * C + c] = float(x[t * C + c]) * r * float(w[c]);
    if (lane == 0) rstd[t] = r;
}

template <class X>
void rmsnorm_forward3(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    launch(dev, rmsnorm_forward_kernel3<X>, Grid{ceil_div(T, row_warps)}, row_warps * 32, 0, out, rstd, x, w, T, C, eps);
}

// ---- version 4: 16 bytes per load ----------------------------------------------------------------------------------------------
//
// With 2 bytes per lane a load instruction of a warp reads 64 bytes, half a line. With Vec a lane loads 16 bytes and a warp 512: an
// eighth of the instructions for the same bytes, so eight times as many bytes are in flight. Rows whose size or start is not a multiple
// of 16 bytes use N = 1.

template <class X, int N>
__global__ void rmsnorm_forward_kernel4(X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) return;
    float squares = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto v = Vec<X, N>::load(x + t * C + c);
        for (int i = 0; i < N; i++) squares += float(v[i]) * float(v[i]);
    }
    const float r = rsqrtf(warp_sum(squares) / float(C) + eps);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(x + t * C + c);
        const auto weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) v[i] = float(v[i]) * r * float(weight[i]);
        v.store(out + t * C + c);
    }
    if (lane == 0) rstd[t] = r;
}

template <class X>
void rmsnorm_forward4(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    constexpr int N = Vec<X>::size;
    launch(dev, fit_vectors<N>(C, out, x, w) ? rmsnorm_forward_kernel4<X, N> : rmsnorm_forward_kernel4<X, 1>,
           Grid{ceil_div(T, row_warps)}, row_warps * 32, 0, out, rstd, x, w, T, C, eps);
}

// ---- version 5: the row waits in shared memory ---------------------------------------------------------------------------------
//
// Lanes keep the row in shared memory until rstd is known, so x is read once, independent of the cache. A lane reads only its own stores, so there is
// still no barrier. But the rows of a block's warps fill the shared memory: 48 KB for 6 rows of 4096, so an SM has room for four such blocks.

template <class X, int N>
__global__ void rmsnorm_forward_kernel5(X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    const size_t warp = threadIdx.x / 32, t = blockIdx.x * size_t(blockDim.x / 32) + warp, lane = threadIdx.x % 32;
    if (t >= T) return;
    X *row = &shared_mem<X>() + warp * C;
    float squares = 0;
    for (size_t c = lane * N; c < C; c += 32 * N) {
        const auto v = Vec<X, N>::load(x + t * C + c);
        v.store(row + c);
        for (int i = 0; i < N; i++) squares += float(v[i]) * float(v[i]);
    }
    const float r = rsqrtf(warp_sum(squares) / float(C) + eps);
    for (size_t c = lane * N; c < C; c += 32 * N) {
        auto v = Vec<X, N>::load(row + c);
        const auto weight = Vec<X, N>::load(w + c);
        for (int i = 0; i < N; i++) v[i] = float(v[i]) * r * float(weight[i]);
        v.store(out + t * C + c);
    }
    if (lane == 0) rstd[t] = r;
}

template <class X>
void rmsnorm_forward5(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    constexpr int N = Vec<X>::size;
    const size_t warps = std::clamp<size_t>((48 << 10) / (C * sizeof(X)), 1, 8);
    launch(dev, fit_vectors<N>(C, out, x, w) ? rmsnorm_forward_kernel5<X, N> : rmsnorm_forward_kernel5<X, 1>,
           Grid{ceil_div(T, warps)}, unsigned(warps * 32), warps * C * sizeof(X), out, rstd, x, w, T, C, eps);
}

// ---- version 6: llmc/ops/rmsnorm.cuh -------------------------------------------------------------------------------------------
//
// Several warps share a row, and each lane has about two vectors of it. All bytes of the row are in flight at once, a block has one row
// instead of six, and eight blocks fit on an SM. The price is a barrier. The same kernel adds the residual.

template <class X>
void rmsnorm_forward6(Cuda<X> dev, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) {
    rmsnorm_forward(dev, out, rstd, x, w, NormShape{T, C, eps});
}

template <class X> struct RmsnormForward {
    static constexpr double eps = 0.125;  // large enough to reveal a kernel that omits it
    size_t T, C;
    std::vector<X> x, w;
    DeviceArray<X> d_x, d_w, out;
    DeviceArray<float> rstd;

    explicit RmsnormForward(const Sizes &s)
        : T(s[0]),
          C(s[1]),
          x(random_values<X>(T * C, 1)),
          w(random_values<X>(C, 2, 0.1, 1)),
          d_x(x),
          d_w(w),
          out(T * C),
          rstd(T) {}

    static constexpr void (*versions[])(Cuda<X>, X *out, float *rstd, const X *x, const X *w, size_t T, size_t C, float eps) = {
        rmsnorm_forward1, rmsnorm_forward2, rmsnorm_forward3, rmsnorm_forward4, rmsnorm_forward5, rmsnorm_forward6};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, out.data(), rstd.data(), d_x.data(), d_w.data(), T, C, float(eps));
    }

    void check(Check &check) const {
        const std::vector<double> want = rmsnorm_reference(widen(x), widen(w), T, C, eps);
        check("out", out.values(), want, rmsnorm_error<X>(C, want));
        const std::vector<float> want_rstd = rmsnorm_rstd(widen(x), T, C, eps);
        check("rstd", rstd.values(), want_rstd, rmsnorm_error<float>(C, widen(want_rstd)));
    }

    Work work() const { return {.bytes = 2.0 * double(T) * double(C) * sizeof(X)}; }
};

static const Ladder<RmsnormForward, float, bf16> ladder(
    {.name = "rmsnorm_forward",
     .sizes = {{"T", "tokens", 8192, 256}, {"C", "channels", 4096, 4096}},
     .checked = {{1, 8}, {7, 77}, {130, 24}, {5, 1032}},
     .ideas = {"a thread per row", "a block per row, a tree of sums in shared memory", "a warp per row, sums by shuffles",
               "16 bytes per load", "the row is kept in shared memory, x is read once", "shipped: several warps per row"}});
}  // namespace CUDA_BACKEND::workshop
