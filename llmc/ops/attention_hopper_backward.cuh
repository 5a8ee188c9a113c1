// Attention backward on Hopper's own instructions, for heads of 64 and 128. Contract and formulas: attention.h. As in attention_backward.cuh one kernel
// sums dK and dV by tiles of keys, and one dQ by tiles of queries, so that every sum has one owner and a fixed order. As in attention_hopper.cuh a
// warp loads and warpgroups multiply. P and dS stay in registers from one product to the next. A consumer issues the products of the next tile
// while the last ones of this tile are on their way, and its two consumers fill each other's gaps.
#pragma once
#include "attention_backward.cuh"
#include "attention_hopper.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

// What both kernels have in common: two consumers of 64 rows each, and two stages of 64 rows of the other kind.
template <int D_> struct HopperBackward {
    static constexpr int D = D_, consumers = 2, rows = 64 * consumers, columns = 64, stages = 2, threads = 128 * (consumers + 1);
    static constexpr int of_producer = D == 64 ? 40 : 24, of_consumer = D == 64 ? 232 : 240;  // registers a thread
    static_assert(of_producer + consumers * of_consumer <= hopper::registers(threads) * (consumers + 1));
    struct Stage {
        hopper::SwizzledTile<columns, D> first, second;  // K and V, or Q and dO
    };
    struct Columns {  // of queries
        float lse_log2[columns], delta[columns];
        int first_key[columns];
    };
    struct Shared {
        hopper::SwizzledTile<rows, D> first, second;  // Q and dO, or K and V
        Stage stage[stages];
        Columns queries[stages];  // of the kernel for dK and dV
        hopper::Barrier rows_full, full[stages], empty[stages], landed;
    };
};

template <int D> __device__ void hopper_backward_start(typename HopperBackward<D>::Shared &s) {
    using Shape = HopperBackward<D>;
    if (threadIdx.x == 0) {
        hopper::init(s.rows_full, 1), hopper::init(s.landed, 1);
        for (int stage = 0; stage < Shape::stages; stage++)
            hopper::init(s.full[stage], 2), hopper::init(s.empty[stage], 4 * Shape::consumers);
        hopper::fence_barriers();
    }
    __syncthreads();
}

// Loads two tiles of the same rows, by one warp.
template <class Tile>
__device__ void hopper_load_two(Tile &first, Tile &second, const CUtensorMap &first_map, const CUtensorMap &second_map, int row,
                                int first_panel, int second_panel, hopper::Barrier &barrier) {
    if (threadIdx.x % 32) return;
    hopper::arrive_and_expect(barrier, 2 * Tile::bytes);
    hopper::tma_load(first.data, first_map, 0, row, first_panel, barrier);
    hopper::tma_load(second.data, second_map, 0, row, second_panel, barrier);
}

// Fills a stage: `full` gets an arrival at the beginning, with the bytes of both tiles, and one when this warp has written what `write` writes. Rows behind
// a short tile become 0, as P = 0 times a NaN is NaN.
template <int D, class Write>
__device__ void hopper_fill(typename HopperBackward<D>::Shared &s, hopper::Place<2> at, unsigned &landed,
                            const CUtensorMap &first_map, const CUtensorMap &second_map, TileRows tile, int first_panel,
                            int second_panel, Write write) {
    using Shape = HopperBackward<D>;
    const int lane = int(threadIdx.x) % 32;
    auto &stage = s.stage[at.stage];
    hopper::wait(s.empty[at.stage], at.parity ^ 1);
    const bool whole = tile.size() == Shape::columns;
    hopper_load_two(stage.first, stage.second, first_map, second_map, tile.row, first_panel, second_panel,
                    whole ? s.full[at.stage] : s.landed);
    write();
    if (!whole) {
        if (lane == 0) hopper::arrive(s.full[at.stage]);
        hopper::wait(s.landed, landed);
        landed ^= 1;
        stage.first.clear_from(tile.size(), lane);
        stage.second.clear_from(tile.size(), lane);
        hopper::fence_async();
    }
    __syncwarp();
    if (lane == 0) hopper::arrive(s.full[at.stage]);
}

