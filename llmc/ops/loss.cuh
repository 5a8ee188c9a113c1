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

// Per chunk two products read the head's weights, (V, C), and the third reads and writes their gradients in float: 12 bytes and 6 * rows FLOP per
// element. With 1024 rows an H100 takes longer for the FLOP, by formula.
template <class X> constexpr size_t lm_head_bytes(Cuda<X>, size_t) { return size_t(256) << 20; }
template <class X> constexpr size_t lm_head_least_rows(Cuda<X>) { return 1024; }

// GPT-2 has 50257 tokens. Rows of 50257 logits in bf16 would only be aligned to 2 bytes: vectors cannot read them, and libraries have slow products
// for them or none. Rounded up to a multiple of 64 elements, rows are aligned to 128 bytes, or 256 in float.
template <class X> constexpr size_t logits_ld(Cuda<X>, size_t V) { return round_up(V, 64); }

// ---- softmax, loss and gradient of a row --------------------------------------------------------------------------------------

// The gradients of a row overwrite its logits; in bf16 they take the first half of the row.
template <class X> size_t dlogits_room(Cuda<X>, size_t, size_t) { return 0; }
template <class X> constexpr size_t dlogits_ld(Cuda<X>, size_t ld) { return ld * sizeof(float) / sizeof(X); }

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

