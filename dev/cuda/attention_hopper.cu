// attention_forward with Hopper's asynchronous instructions, for head sizes 64 and 128: formulas as in
// attention_forward.cu. Contract: llmc/ops/attention.h
//
// Timed with one document of 4096 tokens, 32 query heads, 8 key heads, D 128. With wgmma (hopper_matmul) the products of a tile
// of 64 queries and 128 keys, 512 * 64 D FLOP, take the tensor cores 8 D cycles: 1024 at D 128 and 512 at D 64. The 8192
// exponentials of the tile take 512 cycles, because an SM has four special-function units that compute 4 each per cycle. A fast
// kernel does both at once; version 1 does one after the other, and the other versions overlap them. For sm_90a: make try runs
// this ladder in the PTX interpreter.
//
// Each warp holds 16 of the 64 rows of a wgmma's accumulators, in the layout of mma.m16n8k16. So the mask, softmax, rounding and
// tiles come from the shipped kernel (llmc/ops/attention_hopper.cuh), and P, rounded in registers, is already operand A of the
// second product.
#include "../../llmc/ops/attention_hopper.cuh"
#include "attention_common.h"

namespace CUDA_BACKEND::workshop {
using hopper::Barrier;

constexpr int keys = 128;  // per tile
constexpr PartOrder whole{true, true};
constexpr float *no_sums = nullptr;  // float32 sums between parts: there is only one part

// The registers of a warpgroup for its 64 queries.
template <int D> struct Rows {
    HopperQueries queries;
    float scale_log2, out[1][D / 8][4] = {}, largest[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {}, shrink[2];
    float scores[1][keys / 8][4];
    uint32_t p[1][keys / 16][4];

    __device__ Rows(TileRows block, const int32_t *first_key, const AttentionShape &shape)
        : queries(block, first_key), scale_log2(shape.scale * log2_e) {}

    // Issues S = Q K^T as one group of wgmmas, and returns before the group has ended.
    template <class Queries> __device__ void issue_scores(Queries &q, int row0, hopper::SwizzledTile<keys, D> &k) {
        hopper::pin(scores[0]);
        hopper::wgmma_fence();
        hopper::product_transposed<keys>(scores[0], q, row0, k);
        hopper::wgmma_commit();
    }
    // Issues O += P V in the same way.
    __device__ void issue_values(hopper::SwizzledTile<keys, D> &v) {
        hopper::pin(p[0]), hopper::pin(out[0]);
        hopper::wgmma_fence();
        hopper::product_add<keys, D>(out[0], p[0], v);
        hopper::wgmma_commit();
    }
    __device__ void wait_for_all() {
        hopper::wgmma_wait<0>();
        hopper::pin(scores[0]), hopper::pin(out[0]), hopper::pin(p[0]);
    }
    // Replaces the scores by exponentials. Returns true if a row of the warp has a new maximum, so O must be rescaled.
    __device__ bool softmax(TileRows tile) {
        if (tile.size() < keys || !queries.see_all_of(tile)) queries.template mask<keys>(scores[0], tile);
        return softmax_beside_sums<keys>(scores[0], largest[0], sum[0], shrink, scale_log2);
    }
    __device__ void write(bf16 *to, float *lse, TileRows block, unsigned h, const AttentionShape &shape) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const size_t row = size_t(block.row + queries.row(r));
            end_row<D>(to + (row * shape.H + h) * D, no_sums, lse + h * shape.T + row, out[0], r, largest[0][r], sum[0][r],
                       queries.row(r) < block.size(), whole);
        }
    }
};

