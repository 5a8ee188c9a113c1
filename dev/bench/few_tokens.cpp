// Speed of the products of one decoding step on this CPU, as a share of the limit set by memory and arithmetic.
//
//   ./few_tokens [threads [f32]]
//
// It times the products of SmolLM2-135M in bf16 or f32; the 269 or 538 MB of weights are read from memory as in a model. The limit of a step is the
// larger of two times: reading the weights at the rate of all threads summing 512 MiB, and the FLOPs at the rate of a large product.
#include <array>

#include "../../llmc/ops/simd.h"
#include "bench.h"

static constexpr size_t L = 30, C = 576, F = 1536, QKV = 960, V = 49152;
static constexpr std::array<std::pair<size_t, size_t>, 4> layer = {{{C, QKV}, {C, C}, {C, 2 * F}, {F, C}}};  // (IC, OC)

// The rate at which all threads sum 512 MiB: the better of two orders, one array from begin to end or, as the kernels read weights, 16 rows of
// C elements side by side, each prefetched.
static double read_rate(int threads) {
    constexpr size_t rows = 16, row = C * sizeof(bf16) / sizeof(float), ahead = (64 << 10) / sizeof(float);
    const std::vector<float> from((512 << 20) / sizeof(float) / (rows * row) * (rows * row), 1.0f);
    double sum = 0;
    const Job in_order = [&] {
#pragma omp parallel for simd num_threads(threads) reduction(+ : sum)
        for (size_t i = 0; i < from.size(); i++) sum += double(from[i]);
    };
    const Job by_rows = [&] {
#pragma omp parallel for num_threads(threads) reduction(+ : sum)
        for (size_t i = 0; i < from.size(); i += rows * row) {
            simd::Vector of_rows{};
            for (size_t j = 0; j < row; j += simd::lanes)
                for (size_t r = 0; r < rows; r++) {
                    const float *at = &from[i + r * row + j];
                    __builtin_prefetch(at + ahead, 0, 2);
                    of_rows += *reinterpret_cast<const simd::Floats *>(at);
                }
            sum += double(simd::largest(of_rows));
        }
    };
    const auto times = fastest(5, {in_order, by_rows});
    if (sum < 0) puts("");  // uses the sum
    return double(from.size() * sizeof(float)) / std::min(times[0], times[1]);
}

template <class Dev> static void products_of_few_tokens(Dev dev, int threads) {
    using X = typename Dev::X;
    PlainMatmul<Dev> plain(dev);
    const double product = plain.flop / fastest(3, {[&] { plain(); }})[0], memory = read_rate(threads);
    printf("memory %.1f GB/s, product %.0f GFLOP/s\n\n tokens       ms     GB/s  GFLOP/s   of the limit\n", memory * 1e-9,
           product * 1e-9);

    size_t weights = V * C;
    for (const auto &[IC, OC] : layer) weights += L * IC * OC;
    const auto few = noise<X>(1 << 20, 1), x = noise<X>(128 * F, 2);
    std::vector<X> w(weights), out(128 * 2 * F);
    std::vector<float> logits(128 * V);
    for (size_t i = 0; i < weights; i += few.size())
        std::copy_n(few.begin(), std::min(few.size(), weights - i), w.begin() + ptrdiff_t(i));
    for (const size_t T : {1, 2, 4, 8, 16, 32, 64, 128}) {
        const double time = fastest(5, {[&] {
                                        const X *at = w.data();
                                        for (size_t l = 0; l < L; l++)
                                            for (const auto &[IC, OC] : layer) {
                                                matmul_forward(dev, out.data(), x.data(), at, nullptr, T, IC, OC);
                                                at += IC * OC;
                                            }
                                        matmul_forward(dev, logits.data(), x.data(), at, nullptr, T, C, V);
                                    }})[0];
        const double bytes = double(weights * sizeof(X)), flop = 2 * double(weights * T);
        printf("%7zu %8.2f %8.1f %8.0f %12.0f %%\n", T, time * 1e3, bytes / time * 1e-9, flop / time * 1e-9,
               100 * std::max(bytes / memory, flop / product) / time);
    }
}

int main(int argc, char **argv) {
    const int threads = threads_argument(argc, argv);
    const ContextPtr ctx = make_context();
    heading("few_tokens", threads);
    if (argc > 2 && argv[2] == std::string("f32")) products_of_few_tokens(CpuF32{threads, ctx.get()}, threads);
    else products_of_few_tokens(CpuBf16{threads, ctx.get()}, threads);
}
