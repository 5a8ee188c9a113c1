// Attention backward on tensor cores. Contract and formulas: attention.h.
//
// There are two kernels, so every sum has one owner and a fixed order, without atomics: one with blocks of keys for dK and dV, and one with
// blocks of queries for dQ. Both recompute P and dS: 14 * D FLOPs per score, compared with 10 * D with atomics.
#pragma once
#include "attention_tile.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

__device__ inline void store(float *to, float x, float y) { *reinterpret_cast<float2 *>(to) = make_float2(x, y); }
__device__ inline void store(bf16 *to, float x, float y) { *reinterpret_cast<uint32_t *>(to) = pack_bf16(x, y); }
__device__ inline void add(float *to, float x, float y) {
    const float2 old = *reinterpret_cast<const float2 *>(to);
    store(to, old.x + x, old.y + y);
}

// rows[...] = factor * c, or += if there are earlier parts. c has the accumulators of 16*m rows; row_of(i, r) returns the output row of
// c[i][.][2*r], or null if there is none.
template <bool adds, int m, int width, class RowOf>
__device__ void write_rows(const float (&c)[m][width / 8][4], float factor, size_t D, RowOf row_of) {
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            auto *row = row_of(i, r);
            if (!row) continue;
#pragma unroll
            for (int n = 0; n < width / 8; n++) {
                if (n * 8 >= int(D)) break;
                auto *at = row + n * 8 + int(threadIdx.x) % 4 * 2;
                if constexpr (adds) add(at, factor * c[i][n][2 * r], factor * c[i][n][2 * r + 1]);
                else store(at, factor * c[i][n][2 * r], factor * c[i][n][2 * r + 1]);
            }
        }
}

// ---- dQ

template <int D_> struct BackwardQueriesShape {
    static constexpr int D = D_, m = D <= 64 ? 2 : 1, threads = 128, queries = threads / 32 * 16 * m;
    static constexpr int keys = D <= 64 ? 32 : D <= 128 ? 64 : 16;
    static constexpr int blocks =
        D == 192 ? 2 : 0;  // at least, per multiprocessor; 0: the compiler's choice, which at 192 is 3 and spills registers
    struct Shared {
        Tile<queries, D> q, dout;
        int first_key[queries];
        struct {
            Tile<keys, D> k, v;
        } stage[2];
    };
};

// Computes dQ. A block has one tile of queries of one head and walks over the keys that they see. It adds to rows of floats, or writes rows of bf16
// if this part is the whole. They may overwrite Q: only this block reads those rows, at its beginning.
template <int width, class Out>
__global__ void __launch_bounds__(BackwardQueriesShape<width>::threads, BackwardQueriesShape<width>::blocks)
    attention_backward_queries_kernel4(Heads<Out> dq_rows, AttentionInputs<bf16> in, const float *delta, const float *lse,
                                       Heads<const bf16> dout, Pieces q_pieces, Pieces k_pieces) {
    const auto &[q, k, v, first_key, cuts, shape] = in;
    const size_t T = shape.T, D = shape.D;
    const float scale = shape.scale;
    using Shape = BackwardQueriesShape<width>;
    constexpr int m = Shape::m, N = Shape::keys;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned h = blockIdx.y, kv = h / shape.group();
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
    load<Shape::threads>(s.dout, {dout.data + h * D, dout.stride}, block, D);
    load_keys(0, tile);

    const Queries<m> queries(block, s.first_key, first_key);
    float lse_log2[m][2], row_delta[m][2], dq[m][width / 8][4] = {};
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const size_t row = h * T + size_t(block.row + min(queries.row(i, r), block.size() - 1));
            lse_log2[i][r] = lse[row] * log2_e, row_delta[i][r] = delta[row];
        }
    for (int stage = 0; !tile.empty(); stage ^= 1) {
        const TileRows next = tiles.after(tile);
        cp_async_wait<0>();
        __syncthreads();  // this tile has landed, and all warps are done with the other stage
        if (!next.empty()) load_keys(stage ^ 1, next);
        if (!queries.see_none_of(tile)) {
            float p[m][N / 8][4], ds[m][N / 8][4];
            uint32_t rounded[m][N / 16][4];
            product_transposed(p, s.q, queries.row0, s.stage[stage].k);
            if (tile.size() < N || !queries.see_all_of(tile)) queries.template mask<N>(p, tile);
            product_transposed(ds, s.dout, queries.row0, s.stage[stage].v);
#pragma unroll
            for (int i = 0; i < m; i++)
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        ds[i][n][e] =
                            exp2_approx(p[i][n][e] * (scale * log2_e) - lse_log2[i][e / 2]) * (ds[i][n][e] - row_delta[i][e / 2]);
            round_to_operand<m, N>(rounded, ds);
            product_add<m, N, width>(dq, rounded, s.stage[stage].k);
        }
        tile = next;
    }
    const size_t stride =
        std::is_same_v<Out, float> ? unsigned(shape.H) * D : dq_rows.stride;  // the same, but it spills no register
    write_rows<std::is_same_v<Out, float>, m, width>(dq, scale, D, [&](int i, int r) {
        const int row = queries.row(i, r);
        return row < block.size() ? dq_rows.data + (size_t(block.row + row) * stride + h * D) : nullptr;
    });
}

