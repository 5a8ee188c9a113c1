// gated_delta_forward: in a value head, with q and k of length 1 (and q scaled) and S = 0 before a document       Contract: llmc/ops/gated_delta.h
//     S' = exp(g[t]) S        d = beta[t] (v[t] - S'^T k[t])        S = S' + k[t] d^T        out[t] = S^T q[t]
//
// Timed with 2048 tokens, 16 key heads and 32 value heads of 128 channels (Qwen3.5-9B) in bf16. Each token needs the state of the token before it, so tokens
// are work for one thread after the other, and only heads and the columns of S, which do not depend on each other, are work for many. A token takes
// 3 Dk Dv multiplications and additions of a head. Chunks of tokens, after the shipped version's header, take more of them, but as products of matrices,
// for tensor cores, and with a barrier a product instead of a sum a token. Versions 1 and 2 keep no states for the backward pass.
#include "../../llmc/ops/gated_delta.cuh"
#include "../../test/reference_gated_delta.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {
using namespace delta;

// ---- version 1: a thread per column, the state in device memory ---------------------------------------------------------------------
//
// The formula as it stands. A token reads the column's Dk elements of S twice and writes them once, and each thread computes the lengths of q and k alone.

template <class X>
__global__ void gated_delta_kernel1(X *out, float *states, const X *qkv, DeltaGates<const float> gates, const int32_t *doc_pos,
                                    DeltaShape s) {
    const size_t h = blockIdx.x, j = threadIdx.x;
    float *const S = states + h * s.Dk * s.Dv + j;  // element r of the column is S[r * Dv]
    for (size_t t = 0; t < s.T; t++) {
        const X *q = qkv + t * s.row() + h / s.group() * s.Dk, *k = q + s.Hk * s.Dk;
        float qq = s.eps, kk = s.eps, sum = 0, y = 0;
        for (size_t r = 0; r < s.Dk; r++) qq += float(q[r]) * float(q[r]), kk += float(k[r]) * float(k[r]);
        const float of_q = 1.0f / sqrtf(qq * float(s.Dk)), of_k = 1.0f / sqrtf(kk), decay = expf(gates.g[t * s.Hv + h]);
        for (size_t r = 0; r < s.Dk; r++) {
            float &x = S[r * s.Dv];
            x = doc_pos[t] > 0 ? decay * x : 0.0f;
            sum += x * float(k[r]) * of_k;
        }
        const float d = gates.beta[t * s.Hv + h] * (float(qkv[t * s.row() + s.values_at(h) + j]) - sum);
        for (size_t r = 0; r < s.Dk; r++) y += (S[r * s.Dv] += float(k[r]) * of_k * d) * float(q[r]) * of_q;
        out[(t * s.Hv + h) * s.Dv + j] = y;
    }
}

template <class X>
void gated_delta1(Cuda<X> dev, X *out, float *, float *scratch, const X *qkv, DeltaGates<const float> gates,
                  const int32_t *doc_pos, DeltaShape s) {
    launch(dev, gated_delta_kernel1<X>, Grid{s.Hv}, unsigned(s.Dv), 0, out, scratch, qkv, gates, doc_pos, s);
}

// ---- version 2: the state in registers, queries, keys and values of a few tokens in shared memory -----------------------------------
//
// Four lanes have a column's elements, every fourth each, so the sums need two shuffles. A barrier precedes eight tokens, not each. This takes Dk at most
// 128, and a token's multiplications limit the kernel: tensor cores have no part in a recurrence.

constexpr unsigned lanes_of_column = 4, tokens_at_once = 8;

struct Tokens {
    float q[tokens_at_once][max_D], k[tokens_at_once][max_D], v[tokens_at_once][max_D], decay[tokens_at_once],
        beta[tokens_at_once];
};

template <class X>
__global__ void __launch_bounds__(lanes_of_column *max_D)
    gated_delta_kernel2(X *out, const X *qkv, DeltaGates<const float> gates, const int32_t *doc_pos, DeltaShape s) {
    Tokens &tokens = shared_mem<Tokens>();
    const size_t h = blockIdx.x, j = threadIdx.x / lanes_of_column, part = threadIdx.x % lanes_of_column;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    float S[max_D / lanes_of_column] = {};
    for (size_t begin = 0; begin < s.T; begin += tokens_at_once) {
        const size_t n = min(s.T - begin, size_t(tokens_at_once));
        __syncthreads();
        for (size_t i = warp; i < 2 * n; i += warps) {
            const size_t t = i / 2;
            const X *x = qkv + (begin + t) * s.row() + (i % 2 * s.Hk + h / s.group()) * s.Dk;
            float sum = 0;
            for (size_t r = lane; r < s.Dk; r += 32) sum += float(x[r]) * float(x[r]);
            const float factor = 1.0f / sqrtf((warp_sum(sum) + s.eps) * (i % 2 ? 1.0f : float(s.Dk)));
            for (size_t r = lane; r < s.Dk; r += 32) (i % 2 ? tokens.k : tokens.q)[t][r] = float(x[r]) * factor;
        }
        for (size_t i = threadIdx.x; i < n * s.Dv; i += blockDim.x)
            tokens.v[i / s.Dv][i % s.Dv] = qkv[(begin + i / s.Dv) * s.row() + s.values_at(h) + i % s.Dv];
        if (threadIdx.x < n) {
            const size_t t = begin + threadIdx.x, at = t * s.Hv + h;
            tokens.decay[threadIdx.x] = doc_pos[t] > 0 ? expf(gates.g[at]) : 0.0f, tokens.beta[threadIdx.x] = gates.beta[at];
        }
        __syncthreads();
        for (size_t t = 0; t < n; t++) {
            const float *const q = tokens.q[t] + part, *const k = tokens.k[t] + part;
            float sum = 0, y = 0;
#pragma unroll
            for (unsigned i = 0; i < max_D / lanes_of_column; i++)
                if (i * lanes_of_column < s.Dk) sum += (S[i] *= tokens.decay[t]) * k[i * lanes_of_column];
            const float d = tokens.beta[t] * (tokens.v[t][j] - warp_sum(sum, lanes_of_column));
#pragma unroll
            for (unsigned i = 0; i < max_D / lanes_of_column; i++)
                if (i * lanes_of_column < s.Dk) y += (S[i] += k[i * lanes_of_column] * d) * q[i * lanes_of_column];
            y = warp_sum(y, lanes_of_column);
            if (part == 0) out[((begin + t) * s.Hv + h) * s.Dv + j] = y;
        }
    }
}

