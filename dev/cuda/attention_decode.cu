// Attention of one new token of each sequence to the tokens before it, whose keys and values are stored in the pages of a cache. Contract and formulas:
// llmc/ops/attention_decode.h
//
// Timed with 8 sequences of up to 8192 tokens, 32 query heads, 8 key heads, D 128 in bf16. A key and its value have 4 D bytes and need 4 D FLOP
// for each query head of their group: 4 FLOP per byte here, so the lower bound is the time of reading the cache once, 151 MB. Full bandwidth
// needs many loads in flight at the same time, on all SMs. The versions differ in this number, and in the number of reads of K and V.
//
//   version                            K and V are read    warps at work           limited by
//   1 a warp per query head            4 times             256                     one key after another, 8192 times
//   2 a block per query head           4 times, from L2    1024                    one key after another, 2048 times
//   3 a block per key head             once                256                     64 blocks, half of the GPU; the longest sequence
//   4 a block per 256 keys             once                all that fit            instructions: two exponentials, five shuffles a score
//   5 shipped: 16 bytes a lane         once                all that fit            memory
#include "../../llmc/ops/attention_decode.cuh"

#include "../../test/reference_attention_decode.h"
#include "attention_common.h"

namespace CUDA_BACKEND::workshop {

struct Decode {
    Heads<const bf16> q;
    PagedKeys<bf16> keys;
    AttentionShape shape;
    DecodeParts parts;

    __device__ const bf16 *query(size_t b, size_t h) const { return q.data + b * q.stride + h * shape.D; }
    __device__ const bf16 *key(size_t b, int p, size_t kv) const {
        return keys.row(b, size_t(p), 2 * shape.KV * shape.D) + kv * shape.D;
    }
    __device__ const bf16 *value(size_t b, int p, size_t kv) const { return key(b, p, kv) + shape.KV * shape.D; }
};

// A query head in the registers of a warp, with the online softmax over the keys passed to add().
struct WarpHead {
    WarpRow q, out;
    float max, sum;

    __device__ static WarpHead load(const bf16 *q, size_t D) { return {WarpRow::load(q, D), {}, -INFINITY, 0}; }
    __device__ void add(const WarpRow &k, const WarpRow &v, float scale) {  // the scores are in units of log 2
        const float score = scale * log2_e * q.dot(k), before = max;
        max = fmaxf(max, score);
        const float shrink = exp2_approx(before - max), weight = exp2_approx(score - max);
        sum = sum * shrink + weight;
        out.add(weight, v, shrink);
    }
};

// ---- version 1: a warp per query head ------------------------------------------------------------------------------------------
//
// The warp of attention_forward 2, with one query. All four heads of a group read K and V, each at a different time. A warp waits for a
// key and its value before it loads the next one, 8192 times, and 256 warps are 2 per SM.

__global__ void attention_decode_kernel1(bf16 *out, Decode in) {
    const size_t row = blockIdx.x, b = row / in.shape.H, h = row % in.shape.H, kv = h / (in.shape.H / in.shape.KV);
    WarpHead head = WarpHead::load(in.query(b, h), in.shape.D);
    for (int p = in.keys.first_key[b]; p < in.keys.length[b]; p++)
        head.add(WarpRow::load(in.key(b, p, kv), in.shape.D), WarpRow::load(in.value(b, p, kv), in.shape.D), in.shape.scale);
    head.out.for_each(in.shape.D, [&](size_t d, float value) { out[row * in.shape.D + d] = value / head.sum; });
}

void attention_decode1(CudaBf16 dev, bf16 *out, const Decode &in) {
    launch(dev, attention_decode_kernel1, Grid{in.shape.T * in.shape.H}, 32, 0, out, in);
}

// ---- version 2: a block per query head -----------------------------------------------------------------------------------------
//
// Each of four warps processes every fourth key. Their results are merged through shared memory, in order: sums relative to a smaller maximum
// are rescaled to the largest one (join_channel of the shipped kernel).

// Stores this warp's state in (warps, 2) sums and (warps, D) outputs.
__device__ void put_warp(float *sums, float *out, const WarpHead &head, size_t D) {
    const size_t warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) sums[2 * warp] = head.max, sums[2 * warp + 1] = head.sum;
    head.out.for_each(D, [&](size_t d, float value) { out[warp * D + d] = value; });
}

__global__ void attention_decode_kernel2(bf16 *out, Decode in) {
    const size_t row = blockIdx.x, b = row / in.shape.H, h = row % in.shape.H, kv = h / (in.shape.H / in.shape.KV);
    float *sums = &shared_mem<float>(), *outs = sums + decode_warps * 2;
    WarpHead head = WarpHead::load(in.query(b, h), in.shape.D);
    for (int p = in.keys.first_key[b] + int(threadIdx.x / 32); p < in.keys.length[b]; p += decode_warps)
        head.add(WarpRow::load(in.key(b, p, kv), in.shape.D), WarpRow::load(in.value(b, p, kv), in.shape.D), in.shape.scale);
    put_warp(sums, outs, head, in.shape.D);
    __syncthreads();
    for (size_t d = threadIdx.x; d < in.shape.D; d += decode_threads) {
        const Softmax all = join_channel(sums, outs, decode_warps, in.shape.D, d);
        out[row * in.shape.D + d] = all.out / all.sum;
    }
}