// ---- version 1: wgmma, one step after the other --------------------------------------------------------------------------------
//
// A warpgroup owns 64 queries. For each tile of keys, thread 0 starts the copies of K and V, all threads wait for them, and then
// come S = Q K^T, softmax, O += P V, and a barrier, because the next copies overwrite K and V. At any moment a block uses only
// one of memory, tensor cores and special-function units. The others idle, unless a second block on the SM has work for them.
//
// Phases: `full` completes a phase for each tile, so tile n belongs to phase n, and a thread waits for parity n % 2. If a thread
// always waited for parity 0, it would find phase 0 complete when it needs tile 1, and would read the previous tile.
//
// Short tiles: TMA copies whole boxes, so the rows after the last key hold keys of other documents, or were never written. Their
// P is 0, but 0 * NaN is NaN, so a warp clears these rows. It stores through the generic proxy, hence fence_async and a barrier.

template <int D_> struct OneGroup {
    static constexpr int D = D_, queries = 64, threads = 128;
    struct Shared {
        hopper::SwizzledTile<queries, D> q;
        hopper::SwizzledTile<keys, D> k, v;
        Barrier q_full, full;
    };
};

template <int D>
__global__ void __launch_bounds__(OneGroup<D>::threads, 1)
    attention_hopper_kernel1(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map, bf16 *out, float *lse, const int32_t *first_key,
                             TileCuts cuts, AttentionShape shape, const __grid_constant__ Pieces q_pieces,
                             const __grid_constant__ Pieces k_pieces) {
    auto &s = shared_mem<typename OneGroup<D>::Shared>();
    const unsigned h = blockIdx.x, kv = h / shape.group();
    const TileRows block = nth_block(q_pieces, cuts, blockIdx.y, OneGroup<D>::queries, true);
    Tiles tiles{k_pieces, first_key[block.begin], block.end, keys};
    if (threadIdx.x == 0) {
        hopper::init(s.q_full, 1), hopper::init(s.full, 1);
        hopper::fence_barriers();
        hopper::arrive_and_expect(s.q_full, s.q.bytes);
        hopper::tma_load(s.q.data, q_map, 0, block.row, int(h) * (D / 64), s.q_full);
    }
    __syncthreads();
    hopper::wait(s.q_full, 0);
    Rows<D> rows(block, first_key, shape);
    unsigned parity = 0;
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile)) {
        if (threadIdx.x == 0) {
            hopper::arrive_and_expect(s.full, s.k.bytes + s.v.bytes);
            hopper::tma_load(s.k.data, k_map, 0, tile.row, int(kv) * (D / 64), s.full);
            hopper::tma_load(s.v.data, v_map, 0, tile.row, int(kv) * (D / 64), s.full);
        }
        hopper::wait(s.full, parity);
        parity ^= 1;
        if (tile.size() < keys) {
            if (threadIdx.x < 32) s.v.clear_from(tile.size(), int(threadIdx.x));
            hopper::fence_async();
            __syncthreads();
        }
        rows.issue_scores(s.q, 0, s.k);
        rows.wait_for_all();
        if (rows.softmax(tile)) rescale<D>(rows.out[0], rows.shrink);
        round_to_operand<1, keys>(rows.p, rows.scores);
        rows.issue_values(s.v);
        rows.wait_for_all();
        __syncthreads();  // all warps are done with K and V
    }
    rows.write(out, lse, block, h, shape);
}

template <class Shape, class Kernel, class... Out>
void start(CudaBf16 dev, Kernel kernel, const AttentionInputs<bf16> &in, Pieces pieces, Out... to) {
    constexpr int D = Shape::D;
    const size_t H = in.shape.H, KV = in.shape.KV, T = in.shape.T;
    launch(dev, kernel, Grid{H, count_blocks(pieces, in.cuts, Shape::queries)}, Shape::threads, sizeof(typename Shape::Shared),
           hopper::map_of(in.q.data, T, H * D, in.q.stride, Shape::queries, D),
           hopper::map_of(in.k.data, T, KV * D, in.k.stride, keys, D), hopper::map_of(in.v.data, T, KV * D, in.v.stride, keys, D),
           to..., in.first_key, in.cuts, in.shape, pieces, pieces);
}

