// The product of a linear layer for few tokens, as in generation, on CPUs without a matrix unit. Up to about 16 tokens it is bound by the memory
// bandwidth for the weights, so the weights are read once, in place, and never packed.
//
//   dots      up to most_of_dots tokens: a vector of a row's weights is multiplied with the same inputs of each token. `lanes` vectors of sums stay in
//             registers
//   panels    more: a word of weights is broadcast, and multiplied with the same inputs of up to a panel of tokens, one token per lane. The inputs
//             are transposed first. A lane sums one output of one token, so no horizontal sums are needed
//
// A weight is prefetched into the L2 cache `ahead` bytes before it is needed, which covers the latency of memory. The weights of all layers are
// contiguous, so the end of a matrix prefetches the beginning of the next. On one core of an EPYC (Zen 4), 64 bytes of weights take 3.1 to 4.7 ns for
// 8 tokens in bf16; they took 5.5 to 7.2 ns with prefetches of 16 rows into the L1 cache, which is too small for more.
//
// The bits of a token's outputs do not depend on other tokens. The number of tokens only selects a variant. A lane of `panels` sums in the order of
// the products of many tokens (sgemm.cpp), which therefore have the same bits.
#pragma once
#include <algorithm>
#include <cstring>

#include "../core/common.h"
#include "micro_kernel.h"
#include "sgemm.h"

namespace few_tokens {

using simd::Bf16x2, simd::Vector, simd::lanes, simd::panel;

// How weights are multiplied. An input is 4 bytes, as a lane is: a float, or two bf16 that are neighbours along the sum.
//
//   Word, terms      the weights that are broadcast, and the inputs with which they are multiplied
//   load(w)          a vector of neighbouring weights or inputs of a row, for dots
//   spread(w, i)     the part of a word that is multiplied with its i-th input, in all lanes
//   inputs(x, n)     the first n inputs of a row, and zeros

template <class X> struct AsFloats {  // bf16 is converted to float, which is exact
    using Word = std::conditional_t<sizeof(X) == 2, Bf16x2, float>;
    static constexpr size_t terms = simd::terms<Word>, of_input = 1,
                            most = 4 * lanes;  // measured on an EPYC (Zen 3)

    static Vector load(const X *w) { return simd::load<Vector>(w); }
    static Vector spread(float w, size_t) { return Vector{} + w; }
    static Vector spread(Bf16x2 w, size_t term) {
        const simd::Bits both = simd::Bits{} + std::bit_cast<uint32_t>(w);
        return std::bit_cast<Vector>(term == 0 ? both << 16 : both & 0xffff0000u);
    }
    static Vector multiply_add(Vector sum, Vector a, Vector b) { return sum + a * b; }
    static Vector inputs(const X *x, size_t n) {
        if (n == lanes) return load(x);
        Vector out{};
        for (size_t i = 0; i < n; i++) out[i] = float(x[i]);
        return out;
    }
};

#ifdef __AVX512BF16__
struct AsPairs {  // of bf16, where such products are fast
    using Word = Bf16x2;
    static constexpr size_t terms = 1, of_input = 2, most = 128;

