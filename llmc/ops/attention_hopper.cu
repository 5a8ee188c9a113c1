// The unit that nvcc compiles for sm_90a (attention_hopper.h).
#include "attention_hopper.cuh"

#include <algorithm>

#include "attention_hopper.h"
#include "attention_hopper_backward.cuh"

namespace attention {
inline namespace CUDA_BACKEND {
namespace {

bool runs(size_t D) {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device))
        return false;  // the launch reports the error
    return (D == 64 || D == 128) && major == 9 && minor == 0;
}

size_t rows_of(const Pieces &pieces) {  // rows beyond these may never have been written
    size_t rows = 0;
    for (size_t i = 0; i < pieces.count; i++)
        rows = std::max(rows, pieces.piece[i].offset + pieces.piece[i].end - pieces.piece[i].begin);
    return rows;
}

template <int D>
void launch_forward(CudaBf16 dev, bf16 *out, float *out32, float *lse, const AttentionInputs<bf16> &in, Pieces q_pieces,
                    Pieces k_pieces, PartOrder order) {
    using Shape = HopperForward<D>;
    const size_t H = in.shape.H, KV = in.shape.KV, q_rows = rows_of(q_pieces), k_rows = rows_of(k_pieces);
    if (!q_rows || !k_rows) return;
    launch(dev, attention_forward_hopper_kernel<D>, Grid{H, count_blocks(q_pieces, in.cuts, Shape::queries)}, Shape::threads,
           sizeof(typename Shape::Shared), hopper::map_of(in.q.data, q_rows, H * D, in.q.stride, Shape::queries, D),
           hopper::map_of(in.k.data, k_rows, KV * D, in.k.stride, Shape::keys, D),
           hopper::map_of(in.v.data, k_rows, KV * D, in.v.stride, Shape::keys, D), out, out32, lse, order, in.first_key, in.cuts,
           in.shape, q_pieces, k_pieces);
}
void forward(CudaBf16 dev, bf16 *out, float *out32, float *lse, const AttentionInputs<bf16> &in, Pieces q_pieces, Pieces k_pieces,
             PartOrder order) {
    (in.shape.D == 64 ? launch_forward<64> : launch_forward<128>)(dev, out, out32, lse, in, q_pieces, k_pieces, order);
}

template <int D>
void launch_backward(CudaBf16 dev, AttentionGrads grads, int *turns, const AttentionInputs<bf16> &in, const float *delta,
                     const float *lse, const bf16 *dout, Pieces q_pieces, Pieces k_pieces) {
    using Shape = HopperBackward<D>;
    const size_t T = in.shape.T, H = in.shape.H, KV = in.shape.KV, q_rows = rows_of(q_pieces), k_rows = rows_of(k_pieces);
    if (!q_rows || !k_rows) return;
    const size_t splits =
        k_rows <= T ? keys_splits(in.shape, count_blocks(k_pieces, {}, Shape::keys)) : 1;  // `turns` has room for T rows only
    launch(dev, attention_backward_hopper_kernel<D>, Grid{KV, splits, count_blocks(k_pieces, in.cuts, Shape::keys)},
           Shape::threads, sizeof(typename Shape::Shared),
           hopper::map_of(in.q.data, q_rows, H * D, in.q.stride, Shape::queries, D),
           hopper::map_of(dout, q_rows, H * D, H * D, Shape::queries, D),
           hopper::map_of(in.k.data, k_rows, KV * D, in.k.stride, Shape::keys, D),
           hopper::map_of(in.v.data, k_rows, KV * D, in.v.stride, Shape::keys, D),
           hopper::map_of(grads.dq32, q_rows, H * D, H * D, HopperSums::rows, HopperSums::width),
           hopper::map_of(grads.dk32, k_rows, KV * D, KV * D, HopperSums::rows, HopperSums::width),
           hopper::map_of(grads.dv32, k_rows, KV * D, KV * D, HopperSums::rows, HopperSums::width), turns, delta, lse,
           in.first_key, in.cuts, in.shape, 1 / in.shape.scale, q_pieces, k_pieces);
}
void backward_part(CudaBf16 dev, AttentionGrads grads, int *turns, const AttentionInputs<bf16> &in, const float *delta,
                   const float *lse, const bf16 *dout, Pieces q_pieces, Pieces k_pieces) {
    (in.shape.D == 64 ? launch_backward<64> : launch_backward<128>)(dev, grads, turns, in, delta, lse, dout, q_pieces, k_pieces);
}

constexpr HopperKernels kernels{runs, forward, backward_part};
[[maybe_unused]] const bool known = (hopper_kernels = &kernels) != nullptr;

}  // namespace
}  // namespace CUDA_BACKEND
}  // namespace attention