void attention_hopper1(CudaBf16 dev, bf16 *out, float *lse, const AttentionInputs<bf16> &in, Pieces pieces) {
    if (in.shape.D == 64) start<OneGroup<64>>(dev, attention_hopper_kernel1<64>, in, pieces, out, lse);
    else start<OneGroup<128>>(dev, attention_hopper_kernel1<128>, in, pieces, out, lse);
}

// ---- version 2: a producer, and consumers that share keys ----------------------------------------------------------------------
//
// One producer warp fetches tiles (hopper_produce), up to two stages ahead. Two consumer warpgroups at D 128, or three at D 64,
// have 64 queries each. A tile of keys is read from L2 once for 128 or 192 queries, so the number of sectors falls to a half or
// a third. No barrier of the block is left: K and V of a stage each have an mbarrier `full`, and an mbarrier `empty` at which each
// consumer warp arrives when its product has ended. S and O need more registers than an even share, hence setmaxnreg
// (hopper_matmul 3).
//
// A consumer also releases the tiles in which the mask hides every key from its queries.
//
// While one consumer computes exponentials, another may multiply, but only if they happen to be out of step.

__device__ void release(Barrier &empty) {  // one arrival per warp
    if (threadIdx.x % 32 == 0) hopper::arrive(empty);
}

template <int D> __device__ void consume_in_turn(typename HopperForward<D>::Shared &s, Rows<D> &rows, Tiles tiles) {
    const int row0 = int(threadIdx.x) / 128 * 64;
    hopper::Place<HopperForward<D>::stages> at;
    hopper::wait(s.q_full, 0);
    for (TileRows tile = tiles.front(); !tile.empty(); tile = tiles.after(tile), at.advance()) {
        const bool seen = !rows.queries.see_none_of(tile);
        hopper::wait(s.k_full[at.stage], at.parity);
        if (seen) {
            rows.issue_scores(s.q, row0, s.k[at.stage]);
            rows.wait_for_all();
        }
        release(s.k_empty[at.stage]);
        if (seen) {
            if (rows.softmax(tile)) rescale<D>(rows.out[0], rows.shrink);
            round_to_operand<1, keys>(rows.p, rows.scores);
        }
        hopper::wait(s.v_full[at.stage], at.parity);
        if (seen) {
            rows.issue_values(s.v[at.stage]);
            rows.wait_for_all();
        }
        release(s.v_empty[at.stage]);
    }
}

// The block of versions 2 and 3. They differ in consume(shared memory, rows, tiles).
template <int D, class Consume>
__device__ void produce_and_consume(const CUtensorMap &q_map, const CUtensorMap &k_map, const CUtensorMap &v_map, bf16 *out,
                                    float *lse, const int32_t *first_key, const TileCuts &cuts, const AttentionShape &shape,
                                    const Pieces &q_pieces, const Pieces &k_pieces, Consume consume) {
    using Shape = HopperForward<D>;
    auto &s = shared_mem<typename Shape::Shared>();
    const unsigned h = blockIdx.x, kv = h / shape.group();
    const TileRows block = nth_block(q_pieces, cuts, blockIdx.y, Shape::queries, true);
    const Tiles tiles{k_pieces, first_key[block.begin], block.end, keys};
    hopper_init_barriers<D>(s);
    if (threadIdx.x / 128 == Shape::consumers) {
        hopper::give_registers_down_to<Shape::of_producer>();
        if (threadIdx.x / 32 % 4 == 0)
            hopper_produce<D>(s, q_map, k_map, v_map, block.row, int(h) * (D / 64), int(kv) * (D / 64), tiles);
    } else {
        hopper::take_registers_up_to<Shape::of_consumer>();
        Rows<D> rows(block, first_key, shape);
        consume(s, rows, tiles);
        rows.write(out, lse, block, h, shape);
    }
}

