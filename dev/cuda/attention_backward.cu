// Attention backward in bf16. Contract and formulas: llmc/ops/attention.h. All versions are the op's middle part: from lse of
// attention_forward and delta of attention_backward_begin they recompute P and dS, and add the contribution of some queries and some
// keys to dq32, dk32 and dv32. dQ is a sum over keys, dK and dV are sums over queries. Two kernels give every sum one owner and a fixed
// order, without atomics.
//
// Timed with one document of 4096 tokens, 32 query heads, 8 key heads, D 128. FLOP are counted as 10 D for each visible pair of query
// and key and each head, half of T^2 pairs for one document: 344 GFLOP. This is the count for five products; the two kernels compute
// Q K^T and dO V^T twice, so the versions run 14 D. Q, K, V, dO and the float gradients have 185 MB. If each is read about once,
// arithmetic is the limit.
//
//   version                           in dQ: K and V    in dK, dV: Q and dO    limited by
//                                     are read for      are read for
//   1 a thread per row                one query         one key                adding to rows in memory: 24 D bytes for 14 D FLOP
//   2 a warp per row                  one query         one key                twenty shuffles for 7 D / 32 multiply-adds a lane
//   3 16 x 16 scores, float           16 queries        16 keys                two loads from shared memory for each multiply-add
//   4 mma.sync, two stages            64 queries        64 keys                mma.sync and shared memory (wgmma would be next)
//   5 shipped: one part, heads split   64 queries        64 keys                the same; with one part more and equal blocks of keys
//                                                                             (on Hopper: llmc/ops/attention_hopper_backward.cuh)
#include "attention_common.h"

namespace CUDA_BACKEND::workshop {

// The further inputs of the backward pass, and the scores of one pair of query and key. Rows are local rows of queries or of keys.
struct BackwardPart : Part {
    Heads<const bf16> dout;
    const float *lse, *delta;

