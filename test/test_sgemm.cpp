#include "../llmc/ops/sgemm.h"

#include <array>

#include "../llmc/core/common.h"
#include "check.h"
#include "reference_matmul.h"

template <class Dev> struct Sgemm : testing::Test {};
TYPED_TEST_SUITE(Sgemm, CpuDevices);

// The product for builds without a BLAS library: all layouts, several blocks in each direction.
TYPED_TEST(Sgemm, EqualsReferenceInAllLayouts) {
    using X = typename TypeParam::X;
    std::vector<float> memory(2 * sgemm_scratch + 16);
    float *scratch = reinterpret_cast<float *>(round_up(reinterpret_cast<size_t>(memory.data()), 64));
    for (auto [M, N, K] : {std::array<size_t, 3>{1, 1, 1}, {7, 9, 300}, {203, 390, 520}})
        for (int layout = 0; layout < 4; layout++) {
            const auto a = random_values<X>(M * K, 1), b = random_values<X>(K * N, 2);
            auto c = random_values<float>(M * N, 3);
            const Matrix<X> A = layout & 1 ? Matrix<X>{a.data(), 1, M} : Matrix<X>{a.data(), K, 1};
            const Matrix<X> B = layout & 2 ? Matrix<X>{b.data(), 1, K} : Matrix<X>{b.data(), N, 1};
            const Sums want = product_reference(a, A.row, A.column, b, B.row, B.column, widen(c), M, N, K);
            const Product<X, float> product{c.data(), N, A, B, nullptr, M, N, K, true};
            sgemm<X, float>(2, scratch, {&product, 1});
            expect_close("C += A B", c, want.value, allowed<float>(want, K));
        }
}