template <int D>
__global__ void __launch_bounds__(HopperForward<D>::threads, 1)
    attention_hopper_kernel2(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map, bf16 *out, float *lse, const int32_t *first_key,
                             TileCuts cuts, AttentionShape shape, const __grid_constant__ Pieces q_pieces,
                             const __grid_constant__ Pieces k_pieces) {
    produce_and_consume<D>(q_map, k_map, v_map, out, lse, first_key, cuts, shape, q_pieces, k_pieces,
                           [](auto &s, Rows<D> &rows, const Tiles &tiles) { consume_in_turn<D>(s, rows, tiles); });
}

void attention_hopper2(CudaBf16 dev, bf16 *out, float *lse, const AttentionInputs<bf16> &in, Pieces pieces) {
    if (in.shape.D == 64) start<HopperForward<64>>(dev, attention_hopper_kernel2<64>, in, pieces, out, lse);
    else start<HopperForward<128>>(dev, attention_hopper_kernel2<128>, in, pieces, out, lse);
}

// ---- version 3: the next scores before this softmax ----------------------------------------------------------------------------
//
// Exponentials and products can also overlap within a consumer, because S of the next tile does not depend on the current tile:
//
//     issue S(n+1), O += P(n) V(n)  |  wait for S(n+1), softmax: P(n+1)  |  wait for O, rescale O
//
// The tensor cores compute P(n) V(n) during the exponentials of tile n+1. Groups of wgmma complete in the order in which they
// were committed, so with at most one group open S is complete. O must not be touched until its product has ended, so softmax
// keeps the factors, and O is rescaled afterwards.
//
// Registers: S(n+1), P(n) and O are alive at once. That is why a consumer has 64 queries and not 128.

template <int D> __device__ void consume_ahead(typename HopperForward<D>::Shared &s, Rows<D> &rows, Tiles tiles) {
    const int row0 = int(threadIdx.x) / 128 * 64;
    hopper::Place<HopperForward<D>::stages> at;
    const auto skip = [&] {
        hopper::wait(s.k_full[at.stage], at.parity);
        release(s.k_empty[at.stage]);
        hopper::wait(s.v_full[at.stage], at.parity);
        release(s.v_empty[at.stage]);
        at.advance();
    };
    hopper::wait(s.q_full, 0);
    TileRows tile = tiles.front();
    for (; !tile.empty() && rows.queries.see_none_of(tile); tile = tiles.after(tile)) skip();
    if (tile.empty()) return;
    hopper::wait(s.k_full[at.stage], at.parity);
    rows.issue_scores(s.q, row0, s.k[at.stage]);
    rows.wait_for_all();
    release(s.k_empty[at.stage]);
    rows.softmax(tile);
    round_to_operand<1, keys>(rows.p, rows.scores);
    hopper::Place<HopperForward<D>::stages> before = at;
    at.advance();
    for (tile = tiles.after(tile); !tile.empty() && !rows.queries.see_none_of(tile); tile = tiles.after(tile)) {
        hopper::wait(s.k_full[at.stage], at.parity);
        rows.issue_scores(s.q, row0, s.k[at.stage]);
        hopper::wait(s.v_full[before.stage], before.parity);
        rows.issue_values(s.v[before.stage]);
        hopper::wgmma_wait<1>();
        hopper::pin(rows.scores[0]);
        release(s.k_empty[at.stage]);
        const bool grown = rows.softmax(tile);
        hopper::wgmma_wait<0>();
        hopper::pin(rows.out[0]), hopper::pin(rows.p[0]);
        release(s.v_empty[before.stage]);
        if (grown) rescale<D>(rows.out[0], rows.shrink);
        round_to_operand<1, keys>(rows.p, rows.scores);
        before = at;
        at.advance();
    }
    hopper::wait(s.v_full[before.stage], before.parity);
    rows.issue_values(s.v[before.stage]);
    rows.wait_for_all();
    release(s.v_empty[before.stage]);
    for (; !tile.empty(); tile = tiles.after(tile)) skip();
}