    __device__ const bf16 *d_out(size_t row, size_t h) const { return dout.data + row * dout.stride + h * shape.D; }
    // P and dS, from q . k and dout . v
    __device__ float2 p_ds(size_t query, size_t h, float qk, float dout_v) const {
        const float p = expf(shape.scale * qk - lse[h * shape.T + query]);
        return {p, p * (dout_v - delta[h * shape.T + query])};
    }
};

// Calls f(head, query) for the heads of the group and the queries that see the key.
template <class F> __device__ void for_each_query(const BackwardPart &part, int position, size_t kv, F f) {
    const int end = first_unseeing(part.first_key, {{position, position + 1, 0}, 0, INT32_MAX, 0}, part.q_pieces);
    for (size_t h = kv * part.shape.group(); h < (kv + 1) * part.shape.group(); h++)
        for_each_row(part.q_pieces, position, end, [&](size_t query) { f(h, query); });
}

// ---- version 1: a thread per row -----------------------------------------------------------------------------------------------
//
// The definition, with a thread per query and head for dQ, and one per key and key head for dK and dV. A row is too long for the
// registers of one thread, so each thread adds to its row in memory.

constexpr int naive_threads = 64;

__device__ float2 p_ds(const BackwardPart &part, size_t query, size_t h, size_t key) {
    return part.p_ds(query, h, dot(part.query(query, h), part.key(key, h), part.shape.D),
                     dot(part.d_out(query, h), part.value(key, h), part.shape.D));
}

__device__ void add(float *row, float factor, const bf16 *other, size_t D) {
    for (size_t d = 0; d < D; d++) row[d] += factor * float(other[d]);
}

__global__ void attention_backward_queries_kernel1(AttentionGrads grads, BackwardPart part) {
    const TileRows block = nth_block(part.q_pieces, part.cuts, blockIdx.x, naive_threads);
    const int position = block.begin + int(threadIdx.x);
    if (position >= block.end) return;
    const size_t h = blockIdx.y, row = size_t(block.row + position - block.begin);
    for_each_row(part.k_pieces, part.first_key[position], position + 1, [&](size_t key) {
        add(grads.dq32 + (row * part.shape.H + h) * part.shape.D, part.shape.scale * p_ds(part, row, h, key).y, part.key(key, h),
            part.shape.D);
    });
}

__global__ void attention_backward_keys_kernel1(AttentionGrads grads, BackwardPart part) {
    const TileRows block = nth_block(part.k_pieces, part.cuts, blockIdx.x, naive_threads);
    const int position = block.begin + int(threadIdx.x);
    if (position >= block.end) return;
    const size_t kv = blockIdx.y, row = size_t(block.row + position - block.begin),
                 out = (row * part.shape.KV + kv) * part.shape.D;
    for_each_query(part, position, kv, [&](size_t h, size_t query) {
        const float2 p = p_ds(part, query, h, row);
        add(grads.dv32 + out, p.x, part.d_out(query, h), part.shape.D);
        add(grads.dk32 + out, part.shape.scale * p.y, part.query(query, h), part.shape.D);
    });
}

void attention_backward_part1(CudaBf16 dev, AttentionGrads grads, const BackwardPart &part) {
    launch(dev, attention_backward_queries_kernel1, Grid{count_blocks(part.q_pieces, part.cuts, naive_threads), part.shape.H},
           naive_threads, 0, grads, part);
    launch(dev, attention_backward_keys_kernel1, Grid{count_blocks(part.k_pieces, part.cuts, naive_threads), part.shape.KV},
           naive_threads, 0, grads, part);
}

// ---- version 2: a warp per row -------------------------------------------------------------------------------------------------
//
// The 32 lanes of a warp share a row: their registers hold the sums, and each load reads 32 neighbouring elements. Both dot products
// of a pair end with a sum over the warp.

constexpr int warps = 4;

__global__ void attention_backward_queries_kernel2(AttentionGrads grads, BackwardPart part) {
    const TileRows block = nth_block(part.q_pieces, part.cuts, blockIdx.x, warps);
    const int position = block.begin + int(threadIdx.x) / 32;
    if (position >= block.end) return;
    const size_t h = blockIdx.y, row = size_t(block.row + position - block.begin), D = part.shape.D;
    const WarpRow q = WarpRow::load(part.query(row, h), D), dout = WarpRow::load(part.d_out(row, h), D);
    WarpRow dq = {};
    for_each_row(part.k_pieces, part.first_key[position], position + 1, [&](size_t key) {
        const WarpRow k = WarpRow::load(part.key(key, h), D), v = WarpRow::load(part.value(key, h), D);
        dq.add(part.p_ds(row, h, q.dot(k), dout.dot(v)).y, k);
    });
    dq.for_each(D, [&](size_t d, float sum) { grads.dq32[(row * part.shape.H + h) * D + d] += part.shape.scale * sum; });
}

__global__ void attention_backward_keys_kernel2(AttentionGrads grads, BackwardPart part) {
    const TileRows block = nth_block(part.k_pieces, part.cuts, blockIdx.x, warps);
    const int position = block.begin + int(threadIdx.x) / 32;
    if (position >= block.end) return;
    const size_t kv = blockIdx.y, row = size_t(block.row + position - block.begin), D = part.shape.D,
                 any_head = kv * part.shape.group();
    const WarpRow k = WarpRow::load(part.key(row, any_head), D), v = WarpRow::load(part.value(row, any_head), D);
    WarpRow dk = {}, dv = {};
    for_each_query(part, position, kv, [&](size_t h, size_t query) {
        const WarpRow q = WarpRow::load(part.query(query, h), D), dout = WarpRow::load(part.d_out(query, h), D);
        const float2 p = part.p_ds(query, h, q.dot(k), dout.dot(v));
        dv.add(p.x, dout);
        dk.add(p.y, q);
    });
    dk.for_each(D, [&](size_t d, float sum) { grads.dk32[(row * part.shape.KV + kv) * D + d] += part.shape.scale * sum; });
    dv.for_each(D, [&](size_t d, float sum) { grads.dv32[(row * part.shape.KV + kv) * D + d] += sum; });
}

void attention_backward_part2(CudaBf16 dev, AttentionGrads grads, const BackwardPart &part) {
    launch(dev, attention_backward_queries_kernel2, Grid{count_blocks(part.q_pieces, part.cuts, warps), part.shape.H}, warps * 32,
           0, grads, part);
    launch(dev, attention_backward_keys_kernel2, Grid{count_blocks(part.k_pieces, part.cuts, warps), part.shape.KV}, warps * 32,
           0, grads, part);
}

// ---- version 3: 16 x 16 scores in float ----------------------------------------------------------------------------------------
//
// The shipped kernel for float (llmc/ops/attention_f32.cuh): 16 rows of queries share tiles of 16 keys in shared memory, or vice versa.

void attention_backward_part3(CudaBf16 dev, AttentionGrads grads, const BackwardPart &part) {
    launch(dev, attention::attention_backward_queries_kernel3<bf16>,
           Grid{count_blocks(part.q_pieces, part.cuts, plain_rows), part.shape.H}, plain_threads, sizeof(PlainShape::Shared),
           grads, part, part.delta, part.lse, part.dout, part.q_pieces, part.k_pieces);
    launch(dev, attention::attention_backward_keys_kernel3<bf16>,
           Grid{count_blocks(part.k_pieces, part.cuts, plain_rows), part.shape.KV}, plain_threads, sizeof(PlainShape::Shared),
           grads, part, part.delta, part.lse, part.dout, part.q_pieces, part.k_pieces);
}

// ---- version 4: mma.sync, two stages -------------------------------------------------------------------------------------------
//
// The changes of versions 4 and 5 of attention_forward in one step: tiles on tensor cores, P and dS in registers between two products,
// and a prefetch of the next tile during the products of the current one.

void attention_backward_part4(CudaBf16 dev, AttentionGrads grads, const BackwardPart &part) {
    float *no_scratch = nullptr;
    attention_backward_part(dev, grads, no_scratch, part, part.delta, part.lse, part.dout.data, part.q_pieces, part.k_pieces);
}

// ---- version 5: one part, heads split -------------------------------------------------------------------------------------------
//
// As in attention_forward 6, the kernel writes each gradient once instead of adding to it. A block of version 4 loops over all query heads of a
// group: with 2 KV heads and 8192 tokens there are 256 blocks, fewer than an H100 runs at a time, so the longest block determines the time. Here the
// heads of a group are split among blocks until there are 1024 blocks, and another kernel adds their sums in a fixed order.

template <class X> struct AttentionBackward : AttentionRow {
    DeviceArray<bf16> dout, out, dqkv;    // (T, H, D) twice, (T, (H+2*KV)*D)
    DeviceArray<float> lse, delta;        // (H, T)
    DeviceArray<float> dq32, dk32, dv32;  // (T, H, D), (T, KV, D) twice
    DeviceArray<float> scratch;           // attention_scratch
    size_t version = 0;                   // of the last run

    explicit AttentionBackward(const Sizes &sizes)
        : AttentionRow(sizes),
          dout(to_ranks(in.dout, H * D)),
          out(T * H * D),
          dqkv(T * (H + 2 * KV) * D),
          lse(H * T),
          delta(H * T),
          dq32(T * H * D),
          dk32(T * KV * D),
          dv32(T * KV * D),
          scratch(attention_scratch(CudaBf16{}, shape)) {
        const CudaBf16 dev{};
        DeviceArray<float> out32(T * H * D);
        begin_sums(dev, out32.data(), lse.data(), shape);
        for_each_part([&](const Part &part, size_t q_row, size_t) {
            add_part(dev, out32.data() + q_row * H * D, lse.data() + q_row, part);
        });
        round_floats(dev, out.data(), out32.data(), T * H * D);
        attention_backward_begin(dev, grads(0, 0), delta.data(), out.data(), dout.data(), shape);
    }

    static constexpr void (*versions[])(CudaBf16, AttentionGrads, const BackwardPart &) = {
        attention_backward_part1, attention_backward_part2, attention_backward_part3, attention_backward_part4};

    AttentionGrads grads(size_t q_row, size_t k_row) {
        return {dq32.data() + q_row * H * D, dk32.data() + k_row * KV * D, dv32.data() + k_row * KV * D};
    }
    static constexpr size_t last_version = std::size(versions) + 1;
    bool runs(size_t v) const { return v < last_version || ranks.size() == 1; }
    void run(CudaBf16 dev, size_t v) {
        version = v;
        if (v > std::size(versions))
            return attention_backward(dev, dqkv.data(), grads(0, 0), delta.data(), scratch.data(), part(0, 0), out.data(),
                                      dout.data(), lse.data(), ranks[0]);
        const WithoutHopper others;
        for_each_part([&](const Part &part, size_t q_row, size_t k_row) {
            const BackwardPart all{part, {dout.data() + q_row * H * D, H * D}, lse.data() + q_row, delta.data() + q_row};
            versions[v - 1](dev, grads(q_row, k_row), all);
        });
    }
    void check(Check &check) const {
        const auto qkv = widen(in.qkv);
        AttentionReference ref = attention_reference(problem, qkv);
        attention_reference_backward(ref, problem, qkv, widen(from_ranks(out.values(), H * D)), widen(in.dout));
        const auto dq = from_ranks(dq32.values(), H * D), dk = from_ranks(dk32.values(), KV * D),
                   dv = from_ranks(dv32.values(), KV * D);
        std::vector<double> got;  // (T, (H+2*KV)*D)
        for (size_t t = 0; t < T; t++) {
            got.insert(got.end(), &dq[t * H * D], &dq[t * H * D] + H * D);
            got.insert(got.end(), &dk[t * KV * D], &dk[t * KV * D] + KV * D);
            got.insert(got.end(), &dv[t * KV * D], &dv[t * KV * D] + KV * D);
        }
        const bool tensor_cores = version >= 4, rounded = version > std::size(versions);
        if (rounded) got = widen(dqkv.values());
        const auto sum_off = tensor_cores ? sum_error_of<bf16> : rounded_sum_error;
        const double lse_off = tensor_cores ? lse_error<bf16>(problem, ref) : lse_error<float>(problem, ref);
        check("dqkv", relative(got, ref.dqkv_size), relative(ref.dqkv, ref.dqkv_size),
              2 * lse_off + sum_off(T * H) + sum_off(D) + (tensor_cores ? unit_roundoff<bf16> : 0) +
                  (rounded ? unit_roundoff<bf16> : 0));
    }
    Work work() const { return {.flops = 10 * pairs() * double(H * D)}; }
};

static const Ladder<AttentionBackward, bf16> ladder(
    {.name = "attention_backward",
     .sizes = attention_sizes,
     .checked = attention_checked,
     .ideas = {"a thread per row, by definition", "a warp per row", "16 x 16 scores in shared memory, float",
               "mma.sync, cp.async, two stages", "shipped: one part, heads split"}});

}  // namespace CUDA_BACKEND::workshop
