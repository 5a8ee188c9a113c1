// Attention backward with Hopper's asynchronous instructions, for head sizes 64 and 128: one kernel with five products per tile, after
// FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608). Contract and formulas: attention.h.
//
//   A block owns a tile of 128 keys and walks over the tiles of queries that see these keys, in each query head of its KV head. Three producer warps
//   share the data movement: one loads tiles, one describes them, and one adds partial sums to device memory. Two consumer warpgroups have 64 keys
//   each. They compute transposed scores, so P^T and dS^T are left operands in registers of dV += P^T dO and dK += dS^T Q. Only dQ = dS K, which sums
//   over the keys of both consumers, needs dS in shared memory:
//
//       issue S^T = K Q^T, dP^T = V dO^T  |  wait for S: P  |  wait for dP: dS  |  issue dV += P^T dO, store dS
//       both consumers have stored dS: issue dQ = dS K, dK += dS^T Q            |  wait for dQ: hand it to TMA
//
//   Each consumer computes half of dQ, 64 queries x 64 columns. TMA adds this half to float32 sums in device memory while dK is still being computed.
//   All products have ended when the next tile begins, because dQ shares registers with the scores; the other consumer fills the gap.
//
//   The order of every sum is fixed. Each tile of queries and head has a turn counter in device memory: the number of key blocks that have added
//   their dQ. Block n adds after block n - 1, if block n - 1 sees the tile. Blocks that share a KV head (keys_splits) also add dK and dV in turn. A
//   block waits only for blocks with smaller indices, which start earlier, so some block can always proceed. Blocks of early keys, which most queries
//   see, start first. Each block walks from the last query to the first, so blocks that start together reach a tile one after another, one tile's
//   time apart. Blocks of different heads have neighbouring indices, so few blocks that start together wait for each other.
#pragma once
#include "attention_backward.cuh"
#include "attention_hopper.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

// 64 x 64 float32 sums in shared memory, in panels of 32 columns with the swizzle of SwizzledTile.
struct alignas(1024) HopperSums {
    static constexpr int rows = 64, panel = 32, width = 64;
    float data[width / panel][rows][panel];

    // Stores factor * c; runs in a warpgroup. Lanes of odd rows store their chunks in another order, so a half warp has no bank conflicts.
    __device__ void write(const float (&c)[8][4], float factor) {
        const int g = int(threadIdx.x) % 32 / 4, t = int(threadIdx.x) % 4, row0 = int(threadIdx.x) % 128 / 32 * 16 + g;
        const bool odd = g % 2;
        const int chunk = t / 2 ^ g ^ (odd ? 4 : 0);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (n & 2) continue;
                const auto put = [&](int at, float x, float y) {
                    *reinterpret_cast<float2 *>(&data[n / 4][row0 + 8 * r][(at ^ n % 4 * 2) * 4 + t % 2 * 2]) =
                        make_float2(factor * x, factor * y);
                };
                const float *a = c[n] + 2 * r, *b = c[n + 2] + 2 * r;
                put(chunk, odd ? b[0] : a[0], odd ? b[1] : a[1]);
                put(chunk ^ 4, odd ? a[0] : b[0], odd ? a[1] : b[1]);
            }
    }
};
// Clears the rows from `size` on: in device memory their places belong to other tiles, which must not change.
__device__ inline void clear_rows(float (&c)[8][4], int size) {
    const int row0 = int(threadIdx.x) % 128 / 32 * 16 + int(threadIdx.x) % 32 / 4;
    if (size >= HopperSums::rows) return;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (row0 + e / 2 * 8 >= size) c[n][e] = 0;
}

template <int D_> struct HopperBackward {
    static constexpr int D = D_, consumers = 2, keys = 64 * consumers, queries = D == 64 ? 128 : 64, stages = 2,
                         threads = 128 * (consumers + 1);
    static constexpr int of_producer = 24, of_consumer = 240;  // registers a thread
    static_assert(of_producer + consumers * of_consumer <= hopper::registers(threads) * (consumers + 1));
    struct Columns {                                                // values per query of a stage
        alignas(8) float minus_lse[queries], minus_delta[queries];  // lse / scale
        int first_key[queries];
        int begin, size, row, h;  // the tile; size 0 after the last one
    };
    struct Shared {
        hopper::SwizzledTile<keys, D> k, v;
        hopper::SwizzledTile<queries, D> q[stages], dout[stages];
        hopper::SwizzledTile<keys, queries> ds[2];  // transposed
        HopperSums sums[consumers];
        Columns columns[stages];
        hopper::Barrier keys_full, full[stages], empty[stages], landed, sums_full[consumers], sums_empty[consumers];
        BlockRows block;
        int end_queries;  // end of the queries that see the block's keys
    };
};

