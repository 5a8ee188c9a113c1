// The PTX interpreter on handwritten kernels: errors that a GPU would not report, and instructions that no shipped kernel contains. The kernels'
// tests (build/ptx/test_cuda) cover the instructions that nvcc generates for the ops.
#include <bit>
#include <cmath>

#include "interpreted.h"

namespace {
uint32_t word(const std::string &body, unsigned threads = 32, size_t at = 0) {
    run(body + "st.global.u32 [%rd3], %r20;", threads);
    return y[at];
}
std::string hex(float value) { return format("0f%08X", std::bit_cast<uint32_t>(value)); }
uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }
}  // namespace

// ---- instructions ---------------------------------------------------------------------------------------------------------------------

// The value of %r20 in thread 0, after the instructions.
TEST(PtxInstructions, Results) {
    const std::string bits_of = "  mov.b32 %r20, %f20;", truth = "  selp.u32 %r20, 1, 0, %p2;", small = hex(-0x1p-130f),
                      least = hex(0x1p-126f);  // subnormal; the smallest normal number
    const std::string five = "setp.lt.u32 %p1, %r0, 5;  ";
    const std::pair<std::string, uint32_t> rows[] = {
        {"bfi.b64 %rd9, 7, -1, 36, 8;  shr.u64 %rd9, %rd9, 32;  cvt.u32.u64 %r20, %rd9;", 0xffff'f07f},
        {"bfi.b64 %rd9, 7, 9, 64, 8;  cvt.u32.u64 %r20, %rd9;", 9},
        {"bfe.u32 %r20, 0x12345678, 8, 12;", 0x456},
        {"bfe.s32 %r20, 0x12345678, 7, 4;", 0xffff'fffc},
        {"bfe.s32 %r20, -2147483648, 30, 8;", ~0u << 1},
        {"clz.b64 %r20, 1;", 63},
        {"popc.b64 %r20, -1;", 64},
        {"lop3.b32 %r20, 12, 10, 6, 150;", 12 ^ 10 ^ 6},
        {"shf.l.wrap.b32 %r20, -2147483648, 1, 33;", 3},
        {"shf.r.clamp.b32 %r20, 1, 5, 40;", 5},
        {"mul.hi.s64 %rd9, -4, 4611686018427387904;  cvt.u32.u64 %r20, %rd9;", ~0u},
        {"cvt.rni.s32.f32 %r20, " + hex(2.5f) + ";", 2},
        {"cvt.rmi.s32.f32 %r20, " + hex(-2.5f) + ";", uint32_t(-3)},
        {"cvt.rpi.f32.f32 %f20, " + hex(2.25f) + ";" + bits_of, bits(3)},
        {"cvt.rn.f16x2.f32 %r20, " + hex(1) + ", " + hex(-2) + ";", 0x3c00'c000},
        {"add.f32 %f20, 1.5, 2.25;" + bits_of, bits(3.75f)},
        {"lg2.approx.f32 %f20, " + hex(8) + ";" + bits_of, bits(3)},
        // .ftz replaces subnormal arguments and results by zeros of the same sign.
        {"mul.f32 %f20, " + least + ", " + hex(-0.5f) + ";" + bits_of, bits(-0x1p-127f)},
        {"mul.ftz.f32 %f20, " + least + ", " + hex(-0.5f) + ";" + bits_of, 0x8000'0000},
        {"add.rn.ftz.f32 %f20, " + small + ", " + small + ";" + bits_of, 0x8000'0000},
        {"setp.lt.ftz.f32 %p2, " + small + ", 0f00000000;" + truth, 0},
        {"setp.lt.f32 %p2, " + small + ", 0f00000000;" + truth, 1},
        {"ex2.approx.f32 %f20, " + hex(-130) + ";" + bits_of, bits(0x1p-130f)},
        {"ex2.approx.ftz.f32 %f20, " + hex(-130) + ";" + bits_of, 0},
        // Reductions and votes of a warp
        {"redux.sync.add.s32 %r20, %r0, -1;", 31 * 16},
        {"sub.s32 %r5, 3, %r0;  redux.sync.min.s32 %r20, %r5, -1;", uint32_t(-28)},
        {"sub.s32 %r5, 3, %r0;  redux.sync.min.u32 %r20, %r5, -1;", 0},
        {"redux.sync.xor.b32 %r20, %r0, -1;", 0},
        {five + "@%p1 redux.sync.add.u32 %r20, %r0, 31;", 10},
        {five + "@%p1 activemask.b32 %r20;", 31},
        {five + "vote.sync.all.pred %p2, %p1, -1;" + truth, 0},
        {"shfl.sync.down.b32 %r20, %r0, 3, 31, -1;", 3},
        {"shfl.sync.idx.b32 %r20|%p1, %r0, 30, 6175, -1;", 6},  // segments of 8 lanes
        // Sums and maxima by atomics, in device memory, in shared memory and of 64 bits
        {"atom.relaxed.gpu.global.add.u32 %r5, [%rd1], 2;  ld.global.u32 %r20, [%rd1];", 64},
        {"st.shared.u32 [%r2], 7;  bar.warp.sync -1;  red.shared.min.s32 [%r2], -5;  bar.warp.sync -1;  ld.shared.u32 %r20, [%r2];",
         uint32_t(-5)},
        {"cvt.u64.u32 %rd9, %r0;  atom.global.max.u64 %rd10, [%rd1], %rd9;  ld.global.u32 %r20, [%rd1];", 31},
        {"red.global.add.f32 [%rd1], " + small + ";  ld.global.u32 %r20, [%rd1];", 0},  // device memory keeps no subnormal sums
        {"st.global.u32 [%rd1], 0x3f804000;  @%p0 atom.add.noftz.bf16x2 %r5, [%rd1], 0x40404000;  ld.global.u32 %r20, [%rd1];",
         0x4080'4080},  // (1, 2) and (3, 2)
        {"ld.global.u32 %r5, [%rd1];\nAGAIN: max.u32 %r6, %r5, %r0;  mov.u32 %r7, %r5;  atom.global.cas.b32 %r5, [%rd1], %r7, %r6;\n"
         "setp.ne.u32 %p1, %r5, %r7;\n@%p1 bra AGAIN;\nld.global.u32 %r20, [%rd1];",
         31},
        {"st.global.u32 [%rd1], 5;  @%p0 atom.global.inc.u32 %r20, [%rd1], 5;  ld.global.u32 %r20, [%rd1];", 0},
        {"@%p0 atom.global.dec.u32 %r20, [%rd1], 5;  ld.global.u32 %r20, [%rd1];", 5},
        // Clocks do not advance during a launch.
        {"mov.u64 %rd9, %globaltimer;  mov.u64 %rd10, %clock64;  sub.s64 %rd9, %rd10, %rd9;  cvt.u32.u64 %r20, %rd9;", 0},
        {"st.shared::cta.u32 [%r3], 7;  cvt.u64.u32 %rd9, %r3;  cvta.shared.u64 %rd9, %rd9;  ld.u32 %r20, [%rd9];", 7},
    };
    for (const auto &[body, want] : rows) EXPECT_EQ(word(body), want) << body;
}

// Instructions that the GPU of the PTX's .target may not have.
TEST(PtxInstructions, OfNewerGpus) {
    const std::string pair_bits = "mov.b32 %r10, 0x40c03f80;\nmov.b32 %r11, 0x3f81bf81;\n", show = "st.global.u32 [%rd3], %r20;",
                      three = hex(3) + ", " + hex(-1) + ", ", nan = hex(NAN);
    const auto bf16 = [](uint32_t a, uint32_t b, uint32_t c) {
        return format(
            "mov.b16 %%rs1, %u;  mov.b16 %%rs2, %u;  mov.b16 %%rs3, %u;  fma.rn.bf16 %%rs4, %%rs1, %%rs2, %%rs3;\n"
            "cvt.u32.u16 %%r20, %%rs4;\n",
            a, b, c);
    };
    const struct {
        int first;  // architecture
        std::string body;
        uint32_t want;
    } rows[] = {
        {80, bf16(0x3f81, 0x3f81, 0x3f80), 0x4001},  // 1.0078125^2 + 1 = 2.01568...
        {80, bf16(0x3f81, 0x3f81, 0xbf82), 0x3880},  // the product is exact: 2^-14
        {80, bf16(0x3f80, 0x3f80, 0x3b80), 0x3f80},  // 1 + 2^-8, halfway between two numbers: to the even one
        {80, bf16(0x3f81, 0x3b80, 0x3f80), 0x3f81},  // a little above halfway
        {80, bf16(0x3f7f, 0x3b80, 0x3f80), 0x3f80},  // a little below
        {80, bf16(0x3f80, 0x3b80, 0x3f81), 0x3f82},
        {80, bf16(0x3fc0, 0x3f81, 0x8d80), 0x3fc1},  // halfway, less 2^-100
        {80, bf16(0x7f7f, 0x4000, 0xff7f), 0x7f7f},
        {80, bf16(0x7f7f, 0x4000, 0x0000), 0x7f80},
        {80, bf16(0x0001, 0x3f80, 0x0001), 0x0002},  // subnormal numbers
        {80, bf16(0x7f80, 0x0000, 0x3f80), 0x7fff},  // infinity times 0
        {80, pair_bits + "fma.rn.bf16x2 %r20, %r10, %r10, %r11;\n", 0x4214'bc00},
        {90, "ex2.approx.ftz.bf16x2 %r20, 0x4040c000;\n", 0x4100'3e80},  // of 3 and -2
        {90, "ex2.approx.ftz.bf16x2 %r20, 0xc3020001;\n", 0x0000'3f80},  // subnormal results and arguments are 0
        {90, "mov.b16 %rs1, 0x4000;  ex2.approx.ftz.bf16 %rs2, %rs1;  cvt.u32.u16 %r20, %rs2;\n", 0x4080},
        {100, "max.f32 %f20, " + three + hex(5) + ";  mov.b32 %r20, %f20;\n", bits(5)},
        {100, "min.f32 %f20, " + three + hex(5) + ";  mov.b32 %r20, %f20;\n", bits(-1)},
        {100, "max.ftz.f32 %f20, " + nan + ", " + nan + ", " + hex(0x1p-130f) + ";  mov.b32 %r20, %f20;\n", 0},
        {100, "ld.global.v8.f32 {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, [%rd0+32];  mov.b32 %r20, %f8;\n", 15},
        {100, "ld.global.nc.v4.b64 {%rd10,%rd11,%rd12,%rd13}, [%rd0+32];  cvt.u32.u64 %r20, %rd13;\n", 14},
        {100, "st.global.v8.u32 [%rd0+64], {1,2,3,4,5,6,7,8};  ld.global.u32 %r20, [%rd0+92];\n", 8},
    };
    for (const auto &row : rows) {
        SCOPED_TRACE(row.body);
        for (const int target : {80, 89, 90, 100, 120}) {
            for (uint32_t i = 0; i < words; i++) x[i] = i;
            const auto runs = [&] { launch(row.body + show, {{}, {32}, 1024, true}, format(".target sm_%d\n", target)); };
            if (target < row.first)
                expect_contains(error_of(runs), {format("needs sm_%d, and the PTX is for sm_%d", row.first, target)});
            else {
                runs();
                EXPECT_EQ(y[0], row.want) << target;
            }
        }
    }
    const ptx::Launch how{{}, {32}, 1024, true};
    expect_error("ld.global.v8.u32 {%r10,%r11,%r12,%r13,%r14,%r15,%r16,%r17}, [%rd0+16];", "is not aligned to 32", how,
                 ".target sm_100\n");
    expect_error("ld.shared.v4.b64 {%rd10,%rd11,%rd12,%rd13}, [%r2];", "unknown instruction ld.shared.v4.b64", how,
                 ".target sm_100\n");
}

TEST(PtxInstructions, UnknownOnesEndTheLaunch) {
    expect_error("add.s32 %r5, %r0, 1;\nfrobnicate.b32 %r5, %r5;", "unknown instruction frobnicate.b32");
    expect_error("add.ftz.s32 %r5, %r0, 1;", "unknown instruction add.ftz.s32");
    expect_error("add.s32 %r5, %rd0, 1;", "%rd0 has 64 bits, not 32");
    expect_error("bra NOWHERE;", "there is no label NOWHERE");
    expect_error("setp.eq.u32 %p1, %r0, 3;\n@%p1 trap;", "ends the launch by a trap");
}

// ptxas contracts a product and a sum without a rounding modifier, in one basic block, if only such sums use the product. The numbers of instructions
// are from the machine code of CUDA 13.0 for sm_90.
TEST(PtxContraction, AsPtxas) {
    // a = f1 = 1 + 2^-12, and f3 = 1 + 2^-11 is a a, rounded: a a - f3 is 2^-24 with one rounding, and 0 with two.
    const std::string values =
        "mov.f32 %f1, 0f3F800800;  mov.f32 %f2, 0f3F800000;  mov.f32 %f3, 0f3F801000;  mov.f32 %f4, 0f40000000;  mov.f32 %f5, 0f40400000;\n"
        "mov.f32 %f20, %f2;  mov.f32 %f21, %f2;  setp.lt.u32 %p1, %r0, 40;  setp.gt.u32 %p2, %r0, 40;\n";
    const std::string aa = "mul.f32 %f10, %f1, %f1;\n", other = "mul.f32 %f11, %f3, %f2;\n", two = "mul.f32 %f11, %f2, %f4;\n",
                      sum = "sub.f32 %f20, %f10, %f3;\n", of_two = "sub.f32 %f20, %f10, %f11;\n",
                      keep = "st.global.f32 [%rd0], %f10;\n";
    const float error = 0x1p-24f, rounded = -1 + 0x1p-11f;
    const struct {
        std::string body;
        uint64_t instructions;  // on floats
        float want;             // f20
    } rows[] = {
        {aa + sum, 1, error},
        {aa + "sub.f32 %f20, %f3, %f10;\n", 1, -error},
        {"neg.f32 %f6, %f3;\n" + aa + "add.f32 %f20, %f6, %f10;\n", 2, error},
        {"mul.rn.f32 %f10, %f1, %f1;\n" + sum, 2, 0},
        {aa + "sub.rn.f32 %f20, %f10, %f3;\n", 2, 0},
        {"mul.ftz.f32 %f10, %f1, %f1;\nsub.ftz.f32 %f20, %f10, %f3;\n", 1, error},
        {"mul.ftz.f32 %f10, %f1, %f1;\n" + sum, 2, 0},
        {"mov.f64 %fd1, 0d3FF0000002000000;  mul.f64 %fd2, %fd1, %fd1;  sub.f64 %fd3, %fd2, 0d3FF0000004000000;\n"
         "mul.rn.f64 %fd3, %fd3, 0d4350000000000000;  cvt.rn.f32.f64 %f20, %fd3;\n",
         2, 1},
        // Several uses
        {aa + sum + "sub.f32 %f21, %f3, %f10;\n", 2, error},
        {aa + sum + keep, 2, 0},
        {aa + sum + "fma.rn.f32 %f21, %f2, %f2, %f10;\n", 3, 0},
        {aa + "sub.f32 %f20, %f10, %f10;\n", 2, 0},
        // Of two products the one with fewer uses is contracted, or the left one.
        {aa + other + of_two, 2, error},
        {aa + other + "sub.f32 %f20, %f11, %f10;\n", 2, 0},
        {aa + other + of_two + keep, 2, 0},
        {aa + two + of_two + "sub.f32 %f21, %f5, %f10;\n", 3, rounded},
        {aa + two + "sub.f32 %f21, %f5, %f11;\n" + of_two, 3, rounded + error},
        {aa + two + of_two + "sub.f32 %f21, %f5, %f10;\nadd.f32 %f22, %f11, %f4;\n", 4, rounded + error},
        // Predicates and basic blocks
        {aa + "@%p1 " + sum, 1, error},
        {aa + "@%p2 " + sum, 1, 1},
        {"mov.f32 %f10, %f5;\n@%p1 " + aa + sum, 2, 0},
        {aa + "@%p2 bra OVER;\n" + sum + "OVER:\n", 2, 0},
        {aa + "NEVER: bar.sync 0;\n" + sum, 1, error},
        {"@%p2 bra HERE;\n" + aa + "HERE:\n" + sum, 2, 0},
        {aa + "div.rn.f32 %f21, %f4, %f5;\n" + sum, 1, error},
        {aa + "div.u64 %rd9, %rd0, %rd1;\n" + sum, 2, 0},
        {"@%p2 bra BEHIND;\n" + aa + sum + "bra BEHIND;\nmov.f32 %f20, %f5;\nBEHIND:\n", 1, error},
        // A factor changes before the sum: ptxas keeps it in another register, the interpreter keeps the product.
        {"mov.f32 %f6, %f1;  mul.f32 %f10, %f6, %f6;  mov.f32 %f6, %f5;\n" + sum, 2, 0},
    };
    for (const auto &row : rows) {
        SCOPED_TRACE(row.body);
        const auto by_pipe = run(values + row.body + "mov.b32 %r20, %f20;\nst.global.u32 [%rd3], %r20;").by_pipe;
        EXPECT_EQ(by_pipe[size_t(ptx::Pipe::fp32)].executed + by_pipe[size_t(ptx::Pipe::fp64)].executed, row.instructions);
        EXPECT_EQ(y[0], bits(row.want));
    }
}

// Inline assembly with a loop occurs twice: each copy has its own scope, and the same label.
TEST(PtxFlow, LabelsBelongToTheirScope) {
    EXPECT_EQ(word("mov.u32 %r20, 0;\n"
                   "{ .reg .pred %again;  WAIT: add.s32 %r20, %r20, 1;  setp.lt.u32 %again, %r20, 3;  @%again bra WAIT; }\n"
                   "{ .reg .pred %again;  WAIT: add.s32 %r20, %r20, 10;  setp.lt.u32 %again, %r20, 20;  @%again bra WAIT; }\n"
                   "{ bra BEHIND;  add.s32 %r20, %r20, 100; }\nBEHIND: add.s32 %r20, %r20, 1000;"),
              1023u);
    expect_error("bra INSIDE;\n{ INSIDE: mov.u32 %r20, 0; }", "there is no label INSIDE");
    expect_error("TWICE: mov.u32 %r20, 0;\nTWICE: mov.u32 %r20, 1;", "two labels TWICE in one scope");
}

TEST(PtxWarp, MissingLanesAreNamed) {
    const std::string half = "setp.lt.u32 %p1, %r0, 16;\n@%p1 ", mask = "the mask is 0xffffffff, but";
    expect_error(half + "redux.sync.add.u32 %r20, %r0, -1;", mask);
    expect_error(half + "shfl.sync.bfly.b32 %r5|%p2, %r0, 1, 31, -1;", mask);
    expect_error(
        half + "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f20,%f21,%f22,%f23}, {0,0,0,0}, {0,0}, {%f0,%f0,%f0,%f0};",
        "only the lanes 0xffff are here");
}

// ---- memory ---------------------------------------------------------------------------------------------------------------------------

TEST(PtxMemory, WrongAddresses) {
    expect_error("ld.global.v2.u32 {%r5, %r6}, [%rd2];", "byte 4 of the 65536 bytes of argument 0");
    expect_error("ld.global.v2.u32 {%r5, %r6}, [%rd2];", "not aligned to 8");
    expect_error("ld.global.u32 %r5, [%rd0+65536];", "4 bytes at byte 65536 of the 65536 bytes of argument 0");
    expect_error("st.global.u32 [%rd1+-4], %r0;", "4 bytes at");
    expect_error("mov.u64 %rd9, 8;\nld.global.u32 %r5, [%rd9];", "0x8, which no allocation holds");
    expect_error("ld.param.u64 %rd9, [kernel_param_2+8];", "8 bytes at 24 of 24 bytes of parameters");
    expect_error("ld.global.u32 %r5, [%rd0+65536];",
                 "line 10 of the PTX: ld.global.u32 %r5, [%rd0+65536]\n  block (0,0,0), thread 0 of kernel");
    expect_error("cvta.to.shared.u64 %rd9, %rd0;", "is no address of shared memory");
    expect_error("ld.local.u32 %r5, [100];", "of local memory, of which a thread has 0");
    expect_error(
        ".local .align 16 .b8 depot[96];\n.reg .b64 %SPL;\nmov.u64 %SPL, depot;\nst.local.v2.u64 [%SPL+8], {%rd0, %rd0};",
        "byte 8 of local memory is not aligned to 16");
    expect_error("st.shared.u32 [%r2+16384], %r0;", "4 bytes at 16384 of shared memory, of which the block has 16384");
    expect_error("st.shared.u32 [%r2+2], %r0;", "shared memory + 2 is not aligned to 4");
    expect_error("ld.shared.u32 %r5, [%r3];", "reads shared memory + 0, which nobody wrote");
    expect_error("{ .shared .u32 inner; }\nst.shared.u32 [inner], 0;", "unknown name inner");
    expect_error(".shared .align 4 .b8 big[49156];\nst.shared.u32 [big], 0;",
                 "49156 bytes of static shared memory\n  fix: at most 49152");
}

// Variables have the values of the text, and static shared variables precede the dynamic shared memory.
TEST(PtxMemory, VariablesOfTheModule) {
    const std::string variables =
        ".global .align 4 .u32 table[2][2] = {{1, 2}, {3}};\n.const .align 8 .f32 half = 0f3F000000;\n"
        ".shared .align 4 .b8 unused[1000];\n.shared .align 2 .b8 pair[6];\n";
    const auto first = [&](const std::string &body) {
        launch(".shared .align 64 .f32 tile[2][8];\n" + body + "st.global.u32 [%rd3], %r20;", {{}, {32}, 1024, true}, variables);
        return y[0];
    };
    EXPECT_EQ(first("mov.u64 %rd9, table;  ld.global.u32 %r20, [%rd9+8];"), 3u);
    EXPECT_EQ(first("ld.global.u32 %r20, [table+12];"), 0u);
    EXPECT_EQ(first("mov.u64 %rd9, half;  cvta.const.u64 %rd9, %rd9;  ld.u32 %r20, [%rd9];"), 0x3f00'0000u);
    EXPECT_EQ(first("mov.u32 %r5, pair;  mov.u32 %r20, tile+4;  sub.s32 %r20, %r20, %r5;"), 68u);
    EXPECT_EQ(first("mov.u32 %r5, pair;  mov.u32 %r20, tile;  mov.u32 %r20, buffer;  sub.s32 %r20, %r20, %r5;"), 1024u);
    expect_error("ld.global.u32 %r5, [table+16];", "byte 16 of the 16 bytes of table", {}, variables);
    expect_error("ld.global.u32 %r5, [p];", "the unknown initial value table", {}, ".global .u64 p = table;\n");
}

// Limits of a block on the GPU that the PTX targets.
TEST(PtxShared, LimitsOfGpus) {
    for (const auto &[target, most] : {std::pair("sm_80", 163), {"sm_89", 99}, {"sm_90a", 227}, {"sm_100", 227}, {"", 227}})
        for (const size_t more : {0, 4})
            expect_error("st.shared.u32 [%r3], 0;", more ? format("at most %d on the GPU", most * 1024) : "no error",
                         {{}, {32}, size_t(most) * 1024 + more, true}, *target ? format(".target %s\n", target) : "");
    expect_error(".shared .align 4 .b8 own[128];\nst.shared.u32 [own], 0;", "of which 1024 are static",
                 {{}, {32}, 227 * 1024 - 64, true});
}

// ---- races, barriers, copies ----------------------------------------------------------------------------------------------------------

TEST(PtxShared, Races) {
    const std::string store = "st.shared.u32 [%r3], %r0;\n", next = "xor.b32 %r5, %r3, 4;\n",
                      other_warp = "xor.b32 %r5, %r3, 128;\n", load = "ld.shared.u32 %r20, [%r5];\n", sync = "bar.sync 0;\n",
                      ok = "no error";
    const std::string no_sync = "no barrier in between", no_warp_sync = "no __syncwarp in between";
    expect_error(store + next + "bar.warp.sync -1;\n" + load, ok);
    expect_error(store + next + load, no_warp_sync);
    expect_error(store + other_warp + sync + load, ok, 64);
    expect_error(sync + store + other_warp + "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra DONE;\nst.shared.u32 [%r5], 1;\nDONE:", no_sync,
                 64);
    expect_error(store + other_warp + sync + load + store, no_sync, 64);
    // Atomics
    const std::string zero = "st.shared.u32 [%r3], 0;\n" + sync, add = "red.shared.add.u32 [%r2], 1;\n",
                      write = "@%p0 st.shared.u32 [%r2], 1;\n", of_warp_0 = "setp.lt.u32 %p1, %r0, 32;\n@%p1 " + add,
                      of_warp_1 = "setp.eq.u32 %p1, %r0, 40;\n@%p1 st.shared.u32 [%r2], 1;\n";
    expect_error(zero + add + sync + write + sync + add, ok, 64);
    expect_error(zero + "red.shared.add.u32 [%r3], 1;\nst.shared.u32 [%r3], 5;", ok, 64);
    expect_error(zero + of_warp_0 + of_warp_1, no_sync, 64);
    expect_error(zero + of_warp_1 + of_warp_0, no_sync, 64);
    expect_error(zero + add + write, "which an atomic of another lane updates, with " + no_warp_sync);
    expect_error(zero + write + add, "updates shared memory + 0, which lane 0 wrote, with " + no_warp_sync);
    expect_error(add, "updates shared memory + 0, which nobody wrote");
}

TEST(PtxShared, Barriers) {
    const std::string skip = "setp.lt.u32 %p1, %r0, %u;\n@%%p1 bra DONE;\nbar.sync 0;\nDONE:";
    expect_error(
        "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra DONE;\nbar.sync 0;\nDONE:", "waits at barrier 0 for threads that do not come", 64);
    expect_error("setp.lt.u32 %p1, %r0, 16;\n@%p1 bra DONE;\nbar.sync 0;\nDONE:",
                 "a barrier for the lanes 0xffff0000 of 0xffffffff");
    // One warp arrives, the other waits. Barriers also count, and combine predicates.
    EXPECT_EQ(word("setp.lt.u32 %p1, %r0, 32;\n@%p1 bra BRING;\nbar.sync 3, 64;  ld.shared.u32 %r20, [%r3+-128];  bra DONE;\n"
                   "BRING: st.shared.u32 [%r3], 5;  bar.arrive 3, 64;\nDONE:",
                   64, 40),
              5u);
    const std::string vote = "setp.lt.u32 %p1, %r0, 40;\n", truth = "selp.u32 %r20, 1, 0, %p2;\n";
    EXPECT_EQ(word(vote + "bar.red.popc.u32 %r20, 0, %p1;\n", 80, 79), 40u);
    EXPECT_EQ(word(vote + "barrier.cta.red.popc.aligned.u32 %r20, 0, 96, %p1;\n", 80, 79), 40u);
    EXPECT_EQ(word(vote + "bar.red.and.pred %p2, 0, %p1;\n" + truth, 80), 0u);
    EXPECT_EQ(word(vote + "bar.red.or.pred %p2, 0, %p1;\n" + truth, 80, 79), 1u);
}

TEST(PtxCopies, LandAtTheirWait) {
    const std::string copy =
                          "shl.b32 %r7, %r0, 4;  cvt.u64.u32 %rd9, %r7;  add.s64 %rd9, %rd9, %rd0;  add.s32 %r7, %r7, %r2;\n"
                          "cp.async.cg.shared.global [%r7], [%rd9], 16, 16;\n",
                      commit = "cp.async.commit_group;\n", landed = "cp.async.wait_group 0;\n",
                      show = "ld.shared.u32 %r20, [%r7];\n", early = "before the copy to it has landed",
                      neighbour = "xor.b32 %r7, %r7, 16;\n";
    EXPECT_EQ(word(copy + "cp.async.wait_all;\n" + show, 32, 5), 20u);
    expect_error(copy + commit + show, early);
    expect_error(copy + commit + "cp.async.wait_group 1;\n" + show, early);
    expect_error(copy + landed + show, early);  // not committed
    expect_error(copy + commit, "returns before its cp.async has landed");
    expect_error(copy + commit + landed + neighbour + show, "no __syncwarp in between");
    expect_error(copy + commit + landed + "bar.warp.sync -1;\n" + neighbour + show, "no error");
}

// ---- blocks and calls -----------------------------------------------------------------------------------------------------------------

TEST(PtxBlocks, HaveUpToThreeDimensions) {
    launch(
        "mov.u32 %r5, %tid.y;  mov.u32 %r6, %tid.z;  mov.u32 %r7, %ntid.x;  mov.u32 %r8, %ntid.y;\n"
        "mad.lo.s32 %r9, %r6, %r8, %r5;  mad.lo.s32 %r9, %r9, %r7, %r0;  mul.wide.u32 %rd9, %r9, 16;  add.s64 %rd9, %rd1, %rd9;\n"
        "mov.u32 %r10, %laneid;  mov.u32 %r11, %warpid;  mov.u32 %r12, %nctaid.z;  mov.u32 %r13, %ctaid.y;\n"
        "st.global.v4.u32 [%rd9], {%r10, %r11, %r12, %r13};",
        {{2, 3, 4}, {5, 3, 4}, 0, true});
    for (uint32_t n = 0; n < 60; n++)
        EXPECT_EQ(std::vector(y + 4 * n, y + 4 * n + 4), (std::vector<uint32_t>{n % 32, n / 32, 4, 2}));
    expect_error("setp.lt.u32 %p1, %r0, 2;\n@%p1 bra DONE;\nld.global.u32 %r5, [%rd0+65536];\nDONE:",
                 "block (0,0,0), thread (2,0,0) of kernel, launched as 2 x 3 x 4 blocks of 3 x 5 x 2 threads",
                 {{2, 3, 4}, {3, 5, 2}, 0, true});
    expect_error("", "blocks of 32 x 8 x 5 threads", {{}, {32, 8, 5}});
    expect_error("", "64 in z", {{}, {1, 1, 65}});
    expect_error("", "a grid of 1 x 65536 x 1 blocks", {{1, 65536}, {32}});
}

// Each call of a function has its own registers, and lanes may return from different branches.
TEST(PtxCalls, FunctionsThatWereNotInlined) {
    const std::string call =
        "mul.lo.u32 %r9, %r0, 100;\n{\n.param .b32 param0;\nst.param.b32 [param0+0], %r9;\n.param .b32 retval0;\n"
        "call.uni (retval0),\ntwice,\n(\nparam0\n);\nld.param.b32 %r20, [retval0+0];\n}\n";
    EXPECT_EQ(word("mov.u32 %r1, 5;\n" + call + "add.s32 %r20, %r20, %r1;\n", 32, 10), 2005u);
    EXPECT_EQ(word(call, 32, 11), 7u);
    expect_error("{\n.param .b32 param0;\ncall.uni (param0), nothing, (param0);\n}\n", "a call of the unknown function nothing");
}

TEST(PtxCalls, PrintfAndAssert) {
    const auto text = [](const std::string &name, const std::string &of) {
        std::string bytes;
        for (char c : of + '\0') bytes += (bytes.empty() ? "" : ", ") + std::to_string(int(c));
        return ".global .align 1 .b8 " + name + format("[%zu] = {", of.size() + 1) + bytes + "};\n";
    };
    const std::string variables = text("$str", "%d of %s is %6.2f, %lld %c%%\n") + text("$str$1", "seven") +
                                  text("$str$2", "n < 5") + text("$str$3", "rope.cu");
    testing::internal::CaptureStdout();
    launch(
        ".local .align 8 .b8 list[48];\nmov.u64 %rd9, list;  st.local.u32 [%rd9], -7;  mov.u64 %rd10, $str$1;\n"
        "cvta.global.u64 %rd10, %rd10;  st.local.u64 [%rd9+8], %rd10;  cvt.f64.f32 %fd1, " +
            hex(2.5f) +
            ";  st.local.f64 [%rd9+16], %fd1;\nst.local.u64 [%rd9+24], 5000000000;  st.local.u32 [%rd9+32], 65;\n"
            "cvta.local.u64 %rd9, %rd9;  mov.u64 %rd10, $str;  cvta.global.u64 %rd10, %rd10;\n@!%p0 bra DONE;\n"
            "{ .param .b64 p;  st.param.b64 [p+0], %rd10;  .param .b64 q;  st.param.b64 [q+0], %rd9;\n"
            ".param .b32 r;  call.uni (r), vprintf, (p, q);  ld.param.b32 %r20, [r+0]; }\nst.global.u32 [%rd3], %r20;\nDONE:",
        {}, variables);
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "-7 of seven is   2.50, 5000000000 A%\n");
    EXPECT_EQ(y[0], 5u);
    expect_error(
        "@!%p0 bra DONE;\n{ .param .b64 a, b, d, e;  .param .b32 c;\nst.param.b64 [a+0], $str$2;  st.param.b64 [b+0], $str$3;\n"
        "st.param.b32 [c+0], 25;  st.param.b64 [d+0], $str$1;  st.param.b64 [e+0], 1;\ncall.uni __assertfail, (a, b, c, d, e); }\nDONE:",
        "rope.cu:25: seven: the assertion \"n < 5\" failed\n  line", {}, variables);
}
