#include "gemm.cuh"

const char *gemm_cooperative(const Gemm &gemm) {
    return run_gemm<cutlass::bfloat16_t, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative, 2>(gemm);
}
