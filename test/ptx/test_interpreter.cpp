// The PTX interpreter on kernels written by hand: results of instructions, and errors on which a GPU would be silent. What nvcc makes of the ops, branches,
// loops and arithmetic of all kinds, is tested with the ops (build/ptx/test_cuda).
#include <bit>
#include <cmath>

#include "../errors.h"
#include "interpreted.h"

namespace {

std::string error_from(const std::string &body, const ptx::Launch &how, const std::string &variables = "") {
    return error_of([&] { launch(body, how, variables); });
}
void expect_error(const std::string &body, const std::string &words, unsigned threads = 32) {
    SCOPED_TRACE(body);
    expect_contains(error_from(body, {{}, {threads}, 16384, true}), {words});
}

uint32_t word(const std::string &body) { return run(body + "st.global.u32 [%rd3], %r20;").y[0]; }
float single(const std::string &body) { return std::bit_cast<float>(run(body + "st.global.f32 [%rd3], %f20;").y[0]); }
std::string hex(float x) { return format("0f%08X", std::bit_cast<uint32_t>(x)); }

}  // namespace

// ---- arithmetic ----------------------------------------------------------------------------------------------------------------------

// Wrong by at most the manual's bound, and by more than the least part of it where the instruction is not exact; powers of integers are exact.
TEST(PtxArithmetic, ApproximateFunctions) {
    constexpr double any = -1;  // of a bound from below: the result may be exact
    const struct {
        const char *name;
        double (*exact)(double);
        bool relative;
        double least, most;
    } functions[] = {{"ex2.approx.ftz.f32", std::exp2, true, 0x1p-24, 0x1p-22},
                     {"rsqrt.approx.f32", [](double x) { return 1 / std::sqrt(x); }, true, any, 0x1p-22},
                     {"tanh.approx.f32", std::tanh, true, 0x1p-13, 0x1p-11},
                     {"lg2.approx.f32", std::log2, false, any, 0x1p-21},
                     {"sin.approx.f32", std::sin, false, any, 0x1p-20},
                     {"sqrt.approx.f32", std::sqrt, true, any, 0x1p-22},
                     {"sqrt.rn.f32", [](double x) { return double(float(std::sqrt(x))); }, true, any, 0x1p-60}};
    for (const auto &f : functions) {
        double worst = 0;
        for (float x = 0.1f; x < 3; x += 0.17f) {
            const double want = f.exact(double(x)), got = double(single(f.name + (" %f20, " + hex(x) + ";")));
            worst = std::max(worst, std::fabs(got - want) / (f.relative ? std::fabs(want) : 1));
        }
        EXPECT_LT(worst, f.most) << f.name;
        EXPECT_GT(worst, f.least) << f.name;
    }
    EXPECT_EQ(single("lg2.approx.f32 %f20, " + hex(8) + ";"), 3);
    EXPECT_EQ(single("ex2.approx.ftz.f32 %f20, " + hex(-3) + ";"), 0.125f);
    EXPECT_EQ(single("ex2.approx.ftz.f32 %f20, " + hex(-130.5f) + ";"), 0);
}

