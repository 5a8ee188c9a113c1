// The emulator itself (dev/emulator/simt.h): it follows the documentation, and it notices forbidden actions of a kernel.
// When nvcc compiles this file, the GPU is tested in the same way.
#include "../../dev/emulator/counts.h"
#include "../../llmc/ops/ptx.cuh"
#include "../../llmc/ops/warp.cuh"
#include "../errors.h"
#include "check.cuh"

inline namespace CUDA_BACKEND {
using Device = CudaF32;

// ---- threads, blocks, atomics -------------------------------------------------------------------------------------------------

__global__ void index_kernel(unsigned *out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x + threadIdx.x] = block * 1000 + threadIdx.x;
}

TEST(Simt, EveryThreadOfEveryBlockRunsOnce) {
    const unsigned blocks = 3 * 4 * 5, threads = 48;
    for_each_order<Device>([&](Device dev) {
        DeviceArray<unsigned> out(blocks * threads);
        launch(dev, index_kernel, Grid{3, 4, 5}, threads, 0, out.data());
        const auto got = out.values();
        for (unsigned i = 0; i < got.size(); i++) ASSERT_EQ(got[i], i / threads * 1000 + i % threads);
        launch(dev, index_kernel, Grid{0}, threads, 0, out.data());  // an empty grid does nothing
    });
}

// Threads of one block, and of all blocks, at the same words.
__global__ void atomics_kernel(int *i, unsigned *u, unsigned long long *w, float *f) {
    const unsigned n = blockIdx.x * blockDim.x + threadIdx.x;
    int &sum = shared_mem<int>();
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, 1);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&i[0], sum);
    atomicMin(&i[1], -int(n)), atomicMax(&i[2], int(n));
    atomicAnd(&u[0], ~(1u << n % 8)), atomicOr(&u[1], 1u << n % 32), atomicXor(&u[2], n < 98 ? n : 0);
    atomicAdd(&w[0], 1ull << 32), atomicMax(&w[1], 5000000000ull + n);
    atomicAdd(&w[2], (unsigned long long)atomicExch(&u[3], n));
    for (unsigned seen = 0, old = 0; old < n && (seen = atomicCAS(&u[4], old, n)) != old;) old = seen;  // the largest
    atomicAdd(&f[0], 0.5f);
}

TEST(Simt, Atomics) {
    for_each_order<Device>([&](Device dev) {
        DeviceArray<int> i(std::vector<int>(3, 0));
        DeviceArray<unsigned> u(std::vector<unsigned>{~0u, 0, 0, 0, 0});
        DeviceArray<unsigned long long> w(std::vector<unsigned long long>(3, 0));
        DeviceArray<float> f(std::vector<float>(1, 0));
        launch(dev, atomics_kernel, Grid{4}, 64, sizeof(int), i.data(), u.data(), w.data(), f.data());
        EXPECT_EQ(i.values(), (std::vector<int>{256, -255, 255}));
        const auto bits = u.values();
        EXPECT_EQ(bits[0], 0xffff'ff00u);
        EXPECT_EQ(bits[1], ~0u);
        EXPECT_EQ(bits[2], 1u);  // 0 ^ 1 ^ ... ^ 97
        EXPECT_EQ(bits[4], 255u);
        EXPECT_EQ(w.values()[0], 256ull << 32);
        EXPECT_EQ(w.values()[1], 5000000255ull);
        EXPECT_EQ(w.values()[2] + bits[3], 255u * 128);  // what was taken out, and the last that was put in
        EXPECT_EQ(f.values()[0], 128);
    });
}

// ---- mma, ldmatrix ---------------------------------------------------------------------------------------------------------------

// The fragments exactly as the PTX ISA draws them. Integers of 4 bits: every sum is exact.
__global__ void mma_kernel(float *D, const bf16 *A, const bf16 *B) {  // D (16, 8)   A (16, 16)   B (16, 8)
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto pair = [](bf16 low, bf16 high) { return uint32_t(low.bits) | uint32_t(high.bits) << 16; };
    const auto a_pair = [&](unsigned row, unsigned column) { return pair(A[row * 16 + column], A[row * 16 + column + 1]); };
    const auto b_pair = [&](unsigned row, unsigned column) { return pair(B[row * 8 + column], B[(row + 1) * 8 + column]); };
    const uint32_t a[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8), a_pair(g + 8, 2 * t + 8)};
    const uint32_t b[2] = {b_pair(2 * t, g), b_pair(2 * t + 8, g)};
    float *const d_at[4] = {&D[g * 8 + 2 * t], &D[g * 8 + 2 * t + 1], &D[(g + 8) * 8 + 2 * t], &D[(g + 8) * 8 + 2 * t + 1]};
    float d[4] = {*d_at[0], *d_at[1], *d_at[2], *d_at[3]};
    mma_m16n8k16(d, a, b);
    for (int i = 0; i < 4; i++) *d_at[i] = d[i];
}