// Walks backwards from position `last` over the tiles of `size` queries in which some query sees the block's keys. A tile begins at a multiple of
// `size` from the beginning of its piece, or from the cut before the keys, so all blocks use the same tiles. `keys` is in shared memory to save
// registers.
struct TilesBack {
    const Pieces &pieces;
    const BlockRows &keys;
    int last, size;
    int i = int(pieces.count) - 1;

    __device__ TileRows before(int position) {  // empty if there is no tile before it
        for (; i >= 0; i--) {
            const Piece p = pieces.piece[i];
            const int begin = max(int(p.begin), keys.from), end = min(int(p.end), position);
            if (end <= keys.begin) break;
            if (end <= begin) continue;
            const int at = begin + (end - 1 - begin) / size * size;
            return {at, min(at + size, min(int(p.end), keys.to)), int(p.offset) + at - int(p.begin)};
        }
        return {0, 0, 0};
    }
    __device__ TileRows back() { return i = int(pieces.count) - 1, before(last); }
};

// Walks over all tiles of one query head, then over the tiles of the next head.
struct HopperWalk {
    TilesBack tiles;
    unsigned h, end_h;
    TileRows tile = tiles.back();

    __device__ bool ended() const { return tile.empty(); }
    __device__ void advance() {
        tile = tiles.before(tile.begin);
        if (tile.empty() && ++h < end_h) tile = tiles.back();
    }
};

// Masks a warp's transposed scores (16 keys, N queries). Returns early if every query sees every key. No query sees the rows after a short block.
template <int N>
__device__ void hopper_mask_keys(float (&scores)[N / 8][4], TileRows block, int queries_begin, const int *first_key) {
    const int warp_begin = block.begin + int(threadIdx.x) / 32 * 16;
    if (queries_begin >= warp_begin + 15 && first_key[N - 1] <= warp_begin && warp_begin + 16 <= block.end) return;
    int position[2];
    for (int r = 0; r < 2; r++) {
        position[r] = block.begin + HopperQueries::row(r);
        if (position[r] >= block.end) position[r] = INT32_MAX;
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = 8 * n + int(threadIdx.x) % 4 * 2 + e % 2;
            if (position[e / 2] < first_key[column] || position[e / 2] > queries_begin + column) scores[n][e] = -INFINITY;
        }
}

// Initialises the mbarriers. A phase of full[] has two arrivals, from the loading and the describing warp; a phase of empty[] has one from each
// consumer warp and one from the adding warp.
template <int D> __device__ void hopper_backward_start(typename HopperBackward<D>::Shared &s) {
    using Shape = HopperBackward<D>;
    if (threadIdx.x == 0) {
        hopper::init(s.keys_full, 1), hopper::init(s.landed, 1);
        for (int stage = 0; stage < Shape::stages; stage++)
            hopper::init(s.full[stage], 2), hopper::init(s.empty[stage], 4 * Shape::consumers + 1);
        for (int group = 0; group < Shape::consumers; group++)
            hopper::init(s.sums_full[group], 4), hopper::init(s.sums_empty[group], 1);
        hopper::fence_barriers();
    }
    __syncthreads();
}

