// Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) updates a matrix by its orthogonalised momentum, whose singular values are
// all about 1. The formulas are those of torch.optim.Muon, with the update size and weight decay of Liu et al., "Muon is scalable for LLM training"
// (2025, arXiv:2502.16982). Momentum and update are elementwise ops; the step between them needs a whole matrix:
//
//   muon_momentum(dev, u, m, grads, a, n)                 with g = grad_scale * grads
//       m = 0.95 * m + 0.05 * g          u = 0.95 * m + 0.05 * g (Nesterov's momentum)
//   orthogonalise(dev, x, room, R, C)                     Newton and Schulz: x becomes x / |x|, and then five times
//       x = (3.4445 I - 4.7750 x x^T + 2.0315 (x x^T)^2) x
//   muon_update(dev, params, x, a, size, n)
//       params = params * (1 - lr * weight_decay) - lr * size * x          size = muon_size(R, C)
//   scale_and_shift(dev, out, x, scale, shift, n, C)      a step of orthogonalise
//       out = scale * x + shift * I
//
//   params (n) Floats<X>     grads (n) float or bf16     m (n) float, or bf16 with AdamW's stochastic rounding (adamw.h)
//   u (n) X     x (R, C) X, input and result of orthogonalise     scale_and_shift: x, out (n), rows of C, x is X or float
//   a: only lr, weight_decay, grad_scale, and for m in bf16 step, seed and first are used     nothing may alias
//
// |x| is the Frobenius norm, at least 1e-7. The five polynomials map singular values from 0.002 on to values between 0.68 and 1.21, and increase
// smaller ones at most 485 times. A matrix with more rows than columns is multiplied from the other side, by polynomials of x^T x. Products are
// summed in float, but their factors are X: with X = bf16 the result is rounded to bf16, as torch does for any type.
#pragma once
#include "adamw.h"
#include "matmul.h"
#include "reduce.h"

constexpr double muon_momentum_decay = 0.95, muon_least_norm = 1e-7;
constexpr double muon_a = 3.4445, muon_b = -4.7750, muon_c = 2.0315;
constexpr int muon_iterations = 5;

// The elements of an orthogonal matrix have the root mean square 1 / sqrt(max(R, C)); this factor makes it 0.2, the usual size of AdamW's updates.
inline double muon_size(size_t R, size_t C) { return 0.2 * std::sqrt(double(std::max(R, C))); }

// Multiplications and additions in the products of orthogonalise.
constexpr double orthogonalise_flops(size_t R, size_t C) {
    const double k = double(std::min(R, C)), n = double(std::max(R, C));
    return muon_iterations * (4 * k * k * n + 2 * k * k * k);
}

// Scratch of orthogonalise for matrices with at most `elements` elements and a shorter side of at most k.
template <class X> struct OrthogonaliseRoom {
    X *x;                  // (elements)
    X *gram, *polynomial;  // (k, k)
    float *product;        // (k, k)
    double *norm;          // squared_norm_scratch(elements)
};

// The factors of one step, in float, and the momentum of one element.
struct MuonFactors {
    float scale, decay, rest;
    Random random;
    size_t first;

    explicit MuonFactors(const AdamW &a)
        : scale(float(a.grad_scale)),
          decay(float(muon_momentum_decay)),
          rest(float(1 - muon_momentum_decay)),
          random{a.seed, Purpose::rounding, uint32_t(a.step)},
          first(a.first) {}

    HOST_DEVICE float update(float &m, float grad) const {  // returns u
        const float g = scale * grad;
        m = m + rest * (g - m);
        return g + decay * (m - g);
    }

    // Stores the momentum of element i.
    HOST_DEVICE void store(float &to, float m, size_t) const { to = m; }
    HOST_DEVICE void store(bf16 &to, float m, size_t i) const {
        to = round_stochastically(m, random.block(first + i)[0] & 0xffff);
    }
};

template <class X, class M, class G> void muon_momentum(Cpu<X> dev, X *u, M *m, const G *grads, const AdamW &a, size_t n) {
    const MuonFactors factors(a);
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) {
        float m_i = m[i];
        u[i] = factors.update(m_i, grads[i]);
        factors.store(m[i], m_i, i);
    }
}

template <class X> void muon_update(Cpu<X> dev, Floats<X> params, const X *x, const AdamW &a, double size, size_t n) {
    const float decay = float(1 - a.lr * a.weight_decay), step = float(a.lr * size);
#pragma omp parallel for simd num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) params.store(i, params.load(i) * decay - step * float(x[i]));
}

template <class X, class In> void scale_and_shift(Cpu<X> dev, X *out, const In *x, float scale, float shift, size_t n, size_t C) {
#pragma omp parallel for num_threads(dev.threads)
    for (size_t i = 0; i < n; i++) out[i] = scale * float(x[i]) + (shift != 0 && i % (C + 1) == 0 ? shift : 0.0f);
}

// On a GPU this function waits for the norm.
template <class Dev, class X = typename Dev::X>
void orthogonalise(Dev dev, X *x, const OrthogonaliseRoom<X> &room, size_t R, size_t C) {
    static_assert(muon_iterations % 2, "the last iteration writes x");
    const size_t k = std::min(R, C);
    const bool wide = R <= C;
    const double norm = std::sqrt(squared_norm(dev, room.norm, x, R * C));
    scale_and_shift(dev, room.x, x, float(1 / std::max(norm, muon_least_norm)), 0, R * C, C);
    X *from = room.x, *to = x;
    for (int i = 0; i < muon_iterations; i++, std::swap(from, to)) {
        if (wide) matmul_forward(dev, room.product, from, from, nullptr, R, C, R);
        else matmul_backward_weight(dev, room.product, nullptr, from, from, R, C, C, false);
        scale_and_shift(dev, room.gram, room.product, 1, 0, k * k, k);
        scale_and_shift(dev, room.polynomial, room.product, float(muon_c), float(muon_b), k * k, k);
        matmul_forward(dev, room.product, room.polynomial, room.gram, nullptr, k, k, k);
        scale_and_shift(dev, room.polynomial, room.product, 1, float(muon_a), k * k, k);
        if (wide) matmul_backward_input(dev, to, room.polynomial, from, R, C, R);
        else matmul_forward(dev, to, from, room.polynomial, nullptr, R, C, C);
    }
}

REHEARSED(muon_momentum);
REHEARSED(muon_update);
REHEARSED(scale_and_shift);
