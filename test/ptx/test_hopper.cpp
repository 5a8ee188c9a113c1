// The PTX interpreter on Hopper's instructions, in handwritten kernels: results, and errors that a GPU might not report.
#include <algorithm>
#include <bit>
#include <cmath>

#include "interpreted.h"

namespace {

Result last;  // of compute()
bool last_first = false, sums_in_order = false;

ptx::Launch how(unsigned threads, unsigned blocks, unsigned cluster) {
    return {.grid = {blocks},
            .threads = {threads},
            .shared = 64 * 1024,
            .count_memory = true,
            .cluster = {cluster},
            .last_first = last_first,
            .sums_in_order = sums_in_order};
}
void compute(const std::string &body, unsigned threads = 128, unsigned blocks = 1, unsigned cluster = 1) {
    last = launch(body, how(threads, blocks, cluster));
}
// The error contains `words`; it is "no error" if there was none.
void refused(const std::string &body, const std::string &words, unsigned threads = 128, unsigned blocks = 1,
             unsigned cluster = 1) {
    expect_error(body, words, how(threads, blocks, cluster));
}
void accepted(const std::string &body, unsigned threads = 128, unsigned blocks = 1) {
    refused(body, "no error", threads, blocks);
}

ptx::TensorMap map_of(const void *base, ptx::Element element, std::array<uint64_t, 2> dims, std::array<uint16_t, 2> box,
                      int swizzle) {
    ptx::TensorMap map;
    map.base = uint64_t(base), map.rank = 2, map.element = element, map.swizzle = uint8_t(swizzle);
    map.dims[0] = dims[0], map.dims[1] = dims[1], map.strides[0] = dims[0] * bytes_of(element);
    map.box[0] = box[0], map.box[1] = box[1];
    EXPECT_EQ(broken_rule(map), "");
    return map;
}

// ---- parts of kernels: an mbarrier is at the start of shared memory, data from 1024 on ---------------------------------------------

const std::string initialise = "@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;\n",
                  announce = "fence.mbarrier_init.release.cluster;\n", block_barrier = "bar.sync 0;\n",
                  ready = initialise + announce + block_barrier, fence = "fence.proxy.async.shared::cta;\n",
                  show = "st.global.u32 [%rd3], %r20;\n";
std::string expect(int bytes) { return format("@%%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%%r2], %d;\n", bytes); }
std::string load(int at = 1024, int map = 0, int column = 0, int row = 0, const std::string &extra = "") {
    return format(
        "mov.u32 %%r10, %d;  mov.u32 %%r11, %d;\n@%%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes%s [%%r2+%d], [%%rd4+%d, {%%r10, %%r11}], [%%r2]%s;\n",
        column, row, extra.empty() ? "" : ".multicast::cluster", at, map * 128, extra.c_str());
}
std::string wait(int parity = 0, int at = 0) {
    return format(
        "{ .reg .pred P;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 P, [%%r2+%d], %d;\n@P bra DONE;\nbra AGAIN;\nDONE: }\n",
        at, parity);
}
const std::string show_copy = "ld.shared.u32 %r20, [%r3+1024];\n";

// x has 64 rows of 32 words. A box has 8 rows of 16 words: 512 bytes, one word for each of 128 threads.
void words_and_map(int swizzle = 0) {
    for (size_t n = 0; n < words; n++) x[n] = uint32_t(n);
    maps[0] = map_of(x, ptx::Element::u32, {32, 64}, {16, 8}, swizzle);
}

}  // namespace

// ---- mbarriers and copies -----------------------------------------------------------------------------------------------------------

TEST(PtxHopper, BoxOfATensorMap) {
    words_and_map();
    compute(ready + expect(512) + load(1024, 0, 4, 3) + wait() + show_copy + show);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(y[n], (3 + n / 16) * 32 + 4 + n % 16);
    compute(ready + expect(512) + load(1024, 0, 24, -2) + wait() + show_copy + show);  // zeros outside the array
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(y[n], n < 32 || n % 16 >= 8 ? 0 : (n / 16 - 2) * 32 + 24 + n % 16) << n;
    words_and_map(2);  // rows of 64 bytes: the number of the pair of rows permutes the row's 16-byte words
    compute(ready + expect(512) + load() + wait() + show_copy + show);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(y[n], n / 16 * 32 + (n % 16 / 4 ^ n / 32 % 4) * 4 + n % 4) << n;
}