void attention_decode2(CudaBf16 dev, bf16 *out, const Decode &in) {
    launch(dev, attention_decode_kernel2, Grid{in.shape.T * in.shape.H}, decode_threads,
           decode_warps * (in.shape.D + 2) * sizeof(float), out, in);
}

// ---- version 3: a block per key head -------------------------------------------------------------------------------------------
//
// Each warp holds the queries and sums of all query heads of a group, up to 8, in registers and uses each loaded key for all of them, so K and V
// are read only once. But the grid has only 64 blocks.

constexpr int most_heads = 8;
constexpr size_t group_shared(size_t D) { return most_heads * decode_warps * (D + 2) * sizeof(float); }

// Processes query heads h0 ... of key head kv over the keys from begin to end, and calls done(head, d, output of channel d).
template <class F> __device__ void sum_group(const Decode &in, size_t b, size_t kv, int begin, int end, F done) {
    const size_t group = in.shape.H / in.shape.KV;
    float *sums = &shared_mem<float>(), *outs = sums + most_heads * decode_warps * 2;  // (heads, warps, 2), (heads, warps, D)
    for (size_t h0 = kv * group; h0 < (kv + 1) * group; h0 += most_heads) {
        const int heads = int(min(size_t(most_heads), (kv + 1) * group - h0));
        WarpHead head[most_heads];
        for (int i = 0; i < most_heads; i++) head[i] = WarpHead::load(in.query(b, h0 + min(i, heads - 1)), in.shape.D);
        for (int p = begin + int(threadIdx.x / 32); p < end; p += decode_warps) {
            const WarpRow k = WarpRow::load(in.key(b, p, kv), in.shape.D), v = WarpRow::load(in.value(b, p, kv), in.shape.D);
            for (int i = 0; i < most_heads; i++)
                if (i < heads) head[i].add(k, v, in.shape.scale);
        }
        for (int i = 0; i < most_heads; i++)
            put_warp(sums + i * decode_warps * 2, outs + i * decode_warps * in.shape.D, head[i], in.shape.D);
        __syncthreads();
        for (size_t i = threadIdx.x; i < size_t(heads) * in.shape.D; i += decode_threads) {
            const size_t h = i / in.shape.D, d = i % in.shape.D;
            done(h0 + h, d,
                 join_channel(sums + h * decode_warps * 2, outs + h * decode_warps * in.shape.D, decode_warps, in.shape.D, d));
        }
        __syncthreads();
    }
}

__global__ void attention_decode_kernel3(bf16 *out, Decode in) {
    const size_t b = blockIdx.x, kv = blockIdx.y;
    sum_group(in, b, kv, in.keys.first_key[b], in.keys.length[b],
              [&](size_t h, size_t d, const Softmax &all) { out[(b * in.shape.H + h) * in.shape.D + d] = all.out / all.sum; });
}

void attention_decode3(CudaBf16 dev, bf16 *out, const Decode &in) {
    launch(dev, attention_decode_kernel3, Grid{in.shape.T, in.shape.KV}, decode_threads, group_shared(in.shape.D), out, in);
}

// ---- version 4: a block per split of the keys ----------------------------------------------------------------------------------
//
// Each block processes 256 keys (more if a sequence has more than 8192), and writes its result to scratch: 2 % of the bytes read. A
// second kernel joins the splits of a sequence in order. The splits depend only on their own sequence, so its result does not depend on
// the rest of the batch. Now the memory is busy. But a warp still processes one key at a time, with 2 bytes per lane and load, ends each
// score with five shuffles, and rescales its sums for every key.

__global__ void attention_decode_kernel4(Decode in) {
    const size_t b = blockIdx.x, kv = blockIdx.y, i = blockIdx.z;
    const DecodeSplits splits(in.keys.first_key[b], in.keys.length[b]);
    const int begin = splits.begin + int(i) * splits.size, end = min(begin + splits.size, in.keys.length[b]);
    if (begin >= end) return;
    sum_group(in, b, kv, max(begin, in.keys.first_key[b]), end, [&](size_t h, size_t d, const Softmax &all) {
        const size_t row = b * in.shape.H + h;
        in.parts.out_of(row, i)[d] = all.out;
        if (d == 0) in.parts.sums_of(row, i)[0] = all.max, in.parts.sums_of(row, i)[1] = all.sum;
    });
}

