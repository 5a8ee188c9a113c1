#include "sgemm.h"

#include <omp.h>

#include <algorithm>

#include "../core/common.h"
#include "../core/dtype.h"

namespace {

#if defined(__AVX512F__)
constexpr size_t lanes = 16, MR = 8, NR = 3 * lanes;  // 24 accumulators, 3 of B and 1 of A: 28 of 32 registers
#elif defined(__AVX__)
constexpr size_t lanes = 8, MR = 6, NR = 2 * lanes;  // 12 accumulators of 16 registers
#else
constexpr size_t lanes = 4, MR = 6, NR = 2 * lanes;
#endif
typedef float Vector __attribute__((vector_size(lanes * sizeof(float)), may_alias));

constexpr size_t MC = 192, NC = 384, KC = 256;  // a tile of C, and the depth of a packed block
static_assert(MC % MR == 0 && NC % NR == 0 && MC * KC + KC * NC + MC * NC <= sgemm_scratch);

// tile (MR, NR; row length NC) = or += a b, with a packed (K, MR) and b packed (K, NR).
void micro_kernel(float *tile, const float *a, const float *b, size_t K, bool add) {
    constexpr size_t W = NR / lanes;
    Vector sum[MR][W] = {};
    for (size_t k = 0; k < K; k++, a += MR, b += NR) {
        const Vector *row = reinterpret_cast<const Vector *>(b);
#pragma GCC unroll 8
        for (size_t i = 0; i < MR; i++)
#pragma GCC unroll 3
            for (size_t j = 0; j < W; j++) sum[i][j] += a[i] * row[j];
    }
    for (size_t i = 0; i < MR; i++) {
        Vector *out = reinterpret_cast<Vector *>(tile + i * NC);
        for (size_t j = 0; j < W; j++) out[j] = add ? out[j] + sum[i][j] : sum[i][j];
    }
}

// Packs a (K, n) block into panels of R columns: panel p holds (K, R), zeros beyond n.
template <class X, size_t R> void pack(float *out, Matrix<X> m, size_t K, size_t n) {
    for (size_t p = 0; p < n; p += R, out += K * R) {
        const X *panel = m.data + p * m.column;
        const size_t width = std::min(R, n - p);
        if (width < R) std::fill(out, out + K * R, 0.0f);
        if (m.column == 1) {
            for (size_t k = 0; k < K; k++)
                for (size_t r = 0; r < width; r++) out[k * R + r] = float(panel[k * m.row + r]);
        } else {
            for (size_t r = 0; r < width; r++)
                for (size_t k = 0; k < K; k++) out[k * R + r] = float(panel[r * m.column + k * m.row]);
        }
    }
}

}  // namespace

template <class X, class Out>
void sgemm(int threads, float *scratch, Out *C, size_t ld, Matrix<X> A, Matrix<X> B, const X *bias, size_t M, size_t N, size_t K,
           bool accumulate) {
#pragma omp parallel for num_threads(threads) collapse(2) schedule(dynamic)
    for (size_t j0 = 0; j0 < N; j0 += NC)
        for (size_t i0 = 0; i0 < M; i0 += MC) {
            float *a = scratch + size_t(omp_get_thread_num()) * sgemm_scratch, *b = a + MC * KC, *tile = b + KC * NC;
            const size_t m = std::min(MC, M - i0), n = std::min(NC, N - j0);
            for (size_t k0 = 0; k0 < K; k0 += KC) {
                const size_t k = std::min(KC, K - k0);
                pack<X, MR>(a, {A.data + i0 * A.row + k0 * A.column, A.column, A.row}, k, m);
                pack<X, NR>(b, {B.data + k0 * B.row + j0 * B.column, B.row, B.column}, k, n);
                for (size_t j = 0; j < n; j += NR)
                    for (size_t i = 0; i < m; i += MR) micro_kernel(tile + i * NC + j, a + i * k, b + j * k, k, k0 > 0);
            }
            for (size_t i = 0; i < m; i++) {
                Out *out = C + (i0 + i) * ld + j0;
                const float *sum = tile + i * NC;
                if (accumulate)
                    for (size_t j = 0; j < n; j++) out[j] = float(out[j]) + sum[j];
                else if (bias)
                    for (size_t j = 0; j < n; j++) out[j] = sum[j] + float(bias[j0 + j]);
                else
                    for (size_t j = 0; j < n; j++) out[j] = sum[j];
            }
        }
}

template void sgemm(int, float *, float *, size_t, Matrix<float>, Matrix<float>, const float *, size_t, size_t, size_t, bool);
template void sgemm(int, float *, float *, size_t, Matrix<bf16>, Matrix<bf16>, const bf16 *, size_t, size_t, size_t, bool);
template void sgemm(int, float *, bf16 *, size_t, Matrix<bf16>, Matrix<bf16>, const bf16 *, size_t, size_t, size_t, bool);
