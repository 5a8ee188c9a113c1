// Attention forward with Hopper's asynchronous instructions (hopper.cuh), for head sizes 64 and 128. Contract and formulas: attention.h. The math is
// that of attention_forward.cuh; the schedule follows FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608):
//
//   A block owns a tile of queries. One producer warp walks over the tiles of keys: TMA fills one of two stages with K and V while the other stage is
//   in use. Two or three consumer warpgroups, with 64 queries each, walk over the same tiles. They get all registers that the producer does not need.
//
//   A consumer issues the product S of the next tile before the softmax of the current one, so tensor cores and exponentials run concurrently:
//
//       issue S(n+1) = Q K(n+1)^T, O += P(n) V(n)  |  wait for S(n+1), softmax: P(n+1)  |  wait for O, rescale O
//
//   Consumers take turns issuing products: while one has its turn, the others compute exponentials (ping-pong).
//
// Each warp holds 16 of a warpgroup's 64 rows of accumulators in the layout of mma.m16n8k16, as in attention_forward.cuh.
#pragma once
#include "attention_forward.cuh"
#include "hopper.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

template <int D_> struct HopperForward {  // D_: head size
    static constexpr int D = D_, consumers = D == 64 ? 3 : 2, queries = 64 * consumers, keys = 128, stages = 2,
                         threads = 128 * (consumers + 1);
    // registers a thread
    static constexpr int of_producer = consumers == 3 ? 32 : 24, of_consumer = consumers == 3 ? 160 : 240;
    static_assert(of_producer + consumers * of_consumer <= hopper::registers(threads) * (consumers + 1));
    struct Shared {
        hopper::SwizzledTile<queries, D> q;
        hopper::SwizzledTile<keys, D> k[stages], v[stages];
        hopper::Barrier q_full, k_full[stages], k_empty[stages], v_full[stages], v_empty[stages], v_landed;
        BlockRows block;
    };
};

// The visible keys of a lane's two queries, with bounds for all 16 queries of its warp and all 64 of its warpgroup.
struct HopperQueries {
    int begin, end, first;                                  // the warpgroup's positions, and the first key that any of them sees
    int warp_begin, warp_first, position[2], first_key[2];  // warp_first: the first key that all of them see

    __device__ HopperQueries(TileRows block, const int32_t *first_keys) {
        const int row0 = int(threadIdx.x) / 128 * 64, warp_row = int(threadIdx.x) / 32 * 16;
        const auto first_of = [&](int row) { return row < block.size() ? first_keys[block.begin + row] : INT32_MAX; };
        begin = block.begin + row0, end = min(begin + 64, block.end), first = first_of(row0);
        warp_begin = block.begin + warp_row, warp_first = first_of(min(warp_row + 15, max(warp_row, block.size() - 1)));
        for (int r = 0; r < 2; r++) position[r] = block.begin + row(r), first_key[r] = first_of(row(r));
    }
    // The row within the block of this lane's accumulators [.][2*r] and [.][2*r + 1].
    __device__ static int row(int r) { return int(threadIdx.x) / 32 * 16 + 8 * r + int(threadIdx.x) % 32 / 4; }

    // True if no query of the warpgroup sees any of these keys. The tiles that it does see are consecutive.
    __device__ bool see_none_of(TileRows keys) const { return keys.begin >= end || keys.end <= first; }
    // True if every query of the warp sees all of these keys.
    __device__ bool see_all_of(TileRows keys) const { return keys.end - 1 <= warp_begin && keys.begin >= warp_first; }

    template <int N> __device__ void mask(float (&scores)[N / 8][4], TileRows keys) const {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int key = keys.begin + int(threadIdx.x) % 4 * 2 + e % 2;  // for n = 0
            const int first = first_key[e / 2] - key, last = min(position[e / 2], keys.end - 1) - key;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                if (8 * n < first || 8 * n > last) scores[n][e] = -INFINITY;
        }
    }
};

