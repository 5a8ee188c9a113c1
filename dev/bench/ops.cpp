// Speed of the other ops on this CPU: the linear layers of SmolLM2-135M and its head as a share of a plain matmul of the same type,
// memory-bound ops as a share of a copy. (Attention has a separate benchmark.)
//
//   ./ops [threads]
//
// GFLOP/s count two operations per multiply and add. GB/s count each read and each written array once. A copy also loads the lines
// that it will overwrite, so it makes three transfers and counts two. AdamW writes only lines that it has read, so its share can
// reach 1.5.
#include "../../llmc/ops/adamw.h"
#include "../../llmc/ops/gelu.h"
#include "../../llmc/ops/grouped_matmul.h"
#include "../../llmc/ops/layernorm.h"
#include "../../llmc/ops/loss.h"
#include "../../llmc/ops/rmsnorm.h"
#include "../../llmc/ops/swiglu.h"
#include "bench.h"

static constexpr size_t C = 576, QKV = (9 + 2 * 3) * 64, F = 1536, V = 49152;  // SmolLM2-135M: H 9, KV 3, D 64
static constexpr size_t head_tokens = 2048;

static void print_rates(const std::vector<double> &amounts, const std::vector<double> &times, double reference) {
    for (size_t i = 0; i < amounts.size(); i++)
        printf(" %8.1f %5.2f", amounts[i] / times[i] * 1e-9, amounts[i] / times[i] / reference);
}

template <class Dev> static void linear_layers(PlainMatmul<Dev> &plain) {
    using X = typename Dev::X;
    constexpr size_t T = 2048;
    struct Layer {
        const char *name;
        size_t IC, OC;
    };
    for (const auto &[name, IC, OC] : {Layer{"qkv", C, QKV}, {"o", C, C}, {"gate_up", C, 2 * F}, {"down", F, C}}) {
        const auto w = noise<X>(OC * IC, 3);
        auto x = noise<X>(T * IC, 4), y = noise<X>(T * OC, 5);
        std::vector<float> dw(OC * IC);
        const auto t =
            fastest(5, {[&] { matmul_forward(plain.dev, y.data(), x.data(), w.data(), nullptr, T, IC, OC); },
                        [&] { matmul_backward_input(plain.dev, x.data(), y.data(), w.data(), T, IC, OC); },
                        [&] { matmul_backward_weight(plain.dev, dw.data(), nullptr, y.data(), x.data(), T, IC, OC, true); },
                        [&] { plain(); }});
        const double flop = 2.0 * T * IC * OC, reference = plain.flop / t[3];
        printf("%-5s %-8s %5zu %5zu", dtype_name<X>, name, IC, OC);
        print_rates({flop, flop, flop}, t, reference);
        printf(" %8.1f\n", reference * 1e-9);
    }
}

// The gate and up products of a layer of Qwen3-30B-A3B, with an eighth of its experts and of their inputs. There are 2048 tokens with 8
// experts each; in the second case half of the rows belong to one expert.
template <class Dev> static void experts(PlainMatmul<Dev> &plain) {
    using X = typename Dev::X;
    constexpr size_t E = 16, R = 2048 * 8, IC = 256, OC = 1536;
    const auto x = noise<X>(R * IC, 17), w = noise<X>(E * OC * IC, 18);
    std::vector<X> dx(R * IC), y(R * OC);
    std::vector<float> dw(E * OC * IC);
    for (const bool skewed : {false, true}) {
        std::vector<int32_t> starts(E + 1);
        for (size_t e = 1; e < E; e++) starts[e] = int32_t(skewed ? R / 2 + R / 2 * (e - 1) / (E - 1) : R * e / E);
        starts[E] = R;
        const RowGroups groups{starts.data(), E, R};
        const auto t =
            fastest(5, {[&] { grouped_matmul_forward(plain.dev, y.data(), x.data(), w.data(), groups, IC, OC); },
                        [&] { grouped_matmul_backward_input(plain.dev, dx.data(), y.data(), w.data(), groups, IC, OC); },
                        [&] { grouped_matmul_backward_weight(plain.dev, dw.data(), y.data(), x.data(), groups, IC, OC, true); },
                        [&] { plain(); }});
        const double flop = 2.0 * R * IC * OC, reference = plain.flop / t[3];
        printf("%-5s %-8s %5zu %5zu", dtype_name<X>, skewed ? "skewed" : "balanced", IC, OC);
        print_rates({flop, flop, flop}, t, reference);
        printf(" %8.1f\n", reference * 1e-9);
    }
}

