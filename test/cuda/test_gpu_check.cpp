// The check of a GPU before the first step. What a broken kernel makes it say: test/ptx/kernels/test_gpu_check.cpp.
#include "../../llmc/app/gpu_check.h"

#include "../../llmc/ops/kernels.cuh"
#include "matmul_context.cuh"

template <class Dev> struct GpuCheck : testing::Test {};
TYPED_TEST_SUITE(GpuCheck, CudaDevices);

TYPED_TEST(GpuCheck, OpsAgreeWithTheCpu) {
    const auto context = make_cuda_context(1);
    TypeParam dev = {};
    dev.ctx = context.get();
#ifdef LLMC_EMULATE
    CUstream_st stream{0};
    dev.stream = &stream;
#endif
    constexpr bool rounded = sizeof(typename TypeParam::X) == 2;
    EXPECT_EQ(compare_ops(run_ops(dev), cpu_op_results(rounded ? "bf16" : "f32"), rounded, "this GPU"), 47u);
}

TEST(CudaCheckCompares, EachArrayToItsLargestValue) {
    const OpResults want = {{"one", "out", {1, -8, 0}}, {"one", "dx", {0, 0}}, {"two", "out", {0.5f}}};
    const auto with = [&](size_t array, size_t i, float value) {
        OpResults got = want;
        got[array].values[i] = value;
        try {
            return std::to_string(compare_ops(got, want, true, "a GPU")) + " ops";
        } catch (const Error &error) {
            return std::string(error.what()).substr(0, std::string(error.what()).find('\n'));
        }
    };
    EXPECT_EQ(with(0, 0, 1.1f), "2 ops");
    EXPECT_EQ(with(0, 2, 0.2f),
              "GPU check: one on a GPU does not agree with the CPU: out[2] is 0.2 and should be 0, give or take 0.12");
    EXPECT_EQ(with(1, 1, 1e-9f),
              "GPU check: one on a GPU does not agree with the CPU: dx[1] is 1e-09 and should be 0, give or take 0");
    EXPECT_EQ(with(2, 0, NAN),
              "GPU check: two on a GPU does not agree with the CPU: out[0] is nan and should be 0.5, give or take 0.0078");
}
