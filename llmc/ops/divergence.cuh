// The head and its divergence from a teacher on CUDA. Contract, formulas and divergence_head itself: divergence.h.
#pragma once
#include "divergence.h"
#include "loss.cuh"

inline namespace CUDA_BACKEND {
struct DivergenceShared {
    SoftmaxWarps student, teacher;
    WarpSums<double> sums;
};

// A row of logits and the statistics that turn them into log-probabilities.
struct LogitsRow {
    const float *logits;
    float to_z, max, log_sum;

    __device__ float log_p(float logit) const { return logit * to_z - max - log_sum; }
};

template <Divergence of>
__device__ DivergenceTerm divergence_term(const LogitsRow &student, const LogitsRow &teacher, float a, float b, float beta) {
    return divergence_term<of>(
        student.log_p(a), teacher.log_p(b), beta, [](float x) { return expf(x); }, [](float x) { return logf(x); });
}

// Computes the gradients of the block's row, which may overwrite the student's logits, as dlogits_row does (loss.cuh).
template <Divergence of, class X>
__device__ void divergence_dlogits_row(X *dlogits, const LogitsRow &student, const LogitsRow &teacher, float weight, float mean,
                                       float beta, unsigned V, unsigned ld) {
    constexpr unsigned N = Vec<float>::size;
    for (unsigned begin = 0; begin < ld; begin += blockDim.x * N) {
        const unsigned v = begin + threadIdx.x * N;
        Vec<X, N> d = {};
        if (v < V) {
            const auto a = Vec<float, N>::load(student.logits + v), b = Vec<float, N>::load(teacher.logits + v);
            for (unsigned i = 0; i < N; i++) {
                const DivergenceTerm t = divergence_term<of>(student, teacher, a[int(i)], b[int(i)], beta);
                if (v + i < V) d[int(i)] = divergence_slope<of>(t.s, t.h, mean, weight, beta);
            }
        }
        if (sizeof(X) < sizeof(float)) __syncthreads();
        if (v < ld) d.store(dlogits + v);
    }
}

// One block computes a row. It reads the logits of both models for their maxima and sums, for the divergence, and for the gradients: it moves 24 V + V
// sizeof(X) bytes per row.
template <Divergence of, class X>
__global__ void __launch_bounds__(256)
    divergence_classifier_kernel1(DivergenceStats stats, X *dlogits, LogitsOfBoth logits, HeadLoss loss, float beta, float to_z,
                                  size_t n, size_t dld) {
    constexpr unsigned N = Vec<float>::size;
    const size_t V = logits.V, ld = logits.ld;
    DivergenceShared &shared = shared_mem<DivergenceShared>();
    const size_t r = blockIdx.x;
    if (r >= n) return clear_row<X>(dlogits + r * dld, ld);
    const float *a_row = logits.student + r * ld, *b_row = logits.teacher + r * ld;
    const unsigned y = unsigned(loss.targets[r]);
    float a_target, b_target;
    const SoftmaxPart a_part = softmax_part_of_row(a_target, a_row, y, to_z, unsigned(V), shared.student),
                      b_part = softmax_part_of_row(b_target, b_row, y, to_z, unsigned(V), shared.teacher);
    const LogitsRow student{a_row, to_z, a_part.max, logf(a_part.sum)}, teacher{b_row, to_z, b_part.max, logf(b_part.sum)};

    float terms = 0, mean = 0;
    for (unsigned v = threadIdx.x * N; v < unsigned(V); v += blockDim.x * N) {
        const auto a = Vec<float, N>::load(a_row + v), b = Vec<float, N>::load(b_row + v);
        for (unsigned i = 0; i < N; i++) {
            const DivergenceTerm t = divergence_term<of>(student, teacher, a[int(i)], b[int(i)], beta);
            if (v + i < unsigned(V)) terms += t.term, mean += t.s * t.h;
        }
    }
    terms = float(block_sum(double(terms), shared.sums.partial));
    mean = of == Divergence::forward ? 0 : float(block_sum(double(mean), shared.sums.partial));
    if (threadIdx.x == 0) {
        store_statistics(stats.student, r, a_part, entropy_of(a_part), a_target, y);
        store_statistics(stats.teacher, r, b_part, entropy_of(b_part), b_target, y);
        stats.divergence[r] = terms, stats.mean[r] = mean, stats.agreement[r] = a_part.first == b_part.first;
    }
    if (dlogits)
        divergence_dlogits_row<of>(dlogits + r * dld, student, teacher, loss.weights[r] * to_z, mean, beta, unsigned(V),
                                   unsigned(ld));
}

template <class X>
void divergence_classifier(Cuda<X> dev, DivergenceStats stats, X *dlogits, LogitsOfBoth logits, HeadLoss loss, float beta,
                           size_t n, size_t padded) {
    with_divergence(beta, [&]<Divergence of> {
        launch(dev, divergence_classifier_kernel1<of, X>, Grid{dlogits ? padded : n}, classifier_threads(logits.V),
               sizeof(DivergenceShared), stats, dlogits, logits, loss, beta, 1 / loss.temperature, n, dlogits_ld(dev, logits.ld));
    });
}

// One block computes a row. It moves 8 + sizeof(X) bytes per logit.
template <Divergence of, class X>
__global__ void __launch_bounds__(256)
    divergence_range_kernel1(X *dlogits, LogitsOfBoth logits, HeadLoss loss, DivergenceStats stats, float beta, float to_z,
                             size_t n, size_t dld) {
    const size_t r = blockIdx.x, ld = logits.ld;
    if (r >= n) return clear_row<X>(dlogits + r * dld, ld);
    const LogitsRow student{logits.student + r * ld, to_z, stats.student.max[r], logf(stats.student.sum[r])},
        teacher{logits.teacher + r * ld, to_z, stats.teacher.max[r], logf(stats.teacher.sum[r])};
    divergence_dlogits_row<of>(dlogits + r * dld, student, teacher, loss.weights[r] * to_z, stats.mean[r], beta,
                               unsigned(logits.V), unsigned(ld));
}

template <class X>
void divergence_range(Cuda<X> dev, X *dlogits, LogitsOfBoth logits, HeadLoss loss, DivergenceStats stats, float beta, size_t n,
                      size_t padded) {
    with_divergence(beta, [&]<Divergence of> {
        launch(dev, divergence_range_kernel1<of, X>, Grid{padded}, classifier_threads(logits.V), 0, dlogits, logits, loss, stats,
               beta, 1 / loss.temperature, n, dlogits_ld(dev, logits.ld));
    });
}

// One block sums all rows, as head_sums does.
template <class X>
__global__ void __launch_bounds__(1024) divergence_sums_kernel1(double *sums, DivergenceStats stats, size_t N) {
    WarpSums<double> &shared = shared_mem<WarpSums<double>>();
    double divergence = 0, agreement = 0;
    for (size_t n = threadIdx.x; n < N; n += blockDim.x)
        divergence += double(stats.divergence[n]), agreement += double(stats.agreement[n]);
    divergence = block_sum(divergence, shared.partial), agreement = block_sum(agreement, shared.partial);
    if (threadIdx.x == 0) sums[0] += divergence, sums[1] += agreement;
}

template <class X> void divergence_sums(Cuda<X> dev, double *sums, DivergenceStats stats, size_t N) {
    launch(dev, divergence_sums_kernel1<X>, Grid{1}, 1024, sizeof(WarpSums<double>), sums, stats, N);
}
}  // namespace CUDA_BACKEND