TEST(Simt, MmaEqualsALoop) {
    std::vector<bf16> A(16 * 16), B(16 * 8);
    std::vector<float> D(16 * 8);
    const Random random{1, Purpose::test, 3};
    uint64_t at = 0;
    const auto integer = [&] { return std::floor(float(random.uniform(at++)) * 16) - 8; };
    for (bf16 &v : A) v = integer();
    for (bf16 &v : B) v = integer();
    for (float &v : D) v = integer();
    std::vector<float> want = D;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++)
            for (int k = 0; k < 16; k++) want[i * 8 + j] += float(A[i * 16 + k]) * float(B[k * 8 + j]);
    for_each_order<Device>([&](Device dev) {
        DeviceArray<bf16> d_A(A), d_B(B);
        DeviceArray<float> d_D(D);
        launch(dev, mma_kernel, Grid{1}, 32, 0, d_D.data(), d_A.data(), d_B.data());
        EXPECT_EQ(d_D.values(), want);
    });
}

struct FourMatrices {
    alignas(16) uint16_t element[4][8][8];
};
__global__ void ldmatrix_kernel(uint32_t *out) {  // (2, 32, 4): plain and transposed
    FourMatrices &m = shared_mem<FourMatrices>();
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) m.element[i / 64][i / 8 % 8][i % 8] = uint16_t(i);
    __syncwarp();
    uint32_t plain[4], transposed[4];
    ldmatrix_x4(plain, m.element[lane / 8][lane % 8]);
    ldmatrix_x4_trans(transposed, m.element[lane / 8][lane % 8]);
    for (unsigned i = 0; i < 4; i++) out[lane * 4 + i] = plain[i], out[128 + lane * 4 + i] = transposed[i];
}

TEST(Simt, LdmatrixDealsAsDocumented) {
    for_each_order<Device>([&](Device dev) {
        DeviceArray<uint32_t> out(2 * 32 * 4);
        launch(dev, ldmatrix_kernel, Grid{1}, 32, sizeof(FourMatrices), out.data());
        const auto got = out.values();
        for (uint32_t lane = 0; lane < 32; lane++)
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t g = lane / 4, t = lane % 4, first = i * 64 + g * 8 + 2 * t, down = i * 64 + 2 * t * 8 + g;
                EXPECT_EQ(got[lane * 4 + i], first | (first + 1) << 16);
                EXPECT_EQ(got[128 + lane * 4 + i], down | (down + 8) << 16);
            }
    });
}

__global__ void named_barrier_kernel(float *out) {  // warps 0 and 1 meet at one barrier, 2 and 3 at another
    struct Shared {
        float v[4];
    };
    Shared &s = shared_mem<Shared>();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) s.v[warp] = float(warp);
    bar_sync(1 + int(warp / 2), 64);
    if (lane == 0) out[warp] = s.v[warp ^ 1];
}

TEST(Simt, NamedBarriers) {
    for_each_order<Device>([&](Device dev) {
        DeviceArray<float> out(4);
        launch(dev, named_barrier_kernel, Grid{1}, 128, 16, out.data());
        EXPECT_EQ(out.values(), (std::vector<float>{1, 0, 3, 2}));
    });
}

}  // namespace CUDA_BACKEND

#ifdef LLMC_EMULATE
// ---- what must be noticed; from here on only the emulator --------------------------------------------------------------------------------

#ifdef __SANITIZE_THREAD__
constexpr bool race_build = true;
#else
constexpr bool race_build = false;
#endif
constexpr unsigned orders = 12;

// The emulator's message, or "no error".
template <class Body> std::string message_of(unsigned order, Body body) {
    CUstream_st stream{order};
    return error_of([&] { body(Device{&stream, nullptr}); });
}

// A launch with an error, and the texts that its message contains in every order.
struct Misuse {
    void (*run)(Device);
    std::vector<std::string> texts;
};
void expect_messages(const std::vector<Misuse> &all) {
    for (size_t i = 0; i < all.size(); i++)
        for (unsigned order = 0; order < 4; order++) {
            SCOPED_TRACE(format("case %zu, order %u", i, order));
            expect_contains(message_of(order, all[i].run), all[i].texts);
        }
}

