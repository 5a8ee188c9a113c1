// Hopper's instructions for the kernels for sm_90a (PTX ISA 8.0 and later; each function names its section). Three units work asynchronously while
// threads continue: the Tensor Memory Accelerator (TMA) copies boxes of arrays, wgmma multiplies tiles in shared memory, and mbarriers count
// arrivals. The PTX interpreter (dev/emulator/README.md) checks every rule of this file. The source-level emulator cannot run these instructions.
//
//   mbarrier        counts arrivals and bytes. When all of a phase have arrived, the phase ends and the next one begins. A waiting thread names the
//                   parity of the phase that it waits for: 0, 1, 0, ... The phase "before the first" has parity 1 and has ended.
//   proxies         TMA and wgmma access shared memory through the async proxy, threads through the generic proxy. After a thread's store, that
//                   thread must call fence_async(), and a barrier must follow, before TMA or wgmma reads the bytes.
//   wgmma           is issued by the four warps of a warpgroup. Until wgmma_wait its sums must not be touched, and its operands in shared memory must
//                   not be overwritten. wgmma_fence separates the last ordinary access of a register from a wgmma that uses it.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "ptx.cuh"

inline namespace CUDA_BACKEND {

// The inverse of ldmatrix_x4: "Warp-level matrix store instruction: stmatrix".
__device__ inline void stmatrix_x4(void *row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

namespace hopper {

// ---- mbarriers: "Parallel Synchronization and Communication Instructions: mbarrier" ---------------------------------------------------

using Barrier = uint64_t;  // in shared memory, aligned to 8

// Called by one thread, which then calls fence_barriers(), so TMA sees the barriers; __syncthreads() follows.
__device__ inline void init(Barrier &barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(Barrier &barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives, and adds `bytes` to the bytes that must be copied before the phase ends.
__device__ inline void arrive_and_expect(Barrier &barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes) : "memory");
}
__device__ inline void wait(Barrier &barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred ended;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@ended bra ENDED;\n"
        "bra AGAIN;\n"
        "ENDED: }" ::"r"(shared_address(&barrier)),
        "r"(parity)
        : "memory");
}

// A position in a ring of stages that producers fill and consumers empty: the stage, and the parity of the phase in which it becomes full. The
// phase in which the stage was last emptied has the other parity.
template <int stages> struct Place {
    int stage = 0;
    unsigned parity = 0;
    __device__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// ---- copies: "Data Movement and Conversion Instructions: cp.async.bulk.tensor" -----------------------------------------------------------

// Called by one thread: starts the copy of the box of `map` at column panel z, row y and column x of the panel. The barrier always counts a whole
// box, because rows outside the array arrive as zeros. `to` is aligned to 1024 bytes.
__device__ inline void tma_load(void *to, const CUtensorMap &map, int x, int y, int z, Barrier &barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier))
        : "memory");
}

// Makes this thread's stores to shared memory visible to the async proxy: "membar / fence.proxy.async".
__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Called by one thread: starts adding a box of floats in shared memory, aligned to 1024 bytes, to the array: "cp.reduce.async.bulk.tensor". Rows
// outside the array are skipped.
__device__ inline void tma_add(const CUtensorMap &map, int x, int y, int z, const void *from) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
                 "r"(x), "r"(y), "r"(z), "r"(shared_address(from))
                 : "memory");
}
__device__ inline void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// tma_wait_read waits until at most `open` groups of this thread still read shared memory. tma_wait waits until all groups are complete; threads that
// synchronise with this thread then see their results.
template <int open> __device__ void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(open) : "memory"); }
__device__ inline void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- turns of blocks, in device memory: "Memory Consistency Model" ----------------------------------------------------------------------

// Waits until another block has passed turn n on. All that block's earlier work, including its TMA copies, is ordered before this thread's later
// work.
__device__ inline void await_turn(const int *turn, int n) {
    int now;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(turn)) : "memory");
    while (now != n);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ inline void pass_turn(int *turn, int n) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(turn)), "r"(n) : "memory");
}

// ---- tensor maps --------------------------------------------------------------------------------------------------------------------------