void attention_decode4(CudaBf16 dev, bf16 *out, const Decode &in) {
    launch(dev, attention_decode_kernel4, Grid{in.shape.T, in.shape.KV, in.parts.splits}, decode_threads,
           group_shared(in.shape.D), in);
    launch(dev, attention_decode_join_kernel5<bf16>, Grid{in.shape.T * in.shape.H}, unsigned(round_up(in.shape.D, 32)), 0, out,
           in.parts, in.keys.first_key, in.keys.length, in.shape.H);
}

// ---- version 5: llmc/ops/attention_decode.cuh ----------------------------------------------------------------------------------
//
// A lane loads 16 bytes, so 16 lanes hold a key of 128 channels, and a warp two keys. Each half of the warp processes four neighbouring keys at
// once: eight loads of 16 bytes in flight per lane, four shuffles for the scores of two keys, and one rescaling of the sums for four keys.

void attention_decode5(CudaBf16 dev, bf16 *out, const Decode &in) {
    attention_decode(dev, out, in.parts.sums, in.q, in.keys, in.shape);
}

DecodeShape decode_shape(const Sizes &s) {
    const size_t B = s[0], keys = s[1], window = s[2], H = s[3], KV = s[4], D = s[5];
    if (B == 0 || keys == 0 || window == 0)
        die("%zu sequences, %zu keys, a window of %zu\n  fix: at least 1 of each", B, keys, window);
    if (KV == 0 || H == 0 || H % KV) die("%zu query heads cannot share %zu key heads\n  fix: H a multiple of KV", H, KV);
    check_head_size(D);
    DecodeShape shape{{}, {}, H, KV, D};
    for (size_t b = 0; b < B; b++) {
        const size_t length = ceil_div(keys * (b + 1), B);
        shape.first_key.push_back(int32_t(length - std::min(length, window))), shape.length.push_back(int32_t(length));
    }
    return shape;
}

template <class X> struct AttentionDecode {
    DecodeShape shape;
    DecodeInputs<bf16> in;
    DeviceArray<bf16> q, cache, out;
    DeviceArray<int32_t> table, first_key, length;
    DeviceArray<float> scratch;

    explicit AttentionDecode(const Sizes &sizes)
        : shape(decode_shape(sizes)),
          in(shape),
          q(in.last),
          cache(run_cache_store<DeviceArray>(CudaBf16{}, shape, in)),
          out(shape.B() * shape.H * shape.D),
          table(in.table),
          first_key(shape.first_key),
          length(shape.length),
          scratch(attention_decode_scratch(CudaBf16{}, shape.B(), shape.pages(), shape.H, shape.D)) {}

    static constexpr void (*versions[])(CudaBf16, bf16 *out, const Decode &) = {
        attention_decode1, attention_decode2, attention_decode3, attention_decode4, attention_decode5};

    void run(CudaBf16 dev, size_t version) {
        const DecodeParts parts(scratch.data(), shape.B(), shape.pages(), shape.H, shape.D);
        versions[version - 1](dev, out.data(),
                              {{q.data(), shape.row()},
                               {cache.data(), table.data(), first_key.data(), length.data(), shape.pages()},
                               {shape.B(), shape.H, shape.KV, shape.D, shape.scale()},
                               parts});
    }
    void check(Check &check) const {
        const DecodeReference want = decode_reference(shape, in);
        check("out", relative(widen(out.values()), want.size), relative(want.out, want.size), want.error + unit_roundoff<bf16>);
    }
    Work work() const {
        double keys = 0;
        for (size_t b = 0; b < shape.B(); b++) keys += double(shape.length[b] - shape.first_key[b]);
        return {.bytes = double(shape.D) * sizeof(bf16) * (keys * 2 * double(shape.KV) + double(shape.B() * 2 * shape.H))};
    }
};

static const Ladder<AttentionDecode, bf16> ladder(
    {.name = "attention_decode",
     .sizes = {{"B", "sequences", 8, 4},
               {"keys", "of the longest sequence; the others are shorter in equal steps", 8192, 512},
               {"window", "keys that a query sees at most", 8192, 512},
               {"H", "query heads", 32, 32},
               {"KV", "key and value heads", 8, 8},
               {"D", "head size", 128, 128}},
     .checked = {{1, 1, 1, 1, 1, 8},        // one key
                 {9, 300, 300, 3, 1, 64},   // GQA, some with two splits
                 {3, 530, 70, 2, 2, 80},    // a window
                 {2, 270, 260, 18, 2, 24},  // groups of more than 8
                 {2, 140, 140, 7, 1, 128},
                 {2, 66, 66, 4, 1, 256},
                 {1, 8200, 8200, 1, 1, 8}},  // splits of 512
     .ideas = {"a warp per query head", "a block per query head", "a block per key head", "a block per split of the keys",
               "shipped: 16 bytes per lane, four keys at once"}});

}  // namespace CUDA_BACKEND::workshop