    static Vector load(const bf16 *w) { return Vector(_mm512_loadu_ps(w)); }
    static Vector spread(Bf16x2 w, size_t) {
        return Vector(_mm512_castsi512_ps(_mm512_maskz_broadcastd_epi32(0xffff, _mm_cvtsi32_si128(std::bit_cast<int>(w)))));
    }
    static Vector multiply_add(Vector sum, Vector a, Vector b) {
        return Vector(_mm512_dpbf16_ps(__m512(sum), __m512bh(a), __m512bh(b)));
    }
    static Vector inputs(const bf16 *x, size_t n) {
        Vector out{};
        memcpy(&out, x, n * sizeof(Word));
        return out;
    }
};
#endif

constexpr size_t ahead = 64 << 10;
constexpr size_t most_of_dots = lanes / 2;  // tokens, whose bits do not depend on their number
constexpr size_t tile_rows = 48;  // rows of the weight whose products are stored at a time; a multiple of the rows of every block

inline void prefetch(const void *weights) { __builtin_prefetch(static_cast<const char *>(weights) + ahead, 0, 2); }

inline size_t columns_of(size_t tokens) { return round_up(tokens, lanes); }

template <class Kind> bool takes(size_t T, size_t IC) { return T <= Kind::most && IC % (Kind::of_input * Kind::terms) == 0; }

// Bytes of the transposed inputs of T tokens.
template <class Kind> size_t scratch(size_t T, size_t IC) { return columns_of(T) * IC / Kind::of_input * sizeof(float); }

// sums (N, tile_rows) = the products of R rows of the weight, of which `rows` exist, with N tokens. From the T-th token on, the last one is repeated.
template <class Kind, size_t N, class X> void dot_block(float *sums, const X *x, const X *w, size_t rows, size_t T, size_t IC) {
    constexpr size_t R = lanes / N;
    const X *w_row[R], *x_row[N];
    for (size_t i = 0; i < R; i++) w_row[i] = w + std::min(i, rows - 1) * IC;
    for (size_t t = 0; t < N; t++) x_row[t] = x + std::min(t, T - 1) * IC;
    Vector sum[lanes] = {};
    for (size_t k = 0; k < IC; k += Kind::of_input * lanes) {
        Vector x_k[N];
#pragma GCC unroll 8
        for (size_t t = 0; t < N; t++) x_k[t] = Kind::load(x_row[t] + k);
#pragma GCC unroll 16
        for (size_t i = 0; i < R; i++) {
            const Vector w_k = Kind::load(w_row[i] + k);
            prefetch(w_row[i] + k);
#pragma GCC unroll 8
            for (size_t t = 0; t < N; t++) sum[i * N + t] = Kind::multiply_add(sum[i * N + t], w_k, x_k[t]);
        }
    }
    simd::transpose_square(sum);
    Vector total{};
    for (const Vector &s : sum) total += s;
    for (size_t t = 0; t < N; t++)
        for (size_t i = 0; i < R; i++) sums[t * tile_rows + i] = total[i * N + t];
}

// Products are those of matmul_forward: C (M tokens, N outputs) of inputs A (M, K) and weights (N, K), B's transpose.
template <class Out, class V> void write(Out *to, V sum, bool accumulate) {  // V: float or Vector
    if (accumulate) sum += simd::load<V>(to);
    simd::store(to, sum);
}

template <class Kind, size_t N, class X, class Out> void dots(int threads, const Product<X, Out> &p) {
#pragma omp parallel for num_threads(threads)
    for (size_t o = 0; o < p.N; o += tile_rows) {
        float sums[N * tile_rows];
        const size_t n = std::min(tile_rows, p.N - o);
        for (size_t i = 0; i < n; i += lanes / N)
            dot_block<Kind, N>(sums + i, p.A.data, p.B.data + (o + i) * p.K, n - i, p.M, p.K);
        for (size_t t = 0; t < p.M; t++)
            for (size_t i = 0; i < n; i++)
                write(p.C + t * p.ld + o + i, sums[t * tile_rows + i] + (p.bias ? float(p.bias[o + i]) : 0.0f), p.accumulate);
    }
}

// Transposes inputs k to k + count of n tokens, at most a panel: (inputs, columns), where the columns from n on are 0.
template <class Kind, class X> void transpose(float *out, const X *x, size_t n, size_t IC, size_t k, size_t count) {
    const size_t columns = columns_of(n);
    for (size_t t0 = 0; t0 < columns; t0 += lanes) {
        Vector square[lanes];
        for (size_t t = 0; t < lanes; t++)
            square[t] = t0 + t < n ? Kind::inputs(x + (t0 + t) * IC + k * Kind::of_input, count) : Vector{};
        simd::transpose_square(square);
        for (size_t i = 0; i < count; i++) simd::store_vector(out + (k + i) * columns + t0, square[i]);
    }
}

// sums (R, panel) = w (R, K words) x (K words, W vectors of each input), for R rows of the weight, of which `rows` exist. g++ for AMD's CPUs makes no
// fused products of a loop with one sum alone, which would have other bits than the rest: R * W > 1.
template <class Kind, size_t R, size_t W>
void block(float *sums, const typename Kind::Word *w, const float *x, size_t rows, size_t K) {
    constexpr size_t line = 64 / sizeof(*w);
    const typename Kind::Word *row[R];
    for (size_t i = 0; i < R; i++) row[i] = w + std::min(i, rows - 1) * K;
    Vector sum[R][W] = {};
    for (size_t k0 = 0; k0 < K; k0 += line) {
#pragma GCC unroll 24
        for (size_t i = 0; i < R; i++) prefetch(row[i] + k0);
        for (size_t k = k0; k < std::min(K, k0 + line); k++)
#pragma GCC unroll 2
            for (size_t term = 0; term < Kind::terms; term++) {
                Vector x_k[W];
#pragma GCC unroll 4
                for (size_t j = 0; j < W; j++) x_k[j] = simd::load_vector(x + ((k * Kind::terms + term) * W + j) * lanes);
#pragma GCC unroll 24
                for (size_t i = 0; i < R; i++) {
                    const Vector w_k = Kind::spread(row[i][k], term);
#pragma GCC unroll 4
                    for (size_t j = 0; j < W; j++) sum[i][j] = Kind::multiply_add(sum[i][j], w_k, x_k[j]);
                }
            }
    }
#pragma GCC unroll 24
    for (size_t i = 0; i < R; i++)
#pragma GCC unroll 4
        for (size_t j = 0; j < W; j++) simd::store_vector(sums + i * panel + j * lanes, sum[i][j]);
}

// n rows of the weight, in blocks of as many sums as there are registers.
template <class Kind, size_t W> void rows(float *sums, const typename Kind::Word *w, const float *x, size_t n, size_t K) {
    constexpr size_t R = (lanes == 16 ? 24 : 12) / W;
    for (size_t i = 0; i < n; i += R) block<Kind, R, W>(sums + i * panel, w + i * K, x, n - i, K);
}

// Writes n outputs from o on of `tokens` tokens from t on, from sums (n, panel).
template <class X, class Out> void store(const Product<X, Out> &p, float *sums, size_t o, size_t n, size_t t, size_t tokens) {
    for (size_t i = 0; i < n; i += lanes)
        for (size_t t0 = 0; t0 < tokens; t0 += lanes) {
            Vector square[lanes];
            for (size_t r = 0; r < lanes; r++) square[r] = simd::load_vector(sums + (i + r) * panel + t0);
            simd::transpose_square(square);
            for (size_t j = 0; j < std::min(lanes, tokens - t0); j++) {
                Out *to = p.C + (t + t0 + j) * p.ld + o + i;
                const X *bias = p.bias ? p.bias + o + i : nullptr;
                if (i + lanes <= n) write(to, bias ? square[j] + simd::load<Vector>(bias) : square[j], p.accumulate);
                else
                    for (size_t r = 0; i + r < n; r++) write(to + r, square[j][r] + (bias ? float(bias[r]) : 0.0f), p.accumulate);
            }
        }
}

// transposed: scratch<Kind>(p.M, p.K) bytes, aligned to vectors
template <class Kind, class X, class Out> void panels(int threads, float *transposed, const Product<X, Out> &p) {
    using Word = typename Kind::Word;
    const size_t inputs = p.K / Kind::of_input, K = inputs / Kind::terms;
    const auto *words = reinterpret_cast<const Word *>(p.B.data);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float sums[tile_rows * panel] = {};
        for (size_t t = 0; t < p.M; t += panel) {
            const size_t n = std::min(panel, p.M - t);
#pragma omp for
            for (size_t k = 0; k < inputs; k += lanes)
                transpose<Kind>(transposed + t * inputs, p.A.data + t * p.K, n, p.K, k, std::min(lanes, inputs - k));
        }
#pragma omp for
        for (size_t o = 0; o < p.N; o += tile_rows) {
            const size_t count = std::min(tile_rows, p.N - o);
            for (size_t t = 0; t < p.M; t += panel) {
                const size_t n = std::min(panel, p.M - t), W = columns_of(n) / lanes;
                const float *const x = transposed + t * inputs;
                if (W == 1) rows<Kind, 1>(sums, words + o * K, x, count, K);
                else if (W == 2) rows<Kind, 2>(sums, words + o * K, x, count, K);
                if constexpr (panel > 2 * lanes) {
                    if (W == 3) rows<Kind, 3>(sums, words + o * K, x, count, K);
                    else if (W == 4) rows<Kind, 4>(sums, words + o * K, x, count, K);
                }
                store(p, sums, o, count, t, n);
            }
        }
    }
}

// Returns false if the products take another variant.
template <class Kind, class X, class Out> bool dots(int threads, const Product<X, Out> &p) {
    if (p.M > most_of_dots || p.K % (Kind::of_input * lanes)) return false;
    if (p.M == 1) dots<Kind, 1>(threads, p);
    else if (p.M == 2) dots<Kind, 2>(threads, p);
    else if (p.M <= 4) dots<Kind, 4>(threads, p);
    else dots<Kind, most_of_dots>(threads, p);
    return true;
}

}  // namespace few_tokens