template <int D>
__global__ void __launch_bounds__(HopperForward<D>::threads, 1)
    attention_hopper_kernel3(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map, bf16 *out, float *lse, const int32_t *first_key,
                             TileCuts cuts, AttentionShape shape, const __grid_constant__ Pieces q_pieces,
                             const __grid_constant__ Pieces k_pieces) {
    produce_and_consume<D>(q_map, k_map, v_map, out, lse, first_key, cuts, shape, q_pieces, k_pieces,
                           [](auto &s, Rows<D> &rows, const Tiles &tiles) { consume_ahead<D>(s, rows, tiles); });
}

void attention_hopper3(CudaBf16 dev, bf16 *out, float *lse, const AttentionInputs<bf16> &in, Pieces pieces) {
    if (in.shape.D == 64) start<HopperForward<64>>(dev, attention_hopper_kernel3<64>, in, pieces, out, lse);
    else start<HopperForward<128>>(dev, attention_hopper_kernel3<128>, in, pieces, out, lse);
}

// ---- version 4: llmc/ops/attention_hopper.cuh ----------------------------------------------------------------------------------
//
// The consumers take turns issuing products (ping-pong, with named barriers): while one has its turn the others compute
// exponentials, so the overlap no longer depends on chance. A turn costs a bar.sync and a bar.arrive per tile. The counts show
// only this cost; the gain is in the time (docs/attention_hopper.md).

void attention_hopper4(CudaBf16 dev, bf16 *out, float *lse, const AttentionInputs<bf16> &in, Pieces pieces) {
    if (in.shape.D == 64)
        start<HopperForward<64>>(dev, attention_forward_hopper_kernel<64>, in, pieces, out, no_sums, lse, whole);
    else start<HopperForward<128>>(dev, attention_forward_hopper_kernel<128>, in, pieces, out, no_sums, lse, whole);
}

template <class X> struct AttentionHopper : AttentionRow {
    DeviceArray<X> out;
    DeviceArray<float> lse;

    explicit AttentionHopper(const Sizes &sizes) : AttentionRow(sizes), out(T * H * D), lse(H * T) {
        if ((D != 64 && D != 128) || ranks.size() != 1)
            die("head size %zu on %zu ranks\n  fix: head size 64 or 128, on one rank", D, ranks.size());
    }

    static constexpr void (*versions[])(CudaBf16, X *out, float *lse, const AttentionInputs<X> &, Pieces) = {
        attention_hopper1, attention_hopper2, attention_hopper3, attention_hopper4};

    void run(CudaBf16 dev, size_t version) {
        const Part all = part(0, 0);
        versions[version - 1](dev, out.data(), lse.data(), all, all.q_pieces);
    }
    void check(Check &check) const {
        const AttentionReference ref = attention_reference(problem, widen(in.qkv));
        const double lse_off = lse_error<bf16>(problem, ref);
        check("lse", lse.values(), ref.lse, lse_off);
        check("out", relative(widen(out.values()), ref.out_size), relative(ref.out, ref.out_size),
              2 * lse_off + sum_error_of<bf16>(T) + 2 * unit_roundoff<bf16>);
    }
    Work work() const { return {.flops = 4 * pairs() * double(H * D)}; }
};

static const Ladder<AttentionHopper, bf16> ladder(
    {.name = "attention_hopper",
     .sizes = attention_sizes,
     .checked = {{1, 1, 1, 1, 1, 1, 64},
                 {150, 5, 1, 150, 3, 1, 64},
                 {300, 1, 1, 300, 2, 1, 128},
                 {420, 3, 1, 90, 2, 2, 128},
                 {500, 2, 1, 250, 1, 1, 64}},
     .ideas = {"wgmma, one step after the other", "a producer, and consumers that share keys",
               "the next scores before this softmax", "shipped: consumers take turns"}});
}  // namespace CUDA_BACKEND::workshop
