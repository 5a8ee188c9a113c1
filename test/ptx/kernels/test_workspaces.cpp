// Two models share a device and its context, as a policy and its reference do, and one of them is destroyed.
#include "../../models.h"

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../golden.h"

// The replacement of cuBLASLt reports an error if a product's workspace is not allocated.
TEST(PtxWorkspaces, AModelOutlivesTheLastOneThatRan) {
    const Golden g("mistral");  // an odd vocabulary
    const std::vector<Row> rows = g.rows(2);
    const auto context = make_cuda_context(1);
    const CudaBf16 dev{nullptr, context.get()};
    Trained<CudaBf16> policy(dev, g);
    policy.model->zero_gradients();
    policy.model->evaluate(rows[0]);
    ptx::products.clear();
    {
        Trained<CudaBf16> reference(dev, g, {.mode = Mode::evaluate});
        reference.model->evaluate(rows[0]);
    }
    ASSERT_FALSE(ptx::products.empty());
    const void *const freed = ptx::products.back().workspace;
    ptx::products.clear();
    policy.model->backward(std::vector<float>(rows[0].predictors.size(), 1.0f), 0, true);
    ASSERT_FALSE(ptx::products.empty());
    for (const ptx::Product &p : ptx::products) EXPECT_NE(p.workspace, freed);
    // Tensor cores load and store 16 bytes, so every row must be aligned.
    for (const ptx::Product &p : ptx::products)
        EXPECT_EQ((p.a_ld * p.in_bytes | p.b_ld * p.in_bytes | p.d_ld * p.out_bytes) % 16, 0u) << p.m << " " << p.n << " " << p.k;
}
