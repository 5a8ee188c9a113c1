// The PTX interpreter's counts for handwritten kernels, and the times predicted from the counts.
#include <cmath>

#include "interpreted.h"

namespace {
// %rd9 and %r7: addresses in x and in shared memory at `bytes` times the lane.
std::string strided(int bytes) {
    return format(
        "mul.lo.s32 %%r7, %%r0, %d;  cvt.u64.u32 %%rd9, %%r7;  add.s64 %%rd9, %%rd9, %%rd0;  add.s32 %%r7, %%r7, %%r2;\n", bytes);
}
}  // namespace

TEST(PtxCounts, SectorsAndWavefronts) {
    const struct {
        const char *access;
        int stride;  // bytes between lanes
        uint64_t sectors, wavefronts;
    } rows[] = {{"ld.global.u32 %r5, [%rd9];", 0, 1, 0},
                {"ld.global.u32 %r5, [%rd9];", 8, 8, 0},
                {"ld.global.u32 %r5, [%rd9];", 32, 32, 0},
                {"ld.global.u32 %r5, [%rd9+8];", 4, 5, 0},
                {"ld.global.v4.u32 {%r5,%r6,%r8,%r9}, [%rd9];", 16, 16, 0},
                {"st.shared.u32 [%r7], 1;", 4, 0, 1},
                {"st.shared.u32 [%r7], 1;", 8, 0, 2},
                {"st.shared.u32 [%r7], 1;", 12, 0, 1},
                {"st.shared.u32 [%r7], 1;", 128, 0, 32},
                {"st.shared.v2.u32 [%r7], {1,1};", 8, 0, 2},
                {"st.shared.v2.u32 [%r7], {1,1};", 16, 0, 4},
                {"st.shared.v4.u32 [%r7], {1,1,1,1};", 16, 0, 4},
                {"st.shared.v4.u32 [%r7], {1,1,1,1};", 32, 0, 8},
                {"st.shared.v4.u32 [%r7], {1,1,1,1};", 144, 0, 4}};
    for (const auto &row : rows) {
        const ptx::Count got = run(strided(row.stride) + row.access).counts.total();
        EXPECT_EQ(got.sectors, row.sectors) << row.access << " with stride " << row.stride;
        EXPECT_EQ(got.wavefronts, row.wavefronts) << row.access << " with stride " << row.stride;
    }
    EXPECT_EQ(run(strided(128) + "st.shared.v4.u32 [%r7], {1,1,1,1};").counts.total().least_wavefronts, 4u);
}

// ptxas joins four loads of neighbouring words into one of 16 bytes if it knows the alignment and if no store is between them.
TEST(PtxCounts, LoadsOfNeighbouringWordsAreJoined) {
    const std::string fill =
        "mad.lo.u32 %r9, %r0, 16, %r2;\nst.shared.v4.f32 [%r9], {%f5, %f5, %f5, %f5};\nbar.sync 0;\n"
        "setp.eq.u32 %p1, %r0, 31;\n@%p1 st.shared.f32 [%r9+16], %f5;\nbar.sync 0;\n";
    const auto issued = [&](const std::string &body) {
        const auto of = [](const std::string &all) { return run(all).counts.blocks[0].demand[size_t(ptx::Unit::issue)]; };
        return of(fill + body) - of(fill);
    };
    const auto load = [](int at) { return format("ld.shared.f32 %%f%d, [%%r9+%d];\n", 10 + at, at); };
    EXPECT_EQ(issued(load(8) + load(0) + load(12) + load(4)), issued("ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r9];\n"));
    EXPECT_EQ(issued(load(4) + load(8)), 2) << "not aligned";
    EXPECT_EQ(issued(load(4) + load(8) + load(12)), 1) << "three of four words";
    EXPECT_EQ(issued(load(0) + "st.shared.f32 [%r2+4096], %f5;\n" + load(4)), 3);
}

