// The gated delta rule on CUDA. Contract and formulas: gated_delta.h.
//
// Columns of a state depend only on the same columns of the values, so a block of the forward pass computes 64 columns of a value head, chunk by chunk. So do
// the first two kernels of the backward pass, the states again and their gradients. The third has a block for a chunk and a key head: gradients of keys are
// sums over all columns of its value heads, but with both states of a chunk known, chunks are independent. A block's matrices are in scratch memory, which the L2 cache holds; tiles of the factors of a product pass through shared memory. The rows of a forward substitution depend on
// each other, its columns do not: four threads compute a column in registers.
//
// Between two barriers all loads precede all stores, where the compiler could not know that they may.
#pragma once
#include "gated_delta.h"
#include "ptx.cuh"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
namespace delta_block {

using namespace delta;

constexpr unsigned threads = 256, warps = threads / 32;

// ---- products of a block ---------------------------------------------------------------------------------------------------------

constexpr unsigned tile = columns_of_block;  // rows and columns of an output's tile
HOST_DEVICE inline unsigned tiles_of(size_t columns) { return unsigned((columns + tile - 1) / tile); }

// Tensor cores multiply bf16, so a float is the sum of two, x = high + low to 16 bits, and a product has three terms: the fourth, low times low, is as
// small as what x lost. Products of a model in float stay products of floats.
template <class X> struct Tile;
template <> struct Tile<bf16> {
    static constexpr unsigned depth = 64, row = tile + 8;  // padded: ldmatrix reads eight rows from different banks
    bf16 a[2][tile * row], b[2][tile * row];               // high and low; rows or columns, as in memory

    __device__ static void put(bf16 (&to)[2][tile * row], unsigned outer, unsigned inner, float x) {
        const bf16 high = x;
        to[0][outer * row + inner] = high, to[1][outer * row + inner] = x - float(high);
    }
    template <bool by_rows> __device__ void put_a(unsigned outer, unsigned inner, float x) { put(a, outer, inner, x); }
    template <bool by_rows> __device__ void put_b(unsigned outer, unsigned inner, float x) { put(b, outer, inner, x); }

    // A warp has 16 rows and 32 columns of sums, in the layout of mma_m16n8k16.
    template <bool a_rows, bool b_rows> __device__ void multiply(float (&sums)[4][4]) const {
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_of_a = warp % 4 * 16, column = warp / 4 * 32;
        const unsigned eighth = lane % 8, odd = lane / 8 % 2 * 8, upper = lane / 16 * 8;  // of ldmatrix's four matrices
#pragma unroll
        for (unsigned k = 0; k < depth; k += 16) {
            uint32_t left[2][4], right[2][2][4];  // [high or low][16 columns]
            for (unsigned part = 0; part < 2; part++) {
                if constexpr (a_rows) ldmatrix_x4(left[part], a[part] + (row_of_a + odd + eighth) * row + k + upper);
                else ldmatrix_x4_trans(left[part], a[part] + (k + upper + eighth) * row + row_of_a + odd);
                for (unsigned half = 0; half < 2; half++) {
                    const unsigned j = column + half * 16 + upper;
                    if constexpr (b_rows) ldmatrix_x4_trans(right[part][half], b[part] + (k + odd + eighth) * row + j);
                    else ldmatrix_x4(right[part][half], b[part] + (j + eighth) * row + k + odd);
                }
            }
            for (unsigned j = 0; j < 4; j++) {
                const uint32_t *const high = right[0][j / 2] + j % 2 * 2, *const low = right[1][j / 2] + j % 2 * 2;
                mma_m16n8k16(sums[j], left[1], {high[0], high[1]});
                mma_m16n8k16(sums[j], left[0], {low[0], low[1]});
                mma_m16n8k16(sums[j], left[0], {high[0], high[1]});
            }
        }
    }
    // Calls f(a, b, i, j) for this thread's sums[a][b], of row i and column j.
    template <class F> __device__ static void each_sum(F f) {
        const unsigned warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (unsigned a = 0; a < 4; a++)
#pragma unroll
            for (unsigned b = 0; b < 4; b++) f(a, b, warp % 4 * 16 + b / 2 * 8 + g, warp / 4 * 32 + a * 8 + 2 * t + b % 2);
    }
};
template <> struct Tile<float> {
    static constexpr unsigned depth = 32, row = tile + 4;
    float a[depth * row], b[depth * row];  // both (depth, tile)

    template <bool by_rows> __device__ void put_a(unsigned outer, unsigned inner, float x) {
        a[by_rows ? inner * row + outer : outer * row + inner] = x;
    }
    template <bool by_rows> __device__ void put_b(unsigned outer, unsigned inner, float x) {
        b[by_rows ? outer * row + inner : inner * row + outer] = x;
    }

    template <bool a_rows, bool b_rows> __device__ void multiply(float (&sums)[4][4]) const {
        const unsigned i0 = threadIdx.x / 16 * 4, j0 = threadIdx.x % 16 * 4;
        for (unsigned k = 0; k < depth; k++) {
            const auto left = Vec<float>::load(a + k * row + i0), right = Vec<float>::load(b + k * row + j0);
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) sums[i][j] += left[i] * right[j];
        }
    }
    template <class F> __device__ static void each_sum(F f) {
#pragma unroll
        for (unsigned a = 0; a < 4; a++)
#pragma unroll
            for (unsigned b = 0; b < 4; b++) f(a, b, threadIdx.x / 16 * 4 + a, threadIdx.x % 16 * 4 + b);
    }
};

// A factor of a product: f(row, column) is an element. `by_rows`: neighbours in a row are neighbours in memory, else those in a column.
template <bool by_rows, class F> struct Factor { F f; };
template <class F> __device__ Factor<true, F> by_rows(F f) { return {f}; }
template <class F> __device__ Factor<false, F> by_columns(F f) { return {f}; }

