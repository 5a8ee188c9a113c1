// Attention on Hopper's instructions (llmc/ops/attention_hopper.cuh): shapes at the edges of its tiles, what its producer must clear, mistakes that the
// interpreter must notice, and that a GPU without these instructions gets the kernels for every GPU.
#include <gtest/gtest-spi.h>

#include <sstream>

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/ops/attention.cuh"
#include "../../cuda/check.cuh"
#include "../../reference_attention.h"

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
bool contains(const std::string &line, const std::string &what) { return line.find(what) != std::string::npos; }
size_t launches_of(const std::string &kernel) {
    size_t n = 0;
    for (const ptx::Launches &l : ptx::launched()) n += contains(l.name, kernel) ? l.launches : 0;
    return n;
}

// ---- changes of single lines of PTX, by which a test makes the mistakes of a compiler or of a hand

using Lines = std::vector<std::string>;
using Change = std::function<void(Lines &lines, size_t n)>;  // of the line n

void replace(std::string &line, const std::string &from, const std::string &to) {
    if (const size_t at = line.find(from); at != std::string::npos) line.replace(at, from.size(), to);
}
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

// Changes every line that holds `what`, or the middle one. Returns how many lines have changed.
size_t change_lines(std::string &text, const std::string &what, bool all, const Change &change) {
    Lines lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    std::vector<size_t> found;
    for (size_t n = lines.size(); n-- > 0;)  // from the end, so that a line which moves down is not met again
        if (contains(lines[n], what)) found.push_back(n);
    if (!all && !found.empty()) found = {found[found.size() / 2]};
    size_t changed = 0;
    for (const size_t n : found) {
        const Lines before = lines;
        change(lines, n);
        changed += lines != before;
    }
    text.clear();
    for (const std::string &line : lines) text += line + "\n";
    return changed;
}

// A mistake in each line that holds `line`, or in the middle one of them, and what the interpreter says of the first kernel that has such a line.
struct Mistake {
    const char *name, *line;
    bool all;
    Change change;
    const char *said;
};
constexpr const char *polls = "loads a value of device memory again and again", *no_order = "nothing orders these additions";
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
    // Blocks run one after the other here. What another one's turn waits for is there, or never comes.
    {"a block's turn not passed on", "st.release.gpu", true, erase, polls},
    {"a turn passed on to no block", "st.release.gpu", true, last_operand("77"), polls},
    {"a turn passed on without a release", "st.release.gpu", true, replaced("release", "relaxed"), no_order},
    {"a turn waited for without an acquire", "ld.acquire.gpu", true, replaced("acquire", "relaxed"), no_order},
    {"a turn passed on before the sums are added", "cp.async.bulk.wait_group 0", true, replaced("wait_group", "wait_group.read"),
     "by a copy that may still have been running"},
    {"no fence of proxies behind the wait", "fence.proxy.async.global", true, erase,
     "no fence.proxy.async between the ld.acquire and this"},
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

// Blocks of a rank's queries that see no key of the last part have their sums rounded, too.
TEST(AttentionHopper, PartsBeginAndEndTheirSums) {
    const auto others = [] { return launches_of("fill_kernel") + launches_of("round_floats"); };
    const AttentionCase a{{100, 330, 20}, 0, 2, 1, 64};
    const size_t before = others();
    check_ranks("contiguous over 3", a, deal(a.T(), 3, 3, false));
    EXPECT_EQ(others(), before);
    const ptx::OtherGpu other(80);
    check_ranks("contiguous over 3", a, deal(a.T(), 3, 3, false));
    EXPECT_EQ(others(), before + 6);
}

// With cuts where documents of any length begin: more of them than lanes, some with no row between two tiles, at the edges of tiles, and between pieces.
TEST(AttentionHopper, TilesEndWhereDocumentsBegin) {
    std::vector<size_t> forty, ones(70, 1);
    for (size_t i = 0; i < 40; i++) forty.push_back(1 + i * 7 % 40);
    ones.push_back(150);
    for (const size_t D : {64, 128}) {
        check("40 documents, 2:1", {forty, 0, 2, 1, D, 1});
        check("documents of a token", {ones, 0, 1, 1, D, 1});
        check("borders at the edges of tiles", {{128, 384, 192, 64}, 0, 1, 1, D, 1});
        check("a long one among short ones", {{30, 40, 290, 9, 20}, 0, 2, 1, D});
        check("windows", {{100, 290, 270}, 150, 2, 1, D});
        check("short windows", {forty, 24, 1, 1, D, 1});
        const AttentionCase parts{{5, 290, 1, 130, 20}, 0, 2, 1, D, 1}, many{forty, 150, 1, 1, D, 1};
        check_ranks("zigzag over 2", parts, deal(parts.T(), 2, 4, true));
        check_ranks("contiguous over 3", many, deal(many.T(), 3, 3, false));
    }
}

