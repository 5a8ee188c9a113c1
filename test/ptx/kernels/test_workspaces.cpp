// Two models share a device and its context, as a policy and its reference do, and one of them goes.
#include "../../models.h"

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../golden.h"

// The stand-in of cuBLASLt dies if a product's workspace is not allocated.
TEST(PtxWorkspaces, AModelOutlivesTheOneThatRanLast) {
    const Golden g("qwen3");
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
    const void *const gone = ptx::products.back().workspace;
    ptx::products.clear();
    policy.model->backward(std::vector<float>(rows[0].predictors.size(), 1.0f), 0, true);
    ASSERT_FALSE(ptx::products.empty());
    for (const ptx::Product &p : ptx::products) EXPECT_NE(p.workspace, gone);
}
