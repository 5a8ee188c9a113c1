// The interface between attention's kernels for every GPU (attention.cuh) and those for sm_90a (attention_hopper.cu). nvcc compiles the latter in a
// separate unit, because code for sm_90a runs on no other GPU. A program linked with this unit uses its kernels if `runs` returns true.
#pragma once
#include "../core/device.h"
#include "attention_types.h"

namespace attention {
inline namespace CUDA_BACKEND {

struct HopperKernels {
    bool (*runs)(size_t D);  // true on a GPU and for a head size that the kernels support
    void (*forward)(CudaBf16 dev, bf16 *out, float *out32, float *lse, const AttentionInputs<bf16> &in, Pieces q_pieces,
                    Pieces k_pieces, PartOrder order);
    // turns (H + KV, T) must be 0.
    void (*backward_part)(CudaBf16 dev, AttentionGrads grads, int *turns, const AttentionInputs<bf16> &in, const float *delta,
                          const float *lse, const bf16 *dout, Pieces q_pieces, Pieces k_pieces);
};
inline constinit const HopperKernels *hopper_kernels = nullptr;  // null if the program is linked without them

inline const HopperKernels *hopper_kernels_for(size_t D) {
    return hopper_kernels && hopper_kernels->runs(D) ? hopper_kernels : nullptr;
}

}  // namespace CUDA_BACKEND
}  // namespace attention
