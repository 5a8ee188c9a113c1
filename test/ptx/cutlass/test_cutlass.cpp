// CUTLASS's products of matrices for sm_90a in the PTX interpreter: right as they are, and noticed with a mistake in one line.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/core/dtype.h"
#include "../mutations.h"
#include "gemm.h"

namespace {

// Multiples of 1/8 from -1 to 1, which both types hold.
float value(size_t n) { return float(int((n * 7 + n / 3 % 11 * 5) % 17) - 8) / 8; }
uint8_t e4m3(float x) {
    for (int bits = 0; bits < 256; bits++) {
        const int exponent = bits >> 3 & 15, mantissa = bits & 7;
        const float size = exponent ? std::ldexp(1 + float(mantissa) / 8, exponent - 7) : std::ldexp(float(mantissa) / 8, -6);
        if ((bits & 0x80 ? -size : size) == x) return uint8_t(bits);
    }
    return 0x7f;  // NaN
}

struct Kernel {
    const char *name, *part;  // of the mangled name, by which the mistakes find it
    const char *(*run)(const Gemm &gemm);
    bool fp8;
    int ragged_k;          // more tiles than stages
    const char *harmless;  // a mistake without effect
};
// The product of fp8 adds to sums of floats after each tile of K, and waits for all of its groups before that.
constexpr const char *early_release = "a stage released too early";
const Kernel kernels[] = {{"ping-pong", "KernelTmaWarpSpecializedPingpong", gemm_pingpong, false, 400, ""},
                          {"cooperative, clusters 2x1", "KernelTmaWarpSpecializedCooperative", gemm_cooperative, false, 400, ""},
                          {"fp8", "KernelTmaWarpSpecializedCooperative", gemm_fp8, true, 1040, early_release}};

// Empty if all results are right.
std::string problem_of(const Kernel &kernel, int m, int n, int k) {
    const size_t M = size_t(m), N = size_t(n), K = size_t(k);
    std::vector<float> a(M * K), b(N * K);
    for (size_t i = 0; i < a.size(); i++) a[i] = value(i);
    for (size_t i = 0; i < b.size(); i++) b[i] = value(3 * i + 1);
    const auto on_device = [&](size_t bytes) {
        void *p;
        cudaMalloc(&p, bytes);
        return std::unique_ptr<void, decltype(&cudaFree)>(p, cudaFree);
    };
    const auto operand = [&](const std::vector<float> &x) {
        auto p = on_device(2 * x.size());
        for (size_t i = 0; i < x.size(); i++)
            if (kernel.fp8) static_cast<uint8_t *>(p.get())[i] = e4m3(x[i]);
            else static_cast<bf16 *>(p.get())[i] = bf16(x[i]);
        return p;
    };
    const auto pa = operand(a), pb = operand(b), pc = on_device(2 * M * N), pd = on_device(2 * M * N);
    for (size_t i = 0; i < M * N; i++) static_cast<bf16 *>(pc.get())[i] = bf16(value(5 * i));
    try {
        const char *status = kernel.run({m, n, k, pa.get(), pb.get(), pc.get(), pd.get(), 1.5f, 0.5f});
        if (status) return status;
    } catch (const Error &error) {
        return error.what();
    }
    for (size_t row = 0; row < M; row++)
        for (size_t column = 0; column < N; column++) {
            double sum = 0;
            for (size_t i = 0; i < K; i++) sum += double(a[row * K + i]) * double(b[column * K + i]);
            const double want = 1.5 * sum + 0.5 * double(value(5 * (row * N + column)));
            const double got = double(float(static_cast<bf16 *>(pd.get())[row * N + column]));
            if (!(std::fabs(got - want) <= 0x1p-8 * std::fabs(want) + 0.02))
                return format("a wrong result: %g for %g at %zu, %zu", got, want, row, column);
        }
    return "";
}

// A mistake in each line that holds `line`, or in the middle one of them.
struct Mistake {
    const char *name, *line;
    bool all;
    Change change;
};
const Mistake mistakes[] = {
    {"64 bytes too few expected", "mbarrier.arrive.expect_tx", true, last_operand("32704")},
    {"no bytes expected", "mbarrier.arrive.expect_tx", true,
     [](Lines &l, size_t n) { replace(l[n], ".expect_tx", ""), l[n] = l[n].substr(0, l[n].rfind(',')) + ";"; }},
    {"an mbarrier for one arrival more", "mbarrier.init", false, last_operand("3")},
    {"no fence behind mbarrier.init", "fence.mbarrier_init", true, erase},
    {"no fence.proxy.async before a store", "fence.proxy.async", true, erase},
    {"no barrier before a store", "bar.sync %", true, erase},
    {"no wgmma.fence", "wgmma.fence", true, erase},
    {"no commit_group of wgmma", "wgmma.commit_group", true, erase},
    {"one group of wgmma less waited for", "wgmma.wait_group.sync.aligned 0", true, replaced("aligned 0", "aligned 1")},
    {early_release, "wgmma.wait_group.sync.aligned 1", true, replaced("aligned 1", "aligned 2")},
    {"a stage never released", "mbarrier.arrive.shared::cluster", true, erase},
    {"the phase of parity 0 waited for", "mbarrier.try_wait.parity", true,
     [](Lines &l, size_t n) {  // "... P1, [%r957], %r1107, %r959;"
         const size_t at = l[n].find("], ") + 3;
         put(l[n], at, l[n].find_first_of(",;", at), "0");
     }},
    {"the phase of parity 1 waited for", "mbarrier.try_wait.parity", true,
     [](Lines &l, size_t n) {
         const size_t at = l[n].find("], ") + 3;
         put(l[n], at, l[n].find_first_of(",;", at), "1");
     }},
    {"descriptors 16 bytes further", "wgmma.mma_async", false,
     [](Lines &l, size_t n) {
         const size_t at = l[n].find("}, ") + 3, end = l[n].find(',', at);
         const std::string descriptor = l[n].substr(at, end - at);
         put(l[n], at, end, "moved");
         l[n] = "{ .reg .b64 moved; add.s64 moved, " + descriptor + ", 1; " + l[n] + " }";
     }},
    {"a wgmma forgets its sums", "wgmma.mma_async", false,
     [](Lines &l, size_t n) {
         const size_t at = l[n].find(", p,");
         if (at != std::string::npos) put(l[n], at, at + 4, ", 0,");
     }},
    {"a TMA store not committed", "cp.async.bulk.commit_group", true, erase},
    {"TMA stores not waited for", "cp.async.bulk.wait_group", true, erase},
    {"stmatrix 16 bytes further", "stmatrix", false, [](Lines &l, size_t n) { l[n].insert(l[n].find(']'), "+16"); }},
    {"registers taken, and none given", "setmaxnreg.dec", true, erase},
    {"a load to the next 128 bytes", "complete_tx::bytes", false,
     [](Lines &l, size_t n) { l[n].insert(l[n].find(']'), "+128"); }},
    {"a copy for one block of two", ".multicast::cluster", true,
     [](Lines &l, size_t n) {  // the mask of blocks comes before the cache's policy
         const size_t end = l[n].rfind(','), at = l[n].rfind(',', end - 1);
         put(l[n], at, end, ", 1");
     }},
    {"no wait at the cluster's barrier", "barrier.cluster.wait", true, erase},
};
}  // namespace

