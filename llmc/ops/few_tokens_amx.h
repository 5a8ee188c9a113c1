// The products of linear layers for few tokens, as in generation, on CPUs with a matrix unit. They are bound by the memory bandwidth for the weights,
// so the weights are read once, in place: they are the first factor, of which the unit loads 16 rows at any distance as a tile. Only the inputs, the
// second factor, are packed. A tile of sums is therefore a transposed tile of the output.
//
//   up to 16 tokens    4 tiles of rows of the weight by 1 tile of tokens, so that four sums are under way at a time
//   up to 128          2 by 2 tiles. The first panel of 32 tokens loads the weights from memory, the others from the caches
//
// Every sum adds its terms in the order of amx_gemm's, so an output has the same bits for any number of tokens.
#pragma once
#include "amx.h"

#ifdef LLMC_AMX
#include <omp.h>

#include <algorithm>
#include <span>
#include <utility>

#include "gemm_tiles.h"

namespace few_tokens_amx {

using amx::block, amx::panel_step, amx::side, amx::step, amx::tile;

// On a Xeon (Emerald Rapids) 32 tokens take 0.28 of the time of a product that packs the weights, and 128 tokens half of it.
constexpr size_t most = 128;
constexpr size_t ahead = 64 << 10;  // bytes by which a weight is prefetched into the L2 cache before it is needed

// True for x (M, K) times the transpose of w (N, K) with few rows of x, of which a panel fits `capacity` elements.
template <class Out> bool takes(const Product<bf16, Out> &p, size_t capacity) {
    return p.M <= most && p.K > 0 && p.B.row == 1 && block * round_up(p.K, step) <= capacity;
}

// A part of the weight: `rows` rows of K elements, `stride` apart.
struct Rows {
    const bf16 *data;
    size_t rows, K, stride;

