// The product of a linear layer for few tokens, as in generation, on CPUs that multiply pairs of bf16 fast. Up to about 16 tokens it is bound by the
// memory bandwidth for the weights, so the weights are read once, in place, and never packed.
//
//   dots      up to 8 tokens: a vector of a row's weights is multiplied with the same inputs of each token. 16 vectors of sums stay in registers
//   panels    up to 128: a word of two weights is broadcast, and multiplied with the same two inputs of up to 64 tokens, one token per lane. The inputs
//             are transposed first. A lane sums one output of one token, so no horizontal sums are needed
//
// A weight is prefetched into the L2 cache `ahead` bytes before it is needed, which covers the latency of memory. The weights of all layers are
// contiguous, so the end of a matrix prefetches the beginning of the next. On one core of an EPYC (Zen 4), 64 bytes of weights take 3.1 to 4.7 ns for
// 8 tokens; they took 5.5 to 7.2 ns with prefetches of 16 rows into the L1 cache, which is too small for more.
//
// The bits of a token's outputs do not depend on other tokens. The number of tokens only selects a variant.
#pragma once
#ifdef __AVX512BF16__
#include <algorithm>
#include <cstring>

#include "../core/common.h"
#include "micro_kernel.h"

namespace few_tokens {

using simd::Bf16x2, simd::Vector, simd::lanes, simd::panel;

constexpr size_t most = 128, most_dots = 8;  // tokens
constexpr size_t ahead = 64 << 10;
constexpr size_t tile_rows = 48;  // rows of the weight whose products are stored at a time; a multiple of the rows of every block

inline void prefetch(const void *weights) { __builtin_prefetch(static_cast<const char *>(weights) + ahead, 0, 2); }

inline size_t columns_of(size_t tokens) { return round_up(tokens, lanes); }
inline size_t scratch(size_t T, size_t IC) { return columns_of(T) * IC * sizeof(bf16); }  // bytes

// sums (N, tile_rows) = the products of R rows of the weight, of which `rows` exist, with N tokens. From the T-th token on, the last one is repeated.
template <size_t N> void dot_block(float *sums, const bf16 *x, const bf16 *w, size_t rows, size_t T, size_t IC) {
    constexpr size_t R = lanes / N;
    const bf16 *w_row[R], *x_row[N];
    for (size_t i = 0; i < R; i++) w_row[i] = w + std::min(i, rows - 1) * IC;
    for (size_t t = 0; t < N; t++) x_row[t] = x + std::min(t, T - 1) * IC;
    Vector sum[lanes] = {};
    for (size_t k = 0; k < IC; k += 2 * lanes) {
        __m512bh x_k[N];
#pragma GCC unroll 8
        for (size_t t = 0; t < N; t++) x_k[t] = __m512bh(_mm512_loadu_si512(x_row[t] + k));
#pragma GCC unroll 16
        for (size_t i = 0; i < R; i++) {
            const __m512bh w_k = __m512bh(_mm512_loadu_si512(w_row[i] + k));
            prefetch(w_row[i] + k);
#pragma GCC unroll 8
            for (size_t t = 0; t < N; t++) sum[i * N + t] = Vector(_mm512_dpbf16_ps(__m512(sum[i * N + t]), w_k, x_k[t]));
        }
    }
    simd::transpose_square(sum);
    Vector total{};
    for (const Vector &s : sum) total += s;
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < R; i++) sums[t * tile_rows + i] = total[i * N + t];
}

template <size_t N, class Out>
void dots(int threads, Out *out, const bf16 *x, const bf16 *w, const bf16 *bias, size_t T, size_t IC, size_t OC, size_t ld) {
#pragma omp parallel for num_threads(threads)
    for (size_t o = 0; o < OC; o += tile_rows) {
        float sums[N * tile_rows];
        const size_t n = std::min(tile_rows, OC - o);
        for (size_t i = 0; i < n; i += lanes / N) dot_block<N>(sums + i, x, w + (o + i) * IC, n - i, T, IC);
        for (size_t t = 0; t < T; t++) {
            Out *const to = out + t * ld + o;
            for (size_t i = 0; i < n; i++) to[i] = Out(sums[t * tile_rows + i] + (bias ? float(bias[o + i]) : 0.0f));
        }
    }
}

// Transposes words k to k + count of the inputs of n tokens, at most a panel: (IC/2, columns), where the columns from n on are 0.
inline void transpose(Bf16x2 *out, const bf16 *x, size_t n, size_t IC, size_t k, size_t count) {
    const size_t columns = columns_of(n);
    for (size_t t0 = 0; t0 < columns; t0 += lanes) {
        Vector words[lanes];
        for (size_t t = 0; t < lanes; t++) {
            words[t] = Vector{};
            if (t0 + t < n) memcpy(&words[t], x + (t0 + t) * IC + 2 * k, count * sizeof(Bf16x2));
        }
        simd::transpose_square(words);
        for (size_t i = 0; i < count; i++) simd::store_vector(out + (k + i) * columns + t0, words[i]);
    }
}

