// Attention in float, for checks: plain kernels without tensor cores. Contract and formulas: attention.h.
//
// Tiles are 16 x 16 scores, one per thread. The 16 threads of a row, half a warp, also hold the row's D columns of each sum, 16 apart.
#pragma once
#include "attention_tile.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

constexpr int plain_rows = 16, plain_threads = plain_rows * plain_rows, plain_columns = int(max_D) / plain_rows;

struct PlainTile {
    float x[plain_rows][max_D + 1];  // rows are an odd number of banks apart

    // x points at row 0 of a head. The rest of the tile becomes 0.
    template <class X> __device__ void load(Heads<const X> from, TileRows tile_rows, size_t D) {
        for (int i = threadIdx.x; i < plain_rows * int(D); i += plain_threads) {
            const int r = i / int(D), d = i % int(D);
            x[r][d] = r < tile_rows.size() ? float(from.data[size_t(tile_rows.row + r) * from.stride + d]) : 0.0f;
        }
    }
};
using PlainScores = float[plain_rows][plain_rows];

__device__ inline float dot(const float *a, const float *b, size_t D) {
    float sum = 0;
    for (size_t d = 0; d < D; d++) sum += a[d] * b[d];
    return sum;
}

// Adds weights (16) times tile (16, D), in this thread's columns, to sum.
__device__ inline void add_weighted_rows(float (&sum)[plain_columns], const float *weights, const PlainTile &tile, size_t D) {
    for (int c = 0; c < plain_columns; c++) {
        const int d = int(threadIdx.x) % plain_rows + c * plain_rows;
        if (d >= int(D)) break;
        for (int r = 0; r < plain_rows; r++) sum[c] += weights[r] * tile.x[r][d];
    }
}

__device__ inline void add_to_row(float *row, const float (&sum)[plain_columns], float factor, size_t D) {
    for (int c = 0; c < plain_columns; c++) {
        const int d = int(threadIdx.x) % plain_rows + c * plain_rows;
        if (d >= int(D)) break;
        row[d] += factor * sum[c];
    }
}

// ---- forward

struct PlainForward {
    PlainTile q, k, v;
    PlainScores p;
};

// The forward pass. A block has 16 queries of one head.
template <class X>
__global__ void __launch_bounds__(plain_threads)
    attention_forward_kernel3(float *out32, float *lse, AttentionInputs<X> in, Pieces q_pieces, Pieces k_pieces) {
    const auto &[q, k, v, first_key, cuts, shape] = in;
    const size_t T = shape.T, D = shape.D;
    const unsigned H = unsigned(shape.H);  // 64 bits would take more registers
    const float scale = shape.scale;
    auto &s = shared_mem<PlainForward>();
    const int i = int(threadIdx.x) / plain_rows, j = int(threadIdx.x) % plain_rows;
    const unsigned h = blockIdx.y, kv = h / shape.group();
    const TileRows block = nth_block(q_pieces, cuts, blockIdx.x, plain_rows);
    const bool valid = i < block.size();
    const int position = block.begin + i, first = valid ? first_key[position] : INT32_MAX;  // surplus rows see no key
    Tiles tiles{k_pieces, first_key[block.begin], block.end, plain_rows};
    s.q.load(Heads<const X>{q.data + h * D, q.stride}, block, D);
    float out[plain_columns] = {}, largest = -INFINITY, sum = 0;
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile)) {
        s.k.load(Heads<const X>{k.data + kv * D, k.stride}, tile, D);
        s.v.load(Heads<const X>{v.data + kv * D, v.stride}, tile, D);
        __syncthreads();
        const int key = tile.begin + j;
        const bool visible = j < tile.size() && first <= key && key <= position;
        const float score = visible ? scale * dot(s.q.x[i], s.k.x[j], D) : -INFINITY;
        float x = fmaxf(largest, score);
        for (int d = 1; d < plain_rows; d *= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, d));
        const float base = x == -INFINITY ? 0.0f : x, shrink = expf(largest - base), p = expf(score - base);
        largest = x;
        sum = sum * shrink + p;  // over this thread's keys
        s.p[i][j] = p;
        __syncwarp();
        for (float &o : out) o *= shrink;
        add_weighted_rows(out, s.p[i], s.v, D);
        __syncthreads();
    }
    for (int d = 1; d < plain_rows; d *= 2) sum += __shfl_xor_sync(all_lanes, sum, d);
    const size_t row = size_t(block.row + i);
    const bool saw = valid && sum != 0;
    const float weight = merge_lse(lse + h * T + row, largest + logf(sum), saw, j == 0);
    if (!saw) return;
    float *to = out32 + (row * H + h) * D;
    for (int c = 0; c < plain_columns; c++) {
        const int d = j + c * plain_rows;
        if (d >= int(D)) break;
        to[d] += weight * (out[c] / sum - to[d]);
    }
}

// ---- backward

struct PlainShape {
    static constexpr int queries = plain_rows, keys = plain_rows, threads = plain_threads;
    struct Shared {
        PlainTile q, k, v, dout;
        PlainScores p, ds;
    };
};

