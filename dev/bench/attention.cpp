// How fast attention is on this CPU, as a share of what a plain float matmul reaches in the same run.
//
//   ./attention [threads]
//
// GFLOP/s count the scores that the mask leaves: 4 * D forward, 10 * D backward for each visible pair of query and key and each
// head. The best of several rounds; every round times all columns of a line, so that other work on the machine slows them alike.
#include "../../llmc/ops/attention.h"

#include <chrono>
#include <cstdlib>
#include <functional>

#include "../../llmc/core/rng.h"
#include "../../llmc/ops/matmul.h"

static double seconds(const std::function<void()> &work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class X> static std::vector<X> noise(size_t n, uint32_t stream) {
    const Random random{1, Purpose::test, stream};
    std::vector<X> out(n);
    for (size_t i = 0; i < n; i++) out[i] = X(float(2 * random.uniform(i) - 1));
    return out;
}

template <class Dev> struct AttentionBench {
    using X = typename Dev::X;
    Dev dev;
    size_t T, H, KV, D;
    double pairs = 0;  // visible pairs of query and key
    std::vector<int32_t> lo;
    std::vector<X> qkv, dout, out, dqkv;
    std::vector<float> out32, lse, dq32, dk32, dv32, delta, scratch;

    AttentionBench(Dev dev, const std::vector<size_t> &documents, size_t H, size_t KV, size_t D)
        : dev(dev), T(0), H(H), KV(KV), D(D) {
        for (size_t length : documents) {
            lo.insert(lo.end(), length, int32_t(T));
            T += length;
            pairs += 0.5 * double(length) * double(length + 1);
        }
        qkv = noise<X>(T * (H + 2 * KV) * D, 1);
        dout = noise<X>(T * H * D, 2);
        out.resize(T * H * D), out32.resize(T * H * D), lse.resize(H * T), delta.resize(H * T);
        dq32.resize(T * H * D), dk32.resize(T * KV * D), dv32.resize(T * KV * D), dqkv.resize(qkv.size());
        scratch.resize(attention_scratch(size_t(dev.threads)));
    }
    Heads<const X> view(size_t head) const { return {qkv.data() + head * D, (H + 2 * KV) * D}; }
    void forward() {
        const Pieces all{{{0, T, 0}}, 1};
        attention_begin(dev, out32.data(), lse.data(), T, H, D);
        attention_forward_part(dev, out32.data(), lse.data(), view(0), view(H), view(H + KV), lo.data(), all, all, T, H, KV, D,
                               0.125f);
        attention_end(dev, out.data(), out32.data(), T * H * D);
    }
    void backward() {
        const Pieces all{{{0, T, 0}}, 1};
        attention_backward_begin(dev, dq32.data(), dk32.data(), dv32.data(), delta.data(), out.data(), dout.data(), T, H, KV, D);
        attention_backward_part(dev, dq32.data(), dk32.data(), dv32.data(), scratch.data(), view(0), view(H), view(H + KV),
                                delta.data(), lse.data(), dout.data(), lo.data(), all, all, T, H, KV, D, 0.125f);
        attention_backward_end(dev, dqkv.data(), dq32.data(), dk32.data(), dv32.data(), T, H, KV, D);
    }
};

struct Times {
    double matmul = INFINITY, forward = INFINITY, backward = INFINITY;
};

template <class Dev> static Times measure(AttentionBench<Dev> &bench, CpuF32 matmul_dev, int rounds) {
    constexpr size_t n = 2048;
    static const std::vector<float> x = noise<float>(n * n, 3), w = noise<float>(n * n, 4);
    static std::vector<float> y(n * n);
    Times best;
    for (int round = 0; round < rounds; round++) {
        best.matmul =
            std::min(best.matmul, seconds([&] { matmul_forward(matmul_dev, y.data(), x.data(), w.data(), nullptr, n, n, n); }));
        best.forward = std::min(best.forward, seconds([&] { bench.forward(); }));
        best.backward = std::min(best.backward, seconds([&] { bench.backward(); }));
    }
    return best;
}

template <class Dev> static void line(int threads, CpuF32 matmul_dev, size_t T, size_t H, size_t KV, size_t D) {
    AttentionBench<Dev> bench(Dev{threads}, {T}, H, KV, D);
    const Times t = measure(bench, matmul_dev, T > 4096 ? 4 : 10);
    const double flop = bench.pairs * double(H * D), matmul = 2.0 * 2048 * 2048 * 2048 / t.matmul;
    const double forward = 4 * flop / t.forward, backward = 10 * flop / t.backward;
    printf("%-5s %6zu %3zu %3zu %4zu %10.0f %6.2f %10.0f %6.2f %10.0f\n", dtype_name<typename Dev::X>, T, H, KV, D,
           forward * 1e-9, forward / matmul, backward * 1e-9, backward / matmul, matmul * 1e-9);
}

int main(int argc, char **argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : omp_get_max_threads();
    const ContextPtr ctx = make_context(threads);
    const CpuF32 dev{threads, ctx.get()};
    printf("%d threads, matmul: %s, float, 2048 x 2048 x 2048; GFLOP/s and share of the matmul's\n", threads, matmul_backend());
    printf("dtype      T   H  KV    D    forward         backward            matmul\n");
    for (size_t T : {2048, 8192}) {
        line<CpuF32>(threads, dev, T, 9, 3, 64);
        line<CpuBf16>(threads, dev, T, 9, 3, 64);
    }
    for (size_t D : {32, 80, 128, 256}) {
        line<CpuF32>(threads, dev, 2048, 4, 2, D);
        line<CpuBf16>(threads, dev, 2048, 4, 2, D);
    }

    // One document of 2048 tokens and seven of 50: packed a row of 2398 tokens, padded a batch of 8 x 2048.
    AttentionBench<CpuF32> longest(dev, {2048}, 9, 3, 64), packed(dev, {2048, 50, 50, 50, 50, 50, 50, 50}, 9, 3, 64),
        padded(dev, std::vector<size_t>(8, 2048), 9, 3, 64);
    const Times one = measure(longest, dev, 6), a = measure(packed, dev, 6), b = measure(padded, dev, 3);
    printf("\nms, f32, D = 64            forward  backward\n");
    printf("the 2048 alone            %8.1f  %8.1f\n", one.forward * 1e3, one.backward * 1e3);
    printf("2048 and 7 x 50, packed   %8.1f  %8.1f\n", a.forward * 1e3, a.backward * 1e3);
    printf("2048 and 7 x 50, padded   %8.1f  %8.1f\n", b.forward * 1e3, b.backward * 1e3);
}
