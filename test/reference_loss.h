// The head and its loss in float64.
#pragma once
#include "../llmc/ops/loss.h"
#include "check.h"
#include "float_sums.h"

struct ClassifierRow {
    double nll, entropy, correct, max, sum;  // max, sum: over logits divided by the temperature
    std::vector<double> dlogit;
    double spread;  // largest difference of logits
};

inline ClassifierRow classifier_reference(std::vector<double> logit, size_t target, double weight, double entropy_weight = 0,
                                          double temperature = 1) {
    for (double &l : logit) l /= temperature;
    const auto max = std::max_element(logit.begin(), logit.end()), min = std::min_element(logit.begin(), logit.end());
    double total = 0, entropy = 0;
    for (double l : logit) total += std::exp(l - *max);
    const double lse = *max + std::log(total);
    for (double l : logit) entropy -= std::exp(l - lse) * (l - lse);
    ClassifierRow out{lse - logit[target], entropy, double(size_t(max - logit.begin()) == target), *max, total, {}, *max - *min};
    for (size_t v = 0; v < logit.size(); v++) {
        const double log_p = logit[v] - lse, p = std::exp(log_p);
        out.dlogit.push_back((weight * (p - (v == target)) - entropy_weight * p * (log_p + entropy)) / temperature);
    }
    return out;
}

struct HeadResult {
    std::vector<double> nll, entropy, correct, lse, dx, dw;
    double loss = 0;              // sum_n weights[n] nll[n] + entropy_weight entropy[n]
    double size = 0, spread = 0;  // largest sum_c |x w| of a logit; largest difference of logits in a row
};

inline HeadResult head_reference(const std::vector<double> &x, const std::vector<double> &w, const std::vector<int32_t> &rows,
                                 const std::vector<int32_t> &targets, const std::vector<double> &weights, size_t C,
                                 double entropy_weight = 0, double temperature = 1) {
    const size_t V = w.size() / C;
    HeadResult out;
    out.dx.assign(x.size(), 0), out.dw.assign(w.size(), 0);
    std::vector<double> logit(V);
    for (size_t n = 0; n < rows.size(); n++) {
        const double *x_t = &x[size_t(rows[n]) * C];
        double *dx_t = &out.dx[size_t(rows[n]) * C];
        for (size_t v = 0; v < V; v++) {
            double sum = 0, size = 0;
            for (size_t c = 0; c < C; c++) sum += x_t[c] * w[v * C + c], size += std::abs(x_t[c] * w[v * C + c]);
            logit[v] = sum;
            out.size = std::max(out.size, size);
        }
        const ClassifierRow row = classifier_reference(logit, size_t(targets[n]), weights[n], entropy_weight, temperature);
        out.nll.push_back(row.nll);
        out.entropy.push_back(row.entropy);
        out.correct.push_back(row.correct);
        out.lse.push_back(row.max + std::log(row.sum));
        out.loss += weights[n] * row.nll + entropy_weight * row.entropy;
        out.spread = std::max(out.spread, row.spread);
        for (size_t v = 0; v < V; v++)
            for (size_t c = 0; c < C; c++) {
                dx_t[c] += row.dlogit[v] * w[v * C + c];
                out.dw[v * C + c] += row.dlogit[v] * x_t[c];
            }
    }
    return out;
}

// Of a test with the members of Head (ops/test_loss.cpp): a row that has no target, or one of weight 0, gets no gradient.
template <class Test, class Dev> void expect_no_gradient_without_a_target(Test &test, Dev dev) {
    test.run(dev);
    std::vector<bool> has(test.T, false);
    for (size_t n = 0; n < test.N; n++) has[size_t(test.rows[n])] = test.weights[n] != 0;
    for (size_t t = 0; t < test.T; t++)
        for (size_t c = 0; c < test.C && !has[t]; c++) EXPECT_EQ(float(test.dx[t * test.C + c]), 0.0f);

    test.N = 0;  // no targets
    for (const std::vector<size_t> &ends : {std::vector<size_t>{}, {13, 70}}) {
        test.run(dev, true, ends);
        EXPECT_EQ(largest(widen(test.dx)), 0);
        EXPECT_EQ(test.dw, test.dw_before);
    }
}
