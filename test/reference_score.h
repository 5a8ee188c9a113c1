// The head of a reward model in float64, and how far float may be from it.
#pragma once
#include "check.h"

inline std::vector<double> score_reference(const std::vector<double> &x, const std::vector<double> &w,
                                           const std::vector<int32_t> &rows) {
    std::vector<double> scores;
    for (int32_t row : rows) {
        scores.push_back(0);
        for (size_t c = 0; c < w.size(); c++) scores.back() += x[size_t(row) * w.size() + c] * w[c];
    }
    return scores;
}

struct ScoreGradient {
    std::vector<double> dx, dw;
};

inline ScoreGradient score_backward_reference(const std::vector<double> &dscores, const std::vector<double> &x,
                                              const std::vector<double> &w, const std::vector<int32_t> &rows) {
    const size_t C = w.size();
    ScoreGradient g{std::vector<double>(x.size()), std::vector<double>(C)};
    for (size_t n = 0; n < rows.size(); n++)
        for (size_t c = 0; c < C; c++) {
            const size_t at = size_t(rows[n]) * C + c;
            g.dx[at] = dscores[n] * w[c];
            g.dw[c] += dscores[n] * x[at];
        }
    return g;
}

inline std::vector<double> absolute(std::vector<double> v) {
    for (double &e : v) e = std::abs(e);
    return v;
}

// A float sum of n terms is off by at most n roundings of the sum of the terms' absolute values; 8 more are for the
// products and the second-order terms. dx: one product, rounded to float and to X.
inline double score_error(const std::vector<double> &x, const std::vector<double> &w, const std::vector<int32_t> &rows) {
    return double(w.size() + 8) * unit_roundoff<float> * largest(score_reference(absolute(x), absolute(w), rows));
}
template <class X> double score_dx_error(const std::vector<double> &want) {
    return (2 * unit_roundoff<float> + unit_roundoff<X>)*largest(want);
}
// Checks a dw that was `before` everywhere and was added to `passes` times.
inline double score_dw_error(const std::vector<double> &dscores, const std::vector<double> &x, const std::vector<double> &w,
                             const std::vector<int32_t> &rows, double before, size_t passes) {
    const double terms = largest(score_backward_reference(absolute(dscores), absolute(x), w, rows).dw);
    return double(passes * rows.size() + 8) * unit_roundoff<float> * (std::abs(before) + double(passes) * terms);
}

template <class X> void expect_zero_elsewhere(const std::vector<X> &dx, const std::vector<int32_t> &rows, size_t C) {
    for (size_t i = 0; i < dx.size(); i++) {
        if (std::ranges::count(rows, int32_t(i / C)) > 0) continue;
        ASSERT_EQ(float(dx[i]), 0) << "row " << i / C << ", channel " << i % C;
    }
}