TEST(PtxCutlass, ProductsAreRight) {
    for (const Kernel &kernel : kernels) {
        EXPECT_EQ(problem_of(kernel, 256, 256, 192), "") << kernel.name;
        EXPECT_EQ(problem_of(kernel, 264, 200, kernel.ragged_k), "") << kernel.name << ", ragged";
    }
}

TEST(PtxCutlass, MistakesAreNoticed) {
    for (const Kernel &kernel : kernels) {
        printf("%s\n", kernel.name);
        for (const Mistake &mistake : mistakes) {
            size_t changed = 0;
            const ptx::EditedPtx edited([&](std::string &text) {
                if (text.find(kernel.part) == std::string::npos || (text.find("e4m3") != std::string::npos) != kernel.fp8)
                    return false;
                return (changed += change_lines(text, mistake.line, mistake.all, mistake.change)) > 0;
            });
            if (!changed) continue;  // the kernel has no such line
            const std::string problem = problem_of(kernel, 264, 200, kernel.ragged_k);
            printf("  %-36s %2zu lines: %s\n", mistake.name, changed, problem.substr(0, problem.find('\n')).c_str());
            EXPECT_EQ(problem == "", std::string(mistake.name) == kernel.harmless) << kernel.name << ": " << mistake.name;
        }
    }
}