TEST(PtxHopper, CopiesNeedTheirMbarrier) {
    words_and_map();
    const std::string copy = ready + expect(512) + load();
    refused(copy + show_copy + show, "reads shared memory");
    refused(copy + wait(1) + show_copy + show, "reads shared memory");  // the phase before the first one counts as ended
    refused(copy, "the block ends");
    refused(ready + load() + wait() + show_copy, "phase 0 of it has 0 of 1 arrivals and 512 bytes of the 0");
    refused(ready + expect(512) + wait(), "has 1 of 1 arrivals and 0 bytes of the 512");
    refused(ready + expect(1024) + load() + wait(), "512 bytes of the 1024 that arrivals expect");
    refused(ready + expect(256) + load() + wait(), "512 bytes of the 256");
    refused(ready + expect(512) + load() + load(2048) + wait() + wait(1), "do not add up");
    refused(copy + wait() + expect(512) + load() + wait(1) + show_copy + expect(512) + load(), "no barrier in between");
    refused(copy + load(), "writes to shared memory + 1024 while a copy to it is on its way");
    refused(expect(512), "no mbarrier has been initialised at shared memory + 0");
    refused(initialise + announce + wait(1), "initialised");
    refused(initialise + block_barrier + expect(512) + load(), "no fence.mbarrier_init or fence.proxy.async");
    refused(initialise + initialise, "is an mbarrier already");
    refused(ready + "ld.shared.u32 %r20, [%r2];", "reads shared memory + 0, which is an mbarrier");
    refused(ready + expect(0) + expect(0) + wait() + expect(0) + wait(1) + wait(), "phase 2 of it has 0 of 1 arrivals");
}

TEST(PtxHopper, MbarriersOrderWarps) {
    const std::string
        initialise = "@%p0 mbarrier.init.shared::cta.b64 [%r2], 128;\nbar.sync 0;\n",
        own = "st.shared.u32 [%r3+1024], %r0;\n", arrive = "mbarrier.arrive.shared::cta.b64 %rd9, [%r2];\n",
        other = "xor.b32 %r5, %r0, 33;  shl.b32 %r5, %r5, 2;  add.s32 %r5, %r5, %r2;  ld.shared.u32 %r20, [%r5+1024];\n";
    compute(initialise + own + arrive + wait() + other + show);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(y[n], n ^ 33);
    refused(initialise + own + arrive + other, "reads shared memory");
    refused(initialise + arrive + own + wait() + other, "which thread");
    const std::string relaxed = "mbarrier.arrive.relaxed.cta.shared::cta.b64 %rd9, [%r2];\n";
    refused(initialise + relaxed + wait() + own + relaxed + wait(1) + other, "with no barrier in between");
    refused(initialise + "@%p0 bra END;\n" + arrive + wait() + "END:", "has 127 of 128 arrivals");
    refused(initialise + "mbarrier.arrive.shared::cta.b64 %rd9, [%r2], 5;", "more often than the 128 times");
}

TEST(PtxHopper, StoresReadSharedMemoryUntilTheyAreWaitedFor) {
    words_and_map();
    const std::string own = "st.shared.u32 [%r3+1024], %r0;\n",
                      store = "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd4, {%r9, %r9}], [%r2+1024];\n",
                      commit = "@%p0 cp.async.bulk.commit_group;\n", waits = "@%p0 cp.async.bulk.wait_group.read 0;\n";
    compute(own + fence + block_barrier + store + commit + waits);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(x[n / 16 * 32 + n % 16], n);
    std::string add = store;
    add.replace(add.find("cp.async"), 8, "cp.reduce.async");
    add.replace(add.find("shared::cta.tile"), 16, "shared::cta.add.tile");
    compute(own + fence + block_barrier + add + commit + waits);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(x[n / 16 * 32 + n % 16], 2 * n);
    refused(own + block_barrier + store + commit + waits, "with no fence.proxy.async in between");
    refused(fence + own + block_barrier + store + commit + waits, "with no fence.proxy.async in between");
    refused(own + fence + "bar.warp.sync -1;\n" + store + commit + waits, "reads shared memory");
    refused(own + fence + block_barrier + store + commit, "returns before the copy of line");
    refused(own + fence + block_barrier + store + waits, "returns before the copy of line");
    refused(own + fence + block_barrier + store + commit + block_barrier + own + waits, "still reads");
    std::string by_all = load();
    by_all.erase(by_all.find("@%p0"), 4);
    refused(ready + expect(512) + by_all, "several threads");
}