// Describes an array (rows, columns) with a row stride of `stride` elements, and its boxes of tile_rows x width, for the tiles below. `columns` and
// `width` are multiples of a panel's columns: 64 of bf16, 32 of float. The map is a __grid_constant__ parameter of the kernel. "CUDA Driver API:
// Tensor Map Object Management".
template <class X>
CUtensorMap map_of(const X *data, size_t rows, size_t columns, size_t stride, unsigned tile_rows, unsigned width,
                   CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    static const auto encode = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult result;  // found at run time, so programs also start without a driver
        const cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        if (error || !function) die("the driver has no cuTensorMapEncodeTiled\n  fix: install a driver for CUDA 12 or later");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    static const int driver = [] {
        int version = 0;
        return cudaDriverGetVersion(&version), version;
    }();
    constexpr cuuint32_t panel = 128 / sizeof(X);
    constexpr auto type = std::is_same_v<X, float> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint64_t dims[] = {panel, rows, columns / panel}, strides[] = {stride * sizeof(X), panel * sizeof(X)};
    const cuuint32_t box[] = {panel, tile_rows, width / panel}, steps[] = {1, 1, 1};
    CUtensorMap map;
    if (encode(&map, type, 3, const_cast<X *>(data), dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        die("no tensor map of (%zu, %zu) elements at %p with a stride of %zu", rows, columns, static_cast<const void *>(data),
            stride);
    // Drivers up to 13.1 set a wrong bit for arrays below 128 KB. CUTLASS also clears it (cute/atom/copy_traits_sm90_tma.hpp).
    if (driver <= 13010 && rows * stride * sizeof(X) < 128 << 10) reinterpret_cast<uint64_t *>(&map)[1] &= ~(uint64_t(1) << 21);
    return map;
}

// ---- tiles in shared memory ------------------------------------------------------------------------------------------------------------

// A tile in the layout of TMA's 128-byte swizzle: panels of 64 columns, with rows of 128 bytes; chunk c (16 bytes) of row r is at position c ^ r % 8.
// wgmma addresses the tile by a descriptor ("Asynchronous Warpgroup Level Matrix Shared Memory Layout"): bits 0-13 are the address / 16, bits 16-29
// the bytes from one panel to the next / 16, bits 32-45 the bytes from eight rows to the next eight / 16; bits 62-63 are 1 for this swizzle.
template <int rows, int width> struct alignas(1024) SwizzledTile {
    static constexpr unsigned panel = rows * 128, bytes = panel * (width / 64);
    bf16 data[rows * width];

    __device__ uint64_t descriptor(unsigned offset) {  // the address is in the lower half; each step adds a constant to it
        const uint32_t lower = (shared_address(data) >> 4 | (panel >> 4) << 16) + (offset >> 4), upper = 1024 >> 4 | 1u << 30;
        uint64_t both;  // a move of two halves costs no machine instruction; shifts would
        asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(lower), "r"(upper));
        return both;
    }
    // Descriptor of rows row0 ... and the 16 columns of step k: an operand with K along its rows. row0 is a multiple of 8.
    __device__ uint64_t rows_at(int row0, int k) { return descriptor(row0 * 128 + k / 4 * panel + k % 4 * 32); }
    // Descriptor of the 16 rows of step k and the columns from panel p on: an operand with K along its columns.
    __device__ uint64_t columns_at(int k, int p = 0) { return descriptor(p * panel + k * 16 * 128); }

    // Stores a warp's 16 x 16 elements, held as an operand of mma_m16n8k16, to rows row0 ... and columns 16 k ...: "stmatrix".
    __device__ void store(int row0, int k, const uint32_t (&x)[4]) {
        const int lane = int(threadIdx.x) % 32, row = row0 + lane % 16, chunk = 2 * k + lane / 16;
        stmatrix_x4(data + chunk / 8 * rows * 64 + row * 64 + (chunk % 8 ^ lane % 8) * 8, x);
    }

    // Clears the rows from row0 on; called by a warp. The caller must then call fence_async().
    __device__ void clear_from(int row0, int lane) {
        for (int i = row0 * 8 + lane; i < rows * 8; i += 32)
#pragma unroll
            for (int p = 0; p < width / 64; p++)
                *reinterpret_cast<uint4 *>(data + p * rows * 64 + i * 8) = make_uint4(0, 0, 0, 0);
    }
};

// ---- products: "Asynchronous Warpgroup Level Matrix Instructions" -------------------------------------------------------------------------

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `open` groups of this warpgroup are in flight.
template <int open> __device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(open) : "memory"); }

// Keeps the compiler from moving accesses of these registers across this point: it does not know that a wgmma is still running after its statement.
template <int n> __device__ void pin(float (&x)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(x[i][e])::"memory");
}
template <int n> __device__ void pin(uint32_t (&x)[n][4]) {
#pragma unroll
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(x[i][e])::"memory");
}

#define LLMC_SUMS_8(d, n)                                                                                                \
    "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), \
        "+f"(d[n + 1][3])
#define LLMC_SUMS_32(d, n) LLMC_SUMS_8(d, n), LLMC_SUMS_8(d, n + 2), LLMC_SUMS_8(d, n + 4), LLMC_SUMS_8(d, n + 6)
#define LLMC_LIST_32 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define LLMC_LIST_64                                                                                                                  \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33," \
    "%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// d (64, N) = A (64, 16) B (N, 16)^T, plus d if `keep`; the descriptors of A and B are rows_at. Warp w of the warpgroup holds rows 16 w to 16 w + 15;