constexpr unsigned lanes_of_column = 4;  // threads that share a column of a substitution, every fourth row each

// Row r's weights in later rows, from the four rows that r is one of. The padding is for four lanes' 16-byte loads, and for stores of many rows.
struct RowWeights {
    float of[lanes_of_column][chunk / lanes_of_column + 4], unused[4];
};

template <class X> struct BlockShared {
    union {
        alignas(16) Tile<X> tile;
        alignas(16) RowWeights weights[chunk];  // of a substitution
    };
    float decay[chunk], from_start[chunk], beta[chunk];  // exp(g), c, beta
    float q_factor[chunk], k_factor[chunk];              // 1 / sqrt(|x|^2 + eps)
    float of_start[chunk], of_end[chunk];                // as on the CPU
    float partial[32];
};

// The sum of f(i) over i < n, at most max_D, by a warp. A lane's terms are loaded at once.
template <class F> __device__ float sum_of_row(unsigned n, F f) {
    float sum = 0;
#pragma unroll
    for (unsigned a = 0; a < max_D / 32; a++)
        if (const unsigned i = threadIdx.x % 32 + a * 32; i < n) sum += f(i);
    return warp_sum(sum);
}

struct Nothing {  // for sums that are stored as they are
    __device__ float operator()(unsigned, unsigned) const { return 0; }
};

// Calls f(i) for all i < n, by the threads of the block, and waits for them.
template <class F> __device__ void each(unsigned n, F f) {
    for (unsigned i = threadIdx.x; i < n; i += threads) f(i);
    __syncthreads();
}
// Calls store(i, load(i)) for all i < n. Several loads are in flight before the first store; those beyond n load the last value, because a branch would wait
// for each.
template <class L, class S> __device__ void each_value(unsigned n, L load, S store) {
    constexpr unsigned at_once = 8;
    for (unsigned begin = threadIdx.x; begin < n; begin += at_once * threads) {
        float values[at_once];
#pragma unroll
        for (unsigned a = 0; a < at_once; a++) values[a] = load(min(begin + a * threads, n - 1));
#pragma unroll
        for (unsigned a = 0; a < at_once; a++)
            if (begin + a * threads < n) store(begin + a * threads, values[a]);
    }
    __syncthreads();
}
// Calls f(i, lane) for all i < n, each by a warp, and waits for them.
template <class F> __device__ void each_row(unsigned n, F f) {
    for (unsigned i = threadIdx.x / 32; i < n; i += warps) f(i, threadIdx.x % 32);
    __syncthreads();
}

// A block's matrices, one after the other.
struct BlockMatrices {
    unsigned Dk, Dv;
    float *q, *k, *dq, *dk;                     // (chunk, Dk)
    float *of_q, *of_k, *of_end;                // (chunk, Dk): the parts of dq and dk from the states before and behind the chunk
    float *d, *dout, *dd, *dv;                  // (chunk, Dv)
    float *P, *kk, *qk, *dweights, *dnegative;  // (chunk, chunk), 0 above the diagonal; dnegative is symmetric
    float *state;                               // (Dk, tile)

    HOST_DEVICE static size_t of_block(const DeltaShape &s) { return chunk * (7 * s.Dk + 4 * s.Dv + 5 * chunk) + s.Dk * tile; }

    __device__ BlockMatrices(float *from, const DeltaShape &s) : Dk(unsigned(s.Dk)), Dv(unsigned(s.Dv)) {
        from += (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * of_block(s);
        const auto take = [&](size_t n) { return from += n, from - n; };
        q = take(chunk * Dk), k = take(chunk * Dk), dq = take(chunk * Dk), dk = take(chunk * Dk);
        of_q = take(chunk * Dk), of_k = take(chunk * Dk), of_end = take(chunk * Dk);
        d = take(chunk * Dv), dout = take(chunk * Dv), dd = take(chunk * Dv), dv = take(chunk * Dv);
        P = take(chunk * chunk), kk = take(chunk * chunk), qk = take(chunk * chunk);
        dweights = take(chunk * chunk), dnegative = take(chunk * chunk);
        state = from;
    }
};

// The backward pass goes through the row in windows, from the last one. A window has the chunks that begin in it; the last one may end in the next window.
struct Window {
    size_t begin, end;  // tokens
    float *states,
        *gradients;  // (chunks, Hv, Dk, Dv): S before a chunk, if it is not a document's first, and dL/dS behind it, if it is not its last
    float *e, *dd;    // (tokens, Hv, Dv): e and dL/de
    float *gradient;  // (Hv, Dk, Dv): dL/dS from chunk to chunk, and from a window to the one before