// Ends a tile: dS = P * (dP - delta), for which `ds` has dP, and starts sums += dS * tile. delta_of(n, e): of element ds[n][e].
template <int N, int D, class DeltaOf>
__device__ void hopper_add_scores(float (&sums)[D / 8][4], uint32_t (&rounded)[1][N / 16][4], const float (&p)[N / 8][4],
                                  float (&ds)[1][N / 8][4], hopper::SwizzledTile<N, D> &tile, DeltaOf delta_of) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) ds[0][n][e] = p[n][e] * (ds[0][n][e] - delta_of(n, e));
    round_to_operand<1, N>(rounded, ds);
    hopper::start_product_add<N, D>(sums, rounded[0], tile);
}

// ---- dQ

template <int D, class Out>
__global__ void __launch_bounds__(HopperBackward<D>::threads, 1)
    attention_backward_queries_hopper_kernel(const __grid_constant__ CUtensorMap q_map,
                                             const __grid_constant__ CUtensorMap dout_map,
                                             const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                             Heads<Out> dq_rows, const float *delta, const float *lse, const int32_t *first_key,
                                             AttentionShape shape, const __grid_constant__ Pieces q_pieces,
                                             const __grid_constant__ Pieces k_pieces) {
    using Shape = HopperBackward<D>;
    constexpr int N = Shape::columns;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned h = blockIdx.x, kv = h / shape.group();
    const TileRows block = nth_block(q_pieces, gridDim.y - 1 - blockIdx.y, Shape::rows);
    Tiles tiles{k_pieces, first_key[block.begin], block.end, N};
    TileRows tile = tiles.front();
    if (tile.empty()) return;
    hopper_backward_start<D>(s);
    hopper::Place<Shape::stages> at;
    const int group = int(threadIdx.x) / 128, panel = int(h) * (D / 64), k_panel = int(kv) * (D / 64);
    if (group == Shape::consumers) {
        hopper::give_registers_down_to<Shape::of_producer>();
        if (threadIdx.x / 32 % 4) return;
        hopper_load_two(s.first, s.second, q_map, dout_map, block.row, panel, panel, s.rows_full);
        for (unsigned landed = 0; !tile.empty(); tile = tiles.after(tile), at.advance())
            hopper_fill<D>(s, at, landed, k_map, v_map, tile, k_panel, k_panel, [] {});
        return;
    }
    hopper::take_registers_up_to<Shape::of_consumer>();
    const float scale_log2 = shape.scale * log2_e;
    const HopperQueries queries(block, first_key);
    float lse_log2[2], row_delta[2], dq[1][D / 8][4] = {}, p[N / 8][4], ds[1][N / 8][4];
    uint32_t rounded[1][N / 16][4] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const size_t row = h * shape.T + size_t(block.row + min(queries.row(r), block.size() - 1));
        lse_log2[r] = lse[row] * log2_e, row_delta[r] = delta[row];
    }
    const auto skip = [&] {
        hopper::wait(s.full[at.stage], at.parity);
        hopper_release(s.empty[at.stage]);
        at.advance();
    };
    for (; !tile.empty() && queries.see_none_of(tile); tile = tiles.after(tile)) skip();
    hopper::wait(s.rows_full, 0);
    int before = -1;  // the stage whose products may be on their way
    for (; !tile.empty() && !queries.see_none_of(tile); tile = tiles.after(tile), at.advance()) {
        auto &stage = s.stage[at.stage];
        hopper::wait(s.full[at.stage], at.parity);
        hopper::pin(ds[0]);
        hopper::start_product_transposed<N>(p, s.first, group * 64, stage.first);
        hopper::product_transposed<N>(ds[0], s.second, group * 64, stage.second);
        hopper::wgmma_commit();
        hopper::wgmma_wait<1>();  // the scores, and dQ of the tile before
        hopper::pin(p), hopper::pin(rounded[0]);
        if (before >= 0) hopper_release(s.empty[before]);
        if (tile.size() < N || !queries.see_all_of(tile)) queries.template mask<N>(p, tile);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) p[n][e] = exp2_approx(fmaf(p[n][e], scale_log2, -lse_log2[e / 2]));
        hopper::wgmma_wait<0>();
        hopper::pin(ds[0]);
        hopper_add_scores<N, D>(dq[0], rounded, p, ds, stage.first, [&](int, int e) { return row_delta[e / 2]; });
        before = at.stage;
    }
    hopper::wgmma_wait<0>();
    hopper::pin(dq[0]);
    if (before >= 0) hopper_release(s.empty[before]);
    for (; !tile.empty(); tile = tiles.after(tile)) skip();
    write_rows<std::is_same_v<Out, float>, 1, D>(dq, shape.scale, D, [&](int, int r) {
        const int row = queries.row(r);
        return row < block.size() ? dq_rows.data + (size_t(block.row + row) * dq_rows.stride + h * D) : nullptr;
    });
}

