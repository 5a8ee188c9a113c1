// Attention forward in bf16. Contract and formulas: llmc/ops/attention.h. A query at position p sees the keys first_key[p] .. p; this
// rule covers all kinds of masks. All versions are the op's middle part: they merge the attention of some queries to some keys into
// (out32, lse).
//
// Timed with one document of 4096 tokens, 32 query heads, 8 key heads, D 128. FLOP are counted as 4 D for each visible pair of query
// and key and each head, half of T^2 pairs for one document: 137 GFLOP. Q, K, V and the float result have 117 MB, so there are 1200
// FLOP per byte; if each is read about once, arithmetic is the limit. No version writes scores to memory; the versions differ in the
// number of queries that share one read of K and V.
//
//   version                          K and V are   FLOP per byte   limited by
//                                    read for      of K and V
//   1 a thread per query and head    one query     2/3             adding to a row in memory for every key: 8 D bytes per 6 D FLOP
//   2 a warp per query and head      one query     1               five shuffles, two exponentials for D / 16 multiply-adds a lane
//   3 16 x 16 scores, float          16 queries    16              two loads from shared memory for each multiply-add
//   4 mma.sync, one stage            128 queries   128             waiting: no products while a tile of keys arrives
//   5 two stages                     128 queries   128             mma.sync and the exponentials (wgmma would be next)
//   6 shipped: one part, no merging  128 queries   128             the same; with one part no floats in memory
//                                                                  (on Hopper: attention_hopper 4)
#include "attention_common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a thread per query and head ------------------------------------------------------------------------------------
//
// The definition, in two passes over the keys: the first computes lse, the second recomputes each score and sums P V in memory,
// because a row is too long for the registers of one thread. Neighbouring threads are at the same key most of the time.

constexpr int naive_threads = 64;

__global__ void attention_forward_kernel1(float *out32, float *lse, Part part) {
    const TileRows block = nth_block(part.q_pieces, part.cuts, blockIdx.x, naive_threads);
    const int i = threadIdx.x, position = block.begin + i;
    const bool valid = i < block.size();
    const int first = valid ? part.first_key[position] : 0, end = valid ? position + 1 : 0;
    const size_t h = blockIdx.y, row = size_t(block.row + i);
    const auto score = [&](size_t key) { return part.shape.scale * dot(part.query(row, h), part.key(key, h), part.shape.D); };

    float largest = -INFINITY, sum = 0;
    for_each_row(part.k_pieces, first, end, [&](size_t key) {
        const float s = score(key), before = largest;
        largest = fmaxf(largest, s);
        sum = sum * expf(before - largest) + expf(s - largest);
    });
    const float part_lse = largest + logf(sum);
    const float weight = merge_lse(lse + h * part.shape.T + row, part_lse, sum > 0, true);
    if (sum == 0) return;  // the query sees no key of this part
    float *out = out32 + (row * part.shape.H + h) * part.shape.D;
    for (size_t d = 0; d < part.shape.D; d++) out[d] *= 1 - weight;
    for_each_row(part.k_pieces, first, end, [&](size_t key) {
        const float p = weight * expf(score(key) - part_lse);
        const bf16 *value = part.value(key, h);
        for (size_t d = 0; d < part.shape.D; d++) out[d] += p * float(value[d]);
    });
}

void attention_forward_part1(CudaBf16 dev, float *out32, float *lse, const Part &part) {
    launch(dev, attention_forward_kernel1, Grid{count_blocks(part.q_pieces, part.cuts, naive_threads), part.shape.H},
           naive_threads, 0, out32, lse, part);
}

// ---- version 2: a warp per query and head --------------------------------------------------------------------------------------
//
// One pass with the online softmax: a larger score rescales the sum relative to the old maximum. The registers of 32 lanes hold the
// row of the sum, and each load of K and V reads 32 neighbouring elements. A dot product ends with a sum over the warp.

constexpr int warps = 4;

