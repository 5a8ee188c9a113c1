// attention_decode on CUDA. Contract and formulas: attention_decode.h.
//
// One block computes each split of a sequence's keys (attention_decode.h), and a second kernel merges the splits. Arrays of heads, including the
// cache, begin at multiples of 16 bytes.
#pragma once
#include <bit>

#include "attention_decode.h"
#include "ptx.cuh"
#include "warp.cuh"

namespace attention {
inline namespace CUDA_BACKEND {

constexpr unsigned decode_warps = 4, decode_threads = decode_warps * 32, decode_channels = 8;  // channels per lane

inline unsigned decode_lanes(size_t D) { return unsigned(std::bit_ceil(D / decode_channels)); }

// The softmax statistics of some keys, and the weighted sum of one channel of their values. Maxima are in powers of 2.
struct Softmax {
    float max, sum, out;
};

__device__ inline float finite(float max) { return max == -INFINITY ? 0.0f : max; }  // exp2(-inf - this) is 0 then

// Merges channel d of n parts in order.         sums (n, 2): the maximum and the sum of each part        out (n, D)
__device__ inline Softmax join_channel(const float *sums, const float *out, size_t n, size_t D, size_t d) {
    Softmax all{-INFINITY, 0, 0};
    for (size_t i = 0; i < n; i++) all.max = fmaxf(all.max, sums[2 * i]);
    for (size_t i = 0; i < n; i++) {
        const float weight = exp2_approx(sums[2 * i] - finite(all.max));
        all.sum += weight * sums[2 * i + 1];
        all.out += weight * out[i * D + d];
    }
    return all;
}

// A lane's part of one query head: its channels of the query, and of the running output.
template <class X> struct DecodeHead {
    using Channels = Vec<X, decode_channels>;
    Channels q;
    float max, sum;
    Vec<float, decode_channels> out;

    __device__ float dot(const Channels &k) const {
        float dot = 0;
        for (int c = 0; c < Channels::size; c++) dot += float(q[c]) * float(k[c]);
        return dot;
    }
    // Adds n keys, and turns their scores into weights.
    template <int n> __device__ void add(float (&scores)[n], const Channels (&v)[n]) {
        float most = max;
        for (float s : scores) most = fmaxf(most, s);
        shrink(most);
        for (int i = 0; i < n; i++) {
            const float weight = exp2_approx(scores[i] - finite(most));
            sum += weight;
            for (int c = 0; c < Channels::size; c++) out[c] += weight * float(v[i][c]);
        }
    }
    // Butterfly step of a sum: two lanes `distance` apart add each other's value.
    __device__ void add_lane(unsigned distance) {
        const auto other = [&](float x) { return __shfl_xor_sync(all_lanes, x, distance); };
        shrink(fmaxf(max, other(max)));
        sum += other(sum);
        for (float &x : out.v) x += other(x);
    }

  private:
    __device__ void shrink(float most) {
        const float factor = exp2_approx(max - finite(most));
        max = most;
        sum *= factor;
        for (float &x : out.v) x *= factor;
    }
};

// A block has one split of one sequence, for up to `heads` query heads of one KV head, which share the loads of K and V. A key is distributed over
// `lanes` neighbouring lanes, a power of two, with 8 channels each. They process several keys at once to have many loads in flight.
template <class X, int heads>
__global__ void __launch_bounds__(decode_threads)
    attention_decode_kernel5(DecodeParts parts, Heads<const X> q, PagedKeys<X> keys, unsigned H, unsigned KV, unsigned D,
                             unsigned lanes, float scale) {
    using Channels = Vec<X, decode_channels>;
    constexpr int n = 8 / sizeof(X);  // keys at once
    const unsigned group = H / KV, blocks = gridDim.y / KV, kv = blockIdx.y / blocks, first_head = blockIdx.y % blocks * heads;
    const unsigned lane = threadIdx.x % lanes, c = lane * decode_channels, h0 = kv * group + first_head;
    const int count = int(min(unsigned(heads), group - first_head)), stride = int(decode_threads / lanes) * n;
    const size_t b = blockIdx.x, row_size = 2 * size_t(KV) * D;
    const int first_key = keys.first_key[b], length = keys.length[b];
    const DecodeSplits splits(first_key, length);
    const int split_begin = splits.begin + int(blockIdx.z) * splits.size;
    const int begin = max(first_key, split_begin), end = min(length, split_begin + splits.size);
    if (begin >= end) return;

    DecodeHead<X> head[heads];
    for (int h = 0; h < heads; h++) {
        head[h] = {{}, -INFINITY, 0, {}};
        if (h < count && c < D) head[h].q = Channels::load(q.data + b * q.stride + size_t(h0 + h) * D + c);
    }
    for (int p0 = begin / stride * stride; p0 < end; p0 += stride) {  // every lane takes part in the sums
        const int p = p0 + int(threadIdx.x / lanes) * n;
        const auto visible = [&](int i) { return begin <= p + i && p + i < end; };
        Channels k[n] = {}, v[n] = {};
        if (p + n > begin && p < end && c < D) {
            const X *row = keys.row(b, size_t(p), row_size) + kv * D + c;
            for (int i = 0; i < n; i++)
                if (visible(i)) k[i] = Channels::load(row + i * row_size), v[i] = Channels::load(row + i * row_size + KV * D);
        }
        float scores[heads][n];
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < n; i++) scores[h][i] = head[h].dot(k[i]);
        for (unsigned distance = lanes / 2; distance > 0; distance /= 2)
            for (auto &row : scores)
                for (float &s : row) s += __shfl_xor_sync(all_lanes, s, distance);
        for (int h = 0; h < heads; h++) {
            for (int i = 0; i < n; i++) scores[h][i] = visible(i) ? scores[h][i] * scale : -INFINITY;
            head[h].add(scores[h], v);
        }
    }
    float *sums = &shared_mem<float>(), *out = sums + heads * decode_warps * 2;  // (heads, warps, 2), (heads, warps, D)
    for (int h = 0; h < heads; h++) {
        for (unsigned distance = lanes; distance < 32; distance *= 2) head[h].add_lane(distance);
        const unsigned row = h * decode_warps + threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) sums[2 * row] = head[h].max, sums[2 * row + 1] = head[h].sum;
        if (threadIdx.x % 32 < lanes && c < D) head[h].out.store(out + row * D + c);
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count * D; i += decode_threads) {
        const unsigned h = i / D, d = i % D;
        const Softmax all = join_channel(sums + h * decode_warps * 2, out + h * decode_warps * D, decode_warps, D, d);
        const size_t row = b * H + h0 + h;
        parts.out_of(row, blockIdx.z)[d] = all.out;
        if (d == 0) parts.sums_of(row, blockIdx.z)[0] = all.max, parts.sums_of(row, blockIdx.z)[1] = all.sum;
    }
}

