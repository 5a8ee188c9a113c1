// The head of a student fused with the divergence of its distributions from a teacher's, over the whole vocabulary. As in loss.h a chunk of rows at a
// time has logits, of both models, so that neither model's (T, V) logits ever exist.
//
//   divergence_head(dev, stats, dx, dw, scratch, x, w, teacher, loss, shape, accumulate)
//                                       for n < N, with t = loss.predictors[n], tau = loss.temperature, beta = teacher.beta:
//       z[v] = sum_c x[t,c] w[v,c] / tau                      s = softmax(z)       the student's
//       z'[v] = sum_c teacher.x[t,c] teacher.w[v,c] / tau     p = softmax(z')      the teacher's
//       m = (1 - beta) s + beta p
//       divergence[n] = KL(p, s) = sum_v p[v] log(p[v] / s[v])          for beta = 0
//                       KL(s, p)                                        for beta = 1
//                       beta KL(p, m) + (1 - beta) KL(s, m)             for 0 < beta < 1
//       h[v] = log(s[v] / p[v]) for beta = 1, else log(s[v] / m[v])     mean[n] = sum_v s[v] h[v]   (0 for beta = 0)
//       agreement[n] = 1 if the first maximum of z is that of z'
//       dlogit[v] = weights[n] / tau * (s[v] - p[v])                    for beta = 0
//                   weights[n] / tau * s[v] (h[v] - mean[n])            for beta = 1; for 0 < beta < 1 times 1 - beta
//       dx[t,c] = sum_v dlogit[v] w[v,c]     dw[v,c] += sum_n dlogit[v] x[t,c];   if not accumulate, dw = sum_n ..., and N > 0
//
//   divergence_head_weight(dev, dw, scratch, x, w, teacher, loss, stats, shape, first, count)   for v in [first, first + count):
//       dw[v - first,c] += sum_n dlogit[v] x[t,c]
//
//   If the vocabulary is divided among ranks, each with the same rows of both heads, divergence_head calls merge(OfParts::statistics, n0, n) and then
//   merge(OfParts::terms, n0, n) for each chunk, predictors n0 to n0 + n: stats has numbers of this part, and then must have those of the whole
//   (head_parts.h).
//
//   shape: T, C, V, N     x, dx (T, C), w (V, C) X     teacher.x (T, teacher.C), teacher.w (V, teacher.C) X     dw (V, C), of a range (count, C), float
//   stats: those of both models in loss.h, of z and z' and the same targets, and divergence (nats), mean, agreement; (N) float each
//   weights[n] is dL/ddivergence[n]; the loss has no entropy_weight. All else is as in loss.h: null pointers, rows without a target, roundings, ranges.
//   scratch: divergence_scratch(dev, shape, teacher.C) bytes, aligned to array_alignment on GPUs, for both functions. Nothing may alias.
//
//   divergence_sums(dev, sums, stats, N): sums[0..1] += sum_n divergence[n], agreement[n]     sums (2) double
//
// The divergence for 0 < beta < 1 is the generalised Jensen-Shannon divergence of Agarwal et al., "On-Policy Distillation of Language Models", 2023,
// arXiv:2306.13649, with TRL's weights and without a factor tau^2. It tends to 0 at both ends, where beta = 0 and 1 have the other two.
#pragma once
#include "loss.h"

struct DivergenceStats {
    HeadStats student, teacher;
    float *divergence, *mean, *agreement;  // (N) each

    auto pointers() const {  // ../core/rehearsal.h
        return std::tuple_cat(student.pointers(), teacher.pointers(), std::tuple(divergence, mean, agreement));
    }
    DivergenceStats from(size_t n) const { return {student.from(n), teacher.from(n), divergence + n, mean + n, agreement + n}; }
};

// The hidden states and the head of a teacher with C channels.
template <class X> struct TeacherHead {
    const X *x, *w;
    size_t C;
    float beta;
};

// The logits of a chunk or a range of both models, (n, V) in rows that are ld elements apart.
struct LogitsOfBoth {
    float *student, *teacher;
    size_t V, ld;

    auto pointers() const { return std::tuple(student, teacher); }  // ../core/rehearsal.h
};

enum class Divergence { forward, reverse, mixture };

// Calls f<divergence>(): the divergence is chosen once for a row.
template <class F> void with_divergence(float beta, F f) {
    if (beta == 0) f.template operator()<Divergence::forward>();
    else if (beta == 1) f.template operator()<Divergence::reverse>();
    else f.template operator()<Divergence::mixture>();
}

