// The gated delta rule on CUDA. Contract and formulas: gated_delta.h.
//
// A block computes a key head with its value heads, chunk by chunk. Its matrices are in scratch memory, which the L2 cache holds, and each of its threads
// computes elements of a product alone. The sums of a column of e, of d and of their gradients depend only on that column, so a thread substitutes a
// column without a barrier.
#pragma once
#include "gated_delta.h"
#include "warp.cuh"

inline namespace CUDA_BACKEND {
namespace delta_block {

using namespace delta;

struct BlockShared {
    float decay[chunk], from_start[chunk], beta[chunk];  // exp(g), c, beta
    float q_factor[chunk], k_factor[chunk];              // 1 / sqrt(|x|^2 + eps)
    float of_start[chunk], of_end[chunk], of_state;      // as on the CPU
    float partial[32];
};

struct Factor {  // element (i, k) is data[i * row + k * column]
    const float *data;
    size_t row, column = 1;
};

// Calls f(i) for all i < n, by the threads of the block, and waits for them.
template <class F> __device__ void each(size_t n, F f) {
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
    __syncthreads();
}

// f(i, j, sum) gets the products' sums over k, a[i,k] b[k,j], for i < n and j < m; `terms` as on the CPU.
template <class F> __device__ void products(Factor a, Factor b, size_t n, size_t m, size_t K, Sum terms, F f) {
    each(n * m, [&](size_t at) {
        const size_t i = at / m, j = at % m, begin = terms == Sum::from_row ? i : 0, end = terms == Sum::to_row ? i + 1 : K;
        float sum = 0;
        for (size_t k = begin; k < end; k++) sum += a.data[i * a.row + k * a.column] * b.data[k * b.row + j * b.column];
        f(i, j, sum);
    });
}

// The block's matrices, one after the other: first those of a chunk, then for each value head of the group dL/dS, and the states and e of an interval.
struct BlockMatrices {
    static constexpr size_t chunks = interval / chunk;
    size_t Dk, Dv, of_one;                      // of_head
    float *q, *k, *dq, *dk;                     // (chunk, Dk)
    float *d, *dout, *dd, *dv;                  // (chunk, Dv)
    float *P, *kk, *qk, *dweights, *dnegative;  // (chunk, chunk), 0 above the diagonal
    float *heads;

    HOST_DEVICE static size_t of_chunk(const DeltaShape &s) { return 4 * chunk * (s.Dk + s.Dv) + 5 * chunk * chunk; }
    HOST_DEVICE static size_t of_head(const DeltaShape &s) { return (1 + chunks) * s.Dk * s.Dv + chunks * chunk * s.Dv; }
    HOST_DEVICE static size_t of_block(const DeltaShape &s) { return of_chunk(s) + s.group() * of_head(s); }

    __device__ BlockMatrices(float *from, const DeltaShape &s) : Dk(s.Dk), Dv(s.Dv), of_one(of_head(s)) {
        const auto take = [&](size_t n) { return from += n, from - n; };
        q = take(chunk * Dk), k = take(chunk * Dk), dq = take(chunk * Dk), dk = take(chunk * Dk);
        d = take(chunk * Dv), dout = take(chunk * Dv), dd = take(chunk * Dv), dv = take(chunk * Dv);
        P = take(chunk * chunk), kk = take(chunk * chunk), qk = take(chunk * chunk);
        dweights = take(chunk * chunk), dnegative = take(chunk * chunk);
        heads = from;
    }
    __device__ float *gradient(size_t i) const { return heads + i * of_one; }
    __device__ float *state(size_t i, size_t c) const { return gradient(i) + (1 + c) * Dk * Dv; }
    __device__ float *e(size_t i, size_t c) const { return state(i, chunks) + c * chunk * Dv; }
};

template <class X> struct Block {
    BlockShared &shared;
    BlockMatrices m;
    const X *qkv;
    DeltaGates<const float> gates;
    const DeltaShape &s;
    size_t head;  // of keys

    __device__ void load_keys(const Chunk &c) {
        const X *x = qkv + c.begin * s.row() + head * s.Dk;
        const float scale = rsqrtf(float(s.Dk));
        each(2 * c.n, [&](size_t at) {
            const bool is_key = at >= c.n;
            const size_t t = is_key ? at - c.n : at;
            const X *x_t = x + t * s.row() + (is_key ? s.Hk * s.Dk : 0);
            float *out = (is_key ? m.k : m.q) + t * s.Dk, sum = 0;
            for (size_t i = 0; i < s.Dk; i++) sum += float(x_t[i]) * float(x_t[i]);
            const float factor = 1.0f / sqrtf(sum + s.eps);
            (is_key ? shared.k_factor : shared.q_factor)[t] = factor;
            for (size_t i = 0; i < s.Dk; i++) out[i] = float(x_t[i]) * factor * (is_key ? 1.0f : scale);
        });
        const auto multiply_by_keys = [&](float *out, const float *x) {
            products({x, s.Dk}, {m.k, 1, s.Dk}, c.n, c.n, s.Dk, Sum::whole,
                     [&](size_t i, size_t j, float sum) { out[i * chunk + j] = j <= i ? sum : 0.0f; });
        };
        multiply_by_keys(m.kk, m.k), multiply_by_keys(m.qk, m.q);
    }

    __device__ void load_gates(const Chunk &c, size_t h) {
        each(c.n, [&](size_t t) {
            const size_t at = (c.begin + t) * s.Hv + h;
            shared.decay[t] = expf(gates.g[at]), shared.beta[t] = gates.beta[at];
        });
        each(c.n + 1, [&](size_t j) {  // a column of P; c as a column before them
            float product = 1;
            if (j == c.n)
                for (size_t i = 0; i < c.n; i++) shared.from_start[i] = product *= shared.decay[i];
            else
                for (size_t i = 0; i < c.n; i++) m.P[i * chunk + j] = i < j ? 0.0f : i == j ? 1.0f : product *= shared.decay[i];
        });
    }

    // e and d = beta e, of `columns` columns, from the state before the chunk; values null: all are 0
    __device__ void solve(float *e, float *d, const float *state, const Chunk &c, const X *values, size_t columns) {
        each(columns, [&](size_t j) {
            for (size_t i = 0; i < c.n; i++) {
                float sum = 0;
                for (size_t r = 0; r < s.Dk && !c.first; r++) sum += m.k[i * s.Dk + r] * state[r * columns + j];
                float value = (values ? float(values[i * s.row() + j]) : 0.0f) - shared.from_start[i] * sum;
                for (size_t r = 0; r < i; r++) value -= m.P[i * chunk + r] * m.kk[i * chunk + r] * d[r * columns + j];
                e[i * columns + j] = value, d[i * columns + j] = shared.beta[i] * value;
            }
        });
    }
    __device__ const X *values(const Chunk &c, size_t h) const { return qkv + c.begin * s.row() + s.values_at(h); }

    __device__ void advance(float *to, const float *state, const float *d, const Chunk &c, size_t columns) {
        each(s.Dk * columns, [&](size_t at) {
            float sum = c.first ? 0.0f : shared.from_start[c.n - 1] * state[at];
            for (size_t t = 0; t < c.n; t++)
                sum += m.k[t * s.Dk + at / columns] * m.P[(c.n - 1) * chunk + t] * d[t * columns + at % columns];
            to[at] = sum;
        });
    }
    __device__ void copy_state(float *to, const float *from) {
        each(s.Dk * s.Dv, [&](size_t at) { to[at] = from[at]; });
    }

    __device__ void forward(X *out, float *states, const int32_t *doc_pos, const Chunk &c, const DeltaStates<float> &ends,
                            const DeltaStates<const float> &starts) {
        load_keys(c);
        for (size_t i = 0; i < s.group(); i++) {
            const size_t h = head * s.group() + i;
            float *const state = m.state(i, 0), *const kept = states + state_at(c.begin, h, s);
            if (starts.has(c.begin)) copy_state(state, starts.of(c.begin, h, s));
            if (is_kept(doc_pos[c.begin])) copy_state(kept, state);
            load_gates(c, h);
            solve(m.dd, m.d, state, c, values(c, h), s.Dv);
            each(c.n * s.Dv, [&](size_t at) {
                const size_t t = at / s.Dv, j = at % s.Dv;
                float sum = 0, within = 0;
                for (size_t r = 0; r < s.Dk && !c.first; r++) sum += m.q[t * s.Dk + r] * state[r * s.Dv + j];
                for (size_t r = 0; r <= t; r++) within += m.P[t * chunk + r] * m.qk[t * chunk + r] * m.d[r * s.Dv + j];
                out[((c.begin + t) * s.Hv + h) * s.Dv + j] = shared.from_start[t] * sum + within;
            });
            advance(state, state, m.d, c, s.Dv);
            if (ends.has(c.end())) copy_state(ends.of(c.end(), h, s), state);
        }
    }

    __device__ void backward(X *dqkv, DeltaGates<float> dgates, const X *dout, const Chunk &c, size_t number,
                             const DeltaStates<const float> &ends) {
        load_keys(c);
        each(c.n * s.Dk, [&](size_t at) { m.dq[at] = m.dk[at] = 0; });
        for (size_t i = 0; i < s.group(); i++) {
            const size_t h = head * s.group() + i;
            load_gates(c, h);
            each(c.n * s.Dv, [&](size_t at) {
                m.dout[at] = dout[((c.begin + at / s.Dv) * s.Hv + h) * s.Dv + at % s.Dv];
                m.d[at] = shared.beta[at / s.Dv] * m.e(i, number)[at];
            });
            if (ends.has(c.end())) copy_state(m.gradient(i), ends.of(c.end(), h, s));
            gradients_of_updates(m.gradient(i), c);
            each(c.n * s.Dv, [&](size_t at) { dqkv[(c.begin + at / s.Dv) * s.row() + s.values_at(h) + at % s.Dv] = m.dv[at]; });
            each(c.n, [&](size_t t) {
                float sum = 0;
                for (size_t j = 0; j < s.Dv; j++) sum += m.dd[t * s.Dv + j] * m.e(i, number)[t * s.Dv + j];
                dgates.beta[(c.begin + t) * s.Hv + h] = sum;
            });
            gradients_of_products(dgates, i, c, number, h);
        }
        each(2 * c.n, [&](size_t at) {
            const bool is_key = at >= c.n;
            const size_t t = is_key ? at - c.n : at;
            const float scale = is_key ? 1.0f : rsqrtf(float(s.Dk)), factor = (is_key ? shared.k_factor : shared.q_factor)[t];
            const float *d = (is_key ? m.dk : m.dq) + t * s.Dk, *x = (is_key ? m.k : m.q) + t * s.Dk;
            X *to = dqkv + (c.begin + t) * s.row() + (is_key ? s.Hk * s.Dk : 0) + head * s.Dk;
            float along = 0;
            for (size_t r = 0; r < s.Dk; r++) along += d[r] * x[r];
            for (size_t r = 0; r < s.Dk; r++) to[r] = factor * (scale * d[r] - along / scale * x[r]);
        });
    }

    __device__ void gradients_of_updates(const float *gradient, const Chunk &c) {
        each(s.Dv, [&](size_t j) {
            for (size_t t = c.n; t-- > 0;) {
                float sum = 0;
                for (size_t r = 0; r < s.Dk && !c.last; r++) sum += m.k[t * s.Dk + r] * gradient[r * s.Dv + j];
                sum *= m.P[(c.n - 1) * chunk + t];
                for (size_t r = t; r < c.n; r++) sum += m.P[r * chunk + t] * m.qk[r * chunk + t] * m.dout[r * s.Dv + j];
                for (size_t r = t + 1; r < c.n; r++) sum -= m.P[r * chunk + t] * m.kk[r * chunk + t] * m.dv[r * s.Dv + j];
                m.dd[t * s.Dv + j] = sum, m.dv[t * s.Dv + j] = shared.beta[t] * sum;
            }
        });
    }

    // dL/dS before the chunk, from that behind it.
    __device__ void retreat(float *gradient, const Chunk &c) {
        each(s.Dk * s.Dv, [&](size_t at) {
            const size_t r = at / s.Dv, j = at % s.Dv;
            float sum = c.last ? 0.0f : shared.from_start[c.n - 1] * gradient[at];
            for (size_t t = 0; t < c.n; t++)
                sum += shared.from_start[t] * (m.q[t * s.Dk + r] * m.dout[t * s.Dv + j] - m.k[t * s.Dk + r] * m.dv[t * s.Dv + j]);
            gradient[at] = sum;
        });
    }

    __device__ void gradients_of_products(DeltaGates<float> dgates, size_t i, const Chunk &c, size_t number, size_t h) {
        const size_t n = c.n;
        float *const gradient = m.gradient(i);
        const float *const before = m.state(i, number), *const to_end = m.P + (n - 1) * chunk;
        products({m.dout, s.Dv}, {m.d, 1, s.Dv}, n, n, s.Dv, Sum::whole,
                 [&](size_t t, size_t j, float sum) { m.dweights[t * chunk + j] = j <= t ? m.P[t * chunk + j] * sum : 0.0f; });
        products({m.dv, s.Dv}, {m.d, 1, s.Dv}, n, n, s.Dv, Sum::whole,
                 [&](size_t t, size_t j, float sum) { m.dnegative[t * chunk + j] = j < t ? -m.P[t * chunk + j] * sum : 0.0f; });
        each(n * s.Dk, [&](size_t at) {
            const size_t t = at / s.Dk, r = at % s.Dk;
            float of_q = 0, of_k = 0, of_end = 0, dq = 0, dk = 0;
            for (size_t j = 0; j < s.Dv && !c.first; j++) {
                of_q += m.dout[t * s.Dv + j] * before[r * s.Dv + j];
                of_k += m.dv[t * s.Dv + j] * before[r * s.Dv + j];
            }
            for (size_t j = 0; j < s.Dv && !c.last; j++) of_end += m.d[t * s.Dv + j] * gradient[r * s.Dv + j];
            for (size_t j = 0; j <= t; j++) {
                dq += m.dweights[t * chunk + j] * m.k[j * s.Dk + r];
                dk += m.dnegative[t * chunk + j] * m.k[j * s.Dk + r];
            }
            for (size_t j = t; j < n; j++)
                dk += m.dweights[j * chunk + t] * m.q[j * s.Dk + r] + m.dnegative[j * chunk + t] * m.k[j * s.Dk + r];
            m.dq[at] += dq + shared.from_start[t] * of_q;
            m.dk[at] += dk - shared.from_start[t] * of_k + to_end[t] * of_end;
        });
        // The terms of dg from states: q (S dout) - k (S dv), and k (G d).
        each(2 * n, [&](size_t at) {
            const bool end = at >= n;
            const size_t t = end ? at - n : at;
            float sum = 0;
            for (size_t r = 0; r < s.Dk && !(end ? c.last : c.first); r++)
                for (size_t j = 0; j < s.Dv; j++) {
                    const size_t v = t * s.Dv + j;
                    sum += end ? m.k[t * s.Dk + r] * gradient[r * s.Dv + j] * m.d[v]
                               : before[r * s.Dv + j] * (m.q[t * s.Dk + r] * m.dout[v] - m.k[t * s.Dk + r] * m.dv[v]);
                }
            if (end) shared.of_end[t] = to_end[t] * sum;
            else shared.of_start[t] = shared.from_start[t] * sum;
        });
        float products_of_states = 0;
        for (size_t at = threadIdx.x; at < s.Dk * s.Dv && !c.first && !c.last; at += blockDim.x)
            products_of_states += gradient[at] * before[at];
        const float of_state = block_sum(products_of_states, shared.partial) * shared.from_start[n - 1];
        if (!c.first) retreat(gradient, c);
        each(n, [&](size_t t) {
            float sum = of_state;
            for (size_t r = 0; r < t; r++) {
                sum += shared.of_end[r];
                for (size_t row = t; row < n; row++) {
                    const size_t pair = row * chunk + r;
                    sum += m.dweights[pair] * m.qk[pair] + m.dnegative[pair] * m.kk[pair];
                }
            }
            for (size_t r = t; r < n; r++) sum += shared.of_start[r];
            dgates.g[(c.begin + t) * s.Hv + h] = sum;
        });
    }
};

}  // namespace delta_block

template <class X> size_t gated_delta_scratch(Cuda<X>, const DeltaShape &s) {
    return s.Hk * delta_block::BlockMatrices::of_block(s);
}

template <class X>
__global__ void gated_delta_forward_kernel1(X *out, float *states, float *scratch, const X *qkv, DeltaGates<const float> gates,
                                            const int32_t *doc_pos, DeltaShape s, DeltaStates<float> ends,
                                            DeltaStates<const float> starts) {
    using namespace delta_block;
    const size_t head = blockIdx.x;
    Block<X> block{shared_mem<BlockShared>(), BlockMatrices(scratch + head * BlockMatrices::of_block(s), s), qkv, gates, s, head};
    for (size_t begin = 0, end; begin < s.T; begin = end) {
        for (end = begin + 1; end < s.T && end < begin + chunk && doc_pos[end] > 0;) end++;
        block.forward(out, states, doc_pos, {begin, end - begin, doc_pos[begin] == 0 && !starts.has(begin), false}, ends, starts);
    }
}

template <class X>
void gated_delta_forward(Cuda<X> dev, X *out, float *states, float *scratch, const X *qkv, DeltaGates<const float> gates,
                         const int32_t *doc_pos, DeltaShape shape, DeltaStates<float> ends = {},
                         DeltaStates<const float> starts = {}) {
    launch(dev, gated_delta_forward_kernel1<X>, Grid{shape.Hk}, 256, sizeof(delta_block::BlockShared), out, states, scratch, qkv,
           gates, doc_pos, shape, ends, starts);
}

// From the last interval of the row: its states and e are computed again, then the gradients, from its last chunk.
template <class X>
__global__ void gated_delta_backward_kernel1(X *dqkv, DeltaGates<float> dgates, float *scratch, const X *dout, const X *qkv,
                                             DeltaGates<const float> gates, const float *states, const int32_t *doc_pos,
                                             DeltaShape s, DeltaStates<const float> ends, DeltaStates<const float> starts) {
    using namespace delta_block;
    const size_t head = blockIdx.x;
    Block<X> block{shared_mem<BlockShared>(), BlockMatrices(scratch + head * BlockMatrices::of_block(s), s), qkv, gates, s, head};
    const BlockMatrices &m = block.m;
    for (size_t begin, end = s.T; end > 0; end = begin) {
        begin = end - 1 - size_t(doc_pos[end - 1]) % interval;
        const size_t count = (end - begin + chunk - 1) / chunk;
        const bool is_last = (end == s.T || doc_pos[end] == 0) && !ends.has(end - 1);
        const auto chunk_of = [&](size_t number) {
            const size_t at = begin + number * chunk;
            return Chunk{at, end - at < chunk ? end - at : chunk, doc_pos[at] == 0 && !starts.has(at),
                         is_last && number + 1 == count};
        };
        for (size_t number = 0; number < count; number++) {
            const Chunk c = chunk_of(number);
            block.load_keys(c);
            for (size_t i = 0; i < s.group(); i++) {
                const size_t h = head * s.group() + i;
                if (number == 0 && !c.first)
                    block.copy_state(m.state(i, 0), starts.has(begin) ? starts.of(begin, h, s) : states + state_at(begin, h, s));
                block.load_gates(c, h);
                block.solve(m.e(i, number), m.d, m.state(i, number), c, block.values(c, h), s.Dv);
                if (number + 1 < count) block.advance(m.state(i, number + 1), m.state(i, number), m.d, c, s.Dv);
            }
        }
        for (size_t number = count; number-- > 0;) block.backward(dqkv, dgates, dout, chunk_of(number), number, ends);
    }
}

template <class X>
void gated_delta_backward(Cuda<X> dev, X *dqkv, DeltaGates<float> dgates, float *scratch, const X *dout, const X *qkv,
                          DeltaGates<const float> gates, const float *states, const int32_t *doc_pos, DeltaShape shape,
                          DeltaStates<const float> ends = {}, DeltaStates<const float> starts = {}) {
    launch(dev, gated_delta_backward_kernel1<X>, Grid{shape.Hk}, 256, sizeof(delta_block::BlockShared), dqkv, dgates, scratch,
           dout, qkv, gates, states, doc_pos, shape, ends, starts);
}
}  // namespace CUDA_BACKEND
