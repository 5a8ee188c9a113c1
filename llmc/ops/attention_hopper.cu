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
        return false;  // the launch says why
    return (D == 64 || D == 128) && major == 9 && minor == 0;
}

size_t rows_of(const Pieces &pieces) {  // beyond them an array may never have been written
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
    launch(dev, attention_forward_hopper_kernel<D>, Grid{H, count_blocks(q_pieces, Shape::queries)}, Shape::threads,
           sizeof(typename Shape::Shared), hopper::map_of(in.q.data, q_rows, H * D, in.q.stride, Shape::queries, D),
           hopper::map_of(in.k.data, k_rows, KV * D, in.k.stride, Shape::keys, D),
           hopper::map_of(in.v.data, k_rows, KV * D, in.v.stride, Shape::keys, D), out, out32, lse, order, in.first_key, in.shape,
           q_pieces, k_pieces);
}
void forward(CudaBf16 dev, bf16 *out, float *out32, float *lse, const AttentionInputs<bf16> &in, Pieces q_pieces, Pieces k_pieces,
             PartOrder order) {
    (in.shape.D == 64 ? launch_forward<64> : launch_forward<128>)(dev, out, out32, lse, in, q_pieces, k_pieces, order);
}

// dK and dV first: dQ may overwrite Q.
template <int D, bool adds, class Out>
size_t launch_backward(CudaBf16 dev, Heads<Out> dq, AttentionGrads grads, const AttentionInputs<bf16> &in, const float *delta,
                       const float *lse, const bf16 *dout, Pieces q_pieces, Pieces k_pieces) {
    using Shape = HopperBackward<D>;
    const size_t H = in.shape.H, KV = in.shape.KV, q_rows = rows_of(q_pieces), k_rows = rows_of(k_pieces);
    const size_t key_blocks = count_blocks(k_pieces, Shape::rows), splits = adds ? 1 : keys_splits(in.shape, key_blocks);
    if (!q_rows || !k_rows) return splits;
    const auto start = [&](auto kernel, Grid grid, unsigned q_tile, unsigned k_tile, auto to) {
        launch(dev, kernel, grid, Shape::threads, sizeof(typename Shape::Shared),
               hopper::map_of(in.q.data, q_rows, H * D, in.q.stride, q_tile, D),
               hopper::map_of(dout, q_rows, H * D, H * D, q_tile, D),
               hopper::map_of(in.k.data, k_rows, KV * D, in.k.stride, k_tile, D),
               hopper::map_of(in.v.data, k_rows, KV * D, in.v.stride, k_tile, D), to, delta, lse, in.first_key, in.shape,
               q_pieces, k_pieces);
    };
    start(attention_backward_keys_hopper_kernel<D, adds>, Grid{KV, key_blocks, splits}, Shape::columns, Shape::rows, grads);
    start(attention_backward_queries_hopper_kernel<D, Out>, Grid{H, count_blocks(q_pieces, Shape::rows)}, Shape::rows,
          Shape::columns, dq);
    return splits;
}
size_t backward(CudaBf16 dev, Heads<bf16> dq, AttentionGrads grads, const AttentionInputs<bf16> &in, const float *delta,
                const float *lse, const bf16 *dout, Pieces pieces) {
    return (in.shape.D == 64 ? launch_backward<64, false, bf16> : launch_backward<128, false, bf16>)(dev, dq, grads, in, delta,
                                                                                                     lse, dout, pieces, pieces);
}
void backward_part(CudaBf16 dev, AttentionGrads grads, const AttentionInputs<bf16> &in, const float *delta, const float *lse,
                   const bf16 *dout, Pieces q_pieces, Pieces k_pieces) {
    (in.shape.D == 64 ? launch_backward<64, true, float>
                      : launch_backward<128, true, float>)(dev, {grads.dq32, in.shape.H * in.shape.D}, grads, in, delta, lse,
                                                           dout, q_pieces, k_pieces);
}

constexpr HopperKernels kernels{runs, forward, backward, backward_part};
[[maybe_unused]] const bool known = (hopper_kernels = &kernels) != nullptr;

}  // namespace
}  // namespace CUDA_BACKEND
}  // namespace attention