// Times N rows, each with a target, in small and in large chunks: the forward pass alone, and all three products.
template <class Dev> static void head(PlainMatmul<Dev> &plain) {
    using X = typename Dev::X;
    constexpr size_t N = head_tokens;
    const auto x = noise<X>(N * C, 6), w = noise<X>(V * C, 7);
    std::vector<X> dx(N * C);
    std::vector<float> dw(V * C), nll(N), entropy(N), correct(N), max(N), sum(N), weights(N, 1.0f / N);
    std::vector<int32_t> rows(N), targets(N);
    for (size_t n = 0; n < N; n++) rows[n] = int32_t(n), targets[n] = int32_t(n * 7919 % V);
    const HeadShape small{N, C, V, N, least_head_chunk}, large{N, C, V, N, most_head_chunk};
    std::vector<float> scratch(lm_head_scratch(plain.dev, large) / sizeof(float) + 16);  // 16 for the alignment to 64
    float *aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) / sizeof(float);
    const auto run = [&](HeadShape shape, X *dx_or_null) {
        lm_head(plain.dev, HeadStats{nll.data(), entropy.data(), correct.data(), max.data(), sum.data()}, dx_or_null, dw.data(),
                aligned, x.data(), w.data(), HeadLoss{rows.data(), targets.data(), weights.data()}, shape, true);
    };
    const auto t = fastest(3, {[&] { run(small, nullptr); }, [&] { run(small, dx.data()); }, [&] { run(large, nullptr); },
                               [&] { run(large, dx.data()); }, [&] { plain(); }});
    const double flop = 2.0 * N * C * V, reference = plain.flop / t[4];
    for (size_t i : {0, 2}) {
        printf("%-5s %3zu MiB  %5zu %5zu", dtype_name<X>, (i ? large : small).chunk >> 20, C, V);
        print_rates({flop, 3 * flop}, {t[i], t[i + 1]}, reference);
        printf(" %14s %8.1f\n", "", reference * 1e-9);
    }
}

// The ops of GPT-2 that replace rmsnorm and swiglu.
template <class Dev> static void gpt2_streams(Dev dev) {
    using X = typename Dev::X;
    constexpr size_t T = 16384, n = T * F;
    const auto a = noise<X>(n, 12), b = noise<X>(n, 13), w = noise<X>(C, 14), bias = noise<X>(C, 15);
    std::vector<X> out(n);
    std::vector<float> mean(T), rstd(T), dw(C), dbias(C), scratch(layernorm_scratch(dev, C)), copied(n);
    const std::vector<float> values = noise<float>(n, 16);
    const LayerNormStats stats{mean.data(), rstd.data()};
    const NormShape shape{T, C, 1e-5f};
    const auto t = fastest(
        5, {[&] {
                layernorm_forward(dev, out.data(), stats, a.data(), LayerNormWeights<const X>{w.data(), bias.data()}, shape);
            },
            [&] {
                layernorm_backward(dev, out.data(), LayerNormWeights<float>{dw.data(), dbias.data()}, scratch.data(), b.data(),
                                   b.data() + T * C, a.data(), w.data(), stats, shape);
            },
            [&] { gelu_forward(dev, out.data(), a.data(), n, Gelu::tanh); },
            [&] { gelu_backward(dev, out.data(), b.data(), a.data(), n, Gelu::tanh); },
            [&] { gelu_forward(dev, out.data(), a.data(), n, Gelu::erf); },
            [&] { gelu_backward(dev, out.data(), b.data(), a.data(), n, Gelu::erf); },
            [&] {
#pragma omp parallel for simd num_threads(dev.threads)
                for (size_t i = 0; i < n; i++) copied[i] = values[i];
            }});
    const double x = sizeof(X), TC = double(T * C) * x, TF = double(n) * x, copy = 2 * sizeof(float) * double(n) / t[6];
    printf("%-5s", dtype_name<X>);
    print_rates({2 * TC, 4 * TC, 2 * TF, 3 * TF, 2 * TF, 3 * TF}, t, copy);
    printf(" %8.1f\n", copy * 1e-9);
}

