// The embedding of tokens, and of positions.
//
//   embedding_forward (dev, out, w, tokens, T, C, V)                 out[t] = w[tokens[t]], or 0 for tokens outside [0, V): another rank has them
//   embedding_forward (dev, out, w, tokens, p, pos, T, C, V)         ... + p[pos[t]]: GPT-2's learned positions. p may be null.
//   embedding_backward(dev, dw, dout, tokens, T, C, first, count)    dw[tokens[t] - first] += dout[t], tokens in [first, first + count)
//
//   out, dout (T, C) X     w (V, C) X     dw (count, C) float, accumulated: the gradient of rows [first, first + count) of w
//   tokens (T)     p (P, C) X     pos (T), each in [0, P); the backward pass for p is embedding_backward with pos as tokens
//   Nothing may alias. The gradients of a token are added in the order of the text, for any number of threads.
//   first 0 and count V give the whole gradient. Ranges are for ZeRO-2, where the whole gradient never exists at once; each call reads all tokens.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../core/common.h"
#include "../core/device.h"

template <class X>
void embedding_forward(Cpu<X> dev, X *out, const X *w, const int32_t *tokens, const X *p, const int32_t *pos, size_t T, size_t C,
                       size_t V) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t t = 0; t < T; t++) {
        X *const to = out + t * C;
        if (const size_t v = size_t(tokens[t]); v < V) std::copy_n(w + v * C, C, to);
        else std::fill_n(to, C, X(0.0f));
        if (!p) continue;
        const X *const position = p + size_t(pos[t]) * C;
#pragma omp simd
        for (size_t c = 0; c < C; c++) to[c] = float(to[c]) + float(position[c]);
    }
}

template <class X> void embedding_forward(Cpu<X> dev, X *out, const X *w, const int32_t *tokens, size_t T, size_t C, size_t V) {
    const X *no_positions = nullptr;
    embedding_forward(dev, out, w, tokens, no_positions, tokens, T, C, V);
}

// Threads divide the channels among them, not the tokens, because a token that occurs twice adds to one row of dw twice.
template <class X>
void embedding_backward(Cpu<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C, size_t first,
                        size_t count) {
    constexpr size_t slice = 64;  // four cache lines of dw: short enough to share 576 channels, long enough to stream
#pragma omp parallel for num_threads(dev.threads)
    for (size_t s = 0; s < ceil_div(C, slice); s++) {
        const size_t begin = s * slice, end = std::min(C, begin + slice);
        for (size_t t = 0; t < T; t++) {
            const size_t v = size_t(tokens[t]) - first;  // wraps to a large number for a token before the range
            if (v >= count) continue;
            const X *dout_t = dout + t * C;
            float *row = dw + v * C;
#pragma omp simd
            for (size_t c = begin; c < end; c++) row[c] += float(dout_t[c]);
        }
    }
}

REHEARSED(embedding_forward);
REHEARSED(embedding_backward);
