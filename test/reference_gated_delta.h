// The gated delta rule in float64, token by token, and error bounds for float.
#pragma once
#include "../llmc/ops/gated_delta.h"
#include "check.h"
#include "float_sums.h"

struct DeltaInputs64 {
    std::vector<double> qkv, g, beta, dout;
};

struct DeltaReference {
    std::vector<double> out, dqkv, dg, dbeta;
    std::vector<double> decay;  // exp(g), a factor of dg
    double state = 0, gradient = 0, value = 0, dout = 0,
           raw = 0;  // the largest norms: S, dL/dS, v, dout, 1 / |q_raw| or 1 / |k_raw|
};

inline double norm_of(const double *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    return std::sqrt(sum);
}

// One value head of one document: tokens [begin, end).
inline void delta_reference_head(DeltaReference &r, const DeltaInputs64 &in, const DeltaShape &s, size_t begin, size_t end,
                                 size_t h) {
    const size_t Dk = s.Dk, Dv = s.Dv, q_at = h / s.group() * Dk, k_at = s.Hk * Dk + q_at, v_at = s.values_at(h);
    using Matrix = std::vector<double>;  // (Dk, Dv)
    const auto normed = [&](size_t t, size_t at, double &factor) {
        const double *x = &in.qkv[t * s.row() + at], size = norm_of(x, Dk);
        factor = 1 / std::sqrt(size * size + double(s.eps));
        r.raw = std::max(r.raw, factor);
        std::vector<double> out(x, x + Dk);
        for (double &v : out) v *= factor;
        return out;
    };
    const auto norm_backward = [&](size_t t, size_t at, const std::vector<double> &d, const std::vector<double> &x,
                                   double factor) {
        double along = 0;
        for (size_t i = 0; i < Dk; i++) along += d[i] * x[i];
        for (size_t i = 0; i < Dk; i++) r.dqkv[t * s.row() + at + i] += factor * (d[i] - along * x[i]);
    };
    const double scale = 1 / std::sqrt(double(Dk));
    std::vector<Matrix> states{Matrix(Dk * Dv)};
    std::vector<std::vector<double>> errors;  // v - S'^T k
    for (size_t t = begin; t < end; t++) {
        double factor;
        const auto q = normed(t, q_at, factor), k = normed(t, k_at, factor);
        const double decay = std::exp(in.g[t * s.Hv + h]), beta = in.beta[t * s.Hv + h];
        r.decay[t * s.Hv + h] = decay;
        Matrix S = states.back();
        for (double &v : S) v *= decay;
        std::vector<double> e(&in.qkv[t * s.row() + v_at], &in.qkv[t * s.row() + v_at] + Dv);
        r.value = std::max(r.value, norm_of(e.data(), Dv));
        for (size_t i = 0; i < Dk; i++)
            for (size_t j = 0; j < Dv; j++) e[j] -= S[i * Dv + j] * k[i];
        for (size_t i = 0; i < Dk; i++)
            for (size_t j = 0; j < Dv; j++) {
                S[i * Dv + j] += k[i] * beta * e[j];
                r.out[(t * s.Hv + h) * Dv + j] += S[i * Dv + j] * q[i] * scale;
            }
        r.state = std::max(r.state, norm_of(S.data(), S.size()));
        states.push_back(S), errors.push_back(e);
    }
    Matrix G(Dk * Dv);
    for (size_t t = end; t-- > begin;) {
        double q_factor, k_factor;
        const auto q = normed(t, q_at, q_factor), k = normed(t, k_at, k_factor);
        const double decay = std::exp(in.g[t * s.Hv + h]), beta = in.beta[t * s.Hv + h];
        const double *dout = &in.dout[(t * s.Hv + h) * Dv];
        const Matrix &S = states[t - begin + 1], &before = states[t - begin];
        const auto &e = errors[t - begin];
        std::vector<double> dq(Dk), dk(Dk), x(Dv);
        for (size_t i = 0; i < Dk; i++)
            for (size_t j = 0; j < Dv; j++) {
                G[i * Dv + j] += q[i] * scale * dout[j];
                dq[i] += S[i * Dv + j] * dout[j] * scale;
                x[j] += G[i * Dv + j] * k[i];
            }
        r.dout = std::max(r.dout, norm_of(dout, Dv)), r.gradient = std::max(r.gradient, norm_of(G.data(), G.size()));
        for (size_t j = 0; j < Dv; j++) {
            r.dqkv[t * s.row() + v_at + j] = beta * x[j];
            r.dbeta[t * s.Hv + h] += x[j] * e[j];
        }
        for (size_t i = 0; i < Dk; i++)
            for (size_t j = 0; j < Dv; j++) {
                const double decayed = decay * before[i * Dv + j];
                dk[i] += G[i * Dv + j] * beta * e[j] - beta * decayed * x[j];
                const double rest = G[i * Dv + j] - beta * k[i] * x[j];
                r.dg[t * s.Hv + h] += rest * decayed;
                G[i * Dv + j] = decay * rest;
            }
        norm_backward(t, q_at, dq, q, q_factor);
        norm_backward(t, k_at, dk, k, k_factor);
    }
}

inline DeltaReference delta_reference(const DeltaInputs64 &in, const std::vector<int32_t> &doc_pos, const DeltaShape &s) {
    const size_t gates = s.T * s.Hv;
    DeltaReference r;
    r.out.resize(gates * s.Dv), r.dqkv.resize(s.T * s.row()), r.dg.resize(gates), r.dbeta.resize(gates), r.decay.resize(gates);
    for (size_t begin = 0, end; begin < s.T; begin = end) {
        for (end = begin + 1; end < s.T && doc_pos[end] > 0;) end++;
        for (size_t h = 0; h < s.Hv; h++) delta_reference_head(r, in, s, begin, end, h);
    }
    return r;
}

// A token's map of states has a norm of at most 1, because 0 < beta < 1 and |k| < 1, so the rounding errors of earlier tokens do not grow. Each token
// adds those of a few sums of at most Dk + Dv + 64 terms, relative to the norms of their factors; the errors of T tokens have both signs. An error of
// the state or of its gradient is multiplied by the norm of the other factor of a product.
struct DeltaErrors {
    double out, dq, dk, dv, dbeta;
    double dg;  // divided by exp(g), which is a factor of every term
};
inline DeltaErrors delta_errors(const DeltaReference &r, const DeltaShape &s) {
    const double each = 2 * rounded_sum_error(s.Dk + s.Dv + delta::chunk) * std::sqrt(double(s.T));
    const double scale = 1 / std::sqrt(double(s.Dk)), group = double(s.group()), state = r.state + r.value;
    return {each * scale * state,
            each * scale * group * state * r.dout * r.raw,
            2 * each * group * r.gradient * state * r.raw,
            each * r.gradient,
            2 * each * r.gradient * state,
            each * r.gradient * state};
}