// ---- dK and dV

// dK and dV of a warp's 16 keys take D registers in each of its threads. If that is too much, two warps share the keys: the first sums dV, and the
// second dK. Both compute P, so the pass takes 16 * D FLOPs per score instead of 14 * D.
template <int D_> struct BackwardKeysShape {
    static constexpr int D = D_, m = 1, sums = D <= 128 ? 2 : 1;  // sums per warp
    static constexpr int row_warps = 4, threads = 32 * row_warps * 2 / sums, keys = row_warps * 16 * m;
    static constexpr int queries = D <= 64 ? 64 : D <= 128 ? 32 : 16;
    struct Shared {
        Tile<keys, D> k, v;
        struct {
            Tile<queries, D> q, dout;
            float lse_log2[queries], delta[queries];
            int first_key[queries];
        } stage[2];
    };
};

// The 16*m keys of one warp, the counterpart of Queries. `first_key` belongs to the tile of queries.
template <int m> struct Keys {
    int begin, end;

    __device__ Keys(TileRows block, int row0) : begin(block.begin + row0), end(min(begin + 16 * m, block.end)) {}
    __device__ bool seen_by_none_of(TileRows queries, const int *first_key) const {
        return begin >= end || queries.end <= begin || first_key[0] >= end;
    }
    __device__ bool seen_by_all_of(TileRows queries, const int *first_key) const {
        return queries.begin >= end - 1 && first_key[queries.size() - 1] <= begin;
    }
    __device__ int position(int i, int r) const { return begin + 16 * i + 8 * r + int(threadIdx.x) % 32 / 4; }

    template <int N> __device__ void mask(float (&scores)[m][N / 8][4], TileRows queries, const int *first_key) const {
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + int(threadIdx.x) % 4 * 2 + e % 2, first = first_key[column],
                          p = queries.begin + column;
#pragma unroll
                for (int i = 0; i < m; i++)
                    if (position(i, e / 2) < first || position(i, e / 2) > p) scores[i][n][e] = -INFINITY;
            }
    }
};

// If there is only one part, the query heads of a group are split among blocks, so models with few KV heads have blocks for all
// multiprocessors. Split 0 of dK and dV, (T, KV, D) floats each, is stored in grads.dk32 and dv32, and later splits in dq32, which is otherwise
// unused. So group / 2 splits fit. Their number depends on the shape alone, so all GPUs sum in the same order.
inline size_t keys_splits(const AttentionShape &shape, size_t key_blocks) {
    constexpr size_t enough_blocks = 1024;  // four for each of the 2 * 132 blocks that an H100 runs at a time
    const size_t group = shape.group();
    return std::clamp<size_t>(ceil_div(enough_blocks, key_blocks * shape.KV), 1, std::min(group, 1 + group / 2));
}
HOST_DEVICE inline AttentionGrads keys_split(AttentionGrads grads, const AttentionShape &shape, unsigned s) {
    if (s == 0) return grads;
    const size_t n = shape.T * shape.KV * shape.D;
    return {nullptr, grads.dq32 + (2 * s - 2) * n, grads.dq32 + (2 * s - 1) * n};
}