// Loads the same rows of two arrays. A short tile lands on the warp's own barrier, and the warp clears the rows after it, because P = 0 times NaN
// is NaN, before it announces the tile.
template <class Tile>
__device__ void hopper_load_two(Tile &first, Tile &second, const CUtensorMap &first_map, const CUtensorMap &second_map,
                                TileRows rows, int whole_size, int panel, hopper::Barrier &full, hopper::Barrier &landed,
                                unsigned &landed_parity) {
    const int lane = int(threadIdx.x) % 32;
    const bool whole = rows.size() == whole_size;
    if (lane == 0) {
        hopper::Barrier &barrier = whole ? full : landed;
        hopper::arrive_and_expect(barrier, 2 * Tile::bytes);
        hopper::tma_load(first.data, first_map, 0, rows.row, panel, barrier);
        hopper::tma_load(second.data, second_map, 0, rows.row, panel, barrier);
    }
    if (whole) return;
    hopper::wait(landed, landed_parity);
    landed_parity ^= 1;
    first.clear_from(rows.size(), lane);
    second.clear_from(rows.size(), lane);
    hopper::fence_async();
    __syncwarp();
    if (lane == 0) hopper::arrive(full);
}

// Loads the keys and all tiles of queries. Runs in one warp.
template <int D>
__device__ void hopper_backward_load(typename HopperBackward<D>::Shared &s, const CUtensorMap &q_map, const CUtensorMap &dout_map,
                                     const CUtensorMap &k_map, const CUtensorMap &v_map, TileRows block, int kv,
                                     HopperWalk walk) {
    using Shape = HopperBackward<D>;
    hopper::Place<Shape::stages> at;
    unsigned landed = 0;
    hopper_load_two(s.k, s.v, k_map, v_map, block, Shape::keys, kv * (D / 64), s.keys_full, s.landed, landed);
    for (; !walk.ended(); walk.advance(), at.advance()) {
        hopper::wait(s.empty[at.stage], at.parity ^ 1);
        hopper_load_two(s.q[at.stage], s.dout[at.stage], q_map, dout_map, walk.tile, Shape::queries, int(walk.h) * (D / 64),
                        s.full[at.stage], s.landed, landed);
    }
    hopper::wait(s.empty[at.stage], at.parity ^ 1);
    hopper_release(s.full[at.stage]);
}

// Fills the stage's columns for each tile. Runs in one warp.
template <int D>
__device__ void hopper_backward_describe(typename HopperBackward<D>::Shared &s, const float *delta, const float *lse,
                                         const int32_t *first_key, size_t T, float inverse_scale, HopperWalk walk) {
    using Shape = HopperBackward<D>;
    hopper::Place<Shape::stages> at;
    for (;; walk.advance(), at.advance()) {
        hopper::wait(s.empty[at.stage], at.parity ^ 1);
        const TileRows tile = walk.tile;
        auto &columns = s.columns[at.stage];
        if (threadIdx.x % 32 == 0)
            columns.begin = tile.begin, columns.size = tile.size(), columns.row = tile.row, columns.h = int(walk.h);
        if (!tile.empty())
#pragma unroll 1
            for (int i = int(threadIdx.x) % 32; i < Shape::queries; i += 32) {
                const bool valid = i < tile.size();
                const size_t row = walk.h * T + size_t(tile.row + i);
                columns.minus_lse[i] = valid ? -inverse_scale * lse[row] : 0.0f;
                columns.minus_delta[i] = valid ? -delta[row] : 0.0f;
                columns.first_key[i] = valid ? first_key[tile.begin + i] : INT32_MAX;  // this query sees no key
            }
        __syncwarp();
        hopper_release(s.full[at.stage]);
        if (tile.empty()) return;
    }
}