// sums (R, panel) = w (R, K words) x (K words, W vectors).
template <size_t R, size_t W> void block(float *sums, const Bf16x2 *w, const Bf16x2 *x, size_t K) {
    constexpr size_t line = 64 / sizeof(Bf16x2);
    Vector sum[R][W] = {};
    for (size_t k0 = 0; k0 < K; k0 += line) {
#pragma GCC unroll 24
        for (size_t i = 0; i < R; i++) prefetch(w + i * K + k0);
        for (size_t k = k0; k < std::min(K, k0 + line); k++) {
            Vector x_k[W];
#pragma GCC unroll 4
            for (size_t j = 0; j < W; j++) x_k[j] = simd::load_vector(x + (k * W + j) * lanes);
#pragma GCC unroll 24
            for (size_t i = 0; i < R; i++)
#pragma GCC unroll 4
                for (size_t j = 0; j < W; j++) sum[i][j] = simd::multiply_add(sum[i][j], w[i * K + k], x_k[j]);
        }
    }
#pragma GCC unroll 24
    for (size_t i = 0; i < R; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) simd::store_vector(sums + i * panel + j * lanes, sum[i][j]);
}

// n rows of the weight: blocks of 24 sums in registers, and single rows at the end.
template <size_t W> void rows(float *sums, const Bf16x2 *w, const Bf16x2 *x, size_t n, size_t K) {
    constexpr size_t R = 24 / W;
    size_t i = 0;
    for (; i + R <= n; i += R) block<R, W>(sums + i * panel, w + i * K, x, K);
    for (; i < n; i++) block<1, W>(sums + i * panel, w + i * K, x, K);
}

// Writes out[t, o] for n outputs from o on and `tokens` tokens, from sums (n, panel).
template <class Out> void store(Out *out, size_t ld, float *sums, const bf16 *bias, size_t o, size_t n, size_t tokens) {
    for (size_t i = 0; i < n; i += lanes)
        for (size_t t0 = 0; t0 < tokens; t0 += lanes) {
            Vector square[lanes];
            for (size_t r = 0; r < lanes; r++) square[r] = simd::load_vector(sums + (i + r) * panel + t0);
            simd::transpose_square(square);
            for (size_t t = 0; t < std::min(lanes, tokens - t0); t++) {
                Out *to = out + (t0 + t) * ld + o + i;
                if (i + lanes <= n) simd::store(to, bias ? square[t] + simd::load<Vector>(bias + o + i) : square[t]);
                else
                    for (size_t r = 0; i + r < n; r++) to[r] = Out(square[t][r] + (bias ? float(bias[o + i + r]) : 0.0f));
            }
        }
}

template <class Out>
void panels(int threads, void *transposed, Out *out, const bf16 *x, const bf16 *w, const bf16 *bias, size_t T, size_t IC,
            size_t OC, size_t ld) {
    const size_t K = IC / 2;
    const auto *words = reinterpret_cast<const Bf16x2 *>(w);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[tile_rows * panel] = {};
        for (size_t t0 = 0; t0 < T; t0 += panel) {
            const size_t n = std::min(panel, T - t0), W = columns_of(n) / lanes;
            Bf16x2 *const of_panel = static_cast<Bf16x2 *>(transposed) + t0 * K;
#pragma omp for
            for (size_t k = 0; k < K; k += lanes) transpose(of_panel, x + t0 * IC, n, IC, k, std::min(lanes, K - k));
#pragma omp for
            for (size_t o = 0; o < OC; o += tile_rows) {
                const size_t count = std::min(tile_rows, OC - o);
                if (W == 1) rows<1>(sums, words + o * K, of_panel, count, K);
                else if (W == 2) rows<2>(sums, words + o * K, of_panel, count, K);
                else if (W == 3) rows<3>(sums, words + o * K, of_panel, count, K);
                else rows<4>(sums, words + o * K, of_panel, count, K);
                store(out + t0 * ld, ld, sums, bias, o, count, n);
            }
        }
    }
}

// matmul_forward for T <= most tokens and an even IC. `transposed` has scratch(T, IC) bytes, and is aligned to vectors.
template <class Out>
void forward(int threads, void *transposed, Out *out, const bf16 *x, const bf16 *w, const bf16 *bias, size_t T, size_t IC,
             size_t OC, size_t ld) {
    if (T > most_dots || IC % (2 * lanes)) panels(threads, transposed, out, x, w, bias, T, IC, OC, ld);
    else if (T == 1) dots<1>(threads, out, x, w, bias, T, IC, OC, ld);
    else if (T == 2) dots<2>(threads, out, x, w, bias, T, IC, OC, ld);
    else if (T <= 4) dots<4>(threads, out, x, w, bias, T, IC, OC, ld);
    else dots<8>(threads, out, x, w, bias, T, IC, OC, ld);
}

}  // namespace few_tokens
#endif