// A recorded launch has its pointers and sizes, and finds other documents behind them. Results are those of launches with as many cuts as there are.
TEST(AttentionHopper, OneLaunchServesRowsOfOtherDocuments) {
    for (const size_t D : {64, 128}) {
        const size_t T = 900;
        DeviceArray<int32_t> first_key(T), cuts(TileCuts::most(T));
        for (const std::vector<size_t> &documents : std::vector<std::vector<size_t>>{{300, 300, 300}, {T}, {40, 560, 300}}) {
            const AttentionCase a{documents, 0, 2, 1, D};
            const Values in(a);
            std::vector<int32_t> cut = a.cuts();
            cut.resize(cuts.size(), INT32_MAX);
            const auto refill = [](auto &array, const std::vector<int32_t> &with) {
                cudaMemcpy(array.data(), with.data(), with.size() * sizeof(int32_t), cudaMemcpyHostToDevice);
            };
            refill(first_key, a.first_key()), refill(cuts, cut);
            const Pieces all{{{0, T, 0}}, 1};
            AttentionRank<DeviceArray, bf16> s(CudaBf16{}, all, in.qkv, in.dout, T, a);
            const AttentionInputs<bf16> inputs{
                s.view(a, 0), s.view(a, a.H), s.view(a, a.H + a.KV), first_key.data(), {cuts.data(), cuts.size()}, a.shape(T)};
            attention_forward(CudaBf16{}, s.out.data(), s.out32.data(), s.lse.data(), inputs, all);
            attention_backward(CudaBf16{}, s.qkv.data(), s.grads(s), s.delta.data(), s.scratch.data(), inputs, s.out.data(),
                               s.dout.data(), s.lse.data(), all);
            EXPECT_TRUE(same_rows(a, {s.out.values(), s.qkv.values(), {}}, run(a, in), 0, T)) << D;
        }
    }
}

TEST(AttentionHopper, NumberOfOtherDocumentsChangesNoBit) {
    for (const size_t D : {64, 128}) {
        const AttentionCase one{{341, 300, 100}, 0, 3, 1, D}, many{{1, 40, 300, 300, 90, 10}, 0, 3, 1, D};
        const Values in(one);
        EXPECT_TRUE(same_rows(one, run(many, in), run(one, in), 341, 641)) << D;  // the document that both have
    }
}

// Behind the last key of a block's last tile are keys of later queries. They take no part, not even as 0 * NaN, and neither do those in front of the first.
TEST(AttentionHopper, KeysOutsideOfTheTilesTakeNoPart) {
    for (const size_t D : {64, 128}) {
        const size_t tile = 384;                                              // a multiple of all tiles
        const AttentionCase a{{tile, 50, tile - 50, 100}, 0, 2, 1, D, 1000};  // no cuts
        const Values in(a);
        Values poisoned = in;
        const size_t first = tile * a.row(), last = 2 * first;
        std::fill(poisoned.qkv.begin(), poisoned.qkv.begin() + long(first), bf16(NAN));
        std::fill(poisoned.qkv.begin() + long(last), poisoned.qkv.end(), bf16(NAN));
        EXPECT_TRUE(same_rows(a, run(a, poisoned), run(a, in), tile, 2 * tile)) << D;
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
        EXPECT_EQ(counts(D), std::pair(10ul, 0ul));  // one kernel backward, where others have two
        for (const int capability : {80, 89, 100, 120}) {
            if (capability > 80 && D > 64) continue;
            const ptx::OtherGpu other(capability);
            EXPECT_EQ(counts(D), std::pair(0ul, 15ul)) << capability;
        }
    }
    EXPECT_EQ(counts(96), std::pair(0ul, 15ul));
}

// In whatever order blocks start, the sums have the same bits, as each waits for its turn. The last ones start first here. The keys' first columns
// are constants: dQ there is a multiple of the sum of dS, which is 0 but for errors, and these depend on the order.
TEST(AttentionHopper, OrdersOfBlocksChangeNoBit) {
    const auto changed = [](size_t D) {
        const AttentionCase a{{5, 490, 33}, 0, 2, 1, D};
        Values in(a);
        for (size_t t = 0; t < a.T(); t++)
            for (size_t c = 0; c < D / 2; c++) in.qkv[(t * (a.H + 2 * a.KV) + a.H) * D + c] = bf16(1 + float(c) / 64);
        const auto want = run(a, in);
        const ptx::While<ptx::last_first> reversed(true);
        const auto got = run(a, in);
        return !same_bits(got.dqkv.data(), want.dqkv.data(), want.dqkv.size());
    };
    for (const size_t D : {64, 128}) {
        EXPECT_FALSE(changed(D)) << D;
        const ptx::EditedPtx impatient([](std::string &text) {  // by a kernel that loads the turn once, and does not wait for it
            return change_lines(text, "ld.acquire.gpu", true, [](Lines &l, size_t n) {
                       while (!contains(l[n], "bra")) n++;
                       l[n].clear();
                   }) > 0;
        });
        EXPECT_TRUE(changed(D)) << D;
    }
}