    static size_t tokens(const DeltaShape &s) { return std::min(4 * interval, round_up(s.T, chunk)); }
    static size_t size(const DeltaShape &s) {
        const size_t states = tokens(s) / chunk * s.Hv * s.Dk * s.Dv, values = (tokens(s) + chunk) * s.Hv * s.Dv;
        return 2 * states + 2 * values + s.Hv * s.Dk * s.Dv;
    }
    Window(float *from, size_t number, const DeltaShape &s) : begin(number * tokens(s)), end(std::min(s.T, begin + tokens(s))) {
        const size_t of_states = tokens(s) / chunk * s.Hv * s.Dk * s.Dv, of_values = (tokens(s) + chunk) * s.Hv * s.Dv;
        states = from, gradients = states + of_states;
        e = gradients + of_states, dd = e + of_values;
        gradient = dd + of_values;
    }
    // No two chunks that are not the first ones of their documents begin in the same 64 tokens; nor do two that are not the last ones.
    __device__ size_t state_at(size_t token, size_t h, const DeltaShape &s) const {
        return ((token - begin) / chunk * s.Hv + h) * s.Dk * s.Dv;
    }
    __device__ size_t value_at(size_t token, size_t h, const DeltaShape &s) const { return ((token - begin) * s.Hv + h) * s.Dv; }
};

template <class X> struct Block {
    BlockShared<X> &shared;
    BlockMatrices m;
    const X *qkv;
    DeltaGates<const float> gates;
    const DeltaShape &s;
    size_t head;                                                            // of keys
    static constexpr unsigned of_thread = tile * Tile<X>::depth / threads;  // elements of a factor's tile

    // Calls f(n, outer, inner) for the n-th element of this thread of a tile with `row` elements in a row.
    template <unsigned row, class F> __device__ static void each_of_tile(F f) {
        static_assert(threads % row == 0);
#pragma unroll
        for (unsigned n = 0; n < of_thread; n++) f(n, threadIdx.x / row + n * (threads / row), threadIdx.x % row);
    }

    // store(i, j, sum, load(i, j)) gets the sums over k of a(i, k) b(k, j), for i < n and j < columns, and may overwrite what only load(i, j) reads.
    template <bool a_rows, class A, bool b_rows, class B, class L, class S>
    __device__ void multiply(unsigned n, unsigned columns, unsigned K, Factor<a_rows, A> a, Factor<b_rows, B> b, L load,
                             S store) {
        constexpr unsigned depth = Tile<X>::depth;
        const auto each_of_a = [](auto f) { each_of_tile<a_rows ? depth : tile>(f); };
        const auto each_of_b = [](auto f) { each_of_tile<b_rows ? tile : depth>(f); };
        for (unsigned i0 = 0; i0 < n; i0 += tile)
            for (unsigned j0 = 0; j0 < columns; j0 += tile) {
                float sums[4][4] = {};
                for (unsigned k0 = 0; k0 < K; k0 += depth) {
                    float from_a[of_thread], from_b[of_thread];  // all loads are in flight before the first store
                    each_of_a([&](unsigned e, unsigned outer, unsigned inner) {
                        const unsigned i = i0 + (a_rows ? outer : inner), k = k0 + (a_rows ? inner : outer);
                        from_a[e] = i < n && k < K ? a.f(i, k) : 0.0f;
                    });
                    each_of_b([&](unsigned e, unsigned outer, unsigned inner) {
                        const unsigned k = k0 + (b_rows ? outer : inner), j = j0 + (b_rows ? inner : outer);
                        from_b[e] = k < K && j < columns ? b.f(k, j) : 0.0f;
                    });
                    each_of_a([&](unsigned e, unsigned outer, unsigned inner) {
                        shared.tile.template put_a<a_rows>(outer, inner, from_a[e]);
                    });
                    each_of_b([&](unsigned e, unsigned outer, unsigned inner) {
                        shared.tile.template put_b<b_rows>(outer, inner, from_b[e]);
                    });
                    __syncthreads();
                    shared.tile.template multiply<a_rows, b_rows>(sums);
                    __syncthreads();
                }
                float loaded[4][4];
                Tile<X>::each_sum([&](unsigned a, unsigned b, unsigned i, unsigned j) {
                    loaded[a][b] = i0 + i < n && j0 + j < columns ? load(i0 + i, j0 + j) : 0.0f;
                });
                Tile<X>::each_sum([&](unsigned a, unsigned b, unsigned i, unsigned j) {
                    if (i0 + i < n && j0 + j < columns) store(i0 + i, j0 + j, sums[a][b], loaded[a][b]);
                });
            }
        __syncthreads();
    }

    // Solves x[i] += sum_r weight(i, r) x[r] for the rows of x (n, columns), with the sum over the rows before i, or from the last row (from_last) over those
    // behind it, and calls store(i, j, x[i][j]). Every row is subtracted from all later ones as soon as it is known.
    template <bool from_last, class W, class S>
    __device__ void substitute(const float *x, unsigned n, unsigned columns, W weight, S store) {
        constexpr unsigned of_lane = chunk / lanes_of_column;
        const auto row = [&](unsigned i) { return from_last ? n - 1 - i : i; };
        each_value(
            chunk * chunk,
            [&](unsigned at) {
                const unsigned r = at % chunk, i = r / lanes_of_column * lanes_of_column + at / chunk;
                return i < n && r < i ? weight(row(i), row(r)) : 0.0f;
            },
            [&](unsigned at, float value) {
                const unsigned behind = at / chunk;
                shared.weights[at % chunk].of[behind % lanes_of_column][behind / lanes_of_column] = value;
            });
        const unsigned lane = threadIdx.x % 32, part = lane % lanes_of_column;
        // Columns are eights, so a warp has eight or none.
        for (unsigned j = threadIdx.x / lanes_of_column; j < columns; j += threads / lanes_of_column) {
            float y[of_lane];  // of the rows from the next four that become known
#pragma unroll
            for (unsigned m = 0; m < of_lane; m++) {
                const unsigned i = m * lanes_of_column + part;
                y[m] = i < n ? x[row(i) * columns + j] : 0.0f;
            }
#pragma unroll 1
            for (unsigned r = 0; r < n; r += lanes_of_column) {
#pragma unroll
                for (unsigned q = 0; q < lanes_of_column; q++) {
                    const float known = __shfl_sync(all_lanes, y[0], int(lane - part + q));
#pragma unroll
                    for (unsigned m = 0; m < of_lane; m++) y[m] += shared.weights[r + q].of[part][m] * known;
                }
                if (r + part < n) store(row(r + part), j, y[0]);
#pragma unroll
                for (unsigned m = 0; m + 1 < of_lane; m++) y[m] = y[m + 1];
                y[of_lane - 1] = 0;
            }
        }
        __syncthreads();
    }

    __device__ void load_keys(const Chunk &c) {
        const X *x = qkv + c.begin * s.row() + head * m.Dk;
        const float scale = rsqrtf(float(m.Dk));
        constexpr unsigned at_once = 4,
                           of_lane = max_D / 32;  // rows of a warp whose loads are in flight at once; elements of a row
        const unsigned lane = threadIdx.x % 32, rows = 2 * unsigned(c.n);
        for (unsigned row = threadIdx.x / 32; row < rows; row += at_once * warps) {
            float values[at_once][of_lane];
#pragma unroll
            for (unsigned a = 0; a < at_once; a++)
#pragma unroll
                for (unsigned b = 0; b < of_lane; b++) {
                    const unsigned t = (row + a * warps) / 2, r = lane + 32 * b;
                    const X *x_t = x + t * s.row() + (row + a * warps) % 2 * s.Hk * m.Dk;
                    values[a][b] = t < c.n && r < m.Dk ? float(x_t[r]) : 0.0f;
                }
#pragma unroll
            for (unsigned a = 0; a < at_once; a++) {
                const unsigned t = (row + a * warps) / 2;
                const bool is_key = (row + a * warps) % 2;
                float *out = (is_key ? m.k : m.q) + t * m.Dk, sum = 0;
                for (const float v : values[a]) sum += v * v;
                const float factor = 1.0f / sqrtf(warp_sum(sum) + s.eps);
                if (t >= c.n) continue;
                if (lane == 0) (is_key ? shared.k_factor : shared.q_factor)[t] = factor;
#pragma unroll
                for (unsigned b = 0; b < of_lane; b++)
                    if (const unsigned r = lane + 32 * b; r < m.Dk) out[r] = values[a][b] * factor * (is_key ? 1.0f : scale);
            }
        }
        __syncthreads();
        const auto multiply_by_keys = [&](float *out, const float *x) {
            multiply(c.n, c.n, m.Dk, by_rows([=, this](unsigned i, unsigned r) { return x[i * m.Dk + r]; }),
                     by_columns([=, this](unsigned r, unsigned j) { return m.k[j * m.Dk + r]; }), Nothing(),
                     [=](unsigned i, unsigned j, float sum, float) { out[i * chunk + j] = j <= i ? sum : 0.0f; });
        };
        multiply_by_keys(m.kk, m.k), multiply_by_keys(m.qk, m.q);
    }

    __device__ void load_gates(const Chunk &c, size_t h) {
        each(c.n, [&](unsigned t) {
            const size_t at = (c.begin + t) * s.Hv + h;
            shared.decay[t] = expf(gates.g[at]), shared.beta[t] = gates.beta[at];
        });
        each_row(
            unsigned(c.n), [&](unsigned i, unsigned lane) {  // products from the right over columns j = lane, and 32 further on
                float low = lane < i ? shared.decay[lane + 1] : 1.0f, high = lane + 32 < i ? shared.decay[lane + 33] : 1.0f;
                for (unsigned distance = 1; distance < 32; distance *= 2) {
                    const float l = __shfl_down_sync(all_lanes, low, distance), h = __shfl_down_sync(all_lanes, high, distance);
                    if (lane + distance < 32) low *= l, high *= h;
                }
                low *= __shfl_sync(all_lanes, high, 0);
                m.P[i * chunk + lane] = lane <= i ? low : 0.0f, m.P[i * chunk + lane + 32] = lane + 32 <= i ? high : 0.0f;
                if (lane == 0) shared.from_start[i] = low * shared.decay[0];
            });
    }

    // e and d = beta e (c.n, columns), from columns of the state before the chunk, whose rows are `row` elements apart; values null: all are 0
    __device__ void solve(float *e, float *d, const float *state, unsigned row, const Chunk &c, const X *values,
                          unsigned columns) {
        const unsigned n = unsigned(c.n);
        multiply(
            n, columns, c.first ? 0 : m.Dk, by_rows([&](unsigned i, unsigned r) { return m.k[i * m.Dk + r]; }),
            by_rows([&](unsigned r, unsigned j) { return state[r * row + j]; }),
            [&](unsigned i, unsigned j) { return values ? float(values[i * s.row() + j]) : 0.0f; },
            [&](unsigned i, unsigned j, float sum, float value) { e[i * columns + j] = value - shared.from_start[i] * sum; });
        substitute<false>(
            e, n, columns, [&](unsigned i, unsigned r) { return -m.P[i * chunk + r] * m.kk[i * chunk + r] * shared.beta[r]; },
            [&](unsigned i, unsigned j, float x) { e[i * columns + j] = x, d[i * columns + j] = shared.beta[i] * x; });
    }
    __device__ const X *values(const Chunk &c, size_t h) const { return qkv + c.begin * s.row() + s.values_at(h); }

    __device__ void advance(float *to, const float *state, unsigned row, const float *d, const Chunk &c, unsigned columns) {
        const unsigned n = unsigned(c.n);
        multiply(
            m.Dk, columns, n, by_columns([&](unsigned r, unsigned t) { return m.k[t * m.Dk + r] * m.P[(n - 1) * chunk + t]; }),
            by_rows([&](unsigned t, unsigned j) { return d[t * columns + j]; }),
            [&](unsigned r, unsigned j) { return c.first ? 0.0f : state[r * row + j]; },
            [&](unsigned r, unsigned j, float sum, float before) { to[r * row + j] = shared.from_start[n - 1] * before + sum; });
    }

    // Columns [from, from + columns) of value head h; `state` is the state of these columns.
    __device__ void forward(X *out, float *states, float *state, size_t h, unsigned from, unsigned columns,
                            const int32_t *doc_pos, const Chunk &c, const DeltaStates<float> &ends,
                            const DeltaStates<const float> &starts) {
        const unsigned n = unsigned(c.n), of_state = c.first ? 0 : m.Dk;  // of_state: rows of S among those of the second factor
        load_keys(c);
        if (starts.has(c.begin)) copy(state, columns, starts.of(c.begin, h, s) + from, m.Dv, m.Dk, columns);
        if (is_kept(doc_pos[c.begin])) copy(states + state_at(c.begin, h, s) + from, m.Dv, state, columns, m.Dk, columns);
        load_gates(c, h);
        solve(m.dd, m.d, state, columns, c, values(c, h) + from, columns);
        multiply(n, columns, of_state + n, by_rows([&](unsigned t, unsigned r) {
                     if (r < of_state) return shared.from_start[t] * m.q[t * m.Dk + r];
                     const unsigned pair = t * chunk + r - of_state;
                     return m.P[pair] * m.qk[pair];
                 }),
                 by_rows([&](unsigned r, unsigned j) {
                     return r < of_state ? state[r * columns + j] : m.d[(r - of_state) * columns + j];
                 }),
                 Nothing(),
                 [&](unsigned t, unsigned j, float sum, float) { out[((c.begin + t) * s.Hv + h) * s.Dv + from + j] = sum; });
        advance(state, state, columns, m.d, c, columns);
        if (ends.has(c.end())) copy(ends.of(c.end(), h, s) + from, m.Dv, state, columns, m.Dk, columns);
    }

    // (n, columns); the rows of both are so many elements apart.
    template <class Y>
    __device__ static void copy(float *to, size_t to_row, const Y *from, size_t from_row, unsigned n, unsigned columns) {
        each_value(
            n * columns, [&](unsigned at) { return from[at / columns * from_row + at % columns]; },
            [&](unsigned at, float x) { to[at / columns * to_row + at % columns] = x; });
    }

    __device__ void backward(X *dqkv, DeltaGates<float> dgates, const X *dout, const Chunk &c, const Window &window) {
        const unsigned values = unsigned(c.n) * m.Dv;
        load_keys(c);
        each(unsigned(c.n) * m.Dk, [&](unsigned at) { m.dq[at] = m.dk[at] = 0; });
        for (size_t h = head * s.group(); h < (head + 1) * s.group(); h++) {
            const float *const e = window.e + window.value_at(c.begin, h, s), *const dd =
                                                                                  window.dd + window.value_at(c.begin, h, s);
            load_gates(c, h);
            load_gradients(dout, c, h, 0, m.Dv);
            const auto by_beta = [&](float *to, const float *x) {
                each_value(
                    values, [&](unsigned at) { return shared.beta[at / m.Dv] * x[at / m.Dv * s.Hv * m.Dv + at % m.Dv]; },
                    [&](unsigned at, float value) { to[at] = value; });
            };
            by_beta(m.d, e), by_beta(m.dv, dd);
            each_row(unsigned(c.n), [&](unsigned t, unsigned lane) {
                const size_t row = t * s.Hv * m.Dv;
                X *const dv = dqkv + (c.begin + t) * s.row() + s.values_at(h);
                const float dbeta = sum_of_row(m.Dv, [&](unsigned j) { return dd[row + j] * e[row + j]; });
                if (lane == 0) dgates.beta[(c.begin + t) * s.Hv + h] = dbeta;
                for (unsigned j = lane; j < m.Dv; j += 32) dv[j] = m.dv[t * m.Dv + j];
            });
            const size_t at = window.state_at(c.begin, h, s);
            gradients_of_products(dgates, c, h, window.states + at, window.gradients + at);
        }
        each_row(2 * c.n, [&](unsigned at, unsigned lane) {
            const bool is_key = at >= c.n;
            const unsigned t = is_key ? at - c.n : at;
            const float scale = is_key ? 1.0f : rsqrtf(float(m.Dk)), factor = (is_key ? shared.k_factor : shared.q_factor)[t];
            const float *d = (is_key ? m.dk : m.dq) + t * m.Dk, *x = (is_key ? m.k : m.q) + t * m.Dk;
            X *to = dqkv + (c.begin + t) * s.row() + (is_key ? s.Hk * m.Dk : 0) + head * m.Dk;
            const float along = sum_of_row(m.Dk, [&](unsigned r) { return d[r] * x[r]; });
            for (unsigned r = lane; r < m.Dk; r += 32) to[r] = factor * (scale * d[r] - along / scale * x[r]);
        });
    }

    // Columns [from, from + columns) of dL/dout of value head h.
    __device__ void load_gradients(const X *dout, const Chunk &c, size_t h, unsigned from, unsigned columns) {
        copy(m.dout, columns, dout + (c.begin * s.Hv + h) * m.Dv + from, s.Hv * m.Dv, unsigned(c.n), columns);
    }

    // dd, dL/de, and dv = beta dd, (c.n, columns), from columns of dL/dS behind the chunk
    __device__ void gradients_of_updates(const float *gradient, unsigned row, const Chunk &c, unsigned columns) {
        const unsigned n = unsigned(c.n), of_state = c.last ? 0 : m.Dk;
        multiply(n, columns, of_state + n, by_rows([&](unsigned t, unsigned r) {
                     if (r < of_state) return m.P[(n - 1) * chunk + t] * m.k[t * m.Dk + r];
                     const unsigned pair = (r - of_state) * chunk + t;
                     return m.P[pair] * m.qk[pair];
                 }),
                 by_rows([&](unsigned r, unsigned j) {
                     return r < of_state ? gradient[r * row + j] : m.dout[(r - of_state) * columns + j];
                 }),
                 Nothing(), [&](unsigned t, unsigned j, float sum, float) { m.dd[t * columns + j] = sum; });
        substitute<true>(
            m.dd, n, columns, [&](unsigned t, unsigned r) { return -m.P[r * chunk + t] * m.kk[r * chunk + t] * shared.beta[r]; },
            [&](unsigned t, unsigned j, float x) { m.dd[t * columns + j] = x, m.dv[t * columns + j] = shared.beta[t] * x; });
    }

    // Columns of dL/dS before the chunk, from those behind it.
    __device__ void retreat(float *gradient, unsigned row, const Chunk &c, unsigned columns) {
        const unsigned n = unsigned(c.n);
        multiply(
            m.Dk, columns, 2 * n, by_columns([&](unsigned r, unsigned t) {
                return t < n ? shared.from_start[t] * m.q[t * m.Dk + r] : -shared.from_start[t - n] * m.k[(t - n) * m.Dk + r];
            }),
            by_rows([&](unsigned t, unsigned j) { return t < n ? m.dout[t * columns + j] : m.dv[(t - n) * columns + j]; }),
            [&](unsigned r, unsigned j) { return c.last ? 0.0f : gradient[r * row + j]; },
            [&](unsigned r, unsigned j, float sum, float behind) {
                gradient[r * row + j] = shared.from_start[n - 1] * behind + sum;
            });
    }

    // `before` is S before the chunk, and `gradient` is dL/dS behind it.
    __device__ void gradients_of_products(DeltaGates<float> dgates, const Chunk &c, size_t h, const float *before,
                                          const float *gradient) {
        const unsigned n = unsigned(c.n);
        const float *const to_end = m.P + (n - 1) * chunk;
        const auto by_updates = [&](const float *x, auto store) {  // store(t, r, P x d^T)
            multiply(
                n, n, m.Dv, by_rows([&](unsigned t, unsigned j) { return x[t * m.Dv + j]; }),
                by_columns([&](unsigned j, unsigned r) { return m.d[r * m.Dv + j]; }),
                [&](unsigned t, unsigned r) { return m.P[t * chunk + r]; },
                [&](unsigned t, unsigned r, float sum, float decay) { store(t, r, decay * sum); });
        };
        by_updates(m.dout, [&](unsigned t, unsigned r, float x) { m.dweights[t * chunk + r] = r <= t ? x : 0.0f; });
        by_updates(m.dv, [&](unsigned t, unsigned r, float x) {
            if (r <= t) m.dnegative[t * chunk + r] = m.dnegative[r * chunk + t] = r < t ? -x : 0.0f;
        });
        const auto by_state = [&](float *out, const float *x, const float *state,
                                  const float *factor) {  // diag(factor) x state^T
            multiply(
                n, m.Dk, m.Dv, by_rows([&](unsigned t, unsigned j) { return x[t * m.Dv + j]; }),
                by_columns([&](unsigned j, unsigned r) { return state[r * m.Dv + j]; }),
                [&](unsigned t, unsigned) { return factor[t]; },
                [&](unsigned t, unsigned r, float sum, float factor_t) { out[t * m.Dk + r] = factor_t * sum; });
        };
        if (!c.first) by_state(m.of_q, m.dout, before, shared.from_start), by_state(m.of_k, m.dv, before, shared.from_start);
        if (!c.last) by_state(m.of_end, m.d, gradient, to_end);
        multiply(
            n, m.Dk, n, by_rows([&](unsigned t, unsigned j) { return m.dweights[t * chunk + j]; }),
            by_rows([&](unsigned j, unsigned r) { return m.k[j * m.Dk + r]; }),
            [&](unsigned t, unsigned r) { return m.dq[t * m.Dk + r] + (c.first ? 0.0f : m.of_q[t * m.Dk + r]); },
            [&](unsigned t, unsigned r, float sum, float others) { m.dq[t * m.Dk + r] = others + sum; });
        multiply(
            n, m.Dk, 2 * n, by_rows([&](unsigned t, unsigned j) {
                return *(j < n ? m.dnegative + t * chunk + j : m.dweights + (j - n) * chunk + t);
            }),
            by_rows([&](unsigned j, unsigned r) { return j < n ? m.k[j * m.Dk + r] : m.q[(j - n) * m.Dk + r]; }),
            [&](unsigned t, unsigned r) {
                const unsigned at = t * m.Dk + r;
                return m.dk[at] - (c.first ? 0.0f : m.of_k[at]) + (c.last ? 0.0f : m.of_end[at]);
            },
            [&](unsigned t, unsigned r, float sum, float others) { m.dk[t * m.Dk + r] = others + sum; });
        // The terms of dg from states: q (S dout) - k (S dv), and k (G d).
        each_row(n, [&](unsigned t, unsigned lane) {
            const float *const q = m.q + t * m.Dk, *const k = m.k + t * m.Dk;
            const float *const of_q = m.of_q + t * m.Dk, *const of_k = m.of_k + t * m.Dk, *const of_end = m.of_end + t * m.Dk;
            const float start = c.first ? 0.0f : sum_of_row(m.Dk, [&](unsigned r) { return q[r] * of_q[r] - k[r] * of_k[r]; });
            const float end = c.last ? 0.0f : sum_of_row(m.Dk, [&](unsigned r) { return k[r] * of_end[r]; });
            if (lane == 0) shared.of_start[t] = start, shared.of_end[t] = end;
        });
        float products_of_states = 0;
        for (unsigned at = threadIdx.x; at < m.Dk * m.Dv && !c.first && !c.last; at += threads)
            products_of_states += gradient[at] * before[at];
        const float of_state = block_sum(products_of_states, shared.partial) * shared.from_start[n - 1];
        // The terms from pairs of tokens r < t' <= t are sums over the rows from t' of a column, a product with ones. P is not needed again.
        multiply(n, n, n, by_rows([](unsigned t, unsigned row) { return row >= t ? 1.0f : 0.0f; }),
                 by_rows([&](unsigned row, unsigned r) {
                     const unsigned pair = row * chunk + r;
                     return m.dweights[pair] * m.qk[pair] + m.dnegative[pair] * m.kk[pair];
                 }),
                 Nothing(), [&](unsigned t, unsigned r, float sum, float) { m.P[t * chunk + r] = sum; });
        each_row(n, [&](unsigned t, unsigned lane) {
            float sum = 0;
            for (unsigned r = lane; r < n; r += 32) sum += r < t ? m.P[t * chunk + r] + shared.of_end[r] : shared.of_start[r];
            sum = warp_sum(sum);
            if (lane == 0) dgates.g[(c.begin + t) * s.Hv + h] = of_state + sum;
        });
    }
};

inline Grid forward_grid(const DeltaShape &s) { return {column_blocks(s), parts_of_row(s)}; }
// In the backward pass, a block for 64 columns of a value head, and one for a key head and every so many chunks.
inline Grid columns_grid(const DeltaShape &s) { return {column_blocks(s)}; }
inline Grid chunks_grid(const DeltaShape &s) {
    return {s.Hk, std::clamp<size_t>(many_blocks / s.Hk, 1, Window::tokens(s) / chunk)};
}
// Of delta_pieces.cuh, a block for 64 columns of E, M or F.
inline Grid ends_grid(const DeltaShape &s) { return {s.Hv * (tiles_of(s.Dv) + tiles_of(s.Dk))}; }

// Returns the first token of [from, end) that begins a document, or end. Each warp searches alone, 32 tokens at a time.
__device__ inline size_t next_document(const int32_t *doc_pos, size_t from, size_t end) {
    for (size_t t = from; t < end; t += 32) {
        const size_t at = t + threadIdx.x % 32;
        if (const unsigned found = __ballot_sync(all_lanes, at < end && doc_pos[at] == 0))
            return t + unsigned(__ffs(int(found))) - 1;
    }
    return end;
}
__device__ inline size_t begin_of_part(unsigned p, const int32_t *doc_pos, size_t T) {
    return next_document(doc_pos, T * p / gridDim.y, T);
}
// Returns the first token from t that begins a chunk, or T.
__device__ inline size_t next_chunk(const int32_t *doc_pos, size_t t, size_t T) {
    if (t >= T) return T;
    const size_t of_document = t + (chunk - size_t(doc_pos[t]) % chunk) % chunk;
    return next_document(doc_pos, t, min(of_document, T));
}

}  // namespace delta_block