template <class Dev> static void streams(Dev dev) {
    using X = typename Dev::X;
    constexpr size_t T = 16384, n = T * 2 * F;  // each array has at most n elements
    const auto a = noise<X>(n, 8), b = noise<X>(n, 9), w = noise<X>(C, 10);
    std::vector<X> out(n);
    std::vector<float> rstd(T), dw(C), scratch(rmsnorm_scratch(dev, C)), m(n), v(n), copied(n);
    const std::vector<float> grads = noise<float>(n, 11);
    auto params = noise<X>(n, 11);
    std::vector<int16_t> lower(n);
    const AdamW adamw{1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 10};

    const NormShape shape{T, C, 1e-5f};
    const auto t = fastest(5, {[&] { rmsnorm_forward(dev, out.data(), rstd.data(), a.data(), w.data(), shape); },
                               [&] {
                                   rmsnorm_backward(dev, out.data(), dw.data(), scratch.data(), b.data(), b.data() + T * C,
                                                    a.data(), w.data(), rstd.data(), shape);
                               },
                               [&] { swiglu_forward(dev, out.data(), a.data(), T, F, Gate::silu); },
                               [&] { swiglu_backward(dev, out.data(), b.data(), a.data(), T, F, Gate::silu); },
                               [&] {
                                   adamw_update(dev, {params.data(), lower.data()}, m.data(), v.data(), grads.data(), adamw, n);
                               },
                               [&] {
#pragma omp parallel for simd num_threads(dev.threads)
                                   for (size_t i = 0; i < n; i++) copied[i] = grads[i];
                               }});
    const double x = sizeof(X), TC = double(T * C) * x, TF = double(T * F) * x;
    const double updated = double(n) * 7 * sizeof(float);
    const double copy = 2 * sizeof(float) * double(n) / t[5];
    printf("%-5s", dtype_name<X>);
    print_rates({2 * TC, 4 * TC, 3 * TF, 5 * TF, updated}, t, copy);
    printf(" %8.1f\n", copy * 1e-9);
}

int main(int argc, char **argv) {
    const int threads = threads_argument(argc, argv);
    const ContextPtr ctx = make_context();
    heading("ops", threads);
    PlainMatmul<CpuF32> f32(CpuF32{threads, ctx.get()});
    PlainMatmul<CpuBf16> bf16(CpuBf16{threads, ctx.get()});

    printf("T = 2048; GFLOP/s and share of the plain matmul's, 2048 x 2048 x 2048\n");
    printf("dtype weight      IC    OC        forward             dx             dw    plain\n");
    linear_layers(f32);
    linear_layers(bf16);
    printf("\n16384 rows of 16 experts, and half of the rows of one expert\n");
    printf("dtype rows         IC    OC        forward             dx             dw    plain\n");
    experts(f32);
    experts(bf16);
    printf("\nThe head for %zu tokens; the loss between the products counts as time, not as work\n", head_tokens);
    printf("dtype chunks      IC    OC        forward    forward, dx, dw                plain\n");
    head(f32);
    head(bf16);
    printf("\n16384 rows of 576 (rmsnorm) and 1536 (swiglu), 50 M parameters (adamw); GB/s and share of a copy's\n");
    printf("dtype        rmsnorm       backward         swiglu       backward          adamw     copy\n");
    streams(f32.dev);
    streams(bf16.dev);
    printf("\n16384 rows of 576 (layernorm) and 1536 (gelu), as GPT-2 has them; GB/s and share of a copy's\n");
    printf("dtype      layernorm       backward      gelu tanh       backward       gelu erf       backward     copy\n");
    gpt2_streams(f32.dev);
    gpt2_streams(bf16.dev);
}
