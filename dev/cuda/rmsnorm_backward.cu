// rmsnorm_backward: with g = dout * w and xh = x * rstd                                           Contract: llmc/ops/rmsnorm.h
//     dx[t,c] = dresidual[t,c] + rstd[t] * (g - xh * mean_c(g * xh))          dw[c] += sum_t dout[t,c] * xh[t,c]
//
// Timed with T 8192, C 4096 in bf16. dx needs a sum over a row and dw a sum over a column, so every division of the work splits one of
// the two sums. The op reads at least x, dout and dresidual and writes dx: 4 T C elements. Float atomics would sum dw in a different
// order in each run.
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../test/reference_rmsnorm.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// Returns element i = (t, c) of dx; mean is mean_c(g * xh) of row t.
template <class X>
__device__ float dx_element(const X *dresidual, const X *dout, const X *x, const X *w, float rstd, float mean, size_t i,
                            size_t c) {
    return float(dresidual[i]) + rstd * (float(dout[i]) * float(w[c]) - float(x[i]) * rstd * mean);
}

// ---- version 1: a thread per row for dx, a thread per column for dw ------------------------------------------------------------
//
// The two loops of the CPU as two kernels; threads share no sum. For dx neighbouring threads read addresses a row apart (rmsnorm_forward 1).
// For dw they read neighbouring columns, but C threads are too few to keep the memory busy. x and dout are read three times: 8 T C elements.

template <class X>
__global__ void rmsnorm_dx_kernel1(X *dx, const X *dresidual, const X *dout, const X *x, const X *w, const float *rstd, size_t T,
                                   size_t C) {
    const size_t t = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (t >= T) return;
    float dot = 0;
    for (size_t c = 0; c < C; c++) dot += float(dout[t * C + c]) * float(w[c]) * float(x[t * C + c]);
    const float mean = dot * rstd[t] / float(C);
    for (size_t c = 0; c < C; c++) dx[t * C + c] = dx_element(dresidual, dout, x, w, rstd[t], mean, t * C + c, c);
}

template <class X>
__global__ void rmsnorm_dw_kernel1(float *dw, const X *dout, const X *x, const float *rstd, size_t T, size_t C) {
    const size_t c = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (c >= C) return;
    float sum = 0;
    for (size_t t = 0; t < T; t++) sum += float(dout[t * C + c]) * float(x[t * C + c]) * rstd[t];
    dw[c] += sum;
}

template <class X>
void rmsnorm_backward1(Cuda<X> dev, X *dx, float *dw, float *, const X *dresidual, const X *dout, const X *x, const X *w,
                       const float *rstd, size_t T, size_t C) {
    launch(dev, rmsnorm_dw_kernel1<X>, Grid{ceil_div(C, 128)}, 128, 0, dw, dout, x, rstd, T, C);  // first: dx may overwrite dout
    launch(dev, rmsnorm_dx_kernel1<X>, Grid{ceil_div(T, 128)}, 128, 0, dx, dresidual, dout, x, w, rstd, T, C);
}

// ---- version 2: a warp per row for dx, the warps of a block share the rows for dw ----------------------------------------------
//
// dx works as in rmsnorm_forward 3. For dw a block has 32 columns, and each of its 8 warps every eighth row; shared memory joins their
// sums. There are eight times as many threads, but still only C / 32 blocks: 128 at C 4096, less than one per SM of a large GPU.

constexpr unsigned row_warps = 4;  // rows per block

template <class X>
__global__ void rmsnorm_dx_kernel2(X *dx, const X *dresidual, const X *dout, const X *x, const X *w, const float *rstd, size_t T,
                                   size_t C) {
    const size_t t = blockIdx.x * size_t(row_warps) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= T) return;
    float dot = 0;
    for (size_t c = lane; c < C; c += 32) dot += float(dout[t * C + c]) * float(w[c]) * float(x[t * C + c]);
    const float mean = warp_sum(dot) * rstd[t] / float(C);
    for (size_t c = lane; c < C; c += 32) dx[t * C + c] = dx_element(dresidual, dout, x, w, rstd[t], mean, t * C + c, c);
}

constexpr unsigned column_warps = 8;
struct Columns {
    float sum[column_warps][32];
};