// online_softmax while the product O += P V still runs: the caller rescales O afterwards. Returns true if any row of the warp has a new maximum.
template <int N>
__device__ bool softmax_beside_sums(float (&scores)[N / 8][4], float (&largest)[2], float (&sum)[2], float (&shrink)[2],
                                    float scale_log2) {
    float base[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < N / 8; n++) x = fmaxf(x, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
        x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
        x = fmaxf(x * scale_log2, largest[r]);
        base[r] = x == -INFINITY ? 0.0f : x;  // no key so far
        shrink[r] = exp2_approx(largest[r] - base[r]);
        sum[r] *= shrink[r];
        grown |= x > largest[r];
        largest[r] = x;
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            scores[n][e] = exp2_approx(fmaf(scores[n][e], scale_log2, -base[e / 2]));
            sum[e / 2] += scores[n][e];
        }
    return __any_sync(all_lanes, grown);
}
template <int D> __device__ void rescale(float (&out)[D / 8][4], const float (&shrink)[2]) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[n][e] *= shrink[e / 2];
}

// Transposes a 4 x 4 matrix among four lanes t = 0 ... 3: lane t enters with word t of four vectors, and leaves with vector t.
__device__ inline void transpose_in_quad(uint32_t (&x)[4]) {
    const int t = int(threadIdx.x) % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(i & bit)) {
                uint32_t &lower = x[i], &upper = x[i + bit];
                const uint32_t other = __shfl_xor_sync(all_lanes, t & bit ? lower : upper, bit);
                if (t & bit) lower = other;
                else upper = other;
            }
}
// Finishes one row of a part, whose columns are distributed over four lanes. Merges the row into the running out32 and lse unless this is the first
// part. Writes the result to out32, or after the last part to out, with 16-byte stores.
template <int D>
__device__ void end_row(bf16 *out, float *out32, float *lse, const float (&part)[D / 8][4], int r, float largest, float sum,
                        bool valid, PartOrder order) {
    const int t = int(threadIdx.x) % 4;
    sum = row_sum(sum);
    const bool sees = sum != 0;  // true if the row sees a key of this part
    float weight = 1;
    if (!order.first) weight = merge_lse(lse, largest * ln_2 + logf(sum), valid && sees, t == 0);
    else if (valid && t == 0) *lse = largest * ln_2 + logf(sum);
    const float part_weight = weight / sum;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
        uint32_t rounded[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 x = make_float2(part_weight * part[n + i][2 * r], part_weight * part[n + i][2 * r + 1]);
            float2 *at = reinterpret_cast<float2 *>(out32 + (n + i) * 8 + t * 2);
            if (!order.first && valid) {
                const float2 old = *at;
                x = sees ? make_float2(old.x + (x.x - weight * old.x), old.y + (x.y - weight * old.y)) : old;
            }
            if (!order.last && valid) *at = x;
            rounded[i] = pack_bf16(x.x, x.y);
        }
        if (!order.last) continue;
        transpose_in_quad(rounded);
        if (valid) *reinterpret_cast<uint4 *>(out + (n + t) * 8) = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
    }
}
// Rounds out32 to out for a block whose rows see no key of the last part. All threads of the block call it.
template <int D> __device__ void round_rows(bf16 *out, const float *out32, int rows, size_t stride) {
    for (int i = int(threadIdx.x); i < rows * (D / 8); i += int(blockDim.x)) {
        const size_t at = size_t(i / (D / 8)) * stride + size_t(i % (D / 8)) * 8;
        const float4 a = *reinterpret_cast<const float4 *>(out32 + at), b = *reinterpret_cast<const float4 *>(out32 + at + 4);
        *reinterpret_cast<uint4 *>(out + at) =
            make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
    }
}

// Initialises the mbarriers. Each phase of `full` has one arrival, the producer's, which expects bytes; each phase of `empty` has one arrival per
// consumer warp. Ends with a barrier of the block.
template <int D> __device__ void hopper_init_barriers(typename HopperForward<D>::Shared &s) {
    using Shape = HopperForward<D>;
    if (threadIdx.x == 0) {
        constexpr int warps = 4 * Shape::consumers;
        hopper::init(s.q_full, 1), hopper::init(s.v_landed, 1);
        for (int stage = 0; stage < Shape::stages; stage++) {
            hopper::init(s.k_full[stage], 1), hopper::init(s.v_full[stage], 1);
            hopper::init(s.k_empty[stage], warps), hopper::init(s.v_empty[stage], warps);
        }
        hopper::fence_barriers();
    }
    __syncthreads();
}