TEST(PtxHopper, BulkCopiesOfBytes) {
    words_and_map();
    const std::string in =
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+1024], [%rd0], 512, [%r2];\n";
    compute(ready + expect(512) + in + wait() + show_copy + show);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(y[n], n);
    const std::string own = "cvt.rn.f32.u32 %f1, %r0;  st.shared.f32 [%r3+1024], %f1;\n",
                      add = "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r2+1024], 512;\n",
                      waits = "@%p0 cp.async.bulk.commit_group;\n@%p0 cp.async.bulk.wait_group 0;\n";
    compute(own + fence + block_barrier + add + add + waits);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(std::bit_cast<float>(y[n]), 2 * float(n));
    refused(ready + expect(512) + in + in, "while a copy to it is on its way");
    refused(ready + "add.s64 %rd0, %rd0, 8;" + in, "multiples of 16");
    refused(ready + "add.s64 %rd0, %rd0, 65488;" + in, "of the 65536 bytes of argument 0");
}

// Blocks add 0, 1, 2, ... to y in turns. Word 1024 of y is the number of the next block.
TEST(PtxHopper, TurnsOfBlocks) {
    const std::string all = "cvt.rn.f32.u32 %f1, %r0;  st.shared.f32 [%r3+1024], %f1;\n" + fence + block_barrier,
                      own = all + "@!%p0 bra END;\n", acquire = "AGAIN: ld.acquire.gpu.global.u32 %r20, [%rd1+4096];\n",
                      loop = "setp.ne.u32 %p1, %r20, %r1;\n@%p1 bra AGAIN;\n", proxies = "fence.proxy.async.global;\n",
                      add =
                          "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r2+1024], 512;\n"
                          "cp.async.bulk.commit_group;\n",
                      completed = "cp.async.bulk.wait_group 0;\n", read = "cp.async.bulk.wait_group.read 0;\n",
                      release = "add.u32 %r21, %r1, 1;\nst.release.gpu.global.u32 [%rd1+4096], %r21;\n", end = "END:\n",
                      whole = own + acquire + loop + proxies + add + completed + release + end;
    const auto refuse = [](const std::string &body, const std::string &words) { refused(body, words, 128, 3); };
    const auto expect_sums = [&](const std::string &body) {
        accepted(body, 128, 3);
        for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(std::bit_cast<float>(y[n]), 3 * float(n));
    };
    const auto with = [](std::string text, const std::string &from, const std::string &to) {
        return text.replace(text.find(from), from.size(), to);
    };
    const std::string no_fence = "no fence.proxy.async between", running = "by a copy that may still have been running";
    for (const bool in_order : {false, true}) {
        sums_in_order = in_order;
        expect_sums(whole);
        refuse(own + acquire + loop + add + completed + release + end, no_fence + " the ld.acquire and this");
        refuse(own + proxies + acquire + loop + add + completed + release + end, no_fence);
        refuse(own + acquire + loop + fence + add + completed + release + end, no_fence);
        refuse(own + acquire + loop + proxies + add + read + release + end, running);
        refuse(own + acquire + loop + proxies + add + release + completed + end, running);
    }
    // Without an order each run may give another sum of floats; sums of integers and of zeros are the same.
    refuse(own + add + completed + release + end, "nothing orders these additions");
    refuse(with(whole, "acquire", "relaxed"), "nothing orders these additions");
    refuse(with(whole, "release", "relaxed"), "nothing orders these additions");
    accepted(with(own, "%f1, %r0", "%f1, %r9") + add + completed + end, 128, 3);
    accepted(own + with(add, "f32", "u32") + completed + end, 128, 3);
    sums_in_order = false;
    expect_sums(own + add + completed + end);

    // The last block may start first, and waits for the blocks before it. A missing turn is still an error.
    last_first = true;
    expect_sums(whole);
    refuse(with(whole, release, ""), "loads a value of device memory again and again");
    last_first = false;

    // The second of two blocks acts after the turn of the first. A thread reads a completed copy without a fence; a copy reads the stores of threads
    // after a fence in its own block.
    const auto second = [&](const std::string &first_does, const std::string &second_does, const std::string &words) {
        refused(own + "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra SECOND;\n" + first_does + release + "bra END;\nSECOND:\n" + acquire +
                    loop + second_does + end,
                words, 128, 2);
    };
    const std::string reads = "ld.global.u32 %r22, [%rd1];\n", stores = "st.global.u32 [%rd1], %r0;\n",
                      loads =
                          initialise + announce + expect(512) +
                          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+2048], [%rd1], 512, [%r2];\n" +
                          wait();
    second(add + completed, reads, "no error");
    second(add + read, reads, "reads byte 0 of the 65536 bytes of argument 1, which ");
    second(stores, proxies + loads, "no error");
    second(stores + proxies, loads, no_fence);
    // After a barrier one warp's acquire holds for the other warps.
    for (const std::string &fenced : {proxies, std::string()})
        refused(all + "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra SECOND;\n@!%p0 bra END;\n" + add + completed + release +
                    "bra END;\nSECOND: @!%p0 bra MEET;\n" + acquire + loop + fenced + "MEET: " + block_barrier +
                    "setp.ne.u32 %p2, %r0, 32;\n@%p2 bra END;\n" + add + completed + end,
                fenced.empty() ? no_fence : "no error", 128, 2);
}