// ---- misuse of warps and barriers

template <int misuse> __global__ void warp_misuse_kernel(float *out) {
    const unsigned lane = threadIdx.x;
    float v = float(lane);
    if (misuse == 0 && lane < 16) v = __shfl_xor_sync(0xffff0000, v, 1);
    if (misuse == 1 && lane >= 16) return;
    if (misuse == 1) v = __shfl_xor_sync(0xffffffff, v, 1);
    if (misuse == 2) v = lane < 16 ? __shfl_xor_sync(0xffffffff, v, 1) : __shfl_down_sync(0xffffffff, v, 1);
    if (misuse == 3 && lane < 16) v = __shfl_sync(0x0000ffff, v, 20);
    if (misuse == 4) v = __shfl_xor_sync(lane < 16 ? 0xffffffff : 0xfffffffe, v, 1);
    if (misuse == 5 && lane >= 16) __syncwarp();
    if (misuse == 6 && lane == 3) throw Error("a kernel that throws");
    out[lane] = v;
}
template <int misuse> void run_warp_misuse(Device dev) {
    DeviceArray<float> out(32);
    launch(dev, warp_misuse_kernel<misuse>, Grid{1}, 32, 0, out.data());
}

TEST(SimtCatches, MisuseOfWarps) {
    expect_messages({
        {run_warp_misuse<0>,
         {"__shfl_xor_sync by lane", "not in its mask 0xffff0000", "block (0,0,0) thread (", "warp_misuse_kernel<0>",
          "test_simt.cpp:"}},
        {run_warp_misuse<1>, {"__shfl_xor_sync waits for lane", "returned"}},
        {run_warp_misuse<2>, {"__shfl_xor_sync with mask 0xffffffff", "__shfl_down_sync with mask 0xffffffff"}},
        {run_warp_misuse<3>, {"reads lane 20, which is not in the mask 0x0000ffff"}},
        {run_warp_misuse<4>, {"mask 0xffffffff", "mask 0xfffffffe"}},
        {run_warp_misuse<5>, {"__syncwarp waits for lane", "returned"}},
        {run_warp_misuse<6>, {"a kernel that throws", "thread (3,0,0)"}},
    });
}

constexpr unsigned divergent_line = __LINE__ + 4;
template <int misuse> __global__ void barrier_misuse_kernel(float *out) {
    const unsigned warp = threadIdx.x / 32;
    if (misuse == 0 && warp == 1) {
        __syncthreads();
        out[threadIdx.x] = 1;
    } else if (misuse == 0) {
        __syncthreads();
        out[threadIdx.x] = 2;
    }
    if (misuse == 1 && threadIdx.x == 40) return;
    if (misuse == 1) __syncthreads();
    if (misuse == 2) bar_sync(1, warp < 2 ? 128 : 96);
    if (misuse == 3) bar_sync(2, 50);
    if (misuse == 4 && warp == 0) bar_sync(3, 64);
    if (misuse == 5 && warp == 0) bar_sync(1, 64);
    if (misuse == 5 && warp == 1) bar_sync(2, 64);
}
template <int misuse> void run_barrier_misuse(Device dev) {
    DeviceArray<float> out(64);
    launch(dev, barrier_misuse_kernel<misuse>, Grid{1}, misuse == 2 ? 128 : 64, 0, out.data());
}

TEST(SimtCatches, MisuseOfBarriers) {
    expect_messages({
        {run_barrier_misuse<0>,
         {"__syncthreads while other threads of the block wait at another one", format("test_simt.cpp:%u", divergent_line),
          format("test_simt.cpp:%u", divergent_line + 3)}},
        {run_barrier_misuse<1>,
         {"deadlock: 1 of 64 threads have returned", "63 of 64 threads are at __syncthreads (test_simt.cpp:"}},
        {run_barrier_misuse<2>, {"barrier 1 for", "test_simt.cpp:"}},
        {run_barrier_misuse<3>, {"barrier 2 for 50 threads of 64"}},
        {run_barrier_misuse<4>, {"deadlock: 32 of 64 threads have returned", "32 of 64 threads are at barrier 3"}},
        {run_barrier_misuse<5>, {"deadlock: 0 of 64", "at barrier 1", "at barrier 2", "barrier_misuse_kernel<5>"}},
    });
}

// ---- misuse of memory