// Repeated loads of a block hit L1, and data touched earlier by the launch hits L2.
TEST(PtxCounts, TrafficOfL2AndMemory) {
    const std::string load = "ld.global.u32 %r5, [%rd2];\n", store = "st.global.u32 [%rd2], %r5;\n",
                      add = "red.global.add.u32 [%rd2], 1;\n";
    const auto expect = [](const std::string &body, unsigned blocks, const ptx::Traffic &want) {
        const ptx::Traffic got = run(body, 32, blocks).counts.traffic;
        EXPECT_EQ(got.read, want.read) << body;
        EXPECT_EQ(got.written, want.written) << body;
        EXPECT_EQ(got.l2, want.l2) << body;
    };
    expect(load + load, 1, {.read = 128, .written = 0, .l2 = 128});
    expect(load, 3, {.read = 128, .written = 0, .l2 = 3 * 128});
    expect(load + store + store, 1, {.read = 128, .written = 128, .l2 = 3 * 128});
    expect(load + add + add, 1, {.read = 128, .written = 128, .l2 = 3 * 128});  // atomics bypass L1
}

// A sample of the grid's blocks represents all blocks.
TEST(PtxCounts, ASampleIsMultiplied) {
    const std::string body = "ld.global.u32 %r5, [%rd2];\n";
    const auto whole = run(body, 32, 12).counts,
               part = launch(body, {.grid = {12}, .threads = {32}, .count_memory = true, .sample = 3}).counts;
    EXPECT_EQ(part.blocks.size(), 3u);
    EXPECT_EQ(part.total().executed, whole.total().executed);
    EXPECT_EQ(part.traffic.l2, whole.traffic.l2);
}

// Cycles of a block that is alone on its multiprocessor.
TEST(PtxTiming, LatencyOfABlock) {
    const auto latency = [](const std::string &body, unsigned threads = 32) {
        return run(body, threads).counts.blocks[0].latency;
    };
    const auto times = [](size_t n, const std::string &line) {
        std::string all;
        for (size_t i = 0; i < n; i++) all += line;
        return all;
    };
    const std::string chain = "add.f32 %f5, %f5, %f6;\n", filler = "add.f32 %f7, %f8, %f8;\n", end = "bra.uni $E;\n$E:\n";
    EXPECT_DOUBLE_EQ(latency(times(40, chain) + end) - latency(times(20, chain) + end), 20 * 4.5) << "operands";
    EXPECT_LT(latency(times(40, filler) + end), latency(times(20, chain) + end)) << "independent instructions issue each cycle";
    const std::string fill = "st.shared.f32 [%r7], %f5;\nbar.sync 0;\n", loads = times(20, "ld.shared.f32 %f5, [%r7];\n");
    EXPECT_GT(latency(strided(128) + fill + loads + end), latency(strided(4) + fill + loads + end) + 500) << "wavefronts";

    // ptxas moves an instruction by up to 16 places, predicates short branches, unrolls small loops, and keeps loads after stores that may alias.
    const std::string use = "add.f32 %f6, %f6, %f5;\n";
    const auto load = [](int at) { return format("ld.global.f32 %%f5, [%%rd0+%d];\n", 4096 * at); };
    const double one = latency(load(0) + use + end);
    EXPECT_GT(one, 600);
    EXPECT_LT(one, 700);
    EXPECT_NEAR(latency(load(0) + use + load(1) + use + end), one, 10);
    EXPECT_NEAR(latency(load(0) + use + times(16, filler) + load(1) + use + end), 2 * one, 40);
    EXPECT_NEAR(latency(load(0) + "st.global.f32 [%rd3], %f5;\n" + load(1) + use + end), 2 * one, 40);
    const std::string predicate = "setp.gt.u32 %p1, %r0, 40;\n@%p1 bra $B;\n";
    EXPECT_NEAR(latency(load(0) + use + predicate + load(1) + use + "$B:\n" + end), one, 20);
    EXPECT_NEAR(latency(load(0) + use + predicate + load(1) + use + times(10, filler) + "$B:\n" + end), 2 * one, 40);
    const std::string loop = "mov.u32 %r9, 0;\nmov.u64 %rd9, %rd0;\n$L:\nld.global.f32 %f5, [%rd9];\n" + use +
                             "add.s64 %rd9, %rd9, 2048;\nadd.s32 %r9, %r9, 1;\nsetp.lt.u32 %p1, %r9, 8;\n";
    EXPECT_NEAR(latency(loop + "@%p1 bra $L;\n"), 2 * one, 300) << "eight iterations, of which the first four wait together";
    EXPECT_GT(latency(loop + times(16, filler) + "@%p1 bra $L;\n"), 7 * one);

    const std::string wait = "cp.async.wait_group 0;\nbra.uni $W;\n$W:\n", last = "cp.async.wait_group 0;\nbra.uni $X;\n$X:\n";
    const auto copy = [](int at) {
        return format("cp.async.ca.shared.global [%%r3+%d], [%%rd2+%d], 4, 4;\ncp.async.commit_group;\n", 256 * at, 4096 * at);
    };
    EXPECT_NEAR(latency(copy(0) + wait + copy(1) + last), 2 * latency(copy(0) + copy(1) + wait), 100) << "copies overlap";
    EXPECT_GT(latency("setp.gt.u32 %p1, %r0, 31;\n@%p1 bra $B;\nld.global.f32 %f5, [%rd2];\nsetp.lt.f32 %p2, %f5, %f6;\n"
                      "@%p2 bra $B;\n$B:\nbar.sync 0;\n",
                      64),
              600)
        << "a barrier waits for the last warp";
}