template <class X> size_t gated_delta_scratch(Cuda<X>, const DeltaShape &s) {
    using namespace delta_block;
    const auto blocks = [&](const Grid &grid) { return grid.x * grid.y * BlockMatrices::of_block(s); };
    return std::max({blocks(forward_grid(s)), blocks(ends_grid(s)),
                     Window::size(s) + std::max(blocks(columns_grid(s)), blocks(chunks_grid(s)))});
}

// A block computes 64 columns of a value head.
template <class X>
__global__ void __launch_bounds__(delta_block::threads, 1)
    gated_delta_forward_kernel3(X *out, float *states, float *scratch, const X *qkv, DeltaGates<const float> gates,
                                const int32_t *doc_pos, DeltaShape s, DeltaStates<float> ends, DeltaStates<const float> starts) {
    using namespace delta_block;
    const unsigned parts = tiles_of(s.Dv), h = blockIdx.x / parts, from = blockIdx.x % parts * tile;
    const BlockMatrices m(scratch, s);
    Block<X> block{shared_mem<BlockShared<X>>(), m, qkv, gates, s, h / s.group()};
    const size_t behind = begin_of_part(blockIdx.y + 1, doc_pos, s.T);
    for (size_t begin = begin_of_part(blockIdx.y, doc_pos, s.T), end; begin < behind; begin = end) {
        end = next_document(doc_pos, begin + 1, min(begin + chunk, behind));
        const Chunk c{begin, end - begin, doc_pos[begin] == 0 && !starts.has(begin), false};
        block.forward(out, states, m.state, h, from, min(tile, m.Dv - from), doc_pos, c, ends, starts);
    }
}

