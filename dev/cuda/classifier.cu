// fused_classifier: softmax, loss and gradient of n rows of V logits                                 Contract: llmc/ops/loss.h
//     p = softmax(logit)     nll = -log p[target]     entropy = -sum_v p[v] log p[v]     correct: is the target the first maximum?
//     dlogit[v] = weight (p[v] - [v == target]), in place where X is float; 0 in the rows of padding
//
// Timed with n 128, V 128256 and dlogits in bf16: one chunk of Llama 3's head. The softmax needs the maximum before the sum and
// the sum before the gradient, so a row is walked along more than once; it is 513 KB, too long for registers or shared memory.
// Moved at least: the logits in, dlogits out.
#include "../../llmc/ops/loss.cuh"
#include "../../test/reference_loss.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {

// exp(logit - max), and its terms in the sums of the statistics.
struct SoftmaxSums {
    float sum = 0, dot = 0;  // of e and e (logit - max)
    __device__ void add(float shifted) {
        const float e = expf(shifted);
        sum += e;
        dot += e * shifted;
    }
};

__device__ inline void write_stats(HeadStats stats, size_t r, float target, float max, SoftmaxSums sums, bool correct) {
    const double log_sum = log(double(sums.sum));
    stats.nll[r] = float(log_sum - (double(target) - double(max)));
    stats.entropy[r] = float(log_sum - double(sums.dot) / double(sums.sum));
    stats.correct[r] = correct;
    stats.max[r] = max;
    stats.sum[r] = sums.sum;
}

__device__ inline float dlogit(float logit, float max, float scale, float weight, bool is_target) {
    return expf(logit - max) * scale - (is_target ? weight : 0.0f);
}

// ---- version 1: a thread per row -----------------------------------------------------------------------------------------------
//
// Three passes: maximum, sums, gradient. 12 V bytes read and V elements written for each row, a row apart between neighbouring
// threads. 128 rows are only 4 warps, on a GPU with room for thousands: rows alone are too little parallelism.

template <class X>
__global__ void classifier_kernel1(HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                                   size_t n, size_t padded, size_t V) {
    const size_t r = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (r >= padded) return;
    const float *row = logits + r * V;
    if (r >= n) {
        for (size_t v = 0; v < V; v++) dlogits[r * V + v] = 0;
        return;
    }
    const size_t y = size_t(targets[r]);
    size_t first = 0;
    for (size_t v = 1; v < V; v++)
        if (row[v] > row[first]) first = v;
    const float max = row[first];
    SoftmaxSums sums;
    for (size_t v = 0; v < V; v++) sums.add(row[v] - max);
    write_stats(stats, r, row[y], max, sums, first == y);
    const float scale = weights[r] / sums.sum;
    for (size_t v = 0; v < V; v++) dlogits[r * V + v] = dlogit(row[v], max, scale, weights[r], v == y);
}

template <class X>
void classifier1(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                 size_t n, size_t padded, size_t V) {
    launch(dev, classifier_kernel1<X>, Grid{ceil_div(padded, 32)}, 32, 0, stats, dlogits, logits, targets, weights, n, padded, V);
}

// ---- version 2: a block per row ------------------------------------------------------------------------------------------------
//
// The same three passes by 256 threads side by side, with a maximum and two sums over the block in between (shuffles in each
// warp, then over the warps). Still 12 V bytes read, some of them from L2: 128 rows are 66 MB. Whether an earlier logit equals
// the maximum takes a vote of the block, because no thread has seen all logits.

template <class T> struct WarpValues { T partial[32]; };

template <class X>
__global__ void classifier_kernel2(HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                                   size_t n, size_t V) {
    float *partial = shared_mem<WarpValues<float>>().partial;
    const size_t r = blockIdx.x;
    const float *row = logits + r * V;
    if (r >= n) {
        for (size_t v = threadIdx.x; v < V; v += blockDim.x) dlogits[r * V + v] = 0;
        return;
    }
    const size_t y = size_t(targets[r]);
    const float target = row[y];  // before dlogits overwrites it
    float max = -INFINITY, earlier = 0;
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) max = fmaxf(max, row[v]);
    max = block_max(max, partial);
    SoftmaxSums sums;
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) {
        sums.add(row[v] - max);
        if (v < y && row[v] == max) earlier = 1;
    }
    sums = {block_sum(sums.sum, partial), block_sum(sums.dot, partial)};
    earlier = block_max(earlier, partial);
    if (threadIdx.x == 0) write_stats(stats, r, target, max, sums, target == max && !earlier);
    const float scale = weights[r] / sums.sum;
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) dlogits[r * V + v] = dlogit(row[v], max, scale, weights[r], v == y);
}

template <class X>
void classifier2(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                 size_t n, size_t padded, size_t V) {
    launch(dev, classifier_kernel2<X>, Grid{padded}, 256, sizeof(WarpValues<float>), stats, dlogits, logits, targets, weights, n,
           V);
}

