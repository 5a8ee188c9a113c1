// Speed of the gated delta rule on this CPU, as a share of a plain float matmul in the same run.
//
//   ./gated_delta [threads]
//
// GFLOP/s count the products of the chunked form (gated_delta_flops), of the backward pass with those that it computes again. A time is the best of several
// rounds; every round times all columns of a line, so other work on the machine slows them down equally.
#include "../../llmc/ops/gated_delta.h"

#include "bench.h"

template <class Dev>
static void line(PlainMatmul<CpuF32> &plain, size_t documents, size_t length, size_t Hk, size_t Hv, size_t D) {
    using X = typename Dev::X;
    const Dev dev{plain.dev.threads, plain.dev.ctx};
    const DeltaShape s{documents * length, Hk, Hv, D, D, 1e-6f};
    const auto qkv = noise<X>(s.T * s.row(), 1), dout = noise<X>(s.T * Hv * D, 2);
    std::vector<X> out(dout.size()), dqkv(qkv.size());
    std::vector<float> g(s.T * Hv, -0.05f), beta(s.T * Hv, 0.5f), dg(g.size()), dbeta(g.size()), states(gated_delta_states(s));
    std::vector<int32_t> doc_pos(s.T);
    for (size_t t = 0; t < s.T; t++) doc_pos[t] = int32_t(t % length);
    const DeltaGates<const float> gates{g.data(), beta.data()};
    float *const scratch = nullptr;
    const auto t =
        fastest(5, {[&] { gated_delta_forward(dev, out.data(), states.data(), scratch, qkv.data(), gates, doc_pos.data(), s); },
                    [&] {
                        gated_delta_backward(dev, dqkv.data(), DeltaGates<float>{dg.data(), dbeta.data()}, scratch, dout.data(),
                                             qkv.data(), gates, states.data(), doc_pos.data(), s);
                    },
                    [&] { plain(); }});
    const double matmul = plain.flop / t[2], heads = double(s.T * Hv);
    const double forward = heads * gated_delta_flops(s) / t[0], backward = heads * gated_delta_backward_flops(s) / t[1];
    printf("%-5s %3zu x %6zu %3zu %3zu %4zu %10.0f %6.2f %10.0f %6.2f %10.0f\n", dtype_name<X>, documents, length, Hk, Hv, D,
           forward * 1e-9, forward / matmul, backward * 1e-9, backward / matmul, matmul * 1e-9);
}

int main(int argc, char **argv) {
    const int threads = threads_argument(argc, argv);
    const ContextPtr ctx = make_context();
    PlainMatmul<CpuF32> plain(CpuF32{threads, ctx.get()});
    heading("the gated delta rule", threads);
    printf("%-5s %12s %3s %3s %4s %10s %6s %10s %6s %10s\n", "type", "documents", "Hk", "Hv", "D", "forward", "share", "backward",
           "share", "matmul");
    const auto lines = [&]<class Dev>() {
        line<Dev>(plain, 1, 2048, 16, 16, 128);  // Qwen3.5-0.8B
        line<Dev>(plain, 1, 16384, 16, 16, 128);
        line<Dev>(plain, 1, 2048, 16, 48, 128);  // 27B
        line<Dev>(plain, 32, 64, 16, 16, 128);
    };
    lines.template operator()<CpuF32>();
    lines.template operator()<CpuBf16>();
}