struct Words {
    alignas(16) float v[64];
};
template <int misuse> __global__ void memory_misuse_kernel(float *out, const float *x) {
    Words &s = shared_mem<Words>();
    const unsigned i = threadIdx.x, warp = i / 32;
    if (misuse == 0) cp_async_16(&s.v[1], x);
    if (misuse == 1) cp_async_16(&s.v[0], x + 1);
    if (misuse == 2) cp_async_16(out, x);
    if (misuse == 3) cp_async_16(&s.v[i * 4 % 64], x), cp_async_commit();
    if (misuse == 4) {
        s.v[i] = 1;
        __syncthreads();
        uint32_t r[4];
        ldmatrix_x4(r, &s.v[i % 32 + 1]);
    }
    if (misuse == 5) {  // cp.async is seen before its wait
        if (i < 16) cp_async_16(&s.v[i * 4], x + i * 4);
        cp_async_commit();
        if (i < 16) out[i] = s.v[i * 4];
        cp_async_wait<0>();
    }
    if (misuse == 6) out[i] = s.v[i];  // never written
    if (misuse >= 7 && misuse <= 13) {
        s.v[i] = 1;
        __syncthreads();
    }
    if (misuse == 7) s.v[i] = 2, out[i] = s.v[i ^ 1];                     // no __syncwarp
    if (misuse == 8) s.v[i] = 2, __syncwarp(), out[i] = s.v[i ^ 1];       // right
    if (misuse == 9) s.v[i] = 2, __syncwarp(), out[i] = s.v[i ^ 32];      // no __syncthreads
    if (misuse == 10) s.v[i] = 2, __syncthreads(), out[i] = s.v[i ^ 32];  // right
    if (misuse == 11) out[i] = s.v[i ^ 32], s.v[i] = 2;                   // written after it was read
    if (misuse == 12) s.v[0] = 2;                                         // all write one element
    if (misuse == 13) {                                                   // a named barrier orders its own warps only
        s.v[i] = 2;
        bar_sync(1 + int(warp), 32);
        out[i] = s.v[i ^ 32];
    }
    if (misuse == 14 && i == 0) out[0] = x[i];                                    // all blocks write one element
    if (misuse == 15) out[blockIdx.x * 64 + i] = out[(blockIdx.x ^ 1) * 64 + i];  // one block reads what another writes
    if (misuse == 16) out[blockIdx.x * 64 + i] = x[i];                            // right: blocks share what they read
    auto *bytes = reinterpret_cast<unsigned char *>(out);
    if (misuse == 22) bytes[blockIdx.x * 63 + i % 63] = 1;  // neighbours write one byte each, and thread 63 the first once more
    if (misuse == 23 && i < 63) bytes[blockIdx.x * 63 + i] = 1, bytes[blockIdx.x * 63 + i]++;  // right
    if (misuse == 24 && i < 63) bytes[i] = 1;                                                  // all blocks write the same bytes
    if (misuse == 25 || misuse == 26) {
        s.v[i] = 0;
        __syncthreads();
        atomicAdd(&s.v[0], 1.0f);
        if (misuse == 25) out[blockIdx.x * 64 + i] = s.v[0];  // right: read beside atomics
        else if (i == 40) s.v[0] = 2;                         // written beside atomics
    }
    if (misuse == 27 || (misuse == 28 && blockIdx.x)) atomicAdd(&out[0], 1.0f);  // right: of several blocks
    if (misuse == 28 && i == 0 && blockIdx.x == 0) out[0] = 2;                   // one block writes
    if (misuse == 29) atomicAdd(reinterpret_cast<double *>(out + 1), 1.0);       // not aligned
    if (misuse >= 17 && misuse <= 21) {
        out[i] = x[i];
        if (misuse == 17) out[64 + i] = out[i ^ 1];                    // no __syncwarp
        if (misuse == 18) __syncwarp(), out[64 + i] = out[i ^ 32];     // no __syncthreads
        if (misuse == 19) __syncthreads(), out[64 + i] = out[i ^ 32];  // right
        if (misuse == 20) out[64 + i] = out[i], out[i ^ 32] = 2;       // written after it was read
        if (misuse == 21) __syncwarp(), out[64 + i] = out[i ^ 1];      // right
    }
}
template <int misuse> void run_memory_misuse(Device dev) {
    DeviceArray<float> out(256), x(std::vector<float>(256, 1));
    launch(dev, memory_misuse_kernel<misuse>, Grid{(misuse >= 14 && misuse <= 16) || misuse >= 22 ? 4 : 1}, 64, sizeof(Words),
           out.data(), x.data());
}