// Loads the queries and all tiles of keys. Runs in one warp.
template <int D>
__device__ void hopper_produce(typename HopperForward<D>::Shared &s, const CUtensorMap &q_map, const CUtensorMap &k_map,
                               const CUtensorMap &v_map, int q_row, int q_panel, int k_panel, Tiles tiles) {
    using Shape = HopperForward<D>;
    const int lane = int(threadIdx.x) % 32;
    const auto load = [&](auto &to, const CUtensorMap &map, int row, int panel, hopper::Barrier &barrier) {
        if (lane == 0) hopper::arrive_and_expect(barrier, to.bytes), hopper::tma_load(to.data, map, 0, row, panel, barrier);
    };
    load(s.q, q_map, q_row, q_panel, s.q_full);
    hopper::Place<Shape::stages> at;
    unsigned landed = 0;
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile), at.advance()) {
        hopper::wait(s.k_empty[at.stage], at.parity ^ 1);
        load(s.k[at.stage], k_map, tile.row, k_panel, s.k_full[at.stage]);
        hopper::wait(s.v_empty[at.stage], at.parity ^ 1);
        if (tile.size() == Shape::keys) {
            load(s.v[at.stage], v_map, tile.row, k_panel, s.v_full[at.stage]);
            continue;
        }
        // The rows after a short tile hold other keys or were never written. Their P is 0, but 0 * NaN is NaN, so the rows are cleared.
        load(s.v[at.stage], v_map, tile.row, k_panel, s.v_landed);
        hopper::wait(s.v_landed, landed);
        landed ^= 1;
        s.v[at.stage].clear_from(tile.size(), lane);
        hopper::fence_async();
        __syncwarp();
        if (lane == 0) hopper::arrive(s.v_full[at.stage]);
    }
}

__device__ inline void hopper_release(hopper::Barrier &empty) {  // one arrival per warp
    if (threadIdx.x % 32 == 0) hopper::arrive(empty);
}

