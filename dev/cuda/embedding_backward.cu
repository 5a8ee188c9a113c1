// embedding_backward: dw[tokens[t]] += dout[t]                                                     Contract: llmc/ops/embedding.h
//
// Timed with T 8192, V 32000, C 4096 in bf16. A scatter with collisions: the same token may stand anywhere in the text, and each
// row of dw must add up its tokens in the order of the text, so that every version gives the bits of the CPU. Float atomics do
// not. Moved at least: T C elements of dout, and each row of dw that occurs, in and out.
#include "../../llmc/ops/embedding.cuh"

#include <set>

#include "common.h"

namespace CUDA_BACKEND::workshop {

// ---- version 1: a thread per vocabulary entry ----------------------------------------------------------------------------------
//
// Each entry looks through the whole text for itself. No two threads share a row of dw, so nothing can collide. V T comparisons,
// though the tokens come from cache; worse, a thread that finds one adds C channels on its own, with neighbours that look
// elsewhere.

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
// The CPU's way: threads share the channels, and each goes through the text. T steps instead of V T, and a warp reads and writes
// 32 neighbouring channels. But C threads are few, and each step waits for memory: the next token may be the same row of dw.

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
// Both at once: the vocabulary is dealt out to `parts` warps, token v to warp v % parts, and each looks through the text for
// tokens of its part, 256 warps for each slice of 32 channels. Whoever reads a token that is not its own loses one step, not a
// trip to dw; with 256 parts that is nearly every one, and T such steps, one after the other, are what limits it.

constexpr unsigned part_warps = 8;  // of a block
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
// The lanes look at 32 different tokens, and __ballot_sync tells all of them which are their warp's: T / 32 steps, and then one
// for each token found. No lane may leave early, as the others wait for its vote.

template <class X>
__global__ void embedding_backward_kernel4(float *dw, const X *dout, const int32_t *tokens, size_t T, size_t C) {
    const unsigned lane = threadIdx.x % 32, part = blockIdx.x * part_warps + threadIdx.x / 32, parts = gridDim.x * part_warps;
    const size_t c = blockIdx.y * size_t(32) + lane;
    for (size_t t0 = 0; t0 < T; t0 += 32) {
        const bool ours = t0 + lane < T && unsigned(tokens[t0 + lane]) % parts == part;
        for (unsigned left = __ballot_sync(all_lanes, ours); left; left &= left - 1) {  // lowest bit first: the order of the text
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
// The same with 16 bytes of dout per lane: a slice is 256 channels in bf16, so the text is looked through an eighth as often.

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