TEST(PtxHopper, RulesOfTensorMaps) {
    words_and_map();
    const auto rule = [](auto change) {
        ptx::TensorMap map = maps[0];
        change(map);
        return broken_rule(map);
    };
    expect_contains(rule([](auto &m) { m.base += 8; }), {"aligned to 16"});
    expect_contains(rule([](auto &m) { m.strides[0] = 100; }), {"a multiple of 16"});
    expect_contains(rule([](auto &m) { m.box[1] = 257; }), {"1 to 256"});
    expect_contains(rule([](auto &m) { m.box[0] = 3; }), {"a multiple of 16"});
    expect_contains(rule([](auto &m) { m.box[0] = 32, m.swizzle = 2; }), {"at most the swizzle's"});
    expect_contains(rule([](auto &m) { m.rank = 6; }), {"1 to 5"});
    const std::string copy = ready + expect(512);
    refused(copy + load(1040), "not aligned to 128");
    refused(copy + load(65536 - 128), "of which the block has 65536");
    refused(copy + "add.s64 %rd4, %rd4, 64;" + load(), "cuTensorMapEncodeTiled has not made");
    refused(copy + load().replace(load().find("2d"), 2, "1d").replace(load().find(", %r11"), 6, ""),
            "rank 1 by a tensor map of rank 2");
}

// ---- clusters -------------------------------------------------------------------------------------------------------------------------

namespace {
const std::string
    meet = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n",
    rank = "mov.u32 %r6, %cluster_ctarank;  xor.b32 %r7, %r6, 1;\n",
    own_word = "shl.b32 %r3, %r0, 2;  add.s32 %r3, %r3, %r2;  mad.lo.u32 %r5, %r6, 1000, %r0;  st.shared.u32 [%r3+1024], %r5;\n",
    map_other = "mapa.shared::cluster.u32 %r8, %r2, %r7;  shl.b32 %r3, %r0, 2;  add.s32 %r3, %r3, %r8;\n",
    read_other = map_other + "ld.shared::cluster.u32 %r20, [%r3+1024];\n";
}

TEST(PtxHopper, BlocksOfAClusterReadEachOther) {
    compute(rank + own_word + meet + read_other + show + meet, 128, 4, 2);
    for (uint32_t n = 0; n < 512; n++) EXPECT_EQ(y[n], (n / 128 % 2 ? 0 : 1000) + n % 128);
    refused(rank + own_word + read_other + meet, "of block", 128, 2, 2);
    refused(rank + own_word + meet + read_other, "ends", 128, 2, 2);
    std::string relaxed = meet;
    relaxed.replace(relaxed.find("release"), 7, "relaxed");
    refused(rank + own_word + relaxed + read_other + meet, "with no barrier in between", 128, 2, 2);
    refused(rank + own_word + meet + map_other + "ld.shared.u32 %r20, [%r3+1024];", "fix: .shared::cluster", 128, 2, 2);
    refused(rank + "setp.eq.u32 %p1, %r6, 0;\n@%p1 bra SKIP;\nbarrier.cluster.wait;\nSKIP:", "without arriving", 128, 2, 2);
    refused(rank + "setp.eq.u32 %p1, %r6, 0;\n@%p1 bra SKIP;\n" + meet + "SKIP: bar.sync 1, 256;", "barrier 1", 128, 2, 2);
    refused(rank, "clusters of 2 blocks in a grid of 3", 128, 3, 2);
}