// A block has one query head of one sequence, a thread one channel.
template <class X>
__global__ void attention_decode_join_kernel5(X *out, DecodeParts parts, const int32_t *first_key, const int32_t *length,
                                              unsigned H) {
    const size_t row = blockIdx.x, b = row / H, d = threadIdx.x;
    if (d >= parts.D) return;
    const int n = DecodeSplits(first_key[b], length[b]).count();
    const Softmax all = join_channel(parts.sums_of(row, 0), parts.out_of(row, 0), n, parts.D, d);
    out[row * parts.D + d] = all.out / all.sum;
}

// One block stores a token.
template <class X>
__global__ void cache_store_kernel1(X *cache, Heads<const X> k, Heads<const X> v, const int32_t *slots, size_t C) {
    const size_t t = blockIdx.x;
    if (slots[t] < 0) return;
    X *row = cache + size_t(slots[t]) * 2 * C;
    for (size_t c = threadIdx.x * Vec<X>::size; c < C; c += blockDim.x * Vec<X>::size) {
        Vec<X>::load(k.data + t * k.stride + c).store(row + c);
        Vec<X>::load(v.data + t * v.stride + c).store(row + C + c);
    }
}

}  // namespace CUDA_BACKEND
}  // namespace attention

inline namespace CUDA_BACKEND {

template <class X>
void cache_store(Cuda<X> dev, X *cache, Heads<const X> k, Heads<const X> v, const int32_t *slots, size_t T, size_t KV, size_t D) {
    launch(dev, attention::cache_store_kernel1<X>, Grid{T}, 64, 0, cache, k, v, slots, KV * D);
}

template <class X> size_t attention_decode_scratch(Cuda<X>, size_t B, size_t pages, size_t H, size_t D) {
    return attention::DecodeParts::floats(B, pages, H, D);
}

template <class X>
void attention_decode(Cuda<X> dev, X *out, float *scratch, Heads<const X> q, PagedKeys<X> keys, const AttentionShape &shape) {
    using namespace attention;
    const size_t B = shape.T, H = shape.H, KV = shape.KV, D = shape.D;
    check_head_size(D);
    const size_t group = H / KV;
    const DecodeParts parts(scratch, B, keys.pages, H, D);
    const auto run = [&](auto kernel, size_t heads) {
        launch(dev, kernel, Grid{B, KV * ceil_div(group, heads), parts.splits}, decode_threads,
               heads * decode_warps * (D + 2) * sizeof(float), parts, q, keys, H, KV, D, decode_lanes(D), shape.scale * log2_e);
    };
    if (group == 1) run(attention_decode_kernel5<X, 1>, 1);
    else if (group <= 4) run(attention_decode_kernel5<X, 4>, 4);
    else run(attention_decode_kernel5<X, 8>, 8);
    launch(dev, attention_decode_join_kernel5<X>, Grid{B * H}, unsigned(round_up(D, 32)), 0, out, parts, keys.first_key,
           keys.length, H);
}

}  // namespace CUDA_BACKEND
