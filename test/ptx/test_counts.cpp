// What the PTX interpreter counts of kernels written by hand, and the times that it predicts from the counts.
#include <cmath>

#include "interpreted.h"

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

// ptxas makes one load of 16 bytes of four, if it knows the address to be aligned, and if no store is between them.
TEST(PtxCounts, LoadsOfNeighbouringWordsAreJoined) {
    const std::string fill =
        "mad.lo.u32 %r9, %r0, 16, %r2;\nst.shared.v4.f32 [%r9], {%f5, %f5, %f5, %f5};\nbar.sync 0;\n"
        "setp.eq.u32 %p1, %r0, 31;\n@%p1 st.shared.f32 [%r9+16], %f5;\nbar.sync 0;\n";
    const auto work = [&](ptx::Unit unit, const std::string &body) {
        const auto of = [&](const std::string &all) { return run(all).counts.blocks[0].demand[size_t(unit)]; };
        return of(fill + body) - of(fill);
    };
    const auto issued = [&](const std::string &body) { return work(ptx::Unit::issue, body); };
    const auto wavefronts = [&](const std::string &body) { return work(ptx::Unit::shared, body); };
    const auto load = [](int at) { return format("ld.shared.f32 %%f%d, [%%r9+%d];\n", 10 + at, at); };
    const std::string four = load(8) + load(0) + load(12) + load(4), vector = "ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r9];\n",
                      store = "st.shared.f32 [%r2+4096], %f5;\n";
    EXPECT_EQ(issued(four), issued(vector));
    EXPECT_EQ(wavefronts(four), wavefronts(vector));
    EXPECT_EQ(issued(load(0) + load(4)), 1);
    EXPECT_EQ(issued(load(4) + load(8)), 2) << "not aligned";
    EXPECT_EQ(issued(load(4) + load(8) + load(12)), 1) << "three of four words";
    EXPECT_EQ(wavefronts(load(4) + load(8) + load(12)), wavefronts(vector));
    EXPECT_EQ(issued(load(0) + store + load(4)), 3);
    const std::string odd = "add.u32 %r9, %r9, 4;\n", each = "and.b32 %r12, %r0, 1;\nmad.lo.u32 %r9, %r12, 4, %r9;\n";
    EXPECT_EQ(wavefronts(odd + four), wavefronts(vector) + wavefronts(load(0))) << "ptxas knows where 16 bytes begin";
    EXPECT_EQ(wavefronts(each + four), 4 * wavefronts(each + load(0))) << "in each lane elsewhere";
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
    const std::string add = "red.global.add.u32 [%rd2], 1;\n";  // in L2, whatever L1 holds
    EXPECT_EQ(traffic(load + add + add, 1).l2, 3 * 128u);
    EXPECT_EQ(traffic(add, 1).read, 128u);
    EXPECT_EQ(traffic(add, 1).written, 128u);
}

// Cycles of a block that has its multiprocessor to itself.
double latency(const std::string &body, unsigned threads = 32) { return run(body, threads).counts.blocks[0].latency; }

TEST(PtxTiming, AnInstructionWaitsForItsOperands) {
    const std::string chain = "add.f32 %f5, %f5, %f6;\n", other = "add.f32 %f7, %f6, %f6;\n", end = "$L: bra $M;\n$M:\n";
    const auto times = [](const std::string &line, size_t n) {
        std::string all;
        for (size_t i = 0; i < n; i++) all += line;
        return all;
    };
    EXPECT_DOUBLE_EQ(latency(times(chain, 40) + end) - latency(times(chain, 20) + end), 20 * 4.5);
    EXPECT_LT(latency(times(other, 40) + end), latency(times(chain, 20) + end))
        << "independent instructions are issued each cycle";
    EXPECT_DOUBLE_EQ(latency(times(other, 40) + chain + end), latency(chain + times(other, 40) + end))
        << "ptxas orders a basic block";
}

TEST(PtxTiming, WavefrontsKeepSharedMemoryBusy) {
    std::string loads;
    for (int n = 0; n < 20; n++) loads += "ld.shared.f32 %f5, [%r7];\n";
    const std::string end = "bra.uni $E;\n$E:\n", fill = "st.shared.f32 [%r7], %f5;\nbar.sync 0;\n";
    EXPECT_GT(latency(strided(128) + fill + loads + end), latency(strided(4) + fill + loads + end) + 500);
}