// Of one logit: s, its term of the divergence, and h; for beta = 0 p in place of h.
struct DivergenceTerm {
    float s, term, h;
};

// exp_of and log_of are the device's functions; log_s and log_p are the logarithms of both probabilities. One of the two probabilities of the mixture is
// scaled to 1, so that neither underflows.
template <Divergence of, class Exp, class Log>
HOST_DEVICE inline DivergenceTerm divergence_term(float log_s, float log_p, float beta, Exp exp_of, Log log_of) {
    const float s = exp_of(log_s), difference = log_s - log_p;
    if constexpr (of == Divergence::reverse) return {s, s * difference, difference};
    const float p = exp_of(log_p);
    if constexpr (of == Divergence::forward) return {s, p * -difference, p};
    const float below = difference < 0 ? difference : 0,
                above = difference > 0 ? -difference : 0;  // log s and log p minus the larger of both
    const float log_m = log_of((1 - beta) * exp_of(below) + beta * exp_of(above));
    return {s, beta * p * (above - log_m) + (1 - beta) * s * (below - log_m), below - log_m};
}

// weight: of the row, divided by the temperature
template <Divergence of> HOST_DEVICE inline float divergence_slope(float s, float h, float mean, float weight, float beta) {
    if constexpr (of == Divergence::forward) return weight * (s - h);
    else if constexpr (of == Divergence::reverse) return weight * s * (h - mean);
    else return weight * (1 - beta) * s * (h - mean);
}

// ---- rows of a chunk ------------------------------------------------------------------------------------------------------------

// Of a row of logits: scale * logit - max = z - max.
struct Shift {
    float scale, student, teacher;
};

// Adds up the terms of V logits of student and teacher. If `replace`, s and h take the places of the logits.
template <Divergence of, bool replace>
void divergence_terms_row(double *sums, float *student, float *teacher, Shift shift, DivergenceStats stats, size_t r, float beta,
                          size_t V) {
    constexpr size_t run = 1024;
    const float student_sum = std::log(stats.student.sum[r]), teacher_sum = std::log(stats.teacher.sum[r]);
    double terms = 0, mean = 0;
    for (size_t v0 = 0; v0 < V; v0 += run) {
        float run_terms = 0, run_mean = 0;
#pragma omp simd reduction(+ : run_terms, run_mean)
        for (size_t v = v0; v < std::min(V, v0 + run); v++) {
            const DivergenceTerm t = divergence_term<of>(
                student[v] * shift.scale - shift.student - student_sum, teacher[v] * shift.scale - shift.teacher - teacher_sum,
                beta, [](float x) { return fast_exp(x); }, [](float x) { return fast_log(x); });
            run_terms += t.term, run_mean += t.s * t.h;
            if constexpr (replace) student[v] = t.s, teacher[v] = t.h;
        }
        terms += run_terms, mean += run_mean;
    }
    sums[0] = terms, sums[1] = of == Divergence::forward ? 0 : mean;
}

inline Shift shift_of(const HeadLoss &loss, const DivergenceStats &stats, size_t r) {
    return {1 / loss.temperature, stats.student.max[r], stats.teacher.max[r]};
}

template <Divergence of, class X>
void divergence_dlogits_row(X *dlogits, const float *s, const float *h, const HeadLoss &loss, DivergenceStats stats, size_t r,
                            float beta, size_t V) {
    const float weight = loss.weights[r] / loss.temperature, mean = stats.mean[r];
#pragma omp simd
    for (size_t v = 0; v < V; v++) dlogits[v] = divergence_slope<of>(s[v], h[v], mean, weight, beta);
}

inline size_t first_maximum(const float *logits, size_t V) {
    float max = -INFINITY;
#pragma omp simd reduction(max : max)
    for (size_t v = 0; v < V; v++) max = logits[v] > max ? logits[v] : max;
    return size_t(std::find(logits, logits + V, max) - logits);
}

