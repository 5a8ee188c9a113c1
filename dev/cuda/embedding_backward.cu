// embedding_backward: dw[tokens[t]] += dout[t]                                                     Contract: llmc/ops/embedding.h
//
// Timed with T 8192, V 32000, C 4096 in bf16. The op is a scatter with collisions: a token may occur anywhere in the text, and each
// row of dw must add its tokens in the order of the text, so that every version gives the same bits as the CPU. Float atomics have no
// fixed order. The op reads at least T C elements of dout, and reads and writes each row of dw whose token occurs.
#include "../../llmc/ops/embedding.cuh"

#include <set>

#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a thread per vocabulary entry ----------------------------------------------------------------------------------
//
// Each thread searches the whole text for its entry. No two threads share a row of dw, so there are no collisions. The threads make
// V T comparisons, although with tokens from cache. Worse, a thread that finds a token adds C channels alone, and its neighbours read
// other addresses.

template <class X>
__global__ void embedding_backward_kernel1(float *dw, const X *dout, const int32_t *tokens, size_t T, size_t V, size_t C) {
    const size_t v = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (v >= V) return;
    for (size_t t = 0; t < T; t++)
        if (size_t(tokens[t]) == v)
            for (size_t c = 0; c < C; c++) dw[v * C + c] += float(dout[t * C + c]);
}

template <class X>
void embedding_backward1(Cuda<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t V, size_t C) {
    launch(dev, embedding_backward_kernel1<X>, Grid{ceil_div(V, 128)}, 128, 0, dw, dout, tokens, T, V, C);
}

// ---- version 2: a thread per channel -------------------------------------------------------------------------------------------
//
// As on the CPU, threads divide the channels, and each walks through the text: T steps instead of V T, and a warp reads and writes 32
// neighbouring channels. But C threads are few, and each step waits for memory, because the next token may have the same row of dw.

template <class X>
__global__ void embedding_backward_kernel2(float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C) {
    const size_t c = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (c >= C) return;
    for (size_t t = 0; t < T; t++) dw[size_t(tokens[t]) * C + c] += float(dout[t * C + c]);
}

template <class X>
void embedding_backward2(Cuda<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t, size_t C) {
    launch(dev, embedding_backward_kernel2<X>, Grid{ceil_div(C, 32)}, 32, 0, dw, dout, tokens, T, C);
}

// ---- version 3: a warp per part of the vocabulary and slice of the channels ----------------------------------------------------
//
// This version combines both: warp v % parts owns token v, and each warp searches the text for its tokens, with 256 warps for each
// slice of 32 channels. A token of another warp costs one step, without an access to dw. With 256 parts nearly every token belongs to
// another warp, so the T sequential steps are the limit.

constexpr unsigned part_warps = 8;  // per block
constexpr size_t part_blocks = 32;

template <class X>
__global__ void embedding_backward_kernel3(float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C) {
    const unsigned part = blockIdx.x * part_warps + threadIdx.x / 32, parts = gridDim.x * part_warps;
    const size_t c = blockIdx.y * size_t(32) + threadIdx.x % 32;
    if (c >= C) return;
    for (size_t t = 0; t < T; t++)
        if (unsigned(tokens[t]) % parts == part) dw[size_t(tokens[t]) * C + c] += float(dout[t * C + c]);
}

template <class X>
void embedding_backward3(Cuda<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t, size_t C) {
    launch(dev, embedding_backward_kernel3<X>, Grid{part_blocks, ceil_div(C, 32)}, part_warps * 32, 0, dw, dout, tokens, T, C);
}

// ---- version 4: 32 tokens at a time --------------------------------------------------------------------------------------------
//
// The lanes read 32 different tokens, and __ballot_sync tells all lanes which tokens belong to their warp: T / 32 steps, plus one step
// for each token found. No lane may exit early, because the others wait for its vote.

