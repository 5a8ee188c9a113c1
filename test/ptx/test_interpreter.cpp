// The PTX interpreter on kernels written by hand: results of instructions, and errors on which a GPU would be silent.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "../../dev/emulator/ptx/prediction.h"
#include "../../llmc/core/dtype.h"

namespace {

// A function that nvcc did not inline: declared, called, and defined at the end.
constexpr const char *declaration = ".func (.param .b32 func_retval0) twice (.param .b32 twice_param_0);";
constexpr const char *definition = R"(
    .func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
    {
    .reg .pred %p<2>; .reg .b32 %r<9>;
    ld.param.u32 %r1, [twice_param_0];
    setp.gt.u32 %p1, %r1, 1000;
    @%p1 bra LARGE;
    add.s32 %r2, %r1, %r1;
    st.param.b32 [func_retval0+0], %r2;
    ret;
    LARGE: st.param.b32 [func_retval0+0], 7;
    ret;
    }
)";

// Arrays of 4096 words: x holds its indices, y is the result. A thread knows %r0 itself, %r1 its block, %r2 the block's shared memory;
// %rd0 and %rd1 the arrays, %rd2 and %rd3 its own words of them, %r3 its own word of shared memory.
constexpr const char *prologue = R"(
    .extern .shared .align 1024 .b8 buffer[];
    .visible .entry kernel(.param .u64 kernel_param_0, .param .u64 kernel_param_1)
    {
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .f64 %fd<9>; .reg .b64 %rd<99>;
    ld.param.u64 %rd0, [kernel_param_0];
    ld.param.u64 %rd1, [kernel_param_1];
    mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;  mov.u32 %r2, buffer;
    mul.wide.u32 %rd2, %r0, 4;  add.s64 %rd3, %rd1, %rd2;  add.s64 %rd2, %rd0, %rd2;
    shl.b32 %r3, %r0, 2;  add.s32 %r3, %r3, %r2;
)";
constexpr size_t words = 4096;

struct Result {
    ptx::Counts counts;
    std::vector<uint32_t> y = std::vector<uint32_t>(words, 0);
};

Result run(const std::string &body, unsigned threads = 32, unsigned blocks = 1, size_t shared = 16384) {
    ptx::Module module(declaration + (prologue + body) + "\nret;\n}\n" + definition);
    alignas(256) static uint32_t x[words];
    for (uint32_t i = 0; i < words; i++) x[i] = i;
    Result result;
    uint32_t *const px = x, *const py = result.y.data();
    ptx::DeviceMemory memory;
    memory.add(px, sizeof x);
    memory.add(py, words * sizeof *py);
    const ptx::Launch launch{{blocks, 1, 1}, threads, shared, true};
    result.counts = ptx::run(module.kernel("kernel"), launch, {&px, &py}, memory);
    return result;
}

std::string error_of(const std::string &body, unsigned threads) {
    try {
        run(body, threads);
    } catch (const Error &error) {
        return error.what();
    }
    return "no error";
}
void expect_error(const std::string &body, const std::string &what, unsigned threads = 32) {
    const std::string error = error_of(body, threads);
    EXPECT_NE(error.find(what), std::string::npos) << body << "\n" << error;
}

uint32_t word(const std::string &body) { return run(body + "st.global.u32 [%rd3], %r20;").y[0]; }
float single(const std::string &body) { return std::bit_cast<float>(run(body + "st.global.f32 [%rd3], %f20;").y[0]); }
std::string hex(float x) { return format("0f%08X", std::bit_cast<uint32_t>(x)); }

}  // namespace

// ---- arithmetic -----------------------------------------------------------------------------------------------------------------------

