// CUTLASS's matrix products for sm_90a in the PTX interpreter.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/core/dtype.h"
#include "../../../llmc/ops/fp8.h"
#include "gemm.h"

namespace {

// Multiples of 1/8 from -1 to 1, exact in both types.
float value(size_t n) { return float(int((n * 7 + n / 3 % 11 * 5) % 17) - 8) / 8; }
struct Kernel {
    const char *name;
    const char *(*run)(const Gemm &gemm);
    bool fp8;
    int ragged_k;  // more tiles than stages
};
const Kernel kernels[] = {{"ping-pong", gemm_pingpong, false, 400},
                          {"cooperative, clusters 2x1", gemm_cooperative, false, 400},
                          {"fp8", gemm_fp8, true, 1040}};

// Returns the first error, or an empty string.
std::string problem_of(const Kernel &kernel, int m, int n, int k) {
    const size_t M = size_t(m), N = size_t(n), K = size_t(k);
    std::vector<float> a(M * K), b(N * K);
    for (size_t i = 0; i < a.size(); i++) a[i] = value(i);
    for (size_t i = 0; i < b.size(); i++) b[i] = value(3 * i + 1);
    const auto on_device = [&](size_t bytes) {
        void *p;
        cudaMalloc(&p, bytes);
        return std::unique_ptr<void, decltype(&cudaFree)>(p, cudaFree);
    };
    const auto operand = [&](const std::vector<float> &x) {
        auto p = on_device(2 * x.size());
        for (size_t i = 0; i < x.size(); i++)
            if (kernel.fp8) static_cast<uint8_t *>(p.get())[i] = fp8_code(x[i]);
            else static_cast<bf16 *>(p.get())[i] = bf16(x[i]);
        return p;
    };
    const auto pa = operand(a), pb = operand(b), pc = on_device(2 * M * N), pd = on_device(2 * M * N);
    for (size_t i = 0; i < M * N; i++) static_cast<bf16 *>(pc.get())[i] = bf16(value(5 * i));
    try {
        const char *status = kernel.run({m, n, k, pa.get(), pb.get(), pc.get(), pd.get(), 1.5f, 0.5f});
        if (status) return status;
    } catch (const Error &error) {
        return error.what();
    }
    for (size_t row = 0; row < M; row++)
        for (size_t column = 0; column < N; column++) {
            double sum = 0;
            for (size_t i = 0; i < K; i++) sum += double(a[row * K + i]) * double(b[column * K + i]);
            const double want = 1.5 * sum + 0.5 * double(value(5 * (row * N + column)));
            const double got = double(float(static_cast<bf16 *>(pd.get())[row * N + column]));
            if (!(std::fabs(got - want) <= 0x1p-8 * std::fabs(want) + 0.02))
                return format("a wrong result: %g for %g at %zu, %zu", got, want, row, column);
        }
    return "";
}
}  // namespace

TEST(PtxCutlass, ProductsAreRight) {
    for (const Kernel &kernel : kernels) {
        EXPECT_EQ(problem_of(kernel, 256, 256, 192), "") << kernel.name;
        EXPECT_EQ(problem_of(kernel, 264, 200, kernel.ragged_k), "") << kernel.name << ", ragged";
    }
}