// Computes dK and dV. A block has one tile of keys of one KV head and walks over the queries that see them, in the query heads of its split of the
// group. It adds to the sums if `adds`; otherwise this part is the whole.
template <int width, bool adds>
__global__ void __launch_bounds__(BackwardKeysShape<width>::threads)
    attention_backward_keys_kernel4(AttentionGrads grads, AttentionInputs<bf16> in, const float *delta, const float *lse,
                                    Heads<const bf16> dout, Pieces q_pieces, Pieces k_pieces) {
    const auto &[q, k, v, first_key, cuts, shape] = in;
    const size_t T = shape.T, D = shape.D;
    const unsigned KV = unsigned(shape.KV);  // 64 bits would take more registers
    const float scale = shape.scale;
    using Shape = BackwardKeysShape<width>;
    constexpr int m = Shape::m, N = Shape::queries;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned kv = blockIdx.y, group = shape.group(), split = blockIdx.z;
    const auto first_head = [=](unsigned split) { return kv * group + split * group / gridDim.z; };
    const unsigned end_h = first_head(split + 1);
    const BlockRows block = nth_block(k_pieces, cuts, blockIdx.x, Shape::keys);
    Tiles tiles{q_pieces, block.begin, first_unseeing(first_key, block, q_pieces), N};
    TileRows tile = tiles.front();
    if (tile.empty()) return;
    unsigned h = first_head(split);

    const auto load_queries = [&](int stage, TileRows queries, unsigned head) {
        load<Shape::threads>(s.stage[stage].q, {q.data + head * D, q.stride}, queries, D);
        load<Shape::threads>(s.stage[stage].dout, {dout.data + head * D, dout.stride}, queries, D);
        cp_async_commit();
    };
    // Three numbers per query are too few bytes for cp.async, so they wait in registers during the previous tile.
    struct Row {
        float lse_log2, delta;
        int first_key;
    };
    const auto read_row = [&](TileRows queries, unsigned head) {
        const int i = threadIdx.x;
        if (i >= queries.size()) return Row{0, 0, INT32_MAX};  // this query sees no key
        const size_t row = head * T + size_t(queries.row + i);
        return Row{lse[row] * log2_e, delta[row], first_key[queries.begin + i]};
    };
    const auto write_row = [&](int stage, Row row) {
        const int i = threadIdx.x;
        if (i < N)
            s.stage[stage].lse_log2[i] = row.lse_log2, s.stage[stage].delta[i] = row.delta,
            s.stage[stage].first_key[i] = row.first_key;
    };
    load<Shape::threads>(s.k, {k.data + kv * D, k.stride}, block, D);
    load<Shape::threads>(s.v, {v.data + kv * D, v.stride}, block, D);
    load_queries(0, tile, h);
    write_row(0, read_row(tile, h));

    const int warp = int(threadIdx.x) / 32, row0 = warp % Shape::row_warps * 16 * m, t = int(threadIdx.x) % 4;
    const bool sums_dv = Shape::sums == 2 || warp < Shape::row_warps, sums_dk = Shape::sums == 2 || !sums_dv;
    const Keys<m> keys(block, row0);
    float sum[Shape::sums][m][width / 8][4] = {};
    auto &dv = sum[0], &dk = sum[Shape::sums - 1];
    for (int stage = 0; !tile.empty(); stage ^= 1) {
        const bool same_tile = h + 1 < end_h;
        const unsigned next_h = same_tile ? h + 1 : first_head(split);  // recomputed, to save a register
        const TileRows next = same_tile ? tile : tiles.after(tile);
        cp_async_wait<0>();
        __syncthreads();  // this tile has landed, and all warps are done with the other stage
        if (!next.empty()) load_queries(stage ^ 1, next, next_h);
        const Row next_row = read_row(next, next_h);
        const auto &now = s.stage[stage];
        if (!keys.seen_by_none_of(tile, now.first_key)) {
            float p[m][N / 8][4], ds[m][N / 8][4];  // transposed: (keys, queries)
            uint32_t rounded[m][N / 16][4];
            product_transposed(p, s.k, row0, s.stage[stage].q);
            if (!keys.seen_by_all_of(tile, now.first_key)) keys.template mask<N>(p, tile, now.first_key);
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float column_lse = now.lse_log2[8 * n + 2 * t + e];
#pragma unroll
                    for (int i = 0; i < m; i++)
#pragma unroll
                        for (int r = 0; r < 2; r++)
                            p[i][n][2 * r + e] = exp2_approx(p[i][n][2 * r + e] * (scale * log2_e) - column_lse);
                }
            if (sums_dv) {
                round_to_operand<m, N>(rounded, p);
                product_add<m, N, width>(dv, rounded, s.stage[stage].dout);
            }
            if (sums_dk) {
                product_transposed(ds, s.v, row0, s.stage[stage].dout);
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float column_delta = now.delta[8 * n + 2 * t + e];
#pragma unroll
                        for (int i = 0; i < m; i++)
#pragma unroll
                            for (int r = 0; r < 2; r++)
                                ds[i][n][2 * r + e] = p[i][n][2 * r + e] * (ds[i][n][2 * r + e] - column_delta);
                    }
                round_to_operand<m, N>(rounded, ds);
                product_add<m, N, width>(dk, rounded, s.stage[stage].q);
            }
        }
        write_row(stage ^ 1, next_row);
        tile = next, h = next_h;
    }
    const auto row_in = [&](float *out) {
        return [=](int i, int r) {
            const int p = keys.position(i, r);
            return p < keys.end ? out + (size_t(block.row + p - block.begin) * KV + kv) * D : nullptr;
        };
    };
    const AttentionGrads to = keys_split(grads, shape, split);
    if (sums_dk) write_rows<adds, m, width>(dk, scale, D, row_in(to.dk32));
    if (sums_dv) write_rows<adds, m, width>(dv, 1.0f, D, row_in(to.dv32));
}

}  // namespace CUDA_BACKEND
}  // namespace attention