// ptxas moves instructions by up to 16 places, executes a few of them under a predicate, unrolls a small loop four times, and keeps loads behind
// stores to what may be the same address.
TEST(PtxTiming, BasicBlocksAreThoseOfTheMachineCode) {
    const std::string end = "bra.uni $E;\n$E:\n", use = "add.f32 %f6, %f6, %f5;\n";
    const auto load = [](int at) { return format("ld.global.f32 %%f5, [%%rd0+%d];\n", 4096 * at); };
    const auto filler = [](int n) {
        std::string all;
        for (int i = 0; i < n; i++) all += "add.f32 %f7, %f8, %f8;\n";
        return all;
    };
    const double one = latency(load(0) + use + end);
    EXPECT_NEAR(latency(load(0) + use + load(1) + use + end), one, 10);
    EXPECT_NEAR(latency(load(0) + use + filler(16) + load(1) + use + end), 2 * one, 40);
    EXPECT_NEAR(latency(load(0) + "st.global.f32 [%rd3], %f5;\n" + load(1) + use + end), 2 * one, 40);
    const std::string predicate = "setp.gt.u32 %p1, %r0, 40;\n@%p1 bra $B;\n";
    EXPECT_NEAR(latency(load(0) + use + predicate + load(1) + use + "$B:\n" + end), one, 20);
    EXPECT_NEAR(latency(load(0) + use + predicate + load(1) + use + filler(10) + "$B:\n" + end), 2 * one, 40);
    const auto loop = [&](int fill, const std::string &step = "1") {
        return "mov.u32 %r10, 1;\nmov.u32 %r9, 0;\nmov.u64 %rd9, %rd0;\n$L:\nld.global.f32 %f5, [%rd9];\n" + use +
               "add.s64 %rd9, %rd9, 2048;\nadd.s32 %r9, %r9, " + step + ";\nsetp.lt.u32 %p1, %r9, 8;\n" + filler(fill) +
               "@%p1 bra $L;\n";
    };
    EXPECT_NEAR(latency(loop(0)), 2 * one, 300) << "eight iterations, of which the first four wait together";
    EXPECT_GT(latency(loop(16)), 7 * one);
    EXPECT_GT(latency(loop(0, "%r10")), 7 * one) << "the step is not a constant";
}

// The data of a first read are in device memory, of a second one in L1.
TEST(PtxTiming, LoadsAndCopiesWaitForMemory) {
    const std::string load = "ld.global.f32 %f5, [%rd2];\n", use = "add.f32 %f8, %f5, %f6;\nbra.uni $L;\n$L:\n",
                      again = "ld.global.f32 %f7, [%rd2];\nadd.f32 %f8, %f7, %f6;\nbra.uni $M;\n$M:\n";
    const double once = latency(load + use);
    EXPECT_GT(once, 600);
    EXPECT_LT(once, 700);
    EXPECT_NEAR(latency(load + use + again) - once, 50, 20);

    const std::string copy = "cp.async.ca.shared.global [%r3], [%rd2], 4, 4;\ncp.async.commit_group;\n",
                      next = "cp.async.ca.shared.global [%r3+256], [%rd2+4096], 4, 4;\ncp.async.commit_group;\n",
                      wait = "cp.async.wait_group 0;\nbra.uni $W;\n$W:\n", last = "cp.async.wait_group 0;\nbra.uni $X;\n$X:\n";
    EXPECT_NEAR(latency(copy + wait + next + last), 2 * latency(copy + next + wait), 100) << "two stages hide a copy";
}

TEST(PtxTiming, ABarrierWaitsForTheLastWarp) {
    const std::string slow =
                          "setp.gt.u32 %p1, %r0, 31;\n@%p1 bra $B;\nld.global.f32 %f5, [%rd2];\nsetp.lt.f32 %p2, %f5, %f6;\n"
                          "@%p2 bra $B;\n$B:\n",
                      barrier = "bar.sync 0;\n";
    EXPECT_GT(latency(slow + barrier, 64), 600);
}

// A part of the grid stands for all of it, and reads no more than there is.
TEST(PtxCounts, ASampleIsMultiplied) {
    const std::string body = "ld.global.u32 %r5, [%rd2];\n";
    const auto whole = run(body, 32, 12).counts,
               part = launch(body, {.grid = {12}, .threads = {32}, .count_memory = true, .sample = 3}).counts;
    EXPECT_EQ(part.blocks.size(), 3u);
    EXPECT_EQ(part.total().executed, whole.total().executed);
    EXPECT_EQ(part.traffic.l2, whole.traffic.l2);
}

