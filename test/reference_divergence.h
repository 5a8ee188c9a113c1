// The head and its divergence from a teacher in float64.
#pragma once
#include "../llmc/ops/divergence.h"
#include "reference_loss.h"

struct DivergenceRow {
    double divergence, agreement;
    std::vector<double> dlogit;
    double size = 0,
           reach = 0;  // sum of the sizes of the terms of the divergence; largest logarithm of a quotient of two probabilities
};

inline std::vector<double> log_softmax_reference(const std::vector<double> &logit, double temperature) {
    double total = 0;
    std::vector<double> out;
    const double max = *std::max_element(logit.begin(), logit.end());
    for (double l : logit) total += std::exp((l - max) / temperature);
    for (double l : logit) out.push_back((l - max) / temperature - std::log(total));
    return out;
}

inline DivergenceRow divergence_reference(const std::vector<double> &student, const std::vector<double> &teacher, double weight,
                                          double beta, double temperature) {
    const auto first_maximum = [](const std::vector<double> &l) { return std::max_element(l.begin(), l.end()) - l.begin(); };
    const std::vector<double> log_s = log_softmax_reference(student, temperature),
                              log_p = log_softmax_reference(teacher, temperature);
    DivergenceRow out{0, double(first_maximum(student) == first_maximum(teacher)), {}};
    std::vector<double> h;
    double mean = 0;
    for (size_t v = 0; v < log_s.size(); v++) {
        const double s = std::exp(log_s[v]), p = std::exp(log_p[v]), d = log_s[v] - log_p[v];
        // log1p(x) of a small x keeps the digits that 1 + x would lose.
        const double to_m =
            d > 0 ? -std::log1p(beta * std::expm1(-d)) : d - std::log1p((1 - beta) * std::expm1(d));  // log(s / m)
        h.push_back(beta == 1 ? d : to_m);
        const double of_teacher = beta == 0 ? p * -d : beta == 1 ? 0 : p * (to_m - d), of_student = beta == 0 ? 0 : s * h.back();
        out.divergence += beta == 0 || beta == 1 ? of_teacher + of_student : beta * of_teacher + (1 - beta) * of_student;
        out.size += std::abs(of_teacher) + std::abs(of_student);
        mean += s * h.back();
        out.reach = std::max(out.reach, std::abs(d));
    }
    for (size_t v = 0; v < log_s.size(); v++) {
        const double s = std::exp(log_s[v]), p = std::exp(log_p[v]);
        out.dlogit.push_back(weight / temperature * (beta == 0 ? s - p : (beta == 1 ? 1 : 1 - beta) * s * (h[v] - mean)));
    }
    return out;
}

struct DivergenceResult {
    HeadResult student, teacher;  // statistics; dx and dw are the student's gradients of the divergence
    std::vector<double> divergence, agreement;
    double loss = 0, size = 0, reach = 0;  // sum_n weights[n] divergence[n]; the largest of the rows
};

inline DivergenceResult divergence_head_reference(const std::vector<double> &x, const std::vector<double> &w,
                                                  const std::vector<double> &teacher_x, const std::vector<double> &teacher_w,
                                                  const std::vector<int32_t> &rows, const std::vector<int32_t> &targets,
                                                  const std::vector<double> &weights, size_t C, size_t teacher_C, double beta,
                                                  double temperature) {
    const size_t V = w.size() / C;
    DivergenceResult out{head_reference(x, w, rows, targets, weights, C, 0, temperature),
                         head_reference(teacher_x, teacher_w, rows, targets, weights, teacher_C, 0, temperature),
                         {},
                         {}};
    std::ranges::fill(out.student.dx, 0), std::ranges::fill(out.student.dw, 0);
    const auto logits = [&](const std::vector<double> &x, const std::vector<double> &w, size_t C, size_t t) {
        std::vector<double> out(V);
        for (size_t v = 0; v < V; v++)
            for (size_t c = 0; c < C; c++) out[v] += x[t * C + c] * w[v * C + c];
        return out;
    };
    for (size_t n = 0; n < rows.size(); n++) {
        const size_t t = size_t(rows[n]);
        const DivergenceRow row =
            divergence_reference(logits(x, w, C, t), logits(teacher_x, teacher_w, teacher_C, t), weights[n], beta, temperature);
        out.divergence.push_back(row.divergence), out.agreement.push_back(row.agreement);
        out.loss += weights[n] * row.divergence, out.size = std::max(out.size, row.size),
                                                 out.reach = std::max(out.reach, row.reach);
        for (size_t v = 0; v < V; v++)
            for (size_t c = 0; c < C; c++) {
                out.student.dx[t * C + c] += row.dlogit[v] * w[v * C + c];
                out.student.dw[v * C + c] += row.dlogit[v] * x[t * C + c];
            }
    }
    return out;
}