TEST(PtxArithmetic, Integers) {
    EXPECT_EQ(word("add.s32 %r20, 2147483647, 1;"), 0x8000'0000u);
    EXPECT_EQ(word("mul.hi.s32 %r20, -5, 1000000000;"), uint32_t((-5ll * 1000000000) >> 32));
    EXPECT_EQ(word("mov.u64 %rd9, -1;  mul.hi.u64 %rd9, %rd9, %rd9;  cvt.u32.u64 %r20, %rd9;"), uint32_t(-2));
    EXPECT_EQ(word("mad.lo.s32 %r20, -5, 7, 3;"), uint32_t(-32));
    EXPECT_EQ(word("div.s32 %r20, -7, 2;"), uint32_t(-3));
    EXPECT_EQ(word("div.u32 %r20, 4294967295, 10;"), 429496729u);
    EXPECT_EQ(word("rem.u32 %r20, 4294967295, 10;"), 5u);
    EXPECT_EQ(word("min.s32 %r20, -7, 2;"), uint32_t(-7));
    EXPECT_EQ(word("min.u32 %r20, -7, 2;"), 2u);
    EXPECT_EQ(word("shr.s32 %r20, -8, 1;"), uint32_t(-4));
    EXPECT_EQ(word("shr.s32 %r20, -8, 40;"), ~0u);
    EXPECT_EQ(word("shr.u32 %r20, -8, 32;"), 0u);
    EXPECT_EQ(word("shl.b32 %r20, 1, 32;"), 0u);
    EXPECT_EQ(word("bfi.b32 %r20, 7, -1, 4, 8;"), 0xffff'f07fu);
    EXPECT_EQ(word("prmt.b32 %r20, 1144201745, -2003195205, 4180;"), 0x2211'aabbu);
    EXPECT_EQ(word("brev.b32 %r20, 10;"), 0x5000'0000u);
    EXPECT_EQ(word("bfind.shiftamt.u32 %r20, 65536;"), 15u);
    EXPECT_EQ(word("mul.wide.s32 %rd9, -3, 5;  shr.u64 %rd9, %rd9, 32;  cvt.u32.u64 %r20, %rd9;"), ~0u);
    EXPECT_EQ(word("mov.b64 %rd9, {1, 2};  mov.b64 {%r19, %r20}, %rd9;"), 2u);
    EXPECT_EQ(word("mov.u32 %r9, 65535;  cvt.u16.u32 %rs1, %r9;  cvt.s32.s16 %r20, %rs1;"), ~0u);
    EXPECT_EQ(word("setp.lt.s32 %p1, -1, 0;  selp.b32 %r20, 3, 4, %p1;"), 3u);
    EXPECT_EQ(word("setp.lt.u32 %p1, -1, 0;  not.pred %p2, %p1;  and.pred %p3, %p1, %p2;  selp.b32 %r20, 3, 4, %p3;"), 4u);
}

TEST(PtxArithmetic, FloatsAndTheirRoundings) {
    const std::string one = hex(1), tiny = hex(0x1p-30f), minus = hex(-0x1p-30f), nan = "0f7FFFFFFF";
    EXPECT_EQ(single("add.f32 %f20, " + one + ", " + tiny + ";"), 1);
    EXPECT_EQ(single("add.rz.f32 %f20, " + one + ", " + minus + ";"), std::nextafterf(1, 0));
    EXPECT_EQ(single("add.rz.f32 %f20, " + hex(-1) + ", " + tiny + ";"), std::nextafterf(-1, 0));
    EXPECT_EQ(single("fma.rm.f32 %f20, " + one + ", " + one + ", " + minus + ";"), std::nextafterf(1, 0));
    EXPECT_EQ(single("fma.rm.f32 %f20, " + one + ", " + one + ", " + tiny + ";"), 1);
    EXPECT_EQ(single("fma.rn.f32 %f20, " + hex(1 + 0x1p-12f) + ", " + hex(1 + 0x1p-12f) + ", " + hex(-1 - 0x1p-11f) + ";"),
              0x1p-24f);
    EXPECT_EQ(single("max.f32 %f20, " + nan + ", " + one + ";"), 1);
    EXPECT_EQ(single("cvt.sat.f32.f32 %f20, " + nan + ";"), 0);
    EXPECT_EQ(word("setp.ltu.f32 %p1, " + nan + ", " + one + ";  selp.b32 %r20, 3, 4, %p1;"), 3u);
    EXPECT_EQ(word("setp.lt.f32 %p1, " + nan + ", " + one + ";  selp.b32 %r20, 3, 4, %p1;"), 4u);
    EXPECT_EQ(word("cvt.rn.bf16x2.f32 %r20, " + hex(3) + ", " + hex(1.00390625f) + ";"), 0x4040'3f80u);  // a tie, to even
    EXPECT_EQ(word("cvt.rzi.s32.f32 %r20, " + hex(-3.9f) + ";"), uint32_t(-3));
    EXPECT_EQ(word("cvt.rzi.s32.f32 %r20, " + hex(1e20f) + ";"), 0x7fff'ffffu);
}

// Wrong by at most the manual's bound, and not exact; powers of integers are.
TEST(PtxArithmetic, ApproximateFunctions) {
    double worst_exp2 = 0, worst_rsqrt = 0;
    for (float x = 0.1f; x < 9; x += 0.37f) {
        worst_exp2 = std::max(worst_exp2,
                              std::fabs(double(single("ex2.approx.ftz.f32 %f20, " + hex(x) + ";")) / std::exp2(double(x)) - 1));
        const double root = double(single("rsqrt.approx.f32 %f20, " + hex(x) + ";"));
        worst_rsqrt = std::max(worst_rsqrt, std::fabs(root * std::sqrt(double(x)) - 1));
    }
    EXPECT_LT(worst_exp2, 0x1p-22);
    EXPECT_LT(worst_rsqrt, 0x1p-22);
    EXPECT_GT(worst_exp2, 0x1p-24);
    EXPECT_EQ(single("ex2.approx.ftz.f32 %f20, " + hex(-3) + ";"), 0.125f);
    EXPECT_EQ(single("ex2.approx.ftz.f32 %f20, " + hex(-130.5f) + ";"), 0);
}

// ---- lanes ----------------------------------------------------------------------------------------------------------------------------

TEST(PtxFlow, BothWaysOfABranchMeetAgain) {
    const Result got = run(R"(
        and.b32 %r5, %r0, 1;  setp.eq.u32 %p1, %r5, 0;
        @%p1 bra EVEN;
        add.s32 %r6, %r0, 20;  bra JOIN;
    EVEN: add.s32 %r6, %r0, 10;
    JOIN: shfl.sync.bfly.b32 %r7|%p2, %r6, 1, 31, -1;
        st.global.u32 [%rd3], %r7;)");
    EXPECT_EQ(got.y[0], 21u);
    EXPECT_EQ(got.y[1], 10u);
    EXPECT_EQ(got.counts.divergent_branches, 1u);
}

TEST(PtxFlow, LoopOfAnotherLengthInEachLane) {
    const Result got = run(R"(
        mov.u32 %r5, 0;
    LOOP: add.s32 %r5, %r5, 1;  setp.lt.u32 %p1, %r5, %r0;
        @%p1 bra LOOP;
        bar.warp.sync -1;
        st.global.u32 [%rd3], %r5;)");
    for (uint32_t lane = 1; lane < 32; lane++) EXPECT_EQ(got.y[lane], lane);
}

// Inline assembly with a loop comes twice: each copy has its own scope, and the same label.
TEST(PtxFlow, LabelsBelongToTheirScope) {
    EXPECT_EQ(word("mov.u32 %r20, 0;\n"
                   "{ .reg .pred %again;  WAIT: add.s32 %r20, %r20, 1;  setp.lt.u32 %again, %r20, 3;  @%again bra WAIT; }\n"
                   "{ .reg .pred %again;  WAIT: add.s32 %r20, %r20, 10;  setp.lt.u32 %again, %r20, 20;  @%again bra WAIT; }\n"
                   "{ bra BEHIND;  add.s32 %r20, %r20, 100; }\nBEHIND: add.s32 %r20, %r20, 1000;"),
              1023u);
    expect_error("{ INSIDE: mov.u32 %r20, 0; }\nbra INSIDE;", "there is no label INSIDE");
    expect_error("TWICE: mov.u32 %r20, 0;\nTWICE: mov.u32 %r20, 1;", "two labels TWICE in one scope");
}

TEST(PtxFlow, WhatItDoesNotKnowEndsIt) {
    expect_error("add.s32 %r5, %r0, 1;\nfrobnicate.b32 %r5, %r5;", "unknown instruction frobnicate.b32");
    expect_error("add.s32 %r5, %rd0, 1;", "%rd0 has 64 bits, not 32");
    expect_error("bra NOWHERE;", "there is no label NOWHERE");
}

TEST(PtxWarp, ShufflesAndVotes) {
    const auto shuffled = [](const std::string &how) { return run("shfl.sync." + how + ", -1;  st.global.u32 [%rd3], %r5;").y; };
    EXPECT_EQ(shuffled("up.b32 %r5|%p1, %r0, 3, 0")[2], 2u);  // from outside: one's own
    EXPECT_EQ(shuffled("up.b32 %r5|%p1, %r0, 3, 0")[9], 6u);
    EXPECT_EQ(shuffled("down.b32 %r5|%p1, %r0, 3, 31")[9], 12u);
    EXPECT_EQ(shuffled("down.b32 %r5|%p1, %r0, 3, 31")[30], 30u);
    EXPECT_EQ(shuffled("idx.b32 %r5|%p1, %r0, 2, 6175")[29], 26u);  // segments of 8
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 5;  vote.sync.ballot.b32 %r20, %p1, -1;"), 31u);
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 5;  vote.sync.any.pred %p2, %p1, -1;  selp.u32 %r20, 1, 0, %p2;"), 1u);
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 5;  vote.sync.all.pred %p2, %p1, -1;  selp.u32 %r20, 1, 0, %p2;"), 0u);
    expect_error("setp.lt.u32 %p1, %r0, 16;\n@%p1 shfl.sync.bfly.b32 %r5|%p2, %r0, 1, 31, -1;", "the mask is 0xffffffff, but");
}

// The layout of the fragments, and that sums are cut off, not rounded.
TEST(PtxWarp, Mma) {
    const auto b = [](float x) { return unsigned(bf16(x).bits); };
    // A[row][k] = row + k / 4, B[k][column] = k - column: lane 4 g + t has A[g][2t..], A[g + 8][2t..], A[g][2t + 8..], A[g + 8][2t + 8..].
    const auto pair = [](const std::string &r, const std::string &low, const std::string &high) {
        return "cvt.rn.bf16x2.f32 " + r + ", " + high + ", " + low + ";\n";
    };
    std::string body =
        "shr.u32 %r30, %r0, 2;  and.b32 %r31, %r0, 3;  shl.b32 %r31, %r31, 1;\n"
        "cvt.rn.f32.u32 %f30, %r30;  cvt.rn.f32.u32 %f31, %r31;\n";
    const auto element = [&](int n, const char *first, float add, const char *second, float factor) {
        body += format("fma.rn.f32 %%f%d, %s, %s, %s;  add.f32 %%f%d, %%f%d, %s;\n", n, second, hex(factor).c_str(), first, n, n,
                       hex(add).c_str());
    };
    int n = 40;
    for (int r = 0; r < 4; r++) {
        const int row = r % 2 * 8, k = r / 2 * 8;
        element(n, "%f30", float(row) + 0.25f * float(k), "%f31", 0.25f);
        element(n + 1, "%f30", float(row) + 0.25f * float(k + 1), "%f31", 0.25f);
        body += pair(format("%%r%d", 10 + r), format("%%f%d", n), format("%%f%d", n + 1)), n += 2;
    }
    for (int r = 0; r < 2; r++) {
        element(n, "%f31", float(8 * r), "%f30", -1);
        element(n + 1, "%f31", float(8 * r + 1), "%f30", -1);
        body += pair(format("%%r%d", 14 + r), format("%%f%d", n), format("%%f%d", n + 1)), n += 2;
    }
    body += "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r10,%r11,%r12,%r13}, {%r14,%r15}, {" +
            hex(0.5f) + "," + hex(0.5f) + "," + hex(0.5f) + "," + hex(0.5f) + "};\n";
    for (int i = 0; i < 4; i++) body += format("st.global.f32 [%%rd3+%d], %%f%d;\n", 128 * i, i + 1);
    const Result got = run(body);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            double want = 0.5;
            for (int k = 0; k < 16; k++) want += (row + k * 0.25) * (k - column);
            EXPECT_EQ(double(std::bit_cast<float>(got.y[size_t(lane + 32 * i)])), want) << "lane " << lane << " d" << i;
        }

    const std::string zeros = "{0,0,0,0}", cut = format("{%u,0,0,0}, {%u,0}", b(1), b(0x1p-30f));
    const auto sum = [&](float c) {
        return single("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f20,%f21,%f22,%f23}, " + cut + ", {" + hex(c) + "," +
                      hex(c) + "," + hex(c) + "," + hex(c) + "};");
    };
    EXPECT_EQ(sum(-1), -1);  // the term is below the kept bits
    expect_error("setp.lt.u32 %p1, %r0, 16;\n@%p1 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, " +
                     zeros + ", {0,0}, {%f1,%f2,%f3,%f4};",
                 "only the lanes 0xffff are here");
}

// ---- global memory --------------------------------------------------------------------------------------------------------------------

TEST(PtxMemory, WrongAddresses) {
    expect_error("ld.global.v2.u32 {%r5, %r6}, [%rd2];", "byte 4 of the 16384 bytes of argument 0");
    expect_error("ld.global.v2.u32 {%r5, %r6}, [%rd2];", "not aligned to 8");
    expect_error("ld.global.u32 %r5, [%rd0+16384];", "4 bytes at byte 16384 of the 16384 bytes of argument 0");
    expect_error("st.global.u32 [%rd1+-4], %r0;", "4 bytes at");
    expect_error("mov.u64 %rd9, 8;\nld.global.u32 %r5, [%rd9];", "0x8, which no allocation holds");
    expect_error("ld.param.u64 %rd9, [kernel_param_1+8];", "8 bytes at 16 of 16 bytes of parameters");
    expect_error("ld.global.u32 %r5, [%rd0+16384];",
                 "line 11 of the PTX: ld.global.u32 %r5, [%rd0+16384]\n  block (0,0,0), thread 0 of kernel");
}

TEST(PtxMemory, Atomics) {
    const Result got = run("atom.global.add.u32 %r5, [%rd1], 2;  red.global.add.u32 [%rd1+4], %r0;", 64, 3);
    EXPECT_EQ(got.y[0], 2u * 64 * 3);
    EXPECT_EQ(got.y[1], 3u * 63 * 64 / 2);
    EXPECT_EQ(run("st.shared.u32 [%r3], 0;\nbar.sync 0;\natom.shared.add.u32 %r5, [%r2], 1;\nbar.sync 0;\n"
                  "ld.shared.u32 %r20, [%r2];\nst.global.u32 [%rd3], %r20;",
                  64)
                  .y[40],
              64u);
}

TEST(PtxMemory, GenericAddresses) {
    EXPECT_EQ(word("st.shared.u32 [%r3], 7;  cvt.u64.u32 %rd9, %r3;  cvta.shared.u64 %rd9, %rd9;  ld.u32 %r20, [%rd9];"), 7u);
    expect_error("cvta.to.shared.u64 %rd9, %rd0;", "is no address of shared memory");
}

// ---- shared memory, barriers, races ---------------------------------------------------------------------------------------------------

namespace {
const std::string store = "st.shared.u32 [%r3], %r0;\n", next = "xor.b32 %r5, %r3, 4;\n", other_warp = "xor.b32 %r5, %r3, 128;\n",
                  load = "ld.shared.u32 %r20, [%r5];\nst.global.u32 [%rd3], %r20;\n";
}

TEST(PtxShared, WrongAddressesAndWhatNobodyWrote) {
    expect_error("st.shared.u32 [%r2+16384], %r0;", "4 bytes at 16384 of shared memory, of which the launch gave 16384");
    expect_error("st.shared.u32 [%r2+2], %r0;", "shared memory + 2 is not aligned to 4");
    expect_error("ld.shared.u32 %r5, [%r3];", "reads shared memory + 0, which nobody wrote");
}

TEST(PtxShared, RacesOfLanesAndWarps) {
    EXPECT_EQ(run(store + next + "bar.warp.sync -1;\n" + load).y[0], 1u);
    expect_error(store + next + load, "and no __syncwarp lies between");
    EXPECT_EQ(run(store + other_warp + "bar.sync 0;\n" + load, 64).y[0], 32u);
    expect_error(
        "bar.sync 0;\n" + store + other_warp + "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra DONE;\nst.shared.u32 [%r5], 1;\nDONE:",
        "no barrier lies between", 64);
    expect_error(store + other_warp + "bar.sync 0;\n" + load + "st.shared.u32 [%r3], 1;", "no barrier lies between", 64);
}

TEST(PtxShared, Barriers) {
    // warps 0 and 1 meet at barrier 1, warps 2 and 3 at barrier 2
    const std::string pairs = store + other_warp + "shr.u32 %r6, %r0, 6;  add.s32 %r6, %r6, 1;\n";
    EXPECT_EQ(run(pairs + "bar.sync %r6, 64;\n" + load, 128).y[64], 96u);
    expect_error(
        "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra DONE;\nbar.sync 0;\nDONE:", "waits at barrier 0 for threads that do not come", 64);
    expect_error("setp.lt.u32 %p1, %r0, 16;\n@%p1 bra DONE;\nbar.sync 0;\nDONE:",
                 "a barrier for the lanes 0xffff0000 of 0xffffffff");
    // a warp brings, the other waits
    EXPECT_EQ(run(R"(
        setp.lt.u32 %p1, %r0, 32;
        @%p1 bra BRING;
        bar.sync 3, 64;  ld.shared.u32 %r20, [%r3+-128];  st.global.u32 [%rd3], %r20;  bra DONE;
    BRING: st.shared.u32 [%r3], 5;  bar.arrive 3, 64;
    DONE:)",
                  64)
                  .y[40],
              5u);
}

// ---- calls ----------------------------------------------------------------------------------------------------------------------------

// A function has registers and labels of its own, at each call, and lanes leave it on their own ways.
TEST(PtxCalls, FunctionsAreRunWhereTheyAreCalled) {
    const auto call = [](const std::string &in, const std::string &out) {
        return "{\n.param .b32 param0;\nst.param.b32 [param0+0], " + in +
               ";\n.param .b32 retval0;\ncall.uni (retval0),\ntwice,\n(\nparam0\n);\nld.param.b32 " + out + ", [retval0+0];\n}\n";
    };
    const std::string store = "st.global.u32 [%rd3], %r20;";
    EXPECT_EQ(run("mov.u32 %r1, 5;\n" + call("%r0", "%r20") + "add.s32 %r20, %r20, %r1;\n" + store).y[3], 11u);
    EXPECT_EQ(run(call("%r0", "%r9") + call("%r9", "%r20") + store).y[3], 12u);
    const Result mixed = run("mul.lo.u32 %r9, %r0, 100;\n" + call("%r9", "%r20") + store);
    EXPECT_EQ(mixed.y[10], 2000u);
    EXPECT_EQ(mixed.y[11], 7u);
    expect_error("{\n.param .b32 param0;\ncall.uni (param0), nothing, (param0);\n}\n", "a call of the unknown function nothing");
}

// ---- cp.async, ldmatrix ---------------------------------------------------------------------------------------------------------------

namespace {
const std::string copy =
                      "shl.b32 %r7, %r0, 4;  cvt.u64.u32 %rd9, %r7;  add.s64 %rd9, %rd9, %rd0;  add.s32 %r7, %r7, %r2;\n"
                      "cp.async.cg.shared.global [%r7], [%rd9], 16, 16;\n",
                  commit = "cp.async.commit_group;\n", landed = "cp.async.wait_group 0;\n",
                  show = "ld.shared.u32 %r20, [%r7];\nst.global.u32 [%rd3], %r20;\n";
}

TEST(PtxCopies, LandAtTheirWait) {
    EXPECT_EQ(run(copy + commit + landed + show).y[5], 20u);
    expect_error(copy + commit + show, "before the cp.async to it has landed");
    expect_error(copy + commit + "cp.async.wait_group 1;\n" + show, "before the cp.async to it has landed");
    expect_error(copy + landed + show, "before the cp.async to it has landed");  // not committed
    expect_error(copy + commit, "returns before its cp.async has landed");
    const std::string half = "setp.lt.u32 %p1, %r0, 16;  selp.b32 %r8, 16, 0, %p1;\n" + copy;
    const Result got = run(std::string(half).replace(half.find("16, 16;"), 7, "16, %r8;") + commit + landed + show);
    EXPECT_EQ(got.y[15], 60u);
    EXPECT_EQ(got.y[16], 0u);
}

TEST(PtxCopies, OfOtherLanesNeedASync) {
    const std::string neighbour = "xor.b32 %r7, %r7, 16;\n";
    expect_error(copy + commit + landed + neighbour + show, "no __syncwarp lies between");
    EXPECT_EQ(run(copy + commit + landed + "bar.warp.sync -1;\n" + neighbour + show).y[4], 20u);
}

TEST(PtxCopies, Ldmatrix) {
    const auto loaded = [](const std::string &name, int matrix) {
        return run(copy + commit + landed + "bar.warp.sync -1;\nldmatrix.sync.aligned.m8n8.x4" + name +
                   ".shared.b16 {%r10,%r11,%r12,%r13}, [%r7];\n" + format("st.global.u32 [%%rd3], %%r%d;", 10 + matrix))
            .y;
    };
    // row r of matrix m is words 4 (8 m + r) on, whose values are their numbers
    EXPECT_EQ(loaded("", 1)[4 * 3 + 2], 4u * (8 + 3) + 2);
    EXPECT_EQ(loaded(".trans", 0)[4 * 2 + 1], (4u * 2 + 1) | (4u * 3 + 1) << 16);  // rows 2 and 3 of column 2
}

// ---- counts ---------------------------------------------------------------------------------------------------------------------------

namespace {
std::string strided(int bytes) {
    return format(
        "mul.lo.s32 %%r7, %%r0, %d;  cvt.u64.u32 %%rd9, %%r7;  add.s64 %%rd9, %%rd9, %%rd0;  add.s32 %%r7, %%r7, %%r2;\n", bytes);
}
uint64_t sectors(int bytes, const std::string &load) { return run(strided(bytes) + load).counts.total().sectors; }
uint64_t wavefronts(int bytes, const std::string &store) { return run(strided(bytes) + store).counts.total().wavefronts; }
}  // namespace

TEST(PtxCounts, SectorsOfGlobalMemory) {
    EXPECT_EQ(sectors(4, "ld.global.u32 %r5, [%rd9];"), 4u);
    EXPECT_EQ(sectors(0, "ld.global.u32 %r5, [%rd9];"), 1u);
    EXPECT_EQ(sectors(8, "ld.global.u32 %r5, [%rd9];"), 8u);
    EXPECT_EQ(sectors(32, "ld.global.u32 %r5, [%rd9];"), 32u);
    EXPECT_EQ(sectors(4, "ld.global.u32 %r5, [%rd9+8];"), 5u);
    EXPECT_EQ(sectors(16, "ld.global.v4.u32 {%r5,%r6,%r8,%r9}, [%rd9];"), 16u);
}

TEST(PtxCounts, WavefrontsOfSharedMemory) {
    const std::string one = "st.shared.u32 [%r7], 1;", two = "st.shared.v2.u32 [%r7], {1,1};",
                      four = "st.shared.v4.u32 [%r7], {1,1,1,1};";
    EXPECT_EQ(wavefronts(4, one), 1u);
    EXPECT_EQ(wavefronts(8, one), 2u);
    EXPECT_EQ(wavefronts(12, one), 1u);
    EXPECT_EQ(wavefronts(128, one), 32u);
    EXPECT_EQ(wavefronts(132, one), 1u);
    EXPECT_EQ(wavefronts(8, two), 2u);
    EXPECT_EQ(wavefronts(16, two), 4u);
    EXPECT_EQ(wavefronts(16, four), 4u);
    EXPECT_EQ(wavefronts(32, four), 8u);
    EXPECT_EQ(wavefronts(144, four), 4u);
    EXPECT_EQ(run(strided(128) + four).counts.total().least_wavefronts, 4u);
}

// Repeated reads of a block hit L1, and data touched earlier by the launch hits L2.
TEST(PtxCounts, TrafficOfL2AndMemory) {
    const std::string load = "ld.global.u32 %r5, [%rd2];\n", store = "st.global.u32 [%rd2], %r5;\n";
    const auto traffic = [](const std::string &body, unsigned blocks) { return run(body, 32, blocks).counts.traffic; };
    EXPECT_EQ(traffic(load, 1).read, 128u);
    EXPECT_EQ(traffic(load, 1).l2, 128u);
    EXPECT_EQ(traffic(load + load, 1).l2, 128u);
    EXPECT_EQ(traffic(load, 3).read, 128u);
    EXPECT_EQ(traffic(load, 3).l2, 3 * 128u);
    EXPECT_EQ(traffic(load + store + store, 1).written, 128u);
    EXPECT_EQ(traffic(load + store + store, 1).l2, 3 * 128u);
}

// A block with only `n` float additions for each of its warps, in the model's units.
TEST(PtxPrediction, TheBusiestUnitOfTheBusiestMultiprocessor) {
    const ptx::Gpu &gpu = ptx::gpus[0];
    const auto demand = [](double fp32, double special) {
        ptx::Demand d{};
        d[size_t(ptx::Unit::fp32)] = fp32, d[size_t(ptx::Unit::special)] = special, d[size_t(ptx::Unit::issue)] = fp32 + special;
        return d;
    };
    const auto seconds = [&](double cycles) { return cycles / gpu.clock; };
    const size_t sms = size_t(gpu.multiprocessors);
    ptx::Prediction p = ptx::predict({demand(4000, 0)}, {}, gpu);
    EXPECT_DOUBLE_EQ(p.seconds, seconds(1000));
    p = ptx::predict({demand(4000, 1000)}, {}, gpu);
    EXPECT_DOUBLE_EQ(p.seconds, seconds(2000));
    EXPECT_STREQ(p.bound, "special");
    EXPECT_DOUBLE_EQ(ptx::predict(std::vector<ptx::Demand>(sms, demand(4000, 0)), {}, gpu).seconds, seconds(1000));
    EXPECT_DOUBLE_EQ(ptx::predict(std::vector<ptx::Demand>(sms + 1, demand(4000, 0)), {}, gpu).seconds, seconds(2000));
    p = ptx::predict({demand(4000, 0)}, {.read = 3'350'000, .written = 3'350'000, .l2 = 0}, gpu);
    EXPECT_DOUBLE_EQ(p.seconds, 2e-6);
    EXPECT_STREQ(p.bound, "DRAM");
}

// 128 threads of 128 registers: 4 warps of 4096 registers, of which 65536 hold 16. 100 KB leave room for two blocks of an H100.
TEST(PtxPrediction, OccupancyByRegistersSharedMemoryAndBlocks) {
    const ptx::Gpu &gpu = ptx::gpus[0];
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = 128}, 128, gpu), 16.0 / 64);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = 128, .shared = 100 * 1024}, 32, gpu), 2 * 4 / 64.0);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = 32}, 16, gpu), 32.0 / 64);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = 1024}, 32, gpu), 1.0);
}