// Each mistake in each kernel is named.
TEST(AttentionHopper, MistakesAreNamed) {
    const ptx::While<ptx::sums_in_order> in_order(true);
    EXPECT_EQ(attention_is_wrong(), "");
    for (const Mistake &mistake : mistakes) {
        size_t in_kernels = 0;
        for (const char *mangled : {"31attention_forward_hopper_kernelILi64E", "32attention_backward_hopper_kernelILi64E"}) {
            size_t changed = 0;
            const ptx::EditedPtx edited([&](std::string &text) {
                const size_t begin = text.find(std::string(".entry _ZN9attention3gpu") + mangled);
                if (begin == text.npos) return false;
                std::string kernel = text.substr(begin, text.find("\n}\n", begin) - begin);
                const size_t before = kernel.size();
                changed += change_lines(kernel, mistake.line, mistake.all, mistake.change);
                text.replace(begin, before, kernel);
                return changed > 0;
            });
            if (!changed) continue;
            const std::string problem = attention_is_wrong();
            printf("  %-46s %zu lines: %s\n", mistake.name, changed, problem.substr(0, problem.find('\n')).c_str());
            EXPECT_NE(problem, "") << mistake.name << " in " << mangled;
            if (in_kernels++ == 0) {
                EXPECT_TRUE(contains(problem, mistake.said)) << mistake.name << ": " << problem;
            } else if (std::string(mistake.said) != "a wrong result") {  // named by the interpreter
                EXPECT_NE(problem, "a wrong result") << mistake.name << " in " << mangled;
            }
        }
        EXPECT_GT(in_kernels, 0u) << mistake.name;
    }
}

// What the units of a multiprocessor are asked for by all launches of the kernels that have `kernel` in their names.
using Demand = ptx::Demand;
static Demand asked(const std::string &kernel) {
    Demand sum{};
    for (const ptx::Launches &l : ptx::launched())
        if (contains(l.name, kernel))
            for (const ptx::BlockWork &block : l.blocks)
                for (size_t unit = 0; unit < ptx::units; unit++) sum[unit] += block.demand[unit];
    return sum;
}
struct Passes {
    Demand forward, backward;
};
static Passes asked_by(const AttentionCase &a) {
    const auto now = [] { return Passes{asked("attention_forward_hopper"), asked("attention_backward_")}; };
    const ptx::While<ptx::counting> counted(true);
    const Passes before = now();
    run(a, Values(a));
    Passes asked = now();
    for (size_t unit = 0; unit < ptx::units; unit++)
        asked.forward[unit] -= before.forward[unit], asked.backward[unit] -= before.backward[unit];
    return asked;
}

constexpr ptx::Unit units_of_attention[] = {ptx::Unit::wgmma, ptx::Unit::shared, ptx::Unit::issue, ptx::Unit::special};

// docs/attention_hopper.md. The demands of FlashAttention-3's own kernels, as this interpreter counts them, for a head of one document of 2048 tokens.
TEST(AttentionHopper, AsksForNoMoreThanFlashAttention3) {
    struct Case {
        size_t D;
        double forward[4], backward[4];
    };
    const Case cases[] = {{64, {155136, 129498, 907072, 80256}, {348160, 405056, 1109647, 69632}},
                          {128, {278528, 256416, 864113, 72064}, {696320, 896064, 1406743, 69632}}};
    const double most[] = {1.05, 1.06, 1.05, 1.05};  // sums of dK and dV leave as floats: 1.04 at 4096
    for (const Case &c : cases) {
        const Passes ours = asked_by({{2048}, 0, 1, 1, c.D});
        for (size_t n = 0; n < 4; n++) {
            const size_t unit = size_t(units_of_attention[n]);
            EXPECT_LT(ours.forward[unit], 1.05 * c.forward[n]) << "D " << c.D << ", unit " << n;
            EXPECT_LT(ours.backward[unit], most[n] * c.backward[n]) << "D " << c.D << ", unit " << n;
        }
    }
}

// Documents of one row ask for what they would ask for in rows of their own if tiles begin where they begin.
TEST(AttentionHopper, PackedDocumentsAskForNoMoreThanRowsOfTheirOwn) {
    for (const size_t D : {64, 128}) {
        const AttentionCase packed{{760, 760}, 0, 1, 1, D}, uncut{{760, 760}, 0, 1, 1, D, 1000}, one{{760}, 0, 1, 1, D};
        const Passes by_document = asked_by(packed), by_row = asked_by(uncut), own = asked_by(one);
        for (const ptx::Unit u : units_of_attention) {
            const size_t unit = size_t(u);
            printf("  D %3zu, unit %zu: forward %.3f, by row %.3f; backward %.3f, by row %.3f\n", D, unit,
                   by_document.forward[unit] / (2 * own.forward[unit]), by_row.forward[unit] / (2 * own.forward[unit]),
                   by_document.backward[unit] / (2 * own.backward[unit]), by_row.backward[unit] / (2 * own.backward[unit]));
            EXPECT_LT(by_document.forward[unit], 2 * own.forward[unit] / 0.96);
            EXPECT_LT(by_document.backward[unit], 2 * own.backward[unit] / 0.96);
            EXPECT_LT(by_document.backward[unit], by_row.backward[unit]);
        }
    }
}