TEST(PtxHopper, RemoteArrivalsAndMulticast) {
    words_and_map();
    const std::string begin = rank + ready + meet;
    // Block 0 loads for both blocks; each waits at its own mbarrier.
    const std::string only_first = "setp.eq.u32 %p1, %r6, 0;  and.pred %p0, %p0, %p1;  mov.u16 %rs1, 3;\n",
                      both = load(1024, 0, 0, 0, ", %rs1");
    compute(begin + expect(512) + only_first + both + wait() + show_copy + show + meet, 128, 2, 2);
    for (uint32_t n = 0; n < 256; n++) EXPECT_EQ(y[n], n % 128 / 16 * 32 + n % 16);
    refused(begin + expect(512) + only_first + load() + wait() + show_copy + meet, "0 bytes of the 512", 128, 2, 2);
    refused(rank + initialise + announce + block_barrier + expect(512) + only_first + both + wait() + meet, "mbarrier", 128, 2,
            2);
    // A thread of the other block arrives at this block's mbarrier.
    const std::string arrive = "@%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];\n";
    compute(begin + own_word + block_barrier + map_other + arrive + wait() + read_other + show + meet, 128, 2, 2);
    for (uint32_t n = 0; n < 256; n++) EXPECT_EQ(y[n], (n < 128 ? 1000 : 0) + n % 128);
    refused(begin + own_word + block_barrier + map_other + wait() + meet, "has 0 of 1 arrivals", 128, 2, 2);
    refused(begin + own_word + map_other + arrive + wait() + read_other + meet, "with no barrier in between", 128, 2, 2);
}

// ---- wgmma ------------------------------------------------------------------------------------------------------------------------------

namespace {

constexpr int rows = 64, columns = 64;

struct Kind {
    const char *types;
    ptx::Element element;
    int bytes;
    uint32_t (*encode)(int value);  // integers from -4 to 4
};
uint32_t minifloat(int value, int mantissa_bits, int bias) {
    if (!value) return 0;
    const int size = std::abs(value), exponent = size >= 4 ? 2 : size >= 2 ? 1 : 0;
    const int mantissa = ((size << mantissa_bits) >> exponent) - (1 << mantissa_bits);
    return uint32_t((value < 0 ? 0x80 : 0) | (exponent + bias) << mantissa_bits | mantissa);
}
const Kind kinds[] = {
    {"bf16", ptx::Element::bf16, 2, [](int v) { return std::bit_cast<uint32_t>(float(v)) >> 16; }},
    {"f16", ptx::Element::f16, 2, [](int v) { return uint32_t(std::bit_cast<uint16_t>(_Float16(float(v)))); }},
    {"e4m3", ptx::Element::u8, 1, [](int v) { return minifloat(v, 3, 7); }},
    {"e5m2", ptx::Element::u8, 1, [](int v) { return minifloat(v, 2, 15); }},
    {"tf32", ptx::Element::f32, 4, [](int v) { return std::bit_cast<uint32_t>(float(v)); }},
};
int a_of(int row, int k) { return (row * 5 + k * 3 + row / 8) % 9 - 4; }
int b_of(int column, int k) { return (column * 7 + k * 5 + column / 8 * 2) % 9 - 4; }

// The layout of A or B in x and in shared memory. A box has rows as wide as the swizzle, or 16 bytes without one.
struct Layout {
    int swizzle;
    bool transposed;  // K is not contiguous
    int span() const { return swizzle ? 16 << swizzle : 16; }
};

struct Product {
    const Kind &kind;
    Layout a, b;
    int K;  // elements; an operation takes 32 bytes of them
    int operations() const { return K * kind.bytes / 32; }