template <class X>
__global__ void rmsnorm_dw_kernel2(float *dw, const X *dout, const X *x, const float *rstd, size_t T, size_t C) {
    Columns &columns = shared_mem<Columns>();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t c = blockIdx.x * size_t(32) + lane;
    float sum = 0;
    if (c < C)
        for (size_t t = warp; t < T; t += column_warps) sum += float(dout[t * C + c]) * float(x[t * C + c]) * rstd[t];
    columns.sum[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (unsigned i = 1; i < column_warps; i++) sum += columns.sum[i][lane];
    dw[c] += sum;
}

template <class X>
void rmsnorm_backward2(Cuda<X> dev, X *dx, float *dw, float *, const X *dresidual, const X *dout, const X *x, const X *w,
                       const float *rstd, size_t T, size_t C) {
    launch(dev, rmsnorm_dw_kernel2<X>, Grid{ceil_div(C, 32)}, column_warps * 32, sizeof(Columns), dw, dout, x, rstd, T, C);
    launch(dev, rmsnorm_dx_kernel2<X>, Grid{ceil_div(T, row_warps)}, row_warps * 32, 0, dx, dresidual, dout, x, w, rstd, T, C);
}

// ---- version 3: the rows are cut into runs, too --------------------------------------------------------------------------------
//
// The second dimension of the grid divides the rows into runs. A block writes one partial sum per run and column, and a small kernel
// adds the partial sums in a fixed order. This is a sum across blocks without atomics: 64 runs give 64 times as many blocks, for
// 2 * 64 C more floats to move. x and dout are still read three times.

constexpr size_t dw_runs = 64;

template <class X>
__global__ void rmsnorm_dw_kernel3(float *parts, const X *dout, const X *x, const float *rstd, size_t T, size_t C) {
    const size_t c = blockIdx.x * size_t(blockDim.x) + threadIdx.x, begin = T * blockIdx.y / gridDim.y,
                 end = T * (blockIdx.y + 1) / gridDim.y;
    if (c >= C) return;
    float sum = 0;
    for (size_t t = begin; t < end; t++) sum += float(dout[t * C + c]) * float(x[t * C + c]) * rstd[t];
    parts[blockIdx.y * C + c] = sum;
}

template <class X>
void rmsnorm_backward3(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                       const float *rstd, size_t T, size_t C) {
    launch(dev, rmsnorm_dw_kernel3<X>, Grid{ceil_div(C, 128), dw_runs}, 128, 0, scratch, dout, x, rstd, T, C);
    norm_add_runs(dev, dw, scratch, dw_runs, C);
    launch(dev, rmsnorm_dx_kernel2<X>, Grid{ceil_div(T, row_warps)}, row_warps * 32, 0, dx, dresidual, dout, x, w, rstd, T, C);
}

// ---- version 4: dx and dw in one kernel ----------------------------------------------------------------------------------------
//
// A warp loads a row for dx, and adds the row's terms of dw to its own sums in shared memory, C floats per warp, so warps need no
// barrier until the end. A block processes a run of rows and writes one partial sum per column. x and dout are read once from memory
// and once from cache: 4 T C elements, and the partial sums.

template <class X>
__global__ void rmsnorm_backward_kernel4(X *dx, float *parts, const X *dresidual, const X *dout, const X *x, const X *w,
                                         const float *rstd, size_t T, size_t C) {
    float *dw = &shared_mem<float>();  // (warps, C)
    const size_t warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    norm_clear(dw, warps * C);
    for (size_t t = begin + warp; t < end; t += warps) {
        float dot = 0;
        for (size_t c = lane; c < C; c += 32) dot += float(dout[t * C + c]) * float(w[c]) * float(x[t * C + c]);
        const float mean = warp_sum(dot) * rstd[t] / float(C);
        for (size_t c = lane; c < C; c += 32) {
            dw[warp * C + c] += float(dout[t * C + c]) * float(x[t * C + c]) * rstd[t];
            dx[t * C + c] = dx_element(dresidual, dout, x, w, rstd[t], mean, t * C + c, c);
        }
    }
    norm_sum_parts(parts + blockIdx.x * C, dw, warps, C);
}

template <class X>
void rmsnorm_backward4(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                       const float *rstd, size_t T, size_t C) {
    const size_t warps = norm_warps(96 << 10, C * sizeof(float)), blocks = std::min(norm_blocks, ceil_div(T, warps));
    launch(dev, rmsnorm_backward_kernel4<X>, Grid{blocks}, unsigned(warps * 32), warps * C * sizeof(float), dx, scratch,
           dresidual, dout, x, w, rstd, T, C);
    norm_add_runs(dev, dw, scratch, blocks, C);
}

// ---- version 5: 16 bytes per load ----------------------------------------------------------------------------------------------
//
// Version 4 with 16-byte loads and stores, also for the sums in shared memory. With C floats per warp an SM runs only 12 warps. This
// version is shipped for rows of more than 8192 elements: rmsnorm_backward_any in llmc/ops/rmsnorm.cuh.

template <class X>
void rmsnorm_backward5(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                       const float *rstd, size_t T, size_t C) {
    rmsnorm_backward_any(dev, dx, dw, scratch, dresidual, dout, x, w, rstd, NormShape{T, C, 0});
}

// ---- version 6: llmc/ops/rmsnorm.cuh -------------------------------------------------------------------------------------------
//
// Several warps share a row. A lane has the same two vectors of every row, so its sums of dw stay in registers, and so do its elements
// of the row: x and dout are read once. The price is a barrier for each row. norm_add_runs takes 8 of the 90 us on an H200.

template <class X>
void rmsnorm_backward6(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x, const X *w,
                       const float *rstd, size_t T, size_t C) {
    rmsnorm_backward(dev, dx, dw, scratch, dresidual, dout, x, w, rstd, NormShape{T, C, 0});
}

template <class X> struct RmsnormBackward {
    static constexpr double eps = 0.125;
    size_t T, C;
    std::vector<X> x, w, dout, dresidual;
    std::vector<float> rstd;
    DeviceArray<X> d_x, d_w, d_dout, d_dresidual, dx;
    DeviceArray<float> d_rstd, dw, scratch;

    explicit RmsnormBackward(const Sizes &s)
        : T(s[0]),
          C(s[1]),
          x(random_values<X>(T * C, 1)),
          w(random_values<X>(C, 2, 0.1, 1)),
          dout(random_values<X>(T * C, 3)),
          dresidual(random_values<X>(T * C, 4)),
          rstd(rmsnorm_rstd(widen(x), T, C, eps)),
          d_x(x),
          d_w(w),
          d_dout(dout),
          d_dresidual(dresidual),
          dx(T * C),
          d_rstd(rstd),
          dw(std::vector<float>(C, 3)),
          scratch(rmsnorm_scratch(Cuda<X>{}, C)) {}

    static constexpr void (*versions[])(Cuda<X>, X *dx, float *dw, float *scratch, const X *dresidual, const X *dout, const X *x,
                                        const X *w, const float *rstd, size_t T, size_t C) = {
        rmsnorm_backward1, rmsnorm_backward2, rmsnorm_backward3, rmsnorm_backward4, rmsnorm_backward5, rmsnorm_backward6};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, dx.data(), dw.data(), scratch.data(), d_dresidual.data(), d_dout.data(), d_x.data(),
                              d_w.data(), d_rstd.data(), T, C);
    }

    void check(Check &check) const {
        RmsNormGradient want = rmsnorm_backward_reference(widen(dout), widen(x), widen(w), T, C, eps);
        for (size_t i = 0; i < T * C; i++) want.dx[i] += double(float(dresidual[i]));
        check("dx", dx.values(), want.dx, rmsnorm_error<X>(C, want.dx));
        const double sum_error = rmsnorm_dw_error(T, C, want);
        for (double &d : want.dw) d += 3;
        check("dw", dw.values(), want.dw, sum_error + 2 * unit_roundoff<float> * largest(want.dw));
    }

    Work work() const { return {.bytes = 4.0 * double(T) * double(C) * sizeof(X)}; }
};

static const Ladder<RmsnormBackward, float, bf16> ladder(
    {.name = "rmsnorm_backward",
     .sizes = {{"T", "tokens", 8192, 256}, {"C", "channels", 4096, 4096}},
     .checked = {{1, 8}, {7, 77}, {130, 24}, {5, 1032}},
     .ideas = {"a thread per row for dx, a thread per column for dw", "a warp per row, 8 warps per 32 columns",
               "runs of rows, partial sums of dw", "dx and dw in one kernel, dw in shared memory", "16 bytes per load",
               "shipped: several warps per row"}});
}  // namespace CUDA_BACKEND::workshop
