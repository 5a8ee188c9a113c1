// Speed of attention on this CPU, as a share of a plain float matmul in the same run.
//
//   ./attention [threads]
//
// GFLOP/s count the visible scores: 4 * D forward, 10 * D backward for each visible pair of query and key and each head. A time is
// the best of several rounds; every round times all columns of a line, so other work on the machine slows them down equally.
#include "../../llmc/ops/attention.h"

#include "bench.h"

template <class Dev> struct AttentionBench {
    using X = typename Dev::X;
    Dev dev;
    AttentionShape shape;
    double scores = 0;  // visible pairs of query and key
    std::vector<int32_t> first_key;
    std::vector<X> qkv, dout, out, dqkv;
    std::vector<float> out32, lse, dq32, dk32, dv32, delta, scratch;

    AttentionBench(Dev dev, const std::vector<size_t> &documents, size_t H, size_t KV, size_t D)
        : dev(dev), shape{0, H, KV, D, 0.125f} {
        size_t &T = shape.T;
        for (size_t length : documents) {
            first_key.insert(first_key.end(), length, int32_t(T));
            T += length;
            scores += 0.5 * double(length) * double(length + 1);
        }
        qkv = noise<X>(T * (H + 2 * KV) * D, 1);
        dout = noise<X>(T * H * D, 2);
        out.resize(T * H * D), out32.resize(T * H * D), lse.resize(H * T), delta.resize(H * T);
        dq32.resize(T * H * D), dk32.resize(T * KV * D), dv32.resize(T * KV * D), dqkv.resize(qkv.size());
        scratch.resize(attention_scratch(dev, shape));
    }
    AttentionInputs<X> inputs() const {
        const auto &[T, H, KV, D, scale] = shape;
        const size_t row = (H + 2 * KV) * D;
        return {{qkv.data(), row}, {qkv.data() + H * D, row}, {qkv.data() + (H + KV) * D, row}, first_key.data(), {}, shape};
    }
    void forward() {
        const Pieces all{{{0, shape.T, 0}}, 1};
        attention_forward(dev, out.data(), out32.data(), lse.data(), inputs(), all);
    }
    void backward() {
        const Pieces all{{{0, shape.T, 0}}, 1};
        const AttentionGrads grads{dq32.data(), dk32.data(), dv32.data()};
        attention_backward_begin(dev, grads, delta.data(), out.data(), dout.data(), shape);
        attention_backward_part(dev, grads, scratch.data(), inputs(), delta.data(), lse.data(), dout.data(), all, all);
        attention_backward_end(dev, dqkv.data(), grads, shape);
    }
};

template <class Dev> static void line(PlainMatmul<CpuF32> &plain, size_t T, size_t H, size_t KV, size_t D) {
    AttentionBench<Dev> bench(Dev{plain.dev.threads, plain.dev.ctx}, {T}, H, KV, D);
    const auto t = fastest(T > 4096 ? 4 : 10, {[&] { bench.forward(); }, [&] { bench.backward(); }, [&] { plain(); }});
    const double flop = bench.scores * double(H * D), matmul = plain.flop / t[2];
    const double forward = 4 * flop / t[0], backward = 10 * flop / t[1];
    printf("%-5s %6zu %3zu %3zu %4zu %10.0f %6.2f %10.0f %6.2f %10.0f\n", dtype_name<typename Dev::X>, T, H, KV, D,
           forward * 1e-9, forward / matmul, backward * 1e-9, backward / matmul, matmul * 1e-9);
}

template <class Bench> static void compare_ragged(Bench &ragged, Bench &equal) {
    const auto t =
        fastest(4, {[&] { ragged.forward(); }, [&] { equal.forward(); }, [&] { ragged.backward(); }, [&] { equal.backward(); }});
    const auto rate = [&](const Bench &bench, double flop, double time) {
        return flop * bench.scores * double(bench.shape.H * bench.shape.D) / time * 1e-9;
    };
    const double forward[] = {rate(ragged, 4, t[0]), rate(equal, 4, t[1])},
                 backward[] = {rate(ragged, 10, t[2]), rate(equal, 10, t[3])};
    printf("%-5s forward %4.0f %4.0f  %4.2f    backward %4.0f %4.0f  %4.2f\n", dtype_name<typename Bench::X>, forward[0],
           forward[1], forward[0] / forward[1], backward[0], backward[1], backward[0] / backward[1]);
}

int main(int argc, char **argv) {
    const int threads = threads_argument(argc, argv);
    const ContextPtr ctx = make_context();
    heading("attention", threads);
    PlainMatmul<CpuF32> plain(CpuF32{threads, ctx.get()});
    const CpuBf16 bf16{threads, ctx.get()};
    printf("GFLOP/s and share of the plain matmul's, float, 2048 x 2048 x 2048\n");
    printf("dtype      T   H  KV    D    forward         backward            matmul\n");
    for (size_t T : {2048, 8192}) {
        line<CpuF32>(plain, T, 9, 3, 64);
        line<CpuBf16>(plain, T, 9, 3, 64);
    }
    for (size_t D : {32, 80, 128, 256}) {
        line<CpuF32>(plain, 2048, 4, 2, D);
        line<CpuBf16>(plain, 2048, 4, 2, D);
    }

    // One document of 2048 tokens and seven of 50, either packed to a row of 2398 tokens or padded to a batch of 8 x 2048.
    AttentionBench<CpuF32> longest(plain.dev, {2048}, 9, 3, 64), packed(plain.dev, {2048, 50, 50, 50, 50, 50, 50, 50}, 9, 3, 64),
        padded(plain.dev, std::vector<size_t>(8, 2048), 9, 3, 64);
    const auto t = fastest(4, {[&] { longest.forward(); }, [&] { longest.backward(); }, [&] { packed.forward(); },
                               [&] { packed.backward(); }, [&] { padded.forward(); }, [&] { padded.backward(); }});
    printf("\nms, f32, D = 64            forward  backward\n");
    printf("the 2048 alone            %8.1f  %8.1f\n", t[0] * 1e3, t[1] * 1e3);
    printf("2048 and 7 x 50, packed   %8.1f  %8.1f\n", t[2] * 1e3, t[3] * 1e3);
    printf("2048 and 7 x 50, padded   %8.1f  %8.1f\n", t[4] * 1e3, t[5] * 1e3);

    // The cost of ragged ends: chats of 1 to 2000 tokens, and documents of equal length with the same number of query-key pairs.
    std::vector<size_t> chats;
    for (size_t i = 0; i < 16; i++) chats.push_back(1 + i * 797 % 2000);
    AttentionBench<CpuF32> ragged(plain.dev, chats, 9, 3, 64);
    const size_t length = size_t(2 * ragged.scores / double(ragged.shape.T));
    AttentionBench<CpuF32> equal(plain.dev, std::vector<size_t>(ragged.shape.T / length, length), 9, 3, 64);
    AttentionBench<CpuBf16> ragged_bf16(bf16, chats, 9, 3, 64),
        equal_bf16(bf16, std::vector<size_t>(ragged.shape.T / length, length), 9, 3, 64);
    printf("\nGFLOP/s, D = 64: %zu chats of 1 to 2000 tokens, and of %zu each; the share of the first\n", chats.size(), length);
    compare_ragged(ragged, equal);
    compare_ragged(ragged_bf16, equal_bf16);
}