// ---- version 3: online softmax -------------------------------------------------------------------------------------------------
//
// Maximum and sums in one pass (Milakov and Gimelshein, 2018, arXiv:1805.02867): sums relative to one maximum become sums
// relative to another by a factor exp(old - new), so parts of a row can be merged in any grouping, by threads, lanes and warps
// alike (merge() in loss.cuh). 8 V bytes read. The price is arithmetic, two exp for each merge. The alternative is one exp for each rise
// of the maximum.

template <class X>
__global__ void classifier_kernel3(HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                                   size_t n, size_t V) {
    SoftmaxWarps &warps = shared_mem<SoftmaxWarps>();
    const size_t r = blockIdx.x;
    const float *row = logits + r * V;
    if (r >= n) {
        for (size_t v = threadIdx.x; v < V; v += blockDim.x) dlogits[r * V + v] = 0;
        return;
    }
    const unsigned y = unsigned(targets[r]), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float target = row[y];
    SoftmaxPart part;
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) part = merge(part, {row[v], 1, 0, unsigned(v)});
    part = warp_merge(part);
    if (lane == 0) warps.part[warp] = part;
    __syncthreads();
    part = warp_merge(lane < blockDim.x / 32 ? warps.part[lane] : SoftmaxPart{});
    if (threadIdx.x == 0) write_stats(stats, r, target, part.max, {part.sum, part.dot}, part.first == y);
    const float scale = weights[r] / part.sum;
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) dlogits[r * V + v] = dlogit(row[v], part.max, scale, weights[r], v == y);
}

template <class X>
void classifier3(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                 size_t n, size_t padded, size_t V) {
    launch(dev, classifier_kernel3<X>, Grid{padded}, 256, sizeof(SoftmaxWarps), stats, dlogits, logits, targets, weights, n, V);
}

// ---- version 4: 16 bytes per load, 1024 threads --------------------------------------------------------------------------------
//
// The threads of one block keep enough loads of an SM in flight, even with a single row per SM. The second pass over a row should
// hit L2 if the rows in flight fit there.

template <class X>
__global__ void __launch_bounds__(1024) classifier_kernel4(HeadStats stats, X *dlogits, const float *logits,
                                                           const int32_t *targets, const float *weights, size_t n, size_t V) {
    constexpr int N = Vec<float>::size;
    SoftmaxWarps &warps = shared_mem<SoftmaxWarps>();
    const size_t r = blockIdx.x;
    const float *row = logits + r * V;
    if (r >= n) return clear_row<X>(dlogits + r * V, V);
    const unsigned y = unsigned(targets[r]), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float target = row[y];
    SoftmaxPart part;
    for (size_t v = threadIdx.x * N; v < V; v += blockDim.x * N) {
        const auto l = Vec<float, N>::load(row + v);
        for (int i = 0; i < N; i++) part = merge(part, {l[i], 1, 0, unsigned(v) + i});
    }
    part = warp_merge(part);
    if (lane == 0) warps.part[warp] = part;
    __syncthreads();
    part = warp_merge(lane < blockDim.x / 32 ? warps.part[lane] : SoftmaxPart{});
    if (threadIdx.x == 0) write_stats(stats, r, target, part.max, {part.sum, part.dot}, part.first == y);
    const float scale = weights[r] / part.sum;
    for (size_t v = threadIdx.x * N; v < V; v += blockDim.x * N) {
        const auto l = Vec<float, N>::load(row + v);
        Vec<X, N> d;
        for (int i = 0; i < N; i++) d[i] = dlogit(l[i], part.max, scale, weights[r], v + i == y);
        d.store(dlogits + r * V + v);
    }
}

template <class X>
void classifier4(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                 size_t n, size_t padded, size_t V) {
    launch(dev, classifier_kernel4<X>, Grid{padded}, classifier_threads(V), sizeof(SoftmaxWarps), stats, dlogits, logits, targets,
           weights, n, V);
}

// ---- version 5: llmc/ops/loss.cuh ----------------------------------------------------------------------------------------------
//
// Version 4 is limited by arithmetic. The maximum of a vector comes first, and sums are scaled only when the maximum of a thread rises, which is
// seldom: one exp for each logit in place of two. The limit is the memory's bandwidth again. In bf16 gradients overwrite the front of their
// row of logits, so that chunks of the head have more rows; the row's threads then wait for each other at each step. Blocks have 256 threads,
// so that eight rows share an SM and do not wait at the same time.

template <class X>
void classifier5(Cuda<X> dev, HeadStats stats, X *dlogits, const float *logits, const int32_t *targets, const float *weights,
                 size_t n, size_t padded, size_t V) {
    fused_classifier(dev, stats, dlogits, logits, {nullptr, targets, weights}, n, padded, V, V);
}

