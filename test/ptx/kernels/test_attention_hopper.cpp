// Attention on Hopper's instructions (llmc/ops/attention_hopper.cuh): shapes at the edges of its tiles, what its producer must clear, mistakes that the
// interpreter must notice, and that a GPU without these instructions gets the kernels for every GPU.
#include <gtest/gtest-spi.h>

#include "../../../dev/emulator/ptx/prediction.h"
#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/ops/attention.cuh"
#include "../../cuda/check.cuh"
#include "../../reference_attention.h"
#include "../mutations.h"
#include "counted.h"

namespace {

using Values = AttentionValues<bf16>;
AttentionResult<bf16> run(const AttentionCase &a, const Values &in) { return run_attention<DeviceArray>(CudaBf16{}, a, in); }
void check(const char *what, const AttentionCase &a) {
    const Values in(a);
    check_attention(what, a, in, run(a, in));
}
void check_ranks(const char *what, const AttentionCase &a, const std::vector<Pieces> &ranks) {
    const Values in(a);
    check_attention(what, a, in, run_attention<DeviceArray>(CudaBf16{}, a, in, ranks));
}
size_t launches_of(const std::string &kernel) {
    size_t n = 0;
    for (const ptx::Launches &l : ptx::launched()) n += contains(l.name, kernel) ? l.launches : 0;
    return n;
}

// A mistake in each line that holds `line`, or in the middle one of them, and what the interpreter says.
struct Mistake {
    const char *name, *line;
    bool all;
    Change change;
    const char *said;
};
Change replaced(const std::string &from, const std::string &to) {
    return [=](Lines &l, size_t n) { replace(l[n], from, to); };
}
void erase(Lines &l, size_t n) { l[n].clear(); }
void put(std::string &line, size_t begin, size_t end, const std::string &text) {
    line = line.substr(0, begin) + text + line.substr(end);
}
Change last_operand(const std::string &value) {
    return [=](Lines &l, size_t n) { put(l[n], l[n].rfind(',') + 1, l[n].size(), " " + value + ";"); };
}

const Mistake mistakes[] = {
    {"too few bytes expected", "mbarrier.arrive.expect_tx", true, last_operand("16256"),
     "24576 bytes of the 16256 that arrivals expect"},
    {"no bytes expected", "mbarrier.arrive.expect_tx", true,
     [](Lines &l, size_t n) { replace(l[n], ".expect_tx", ""), l[n] = l[n].substr(0, l[n].rfind(',')) + ";"; },
     "before the copy to it has landed"},
    {"an mbarrier for one arrival more", "mbarrier.init", false, last_operand("13"), "has 0 of 1 arrivals"},
    {"no fence behind mbarrier.init", "fence.mbarrier_init", true, erase, "no fence.mbarrier_init"},
    {"no fence.proxy.async behind the zeros", "fence.proxy.async", true, erase, "no fence.proxy.async in between"},
    {"no wgmma.fence", "wgmma.fence", true, erase, "no wgmma.fence precedes"},
    {"no commit_group of wgmma", "wgmma.commit_group", true, erase, "accesses a sum of the wgmma"},
    {"sums not waited for", "wgmma.wait_group.sync.aligned 0", true, replaced("aligned 0", "aligned 1"),
     "accesses a sum of the wgmma"},
    {"a stage released too early", "wgmma.wait_group.sync.aligned 1", true, replaced("aligned 1", "aligned 2"),
     "accesses a sum of the wgmma"},
    {"a stage released before its product has ended", "wgmma.wait_group.sync.aligned 0", false,
     [](Lines &l, size_t n) {  // the wait goes behind the arrival of lane 0 and the label where the others join it
         size_t to = n;
         while (!contains(l[to], "mbarrier.arrive")) to++;
         while (l[to][0] != '$') to++;
         std::rotate(l.begin() + long(n), l.begin() + long(n) + 1, l.begin() + long(to) + 1);
     },
     "which wgmma of warpgroup"},
    {"one wgmma.fence less", "wgmma.fence", false, erase, "since the last wgmma.fence"},
    {"a stage never released", "mbarrier.arrive.shared::cta", true, erase, "has 0 of 1 arrivals"},
    {"the phase of parity 0 waited for", "mbarrier.try_wait.parity", true, last_operand("0"), "No warp can go on"},
    {"the phase of parity 1 waited for", "mbarrier.try_wait.parity", true, last_operand("1"), "more often than the 1 times"},
    {"descriptors 16 bytes further", "wgmma.mma_async", false,
     [](Lines &l, size_t n) {
         const size_t end = l[n].find(", keep"), at = l[n].rfind(", ", end - 1) + 2;
         const std::string descriptor = l[n].substr(at, end - at);
         put(l[n], at, end, "moved");
         l[n] = "{ .reg .b64 moved; add.s64 moved, " + descriptor + ", 1; " + l[n] + " }";
     },
     "a wrong result"},
    {"a wgmma forgets its sums", "wgmma.mma_async", false, replaced(", keep,", ", 0,"), "a wrong result"},
    {"registers taken, and none given", "setmaxnreg.dec", true, erase, "setmaxnreg waits for 160 registers"},
    {"a load to the next 128 bytes", "complete_tx::bytes", false, [](Lines &l, size_t n) { l[n].insert(l[n].find(']'), "+128"); },
     "while a copy to it is on its way"},
    {"a turn never ended", "bar.arrive", true, erase, "waits at barrier 1 for threads that do not come"},
};

// Empty if nothing was wrong. Blocks of several tiles, the last of which are short.
std::string attention_is_wrong() {
    const AttentionCase a{{5, 490, 33}, 0, 1, 1, 64};
    const Values in(a);
    testing::TestPartResultArray failures;
    const testing::ScopedFakeTestPartResultReporter intercept(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    try {
        check_attention("attention", a, in, run(a, in));
    } catch (const Error &error) {
        return error.what();
    }
    return failures.size() ? "a wrong result" : "";
}

}  // namespace

TEST(AttentionHopper, EqualsReference) {
    for (const size_t D : {64, 128}) {
        check("a tile", {{D == 64 ? 192u : 128u}, 0, 1, 1, D});
        check("a row more than a tile", {{D == 64 ? 193u : 129u}, 0, 1, 1, D});
        check("one document, 4:2", {{600}, 0, 4, 2, D});
        check("packed, 6:2", {{5, 1, 13, 118, 2, 230, 1, 1, 64}, 0, 6, 2, D});
        check("documents of a tile", {{128, 256, 128, 64}, 0, 1, 1, D});
        check("window 150, 5:1", {{430, 20}, 150, 5, 1, D});
        check("window 24", {{200, 30, 1, 217}, 24, 2, 1, D});
        check("window 1", {{270, 3}, 1, 2, 1, D});
    }
}

TEST(AttentionHopper, AnySplitOverRanksEqualsTheWhole) {
    for (const size_t D : {64, 128}) {
        const AttentionCase packed{{5, 1, 13, 18, 2, 430}, 0, 2, 1, D}, window{{220, 1, 200}, 124, 1, 1, D};
        check_ranks("contiguous over 2", packed, deal(packed.T(), 2, 2, false));
        check_ranks("zigzag over 3", window, deal(window.T(), 3, 6, true));
        if (D == 64) check_ranks("16 pieces on each of 2", packed, deal(packed.T(), 2, 32, false));
    }
}

TEST(AttentionHopper, OtherDocumentsChangeNoBit) {
    for (const size_t D : {64, 128}) {
        const AttentionCase a{{40, 1, 300, 77}, 0, 3, 1, D};
        const size_t begin = 41, end = 341, row = (a.H + 2 * a.KV) * D, out_row = a.H * D;  // the document of 300
        const Values in(a);
        Values noisy = in;
        const auto noise = random_values<bf16>(in.qkv.size(), 3, 20);
        std::copy(noise.begin() + long(begin * row), noise.begin() + long(end * row), noisy.qkv.begin() + long(begin * row));
        const auto want = run(a, in), got = run(a, noisy);
        for (size_t t = 0; t < a.T(); t++) {
            const bool same = same_bits(&got.out[t * out_row], &want.out[t * out_row], out_row) &&
                              same_bits(&got.dqkv[t * row], &want.dqkv[t * row], row);
            EXPECT_EQ(same, t < begin || t >= end) << t;
        }
    }
}

// Behind the last key of a block's last tile are keys of later queries. They take no part, not even as 0 * NaN, and neither do those in front of the first.
TEST(AttentionHopper, KeysOutsideOfTheTilesTakeNoPart) {
    for (const size_t D : {64, 128}) {
        const size_t tile = 384;  // a multiple of all tiles
        const AttentionCase a{{tile, 50, tile - 50, 100}, 0, 2, 1, D};
        const size_t row = (a.H + 2 * a.KV) * D, out_row = a.H * D;
        const Values in(a);
        Values poisoned = in;
        const auto poison = [&](size_t first, size_t last) {
            std::fill(poisoned.qkv.begin() + long(first * row), poisoned.qkv.begin() + long(last * row), bf16(NAN));
        };
        poison(0, tile), poison(2 * tile, a.T());
        const auto want = run(a, in), got = run(a, poisoned);
        EXPECT_TRUE(same_bits(&got.out[tile * out_row], &want.out[tile * out_row], tile * out_row)) << D;
        EXPECT_TRUE(same_bits(&got.dqkv[tile * row], &want.dqkv[tile * row], tile * row)) << D;
    }
}

TEST(AttentionHopper, OtherGpusAndWidthsHaveOtherKernels) {
    const auto counts = [](size_t D) {
        const auto now = [] {
            return std::pair(launches_of("_hopper_kernel"), launches_of("attention_forward_kernel5") + launches_of("s_kernel4"));
        };
        const auto before = now();
        check("packed, 2:1", {{100, 1, 59}, 0, 2, 1, D});
        check_ranks("over 2", {{25, 40}, 0, 2, 1, D}, deal(65, 2, 2, false));
        return std::pair(now().first - before.first, now().second - before.second);
    };
    for (const size_t D : {64, 128}) {
        EXPECT_EQ(counts(D), std::pair(15ul, 0ul));
        for (const int capability : {80, 89, 100, 120}) {
            if (capability > 80 && D > 64) continue;
            const ptx::OtherGpu other(capability);
            EXPECT_EQ(counts(D), std::pair(0ul, 15ul)) << capability;
        }
    }
    EXPECT_EQ(counts(96), std::pair(0ul, 15ul));
}

// Each mistake in each kernel. The messages expected are those of the forward kernel, which has all of these lines. Two are harmless for the kernel of dK
// and dV, which waits for all products behind its loop alone, and has one fence for the compiler's sake.
TEST(AttentionHopper, MistakesAreNamed) {
    EXPECT_EQ(attention_is_wrong(), "");
    const std::pair<const char *, const char *> kernels[] = {{"forward", "31attention_forward_hopper_kernelILi64E4bf16E"},
                                                             {"dK, dV", "37attention_backward_keys_hopper_kernelILi64ELb0E"},
                                                             {"dQ", "40attention_backward_queries_hopper_kernelILi64E4bf16E"}};
    for (const Mistake &mistake : mistakes)
        for (const auto &[name, mangled] : kernels) {
            const bool forward = &name == &kernels[0].first;
            size_t changed = 0;
            const ptx::EditedPtx edited([&, mangled = mangled](std::string &text) {
                const size_t begin = text.find(std::string(".entry _ZN9attention3gpu") + mangled);
                if (begin == text.npos) return false;
                std::string kernel = text.substr(begin, text.find("\n}\n", begin) - begin);
                const size_t before = kernel.size();
                changed += change_lines(kernel, mistake.line, mistake.all, mistake.change);
                text.replace(begin, before, kernel);
                return changed > 0;
            });
            if (!changed && !forward) continue;
            const std::string problem = attention_is_wrong();
            printf("  %-46s %-7s %2zu lines: %s\n", mistake.name, name, changed, problem.substr(0, problem.find('\n')).c_str());
            EXPECT_GT(changed, 0u) << mistake.name;
            const bool harmless = std::string(name) == "dK, dV" && (contains(mistake.name, "before its product has ended") ||
                                                                    contains(mistake.name, "one wgmma.fence less"));
            EXPECT_EQ(problem.empty(), harmless) << mistake.name << " in " << name;
            if (forward) {
                EXPECT_TRUE(contains(problem, mistake.said)) << mistake.name << ": " << problem;
            }
        }
}

// What the units of a multiprocessor are asked for by a causal pass over one document of T, in TFLOP/s if the unit were the only one and all
// multiprocessors had as much to do. `launch` has four blocks: a pair of blocks more has the same tiles more, without a mask.
static std::array<double, ptx::units> alone(const ptx::Launches &launch, size_t D, size_t T, size_t queries) {
    const auto block = [&](size_t n, size_t unit) { return launch.blocks.at(3 - n).demand[unit]; };  // long ones go first
    const ptx::Gpu &h100 = ptx::gpus[0];
    std::array<double, ptx::units> tflops{};
    for (size_t unit = 0; unit < ptx::units; unit++) {
        double demand = 0;
        for (size_t n = 0; n < ceil_div(T, queries); n++)
            demand += block(2 + n % 2, unit) + (double(n / 2) - 1) * (block(2 + n % 2, unit) - block(n % 2, unit));
        const double rate = unit == size_t(ptx::Unit::issue) ? 4 : h100.rate[unit];  // as FlashAttention-3's was computed
        tflops[unit] = 2 * double(T) * double(T) * double(D) / (demand / rate / (h100.multiprocessors * h100.clock)) * 1e-12;
    }
    return tflops;
}

// docs/attention_hopper.md. FlashAttention-3's own kernel, in an earlier state of this interpreter: 920, 1025, 1688 and 1781 at D 128, T 4096.
TEST(AttentionHopper, AsksNoMoreThanFlashAttention3) {
    for (const size_t D : {64, 128}) {
        const size_t queries = D == 64 ? 192 : 128;
        const AttentionCase a{{4 * queries}, 0, 1, 1, D};
        const auto launch =
            counted(format("attention_forward_hopper_kernel<%zu, bf16>", D), {1, 4, 1}, [&] { run(a, Values(a)); });
        for (const size_t T : {4096, 16384}) {
            const auto tflops = alone(launch, D, T, queries);
            const auto of = [&](ptx::Unit unit) { return tflops[size_t(unit)]; };
            printf("  D %3zu, T %5zu: tensor %.0f, shared %.0f, issue %.0f, special %.0f\n", D, T, of(ptx::Unit::wgmma),
                   of(ptx::Unit::shared), of(ptx::Unit::issue), of(ptx::Unit::special));
            if (D != 128 || T != 4096) continue;
            EXPECT_GT(of(ptx::Unit::wgmma), 920 / 1.05);
            EXPECT_GT(of(ptx::Unit::shared), 1025 / 1.05);
            EXPECT_GT(of(ptx::Unit::issue), 1688 / 1.05);
            EXPECT_GT(of(ptx::Unit::special), 1781 / 1.05);
        }
    }
}