TEST(SimtCatches, MisuseOfMemory) {
    expect_messages({
        {run_memory_misuse<0>, {"cp.async: shared memory +4 is not 16-byte"}},
        {run_memory_misuse<1>, {"cp.async: the source is not"}},
        {run_memory_misuse<2>, {"cp.async: the address is not in the block's"}},
        {run_memory_misuse<3>, {"returned before its cp.async landed"}},
        {run_memory_misuse<4>, {"ldmatrix: shared memory +", "not 16-byte"}},
        {run_memory_misuse<29>, {"an atomic at an address", "to 8 bytes", "test_simt.cpp:"}},
    });
}
TEST(SimtCatches, CpAsyncSeenBeforeItsWait) {
    if (race_build)
        return expect_messages({{run_memory_misuse<5>, {"is read before the wait for its cp.async at test_simt.cpp:"}}});
    for (unsigned order = 0; order < orders; order++) {
        CUstream_st stream{order};
        DeviceArray<float> out(64), x(std::vector<float>(64, 1));
        launch(Device{&stream}, memory_misuse_kernel<5>, Grid{1}, 64, sizeof(Words), out.data(), x.data());
        for (int i = 0; i < 16; i++) EXPECT_TRUE(std::isnan(out.values()[i]));
    }
}
TEST(SimtCatches, NothingInRightKernels) {
    for (const auto run : {run_memory_misuse<8>, run_memory_misuse<10>, run_memory_misuse<16>, run_memory_misuse<19>,
                           run_memory_misuse<21>, run_memory_misuse<23>, run_memory_misuse<25>, run_memory_misuse<27>})
        for (unsigned order = 0; order < orders; order++) EXPECT_EQ(message_of(order, run), "no error");
}

#ifdef __SANITIZE_THREAD__
TEST(SimtCatches, Races) {
    const char *shared = "race on shared memory +", *device = "race on device memory +",
               *here = " at test_simt.cpp:", *blocks = "two blocks race on device memory +", *warps = "fix: __syncwarp()",
               *threads = "fix: __syncthreads()";
    expect_messages({
        {run_memory_misuse<6>, {"is read before anything was written", "test_simt.cpp:", "memory_misuse_kernel<6>"}},
        {run_memory_misuse<7>, {shared, warps}},
        {run_memory_misuse<9>, {shared, here, threads}},
        {run_memory_misuse<11>, {shared, "written", "read", threads}},
        {run_memory_misuse<12>, {"race on shared memory +0: written by lane", ", written by lane"}},
        {run_memory_misuse<13>, {shared, threads}},
        {run_memory_misuse<14>, {"two blocks race on device memory +0 of 1024 bytes: written here"}},
        {run_memory_misuse<15>, {blocks}},
        {run_memory_misuse<17>, {device, here, warps}},
        {run_memory_misuse<18>, {device, here, threads}},
        {run_memory_misuse<20>, {device, threads}},
        {run_memory_misuse<22>, {device, threads}},
        {run_memory_misuse<24>, {blocks, " of 1024 bytes: written here"}},
        {run_memory_misuse<26>, {"race on shared memory +0: ", here, "fix: __sync"}},
        {run_memory_misuse<28>, {"two blocks race on device memory +0 of 1024 bytes"}},
    });
}
#endif

// ---- counts of accesses (dev/emulator/counts.h)