template <class X> struct Classifier {
    static constexpr size_t padding = 2;  // rows
    size_t n, V;
    std::vector<float> logits, weights;
    std::vector<int32_t> targets;
    DeviceArray<float> d_logits, d_weights, nll, entropy, correct, max, sum;
    DeviceArray<X> separate;  // dlogits of versions 1 to 4, where X is not float
    bool in_place = false;    // the last run was of version 5
    DeviceArray<int32_t> d_targets;

    explicit Classifier(const Sizes &s)
        : n(s[0]),
          V(s[1]),
          logits(random_values<float>((n + padding) * V, 1, 3)),
          weights(random_values<float>(n, 2)),
          targets(some_targets()),
          d_logits(logits),
          d_weights(weights),
          nll(n),
          entropy(n),
          correct(n),
          max(n),
          sum(n),
          separate((n + padding) * V),
          d_targets(targets) {}

    std::vector<int32_t>
    some_targets() {  // every second target is the largest logit of its row, and every fourth has an equal logit before it
        std::vector<int32_t> out(n);
        const Random random{1, Purpose::test, 3};
        for (size_t r = 0; r < n; r++) {
            float *row = &logits[r * V];
            out[r] = int32_t(r % 2 ? random.below(r, V) : size_t(std::max_element(row, row + V) - row));
            if (r % 4 == 2) row[random.below(r, size_t(out[r]) + 1)] = row[out[r]];
        }
        return out;
    }

    X *dlogits() { return in_place || std::is_same_v<X, float> ? reinterpret_cast<X *>(d_logits.data()) : separate.data(); }
    std::vector<X> dlogits_values() const {
        if constexpr (std::is_same_v<X, float>) return d_logits.values();
        else if (!in_place) return separate.values();
        const auto rows = d_logits.values();
        std::vector<X> out((n + padding) * V);
        for (size_t r = 0; r < n + padding; r++) memcpy(&out[r * V], &rows[r * V], V * sizeof(X));
        return out;
    }

    static constexpr void (*versions[])(Cuda<X>, HeadStats, X *dlogits, const float *logits, const int32_t *targets,
                                        const float *weights, size_t n, size_t padded,
                                        size_t V) = {classifier1, classifier2, classifier3, classifier4, classifier5};

    void run(Cuda<X> dev, size_t version) {
        in_place = version == 5;
        versions[version - 1](dev, {nll.data(), entropy.data(), correct.data(), max.data(), sum.data()}, dlogits(),
                              d_logits.data(), d_targets.data(), d_weights.data(), n, n + padding, V);
    }

    // e: the relative error of exp, of a float sum of V terms and of the differences they are of; see test/ops/test_loss.cpp.
    void check(Check &check) {
        std::vector<double> want_nll, want_entropy, want_correct, want_max, want_sum, want;
        double spread = 0;
        for (size_t r = 0; r < n; r++) {
            const std::vector<double> row(logits.begin() + ptrdiff_t(r * V), logits.begin() + ptrdiff_t((r + 1) * V));
            const ClassifierRow row_want = classifier_reference(row, size_t(targets[r]), weights[r]);
            want_nll.push_back(row_want.nll);
            want_entropy.push_back(row_want.entropy);
            want_correct.push_back(row_want.correct);
            want_max.push_back(row_want.max);
            want_sum.push_back(row_want.sum);
            want.insert(want.end(), row_want.dlogit.begin(), row_want.dlogit.end());
            spread = std::max(spread, row_want.spread);
        }
        want.resize((n + padding) * V, 0);
        const double u = unit_roundoff<float>, e = (4 + spread) * u + rounded_sum_error(V + 1);
        check("nll", nll.values(), want_nll, e + 2 * u * (largest(want_nll) + spread));
        check("entropy", entropy.values(), want_entropy, (e + u) * (2 + spread));
        check("correct", correct.values(), want_correct, 0);
        check("max", max.values(), want_max, 0);
        check("sum", sum.values(), want_sum, e * largest(want_sum));
        check("dlogits", dlogits_values(), want, largest(weights) * (e + 2 * u) + unit_roundoff<X> * largest(want));
    }

    Work work() const { return {.bytes = double(n * V) * (sizeof(float) + sizeof(X))}; }
};

static const Ladder<Classifier, float, bf16> ladder(
    {.name = "classifier",
     .sizes = {{"n", "rows", 1024, 264}, {"V", "vocabulary", 128256, 8192}},
     .checked = {{1, 4}, {7, 52}, {5, 136}, {3, 1036}, {2, 4100}},  // multiples of a vector
     .ideas = {"a thread per row, three passes", "a block per row, three passes", "online softmax, two passes",
               "16 bytes per load, 1024 threads", "shipped: one exp for each logit, gradients over logits"}});
}  // namespace CUDA_BACKEND::workshop
