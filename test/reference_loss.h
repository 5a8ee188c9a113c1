// The head and its loss in float64, and how far float may be from it.
#pragma once
#include "../llmc/ops/loss.h"
#include "check.h"
#include "float_sums.h"

struct ClassifierRow {
    double nll, entropy, correct, max, sum;  // max, sum: of logits divided by the temperature
    std::vector<double> dlogit;
    double spread;  // largest distance of its logits
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
    double size = 0, spread = 0;  // largest sum_c |x w| of a logit; largest distance of logits in a row
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

// A row of tokens with targets, the head's results for it, and their check.
template <class X> struct HeadCase {
    size_t T, C, V, N;
    std::vector<X> x, w, dx;
    std::vector<int32_t> rows, targets;
    std::vector<float> weights, nll, entropy, correct, max, sum, dw, dw_before;
    float entropy_weight = 0, temperature = 1;

    // Every second row or so has a target; weights are of both signs and some are 0, as in DPO.
    void make(size_t tokens, size_t channels, size_t vocab, double deviation = 1) {
        T = tokens, C = channels, V = vocab;
        x = random_values<X>(T * C, 1, deviation), w = random_values<X>(V * C, 2, 1 / std::sqrt(double(C)));
        const Random random{1, Purpose::test, 3};
        rows.clear(), targets.clear(), weights.clear();
        for (size_t t = 0; t < T; t++)
            if (t == 0 || random.uniform(t) < 0.6) {
                rows.push_back(int32_t(t));
                targets.push_back(int32_t(random.below(T + t, V)));
                weights.push_back(t % 5 == 3 ? 0.0f : float(random.normal(2 * T + t)));
            }
        N = rows.size();
        dw_before = random_values<float>(V * C, 4);
        printf(" T %zu, C %zu, V %zu, N %zu, chunks of %zu\n", T, C, V, N, lm_head_chunk(Cpu<X>{}, V));
    }
    // Each row of x has one channel to itself, so that logits and dw are sums of one term, exact in any order: dw is 8 dlogit.
    void make_separate(size_t tokens, size_t channels, size_t vocab) {
        make(tokens, channels, vocab);
        ASSERT_LE(N, C);
        std::fill(x.begin(), x.end(), X(0.0f)), std::fill(dw_before.begin(), dw_before.end(), 0.0f);
        for (size_t n = 0; n < N; n++) x[size_t(rows[n]) * C + n] = X(8.0f);
    }

    // logit: the error of a float sum of C products (see reference_matmul.h), by the temperature; e: the relative error of exp and a float sum of 1024.
    void check() {
        const auto want = head_reference(widen(x), widen(w), rows, targets, widen(weights), C, entropy_weight, temperature);
        const double u = 0x1p-24, uX = unit_roundoff<X>, tau = temperature, e = 4 * u + rounded_sum_error(1025),
                     logit = (sum_error_of<X>(C + 1) + (tau == 1 ? 0 : 2 * u)) * want.size / tau;
        double total_weight = 0;
        for (float v : weights) total_weight += std::abs(v);
        expect_close("nll", nll, want.nll, 2 * logit + e + 2 * u * (largest(want.nll) + want.spread));
        expect_close("entropy", entropy, want.entropy, (logit + e + u) * (2 + want.spread));
        EXPECT_EQ(widen(correct), want.correct);
        std::vector<double> lse;
        for (size_t n = 0; n < N; n++) lse.push_back(double(max[n]) + std::log(double(sum[n])));
        expect_close("lse", lse, want.lse, logit + e + u);

        // dlogit is off by (2 logit + e) p and the rounding to X; p and |dlogit| sum to 1 and to at most 2 per unit of weight.
        const double dlogit = 2 * logit + e + 2 * uX, long_sum = 2 * sum_error_of<X>(V + 1),
                     short_sum = 2 * sum_error_of<X>(N + 1);
        // With an entropy weight p is multiplied by log p + entropy, which is at most `reach`, and off by the errors of both.
        const double h = std::abs(entropy_weight), reach = want.spread + std::log(double(V)),
                     of_entropy =
                         (2 * logit + e) * (1 + reach) + 3 * u * reach + (logit + e + u) * (2 + want.spread) + 2 * uX * reach;
        expect_close("dx", dx, want.dx,
                     (largest(weights) * (dlogit + long_sum) + h * (of_entropy + reach * long_sum)) / tau * largest(widen(w)) +
                         uX * largest(want.dx));
        auto dw_want = want.dw;
        for (size_t i = 0; i < dw_want.size(); i++) dw_want[i] += dw_before[i];
        expect_close(
            "dw", dw, dw_want,
            (total_weight * (dlogit + short_sum) + double(N) * h * (of_entropy + reach * short_sum)) / tau * largest(widen(x)) +
                u * double(N) * largest(dw_want));
    }
};