    // Stores 64 x K elements in x, maps them, and returns the copies of all boxes to `shared`.
    std::string place(const Layout &l, int map, int shared, int (*value)(int, int)) const {
        const int contiguous = l.transposed ? 64 : K, others = l.transposed ? K : 64, wide = l.span() / kind.bytes;
        uint8_t *base = reinterpret_cast<uint8_t *>(x) + map * 16384;
        for (int o = 0; o < others; o++)
            for (int c = 0; c < contiguous; c++) {
                const uint32_t bits = kind.encode(l.transposed ? value(c, o) : value(o, c));
                memcpy(base + (o * contiguous + c) * kind.bytes, &bits, size_t(kind.bytes));
            }
        maps[map] =
            map_of(base, kind.element, {uint64_t(contiguous), uint64_t(others)}, {uint16_t(wide), uint16_t(others)}, l.swizzle);
        std::string copies;
        for (int c = 0; c < contiguous; c += wide) copies += load(shared + c / wide * others * l.span(), map, c);
        return copies;
    }
    uint64_t fields(const Layout &l) const {
        const uint64_t others = uint64_t(l.transposed ? K : 64), span = uint64_t(l.span()), box = others * span, eight = 8 * span;
        const uint64_t leading = l.transposed && !l.swizzle ? eight : box, stride = l.transposed && !l.swizzle ? box : eight;
        constexpr uint64_t mode[] = {0, 3, 2, 1};
        return leading / 16 << 16 | stride / 16 << 32 | mode[l.swizzle] << 62;
    }
    // Byte at which the k-th operation starts in an operand.
    int step(const Layout &l, int k) const {
        if (l.transposed) return k * 16 * l.span();
        return l.swizzle ? k * 32 / l.span() * 64 * l.span() + k * 32 % l.span() : k * 2 * 64 * 16;
    }
};

std::string accumulators() {
    std::string all;
    for (int n = 0; n < columns / 2; n++) all += format("%s%%f%d", n ? "," : "{", n);
    return all + "}";
}
constexpr int a_at = 1024, b_at = 1024 + 16384;
const std::string wgmma_fence = "wgmma.fence.sync.aligned;\n", commit = "wgmma.commit_group.sync.aligned;\n",
                  wait_group = "wgmma.wait_group.sync.aligned 0;\n";

struct Parts {
    std::string before, operations, after;
    std::string all() const { return before + wgmma_fence + operations + commit + wait_group + after; }
};
Parts parts(const Product &p, bool registers) {
    Parts out;
    for (size_t n = 0; n < words; n++) x[n] = 0;
    const int bytes = 64 * p.K * p.kind.bytes;
    out.before = ready + expect(2 * bytes) + p.place(p.a, 0, a_at, a_of) + p.place(p.b, 1, b_at, b_of) + wait();
    out.before += "shr.u32 %r30, %r2, 4;  cvt.u64.u32 %rd30, %r30;\n";
    for (int n = 0; n < columns / 2; n++) out.before += format("mov.f32 %%f%d, 0f00000000;\n", n);
    if (registers)  // each thread loads its fragments of A from x, which has rows of 128 bytes
        out.before +=
            "and.b32 %r51, %r0, 31;  shr.u32 %r52, %r51, 2;  and.b32 %r53, %r51, 3;  shr.u32 %r50, %r0, 5;\n"
            "mad.lo.u32 %r54, %r50, 16, %r52;  shl.b32 %r54, %r54, 7;  mad.lo.u32 %r54, %r53, 4, %r54;\n"
            "cvt.u64.u32 %rd50, %r54;  add.s64 %rd50, %rd50, %rd0;\n";
    const std::string k = std::to_string(32 / p.kind.bytes), flags = p.kind.bytes != 2 ? ""
                                                                     : registers
                                                                         ? format(", %d", p.b.transposed)
                                                                         : format(", %d, %d", p.a.transposed, p.b.transposed);
    for (int n = 0; n < p.operations(); n++) {
        const auto descriptor = [&](int reg, const Layout &l, int at) {
            return format("add.s64 %%rd%d, %%rd30, %lld;\n", reg,
                          static_cast<long long>(p.fields(l) + uint64_t(at + p.step(l, n)) / 16));
        };
        std::string a = "%rd31";
        if (registers) {
            a = format("{%%r%d,%%r%d,%%r%d,%%r%d}", 60 + 4 * n, 61 + 4 * n, 62 + 4 * n, 63 + 4 * n);
            for (int r = 0; r < 4; r++)
                out.before +=
                    format("ld.global.u32 %%r%d, [%%rd50+%d];\n", 60 + 4 * n + r, r % 2 * 8 * 128 + r / 2 * 16 + n * 32);
        } else out.operations += descriptor(31, p.a, a_at);
        out.operations += descriptor(32, p.b, b_at) + "wgmma.mma_async.sync.aligned.m64n64k" + k + ".f32." + p.kind.types + "." +
                          p.kind.types + " " + accumulators() + ", " + a + ", %rd32, 1, 1, 1" + flags + ";\n";
    }
    out.after = "mul.wide.u32 %rd40, %r0, 128;  add.s64 %rd40, %rd1, %rd40;\n";
    for (int n = 0; n < columns / 2; n++) out.after += format("st.global.f32 [%%rd40+%d], %%f%d;\n", 4 * n, n);
    return out;
}

int sum_of(int row, int column, int K) {
    int sum = 0;
    for (int k = 0; k < K; k++) sum += a_of(row, k) * b_of(column, k);
    return sum;
}
// Number of wrong results in y.
int differences(int K) {
    int wrong = 0;
    for (int thread = 0; thread < 128; thread++)
        for (int r = 0; r < columns / 2; r++) {
            const int row = thread / 32 * 16 + thread % 32 / 4 + r / 2 % 2 * 8, column = r / 4 * 8 + thread % 4 * 2 + r % 2;
            wrong += std::bit_cast<float>(y[thread * columns / 2 + r]) != float(sum_of(row, column, K));
        }
    return wrong;
}
}  // namespace

