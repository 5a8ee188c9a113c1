// Attention forward on tensor cores. Contract and formulas: attention.h.
#pragma once
#include "attention_tile.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

template <int D_> struct ForwardShape {  // D_: head size, padded
    static constexpr int D = D_, m = D <= 128 ? 2 : 1, threads = 128, queries = threads / 32 * 16 * m,
                         keys = D <= 64    ? 64
                                : D <= 128 ? 32
                                           : 16;
    struct Shared {
        Tile<queries, D> q;
        int first_key[queries];
        struct {
            Tile<keys, D> k, v;
        } stage[2];
    };
};

// One step of the online softmax, in powers of 2: scores become 2^(scale_log2 * score - largest), and the sums under the old
// maximum are scaled to the new one. A row whose maximum does not change is scaled by exactly 1, so rows of a warp do not affect each other.
template <int m, int N, int D>
__device__ void online_softmax(float (&scores)[m][N / 8][4], float (&out)[m][D / 8][4], float (&largest)[m][2],
                               float (&sum)[m][2], float scale_log2) {
    float base[m][2], shrink[m][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < N / 8; n++) x = fmaxf(x, fmaxf(scores[i][n][2 * r], scores[i][n][2 * r + 1]));
            x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
            x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
            x = fmaxf(x * scale_log2, largest[i][r]);
            base[i][r] = x == -INFINITY ? 0.0f : x;  // no key so far: 2^(-inf - 0) = 0 instead of NaN
            shrink[i][r] = exp2_approx(largest[i][r] - base[i][r]);
            grown |= x > largest[i][r];
            largest[i][r] = x;
        }
    if (__any_sync(all_lanes, grown))  // seldom after the first tiles
#pragma unroll
        for (int i = 0; i < m; i++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                sum[i][r] *= shrink[i][r];
#pragma unroll
                for (int n = 0; n < D / 8; n++) out[i][n][2 * r] *= shrink[i][r], out[i][n][2 * r + 1] *= shrink[i][r];
            }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < m; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                scores[i][n][e] = exp2_approx(scores[i][n][e] * scale_log2 - base[i][e / 2]);
                sum[i][e / 2] += scores[i][n][e];
            }
}

// Returns the sum over the four lanes that hold a row.
__device__ inline float row_sum(float sum) {
    sum += __shfl_xor_sync(all_lanes, sum, 1);
    return sum + __shfl_xor_sync(all_lanes, sum, 2);
}

// Merges one row into the running out and lse. The row's four lanes hold its columns; their partial sums have not been added yet.
template <int width>
__device__ void merge_row(float *out, float *lse, const float (&part)[width / 8][4], int r, float largest, float sum, size_t D,
                          bool valid) {
    const int t = int(threadIdx.x) % 4;
    sum = row_sum(sum);
    valid = valid && sum != 0;  // 0: the row saw no key of this part
    const float weight = merge_lse(lse, largest * ln_2 + logf(sum), valid, t == 0), part_weight = weight / sum;
    if (!valid) return;
#pragma unroll
    for (int n = 0; n < width / 8; n++) {
        if (n * 8 >= int(D)) break;
        float2 *at = reinterpret_cast<float2 *>(out + n * 8 + t * 2);
        const float2 old = *at;
        *at = make_float2(old.x + (part_weight * part[n][2 * r] - weight * old.x),
                          old.y + (part_weight * part[n][2 * r + 1] - weight * old.y));
    }
}

// Writes one row if this part is the whole.
template <int width>
__device__ void merge_row(bf16 *out, float *lse, const float (&part)[width / 8][4], int r, float largest, float sum, size_t D,
                          bool valid) {
    const int t = int(threadIdx.x) % 4;
    sum = row_sum(sum);
    if (!valid) return;
    const float scale = 1 / sum;
    if (t == 0) *lse = largest * ln_2 + logf(sum);
#pragma unroll
    for (int n = 0; n < width / 8; n++) {
        if (n * 8 >= int(D)) break;
        *reinterpret_cast<uint32_t *>(out + n * 8 + t * 2) = pack_bf16(scale * part[n][2 * r], scale * part[n][2 * r + 1]);
    }
}

// The forward pass. A block has one tile of queries of one head. The kernel takes 4 * D FLOPs per score, and reads K and V once per tile of queries
// that sees them. Out is float if parts are merged, and bf16 if this part is the whole.
template <int width, class Out>
__global__ void __launch_bounds__(ForwardShape<width>::threads)
    attention_forward_kernel5(Out *out_rows, float *lse, AttentionInputs<bf16> in, Pieces q_pieces, Pieces k_pieces) {
    const auto &[q, k, v, first_key, cuts, shape] = in;
    const size_t T = shape.T, D = shape.D;
    const unsigned H = unsigned(shape.H);  // 64 bits would take more registers
    const float scale = shape.scale;
    using Shape = ForwardShape<width>;
    constexpr int m = Shape::m, N = Shape::keys;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned h = blockIdx.y, kv = h / shape.group();
    // Long tasks go first: late queries see most keys.
    const TileRows block = nth_block(q_pieces, cuts, blockIdx.x, Shape::queries, true);
    Tiles tiles{k_pieces, first_key[block.begin], block.end, N};
    TileRows tile = tiles.front();
    if (tile.empty()) return;
    const auto load_keys = [&](int stage, TileRows keys) {
        load<Shape::threads>(s.stage[stage].k, {k.data + kv * D, k.stride}, keys, D);
        load<Shape::threads>(s.stage[stage].v, {v.data + kv * D, v.stride}, keys, D);
        cp_async_commit();
    };
    load<Shape::threads>(s.q, {q.data + h * D, q.stride}, block, D);
    load_keys(0, tile);

    const Queries<m> queries(block, s.first_key, first_key);
    float out[m][width / 8][4] = {}, largest[m][2], sum[m][2] = {};
    for (auto &pair : largest) pair[0] = pair[1] = -INFINITY;
    for (int stage = 0; !tile.empty(); stage ^= 1) {
        const TileRows next = tiles.after(tile);
        cp_async_wait<0>();
        __syncthreads();  // this tile has landed, and all warps are done with the other stage
        if (!next.empty()) load_keys(stage ^ 1, next);
        if (!queries.see_none_of(tile)) {
            float p[m][N / 8][4];
            uint32_t rounded[m][N / 16][4];
            product_transposed(p, s.q, queries.row0, s.stage[stage].k);
            if (tile.size() < N || !queries.see_all_of(tile)) queries.template mask<N>(p, tile);
            online_softmax<m, N, width>(p, out, largest, sum, scale * log2_e);
            round_to_operand<m, N>(rounded, p);
            product_add<m, N, width>(out, rounded, s.stage[stage].v);
        }
        tile = next;
    }
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i_row = queries.row(i, r);
            const size_t row = size_t(block.row + i_row);
            merge_row<width>(out_rows + (row * H + h) * D, lse + h * T + row, out[i], r, largest[i][r], sum[i][r], D,
                             i_row < block.size());
        }
}

}  // namespace CUDA_BACKEND
}  // namespace attention
