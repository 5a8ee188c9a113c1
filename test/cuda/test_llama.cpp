// The whole model through the kernels against transformers: ../golden.h. Whole steps in the emulator, or on a GPU.
#define LLMC_NO_MAIN
#include "../../train_llama.cu"

#include "../golden.h"
#include "check.cuh"

namespace {

struct Goldens : testing::TestWithParam<const char *> {
    const Golden g{GetParam()};
    std::unique_ptr<CudaContext> ctx = make_cuda_context(2);

    template <class Dev> Dev device() { return {nullptr, ctx.get()}; }
};
struct SlowGoldens : Goldens {};

}  // namespace

TEST_P(Goldens, LossEntropyAccuracy) { expect_loss_entropy_accuracy(device<CudaF32>(), g); }
TEST_P(SlowGoldens, Gradients) { expect_gradients(device<CudaF32>(), g); }
TEST_P(SlowGoldens, LossesOfSteps) { expect_losses(device<CudaF32>(), g, {3}); }
TEST_P(SlowGoldens, Bf16AsGoodAsTransformers) { expect_bf16_as_good_as_transformers(device<CudaBf16>(), g); }
TEST_P(SlowGoldens, Bf16GradientAsGoodAsTransformers) {
    expect_bf16_gradient_as_good_as_transformers(device<CudaBf16>(), make_device<CpuF32>(), g);
}

INSTANTIATE_TEST_SUITE_P(Families, Goldens, testing::ValuesIn(golden_families), family_name);
INSTANTIATE_TEST_SUITE_P(Families, SlowGoldens, testing::ValuesIn(golden_families), family_name);