// Attention of 64 queries to all tiles of keys. Runs in each consumer warpgroup.
template <int D>
__device__ void hopper_consume(typename HopperForward<D>::Shared &s, bf16 *out_rows, float *out32, float *lse,
                               const int32_t *first_keys, const AttentionShape &shape, TileRows block, unsigned h, Tiles tiles,
                               PartOrder order) {
    using Shape = HopperForward<D>;
    constexpr int N = Shape::keys;
    const int group = int(threadIdx.x) / 128;
    const float scale_log2 = shape.scale * log2_e;
    const HopperQueries queries(block, first_keys);
    // Turns: named barrier 1 + g lets group g issue its products. A group has one turn per tile.
    const int turn = 1 + group, next_turn = 1 + (group + 1) % Shape::consumers;
    const auto take_turn = [&] { bar_sync(turn, 256); };
    const auto end_turn = [&] { bar_arrive(next_turn, 256); };
    hopper::Place<Shape::stages> at;
    const auto skip = [&] {
        take_turn();
        end_turn();
        hopper::wait(s.k_full[at.stage], at.parity);
        hopper_release(s.k_empty[at.stage]);
        hopper::wait(s.v_full[at.stage], at.parity);
        hopper_release(s.v_empty[at.stage]);
        at.advance();
    };
    float out[1][D / 8][4] = {}, largest[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {}, shrink[2];
    float scores[1][N / 8][4];
    uint32_t p[1][N / 16][4];
    const auto softmax = [&](TileRows tile) {
        if (tile.size() < N || !queries.see_all_of(tile)) queries.template mask<N>(scores[0], tile);
        return softmax_beside_sums<N>(scores[0], largest[0], sum[0], shrink, scale_log2);
    };

    if (group == Shape::consumers - 1) bar_arrive(1, 256);  // grants the first turn
    TileRows tile = tiles.front();
    for (; !tile.empty() && queries.see_none_of(tile); tile = tiles.after(tile)) skip();
    if (!tile.empty()) {
        hopper::wait(s.q_full, 0);
        hopper::wait(s.k_full[at.stage], at.parity);
        take_turn();
        hopper::start_product_transposed<N>(scores[0], s.q, group * 64, s.k[at.stage]);
        end_turn();
        hopper::wgmma_wait<0>();
        hopper::pin(scores[0]);
        hopper_release(s.k_empty[at.stage]);
        softmax(tile);
        round_to_operand<1, N>(p, scores);
        hopper::Place<Shape::stages> before = at;
        at.advance();
        for (tile = tiles.after(tile); !tile.empty() && !queries.see_none_of(tile); tile = tiles.after(tile)) {
            hopper::wait(s.k_full[at.stage], at.parity);
            take_turn();
            hopper::pin(p[0]), hopper::pin(out[0]);
            hopper::start_product_transposed<N>(scores[0], s.q, group * 64, s.k[at.stage]);
            hopper::wait(s.v_full[before.stage], before.parity);
            hopper::start_product_add<N, D>(out[0], p[0], s.v[before.stage]);
            end_turn();
            hopper::wgmma_wait<1>();
            hopper::pin(scores[0]);
            hopper_release(s.k_empty[at.stage]);
            const bool grown = softmax(tile);
            hopper::wgmma_wait<0>();
            hopper::pin(out[0]), hopper::pin(p[0]);
            hopper_release(s.v_empty[before.stage]);
            if (grown) rescale<D>(out[0], shrink);
            round_to_operand<1, N>(p, scores);
            before = at;
            at.advance();
        }
        hopper::wait(s.v_full[before.stage], before.parity);
        hopper::start_product_add<N, D>(out[0], p[0], s.v[before.stage]);
        hopper::wgmma_wait<0>();
        hopper::pin(out[0]);
        hopper_release(s.v_empty[before.stage]);
        for (; !tile.empty(); tile = tiles.after(tile)) skip();
    }
    if (group == 0) bar_sync(1, 256);  // completes the last end_turn()

#pragma unroll
    for (int r = 0; r < 2; r++) {
        const size_t row = size_t(block.row + queries.row(r)), at = (row * shape.H + h) * D;
        end_row<D>(out_rows + at, out32 + at, lse + h * shape.T + row, out[0], r, largest[0][r], sum[0][r],
                   queries.row(r) < block.size(), order);
    }
}

template <int D>
__global__ void __launch_bounds__(HopperForward<D>::threads, 1)
    attention_forward_hopper_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                                    const __grid_constant__ CUtensorMap v_map, bf16 *out, float *out32, float *lse,
                                    PartOrder order, const int32_t *first_key, TileCuts cuts, AttentionShape shape,
                                    const __grid_constant__ Pieces q_pieces, const __grid_constant__ Pieces k_pieces) {
    using Shape = HopperForward<D>;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned h = blockIdx.x, kv = h / shape.group();
    if (threadIdx.x < 32) {
        const BlockRows block =
            nth_block(q_pieces, cuts, blockIdx.y, Shape::queries, true);  // long tasks go first: late queries see most keys
        if (threadIdx.x == 0) s.block = block;
    }
    hopper_init_barriers<D>(s);
    const TileRows block = s.block;
    if (block.empty()) return;
    const Tiles tiles{k_pieces, first_key[block.begin], block.end, Shape::keys};
    if (Tiles(tiles).front().empty()) {
        const size_t at = (size_t(block.row) * shape.H + h) * D;
        if (order.last) round_rows<D>(out + at, out32 + at, block.size(), shape.H * D);
        return;
    }
    if (threadIdx.x / 128 == Shape::consumers) {
        hopper::give_registers_down_to<Shape::of_producer>();
        if (threadIdx.x / 32 % 4 == 0)
            hopper_produce<D>(s, q_map, k_map, v_map, block.row, int(h) * (D / 64), int(kv) * (D / 64), tiles);
    } else {
        hopper::take_registers_up_to<Shape::of_consumer>();
        hopper_consume<D>(s, out, out32, lse, first_key, shape, block, h, tiles, order);
    }
}

}  // namespace CUDA_BACKEND
}  // namespace attention