TEST(PtxHopper, WgmmaOfEveryTypeAndLayout) {
    for (const Kind &kind : kinds)
        for (int a = 0; a < 4; a++)
            for (const bool transposed_a : {false, true})
                for (int b = 0; b < 4; b++)
                    for (const bool transposed_b : {false, true}) {
                        if ((transposed_a || transposed_b) && kind.bytes != 2) continue;
                        const Product p{kind, {a, transposed_a}, {b, transposed_b}, 128 / kind.bytes};
                        compute(parts(p, false).all());
                        EXPECT_EQ(differences(p.K), 0) << kind.types << " " << a << transposed_a << " " << b << transposed_b;
                    }
}

TEST(PtxHopper, WgmmaWithRegisters) {
    for (const Kind &kind : kinds) {
        const Product p{kind, {3, false}, {3, kind.bytes == 2}, 128 / kind.bytes};
        const Parts q = parts(p, true);
        compute(q.all());
        EXPECT_EQ(differences(p.K), 0) << kind.types;
        const std::string change = "add.s32 %r60, %r60, 1;\n";
        refused(q.before + wgmma_fence + change + q.operations, "since the last wgmma.fence");
        refused(q.before + wgmma_fence + q.operations + commit + change + wait_group, "overwrites a register");
    }
}

TEST(PtxHopper, WgmmaIsRefusedWithoutFencesAndWaits) {
    const Product p{kinds[0], {3, false}, {3, false}, 64};
    const Parts q = parts(p, false);
    refused(q.before + q.operations + commit + wait_group, "no wgmma.fence precedes the first wgmma");
    refused(q.before + wgmma_fence + "add.f32 %f0, %f0, %f0;\n" + q.operations, "since the last wgmma.fence");
    refused(q.before + wgmma_fence + q.operations + commit + q.after, "accesses a sum of the wgmma of line");
    refused(q.before + wgmma_fence + q.operations + wait_group + q.after, "accesses a sum");  // not committed
    refused(q.before + wgmma_fence + q.operations + commit, "returns before its wgmma has been waited for");
    std::string weaker = q.all();
    weaker.replace(weaker.find("wait_group.sync.aligned 0"), 25, "wait_group.sync.aligned 1");
    refused(weaker, "accesses a sum");
    std::string early = q.all();
    early.erase(early.find("{ .reg .pred P;"), wait().size());
    refused(early, "reads shared memory");
    refused(q.before + wgmma_fence + q.operations + commit + "@%p0 st.shared.f32 [%r2+1024], 0f00000000;\n" + wait_group,
            "which the operation of line");
    refused(q.before + wgmma_fence + q.operations + commit + expect(8192) + load(a_at) + wait_group, "still reads");
    // Threads write an operand, and no proxy fence follows.
    const std::string store = "st.shared.f32 [%r3+1024], 0f00000000;\n";
    refused(q.before + block_barrier + store + block_barrier + wgmma_fence + q.operations + commit + wait_group,
            "with no fence.proxy.async in between");
    accepted(q.before + block_barrier + store + fence + block_barrier + wgmma_fence + q.operations + commit + wait_group);
    accepted(q.before + block_barrier + store + block_barrier + fence + wgmma_fence + q.operations + commit + wait_group);
    // All warps of a warpgroup execute wgmma together.
    const std::string skip = "shr.u32 %r60, %r0, 5;  setp.eq.u32 %p5, %r60, 2;\n@%p5 bra END;\n";
    refused(q.before + skip + wgmma_fence + q.operations + commit + wait_group + "END:", "warp 2");
    refused(q.before + "mov.u64 %rd30, 281474976710656;\n" + wgmma_fence + q.operations + commit + wait_group,
            "is not a matrix descriptor");
}

// ---- other instructions ---------------------------------------------------------------------------------------------------

TEST(PtxHopper, ElectAndStmatrix) {
    compute("elect.sync %r10|%p1, -1;  selp.b32 %r20, 7, %r10, %p1;\n" + show);
    for (uint32_t n = 0; n < 128; n++) EXPECT_EQ(y[n], n % 32 ? 0u : 7u);
    refused("@%p0 bra END;\nelect.sync _|%p1, -1;\nEND:", "the lanes that are here are");
    // A fragment of two tiles: lane 4 g + t has columns 2 t and 2 t + 1 of row g; rows have 16 bytes and are contiguous.
    const std::string
        address = "shl.b32 %r10, %r0, 4;  add.s32 %r10, %r10, %r2;\n",
        values =
            "shl.b32 %r11, %r0, 1;  add.s32 %r12, %r11, 1;  shl.b32 %r12, %r12, 16;  or.b32 %r11, %r11, %r12;  add.s32 %r13, %r11, 4194368;\n",
        get = "bar.warp.sync -1;  ld.shared.u32 %r20, [%r3];\n";
    compute(address + values + "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r10], {%r11, %r13};\n" + get + show, 32);
    for (uint32_t n = 0; n < 32; n++) EXPECT_EQ(y[n], (2 * n + 1) << 16 | 2 * n);
    compute(address + values + "stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%r10], {%r11, %r13};\n" + get + show, 32);
    for (uint32_t n = 0; n < 32; n++) EXPECT_EQ(y[n] & 0xffff, n % 4 * 2 * 8 + n / 4);
}