template <class X>
void gated_delta2(Cuda<X> dev, X *out, float *, float *, const X *qkv, DeltaGates<const float> gates, const int32_t *doc_pos,
                  DeltaShape s) {
    launch(dev, gated_delta_kernel2<X>, Grid{s.Hv}, unsigned(lanes_of_column * s.Dv), sizeof(Tokens), out, qkv, gates, doc_pos,
           s);
}

template <class X>
void gated_delta3(Cuda<X> dev, X *out, float *states, float *scratch, const X *qkv, DeltaGates<const float> gates,
                  const int32_t *doc_pos, DeltaShape s) {
    gated_delta_forward(dev, out, states, scratch, qkv, gates, doc_pos, s);
}

// ---- the ladder ----------------------------------------------------------------------------------------------------------------

template <class X> struct GatedDelta {
    DeltaShape s;
    std::vector<X> qkv;
    std::vector<float> g, beta;
    std::vector<int32_t> doc_pos;
    DeviceArray<X> d_qkv, out;
    DeviceArray<float> d_g, d_beta, states, scratch;
    DeviceArray<int32_t> d_pos;

    explicit GatedDelta(const Sizes &z)
        : s(shape_of(z)),
          qkv(random_values<X>(s.T * s.row(), 1)),
          g(random_values<float>(s.T * s.Hv, 2)),
          beta(random_values<float>(s.T * s.Hv, 3)),
          doc_pos(documents(s.T)),
          d_qkv(qkv),
          out(s.T * s.Hv * s.Dv),
          d_g(decays()),
          d_beta(weights()),
          states(gated_delta_states(s)),
          scratch(std::max(gated_delta_scratch(Cuda<X>{}, s), s.Hv * s.Dk * s.Dv)),
          d_pos(doc_pos) {}

    static DeltaShape shape_of(const Sizes &z) {
        if (z[2] % z[1]) die("%zu value heads do not share %zu key heads evenly\n  fix: use a multiple", z[2], z[1]);
        for (const size_t D : {z[3], z[4]})
            if (D % 8 || D > max_D) die("a head has %zu channels\n  fix: use a multiple of 8, at most %zu", D, max_D);
        return {z[0], z[1], z[2], z[3], z[4], 1e-6f};
    }
    static std::vector<int32_t> documents(size_t T) {  // of two documents
        std::vector<int32_t> out(T);
        for (size_t t = 0; t < T; t++) out[t] = int32_t(t < T / 3 ? t : t - T / 3);
        return out;
    }
    std::vector<float> &decays() {
        for (float &x : g) x = -0.1f * std::exp(x);
        return g;
    }
    std::vector<float> &weights() {
        for (float &x : beta) x = 1 / (1 + std::exp(-x));
        return beta;
    }

    static constexpr void (*versions[])(Cuda<X>, X *, float *, float *, const X *, DeltaGates<const float>, const int32_t *,
                                        DeltaShape) = {gated_delta1, gated_delta2, gated_delta3};

    void run(Cuda<X> dev, size_t version) {
        versions[version - 1](dev, out.data(), states.data(), scratch.data(), d_qkv.data(), {d_g.data(), d_beta.data()},
                              d_pos.data(), s);
    }

    void check(Check &check) const {
        const DeltaReference want =
            delta_reference({widen(qkv), widen(g), widen(beta), std::vector<double>(s.T * s.Hv * s.Dv)}, doc_pos, s);
        check("out", out.values(), want.out, delta_errors(want, s).out + unit_roundoff<X> * largest(want.out));
    }

    Work work() const { return {.flops = double(s.T * s.Hv) * gated_delta_flops(s)}; }
};

static const Ladder<GatedDelta, float, bf16> ladder(
    {.name = "gated_delta_forward",
     .sizes = {{"T", "tokens", 2048, 256},
               {"Hk", "key heads", 16, 1},
               {"Hv", "value heads", 32, 2},
               {"Dk", "channels of a key", 128, 128},
               {"Dv", "channels of a value", 128, 128}},
     .checked = {{1, 1, 1, 8, 8}, {7, 2, 2, 16, 24}, {70, 1, 2, 24, 16}, {200, 1, 1, 40, 40}},
     .ideas = {"the recurrence, a thread per column", "the state in registers", "shipped: chunks, products on tensor cores"}});
}  // namespace CUDA_BACKEND::workshop
