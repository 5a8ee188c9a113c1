#include "gemm.cuh"

const char *gemm_pingpong(const Gemm &gemm) {
    return run_gemm<cutlass::bfloat16_t, cutlass::gemm::KernelTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized,
                    1>(gemm);
}