// ptxas knows the registers at the start from .maxnreg, or from .maxntid with .minnctapersm, which __launch_bounds__ with two arguments writes. Without,
// it drops setmaxnreg.
TEST(PtxHopper, Setmaxnreg) {
    const std::string two = ".maxntid 128\n.minnctapersm 2\n", three = ".maxntid 384, 1, 1\n.minnctapersm 1\n", none;
    const auto expect = [](const std::string &directives, unsigned threads, const std::string &body, const std::string &words) {
        SCOPED_TRACE(directives + body);
        expect_contains(error_of([&] { launch(body, how(threads, 1, 1), "", directives); }), {words});
    };
    const auto set = [](const char *action, int n) { return format("setmaxnreg.%s.sync.aligned.u32 %d;\n", action, n); };
    expect(two, 128, set("dec", 40) + set("inc", 240), "no error");
    expect(three, 128, set("inc", 240), "setmaxnreg waits for 240 registers");
    expect(".maxnreg 128\n", 128, set("dec", 120) + set("inc", 136), "setmaxnreg waits for 136 registers");
    expect(".maxnreg 128\n", 128, set("dec", 136), "setmaxnreg.dec to 136 registers from 128");
    for (const std::string &directives : {none, std::string(".maxntid 384, 1, 1\n"), std::string(".minnctapersm 1\n")})
        expect(directives, 384, set("inc", 240) + set("dec", 248), "no error");
    expect(none, 128, set("dec", 41), "a multiple of 8 from 24 to 256");
    for (const int released : {24, 32}) {  // by the first of three warpgroups, which begin with 168 each
        const std::string body = "setp.lt.u32 %p1, %r0, 128;\n@%p1 bra GIVE;\n" + set("inc", 240) + "bra END;\nGIVE:\n" +
                                 set("dec", released) + "END:";
        expect(three, 384, body, released == 24 ? "no error" : "the block would have 65536 of 64512");
    }
}

// ---- the clock --------------------------------------------------------------------------------------------------------------------------

// A wait ends when the copy has landed, when the last arrival has happened, and when the product has ended.
TEST(PtxHopper, LatencyOfWaits) {
    const auto latency = [](const std::string &body, unsigned threads = 128, unsigned cluster = 1) {  // of the first cluster
        compute(body, threads, cluster, cluster);
        double most = 0;
        for (const ptx::BlockWork &b : last.counts.blocks) most = std::max(most, b.latency);
        return most;
    };
    words_and_map();
    const double none = latency(ready + expect(0) + wait()), one = latency(ready + expect(512) + load() + wait()),
                 both = latency(ready + expect(1024) + load() + load(2048) + wait());
    EXPECT_NEAR(one - none, 600, 50);
    EXPECT_NEAR(both - one, 512 / 64, 10) << "two copies overlap";
    const std::string of_64 = "@%p0 mbarrier.init.shared::cta.b64 [%r2], 64;\nbar.sync 0;\n",
                      late =
                          "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra SOON;\nld.global.u32 %r5, [%rd3];\nadd.s32 %r5, %r5, %r5;\n"
                          "bar.sync 1, 32;\nSOON:\n";
    EXPECT_GT(latency(of_64 + late + "mbarrier.arrive.shared::cta.b64 %rd9, [%r2];\n" + wait(), 64), 600);
    EXPECT_NEAR(latency(rank + meet + meet, 32, 2) - latency(rank + meet, 32, 2), 200, 20);
    const Parts once = parts({kinds[0], {3, false}, {3, false}, 64}, false);
    Parts twice = once;
    twice.operations += once.operations;
    const double product = latency(once.all());
    EXPECT_NEAR(latency(twice.all()) - product, 4 * 32, 1) << "m64n64k16 takes 32 cycles";
    EXPECT_NEAR(latency(once.all(), 256) - product, 4 * 32, 40) << "two warpgroups share the tensor cores";
}