// ---- dK and dV

// The keys of a warpgroup, and of a lane. The counterpart of HopperQueries.
struct HopperKeys {
    int begin, end, unseeing;  // the warpgroup's positions; the queries that see some of them are [begin, unseeing)
    int warp_begin, warp_end, position[2];

    __device__ HopperKeys(TileRows block, const int32_t *first_key, const Pieces &q_pieces) {
        begin = block.begin + int(threadIdx.x) / 128 * 64, end = min(begin + 64, block.end);
        unseeing = begin < end ? first_unseeing(first_key, {begin, end, 0}, q_pieces) : begin;
        warp_begin = block.begin + int(threadIdx.x) / 32 * 16, warp_end = min(warp_begin + 16, block.end);
        for (int r = 0; r < 2; r++) position[r] = block.begin + HopperQueries::row(r);
    }
    __device__ bool seen_by_none_of(TileRows queries) const { return queries.end <= begin || queries.begin >= unseeing; }
    __device__ bool seen_by_all_of(TileRows queries, const int *first_key) const {
        return queries.begin >= warp_end - 1 && first_key[queries.size() - 1] <= warp_begin;
    }
    template <int N> __device__ void mask(float (&scores)[N / 8][4], TileRows queries, const int *first_key) const {
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * n + int(threadIdx.x) % 4 * 2 + e % 2;
                if (position[e / 2] < first_key[column] || position[e / 2] > queries.begin + column) scores[n][e] = -INFINITY;
            }
    }
};