template <class X>
void gated_delta_forward(Cuda<X> dev, X *out, float *states, float *scratch, const X *qkv, DeltaGates<const float> gates,
                         const int32_t *doc_pos, DeltaShape shape, DeltaStates<float> ends = {},
                         DeltaStates<const float> starts = {}) {
    using namespace delta_block;
    launch(dev, gated_delta_forward_kernel3<X>, forward_grid(shape), threads, sizeof(BlockShared<X>), out, states, scratch, qkv,
           gates, doc_pos, shape, ends, starts);
}

// A block computes 64 columns of the states before the window's chunks, and of e, from the nearest kept state.
template <class X>
__global__ void __launch_bounds__(delta_block::threads, 1)
    gated_delta_backward_states_kernel2(delta_block::Window window, float *scratch, const X *qkv, DeltaGates<const float> gates,
                                        const float *states, const int32_t *doc_pos, DeltaShape s,
                                        DeltaStates<const float> starts) {
    using namespace delta_block;
    const unsigned parts = tiles_of(s.Dv), h = blockIdx.x / parts, from = blockIdx.x % parts * tile;
    const BlockMatrices m(scratch, s);
    Block<X> block{shared_mem<BlockShared<X>>(), m, qkv, gates, s, h / s.group()};
    const unsigned columns = min(tile, m.Dv - from);
    const size_t first = next_chunk(doc_pos, window.begin, s.T);
    if (first >= window.end) return;
    size_t begin = first - size_t(doc_pos[first]) % interval;
    if (is_kept(doc_pos[begin])) block.copy(m.state, columns, states + state_at(begin, h, s) + from, m.Dv, m.Dk, columns);
    for (size_t end; begin < window.end; begin = end) {
        end = next_document(doc_pos, begin + 1, min(begin + chunk, s.T));
        const Chunk c{begin, end - begin, doc_pos[begin] == 0 && !starts.has(begin), false};
        if (starts.has(begin)) block.copy(m.state, columns, starts.of(begin, h, s) + from, m.Dv, m.Dk, columns);
        if (begin >= first && !c.first)
            block.copy(window.states + window.state_at(begin, h, s) + from, m.Dv, m.state, columns, m.Dk, columns);
        block.load_keys(c);
        block.load_gates(c, h);
        block.solve(m.dd, m.d, m.state, columns, c, block.values(c, h) + from, columns);
        if (begin >= first)
            block.copy(window.e + window.value_at(begin, h, s) + from, s.Hv * s.Dv, m.dd, columns, unsigned(c.n), columns);
        block.advance(m.state, m.state, columns, m.d, c, columns);
    }
}

