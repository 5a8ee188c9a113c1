// The emulator (dev/emulator/simt.h): primitives that the shipped kernels hardly use, and errors in kernels. Compiled by nvcc, the first part tests a GPU
// in the same way. The tests of the kernels cover the rest.
#include "../../dev/emulator/counts.h"
#include "../../llmc/ops/ptx.cuh"
#include "../../llmc/ops/warp.cuh"
#include "../errors.h"
#include "check.cuh"

inline namespace CUDA_BACKEND {
using Device = CudaF32;

// Threads of one block, and of all blocks, update the same words.
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
    for (unsigned seen = 0, old = 0; old < n && (seen = atomicCAS(&u[4], old, n)) != old;) old = seen;  // the maximum
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
        EXPECT_EQ(w.values()[2] + bits[3], 255u * 128);  // the sum of all exchanged values, and the last one
        EXPECT_EQ(f.values()[0], 128);
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
// ---- errors that the emulator reports --------------------------------------------------------------------------------

#ifdef __SANITIZE_THREAD__
constexpr bool race_build = true;
#else
constexpr bool race_build = false;
#endif
constexpr unsigned orders = 12;

// The emulator's message; "no error" without one.
template <class Body> std::string message_of(unsigned order, Body body) {
    CUstream_st stream{order};
    return error_of([&] { body(Device{&stream, nullptr}); });
}

struct Words {
    alignas(16) float v[64];
};
struct Thread {
    unsigned i = threadIdx.x, b = blockIdx.x * 64;  // number in the block; first element of the block in out
    float *out;
    const float *x;  // two arrays of 256
    Words &s = shared_mem<Words>();
    unsigned char *bytes = reinterpret_cast<unsigned char *>(out);
    void write() { s.v[i] = 1, __syncthreads(); }  // every thread's word
};
__global__ void misuse_kernel(void (*body)(Thread), float *out, const float *x) { body({.out = out, .x = x}); }

void run(Device dev, unsigned blocks, unsigned threads, DeviceArray<float> &out, void (*body)(Thread)) {
    DeviceArray<float> x(std::vector<float>(256, 1));
    launch(dev, misuse_kernel, Grid{blocks}, threads, sizeof(Words), body, out.data(), x.data());
}
// The message contains these texts in every order of threads; it is "no error" without one.
void expect(unsigned blocks, unsigned threads, const std::vector<std::string> &texts, void (*body)(Thread)) {
    for (unsigned order = 0; order < orders; order++) {
        SCOPED_TRACE(format("order %u", order));
        DeviceArray<float> out(256);
        expect_contains(message_of(order, [&](Device dev) { run(dev, blocks, threads, out, body); }), texts);
    }
}

TEST(SimtCatches, MisuseOfWarps) {
    expect(1, 32, {"__shfl_xor_sync by lane", "not in its mask 0xffff0000", "block (0,0,0) thread (", "test_simt.cpp:"},
           [](Thread t) {
               if (t.i < 16) t.out[t.i] = __shfl_xor_sync(0xffff0000, 1.0f, 1);
           });
    expect(1, 32, {"__shfl_xor_sync waits for lane", "returned"}, [](Thread t) {
        if (t.i < 16) t.out[t.i] = __shfl_xor_sync(0xffffffff, 1.0f, 1);
    });
    expect(1, 32, {"__shfl_xor_sync with mask 0xffffffff", "__shfl_down_sync with mask 0xffffffff"}, [](Thread t) {
        t.out[t.i] = t.i < 16 ? __shfl_xor_sync(0xffffffff, 1.0f, 1) : __shfl_down_sync(0xffffffff, 1.0f, 1);
    });
    expect(1, 32, {"reads lane 20, which is not in the mask 0x0000ffff"}, [](Thread t) {
        if (t.i < 16) t.out[t.i] = __shfl_sync(0x0000ffff, 1.0f, 20);
    });
    expect(1, 32, {"mask 0xffffffff", "mask 0xfffffffe"},
           [](Thread t) { t.out[t.i] = __shfl_xor_sync(t.i < 16 ? 0xffffffff : 0xfffffffe, 1.0f, 1); });
    expect(1, 32, {"__syncwarp waits for lane", "returned"}, [](Thread t) {
        if (t.i >= 16) __syncwarp();
    });
    expect(1, 32, {"a kernel that throws", "thread (3,0,0)"}, [](Thread t) {
        if (t.i == 3) throw Error("a kernel that throws");
    });
}

TEST(SimtCatches, MisuseOfBarriers) {
    constexpr unsigned line = __LINE__ + 6;
    expect(1, 64,
           {"__syncthreads while other threads of the block wait at another one", format("test_simt.cpp:%u", line),
            format("test_simt.cpp:%u", line + 2)},
           [](Thread t) {
               if (t.i / 32) {
                   __syncthreads(), t.out[t.i] = 1;
               } else {
                   __syncthreads(), t.out[t.i] = 2;
               }
           });
    expect(1, 64, {"deadlock: 1 of 64 threads have returned", "63 of 64 threads are at __syncthreads (test_simt.cpp:"},
           [](Thread t) {
               if (t.i != 40) __syncthreads();
           });
    expect(1, 128, {"barrier 1 for", "test_simt.cpp:"}, [](Thread t) { bar_sync(1, t.i < 64 ? 128 : 96); });
    expect(1, 64, {"barrier 2 for 50 threads of 64"}, [](Thread) { bar_sync(2, 50); });
    expect(1, 64, {"deadlock: 32 of 64 threads have returned", "32 of 64 threads are at barrier 3"}, [](Thread t) {
        if (t.i < 32) bar_sync(3, 64);
    });
    expect(1, 64, {"deadlock: 0 of 64", "at barrier 1", "at barrier 2"}, [](Thread t) { bar_sync(1 + int(t.i / 32), 64); });
}

TEST(SimtCatches, MisuseOfMemory) {
    expect(1, 64, {"cp.async: shared memory +4 is not 16-byte"}, [](Thread t) { cp_async_16(&t.s.v[1], t.x); });
    expect(1, 64, {"cp.async: the source is not"}, [](Thread t) { cp_async_16(&t.s.v[0], t.x + 1); });
    expect(1, 64, {"cp.async: the address is not in the block's"}, [](Thread t) { cp_async_16(t.out, t.x); });
    expect(1, 64, {"returned before its cp.async landed"},
           [](Thread t) { cp_async_16(&t.s.v[t.i * 4 % 64], t.x), cp_async_commit(); });
    expect(1, 64, {"ldmatrix: shared memory +", "not 16-byte"}, [](Thread t) {
        uint32_t r[4];
        t.write(), ldmatrix_x4(r, &t.s.v[t.i % 32 + 1]);
    });
    expect(1, 64, {"an atomic at an address", "to 8 bytes", "test_simt.cpp:"},
           [](Thread t) { atomicAdd(reinterpret_cast<double *>(t.out + 1), 1.0); });
}

TEST(SimtCatches, CpAsyncReadBeforeItsWait) {
    const auto early = [](Thread t) {
        if (t.i < 16) cp_async_16(&t.s.v[t.i * 4], t.x + t.i * 4);
        cp_async_commit();
        if (t.i < 16) t.out[t.i] = t.s.v[t.i * 4];
        cp_async_wait<0>();
    };
    if (race_build) return expect(1, 64, {"is read before the wait for its cp.async at test_simt.cpp:"}, early);
    for (unsigned order = 0; order < orders; order++) {
        CUstream_st stream{order};
        DeviceArray<float> out(256);
        run(Device{&stream}, 1, 64, out, early);
        for (int i = 0; i < 16; i++) EXPECT_TRUE(std::isnan(out.values()[i]));
    }
}

TEST(SimtCatches, NoErrorInCorrectKernels) {
    const std::vector<std::string> none = {"no error"};
    expect(1, 64, none, [](Thread t) { t.write(), t.s.v[t.i] = 2, __syncwarp(), t.out[t.i] = t.s.v[t.i ^ 1]; });
    expect(1, 64, none, [](Thread t) { t.write(), t.s.v[t.i] = 2, __syncthreads(), t.out[t.i] = t.s.v[t.i ^ 32]; });
    expect(1, 64, none, [](Thread t) { t.out[t.i] = t.x[t.i], __syncwarp(), t.out[64 + t.i] = t.out[t.i ^ 1]; });
    expect(1, 64, none, [](Thread t) { t.out[t.i] = t.x[t.i], __syncthreads(), t.out[64 + t.i] = t.out[t.i ^ 32]; });
    expect(4, 64, none, [](Thread t) { t.out[t.b + t.i] = t.x[t.i]; });
    expect(4, 63, none, [](Thread t) { t.bytes[blockIdx.x * 63 + t.i] = 1, t.bytes[blockIdx.x * 63 + t.i]++; });
    expect(4, 64, none, [](Thread t) { t.write(), atomicAdd(&t.s.v[0], 1.0f), t.out[t.b + t.i] = t.s.v[0]; });
    expect(4, 64, none, [](Thread t) { atomicAdd(&t.out[0], 1.0f); });
}

#ifdef __SANITIZE_THREAD__
TEST(SimtCatches, Races) {
    const char *shared = "race on shared memory +", *device = "race on device memory +",
               *here = " at test_simt.cpp:", *blocks = "two blocks race on device memory +", *warps = "fix: __syncwarp()",
               *threads = "fix: __syncthreads()";
    expect(1, 64, {"is read before anything was written", "test_simt.cpp:"}, [](Thread t) { t.out[t.i] = t.s.v[t.i]; });
    expect(1, 64, {shared, warps}, [](Thread t) { t.write(), t.s.v[t.i] = 2, t.out[t.i] = t.s.v[t.i ^ 1]; });
    expect(1, 64, {shared, here, threads},
           [](Thread t) { t.write(), t.s.v[t.i] = 2, __syncwarp(), t.out[t.i] = t.s.v[t.i ^ 32]; });
    expect(1, 64, {shared, "written", "read", threads},
           [](Thread t) { t.write(), t.out[t.i] = t.s.v[t.i ^ 32], t.s.v[t.i] = 2; });
    expect(1, 64, {"race on shared memory +0: written by lane", ", written by lane"}, [](Thread t) { t.write(), t.s.v[0] = 2; });
    expect(1, 64, {shared, threads},
           [](Thread t) { t.write(), t.s.v[t.i] = 2, bar_sync(1 + int(t.i / 32), 32), t.out[t.i] = t.s.v[t.i ^ 32]; });
    expect(1, 64, {"race on shared memory +0: ", here, "fix: __sync"},
           [](Thread t) { t.write(), atomicAdd(&t.s.v[0], 1.0f), t.s.v[t.i == 40 ? 0 : t.i] = 2; });
    expect(1, 64, {device, here, warps}, [](Thread t) { t.out[t.i] = t.x[t.i], t.out[64 + t.i] = t.out[t.i ^ 1]; });
    expect(1, 64, {device, here, threads},
           [](Thread t) { t.out[t.i] = t.x[t.i], __syncwarp(), t.out[64 + t.i] = t.out[t.i ^ 32]; });
    expect(1, 64, {device, threads}, [](Thread t) { t.out[t.i] = t.x[t.i], t.out[64 + t.i] = t.out[t.i], t.out[t.i ^ 32] = 2; });
    expect(1, 64, {device, threads}, [](Thread t) { t.bytes[t.i % 63] = 1; });
    expect(4, 64, {"two blocks race on device memory +0 of 1024 bytes: written here"}, [](Thread t) {
        if (t.i == 0) t.out[0] = t.x[t.i];
    });
    expect(4, 64, {blocks}, [](Thread t) { t.out[t.b + t.i] = t.out[(t.b ^ 64) + t.i]; });
    expect(4, 63, {blocks, " of 1024 bytes: written here"}, [](Thread t) { t.bytes[t.i] = 1; });
    expect(4, 64, {"two blocks race on device memory +0 of 1024 bytes"},
           [](Thread t) { blockIdx.x ? void(atomicAdd(&t.out[0], 1.0f)) : void(t.out[t.i] = 2); });
}
#endif

// ---- counts of accesses (dev/emulator/counts.h)

// A request consists of the accesses of all lanes in the same iteration of their loops.
TEST(SimtCounts, RequestsSectorsAndWavefronts) {
    // Counts of lanes that access `bytes` bytes at place(lane) in each of loops(lane) iterations.
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
    const auto expect = [&](bool shared, uint32_t bytes, auto place, uint64_t count) {
        const KernelCounts got = counts_of(~0u, shared, bytes, place, [](int) { return 1; });
        EXPECT_EQ(shared ? got.wavefronts : got.sectors, count);
    };
    const auto stride = [](uint64_t bytes) { return [=](int lane) { return bytes * uint64_t(lane); }; };
    expect(false, 4, stride(4), 4);
    expect(false, 16, stride(16), 16);
    expect(false, 4, stride(64), 32);
    expect(true, 4, stride(4), 1);
    expect(true, 4, stride(128), 32);
    expect(true, 4, stride(132), 1);
    expect(true, 16, stride(16), 4);
    const auto shared_word = [](auto word) { return [=](int lane) { return 16 * uint64_t(word(lane)); }; };
    expect(true, 16, shared_word([](int lane) { return lane / 2; }), 2);
    expect(true, 16, shared_word([](int lane) { return lane / 8; }), 2);
    expect(true, 16, shared_word([](int lane) { return lane % 8; }), 4);

    // 16 lanes, with loops of different lengths
    const KernelCounts ragged = counts_of(0xffff, false, 4, stride(4), [](int lane) { return 1 + lane / 8; });
    EXPECT_EQ(ragged.loads.warps, 2u);
    EXPECT_EQ(ragged.loads.lanes, 24u);
    EXPECT_EQ(ragged.sectors, 3u);
}

// ---- launches

__global__ void empty_kernel() {}

TEST(SimtCatches, LaunchesThatAreTooLarge) {
    const auto expect_too_large = [](Grid grid, unsigned threads, size_t shared, const std::vector<std::string> &texts) {
        expect_contains(message_of(0, [&](Device dev) { launch(dev, empty_kernel, grid, threads, shared); }), texts);
    };
    expect_too_large({2}, 1025, 0, {"empty_kernel at ", "test_simt.cpp:", "1025 threads", "fix: at most"});
    expect_too_large({2}, 32, 300000, {"300000 bytes of shared memory"});
    expect_too_large({1, 65536}, 32, 0, {"grid 1 x 65536 x 1"});
    DeviceArray<float> out(4);
    expect_contains(message_of(0, [&](Device dev) { launch(dev, named_barrier_kernel, Grid{1}, 128, 8, out.data()); }),
                    {"shared_mem of 16 bytes, but the launch gave 8"});
}

#ifdef __SANITIZE_ADDRESS__
TEST(SimtCatchesDeathTest, AccessesOutOfBounds) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto expect_death = [](const char *access, void (*body)(Thread)) {
        DeviceArray<float> out(256);
        EXPECT_DEATH(run(Device{}, 1, 32, out, body),
                     format("heap-buffer-overflow(.|\n)*%s of size(.|\n)*misuse_kernel", access));
    };
    expect_death("WRITE", [](Thread t) { t.out[t.i + 225] = 1; });
    expect_death("READ", [](Thread t) { t.out[t.i] = t.x[t.i + 225]; });
    expect_death("WRITE", [](Thread t) { t.s.v[t.i + 33] = 1; });
    expect_death("READ",
                 [](Thread t) { cp_async_16(&t.s.v[t.i % 16 * 4], t.x + t.i * 16), cp_async_commit(), cp_async_wait<0>(); });
}
#endif
#endif