// Adds the consumers' partial sums in shared memory to the float32 sums in device memory. Runs in one thread.
template <int D>
__device__ void hopper_backward_add(typename HopperBackward<D>::Shared &s, const CUtensorMap &dq_map, const CUtensorMap &dk_map,
                                    const CUtensorMap &dv_map, int *turns, const AttentionShape &shape, TileRows block,
                                    int end_before, int kv) {
    using Shape = HopperBackward<D>;
    unsigned parity = 0;
    const auto add = [&](const CUtensorMap &map, int row, int rows_apart, int panel, int panels_apart) {
        for (int group = 0; group < Shape::consumers; group++) {
            hopper::wait(s.sums_full[group], parity);
            hopper::tma_add(map, 0, row + group * rows_apart, panel + group * panels_apart, s.sums[group].data);
            hopper::tma_commit();
        }
        hopper::tma_wait_read<1>();
        hopper::arrive(s.sums_empty[0]);
        hopper::tma_wait_read<0>();
        hopper::arrive(s.sums_empty[1]);
        parity ^= 1;
    };
    hopper::wait(s.full[0], 0);
    hopper::Place<Shape::stages> at;
    while (s.columns[at.stage].size > 0) {
        const auto &columns = s.columns[at.stage];
        const int row = columns.row, h = columns.h;
        const bool waits = columns.first_key[0] < end_before;
        hopper::arrive(s.empty[at.stage]);
        int *turn = turns + h * shape.T + row;
        if (waits) hopper::await_turn(turn, int(blockIdx.z));
        add(dq_map, row, D == 64 ? 64 : 0, h * (D / 32), D == 64 ? 0 : 2);
        hopper::tma_wait();
        hopper::pass_turn(turn, int(blockIdx.z) + 1);
        at.advance();
        hopper::wait(s.full[at.stage], at.parity);
    }
    int *turn = turns + shape.H * shape.T + kv * shape.T + block.row;
    if (blockIdx.y > 0) hopper::await_turn(turn, int(blockIdx.y));
    for (int panel = 0; panel < D / 32; panel += 2) add(dk_map, block.row, 64, kv * (D / 32) + panel, 0);
    for (int panel = 0; panel < D / 32; panel += 2) add(dv_map, block.row, 64, kv * (D / 32) + panel, 0);
    hopper::tma_wait();
    if (blockIdx.y + 1 < gridDim.y) hopper::pass_turn(turn, int(blockIdx.y) + 1);
}

// Initialises transposed scores with a value per query; a product is then added to them. A warp loads each value once: lane 4 g + t loads the values
// of queries 64 j + 8 g + 2 t and 64 j + 8 g + 2 t + 1, and shfl.sync passes them to the lanes with the same t (its segment mask 3 keeps t).
template <int N> __device__ void set_by_query(float (&scores)[N / 8][4], const float *of_queries) {
    float2 own = {};
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        if (n % 8 == 0) own = reinterpret_cast<const float2 *>(of_queries)[n / 8 * 32 + int(threadIdx.x) % 32];
        const auto from_g = [n](float x) {
            float out;
            asm volatile("{ .reg .pred inside; shfl.sync.idx.b32 %0|inside, %1, %2, 0x31f, 0xffffffff; }"
                         : "=f"(out)
                         : "f"(x), "r"(n % 8 * 4));
            return out;
        };
        scores[n][0] = scores[n][2] = from_g(own.x);
        scores[n][1] = scores[n][3] = from_g(own.y);
    }
    hopper::pin(scores);
}

// Computes the products of all tiles. Runs in both consumer warpgroups.
template <int D> __device__ void hopper_backward_multiply(typename HopperBackward<D>::Shared &s, float scale, TileRows block) {
    using Shape = HopperBackward<D>;
    constexpr int N = Shape::queries;
    const int group = int(threadIdx.x) / 128, warp_row = int(threadIdx.x) / 32 * 16;
    const float scale_log2 = scale * log2_e;
    float dv[D / 8][4] = {}, dk[D / 8][4] = {}, dq[8][4];
    float p[1][N / 8][4], ds[1][N / 8][4];  // transposed: (keys, queries)
    uint32_t p_rounded[1][N / 16][4], ds_rounded[1][N / 16][4];
    const auto leave = [&](float(&sums)[8][4], float factor, int size, unsigned n) {
        clear_rows(sums, size);
        hopper::wait(s.sums_empty[group], n % 2 ^ 1);
        s.sums[group].write(sums, factor);
        hopper::fence_async();
        __syncwarp();
        hopper_release(s.sums_full[group]);
    };

    hopper::wait(s.keys_full, 0);
    hopper::wait(s.full[0], 0);
    unsigned n = 0;
    do {
        const unsigned stage = n % 2;
        const auto &columns = s.columns[stage];
        auto &q = s.q[stage], &dout = s.dout[stage];
        set_by_query<N>(p[0], columns.minus_lse), set_by_query<N>(ds[0], columns.minus_delta);
        hopper::start_product_transposed<N, true>(p[0], s.k, group * 64, q);      // S - lse / scale
        hopper::start_product_transposed<N, true>(ds[0], s.v, group * 64, dout);  // dP - delta
        hopper::wgmma_wait<1>();                                                  // S
        hopper::pin(p[0]);
        hopper_mask_keys<N>(p[0], block, columns.begin, columns.first_key);
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) p[0][i][e] = exp2_approx(scale_log2 * p[0][i][e]);
        hopper::wgmma_wait<0>();  // dP; from here on the scores' registers are free for dQ
        hopper::pin(ds[0]);
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[0][i][e] *= p[0][i][e];
        round_to_operand<1, N>(p_rounded, p);
        round_to_operand<1, N>(ds_rounded, ds);
        hopper::start_product_add<N, D>(dv, p_rounded[0], dout);
#pragma unroll
        for (int k = 0; k < N / 16; k++) s.ds[stage].store(warp_row, k, ds_rounded[0][k]);
        hopper::fence_async();
        bar_sync(1, 128 * Shape::consumers);  // both have stored dS and read the columns
        hopper::start_product_of_columns(dq, s.ds[stage], D == 64 ? group : 0, s.k, D == 64 ? 0 : group);
        hopper::start_product_add<N, D>(dk, ds_rounded[0], q);
        hopper::wgmma_wait<1>();  // dV and dQ
        hopper::pin(p_rounded[0]), hopper::pin(dq);
        leave(dq, scale, columns.size - (D == 64 ? group * 64 : 0), n);
        hopper::wgmma_wait<0>();  // dK
        hopper::pin(ds_rounded[0]);
        hopper_release(s.empty[stage]);
        n++;
        hopper::wait(s.full[n % 2], n / 2 % 2);
    } while (s.columns[n % 2].size > 0);
    hopper::pin(dv), hopper::pin(dk);
    const int size = block.size() - group * 64;