// A block computes 64 columns of dL/dS behind the window's chunks, and of dL/de, from the last chunk.
template <class X>
__global__ void __launch_bounds__(delta_block::threads, 1)
    gated_delta_backward_updates_kernel2(delta_block::Window window, float *scratch, const X *dout, const X *qkv,
                                         DeltaGates<const float> gates, const int32_t *doc_pos, DeltaShape s,
                                         DeltaStates<const float> ends, DeltaStates<const float> starts) {
    using namespace delta_block;
    const unsigned parts = tiles_of(s.Dv), h = blockIdx.x / parts, from = blockIdx.x % parts * tile;
    const BlockMatrices m(scratch, s);
    Block<X> block{shared_mem<BlockShared<X>>(), m, qkv, gates, s, h / s.group()};
    const unsigned columns = min(tile, m.Dv - from);
    float *const gradient = window.gradient + h * s.Dk * s.Dv + from;
    for (size_t behind = window.end, begin; behind > window.begin; behind = begin) {
        begin = behind - 1 - size_t(doc_pos[behind - 1]) % chunk;
        if (begin < window.begin) break;
        const size_t end = next_document(doc_pos, begin + 1, min(begin + chunk, s.T));
        const bool is_last = (end == s.T || doc_pos[end] == 0) && !ends.has(end - 1);
        const Chunk c{begin, end - begin, doc_pos[begin] == 0 && !starts.has(begin), is_last};
        block.load_keys(c);
        block.load_gates(c, h);
        block.load_gradients(dout, c, h, from, columns);
        if (ends.has(c.end())) block.copy(gradient, m.Dv, ends.of(c.end(), h, s) + from, m.Dv, m.Dk, columns);
        if (!c.last) block.copy(window.gradients + window.state_at(begin, h, s) + from, m.Dv, gradient, m.Dv, m.Dk, columns);
        block.gradients_of_updates(gradient, m.Dv, c, columns);
        block.copy(window.dd + window.value_at(begin, h, s) + from, s.Hv * s.Dv, m.dd, columns, unsigned(c.n), columns);
        if (!c.first) block.retreat(gradient, m.Dv, c, columns);
    }
}