// d[n] has columns 8 n to 8 n + 7 in the layout of mma_m16n8k16 (ptx.cuh).
template <bool keep> __device__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LLMC_LIST_32
        ", %32, %33, keep, 1, 1, 0, 0; }"
        : LLMC_SUMS_32(d, 0)
        : "l"(a), "l"(b), "n"(keep));
}
template <bool keep> __device__ void wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LLMC_LIST_64
        ", %64, %65, keep, 1, 1, 0, 0; }"
        : LLMC_SUMS_32(d, 0), LLMC_SUMS_32(d, 8)
        : "l"(a), "l"(b), "n"(keep));
}

// d (64, N) += A (64, 16) B (16, N), where A is in registers as for mma_m16n8k16, and B's descriptor is columns_at.
__device__ inline void wgmma_add(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{ .reg .pred keep;\nsetp.ne.b32 keep, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LLMC_LIST_32
                 ", {%32,%33,%34,%35}, %36, keep, 1, 1, 1; }"
                 : LLMC_SUMS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void wgmma_add(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "{ .reg .pred keep;\nsetp.ne.b32 keep, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " LLMC_LIST_64
        ", {%64,%65,%66,%67}, %68, keep, 1, 1, 1; }"
        : LLMC_SUMS_32(d, 0), LLMC_SUMS_32(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d (64, 64) = A^T B, plus d if `keep`, for A (16, 64) and B (16, 64); the descriptors are columns_at.
template <bool keep> __device__ void wgmma_columns(float (&d)[8][4], uint64_t a, uint64_t b) {
    asm volatile(
        "{ .reg .pred keep;\nsetp.ne.b32 keep, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " LLMC_LIST_32
        ", %32, %33, keep, 1, 1, 1, 1; }"
        : LLMC_SUMS_32(d, 0)
        : "l"(a), "l"(b), "n"(keep));
}
#undef LLMC_SUMS_8
#undef LLMC_SUMS_32
#undef LLMC_LIST_32
#undef LLMC_LIST_64

// c (64, N) = rows row0 ... of a (rows, width) times b (N, width)^T, plus c if `keep`
template <int N, bool keep = false, int rows, int width>
__device__ void product_transposed(float (&c)[N / 8][4], SwizzledTile<rows, width> &a, int row0, SwizzledTile<N, width> &b) {
    wgmma<keep>(c, a.rows_at(row0, 0), b.rows_at(0, 0));
#pragma unroll
    for (int k = 1; k < width / 16; k++) wgmma<true>(c, a.rows_at(row0, k), b.rows_at(0, k));
}
// c (64, width) += a (64, K) b (K, width)
template <int K, int width>
__device__ void product_add(float (&c)[width / 8][4], const uint32_t (&a)[K / 16][4], SwizzledTile<K, width> &b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma_add(c, a[k], b.columns_at(k));
}

// c (64, 64) = (panel a_panel of a)^T times panel b_panel of b
template <int K, int a_width, int b_width>
__device__ void product_of_columns(float (&c)[8][4], SwizzledTile<K, a_width> &a, int a_panel, SwizzledTile<K, b_width> &b,
                                   int b_panel) {
    wgmma_columns<false>(c, a.columns_at(0, a_panel), b.columns_at(0, b_panel));
#pragma unroll
    for (int k = 1; k < K / 16; k++) wgmma_columns<true>(c, a.columns_at(k, a_panel), b.columns_at(k, b_panel));
}

// Each of these issues one product as its own group, after all earlier accesses of its registers.
template <int N, bool keep = false, int rows, int width>
__device__ void start_product_transposed(float (&c)[N / 8][4], SwizzledTile<rows, width> &a, int row0,
                                         SwizzledTile<N, width> &b) {
    pin(c);
    wgmma_fence();
    product_transposed<N, keep>(c, a, row0, b);
    wgmma_commit();
}
template <int K, int width>
__device__ void start_product_add(float (&c)[width / 8][4], uint32_t (&a)[K / 16][4], SwizzledTile<K, width> &b) {
    pin(a), pin(c);
    wgmma_fence();
    product_add<K, width>(c, a, b);
    wgmma_commit();
}
template <int K, int a_width, int b_width>
__device__ void start_product_of_columns(float (&c)[8][4], SwizzledTile<K, a_width> &a, int a_panel, SwizzledTile<K, b_width> &b,
                                         int b_panel) {
    pin(c);
    wgmma_fence();
    product_of_columns(c, a, a_panel, b, b_panel);
    wgmma_commit();
}

// ---- registers: "setmaxnreg". All warps of a warpgroup release or take registers; an increase waits until they are free. -------------------------

// Registers per thread at the start of a block that has an SM to itself. Its warpgroups exchange registers only among themselves.
constexpr int registers(int threads) { return 65536 / threads / 8 * 8; }

template <int n> __device__ void give_registers_down_to() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n)); }
template <int n> __device__ void take_registers_up_to() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n)); }

}  // namespace hopper
}  // namespace CUDA_BACKEND