// Computes the statistics of rows 0 to n of a chunk and, unless dlogits is null, the gradients of the student's logits, as fused_classifier does
// (loss.h).
template <class X>
void divergence_classifier(Cpu<X> dev, DivergenceStats stats, X *dlogits, LogitsOfBoth logits, HeadLoss loss, float beta,
                           size_t n, size_t padded) {
    const size_t V = logits.V, ld = logits.ld;
    for_each_row(dev, n, [=](size_t r) {
        float *a = logits.student + r * ld, *b = logits.teacher + r * ld;
        stats.agreement[r] = first_maximum(a, V) == first_maximum(b, V);
        softmax_row<Left::shifted>(stats.student, r, a, size_t(loss.targets[r]), V, loss.temperature);
        softmax_row<Left::shifted>(stats.teacher, r, b, size_t(loss.targets[r]), V, loss.temperature);
        with_divergence(beta, [=]<Divergence of> {
            double sums[2];
            divergence_terms_row<of, true>(sums, a, b, {1, 0, 0}, stats, r, beta, V);
            stats.divergence[r] = float(sums[0]), stats.mean[r] = float(sums[1]);
            if (dlogits) divergence_dlogits_row<of>(dlogits + r * ld, a, b, loss, stats, r, beta, V);
        });
    });
    if (dlogits) std::fill(dlogits + n * ld, dlogits + padded * ld, X(0.0f));
}

// Computes the statistics of both models in a part of the vocabulary, and whether the two first maxima of the part are one.
template <class X> void divergence_statistics(Cpu<X> dev, DivergenceStats stats, LogitsOfBoth logits, HeadLoss loss, size_t n) {
    const size_t V = logits.V, ld = logits.ld;
    for_each_row(dev, n, [=](size_t r) {
        float *a = logits.student + r * ld, *b = logits.teacher + r * ld;
        stats.agreement[r] = first_maximum(a, V) == first_maximum(b, V);
        softmax_row<Left::logits>(stats.student, r, a, size_t(loss.targets[r]), V, loss.temperature);
        softmax_row<Left::logits>(stats.teacher, r, b, size_t(loss.targets[r]), V, loss.temperature);
    });
}

// Computes the part's terms of the divergence and of the mean from the statistics of the whole vocabulary.
template <class X>
void divergence_terms(Cpu<X> dev, DivergenceStats stats, LogitsOfBoth logits, HeadLoss loss, float beta, size_t n) {
    for_each_row(dev, n, [=](size_t r) {
        with_divergence(beta, [=]<Divergence of> {
            double sums[2];
            divergence_terms_row<of, false>(sums, logits.student + r * logits.ld, logits.teacher + r * logits.ld,
                                            shift_of(loss, stats, r), stats, r, beta, logits.V);
            stats.divergence[r] = float(sums[0]), stats.mean[r] = float(sums[1]);
        });
    });
}

// Computes the gradients of a range of logits from known statistics.
template <class X>
void divergence_range(Cpu<X> dev, X *dlogits, LogitsOfBoth logits, HeadLoss loss, DivergenceStats stats, float beta, size_t n,
                      size_t padded) {
    const size_t count = logits.V, ld = logits.ld;
    for_each_row(dev, n, [=](size_t r) {
        float *a = logits.student + r * ld, *b = logits.teacher + r * ld;
        with_divergence(beta, [=]<Divergence of> {
            double sums[2];  // of the range, of no interest
            divergence_terms_row<of, true>(sums, a, b, shift_of(loss, stats, r), stats, r, beta, count);
            divergence_dlogits_row<of>(dlogits + r * ld, a, b, loss, stats, r, beta, count);
        });
    });
    std::fill(dlogits + n * ld, dlogits + padded * ld, X(0.0f));
}

template <class X> void divergence_sums(Cpu<X>, double *sums, DivergenceStats stats, size_t N) {
    double divergence = 0, agreement = 0;
    for (size_t n = 0; n < N; n++) divergence += stats.divergence[n], agreement += stats.agreement[n];
    sums[0] += divergence, sums[1] += agreement;
}

// ---- the head, on any device -------------------------------------------------------------------------------------------------

// A row of a chunk has the logits of both models.
template <class Dev> constexpr size_t divergence_rows(Dev dev, size_t n, size_t V, size_t chunk = least_head_chunk) {
    return lm_head_rows(dev, n, 2 * V, chunk);
}

template <class Dev> size_t divergence_scratch(Dev dev, HeadShape shape, size_t teacher_C) {
    const size_t rows = divergence_rows(dev, shape.N, shape.most_V, shape.chunk);
    return round_up(lm_head_chunk_bytes(dev, rows, shape.C, shape.V), array_alignment) +
           round_up(rows * logits_ld(dev, shape.V) * sizeof(float), array_alignment) + rows * teacher_C * sizeof(typename Dev::X);
}