template <class X>
__global__ void embedding_backward_kernel4(float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C) {
    const unsigned lane = threadIdx.x % 32, part = blockIdx.x * part_warps + threadIdx.x / 32, parts = gridDim.x * part_warps;
    const size_t c = blockIdx.y * size_t(32) + lane;
    for (size_t t0 = 0; t0 < T; t0 += 32) {
        const bool ours = t0 + lane < T && unsigned(tokens[t0 + lane]) % parts == part;
        for (unsigned left = __ballot_sync(all_lanes, ours); left; left &= left - 1) {  // lowest bit first: in text order
            const size_t t = t0 + __ffs(left) - 1;
            if (c < C) dw[size_t(tokens[t]) * C + c] += float(dout[t * C + c]);
        }
    }
}

template <class X>
void embedding_backward4(Cuda<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t, size_t C) {
    launch(dev, embedding_backward_kernel4<X>, Grid{part_blocks, ceil_div(C, 32)}, part_warps * 32, 0, dw, dout, tokens, T, C);
}

// ---- version 5: llmc/ops/embedding.cuh -----------------------------------------------------------------------------------------
//
// Version 4 with 16 bytes of dout per lane: a slice has 256 channels in bf16, so an eighth as many warps search the text.

template <class X>
void embedding_backward5(Cuda<X> dev, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t V, size_t C) {
    embedding_backward(dev, dw, dout, tokens, T, C, 0, V);
}

template <class X> struct EmbeddingBackward {
    size_t T, V, C;
    std::vector<int32_t> tokens;
    std::vector<X> dout;
    DeviceArray<int32_t> d_tokens;
    DeviceArray<X> d_dout;
    DeviceArray<float> dw;

    explicit EmbeddingBackward(const Sizes &s)
        : T(s[0]),
          V(s[1]),
          C(s[2]),
          tokens(some_tokens(T, V)),
          dout(random_values<X>(T * C, 2)),
          d_tokens(tokens),
          d_dout(dout),
          dw(std::vector<float>(V * C, 3)) {}

    static std::vector<int32_t> some_tokens(size_t T, size_t V) {
        std::vector<int32_t> out(T);
        const Random random{1, Purpose::test, 1};
        for (size_t t = 0; t < T; t++) out[t] = int32_t(random.below(t, V));
        return out;
    }

    static constexpr void (*versions[])(Cuda<X>, float *dw, const X *dout, const int32_t *tokens, size_t T, size_t V,
                                        size_t C) = {embedding_backward1, embedding_backward2, embedding_backward3,
                                                     embedding_backward4, embedding_backward5};

    void run(Cuda<X> dev, size_t version) { versions[version - 1](dev, dw.data(), d_dout.data(), d_tokens.data(), T, V, C); }

    void check(Check &check) const {
        std::vector<float> want(V * C, 3);
        for (size_t t = 0; t < T; t++)
            for (size_t c = 0; c < C; c++) want[size_t(tokens[t]) * C + c] += float(dout[t * C + c]);
        check("dw", dw.values(), want, 0);
    }

    Work work() const {
        const size_t rows = std::set<int32_t>(tokens.begin(), tokens.end()).size();
        return {.bytes = double(C) * (double(T) * sizeof(X) + 2.0 * double(rows) * sizeof(float))};
    }
};

static const Ladder<EmbeddingBackward, float, bf16> ladder(
    {.name = "embedding_backward",
     .sizes = {{"T", "tokens", 8192, 256}, {"V", "vocabulary", 32000, 1000}, {"C", "channels", 4096, 1024}},
     .checked = {{1, 7, 8}, {33, 3, 139}, {70, 600, 40}, {100, 7, 264}},
     .ideas = {"a thread per vocabulary entry", "a thread per channel", "a warp per part of the vocabulary and 32 channels",
               "32 tokens at a time, by ballot", "shipped: 16 bytes per load"}});
}  // namespace CUDA_BACKEND::workshop