// grid: KV heads, tiles of keys, splits of a group's query heads (attention_backward.cuh)
template <int D, bool adds>
__global__ void __launch_bounds__(HopperBackward<D>::threads, 1)
    attention_backward_keys_hopper_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dout_map,
                                          const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                          AttentionGrads grads, const float *delta, const float *lse, const int32_t *first_key,
                                          AttentionShape shape, const __grid_constant__ Pieces q_pieces,
                                          const __grid_constant__ Pieces k_pieces) {
    using Shape = HopperBackward<D>;
    constexpr int N = Shape::columns;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned kv = blockIdx.x, heads = shape.group();
    const unsigned first_h = kv * heads + blockIdx.z * heads / gridDim.z,
                   end_h = kv * heads + (blockIdx.z + 1) * heads / gridDim.z;
    const TileRows block = nth_block(k_pieces, blockIdx.y, Shape::rows);
    Tiles tiles{q_pieces, block.begin, first_unseeing(first_key, block, q_pieces), N};
    TileRows tile = tiles.front();
    if (tile.empty()) return;
    hopper_backward_start<D>(s);
    hopper::Place<Shape::stages> at;
    unsigned h = first_h;
    const auto advance = [&] {  // all heads of a tile, then the next tile
        if (++h == end_h) h = first_h, tile = tiles.after(tile);
        at.advance();
    };
    const int group = int(threadIdx.x) / 128;
    if (group == Shape::consumers) {
        hopper::give_registers_down_to<Shape::of_producer>();
        if (threadIdx.x / 32 % 4) return;
        hopper_load_two(s.first, s.second, k_map, v_map, block.row, int(kv) * (D / 64), int(kv) * (D / 64), s.rows_full);
        for (unsigned landed = 0; !tile.empty(); advance())
            hopper_fill<D>(s, at, landed, q_map, dout_map, tile, int(h) * (D / 64), int(h) * (D / 64), [&] {
                auto &columns = s.queries[at.stage];
                for (int i = int(threadIdx.x) % 32; i < N; i += 32) {
                    const bool valid = i < tile.size();
                    const size_t row = h * shape.T + size_t(tile.row + i);
                    columns.lse_log2[i] = valid ? lse[row] * log2_e : 0.0f;
                    columns.delta[i] = valid ? delta[row] : 0.0f;
                    columns.first_key[i] = valid ? first_key[tile.begin + i] : INT32_MAX;  // such a query sees nothing
                }
            });
        return;
    }
    hopper::take_registers_up_to<Shape::of_consumer>();
    const int t = int(threadIdx.x) % 4;
    const float scale_log2 = shape.scale * log2_e;
    const HopperKeys keys(block, first_key, q_pieces);
    float dv[1][D / 8][4] = {}, dk[1][D / 8][4] = {}, p[1][N / 8][4], ds[1][N / 8][4];  // transposed: (keys, queries)
    uint32_t p_rounded[1][N / 16][4] = {}, ds_rounded[1][N / 16][4] = {};
    const auto skip = [&] {
        hopper::wait(s.full[at.stage], at.parity);
        hopper_release(s.empty[at.stage]);
        advance();
    };
    while (!tile.empty() && keys.seen_by_none_of(tile)) skip();
    hopper::wait(s.rows_full, 0);
    int before = -1;  // the stage whose products may be on their way
    for (; !tile.empty() && !keys.seen_by_none_of(tile); advance()) {
        auto &stage = s.stage[at.stage];
        const auto &columns = s.queries[at.stage];
        hopper::wait(s.full[at.stage], at.parity);
        hopper::start_product_transposed<N>(p[0], s.first, group * 64, stage.first);
        hopper::wgmma_wait<1>();  // dV and dK of the tile before: only then are there registers for dP
        hopper::pin(p_rounded[0]), hopper::pin(ds_rounded[0]);
        __syncwarp();  // all lanes have read its columns
        if (before >= 0) hopper_release(s.empty[before]);
        hopper::start_product_transposed<N>(ds[0], s.second, group * 64, stage.second);
        hopper::wgmma_wait<1>();  // the scores
        hopper::pin(p[0]);
        if (!keys.seen_by_all_of(tile, columns.first_key)) keys.template mask<N>(p[0], tile, columns.first_key);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[0][n][e] = exp2_approx(fmaf(p[0][n][e], scale_log2, -columns.lse_log2[8 * n + 2 * t + e % 2]));
        round_to_operand<1, N>(p_rounded, p);
        hopper::start_product_add<N, D>(dv[0], p_rounded[0], stage.second);
        hopper::wgmma_wait<1>();  // dP
        hopper::pin(ds[0]);
        hopper_add_scores<N, D>(dk[0], ds_rounded, p[0], ds, stage.first,
                                [&](int n, int e) { return columns.delta[8 * n + 2 * t + e % 2]; });
        before = at.stage;
    }
    hopper::wgmma_wait<0>();
    hopper::pin(dv[0]), hopper::pin(dk[0]);
    __syncwarp();
    if (before >= 0) hopper_release(s.empty[before]);
    while (!tile.empty()) skip();
    const auto row_in = [&](float *out) {
        return [=, &keys](int, int r) {
            const int p = keys.position[r];
            return p < keys.end ? out + (size_t(block.row + p - block.begin) * shape.KV + kv) * D : nullptr;
        };
    };
    const AttentionGrads to = keys_split(grads, shape, blockIdx.z);
    write_rows<adds, 1, D>(dk, shape.scale, D, row_in(to.dk32));
    write_rows<adds, 1, D>(dv, 1.0f, D, row_in(to.dv32));
}

}  // namespace CUDA_BACKEND
}  // namespace attention