// With .ftz subnormal arguments and results are zeros that keep their sign.
TEST(PtxArithmetic, SubnormalNumbersAreFlushedWithFtz) {
    const std::string small = hex(-0x1p-130f), least = hex(0x1p-126f), half = hex(-0.5f), one = hex(1);
    EXPECT_EQ(single("mul.f32 %f20, " + least + ", " + half + ";"), -0x1p-127f);
    EXPECT_EQ(word("mul.ftz.f32 %f20, " + least + ", " + half + ";  mov.b32 %r20, %f20;"), 0x8000'0000u);
    EXPECT_EQ(word("add.rn.ftz.f32 %f20, " + small + ", " + small + ";  mov.b32 %r20, %f20;"), 0x8000'0000u);
    EXPECT_EQ(single("fma.rn.ftz.f32 %f20, " + small + ", " + hex(0x1p100f) + ", " + one + ";"), 1);
    EXPECT_EQ(single("fma.rn.f32 %f20, " + small + ", " + hex(0x1p120f) + ", " + one + ";"), 1 - 0x1p-10f);
    EXPECT_EQ(word("setp.lt.ftz.f32 %p1, " + small + ", 0f00000000;  selp.b32 %r20, 3, 4, %p1;"), 4u);
    EXPECT_EQ(word("setp.lt.f32 %p1, " + small + ", 0f00000000;  selp.b32 %r20, 3, 4, %p1;"), 3u);
    EXPECT_EQ(word("cvt.ftz.f64.f32 %fd1, " + small + ";  setp.eq.f64 %p1, %fd1, 0d0000000000000000;  selp.b32 %r20, 3, 4, %p1;"),
              3u);
    EXPECT_EQ(single("ex2.approx.f32 %f20, " + hex(-130) + ";"), 0x1p-130f);
    EXPECT_EQ(single("ex2.approx.ftz.f32 %f20, " + hex(-130) + ";"), 0);
    EXPECT_TRUE(std::isinf(single("rcp.approx.ftz.f32 %f20, " + small + ";")));
    expect_error("add.ftz.s32 %r5, %r0, 1;", "unknown instruction add.ftz.s32");
    expect_error("mov.ftz.f32 %f5, %f6;", "unknown instruction mov.ftz.f32");
}

TEST(PtxArithmetic, BitsFieldsAndConversions) {
    EXPECT_EQ(word("bfi.b64 %rd9, 7, -1, 36, 8;  shr.u64 %rd9, %rd9, 32;  cvt.u32.u64 %r20, %rd9;"), 0xffff'f07fu);
    EXPECT_EQ(word("bfi.b64 %rd9, 7, 9, 64, 8;  cvt.u32.u64 %r20, %rd9;"), 9u);
    EXPECT_EQ(word("bfe.u32 %r20, 0x12345678, 8, 12;"), 0x456u);
    EXPECT_EQ(word("bfe.s32 %r20, 0x12345678, 7, 4;"), 0xffff'fffcu);
    EXPECT_EQ(word("bfe.s32 %r20, -2147483648, 30, 8;"), ~0u << 1);
    EXPECT_EQ(word("clz.b64 %r20, 1;"), 63u);
    EXPECT_EQ(word("popc.b64 %r20, -1;"), 64u);
    EXPECT_EQ(word("lop3.b32 %r20, 12, 10, 6, 150;"), 12u ^ 10 ^ 6);
    EXPECT_EQ(word("shf.l.wrap.b32 %r20, -2147483648, 1, 33;"), 3u);
    EXPECT_EQ(word("shf.r.clamp.b32 %r20, 1, 5, 40;"), 5u);
    EXPECT_EQ(word("mul.hi.s64 %rd9, -4, 4611686018427387904;  cvt.u32.u64 %r20, %rd9;"), ~0u);
    EXPECT_EQ(word("cvt.rni.s32.f32 %r20, " + hex(2.5f) + ";"), 2u);
    EXPECT_EQ(word("cvt.rmi.s32.f32 %r20, " + hex(-2.5f) + ";"), uint32_t(-3));
    EXPECT_EQ(single("cvt.rpi.f32.f32 %f20, " + hex(2.25f) + ";"), 3);
    EXPECT_EQ(word("cvt.rn.f16x2.f32 %r20, " + hex(1) + ", " + hex(-2) + ";"), 0x3c00'c000u);
    EXPECT_EQ(single("add.f32 %f20, 1.5, 2.25;"), 3.75f);
}

// ---- lanes ----------------------------------------------------------------------------------------------------------------------------

// Inline assembly with a loop comes twice: each copy has its own scope, and the same label.
TEST(PtxFlow, LabelsBelongToTheirScope) {
    EXPECT_EQ(word("mov.u32 %r20, 0;\n"
                   "{ .reg .pred %again;  WAIT: add.s32 %r20, %r20, 1;  setp.lt.u32 %again, %r20, 3;  @%again bra WAIT; }\n"
                   "{ .reg .pred %again;  WAIT: add.s32 %r20, %r20, 10;  setp.lt.u32 %again, %r20, 20;  @%again bra WAIT; }\n"
                   "{ bra BEHIND;  add.s32 %r20, %r20, 100; }\nBEHIND: add.s32 %r20, %r20, 1000;"),
              1023u);
    expect_error("bra INSIDE;\n{ INSIDE: mov.u32 %r20, 0; }", "there is no label INSIDE");
    expect_error("TWICE: mov.u32 %r20, 0;\nTWICE: mov.u32 %r20, 1;", "two labels TWICE in one scope");
}

TEST(PtxFlow, WhatItDoesNotKnowEndsIt) {
    expect_error("add.s32 %r5, %r0, 1;\nfrobnicate.b32 %r5, %r5;", "unknown instruction frobnicate.b32");
    expect_error("add.s32 %r5, %rd0, 1;", "%rd0 has 64 bits, not 32");
    expect_error("bra NOWHERE;", "there is no label NOWHERE");
}

TEST(PtxWarp, Reductions) {
    EXPECT_EQ(word("redux.sync.add.s32 %r20, %r0, -1;"), 31u * 16);
    EXPECT_EQ(word("sub.s32 %r5, 3, %r0;  redux.sync.min.s32 %r20, %r5, -1;"), uint32_t(-28));
    EXPECT_EQ(word("sub.s32 %r5, 3, %r0;  redux.sync.min.u32 %r20, %r5, -1;"), 0u);
    EXPECT_EQ(word("redux.sync.xor.b32 %r20, %r0, -1;"), 0u);
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 4;\n@%p1 redux.sync.add.u32 %r20, %r0, 15;"), 6u);
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 4;\n@%p1 activemask.b32 %r20;"), 15u);
    expect_error("setp.lt.u32 %p1, %r0, 4;\n@%p1 redux.sync.add.u32 %r20, %r0, -1;", "the mask is 0xffffffff, but");
}

TEST(PtxWarp, ShufflesAndVotes) {
    const auto shuffled = [](const std::string &how) { return run("shfl.sync." + how + ", -1;  st.global.u32 [%rd3], %r5;").y; };
    EXPECT_EQ(shuffled("up.b32 %r5|%p1, %r0, 3, 0")[2], 2u);  // from outside: one's own
    EXPECT_EQ(shuffled("up.b32 %r5|%p1, %r0, 3, 0")[9], 6u);
    EXPECT_EQ(shuffled("down.b32 %r5|%p1, %r0, 3, 31")[9], 12u);
    EXPECT_EQ(shuffled("down.b32 %r5|%p1, %r0, 3, 31")[30], 30u);
    EXPECT_EQ(shuffled("idx.b32 %r5|%p1, %r0, 2, 6175")[29], 26u);  // segments of 8
    for (const char *mode : {"up", "down", "bfly", "idx"})
        EXPECT_EQ(shuffled(format("%s.b32 %%r5, %%r0, 3, 31", mode)), shuffled(format("%s.b32 %%r5|%%p1, %%r0, 3, 31", mode)))
            << "the predicate may be left out";
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 5;  vote.sync.ballot.b32 %r20, %p1, -1;"), 31u);
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 5;  vote.sync.any.pred %p2, %p1, -1;  selp.u32 %r20, 1, 0, %p2;"), 1u);
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 5;  vote.sync.all.pred %p2, %p1, -1;  selp.u32 %r20, 1, 0, %p2;"), 0u);
    expect_error("setp.lt.u32 %p1, %r0, 16;\n@%p1 shfl.sync.bfly.b32 %r5|%p2, %r0, 1, 31, -1;", "the mask is 0xffffffff, but");
}

// Sums are cut off, not rounded.
TEST(PtxWarp, Mma) {
    const std::string mma = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f20,%f21,%f22,%f23}, ";
    const unsigned one = bf16(1.0f).bits, tiny = bf16(0x1p-30f).bits;
    const std::string minus = hex(-1), sums = "{" + minus + "," + minus + "," + minus + "," + minus + "};";
    EXPECT_EQ(single(mma + format("{%u,0,0,0}, {%u,0}, ", one, tiny) + sums), -1) << "the term is below the kept bits";
    expect_error("setp.lt.u32 %p1, %r0, 16;\n@%p1 " + mma + "{0,0,0,0}, {0,0}, " + sums, "only the lanes 0xffff are here");
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

// All operations, in all spaces, with the values before and after.
TEST(PtxMemory, AtomicOperations) {
    const auto check = [](const std::string &operation, uint32_t before, const std::string &arguments, uint32_t after) {
        for (const auto &[space, address] : {std::pair(".global", "%rd1"), std::pair(".shared", "%r2"), std::pair("", "%rd1")}) {
            const std::string where = std::string("[") + address + "]", kind = *space ? space : ".global";
            const Result got =
                run("setp.eq.u32 %p1, %r0, 0;\n@!%p1 bra DONE;\nst" + kind + ".u32 " + where + ", " + std::to_string(before) +
                    ";\natom" + space + "." + operation + " %r5, " + where + ", " + arguments + ";\nld" + kind + ".u32 %r6, " +
                    where + ";\nst.global.v2.u32 [%rd1+8], {%r5, %r6};\nDONE:");
            EXPECT_EQ(got.y[2], before) << operation << space;
            EXPECT_EQ(got.y[3], after) << operation << space;
        }
    };
    const uint32_t minus = uint32_t(-5);
    check("add.u32", 7, "3", 10), check("add.s32", 7, "-9", uint32_t(-2));
    check("min.s32", minus, "3", minus), check("min.u32", minus, "3", 3), check("max.s32", minus, "3", 3),
        check("max.u32", minus, "3", minus);
    check("and.b32", 12, "10", 8), check("or.b32", 12, "10", 14), check("xor.b32", 12, "10", 6), check("exch.b32", 12, "10", 10);
    check("cas.b32", 12, "12, 5", 5), check("cas.b32", 12, "11, 5", 12);
    check("inc.u32", 4, "5", 5), check("inc.u32", 5, "5", 0), check("dec.u32", 0, "5", 5), check("dec.u32", 4, "5", 3);
    check("relaxed.gpu.add.u32", 1, "1", 2);
    check("add.noftz.bf16x2", 0x3f80'4000, "0x40404000", 0x4080'4080);  // (1, 2) and (3, 2)
    check("add.noftz.f16x2", 0x3c00'4000, "0x40003c00", 0x4200'4200);   // (1, 2) and (2, 1)
    const auto sum = [](const char *space, const char *address) {
        return word(
            format("setp.eq.u32 %%p1, %%r0, 0;\n@!%%p1 bra DONE;\nst%s.u32 [%s], 0;\nred%s.add.f32 [%s], %s;\n"
                   "ld%s.u32 %%r20, [%s];\nDONE:",
                   space, address, space, address, hex(0x1p-130f).c_str(), space, address));
    };
    EXPECT_EQ(sum(".global", "%rd1"), 0u);  // subnormal numbers are kept in shared memory alone
    EXPECT_EQ(std::bit_cast<float>(sum(".shared", "%r2")), 0x1p-130f);
    // 64 bits: the largest of many, found by compare and swap
    EXPECT_EQ(
        run("cvt.u64.u32 %rd9, %r0;  atom.global.max.u64 %rd10, [%rd1], %rd9;  red.global.add.u64 [%rd1+8], 4294967296;", 96)
            .y[0],
        95u);
    EXPECT_EQ(run("red.global.add.u64 [%rd1+8], 4294967296;", 96).y[3], 96u);
    EXPECT_EQ(run("ld.global.u32 %r5, [%rd1];\n"
                  "AGAIN: max.u32 %r6, %r5, %r0;  mov.u32 %r7, %r5;  atom.global.cas.b32 %r5, [%rd1], %r7, %r6;\n"
                  "setp.ne.u32 %p1, %r5, %r7;\n@%p1 bra AGAIN;",
                  64)
                  .y[0],
              63u);
}

TEST(PtxMemory, HintsAndOrdersChangeNothing) {
    const Result plain = run("ld.global.u32 %r5, [%rd2];  st.global.u32 [%rd3], %r5;");
    for (const char *load :
         {"ld.global.ca.u32 %r5, [%rd2];", "ld.global.cg.u32 %r5, [%rd2];", "ld.global.cs.u32 %r5, [%rd2];",
          "ld.global.lu.u32 %r5, [%rd2];", "ld.global.cv.u32 %r5, [%rd2];", "ld.volatile.global.u32 %r5, [%rd2];",
          "ld.global.nc.L1::no_allocate.L2::128B.u32 %r5, [%rd2];", "ld.relaxed.gpu.global.u32 %r5, [%rd2];",
          "createpolicy.fractional.L2::evict_first.b64 %rd9, 1.0;  "
          "ld.global.L1::evict_last.L2::cache_hint.u32 %r5, [%rd2], %rd9;"})
        for (const char *store :
             {"st.global.cs.u32 [%rd3], %r5;", "st.release.sys.global.u32 [%rd3], %r5;  membar.gl;  fence.acq_rel.gpu;"}) {
            const Result got = run(std::string(load) + store);
            EXPECT_EQ(got.y, plain.y) << load;
            EXPECT_EQ(got.counts.total().sectors, plain.counts.total().sectors) << load;
            EXPECT_EQ(got.counts.traffic.l2, plain.counts.traffic.l2) << load;
        }
    EXPECT_EQ(run("st.shared::cta.u32 [%r3], %r0;  ld.shared::cta.u32 %r5, [%r3];  st.global.u32 [%rd3], %r5;").y[9], 9u);
}

// Initial values, also of several dimensions, equal the text's; the values that a kernel leaves persist.
TEST(PtxMemory, VariablesOfTheModule) {
    const std::string variables = ".global .align 4 .u32 table[2][2] = {{1, 2}, {3}};\n.const .align 8 .f32 half = 0f3F000000;\n";
    const auto first = [&](const std::string &body) { return launch(body + "st.global.u32 [%rd3], %r20;", {}, variables).y[0]; };
    EXPECT_EQ(first("mov.u64 %rd9, table;  ld.global.u32 %r20, [%rd9+8];"), 3u);
    EXPECT_EQ(first("ld.global.u32 %r20, [table+4];"), 2u);
    EXPECT_EQ(first("ld.global.u32 %r20, [table+12];"), 0u);
    EXPECT_EQ(first("mov.u64 %rd9, half;  cvta.const.u64 %rd9, %rd9;  ld.u32 %r20, [%rd9];"), 0x3f00'0000u);
    EXPECT_EQ(first("ld.const.u32 %r20, [half];"), 0x3f00'0000u);
    expect_contains(error_from("ld.global.u32 %r5, [table+16];", {}, variables), {"byte 16 of the 16 bytes of table"});
    expect_contains(error_from("ld.global.u32 %r5, [p];", {}, ".global .u64 p = table;\n"), {"the unknown initial value table"});
}

// Local memory is private to a thread, and word k of all threads of a warp is contiguous.
TEST(PtxMemory, LocalMemory) {
    const std::string
        variables =
            ".local .align 16 .b8 depot[96];\n.local .align 4 .b8 other[4];\n.reg .b64 %SP, %SPL;\n"
            "mov.u64 %SPL, depot;  cvta.local.u64 %SP, %SPL;\n",
        swap = "add.u32 %r5, %r0, 7;  st.local.u32 [%SPL+8], %r0;  st.local.u32 [other], %r5;  add.u64 %rd9, %SP, 8;\n";
    const Result got =
        run(variables + swap + "ld.u32 %r20, [%rd9];  ld.local.u32 %r6, [other];\nst.global.v2.u32 [%rd1], {%r20, %r6};", 64, 2);
    EXPECT_EQ(got.y[0] + 7, got.y[1]);
    EXPECT_EQ(run(variables + swap + "ld.u32 %r20, [%rd9];\nst.global.u32 [%rd3], %r20;", 64, 2).y[40], 40u);
    expect_error(variables + "ld.local.u32 %r5, [%SPL+100];", "4 bytes at 100 of local memory, of which a thread has 96");
    expect_error(variables + "ld.u32 %r5, [%SP+-4];", "which no allocation holds");
    expect_error(variables + "st.local.v4.f32 [%SPL+8], {0f00000000,0f00000000,0f00000000,0f00000000};",
                 "byte 8 of local memory is not aligned to 16");
    const auto counts = [&](const std::string &body) { return run(variables + body).counts; };
    EXPECT_EQ(counts("st.local.u32 [%SPL], %r0;").total().sectors, 4u);
    EXPECT_EQ(counts("st.local.v2.u64 [%SPL], {%rd0, %rd0};").total().sectors, 16u);
    EXPECT_EQ(counts("st.u32 [%SP], %r0;").total().sectors, 4u);
    EXPECT_EQ(counts("mul.wide.u32 %rd9, %r0, 4;  and.b64 %rd9, %rd9, 63;  add.u64 %rd9, %SPL, %rd9;  st.local.u32 [%rd9], %r0;")
                  .total()
                  .sectors,
              32u);  // each lane at another offset
    EXPECT_EQ(counts("st.local.u32 [%SPL], %r0;  ld.local.u32 %r5, [%SPL];").traffic.l2, 128u);
    EXPECT_EQ(counts("st.local.u32 [%SPL], %r0;  ld.local.u32 %r5, [%SPL];").traffic.written, 0u);
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
    expect_error("st.shared.u32 [%r2+16384], %r0;", "4 bytes at 16384 of shared memory, of which the block has 16384");
    expect_error("st.shared.u32 [%r2+2], %r0;", "shared memory + 2 is not aligned to 4");
    expect_error("ld.shared.u32 %r5, [%r3];", "reads shared memory + 0, which nobody wrote");
}

// Static variables precede the dynamic shared memory, each at its alignment, wherever they are declared.
TEST(PtxShared, StaticVariables) {
    const std::string variables =
        ".shared .align 4 .b8 unused[1000];\n.shared .align 2 .b8 pair[6];\n.extern .shared .align 16 .b8 rest[];\n";
    const auto offset = [&](const std::string &of, const std::string &others = "", const std::string &base = "pair") {
        const std::string body = ".shared .align 64 .f32 tile[2][8];\nmov.u32 %r9, pair;  " + others + "mov.u32 %r20, " + of +
                                 ";  mov.u32 %r5, " + base + ";  sub.s32 %r20, %r20, %r5;\nst.global.u32 [%rd3], %r20;";
        return launch(body, {{}, {32}, 1024, true}, variables).y[0];
    };
    EXPECT_EQ(offset("tile"), 64u);
    EXPECT_EQ(offset("tile+4"), 68u);
    EXPECT_EQ(offset("buffer", "mov.u32 %r9, tile;  "), 1024u);  // aligned to that
    EXPECT_EQ(offset("rest", "", "buffer"), 0u);
    const std::string own =
        ".shared .align 4 .b8 own[128];\n.shared .u32 last;\nmov.u32 %r5, own;  shl.b32 %r6, %r0, 2;  add.s32 %r5, %r5, %r6;\n";
    EXPECT_EQ(
        run(own + "st.shared.u32 [%r3], 5;  st.shared.u32 [%r5], %r0;  ld.shared.u32 %r20, [%r5];\nst.global.u32 [%rd3], %r20;")
            .y[9],
        9u);
    EXPECT_EQ(
        run(own + "st.shared.u32 [last], %r0;\nbar.warp.sync -1;\nld.shared.u32 %r20, [last];\nst.global.u32 [%rd3], %r20;").y[0],
        31u);
    expect_error(own + "ld.shared.u32 %r20, [%r5];", "which nobody wrote");
    expect_error("{ .shared .u32 inner; }\nst.shared.u32 [inner], 0;", "unknown name inner");
    expect_error(".shared .align 4 .b8 big[49156];\nst.shared.u32 [big], 0;",
                 "49156 bytes of static shared memory\n  fix: at most 49152");
}

// Of one block on the GPU that the PTX is for.
TEST(PtxShared, LimitsOfGpus) {
    const auto error = [](const std::string &target, size_t shared) {
        return error_from("st.shared.u32 [%r3], 0;", {{}, {32}, shared, true}, target.empty() ? "" : ".target " + target + "\n");
    };
    for (const auto &[target, most] : {std::pair("sm_80", 163), {"sm_89", 99}, {"sm_90a", 227}, {"sm_100", 227}, {"", 227}}) {
        EXPECT_EQ(error(target, size_t(most) * 1024), "no error") << target;
        expect_contains(error(target, size_t(most) * 1024 + 4), {format("at most %d on the GPU", most * 1024)});
    }
    expect_contains(error_from(".shared .align 4 .b8 own[128];\nst.shared.u32 [own], 0;", {{}, {32}, 227 * 1024 - 64, true}),
                    {"of which 1024 are static"});
}

TEST(PtxShared, AtomicsAndWrites) {
    const std::string zero = "st.shared.u32 [%r3], 0;\nbar.sync 0;\n", add = "red.shared.add.u32 [%r2], 1;\n",
                      synced = "bar.sync 0;\n", read = "ld.shared.u32 %r20, [%r2];\n",
                      first = "setp.eq.u32 %p1, %r0, 0;\n@%p1 st.shared.u32 [%r2], 1;\n";
    EXPECT_EQ(run(zero + add + read + synced + read + "st.global.u32 [%rd3], %r20;", 64).y[40], 64u);
    const std::string one_warp = "setp.lt.u32 %p1, %r0, 32;\n@%p1 " + add,
                      other = "setp.eq.u32 %p1, %r0, 40;\n@%p1 st.shared.u32 [%r2], 1;\n";
    expect_error(zero + one_warp + other, "no barrier in between", 64);
    expect_error(zero + other + one_warp, "no barrier in between", 64);
    expect_error(zero + add + first, "which an atomic of another lane updates, with no __syncwarp in between");
    expect_error(zero + first + add, "updates shared memory + 0, which lane 0 wrote, with no __syncwarp in between");
    EXPECT_EQ(run(zero + add + synced + first + synced + add + synced + read + "st.global.u32 [%rd3], %r20;", 64).y[0], 65u);
    EXPECT_EQ(run(zero + "red.shared.add.u32 [%r3], 1;\nst.shared.u32 [%r3], 5;", 64).y[0], 0u);  // each thread its own word
    expect_error(add, "updates shared memory + 0, which nobody wrote");
}

TEST(PtxShared, RacesOfLanesAndWarps) {
    EXPECT_EQ(run(store + next + "bar.warp.sync -1;\n" + load).y[0], 1u);
    expect_error(store + next + load, "with no __syncwarp in between");
    EXPECT_EQ(run(store + other_warp + "bar.sync 0;\n" + load, 64).y[0], 32u);
    expect_error(
        "bar.sync 0;\n" + store + other_warp + "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra DONE;\nst.shared.u32 [%r5], 1;\nDONE:",
        "no barrier in between", 64);
    expect_error(store + other_warp + "bar.sync 0;\n" + load + "st.shared.u32 [%r3], 1;", "no barrier in between", 64);
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

// ---- blocks ---------------------------------------------------------------------------------------------------------------------------

TEST(PtxBlocks, ClocksStandStill) {
    EXPECT_EQ(word("mov.u64 %rd9, %globaltimer;  mov.u64 %rd10, %clock64;  sub.s64 %rd9, %rd10, %rd9;  cvt.u32.u64 %r20, %rd9;"),
              0u);
}

// x runs fastest over lanes and warps.
TEST(PtxBlocks, OfUpToThreeDimensions) {
    const std::string number =
                          "mov.u32 %r5, %tid.y;  mov.u32 %r6, %tid.z;  mov.u32 %r7, %ntid.x;  mov.u32 %r8, %ntid.y;\n"
                          "mad.lo.s32 %r9, %r6, %r8, %r5;  mad.lo.s32 %r9, %r9, %r7, %r0;\n"
                          "mul.wide.u32 %rd9, %r9, 16;  add.s64 %rd9, %rd1, %rd9;\n",
                      store = "st.global.v4.u32 [%rd9], {%r10, %r11, %r12, %r13};";
    const ptx::Launch how{{2, 3, 4}, {5, 3, 4}, 0, true};
    Result got = launch(
        number + "mov.u32 %r10, %laneid;  mov.u32 %r11, %warpid;  mov.u32 %r12, %r0;  mov.u32 %r13, WARP_SZ;\n" + store, how);
    for (uint32_t n = 0; n < 60; n++) {
        EXPECT_EQ(got.y[4 * n], n % 32);
        EXPECT_EQ(got.y[4 * n + 1], n / 32);
        EXPECT_EQ(got.y[4 * n + 2], n % 5);
        EXPECT_EQ(got.y[4 * n + 3], 32u);
    }
    got = launch(
        number + "mov.u32 %r10, %ctaid.x;  mov.u32 %r11, %ctaid.y;  mov.u32 %r12, %ctaid.z;  mov.u32 %r13, %nctaid.z;\n" + store,
        how);
    EXPECT_EQ(std::vector<uint32_t>(got.y.begin(), got.y.begin() + 4), (std::vector<uint32_t>{1, 2, 3, 4}));  // of the last block
    got = launch(number +
                     "mov.u32 %r10, %ntid.z;  mov.u32 %r11, %nctaid.x;  mov.u32 %r12, %nctaid.y;  mov.u32 %r13, %lanemask_lt;\n" +
                     store,
                 how);
    EXPECT_EQ(std::vector<uint32_t>(got.y.begin() + 236, got.y.begin() + 240), (std::vector<uint32_t>{4, 2, 3, (1u << 27) - 1}));
    expect_contains(error_from("setp.lt.u32 %p1, %r0, 2;\n@%p1 bra DONE;\nld.global.u32 %r5, [%rd0+16384];\nDONE:",
                               {{2, 3, 4}, {3, 5, 2}, 0, true}),
                    {"block (0,0,0), thread (2,0,0) of kernel, launched as 2 x 3 x 4 blocks of 3 x 5 x 2 threads"});
    expect_contains(error_from("", {{}, {32, 8, 5}}), {"blocks of 32 x 8 x 5 threads"});
    expect_contains(error_from("", {{}, {1, 1, 65}}), {"64 in z"});
    expect_contains(error_from("", {{1, 65536}, {32}}), {"a grid of 1 x 65536 x 1 blocks"});
}

// __syncthreads_count, _and, _or
TEST(PtxShared, BarriersThatCount) {
    const std::string vote = "setp.lt.u32 %p1, %r0, 40;\n", store = "st.global.u32 [%rd3], %r20;";
    const auto all = [&](const std::string &body) { return run(vote + body + store, 80).y; };
    EXPECT_EQ(all("bar.red.popc.u32 %r20, 0, %p1;\n"), all("barrier.cta.red.popc.aligned.u32 %r20, 0, 96, %p1;\n"));
    EXPECT_EQ(all("bar.red.popc.u32 %r20, 0, %p1;\n")[79], 40u);
    EXPECT_EQ(all("bar.red.and.pred %p2, 0, %p1;  selp.u32 %r20, 1, 0, %p2;\n")[0], 0u);
    EXPECT_EQ(all("bar.red.or.pred %p2, 0, %p1;  selp.u32 %r20, 1, 0, %p2;\n")[79], 1u);
    EXPECT_EQ(all("setp.lt.u32 %p1, %r0, 80;  bar.red.and.pred %p2, 0, %p1;  selp.u32 %r20, 1, 0, %p2;\n")[79], 1u);
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
    const std::string stores =
        ".func keep(.param .b64 keep_param_0)\n{\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [keep_param_0];\n"
        "st.global.u32 [%rd1], 9;\nret;\n}\n";  // without a result
    EXPECT_EQ(launch("{ .param .b64 p;  st.param.b64 [p+0], %rd3;  call.uni keep, (p); }", {}, stores).y[5], 9u);
}

TEST(PtxCalls, PrintfAndAssert) {
    const auto text = [](const std::string &name, const std::string &of) {
        std::string bytes;
        for (char c : of + '\0') bytes += (bytes.empty() ? "" : ", ") + std::to_string(int(c));
        return ".global .align 1 .b8 " + name + format("[%zu] = {", of.size() + 1) + bytes + "};\n";
    };
    const std::string variables = text("$str", "%d of %s is %6.2f, %lld %c%%\n") + text("$str$1", "seven") +
                                  text("$str$2", "n < 5") + text("$str$3", "rope.cu"),
                      list =
                          ".local .align 8 .b8 list[48];\nmov.u64 %rd9, list;  st.local.u32 [%rd9], -7;  mov.u64 %rd10, $str$1;\n"
                          "cvta.global.u64 %rd10, %rd10;  st.local.u64 [%rd9+8], %rd10;  cvt.f64.f32 %fd1, " +
                          hex(2.5f) +
                          ";  st.local.f64 [%rd9+16], %fd1;\nst.local.u64 [%rd9+24], 5000000000;  st.local.u32 [%rd9+32], 65;\n"
                          "cvta.local.u64 %rd9, %rd9;  mov.u64 %rd10, $str;  cvta.global.u64 %rd10, %rd10;\n",
                      call =
                          "{ .param .b64 p;  st.param.b64 [p+0], %rd10;  .param .b64 q;  st.param.b64 [q+0], %rd9;\n"
                          ".param .b32 r;  call.uni (r), vprintf, (p, q);  ld.param.b32 %r20, [r+0]; }\n";
    testing::internal::CaptureStdout();
    const Result got = launch(
        list + "setp.gt.u32 %p1, %r0, 29;\n@!%p1 bra DONE;\n" + call + "st.global.u32 [%rd3], %r20;\nDONE:", {}, variables);
    EXPECT_EQ(testing::internal::GetCapturedStdout(),
              "-7 of seven is   2.50, 5000000000 A%\n-7 of seven is   2.50, 5000000000 A%\n");
    EXPECT_EQ(got.y[31], 5u);
    const std::string failed =
        "{ .param .b64 a, b, d, e;  .param .b32 c;\nst.param.b64 [a+0], $str$2;  st.param.b64 [b+0], $str$3;\n"
        "st.param.b32 [c+0], 25;  st.param.b64 [d+0], $str$1;  st.param.b64 [e+0], 1;\n"
        "call.uni __assertfail, (a, b, c, d, e); }\n";
    const std::string error = error_from("setp.ne.u32 %p1, %r0, 3;\n@%p1 bra DONE;\n" + failed + "DONE:", {}, variables);
    expect_contains(error, {"rope.cu:25: seven: the assertion \"n < 5\" failed\n  line", "thread 3 of kernel"});
    expect_error("setp.eq.u32 %p1, %r0, 3;\n@%p1 trap;", "ends the launch by a trap");
}

// ---- cp.async -------------------------------------------------------------------------------------------------------------------------

namespace {
const std::string copy =
                      "shl.b32 %r7, %r0, 4;  cvt.u64.u32 %rd9, %r7;  add.s64 %rd9, %rd9, %rd0;  add.s32 %r7, %r7, %r2;\n"
                      "cp.async.cg.shared.global [%r7], [%rd9], 16, 16;\n",
                  commit = "cp.async.commit_group;\n", landed = "cp.async.wait_group 0;\n",
                  show = "ld.shared.u32 %r20, [%r7];\nst.global.u32 [%rd3], %r20;\n";
}

TEST(PtxCopies, LandAtTheirWait) {
    EXPECT_EQ(run(copy + commit + landed + show).y[5], 20u);
    expect_error(copy + commit + show, "before the copy to it has landed");
    expect_error(copy + commit + "cp.async.wait_group 1;\n" + show, "before the copy to it has landed");
    expect_error(copy + landed + show, "before the copy to it has landed");  // not committed
    EXPECT_EQ(run(copy + "cp.async.wait_all;\n" + show).y[5], 20u);
    expect_error(copy + commit, "returns before its cp.async has landed");
    const std::string half = "setp.lt.u32 %p1, %r0, 16;  selp.b32 %r8, 16, 0, %p1;\n" + copy;
    const Result got = run(std::string(half).replace(half.find("16, 16;"), 7, "16, %r8;") + commit + landed + show);
    EXPECT_EQ(got.y[15], 60u);
    EXPECT_EQ(got.y[16], 0u);
}

TEST(PtxCopies, OfOtherLanesNeedASync) {
    const std::string neighbour = "xor.b32 %r7, %r7, 16;\n";
    expect_error(copy + commit + landed + neighbour + show, "no __syncwarp in between");
    EXPECT_EQ(run(copy + commit + landed + "bar.warp.sync -1;\n" + neighbour + show).y[4], 20u);
}