__global__ void attention_forward_kernel2(float *out32, float *lse, Part part) {
    const TileRows block = nth_block(part.q_pieces, part.cuts, blockIdx.x, warps);
    const int i = int(threadIdx.x) / 32, position = block.begin + i;
    if (i >= block.size()) return;
    const size_t h = blockIdx.y, row = size_t(block.row + i);
    const WarpRow query = WarpRow::load(part.query(row, h), part.shape.D);
    WarpRow out = {};
    float largest = -INFINITY, sum = 0;
    for_each_row(part.k_pieces, part.first_key[position], position + 1, [&](size_t key) {
        const float score = part.shape.scale * query.dot(WarpRow::load(part.key(key, h), part.shape.D)), before = largest;
        largest = fmaxf(largest, score);
        const float shrink = expf(before - largest), p = expf(score - largest);
        sum = sum * shrink + p;
        out.add(p, WarpRow::load(part.value(key, h), part.shape.D), shrink);
    });
    if (sum == 0) return;
    const float weight = merge_lse(lse + h * part.shape.T + row, largest + logf(sum), true, threadIdx.x % 32 == 0);
    float *to = out32 + (row * part.shape.H + h) * part.shape.D;
    out.for_each(part.shape.D, [&](size_t d, float value) { to[d] += weight * (value / sum - to[d]); });
}

void attention_forward_part2(CudaBf16 dev, float *out32, float *lse, const Part &part) {
    launch(dev, attention_forward_kernel2, Grid{count_blocks(part.q_pieces, part.cuts, warps), part.shape.H}, warps * 32, 0,
           out32, lse, part);
}

// ---- version 3: 16 x 16 scores in float ----------------------------------------------------------------------------------------
//
// The shipped kernel for float (llmc/ops/attention_f32.cuh): 16 queries share tiles of 16 keys in shared memory, without tensor cores.

void attention_forward_part3(CudaBf16 dev, float *out32, float *lse, const Part &part) {
    launch(dev, attention::attention_forward_kernel3<bf16>,
           Grid{count_blocks(part.q_pieces, part.cuts, plain_rows), part.shape.H}, plain_threads, sizeof(PlainForward), out32,
           lse, part, part.q_pieces, part.k_pieces);
}

// ---- version 4: mma.sync, one stage --------------------------------------------------------------------------------------------
//
// The scores are accumulators in registers; rounded to bf16 they become the left operand of P V (llmc/ops/attention_tile.cuh). Shared
// memory has one tile of keys, so a block waits for the tile, multiplies it, and only then loads the next one. Every score goes
// through the mask.

template <int width> struct OneStage {
    Tile<ForwardShape<width>::queries, width> q;
    int first_key[ForwardShape<width>::queries];
    Tile<ForwardShape<width>::keys, width> k, v;
};

template <int width>
__global__ void __launch_bounds__(ForwardShape<width>::threads) attention_forward_kernel4(float *out32, float *lse, Part part) {
    using Shape = ForwardShape<width>;
    constexpr int m = Shape::m, N = Shape::keys;
    auto &s = shared_mem<OneStage<width>>();
    const size_t h = blockIdx.y;
    const TileRows block = nth_block(part.q_pieces, part.cuts, blockIdx.x, Shape::queries);
    Tiles tiles{part.k_pieces, part.first_key[block.begin], block.end, N};
    TileRows tile = tiles.front();
    if (tile.empty()) return;
    load<Shape::threads>(s.q, {part.query(0, h), part.q.stride}, block, part.shape.D);
    const Queries<m> queries(block, s.first_key, part.first_key);
    float out[m][width / 8][4] = {}, largest[m][2], sum[m][2] = {};
    for (auto &pair : largest) pair[0] = pair[1] = -INFINITY;
    for (; !tile.empty(); tile = tiles.after(tile)) {
        load<Shape::threads>(s.k, {part.key(0, h), part.k.stride}, tile, part.shape.D);
        load<Shape::threads>(s.v, {part.value(0, h), part.v.stride}, tile, part.shape.D);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        float p[m][N / 8][4];
        uint32_t rounded[m][N / 16][4];
        product_transposed(p, s.q, queries.row0, s.k);
        queries.template mask<N>(p, tile);
        online_softmax<m, N, width>(p, out, largest, sum, part.shape.scale * log2_e);
        round_to_operand<m, N>(rounded, p);
        product_add<m, N, width>(out, rounded, s.v);
        __syncthreads();  // all are done with the tile
    }
#pragma unroll
    for (int i = 0; i < m; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i_row = queries.row(i, r);
            const size_t row = size_t(block.row + i_row);
            merge_row<width>(out32 + (row * part.shape.H + h) * part.shape.D, lse + h * part.shape.T + row, out[i], r,
                             largest[i][r], sum[i][r], part.shape.D, i_row < block.size());
        }
}