// Predictions from the demands and latencies of a launch's blocks.
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
    EXPECT_NEAR(predict(block(4000, 1000)).seconds, seconds(2000 * std::pow(1 + 1 / 32.0, 0.2)), 1e-12)
        << "units slow each other down";
    EXPECT_STREQ(predict(block(4000, 1000)).bound, "special");
    EXPECT_NEAR(predict(block(4000, 0), sms).seconds, seconds(1000), 1e-12);
    EXPECT_NEAR(predict(block(4000, 0), sms + 1).seconds, seconds(2000), 1e-12);
    const auto copied = predict(block(4000, 0), 1, {.read = size_t(gpu.dram), .written = size_t(gpu.dram), .l2 = 0});
    EXPECT_NEAR(copied.seconds, launch + 2, 1e-9);
    EXPECT_STREQ(copied.bound, "DRAM");
    EXPECT_EQ(predict(block(0, 0), 1, {.l2 = 1000, .bulk = 1000}).seconds, launch + 1000 / gpu.bulk);
    // The queues of wgmma and TMA are part of the latency; wgmma lowers the clock.
    ptx::BlockWork products = block(0, 0, 5000);
    products.demand[size_t(ptx::Unit::wgmma)] = 1000;
    EXPECT_NEAR(predict(products).seconds, launch + 5000 / (gpu.clock * gpu.sustained), 1e-9);
    // 16 blocks of 128 threads are resident. Latencies overlap in part with other work.
    EXPECT_DOUBLE_EQ(predict(block(0, 0, 5000), 16 * sms).seconds, seconds(1.3 * 5000));
    EXPECT_DOUBLE_EQ(predict(block(0, 0, 5000), 16 * sms + 1).seconds, seconds(1.3 * 10000));
    EXPECT_STREQ(predict(block(4000, 0, 5000)).bound, "latency");
    EXPECT_STREQ(ptx::predict({{.grid = {1}, .threads = {128}, .shared = 200 * 1024}, 32, {block(1, 0)}, {}}, ptx::gpus[3]).bound,
                 "too large");
}

// 128 threads of 128 registers: 4 warps of 4096 registers each, and 65536 registers hold 16 warps. An H100 has room for two blocks of 100 KB.
TEST(PtxPrediction, OccupancyByRegistersSharedMemoryAndBlocks) {
    const ptx::Gpu &gpu = ptx::gpus[0];
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {128}}, 128, gpu), 16.0 / 64);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {128}, .shared = 100 * 1024}, 32, gpu), 2 * 4 / 64.0);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {32}}, 16, gpu), 32.0 / 64);
    EXPECT_DOUBLE_EQ(ptx::occupancy({.threads = {1024}}, 32, gpu), 1.0);
    EXPECT_EQ(ptx::resident_blocks({.shared = 227 * 1024}, 32, gpu), 1);
    EXPECT_EQ(ptx::resident_blocks({.shared = 164 * 1024}, 32, ptx::gpus[2]), 0);  // the system uses 1 KB of it
}
