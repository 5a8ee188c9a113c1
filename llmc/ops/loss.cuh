// The head and its loss on CUDA. Contract, formulas and lm_head itself: loss.h.
#pragma once
#include "loss.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
// ---- rows of a chunk ----------------------------------------------------------------------------------------------------------

// One block computes row r: out[r] = x[rows[r]], and 0 from row n on.
template <class X, int N> __global__ void gather_rows_kernel2(X *out, const X *x, const int32_t *rows, size_t n, size_t C) {
    const size_t r = blockIdx.x;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) {
        Vec<X, N> v = {};
        if (r < n) v = Vec<X, N>::load(x + size_t(rows[r]) * C + c);
        v.store(out + r * C + c);
    }
}

template <class X> void gather_rows(Cuda<X> dev, X *out, const X *x, const int32_t *rows, size_t n, size_t padded, size_t C) {
    constexpr int N = Vec<X>::size;
    launch(dev, fit_vectors<N>(C, out, x) ? gather_rows_kernel2<X, N> : gather_rows_kernel2<X, 1>, Grid{padded}, 128, 0, out, x,
           rows, n, C);
}

// One block copies row r: out[rows[r]] = x[r].
template <class X, int N> __global__ void scatter_rows_kernel2(X *out, const X *x, const int32_t *rows, size_t C) {
    X *row = out + size_t(rows[blockIdx.x]) * C;
    for (size_t c = threadIdx.x * N; c < C; c += blockDim.x * N) Vec<X, N>::load(x + blockIdx.x * C + c).store(row + c);
}

template <class X> void scatter_rows(Cuda<X> dev, X *out, const X *x, const int32_t *rows, size_t n, size_t C) {
    constexpr int N = Vec<X>::size;
    launch(dev, fit_vectors<N>(C, out, x) ? scatter_rows_kernel2<X, N> : scatter_rows_kernel2<X, 1>, Grid{n}, 128, 0, out, x,
           rows, C);
}

// Two products read the head's weights, (V, C), once per chunk. With this many rows the reading takes less time than the products.
template <class X> constexpr size_t lm_head_bytes(Cuda<X>) { return size_t(256) << 20; }

// GPT-2 has 50257 tokens. Rows of so many logits would begin at addresses that are aligned to 2 bytes in bf16, for which libraries have only
// slow products or none, and which vectors cannot read. With 64 elements more or less they are aligned to 128 bytes, or 256 in float.
template <class X> constexpr size_t logits_ld(Cuda<X>, size_t V) { return round_up(V, 64); }

// ---- softmax, loss and gradient of a row --------------------------------------------------------------------------------------

// All rows are computed at the same time. So gradients in bf16 cannot overwrite the logits of other rows, as they do on the CPU.
template <class X> size_t dlogits_room(Cuda<X>, size_t rows, size_t ld) {
    return sizeof(X) == sizeof(float) ? 0 : round_up(rows * ld * sizeof(X), array_alignment);
}

// The statistics of a part of a row; `first` is the first index of its maximum.
struct SoftmaxPart {
    float max = -3.4e38f, sum = 0, dot = 0;  // sum_v e[v] and sum_v e[v] (logit[v] - max) with e[v] = exp(logit[v] - max)
    unsigned first = ~0u;
};

__device__ inline float entropy_of(const SoftmaxPart &row) {
    return float(log(double(row.sum)) - double(row.dot) / double(row.sum));
}

__device__ inline SoftmaxPart merge(const SoftmaxPart &a, const SoftmaxPart &b) {
    const float max = fmaxf(a.max, b.max), to_a = a.max - max, to_b = b.max - max, scale_a = expf(to_a), scale_b = expf(to_b);
    return {max, scale_a * a.sum + scale_b * b.sum, scale_a * (a.dot + a.sum * to_a) + scale_b * (b.dot + b.sum * to_b),
            b.max > a.max    ? b.first
            : b.max == a.max ? min(a.first, b.first)
                             : a.first};
}

__device__ inline SoftmaxPart warp_merge(SoftmaxPart part) {
    for (int distance = 16; distance > 0; distance /= 2)
        part = merge(part, {__shfl_xor_sync(all_lanes, part.max, distance), __shfl_xor_sync(all_lanes, part.sum, distance),
                            __shfl_xor_sync(all_lanes, part.dot, distance), __shfl_xor_sync(all_lanes, part.first, distance)});
    return part;
}

struct SoftmaxWarps {
    SoftmaxPart part[32];
};

// Returns the threads of a block that computes a row of V logits, of which a thread reads a vector at a time. So rows begin at multiples of a vector:
// logits_ld.
inline unsigned classifier_threads(size_t V) {
    return unsigned(std::min<size_t>(1024, round_up(ceil_div(V, size_t(Vec<float>::size)), 32)));
}

// Computes the gradients of the logits of the block's row r, which may overwrite them, and 0 for the padding up to ld. y is V or more if the
// target is outside this range.
template <class X>
__device__ void dlogits_row(X *dlogits, const float *logits, const HeadLoss &loss, size_t r, float max, float sum, float entropy,
                            size_t y, size_t V, size_t ld) {
    constexpr int N = Vec<float>::size;
    const float to_z = 1 / loss.temperature, weight = loss.weights[r] * to_z, scale = weight / sum;
    const float slope = loss.entropy_weight * to_z / sum, offset = entropy - logf(sum);  // log p + entropy = z - max + offset
    for (size_t v = threadIdx.x * N; v < ld; v += blockDim.x * N) {
        const auto l = Vec<float, N>::load(logits + v);
        Vec<X, N> d;
        for (int i = 0; i < N; i++) {
            const float shifted = l[i] * to_z - max, factor = slope == 0 ? scale : scale - slope * (shifted + offset);
            d[i] = v + i < V ? fmaf(expf(shifted), factor, v + i == y ? -weight : 0.0f) : 0.0f;
        }
        d.store(dlogits + v);
    }
}