// Computes dQ. A block has 16 queries of one head.
template <class X>
__global__ void __launch_bounds__(plain_threads)
    attention_backward_queries_kernel3(AttentionGrads grads, AttentionInputs<X> in, const float *delta, const float *lse,
                                       Heads<const X> dout, Pieces q_pieces, Pieces k_pieces) {
    const auto &[q, k, v, first_key, cuts, shape] = in;
    const size_t T = shape.T, D = shape.D;
    const unsigned H = unsigned(shape.H);  // 64 bits would take more registers
    const float scale = shape.scale;
    auto &s = shared_mem<PlainShape::Shared>();
    const int i = int(threadIdx.x) / plain_rows, j = int(threadIdx.x) % plain_rows;
    const unsigned h = blockIdx.y, kv = h / shape.group();
    const TileRows block = nth_block(q_pieces, cuts, blockIdx.x, plain_rows);
    const bool valid = i < block.size();
    const int position = block.begin + i, first = valid ? first_key[position] : INT32_MAX;
    const size_t row = size_t(block.row + i);
    const float row_lse = valid ? lse[h * T + row] : 0.0f, row_delta = valid ? delta[h * T + row] : 0.0f;
    Tiles tiles{k_pieces, first_key[block.begin], block.end, plain_rows};
    s.q.load(Heads<const X>{q.data + h * D, q.stride}, block, D);
    s.dout.load(Heads<const X>{dout.data + h * D, dout.stride}, block, D);
    float dq[plain_columns] = {};
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile)) {
        s.k.load(Heads<const X>{k.data + kv * D, k.stride}, tile, D);
        s.v.load(Heads<const X>{v.data + kv * D, v.stride}, tile, D);
        __syncthreads();
        const int key = tile.begin + j;
        const bool visible = j < tile.size() && first <= key && key <= position;
        const float p = visible ? expf(scale * dot(s.q.x[i], s.k.x[j], D) - row_lse) : 0.0f;
        s.ds[i][j] = p * (dot(s.dout.x[i], s.v.x[j], D) - row_delta);
        __syncwarp();
        add_weighted_rows(dq, s.ds[i], s.k, D);
        __syncthreads();
    }
    if (valid) add_to_row(grads.dq32 + (row * H + h) * D, dq, scale, D);
}

// Computes dK and dV. A block has 16 keys of one KV head. Rows of a tile are keys, columns are queries.
// Two blocks fit a multiprocessor's shared memory, so a thread may have 128 registers.
template <class X>
__global__ void __launch_bounds__(plain_threads, 2)
    attention_backward_keys_kernel3(AttentionGrads grads, AttentionInputs<X> in, const float *delta, const float *lse,
                                    Heads<const X> dout, Pieces q_pieces, Pieces k_pieces) {
    const auto &[q, k, v, first_key, cuts, shape] = in;
    const size_t T = shape.T, D = shape.D;
    const unsigned KV = unsigned(shape.KV);  // 64 bits would take more registers
    const float scale = shape.scale;
    auto &s = shared_mem<PlainShape::Shared>();
    const int i = int(threadIdx.x) / plain_rows, j = int(threadIdx.x) % plain_rows;
    const unsigned kv = blockIdx.y, group = shape.group();
    const BlockRows block = nth_block(k_pieces, cuts, blockIdx.x, plain_rows);
    const int key = block.begin + i;
    Tiles tiles{q_pieces, block.begin, first_unseeing(first_key, block, q_pieces), plain_rows};
    s.k.load(Heads<const X>{k.data + kv * D, k.stride}, block, D);
    s.v.load(Heads<const X>{v.data + kv * D, v.stride}, block, D);
    float dk[plain_columns] = {}, dv[plain_columns] = {};
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile))
        for (unsigned h = kv * group; h < (kv + 1) * group; h++) {
            s.q.load(Heads<const X>{q.data + h * D, q.stride}, tile, D);
            s.dout.load(Heads<const X>{dout.data + h * D, dout.stride}, tile, D);
            __syncthreads();
            const int position = tile.begin + j;
            const bool visible = j < tile.size() && i < block.size() && first_key[position] <= key && key <= position;
            const size_t row = h * T + size_t(tile.row + j);
            const float p = visible ? expf(scale * dot(s.q.x[j], s.k.x[i], D) - lse[row]) : 0.0f;
            s.p[i][j] = p;
            s.ds[i][j] = visible ? p * (dot(s.dout.x[j], s.v.x[i], D) - delta[row]) : 0.0f;
            __syncwarp();
            add_weighted_rows(dv, s.p[i], s.dout, D);
            add_weighted_rows(dk, s.ds[i], s.q, D);
            __syncthreads();
        }
    if (i >= block.size()) return;
    const size_t out = (size_t(block.row + i) * KV + kv) * D;
    add_to_row(grads.dk32 + out, dk, scale, D);
    add_to_row(grads.dv32 + out, dv, 1.0f, D);
}

}  // namespace CUDA_BACKEND
}  // namespace attention