TEST(SimtCounts, ARequestIsWhatTheLanesDoAtTheSameTimeOfTheirLoops) {
    // The counts of lanes that access `bytes` bytes at place(lane) in each of loops(lane) iterations.
    const auto counts_of = [](unsigned lanes, bool shared, uint32_t bytes, auto place, auto loops) {
        const char site = 0;
        simt::BlockCounts counts;
        counts.start(1);
        for (int lane = 0; lane < 32; lane++)
            for (int n = 0; lanes >> lane & 1 && n < loops(lane); n++)
                counts.access({&site, shared, false, 4096 * uint64_t(n) + place(lane), bytes}, 0, lane, lanes);
        counts.end_block();
        return counts.take();
    };
    const auto strided = [&](bool shared, uint64_t stride, uint32_t bytes) {
        return counts_of(
            ~0u, shared, bytes, [=](int lane) { return stride * uint64_t(lane); }, [](int) { return 2; });
    };
    EXPECT_EQ(strided(false, 4, 4).loads.warps, 2u);
    EXPECT_EQ(strided(false, 4, 4).loads.lanes, 64u);
    EXPECT_EQ(strided(false, 4, 4).sectors, 8u);
    EXPECT_EQ(strided(false, 16, 16).sectors, 32u);
    EXPECT_EQ(strided(false, 64, 4).sectors, 64u);
    EXPECT_EQ(strided(true, 4, 4).wavefronts, 2u);
    EXPECT_EQ(strided(true, 128, 4).wavefronts, 64u);
    EXPECT_EQ(strided(true, 128, 4).conflicts(), 62u);
    EXPECT_EQ(strided(true, 132, 4).wavefronts, 2u);
    EXPECT_EQ(strided(true, 16, 16).wavefronts, 8u);
    EXPECT_EQ(strided(true, 16, 16).conflicts(), 0u);
    const auto wavefronts = [&](auto word) {  // 16 bytes a lane
        return counts_of(
                   ~0u, true, 16, [=](int lane) { return 16 * uint64_t(word(lane)); }, [](int) { return 1; })
            .wavefronts;
    };
    EXPECT_EQ(wavefronts([](int lane) { return lane / 2; }),
              2u);  // lanes want the same in pairs: halves of the warp are answered
    EXPECT_EQ(wavefronts([](int lane) { return lane % 2; }), 2u);
    EXPECT_EQ(wavefronts([](int lane) { return lane / 8; }), 2u);
    EXPECT_EQ(wavefronts([](int lane) { return lane % 8; }), 4u);

    // Lanes that leave the loop earlier, and a warp of 16 lanes.
    const KernelCounts ragged = counts_of(
        0xffff, false, 4, [](int lane) { return 4 * uint64_t(lane); }, [](int lane) { return 1 + lane / 8; });
    EXPECT_EQ(ragged.loads.warps, 2u);
    EXPECT_EQ(ragged.loads.lanes, 24u);
    EXPECT_EQ(ragged.sectors, 3u);
}

// ---- launches

TEST(SimtCatches, LaunchesThatAreTooLarge) {
    expect_messages({
        {[](Device dev) { launch(dev, index_kernel, Grid{2}, 1025, 0, nullptr); },
         {"index_kernel at ", "test_simt.cpp:", "1025 threads", "fix: at most"}},
        {[](Device dev) { launch(dev, index_kernel, Grid{2}, 32, 300000, nullptr); }, {"300000 bytes of shared memory"}},
        {[](Device dev) {
             launch(dev, index_kernel, Grid{1, 65536}, 32, 0, nullptr);
         },
         {"grid 1 x 65536 x 1"}},
        {[](Device dev) {
             DeviceArray<float> out(64);
             launch(dev, named_barrier_kernel, Grid{1}, 128, 8, out.data());
         },
         {"shared_mem of 16 bytes, but the launch gave 8"}},
    });
}

#ifdef __SANITIZE_ADDRESS__
template <int misuse> __global__ void bounds_misuse_kernel(float *out, const float *x) {
    Words &s = shared_mem<Words>();
    if (misuse == 0) out[threadIdx.x + 33] = 1;
    if (misuse == 1) out[threadIdx.x] = x[threadIdx.x + 33];
    if (misuse == 2) s.v[threadIdx.x + 33] = 1;
    if (misuse == 3) cp_async_16(&s.v[threadIdx.x % 16 * 4], x + threadIdx.x * 4), cp_async_commit(), cp_async_wait<0>();
}
template <int misuse> void run_bounds_misuse() {
    DeviceArray<float> out(64), x(64);
    launch(Device{}, bounds_misuse_kernel<misuse>, Grid{1}, 32, sizeof(Words), out.data(), x.data());
}
TEST(SimtCatchesDeathTest, AccessesOutOfBounds) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_DEATH(run_bounds_misuse<0>(), "heap-buffer-overflow(.|\n)*WRITE of size 4(.|\n)*bounds_misuse_kernel<0>");
    EXPECT_DEATH(run_bounds_misuse<1>(), "heap-buffer-overflow(.|\n)*READ of size 4(.|\n)*bounds_misuse_kernel<1>");
    EXPECT_DEATH(run_bounds_misuse<2>(), "heap-buffer-overflow(.|\n)*WRITE of size 4(.|\n)*bounds_misuse_kernel<2>");
    EXPECT_DEATH(run_bounds_misuse<3>(), "heap-buffer-overflow(.|\n)*READ of size(.|\n)*bounds_misuse_kernel<3>");
}
#endif
#endif