// The arrays in the scratch: those of the student's head, and the teacher's.
template <class X> struct DivergenceChunk {
    HeadChunk<X> student;
    LogitsOfBoth logits;  // of `most` rows
    X *x;                 // (most, teacher's C)

    template <class Dev>
    DivergenceChunk(Dev dev, void *scratch, size_t most, size_t C, size_t V) : student(dev, scratch, most, V) {
        char *at = static_cast<char *>(scratch) + round_up(lm_head_chunk_bytes(dev, most, C, V), array_alignment);
        logits = {student.logits, reinterpret_cast<float *>(at), V, student.ld};
        x = reinterpret_cast<X *>(at + round_up(most * student.ld * sizeof(float), array_alignment));
    }
};

// Calls body(n0, n, padded) for each chunk, with the logits of V rows of both heads.
template <class Dev, class X, class Body>
void for_each_chunk_of_both(Dev dev, const DivergenceChunk<X> &chunk, const X *x, const X *w, TeacherHead<X> teacher,
                            const int32_t *predictors, size_t C, size_t V, size_t N, Body body) {
    for_each_chunk(dev, chunk.student, x, w, predictors, C, V, N, [&](size_t n0, size_t n, size_t padded) {
        gather_rows(dev, chunk.x, teacher.x, predictors + n0, n, padded, teacher.C);
        matmul_forward(dev, chunk.logits.teacher, chunk.x, teacher.w, nullptr, padded, teacher.C, V, chunk.logits.ld);
        body(n0, n, padded);
    });
}

enum class OfParts { statistics, terms };
using MergeParts = std::function<void(OfParts what, size_t n0, size_t n)>;

template <class Dev, class X = typename Dev::X>
void divergence_head(Dev dev, DivergenceStats stats, std::type_identity_t<X> *dx, float *dw, void *scratch, const X *x,
                     const X *w, TeacherHead<X> teacher, HeadLoss loss, HeadShape shape, bool accumulate,
                     const MergeParts &merge = {}) {
    const size_t T = shape.T, C = shape.C, V = shape.V, N = shape.N;
    const DivergenceChunk<X> both(dev, scratch, divergence_rows(dev, N, shape.most_V, shape.chunk), C, V);
    const HeadChunk<X> &chunk = both.student;
    if (dx) gather_rows(dev, dx, x, loss.predictors, 0, T, C);  // n = 0: sets all rows to 0
    for_each_chunk_of_both(dev, both, x, w, teacher, loss.predictors, C, V, N, [&](size_t n0, size_t n, size_t padded) {
        const DivergenceStats of_chunk = stats.from(n0);
        if (!merge)
            divergence_classifier(dev, of_chunk, dx ? chunk.dlogits : nullptr, both.logits, loss.from(n0), teacher.beta, n,
                                  padded);
        else {
            divergence_statistics(dev, of_chunk, both.logits, loss.from(n0), n);
            merge(OfParts::statistics, n0, n);
            divergence_terms(dev, of_chunk, both.logits, loss.from(n0), teacher.beta, n);
            merge(OfParts::terms, n0, n);
        }
        if (!dx) return;
        if (merge) divergence_range(dev, chunk.dlogits, both.logits, loss.from(n0), of_chunk, teacher.beta, n, padded);
        if (dw) matmul_backward_weight(dev, dw, nullptr, chunk.dlogits, chunk.x, padded, C, V, accumulate || n0 > 0, chunk.dld);
        matmul_backward_input(dev, chunk.x, chunk.dlogits, w, padded, C, V, chunk.dld);
        scatter_rows(dev, dx, chunk.x, loss.predictors + n0, n, C);
    });
}

template <class Dev, class X = typename Dev::X>
void divergence_head_weight(Dev dev, float *dw, void *scratch, const X *x, const X *w, TeacherHead<X> teacher, HeadLoss loss,
                            DivergenceStats stats, HeadShape shape, size_t first, size_t count) {
    const size_t C = shape.C, N = shape.N;
    const DivergenceChunk<X> both(dev, scratch, divergence_rows(dev, N, shape.most_V, shape.chunk), C, count);
    const HeadChunk<X> &chunk = both.student;
    teacher.w += first * teacher.C;
    for_each_chunk_of_both(
        dev, both, x, w + first * C, teacher, loss.predictors, C, count, N, [&](size_t n0, size_t n, size_t padded) {
            divergence_range(dev, chunk.dlogits, both.logits, loss.from(n0), stats.from(n0), teacher.beta, n, padded);
            matmul_backward_weight(dev, dw, nullptr, chunk.dlogits, chunk.x, padded, C, count, true, chunk.dld);
        });
}

REHEARSED(divergence_classifier);
REHEARSED(divergence_statistics);
REHEARSED(divergence_terms);
REHEARSED(divergence_range);
REHEARSED(divergence_sums);