#pragma unroll
    for (int i = 0; i < D / 8; i += 8) leave(*reinterpret_cast<float(*)[8][4]>(dk[i]), scale, size, n++);
#pragma unroll
    for (int i = 0; i < D / 8; i += 8) leave(*reinterpret_cast<float(*)[8][4]>(dv[i]), 1.0f, size, n++);
}

// grid: KV heads, splits of a group's query heads (keys_splits), blocks of keys. `turns` (H + KV, T) must be zero at the launch.
template <int D>
__global__ void __launch_bounds__(HopperBackward<D>::threads, 1)
    attention_backward_hopper_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dout_map,
                                     const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                                     const __grid_constant__ CUtensorMap dq_map, const __grid_constant__ CUtensorMap dk_map,
                                     const __grid_constant__ CUtensorMap dv_map, int *turns, const float *delta, const float *lse,
                                     const int32_t *first_key, TileCuts cuts, AttentionShape shape, float inverse_scale,
                                     const __grid_constant__ Pieces q_pieces, const __grid_constant__ Pieces k_pieces) {
    using Shape = HopperBackward<D>;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned kv = blockIdx.x, heads = shape.group();
    if (threadIdx.x < 32) {
        const BlockRows block = nth_block(k_pieces, cuts, blockIdx.z, Shape::keys);
        const int end_queries = first_unseeing(first_key, block, q_pieces);
        if (threadIdx.x == 0) s.block = block, s.end_queries = end_queries;
    }
    hopper_backward_start<D>(s);
    const BlockRows block = s.block;
    const HopperWalk walk{{q_pieces, s.block, s.end_queries, Shape::queries},
                          kv * heads + blockIdx.y * heads / gridDim.y,
                          kv * heads + (blockIdx.y + 1) * heads / gridDim.y};
    if (walk.ended()) return;
    if (threadIdx.x / 128 == Shape::consumers) {
        hopper::give_registers_down_to<Shape::of_producer>();
        const unsigned warp = threadIdx.x / 32 % 4;
        if (warp == 0) hopper_backward_load<D>(s, q_map, dout_map, k_map, v_map, block, int(kv), walk);
        else if (warp == 2) hopper_backward_describe<D>(s, delta, lse, first_key, shape.T, inverse_scale, walk);
        else if (warp == 1 && threadIdx.x % 32 == 0)
            hopper_backward_add<D>(s, dq_map, dk_map, dv_map, turns, shape, block, block.before, int(kv));
    } else {
        hopper::take_registers_up_to<Shape::of_consumer>();
        hopper_backward_multiply<D>(s, shape.scale, block);
    }
}

}  // namespace CUDA_BACKEND
}  // namespace attention