// A launch whose blocks have these demands and latencies, on a grid of as many blocks or more.
TEST(PtxPrediction, TheBusiestUnitOfTheBusiestMultiprocessor) {
    const ptx::Gpu &gpu = ptx::gpus[0];
    const auto block = [](double fp32, double special, double latency = 0) {
        ptx::BlockWork b{{}, latency};
        b.demand[size_t(ptx::Unit::fp32)] = fp32, b.demand[size_t(ptx::Unit::special)] = special;
        return b;
    };
    const auto predict = [&](const ptx::BlockWork &b, size_t blocks = 1, const ptx::Traffic &traffic = {}) {
        return ptx::predict({{.grid = {unsigned(blocks)}, .threads = {128}}, 32, {b}, traffic}, gpu);
    };
    const double launch = predict(block(0, 0)).seconds;
    const auto seconds = [&](double cycles) { return launch + cycles / gpu.clock; };
    const size_t sms = size_t(gpu.multiprocessors);
    EXPECT_NEAR(predict(block(4000, 0)).seconds, seconds(1000), 1e-12);
    EXPECT_NEAR(predict(block(4000, 1000)).seconds, seconds(2000 * std::pow(1 + 1 / 32.0, 0.2)), 1e-12)
        << "units hinder each other";
    EXPECT_STREQ(predict(block(4000, 1000)).bound, "special");
    EXPECT_NEAR(predict(block(4000, 0), sms).seconds, seconds(1000), 1e-12);
    EXPECT_NEAR(predict(block(4000, 0), sms + 1).seconds, seconds(2000), 1e-12);
    const auto copied = predict(block(4000, 0), 1, {.read = size_t(gpu.dram), .written = size_t(gpu.dram), .l2 = 0});
    EXPECT_NEAR(copied.seconds, launch + 2, 1e-9);
    EXPECT_STREQ(copied.bound, "DRAM");

    EXPECT_EQ(predict(block(0, 0), 1, {.l2 = 1000, .bulk = 1000}).seconds, launch + 1000 / gpu.bulk);
    // The queues of wgmma and TMA are part of the latency; under wgmma the clock is lower.
    ptx::BlockWork products = block(0, 0, 5000);
    products.demand[size_t(ptx::Unit::wgmma)] = 1000;
    EXPECT_NEAR(predict(products).seconds, launch + 5000 / (gpu.clock * gpu.sustained), 1e-9);

    // 16 blocks of 128 threads are resident. Waiting costs less than as much again where there is other work.
    EXPECT_DOUBLE_EQ(predict(block(0, 0, 5000), 16 * sms).seconds, seconds(1.3 * 5000));
    EXPECT_DOUBLE_EQ(predict(block(0, 0, 5000), 16 * sms + 1).seconds, seconds(1.3 * 10000));
    EXPECT_STREQ(predict(block(4000, 0, 5000)).bound, "latency");
    EXPECT_GT(predict(block(4000, 0, 1000)).seconds, seconds(1000));
    EXPECT_LT(predict(block(4000, 0, 1000)).seconds, seconds(2000));
    EXPECT_STREQ(ptx::predict({{.grid = {1}, .threads = {128}, .shared = 200 * 1024}, 32, {block(1, 0)}, {}}, ptx::gpus[3]).bound,
                 "too large");
}

// 128 threads of 128 registers: 4 warps of 4096 registers, of which 65536 hold 16. 100 KB leave room for two blocks of an H100.
TEST(PtxPrediction, OccupancyByRegistersSharedMemoryAndBlocks) {
    const ptx::Gpu &gpu = ptx::gpus[0];
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {128}}, 128, gpu), 16.0 / 64);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {128}, .shared = 100 * 1024}, 32, gpu), 2 * 4 / 64.0);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {32}}, 16, gpu), 32.0 / 64);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {1024}}, 32, gpu), 1.0);
    EXPECT_EQ(ptx::resident_blocks({.shared = 227 * 1024}, 32, gpu), 1);
    EXPECT_EQ(ptx::resident_blocks({.shared = 164 * 1024}, 32, ptx::gpus[2]), 0);  // of which the system takes 1 KB
    EXPECT_EQ(ptx::resident_blocks({.shared = 100 * 1024}, 32, ptx::gpus[3]), 0);
}
