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

// The block's row of both models, from statistics of the whole vocabulary.
struct RowsOfBoth {
    LogitsRow student, teacher;

    __device__ RowsOfBoth(const LogitsOfBoth &logits, const DivergenceStats &stats, float to_z, size_t r)
        : student{logits.student + r * logits.ld, to_z, stats.student.max[r], logf(stats.student.sum[r])},
          teacher{logits.teacher + r * logits.ld, to_z, stats.teacher.max[r], logf(stats.teacher.sum[r])} {}
};

// Stores the sums of the terms and of the mean of the block's row, and returns the mean.
template <Divergence of>
__device__ float divergence_sums_of_row(DivergenceStats stats, size_t r, const LogitsRow &student, const LogitsRow &teacher,
                                        float beta, unsigned V, WarpSums<double> &shared) {
    constexpr unsigned N = Vec<float>::size;
    float terms = 0, mean = 0;
    for (unsigned v = threadIdx.x * N; v < V; v += blockDim.x * N) {
        const auto a = Vec<float, N>::load(student.logits + v), b = Vec<float, N>::load(teacher.logits + v);
        for (unsigned i = 0; i < N; i++) {
            const DivergenceTerm t = divergence_term<of>(student, teacher, a[int(i)], b[int(i)], beta);
            if (v + i < V) terms += t.term, mean += t.s * t.h;
        }
    }
    terms = float(block_sum(double(terms), shared.partial));
    mean = of == Divergence::forward ? 0 : float(block_sum(double(mean), shared.partial));
    if (threadIdx.x == 0) stats.divergence[r] = terms, stats.mean[r] = mean;
    return mean;
}

// The softmax parts of the block's row of both models. Stores their statistics.
struct PartsOfBoth {
    SoftmaxPart student, teacher;

    __device__ PartsOfBoth(DivergenceStats stats, size_t r, const LogitsOfBoth &logits, unsigned y, float to_z,
                           DivergenceShared &shared) {
        float a_target, b_target;
        student = softmax_part_of_row(a_target, logits.student + r * logits.ld, y, to_z, unsigned(logits.V), shared.student);
        teacher = softmax_part_of_row(b_target, logits.teacher + r * logits.ld, y, to_z, unsigned(logits.V), shared.teacher);
        if (threadIdx.x != 0) return;
        store_statistics(stats.student, r, student, entropy_of(student), a_target, y);
        store_statistics(stats.teacher, r, teacher, entropy_of(teacher), b_target, y);
        stats.agreement[r] = student.first == teacher.first;
    }
};

// One block computes a row. It reads the logits of both models for their maxima and sums, for the divergence, and for the gradients: it moves 24 V + V
// sizeof(X) bytes per row.
template <Divergence of, class X>
__global__ void __launch_bounds__(256)
    divergence_classifier_kernel1(DivergenceStats stats, X *dlogits, LogitsOfBoth logits, HeadLoss loss, float beta, float to_z,
                                  size_t n, size_t dld) {
    const size_t V = logits.V, ld = logits.ld;
    DivergenceShared &shared = shared_mem<DivergenceShared>();
    const size_t r = blockIdx.x;
    if (r >= n) return clear_row<X>(dlogits + r * dld, ld);
    const PartsOfBoth parts(stats, r, logits, unsigned(loss.targets[r]), to_z, shared);
    const LogitsRow student{logits.student + r * ld, to_z, parts.student.max, logf(parts.student.sum)},
        teacher{logits.teacher + r * ld, to_z, parts.teacher.max, logf(parts.teacher.sum)};
    const float mean = divergence_sums_of_row<of>(stats, r, student, teacher, beta, unsigned(V), shared.sums);
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

// One block computes a row. It reads 8 bytes per logit.
template <class X>
__global__ void __launch_bounds__(256)
    divergence_statistics_kernel1(DivergenceStats stats, LogitsOfBoth logits, HeadLoss loss, float to_z) {
    const size_t r = blockIdx.x;
    PartsOfBoth(stats, r, logits, unsigned(loss.targets[r]), to_z, shared_mem<DivergenceShared>());
}

template <class X> void divergence_statistics(Cuda<X> dev, DivergenceStats stats, LogitsOfBoth logits, HeadLoss loss, size_t n) {
    launch(dev, divergence_statistics_kernel1<X>, Grid{n}, classifier_threads(logits.V), sizeof(DivergenceShared), stats, logits,
           loss, 1 / loss.temperature);
}

// One block computes a row. It reads 8 bytes per logit.
template <Divergence of, class X>
__global__ void __launch_bounds__(256)
    divergence_terms_kernel1(DivergenceStats stats, LogitsOfBoth logits, float beta, float to_z) {
    const size_t r = blockIdx.x;
    const RowsOfBoth rows(logits, stats, to_z, r);
    divergence_sums_of_row<of>(stats, r, rows.student, rows.teacher, beta, unsigned(logits.V), shared_mem<WarpSums<double>>());
}

template <class X>
void divergence_terms(Cuda<X> dev, DivergenceStats stats, LogitsOfBoth logits, HeadLoss loss, float beta, size_t n) {
    with_divergence(beta, [&]<Divergence of> {
        launch(dev, divergence_terms_kernel1<of, X>, Grid{n}, classifier_threads(logits.V), sizeof(WarpSums<double>), stats,
               logits, beta, 1 / loss.temperature);
    });
}

// One block computes a row. It moves 8 + sizeof(X) bytes per logit.
template <Divergence of, class X>
__global__ void __launch_bounds__(256)
    divergence_range_kernel1(X *dlogits, LogitsOfBoth logits, HeadLoss loss, DivergenceStats stats, float beta, float to_z,
                             size_t n, size_t dld) {
    const size_t r = blockIdx.x, ld = logits.ld;
    if (r >= n) return clear_row<X>(dlogits + r * dld, ld);
    const RowsOfBoth rows(logits, stats, to_z, r);
    divergence_dlogits_row<of>(dlogits + r * dld, rows.student, rows.teacher, loss.weights[r] * to_z, stats.mean[r], beta,
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
