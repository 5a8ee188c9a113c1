// Attention on CUDA. Contract and formulas: attention.h. bf16 runs on tensor cores (attention_forward.cuh,
// attention_backward.cuh, and attention_tile.cuh, which they share), float in plain kernels (attention_f32.cuh).
#pragma once
#include <bit>
#include <type_traits>

#include "attention_backward.cuh"
#include "attention_f32.cuh"
#include "attention_forward.cuh"
#include "attention_hopper.h"
#include "layout.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

// ---- the kernels before and after the parts. All are bound by memory.

constexpr unsigned flat_threads = 256;

template <class T> __global__ void fill_kernel(T *x, T value, size_t n) {
    const size_t i = blockIdx.x * size_t(flat_threads) + threadIdx.x;
    if (i < n) x[i] = value;
}

// A row of delta takes one lane for each vector of a head of at most `width` elements, rounded up to a power of two.
template <class X, int width> constexpr unsigned delta_lanes = std::min(32u, std::bit_ceil(unsigned(width / Vec<X>::size)));

// Computes delta, one row per query and head. Rows are counted in 32 bits, which a GPU divides much faster than 64.
template <class X, int width>
__global__ void delta_kernel2(float *delta, const X *out, const X *dout, unsigned T, unsigned H, size_t D) {
    constexpr unsigned lanes = delta_lanes<X, width>;
    const unsigned row = blockIdx.x * (flat_threads / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes;
    float sum = 0;
    if (row < T * H)
        for (size_t d = lane * Vec<X>::size; d < D; d += lanes * Vec<X>::size) {
            const Vec<X> a = Vec<X>::load(out + row * D + d), b = Vec<X>::load(dout + row * D + d);
            for (int j = 0; j < Vec<X>::size; j++) sum += float(a[j]) * float(b[j]);
        }
    sum = warp_sum(sum, lanes);
    if (row < T * H && lane == 0) delta[row % H * size_t(T) + row / H] = sum;
}

// Rounds rows [dq | dk | dv] of heads, with one thread per 4 elements.
template <class X>
__global__ void round_rows_kernel(X *dqkv, AttentionGrads grads, size_t T, size_t q_columns, size_t kv_columns) {
    const size_t columns = q_columns + 2 * kv_columns, i = (blockIdx.x * size_t(flat_threads) + threadIdx.x) * 4;
    if (i >= T * columns) return;
    const size_t t = i / columns, c = i % columns;
    const float *from = c < q_columns                ? grads.dq32 + t * q_columns + c
                        : c < q_columns + kv_columns ? grads.dk32 + t * kv_columns + c - q_columns
                                                     : grads.dv32 + t * kv_columns + c - q_columns - kv_columns;
    const Vec<float> values = Vec<float>::load(from);
    for (int j = 0; j < 4; j++) dqkv[i + j] = X(values[j]);
}

// Sums the splits of dK and dV in order, and rounds the sums into rows of [dq | dk | dv], with one thread per 4 elements of row blockIdx.x.
template <class X> __global__ void round_keys_kernel1(X *dqkv, AttentionGrads grads, AttentionShape shape, unsigned splits) {
    const size_t t = blockIdx.x, columns = shape.KV * shape.D, c = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
    if (c >= 2 * columns) return;
    Vec<float> sum = {};
    for (unsigned s = 0; s < splits; s++) {
        const AttentionGrads part = keys_split(grads, shape, s);
        const auto x = Vec<float>::load(c < columns ? part.dk32 + t * columns + c : part.dv32 + t * columns + c - columns);
        for (int j = 0; j < 4; j++) sum[j] = s ? sum[j] + x[j] : x[j];
    }
    Vec<X, 4> out;
    for (int j = 0; j < 4; j++) out[j] = X(sum[j]);
    out.store(dqkv + t * ((shape.H + 2 * shape.KV) * shape.D) + shape.H * shape.D + c);
}

// Calls f with the smallest compiled head size that is at least D. The columns in excess are 0.
template <class F> void with_width(size_t D, F f) {
    if (D <= 32) f(std::integral_constant<int, 32>());
    else if (D <= 64) f(std::integral_constant<int, 64>());
    else if (D <= 96) f(std::integral_constant<int, 96>());
    else if (D <= 128) f(std::integral_constant<int, 128>());
    else if (D <= 192) f(std::integral_constant<int, 192>());
    else f(std::integral_constant<int, 256>());
}

template <class X> void launch_delta(Cuda<X> dev, float *delta, const X *out, const X *dout, const AttentionShape &shape) {
    with_width(shape.D, [&](auto width) {
        launch(dev, delta_kernel2<X, width.value>, Grid{ceil_div(shape.T * shape.H, flat_threads / delta_lanes<X, width.value>)},
               flat_threads, 0, delta, out, dout, unsigned(shape.T), unsigned(shape.H), shape.D);
    });
}

}  // namespace CUDA_BACKEND
}  // namespace attention

