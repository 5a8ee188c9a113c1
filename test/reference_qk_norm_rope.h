// qk_norm_rope in float64: the references of rmsnorm on each head and of rope on the rows, with the bound of float's error.
#pragma once
#include "../llmc/ops/rope_table.h"
#include "reference_rmsnorm.h"
#include "reference_rope.h"

struct QkSizes {
    size_t T, H, KV, D;
    double w0 = 0;
    size_t heads() const { return H + KV; }
    size_t width() const { return (H + 2 * KV) * D; }
};

struct QkAngles {
    std::vector<float> table;      // (positions, D/2, 2)
    std::vector<int32_t> doc_pos;  // (T)
};
inline QkAngles some_angles(const QkSizes &s) {  // of documents of 7
    QkAngles out{std::vector<float>(7 * s.D), std::vector<int32_t>(s.T)};
    rope_table(out.table.data(), {.theta = 100}, 7, s.D);
    for (size_t t = 0; t < s.T; t++) out.doc_pos[t] = int32_t((t + 5) % 7);
    return out;
}
inline QkAngles no_angles(const QkSizes &s) {  // with which nothing turns
    QkAngles out{std::vector<float>(s.D), std::vector<int32_t>(s.T)};
    for (size_t i = 0; i < s.D; i += 2) out.table[i] = 1;
    return out;
}

inline std::vector<double> rope_reference(const std::vector<double> &x, const QkSizes &s, const QkAngles &angles, double sign) {
    return rope_reference(x, angles.table, angles.doc_pos, s.heads(), s.D, s.D, s.width(), sign);
}

// A row of D for each query and key head: (T, H + KV, D), without the value heads.
inline std::vector<double> gather_heads(const std::vector<double> &rows, const QkSizes &s) {
    std::vector<double> out;
    for (size_t t = 0; t < s.T; t++) {
        const auto row = rows.begin() + ptrdiff_t(t * s.width());
        out.insert(out.end(), row, row + ptrdiff_t(s.heads() * s.D));
    }
    return out;
}

// Returns `rows` with each query head and key head replaced by op(head, w), where w is the weight of its norm.
template <class Op> std::vector<double> each_head(std::vector<double> rows, const QkSizes &s, Op op) {
    for (size_t t = 0; t < s.T; t++)
        for (size_t h = 0; h < s.heads(); h++) {
            const auto at = rows.begin() + ptrdiff_t(t * s.width() + h * s.D);
            const std::vector<double> out = op(std::vector<double>(at, at + ptrdiff_t(s.D)), t * s.heads() + h, h >= s.H);
            std::copy(out.begin(), out.end(), at);
        }
    return rows;
}

struct QkWeights {
    std::vector<double> w[2];  // of queries, of keys: (D) each
};

template <class X> struct QkInputs {
    QkSizes s;
    std::vector<X> qkv = random_values<X>(s.T * s.width(), 5), dqkv = random_values<X>(s.T * s.width(), 6);
    std::vector<X> wq = random_values<X>(s.D, 7, 0.1, 1 - s.w0), wk = random_values<X>(s.D, 8, 0.1, 2 - s.w0);
    QkWeights w = {{weights(wq), weights(wk)}};
    QkAngles angles = some_angles(s);

    std::vector<double> weights(const std::vector<X> &stored) const {  // w0 + w
        std::vector<double> out = widen(stored);
        for (double &v : out) v += s.w0;
        return out;
    }
};

inline std::vector<double> qk_norm_reference(const std::vector<double> &qkv, const QkWeights &w, const QkSizes &s, double eps) {
    return each_head(qkv, s,
                     [&](const std::vector<double> &x, size_t, bool key) { return rmsnorm_reference(x, w.w[key], 1, s.D, eps); });
}

struct QkGradient {
    std::vector<double> dqkv;             // (T, (H + 2 KV) * D)
    std::vector<double> dw[2], terms[2];  // of wq, of wk: as in RmsNormGradient
};

inline QkGradient qk_norm_rope_backward_reference(const std::vector<double> &dqkv, const std::vector<double> &qkv,
                                                  const QkWeights &w, const QkSizes &s, const QkAngles &angles, double eps) {
    const std::vector<double> zeros(s.D), raw = gather_heads(qkv, s);
    QkGradient out{{}, {zeros, zeros}, {zeros, zeros}};
    out.dqkv = each_head(rope_reference(dqkv, s, angles, -1), s, [&](const std::vector<double> &d, size_t i, bool key) {
        const std::vector<double> x(raw.begin() + ptrdiff_t(i * s.D), raw.begin() + ptrdiff_t((i + 1) * s.D));
        const RmsNormGradient g = rmsnorm_backward_reference(d, x, w.w[key], 1, s.D, eps);
        for (size_t c = 0; c < s.D; c++) out.dw[key][c] += g.dw[c], out.terms[key][c] += g.dw_terms[c];
        return g.dx;
    });
    return out;
}

// Rounded products of a rotation of values up to `size`: a pair's two, then once to X.
template <class X> double turn_error(double size) { return (3 * unit_roundoff<float> + unit_roundoff<X>)*2 * size; }

// Each of a pair may be off by the norm's error before it turns.
template <class X> double qk_norm_rope_error(const QkSizes &s, const std::vector<double> &normed) {
    return 2 * rmsnorm_error<X>(s.D, normed) + turn_error<X>(largest(normed));
}

// The norm takes an error e of its input to at most rstd * w * e * (1 + |xh|): the mean of |xh| is below 1.
template <class X> double qk_norm_rope_dx_error(const QkInputs<X> &in, const QkGradient &want, double eps) {
    const std::vector<double> raw = gather_heads(widen(in.qkv), in.s);
    const double rstd = largest(rmsnorm_rstd(raw, in.s.T * in.s.heads(), in.s.D, eps));
    const double w = std::max(largest(in.w.w[0]), largest(in.w.w[1]));
    return rmsnorm_error<X>(in.s.D, want.dqkv) + turn_error<X>(largest(widen(in.dqkv))) * rstd * w * (1 + largest(raw) * rstd);
}

// Rounding to X is relative to a term; a turn's products are to the larger of a pair.
template <class X> double qk_norm_rope_dw_error(const QkInputs<X> &in, const QkGradient &want, bool key) {
    const double u = unit_roundoff<float>, rows = double(in.s.T * (key ? in.s.KV : in.s.H)), D = double(in.s.D);
    return ((rows + D + 8) * u + unit_roundoff<X>)*largest(want.terms[key]) +
           6 * u * largest(widen(in.dqkv)) * rows * std::sqrt(D);  // |xh| is at most sqrt(D)
}

template <class X> void expect_value_heads_equal(const std::vector<X> &got, const std::vector<X> &want, const QkSizes &s) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); i++)
        if (i % s.width() >= s.heads() * s.D) {
            ASSERT_EQ(float(got[i]), float(want[i])) << "value heads, at " << i;
        }
}

// dw began with 1 (of wk with 2) and was added to twice.
template <class X> void expect_dw_twice(const std::vector<float> &dw, bool key, const QkInputs<X> &in, const QkGradient &g) {
    std::vector<double> want = g.dw[key];
    for (double &d : want) d = 1 + key + 2 * d;
    expect_close(key ? "dwk" : "dwq", dw, want, 2 * qk_norm_rope_dw_error(in, g, key) + 4 * unit_roundoff<float> * largest(want));
}