// A block computes the gradients of a key head and its value heads in some of the window's chunks.
template <class X>
__global__ void __launch_bounds__(delta_block::threads, 1)
    gated_delta_backward_kernel2(X *dqkv, DeltaGates<float> dgates, delta_block::Window window, float *scratch, const X *dout,
                                 const X *qkv, DeltaGates<const float> gates, const int32_t *doc_pos, DeltaShape s,
                                 DeltaStates<const float> ends, DeltaStates<const float> starts) {
    using namespace delta_block;
    Block<X> block{shared_mem<BlockShared<X>>(), BlockMatrices(scratch, s), qkv, gates, s, blockIdx.x};
    for (size_t from = window.begin + blockIdx.y * chunk; from < window.end; from += gridDim.y * chunk)
        for (size_t begin = next_chunk(doc_pos, from, s.T), end; begin < min(from + chunk, window.end); begin = end) {
            end = next_document(doc_pos, begin + 1, min(begin + chunk, s.T));
            const bool is_last = (end == s.T || doc_pos[end] == 0) && !ends.has(end - 1);
            block.backward(dqkv, dgates, dout, {begin, end - begin, doc_pos[begin] == 0 && !starts.has(begin), is_last}, window);
        }
}

template <class X>
void gated_delta_backward(Cuda<X> dev, X *dqkv, DeltaGates<float> dgates, float *scratch, const X *dout, const X *qkv,
                          DeltaGates<const float> gates, const float *states, const int32_t *doc_pos, DeltaShape shape,
                          DeltaStates<const float> ends = {}, DeltaStates<const float> starts = {}) {
    using namespace delta_block;
    constexpr size_t shared = sizeof(BlockShared<X>);
    float *const blocks = scratch + Window::size(shape);
    for (size_t number = ceil_div(shape.T, Window::tokens(shape)); number-- > 0;) {
        const Window window(scratch, number, shape);
        launch(dev, gated_delta_backward_states_kernel2<X>, columns_grid(shape), threads, shared, window, blocks, qkv, gates,
               states, doc_pos, shape, starts);
        launch(dev, gated_delta_backward_updates_kernel2<X>, columns_grid(shape), threads, shared, window, blocks, dout, qkv,
               gates, doc_pos, shape, ends, starts);
        launch(dev, gated_delta_backward_kernel2<X>, chunks_grid(shape), threads, shared, dqkv, dgates, window, blocks, dout, qkv,
               gates, doc_pos, shape, ends, starts);
    }
}
}  // namespace CUDA_BACKEND
