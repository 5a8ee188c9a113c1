#include "gemm.cuh"

const char *gemm_fp8(const Gemm &gemm) {
    return run_gemm<cutlass::float_e4m3_t, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative, 1>(gemm);
}