inline namespace CUDA_BACKEND {

// If there is only one part, no floats are needed between the tiles and the result.
inline size_t attention_floats(CudaF32, const AttentionShape &shape) { return shape.T * shape.H * shape.D; }
inline size_t attention_floats(CudaBf16, const AttentionShape &) { return 0; }

template <class X>
void attention_forward_part(Cuda<X> dev, X *out, float *out32, float *lse, const AttentionInputs<X> &in, Pieces q_pieces,
                            Pieces k_pieces, PartOrder order) {
    using namespace attention;
    const AttentionShape &shape = in.shape;
    check_head_size(shape.D);
    const auto on_tensor_cores = [&](auto *to) {
        with_width(shape.D, [&](auto width) {
            using Shape = ForwardShape<width.value>;
            launch(dev, attention_forward_kernel5<width.value, std::remove_pointer_t<decltype(to)>>,
                   Grid{count_blocks(q_pieces, in.cuts, Shape::queries), shape.H}, Shape::threads, sizeof(typename Shape::Shared),
                   to, lse, in, q_pieces, k_pieces);
        });
    };
    if constexpr (std::is_same_v<X, bf16>) {
        if (const HopperKernels *hopper = hopper_kernels_for(shape.D))
            return hopper->forward(dev, out, out32, lse, in, q_pieces, k_pieces, order);
        if (order.first && order.last) return on_tensor_cores(out);
    }
    const size_t rows = shape.H * shape.T;
    if (order.first) {
        clear_floats(dev, out32, rows * shape.D);
        launch(dev, fill_kernel<float>, Grid{ceil_div(rows, flat_threads)}, flat_threads, 0, lse, -INFINITY, rows);
    }
    if constexpr (std::is_same_v<X, bf16>) on_tensor_cores(out32);
    else
        launch(dev, attention_forward_kernel3<X>, Grid{count_blocks(q_pieces, in.cuts, plain_rows), shape.H}, plain_threads,
               sizeof(PlainForward), out32, lse, in, q_pieces, k_pieces);
    if (order.last) round_floats(dev, out, out32, rows * shape.D);
}

// The turns of Hopper's backward kernel, (H + KV, T). Under ulysses a rank has more rows, and at most one KV head per query head.
inline size_t attention_scratch(CudaF32, const AttentionShape &) { return 0; }
inline size_t attention_scratch(CudaBf16, const AttentionShape &shape) {
    return attention::hopper_kernels_for(shape.D) ? 2 * shape.H * shape.T : 0;
}

template <class X>
void attention_backward_begin(Cuda<X> dev, AttentionGrads grads, float *delta, const X *out, const X *dout,
                              const AttentionShape &shape) {
    using namespace attention;
    const size_t T = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
    clear_floats(dev, grads.dq32, T * H * D);
    clear_floats(dev, grads.dk32, T * KV * D);
    clear_floats(dev, grads.dv32, T * KV * D);
    launch_delta(dev, delta, out, dout, shape);
}

template <class X>
void attention_backward_part(Cuda<X> dev, AttentionGrads grads, float *scratch, const AttentionInputs<X> &in, const float *delta,
                             const float *lse, const X *dout, Pieces q_pieces, Pieces k_pieces) {
    using namespace attention;
    const size_t H = in.shape.H, KV = in.shape.KV, D = in.shape.D;
    const Heads<const X> d_out{dout, H * D};
    const auto both = [&](auto queries_kernel, auto dq, auto keys_kernel, auto queries_shape, auto keys_shape) {
        using Q = decltype(queries_shape);
        using K = decltype(keys_shape);
        launch(dev, queries_kernel, Grid{count_blocks(q_pieces, in.cuts, Q::queries), H}, Q::threads, sizeof(typename Q::Shared),
               dq, in, delta, lse, d_out, q_pieces, k_pieces);
        launch(dev, keys_kernel, Grid{count_blocks(k_pieces, in.cuts, K::keys), KV}, K::threads, sizeof(typename K::Shared),
               grads, in, delta, lse, d_out, q_pieces, k_pieces);
    };
    if constexpr (std::is_same_v<X, bf16>) {
        if (const HopperKernels *hopper = hopper_kernels_for(D)) {
            clear_floats(dev, scratch, attention_scratch(dev, in.shape));
            return hopper->backward_part(dev, grads, reinterpret_cast<int *>(scratch), in, delta, lse, dout, q_pieces, k_pieces);
        }
        with_width(D, [&](auto width) {
            constexpr int w = width.value;
            both(attention_backward_queries_kernel4<w, float>, Heads<float>{grads.dq32, H * D},
                 attention_backward_keys_kernel4<w, true>, BackwardQueriesShape<w>(), BackwardKeysShape<w>());
        });
    } else both(attention_backward_queries_kernel3<X>, grads, attention_backward_keys_kernel3<X>, PlainShape(), PlainShape());
}

template <class X> void attention_backward_end(Cuda<X> dev, X *dqkv, AttentionGrads grads, const AttentionShape &shape) {
    using namespace attention;
    const size_t T = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
    launch(dev, round_rows_kernel<X>, Grid{ceil_div(T * (H + 2 * KV) * D, 4 * flat_threads)}, flat_threads, 0, dqkv, grads, T,
           H * D, KV * D);
}

// dqkv may be the array of q, k and v. The queries' kernel reads K and V, and the keys' kernel reads Q, so the keys' kernel runs first and writes
// floats. Hopper's single kernel adds to floats.
inline void attention_backward(CudaBf16 dev, bf16 *dqkv, AttentionGrads grads, float *delta, float *scratch,
                               const AttentionInputs<bf16> &in, const bf16 *out, const bf16 *dout, const float *lse,
                               Pieces pieces) {
    using namespace attention;
    const size_t T = in.shape.T, H = in.shape.H, KV = in.shape.KV, D = in.shape.D;
    if (hopper_kernels_for(D)) {
        attention_backward_begin(dev, grads, delta, out, dout, in.shape);
        attention_backward_part(dev, grads, scratch, in, delta, lse, dout, pieces, pieces);
        return attention_backward_end(dev, dqkv, grads, in.shape);
    }
    const Heads<const bf16> d_out{dout, H * D};
    const auto round_keys = [&](size_t splits) {
        const unsigned threads = unsigned(std::min<size_t>(flat_threads, round_up(2 * KV * D / 4, 32)));
        launch(dev, round_keys_kernel1<bf16>, Grid{T, ceil_div(2 * KV * D / 4, threads)}, threads, 0, dqkv, grads, in.shape,
               unsigned(splits));
    };
    launch_delta(dev, delta, out, dout, in.shape);
    with_width(D, [&](auto width) {
        constexpr int w = width.value;
        using Q = BackwardQueriesShape<w>;
        using K = BackwardKeysShape<w>;
        const size_t splits = keys_splits(in.shape, count_blocks(pieces, {}, K::keys));
        launch(dev, attention_backward_keys_kernel4<w, false>, Grid{count_blocks(pieces, in.cuts, K::keys), KV, splits},
               K::threads, sizeof(typename K::Shared), grads, in, delta, lse, d_out, pieces, pieces);
        launch(dev, attention_backward_queries_kernel4<w, bf16>, Grid{count_blocks(pieces, in.cuts, Q::queries), H}, Q::threads,
               sizeof(typename Q::Shared), Heads<bf16>{dqkv, (H + 2 * KV) * D}, in, delta, lse, d_out, pieces, pieces);
        round_keys(splits);
    });
}

}  // namespace CUDA_BACKEND