    Rows from(size_t row, size_t k) const { return {data + row * stride + k, rows - std::min(rows, row), K - k, stride}; }
};

// Loads the first tile of w: in place if it is whole, otherwise from a copy with zeros beyond the edges.
template <int t> void load(Rows w) {
    if (w.rows >= side && w.K >= step) return amx::load<t>(w.data, w.stride * sizeof(bf16));
    alignas(64) bf16 edge[tile];
    amx::pack_tile<amx::Factor::first>(edge, {w.data, w.stride, 1}, w.rows, w.K);
    amx::load<t>(edge, side * sizeof(float));
}

inline void prefetch(Rows w) {
#pragma GCC unroll 16
    for (size_t r = 0; r < side; r++) __builtin_prefetch(reinterpret_cast<const char *>(w.data + r * w.stride) + ahead, 0, 2);
}

// Calls body<0>() to body<n - 1>().
template <size_t n> void unrolled(auto body) {
    [&]<size_t... i>(std::index_sequence<i...>) { (body.template operator()<i>(), ...); }
    (std::make_index_sequence<n>());
}

// sums: R x C tiles, the first R tiles of rows of w times the C tiles of a panel of tokens.
template <size_t R, size_t C> void multiply(float *sums, Rows w, const bf16 *x, bool from_memory) {
    unrolled<R * C>([]<size_t i>() { amx::zero<i>(); });
    for (size_t k = 0; k < w.K; k += step, x += panel_step) {
        amx::load<6>(x, side * sizeof(float));
        if (C == 2) amx::load<7>(x + tile, side * sizeof(float));
        unrolled<R>([&]<size_t r>() {
            constexpr int of_w = 4 + r % 2;
            const Rows part = w.from(r * side, k);
            load<of_w>(part);
            amx::multiply_add<r * C, of_w, 6>();
            if constexpr (C == 2) amx::multiply_add<r * C + 1, of_w, 7>();
            if (from_memory) prefetch(part);
        });
    }
    unrolled<R * C>([&]<size_t i>() { amx::store<i>(sums + i * side * side, side * sizeof(float)); });
}

// Writes the outputs [o, o + 16) of tokens [t, t + 16), so far as they exist, and transposes `sums` in place.
template <class Out> void write(const Product<bf16, Out> &p, float *sums, size_t o, size_t t) {
    amx::Words rows[side];
    auto *const stored = reinterpret_cast<amx::StoredWords *>(sums);
    std::copy_n(stored, side, rows);
    amx::transpose(rows);
    std::copy_n(rows, side, stored);
    for (size_t i = 0; i < std::min(side, p.M - t); i++)
        write_row(p.C + (t + i) * p.ld + o, sums + i * side, p.bias ? p.bias + o : nullptr, std::min(side, p.N - o),
                  p.accumulate);
}

// The outputs of rows [o, o + R tiles) of the weight for tokens [t0, t1), which are packed in panels of C tiles.
template <size_t R, size_t C, class Out>
void outputs(const Product<bf16, Out> &p, const bf16 *packed, size_t o, size_t t0, size_t t1) {
    alignas(64) float sums[R * C * side * side];
    const Rows w = Rows{p.B.data, p.N, p.K, p.B.column}.from(o, 0);
    for (size_t t = t0; t < t1; t += C * side, packed += ceil_div(p.K, step) * panel_step) {
        multiply<R, C>(sums, w, packed, t == t0);
        for (size_t r = 0; r < R; r++)
            for (size_t c = 0; c < C && t + c * side < t1; c++)
                write(p, sums + (r * C + c) * side * side, o + r * side, t + c * side);
    }
}

// The same for the rows [begin, end), R tiles at a time and the rest in single tiles, after packing the inputs of the tokens.
template <size_t R, size_t C, class Out>
void pack_and_multiply(const Product<bf16, Out> &p, bf16 *packed, size_t begin, size_t end, size_t t0, size_t t1) {
    for (size_t t = t0; t < t1; t += C * side)
        for (size_t k = 0; k < p.K; k += step)
            for (size_t c = 0; c < C; c++) {
                bf16 *const to =
                    packed + (t - t0) / (C * side) * ceil_div(p.K, step) * panel_step + k / step * panel_step + c * tile;
                const size_t at = std::min(t + c * side, t1);
                amx::pack_tile<amx::Factor::second>(to, {p.A.data + at * p.A.row + k * p.A.column, p.A.row, p.A.column}, t1 - at,
                                                    p.K - k);
            }
    size_t o = begin;
    for (; o + R * side <= end; o += R * side) outputs<R, C>(p, packed, o, t0, t1);
    for (; o < end; o += side) outputs<1, C>(p, packed, o, t0, t1);
}

// All rows of all weights are divided evenly among the threads. Every thread packs the inputs that it needs for itself, into `capacity` elements
// that begin at scratch(thread) and are aligned to 64 bytes: the products need no barrier.
template <class Out> void forward(int threads, auto scratch, size_t capacity, std::span<const Product<bf16, Out>> products) {
    size_t all = 0;
    for (const auto &p : products) all += ceil_div(p.N, side);
#pragma omp parallel num_threads(threads)
    {
        const amx::Registers registers;
        const size_t thread = size_t(omp_get_thread_num()), count = size_t(omp_get_num_threads());
        size_t begin = all * thread / count, end = all * (thread + 1) / count;  // tiles of rows, counted from the product at hand
        for (const auto &p : products) {
            const size_t tiles = ceil_div(p.N, side), first = std::min(begin, tiles), last = std::min(end, tiles);
            const size_t at_once = capacity / round_up(p.K, step) / block * block;  // tokens
            for (size_t t = 0; t < p.M && first < last; t += at_once) {
                const size_t t1 = std::min(p.M, t + at_once);
                if (t1 - t <= side) pack_and_multiply<4, 1>(p, scratch(thread), first * side, last * side, t, t1);
                else pack_and_multiply<2, 2>(p, scratch(thread), first * side, last * side, t, t1);
            }
            begin -= first, end -= last;
        }
    }
}

}  // namespace few_tokens_amx
#endif