// Merges the first n logits of a vector; the first one is number v of its row. Sums are only scaled when the maximum rises, so each logit takes about
// one exp.
template <int N> __device__ __forceinline__ void merge(SoftmaxPart &part, const Vec<float, N> &z, unsigned v, unsigned n) {
    float max = z[0];
    unsigned first = 0;
#pragma unroll
    for (unsigned i = 1; i < N; i++)
        if (i < n && z[int(i)] > max) max = z[int(i)], first = i;
    if (max > part.max) {
        const float to = part.max - max, scale = expf(to);
        part.dot = scale * (part.dot + part.sum * to), part.sum *= scale;
        part.max = max, part.first = v + first;
    }
#pragma unroll
    for (unsigned i = 0; i < N; i++) {
        const float shifted = z[int(i)] - part.max, e = expf(shifted);
        if (i < n) part.sum += e, part.dot += e * shifted;
    }
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

// Returns the statistics of the block's row, the same in all threads, and the target's logit. Afterwards gradients may overwrite the row. The warps'
// parts may be overwritten after the next barrier.
__device__ __forceinline__ SoftmaxPart softmax_part_of_row(float &target, const float *row, unsigned y, float to_z, unsigned V,
                                                           SoftmaxWarps &warps) {
    constexpr unsigned N = Vec<float>::size;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    SoftmaxPart part;
    for (unsigned v = threadIdx.x * N; v < V; v += blockDim.x * N) {
        auto z = Vec<float, N>::load(row + v);
        for (unsigned i = 0; i < N; i++) z[int(i)] *= to_z;
        if (v + N <= V) merge(part, z, v, N);
        else merge(part, z, v, V - v);
    }
    part = warp_merge(part);
    if (lane == 0) warps.part[warp] = part;
    target = y < V ? row[y] * to_z : -INFINITY;
    __syncthreads();
    part = warp_merge(lane < blockDim.x / 32 ? warps.part[lane] : SoftmaxPart{});
    part.sum = __shfl_sync(all_lanes, part.sum, 0);  // because with fma merge(a, b) and merge(b, a) may differ in the last bit
    part.dot = __shfl_sync(all_lanes, part.dot, 0);
    return part;
}

__device__ inline void store_statistics(HeadStats stats, size_t r, const SoftmaxPart &part, float entropy, float target,
                                        unsigned y) {
    stats.nll[r] = float(log(double(part.sum)) - (double(target) - double(part.max)));
    stats.entropy[r] = entropy;
    stats.correct[r] = part.first == y;
    stats.max[r] = part.max;
    stats.sum[r] = part.sum;
}

// Returns the number of threads of a block that computes a row of V logits. A thread reads a vector at a time, so rows begin at multiples of a vector
// (logits_ld). Eight blocks of 256 threads share an SM, and while one merges its parts the others read: 1024 x 151936 logits take 403 us on an H200,
// and 432 us with blocks of 1024 threads.
inline unsigned classifier_threads(size_t V) {
    return unsigned(std::min<size_t>(256, round_up(ceil_div(V, size_t(Vec<float>::size)), 32)));
}

// Computes the gradients of the logits of the block's row r, which may overwrite the logits, and 0 for the padding up to ld. The host computes to_z =
// 1 / temperature, because a division here takes registers. y is V or more if the target is outside this range. In bf16 a thread overwrites logits
// that another thread still has to read, so all threads wait for each other.
template <class X>
__device__ void dlogits_row(X *dlogits, const float *logits, const HeadLoss &loss, float to_z, size_t r, float max, float sum,
                            float entropy, size_t y, unsigned V, unsigned ld) {
    constexpr unsigned N = Vec<float>::size;
    const float weight = loss.weights[r] * to_z, scale = weight / sum;
    const float slope = loss.entropy_weight * to_z / sum, offset = entropy - logf(sum);  // log p + entropy = z - max + offset
    const unsigned target = unsigned(y < V ? y : V);
    for (unsigned begin = 0; begin < ld; begin += blockDim.x * N) {
        const unsigned v = begin + threadIdx.x * N;
        Vec<X, N> d = {};
        if (v < V) {
            const auto l = Vec<float, N>::load(logits + v);
            float gradient[N];
            for (unsigned i = 0; i < N; i++) {
                const float shifted = l[int(i)] * to_z - max, factor = slope == 0 ? scale : scale - slope * (shifted + offset);
                gradient[i] = expf(shifted) * factor;
            }
            for (unsigned i = 0; i < N; i++)
                if (v + i == target) gradient[i] -= weight;
            for (unsigned i = 0; i < N; i++)
                if (v + i < V) d[int(i)] = gradient[i];
        }
        if (sizeof(X) < sizeof(float)) __syncthreads();
        if (v < ld) d.store(dlogits + v);
    }
}

// Clears the block's row of padding.
template <class X> __device__ void clear_row(X *dlogits, size_t ld) {
    constexpr int N = Vec<float>::size;
    for (size_t v = threadIdx.x * N; v < ld; v += blockDim.x * N) Vec<X, N>{}.store(dlogits + v);
}

// One block computes a row. It reads the logits twice: for maximum and sums together (Milakov and Gimelshein, 2018, arXiv:1805.02867), then
// for the gradients. It moves 8 V + V sizeof(X) bytes per row. A row of dlogits may begin at the same address as its logits.
template <class X>
__global__ void __launch_bounds__(256, 8)
    fused_classifier_kernel5(HeadStats stats, X *dlogits, const float *logits, HeadLoss loss, float to_z, size_t n, size_t V,
                             size_t ld, size_t dld) {
    const size_t r = blockIdx.x;
    const float *row = logits + r * ld;
    if (r >= n) return clear_row<X>(dlogits + r * dld, ld);
    const unsigned y = unsigned(loss.targets[r]);
    float target;
    const SoftmaxPart part = softmax_part_of_row(target, row, y, to_z, unsigned(V), shared_mem<SoftmaxWarps>());
    const float entropy = threadIdx.x == 0 || loss.entropy_weight != 0 ? entropy_of(part) : 0;
    if (threadIdx.x == 0) store_statistics(stats, r, part, entropy, target, y);
    if (dlogits) dlogits_row<X>(dlogits + r * dld, row, loss, to_z, r, part.max, part.sum, entropy, y, unsigned(V), unsigned(ld));
}

template <class X>
void fused_classifier(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, HeadLoss loss, size_t n, size_t padded,
                      size_t V, size_t ld) {
    launch(dev, fused_classifier_kernel5<X>, Grid{dlogits ? padded : n}, classifier_threads(V), sizeof(SoftmaxWarps), stats,
           dlogits, logits, loss, 1 / loss.temperature, n, V, ld, dlogits_ld(dev, ld));
}

// One block computes a row. It moves 4 + sizeof(X) bytes per logit.
template <class X>
__global__ void __launch_bounds__(256, 8)
    range_classifier_kernel2(X *dlogits, const float *logits, HeadLoss loss, float to_z, HeadStats stats, size_t n, size_t first,
                             size_t count, size_t ld, size_t dld) {
    const size_t r = blockIdx.x;
    if (r >= n) return clear_row<X>(dlogits + r * dld, ld);
    dlogits_row<X>(dlogits + r * dld, logits + r * ld, loss, to_z, r, stats.max[r], stats.sum[r], stats.entropy[r],
                   size_t(loss.targets[r]) - first, unsigned(count), unsigned(ld));
}

template <class X>
void range_classifier(Cuda<X> dev, X *dlogits, const float *logits, HeadLoss loss, HeadStats stats, size_t n, size_t padded,
                      size_t first, size_t count, size_t ld) {
    launch(dev, range_classifier_kernel2<X>, Grid{padded}, classifier_threads(count), 0, dlogits, logits, loss,
           1 / loss.temperature, stats, n, first, count, ld, dlogits_ld(dev, ld));
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