// Clears the block's row of padding.
template <class X> __device__ void clear_row(X *dlogits, size_t ld) {
    constexpr int N = Vec<float>::size;
    for (size_t v = threadIdx.x * N; v < ld; v += blockDim.x * N) Vec<X, N>{}.store(dlogits + v);
}

// One block computes a row. It reads the logits twice: for maximum and sums together (Milakov and Gimelshein, 2018, arXiv:1805.02867), then
// for the gradients. Moves 8 V + V sizeof(X) bytes a row. dlogits may be the logits.
template <class X>
__global__ void __launch_bounds__(1024)
    fused_classifier_kernel4(HeadStats stats, X *dlogits, const float *logits, HeadLoss loss, size_t n, size_t V, size_t ld) {
    constexpr int N = Vec<float>::size;
    SoftmaxWarps &warps = shared_mem<SoftmaxWarps>();
    const size_t r = blockIdx.x;
    const float *row = logits + r * ld;
    if (r >= n) return clear_row<X>(dlogits + r * ld, ld);
    const unsigned y = unsigned(loss.targets[r]), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float to_z = 1 / loss.temperature, target = row[y] * to_z;

    SoftmaxPart part;
    for (size_t v = threadIdx.x * N; v < V; v += blockDim.x * N) {
        const auto l = Vec<float, N>::load(row + v);
        for (int i = 0; i < N; i++)
            if (v + i < V) part = merge(part, {l[i] * to_z, 1, 0, unsigned(v) + i});
    }
    part = warp_merge(part);
    if (lane == 0) warps.part[warp] = part;
    __syncthreads();
    part = warp_merge(lane < blockDim.x / 32 ? warps.part[lane] : SoftmaxPart{});
    part.sum = __shfl_sync(all_lanes, part.sum, 0);  // because with fma merge(a, b) and merge(b, a) may differ in the last bit
    part.dot = __shfl_sync(all_lanes, part.dot, 0);

    const float entropy = threadIdx.x == 0 || loss.entropy_weight != 0 ? entropy_of(part) : 0;
    if (threadIdx.x == 0) {
        stats.nll[r] = float(log(double(part.sum)) - (double(target) - double(part.max)));
        stats.entropy[r] = entropy;
        stats.correct[r] = part.first == y;
        stats.max[r] = part.max;
        stats.sum[r] = part.sum;
    }
    if (dlogits) dlogits_row<X>(dlogits + r * ld, row, loss, r, part.max, part.sum, entropy, y, V, ld);
}

template <class X>
void fused_classifier(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, HeadLoss loss, size_t n, size_t padded,
                      size_t V, size_t ld) {
    launch(dev, fused_classifier_kernel4<X>, Grid{dlogits ? padded : n}, classifier_threads(V), sizeof(SoftmaxWarps), stats,
           dlogits, logits, loss, n, V, ld);
}

// One block computes a row. It moves 4 + sizeof(X) bytes per logit.
template <class X>
__global__ void __launch_bounds__(1024) range_classifier_kernel1(X *dlogits, const float *logits, HeadLoss loss, HeadStats stats,
                                                                 size_t n, size_t first, size_t count, size_t ld) {
    const size_t r = blockIdx.x;
    if (r >= n) return clear_row<X>(dlogits + r * ld, ld);
    dlogits_row<X>(dlogits + r * ld, logits + r * ld, loss, r, stats.max[r], stats.sum[r], stats.entropy[r],
                   size_t(loss.targets[r]) - first, count, ld);
}

template <class X>
void range_classifier(Cuda<X> dev, X *dlogits, const float *logits, HeadLoss loss, HeadStats stats, size_t n, size_t padded,
                      size_t first, size_t count, size_t ld) {
    launch(dev, range_classifier_kernel1<X>, Grid{padded}, classifier_threads(count), 0, dlogits, logits, loss, stats, n, first,
           count, ld);
}

// One block sums all rows: thread i sums n = i, i + blockDim, ..., and then the block adds up its threads' sums.
template <class X> __global__ void __launch_bounds__(1024) head_sums_kernel1(double *sums, HeadStats stats, size_t N) {
    WarpSums<double> &shared = shared_mem<WarpSums<double>>();
    double nll = 0, entropy = 0, correct = 0;
    for (size_t n = threadIdx.x; n < N; n += blockDim.x)
        nll += double(stats.nll[n]), entropy += double(stats.entropy[n]), correct += double(stats.correct[n]);
    nll = block_sum(nll, shared.partial), entropy = block_sum(entropy, shared.partial);
    correct = block_sum(correct, shared.partial);
    if (threadIdx.x == 0) sums[0] += nll, sums[1] += entropy, sums[2] += correct;
}

template <class X> void head_sums(Cuda<X> dev, double *sums, HeadStats stats, size_t N) {
    launch(dev, head_sums_kernel1<X>, Grid{1}, 1024, sizeof(WarpSums<double>), sums, stats, N);
}
}  // namespace CUDA_BACKEND