void attention_forward_part4(CudaBf16 dev, float *out32, float *lse, const Part &part) {
    with_width(part.shape.D, [&](auto width) {
        using Shape = ForwardShape<width.value>;
        launch(dev, attention_forward_kernel4<width.value>,
               Grid{count_blocks(part.q_pieces, part.cuts, Shape::queries), part.shape.H}, Shape::threads,
               sizeof(OneStage<width.value>), out32, lse, part);
    });
}

// ---- version 5: two stages -----------------------------------------------------------------------------------------------------
//
// The next tile of keys is loaded during the products of the current one. Fully visible tiles skip the mask, and fully masked tiles are
// skipped as a whole. The blocks with the longest rows start first.

void attention_forward_part5(CudaBf16 dev, float *out32, float *lse, const Part &part) { add_part(dev, out32, lse, part); }

// ---- version 6: one part, no merging -------------------------------------------------------------------------------------------
//
// Parts are merged in floats. These are cleared first, read and written by each part, and rounded at the end: 18 bytes per element of the result.
// On a rank with all keys the kernel writes bf16 directly, 2 bytes. For documents of 1k tokens the difference is a third of the time.

template <class X> struct AttentionForward : AttentionRow {
    DeviceArray<bf16> out;
    DeviceArray<float> out32, lse;
    size_t version = 0;  // of the last run

    explicit AttentionForward(const Sizes &sizes) : AttentionRow(sizes), out(T * H * D), out32(T * H * D), lse(H * T) {
        begin_sums(CudaBf16{}, out32.data(), lse.data(), shape);
    }

    static constexpr void (*versions[])(CudaBf16, float *out32, float *lse, const Part &) = {
        attention_forward_part1, attention_forward_part2, attention_forward_part3, attention_forward_part4,
        attention_forward_part5};

    static constexpr size_t last_version = std::size(versions) + 1;
    bool runs(size_t v) const { return v < last_version || ranks.size() == 1; }
    void run(CudaBf16 dev, size_t v) {
        version = v;
        if (v > std::size(versions)) return attention_forward(dev, out.data(), out32.data(), lse.data(), part(0, 0), ranks[0]);
        const WithoutHopper others;
        for_each_part([&](const Part &part, size_t q_row, size_t) {
            versions[v - 1](dev, out32.data() + q_row * H * D, lse.data() + q_row, part);
        });
    }
    void check(Check &check) const {
        const AttentionReference ref = attention_reference(problem, widen(in.qkv));
        std::vector<float> got_lse;
        const auto lse_values = lse.values();
        for (size_t h = 0; h < H; h++) {
            const auto row = from_ranks(std::vector<float>(&lse_values[h * T], &lse_values[h * T] + T), 1);
            got_lse.insert(got_lse.end(), row.begin(), row.end());
        }
        const bool tensor_cores = version >= 4;
        const double lse_off = tensor_cores ? lse_error<bf16>(problem, ref) : lse_error<float>(problem, ref);
        check("lse", got_lse, ref.lse, lse_off);
        const bool rounded = version > std::size(versions);
        const auto got = rounded ? widen(from_ranks(out.values(), H * D)) : widen(from_ranks(out32.values(), H * D));
        check("out", relative(got, ref.out_size), relative(ref.out, ref.out_size),
              2 * lse_off + (tensor_cores ? sum_error_of<bf16>(T) + unit_roundoff<bf16> : rounded_sum_error(T)) +
                  (rounded ? unit_roundoff<bf16> : 0));
    }
    Work work() const { return {.flops = 4 * pairs() * double(H * D)}; }
};

static const Ladder<AttentionForward, bf16> ladder(
    {.name = "attention_forward",
     .sizes = attention_sizes,
     .checked = attention_checked,
     .ideas = {"a thread per query and head, two passes", "a warp per query and head, online softmax",
               "16 x 16 scores in shared memory, float", "mma.sync, one tile of keys at a time", "mma.sync, cp.async, two stages",
               "shipped: one part, no merging"}});

}  // namespace CUDA_BACKEND::workshop
