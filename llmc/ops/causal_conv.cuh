// causal_conv on CUDA. Contract and formulas: causal_conv.h.
#pragma once
#include "causal_conv.h"
#include "norm.cuh"

inline namespace CUDA_BACKEND {
template <class X> size_t causal_conv_scratch(Cuda<X>, size_t C) { return norm_blocks * conv_taps * C; }

// What a thread needs of one channel: its filter, and the last four values of x, newest first.
template <class X> struct ConvChannel {
    float tap[conv_taps], x[conv_taps];  // tap[j] is multiplied with x[t-j]

    // Prepares for token t, before which the window holds the tokens t-1, t-2, ...
    __device__ ConvChannel(const X *w, const X *from, size_t t, size_t C) {
#pragma unroll
        for (size_t j = 0; j < conv_taps; j++) {
            tap[j] = w[conv_taps - 1 - j];
            x[j] = t > j ? float(from[(t - 1 - j) * C]) : 0.0f;
        }
    }
    __device__ float next(float value, int seen) {
        float y = 0;
#pragma unroll
        for (size_t j = conv_taps - 1; j > 0; j--) x[j] = x[j - 1];
        x[0] = value;
#pragma unroll
        for (int j = 0; j < int(conv_taps); j++)
            if (j < seen) y += tap[j] * x[j];
        return y;
    }
};

constexpr size_t conv_run = 32;  // tokens of a thread

// A thread computes a run of tokens of one channel, and neighbouring lanes have neighbouring channels. The kernel moves 2 T C elements, and the three
// before each run.
template <class X>
__global__ void causal_conv_forward_kernel1(X *out, const X *x, const X *w, const int32_t *doc_pos, size_t T, size_t C) {
    const size_t c = blockIdx.y * size_t(blockDim.x) + threadIdx.x, begin = blockIdx.x * conv_run;
    if (c >= C) return;
    ConvChannel<X> channel(w + c * conv_taps, x + c, begin, C);
    for (size_t t = begin; t < T && t < begin + conv_run; t++) {
        const float y = channel.next(x[t * C + c], conv_seen(doc_pos[t]));
        out[t * C + c] = divide<X>(y, 1.0f + expf(-y));
    }
}

template <class X>
void causal_conv_forward(Cuda<X> dev, X *out, const X *x, const X *w, const int32_t *doc_pos, size_t T, size_t C) {
    constexpr unsigned threads = 128;
    launch(dev, causal_conv_forward_kernel1<X>, Grid{ceil_div(T, conv_run), ceil_div(C, threads)}, threads, 0, out, x, w, doc_pos,
           T, C);
}

// A thread has a run of tokens of one channel, and its sums of dw. It also computes dy of the three tokens after the run. The kernel moves 3 T C elements.
template <class X>
__global__ void causal_conv_backward_kernel1(X *dx, float *scratch, const X *dout, const X *x, const X *w, const int32_t *doc_pos,
                                             size_t T, size_t C) {
    constexpr size_t K = conv_taps;
    const size_t c = blockIdx.y * size_t(blockDim.x) + threadIdx.x;
    const size_t begin = T * blockIdx.x / gridDim.x, end = T * (blockIdx.x + 1) / gridDim.x;
    if (c >= C) return;
    ConvChannel<X> channel(w + c * K, x + c, begin, C);
    float dy[K] = {}, dw[K] = {};  // dy: of the last four tokens, newest first
    for (size_t t = begin; t < end + K - 1; t++) {
#pragma unroll
        for (size_t j = K - 1; j > 0; j--) dy[j] = dy[j - 1];
        dy[0] = 0;
        if (t < T) {
            const int seen = conv_seen(doc_pos[t]);
            const float y = channel.next(x[t * C + c], seen), s = 1.0f / (1.0f + expf(-y));
            dy[0] = float(dout[t * C + c]) * s * (1.0f + y * (1.0f - s));
#pragma unroll
            for (int j = 0; j < int(K); j++)
                if (j < seen && t < end) dw[j] += dy[0] * channel.x[j];
        }
        if (t < begin + K - 1) continue;
        const size_t done = t - (K - 1);  // the token that no later one sees
        float sum = channel.tap[0] * dy[K - 1];
#pragma unroll
        for (size_t j = 1; j < K; j++)
            if (done + j < T && doc_pos[done + j] >= int32_t(j)) sum += channel.tap[j] * dy[K - 1 - j];
        dx[done * C + c] = sum;
    }
    for (size_t j = 0; j < K; j++) scratch[(blockIdx.x * C + c) * K + K - 1 - j] = dw[j];
}

template <class X>
void causal_conv_backward(Cuda<X> dev, X *dx, float *dw, float *scratch, const X *dout, const X *x, const X *w,
                          const int32_t *doc_pos, size_t T, size_t C) {
    constexpr unsigned threads = 128;
    const size_t blocks = std::min(norm_blocks, ceil_div(T, conv_run));
    launch(dev, causal_conv_backward_kernel1<X>, Grid{blocks, ceil_div(C, threads)}, threads, 0, dx, scratch, dout, x, w, doc_pos,
           T, C);
    if (dw) norm_add_runs(dev, dw, scratch, blocks, conv_taps * C);
}
}  // namespace CUDA_BACKEND
