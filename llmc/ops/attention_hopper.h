// The kernels of attention for sm_90a (attention_hopper.cu), seen from those for every GPU (attention.cuh). nvcc compiles them in a unit of their own,
// because code for sm_90a runs on no other GPU. A program that is linked with the unit uses them where `runs` says so.
#pragma once
#include "../core/device.h"
#include "attention_types.h"

namespace attention {
inline namespace CUDA_BACKEND {

struct HopperKernels {
    bool (*runs)(size_t D);  // on the current GPU, for heads of D
    void (*forward)(CudaBf16 dev, bf16 *out, float *out32, float *lse, const AttentionInputs<bf16> &in, Pieces q_pieces,
                    Pieces k_pieces, PartOrder order);
    // `turns`, (H + KV, T), are 0.
    void (*backward_part)(CudaBf16 dev, AttentionGrads grads, int *turns, const AttentionInputs<bf16> &in, const float *delta,
                          const float *lse, const bf16 *dout, Pieces q_pieces, Pieces k_pieces);
};
inline constinit const HopperKernels *hopper_kernels = nullptr;  // null where the program has none

inline const HopperKernels *hopper_kernels_for(size_t D) {
    return hopper_kernels && hopper_kernels->runs(D) ? hopper_kernels : nullptr;
}

}  // namespace CUDA_BACKEND
}  // namespace attention
