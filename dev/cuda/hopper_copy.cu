// A copy that transposes: out (C, R) = x (R, C)^T in bf16. R and C are multiples of 64.
//
// Timed with R = C = 8192. The kernel moves 2 R C elements and computes nothing, so only the data movement matters: the thread
// that issues a copy, the wait for its end, and the layout in shared memory. For Hopper (sm_90a): make try runs this ladder in
// the PTX interpreter.
//
// In all versions a block has a tile of 64 x 64. Whole sectors of x are loaded, whole sectors of out are stored, and the tile is
// transposed in between, eight by eight: ldmatrix.trans gives a lane elements (2t, 2t+1) of column g of an 8 x 8 matrix, which is
// row g of its transpose, and stmatrix stores the transposed matrix from the same registers. Both access eight rows of 16 bytes
// at a time, one for each row of the matrix.
#include "../../llmc/ops/hopper.cuh"
#include "common.h"

namespace CUDA_BACKEND::workshop {

constexpr int side = 64, copy_threads = 128;
constexpr unsigned tile_bytes = side * side * sizeof(bf16);

// A tile in shared memory. It defines the position of chunk c, 16 bytes, of row r.
struct PlainTile {
    static constexpr CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
    alignas(1024) bf16 data[side * side];
    __device__ bf16 *chunk(int r, int c) { return data + r * side + c * 8; }
};
template <class Tile> struct Turning {
    Tile in, out;
    hopper::Barrier landed;
};

// out = in^T. Each warp transposes 16 of the 64 matrices of 8 x 8, four of a column at a time.
template <class Tile> __device__ void turn(Tile &in, Tile &out) {
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int rows = 4 * (i % 2) + lane / 8, columns = 2 * warp + i / 2;  // the matrix that this lane addresses
        uint32_t r[4];
        ldmatrix_x4_trans(r, in.chunk(8 * rows + lane % 8, columns));
        stmatrix_x4(out.chunk(8 * columns + lane % 8, rows), r);
    }
}

// ---- version 1: loads and stores of 16 bytes -----------------------------------------------------------------------------------
//
// Each of 128 threads moves four vectors of 16 bytes in and four out. Each move computes an address, loads to registers and
// stores. Most of the instructions compute addresses.

__device__ void copy_16(bf16 *to, const bf16 *from) { *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from); }

__global__ void __launch_bounds__(copy_threads) hopper_copy_kernel1(bf16 *out, const bf16 *x, size_t R, size_t C) {
    auto &s = shared_mem<Turning<PlainTile>>();
    const size_t r0 = blockIdx.y * size_t(side), c0 = blockIdx.x * size_t(side);
    for (int i = int(threadIdx.x); i < side * side / 8; i += copy_threads)
        copy_16(s.in.chunk(i / 8, i % 8), x + (r0 + i / 8) * C + c0 + i % 8 * 8);
    __syncthreads();
    turn(s.in, s.out);
    __syncthreads();
    for (int i = int(threadIdx.x); i < side * side / 8; i += copy_threads)
        copy_16(out + (c0 + i / 8) * R + r0 + i % 8 * 8, s.out.chunk(i / 8, i % 8));
}

void hopper_copy1(CudaBf16 dev, bf16 *out, const bf16 *x, size_t R, size_t C) {
    launch(dev, hopper_copy_kernel1, Grid{C / side, R / side}, copy_threads, sizeof(Turning<PlainTile>), out, x, R, C);
}

// ---- version 2: TMA ------------------------------------------------------------------------------------------------------------
//
// One thread starts the copy of the whole box. The Tensor Memory Accelerator computes the addresses from a tensor map, which the
// host has made once.
//
// An mbarrier, 64 bits in shared memory, signals the end of the copy. It counts down pending arrivals and bytes: init sets one
// arrival per phase; arrive_and_expect makes that arrival, and adds 8192 pending bytes to the phase. TMA subtracts each byte that
// it has written. When both counts are zero the phase is complete, and the next one begins with the arrival count of init. A
// waiting thread names the parity of its phase, bit 0 of the phase's number, so 0 for the first. One bit is enough because no
// thread can be two phases late: the next phase cannot complete before the thread has arrived again.
//
// Two fences are needed, because TMA is not a thread. fence_barriers makes an mbarrier, which a thread's store has initialised,
// visible to TMA before its first use. fence_async: threads store the transposed tile through the generic proxy, and TMA reads it
// through the async proxy. Each thread fences its own stores, and then the barrier of the block shows that all have done so.
//
// A TMA store has no mbarrier. It belongs to a bulk group of the thread that started it, and that thread waits for the group:
// shared memory is released when the block ends, so TMA must have read it before.

__device__ void tma_store(const CUtensorMap &map, int x, int y, int z, const void *from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(x), "r"(y),
                 "r"(z), "r"(shared_address(from))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

template <class Tile> __device__ void copy_box(const CUtensorMap &out, const CUtensorMap &x) {
    auto &s = shared_mem<Turning<Tile>>();
    const int row = int(blockIdx.y), column = int(blockIdx.x);  // in tiles
    if (threadIdx.x == 0) {
        hopper::init(s.landed, 1);
        hopper::fence_barriers();
        hopper::arrive_and_expect(s.landed, tile_bytes);
        hopper::tma_load(s.in.data, x, 0, row * side, column, s.landed);
    }
    __syncthreads();  // the barrier is initialised for all
    hopper::wait(s.landed, 0);
    turn(s.in, s.out);
    hopper::fence_async();
    __syncthreads();
    if (threadIdx.x == 0) tma_store(out, 0, column * side, row, s.out.data);
}

__global__ void __launch_bounds__(copy_threads)
    hopper_copy_kernel2(const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap x) {
    copy_box<PlainTile>(out, x);
}

template <class Tile>
void launch_copy(CudaBf16 dev, void (*kernel)(CUtensorMap, CUtensorMap), bf16 *out, const bf16 *x, size_t R, size_t C) {
    launch(dev, kernel, Grid{C / side, R / side}, copy_threads, sizeof(Turning<Tile>),
           hopper::map_of(out, C, R, R, side, side, Tile::swizzle), hopper::map_of(x, R, C, C, side, side, Tile::swizzle));
}

void hopper_copy2(CudaBf16 dev, bf16 *out, const bf16 *x, size_t R, size_t C) {
    launch_copy<PlainTile>(dev, hopper_copy_kernel2, out, x, R, C);
}

// ---- version 3: a swizzle of 128 bytes -----------------------------------------------------------------------------------------
//
// A row of the tile is 128 bytes and covers all 32 banks once. So the eight rows of a matrix, 16 bytes each, share the same four
// banks, and ldmatrix and stmatrix take eight wavefronts instead of one.
//
// Padding each row by 16 bytes (matmul 2) would help, but TMA writes boxes without gaps. Instead it can permute: with the 128-byte
// swizzle chunk c of row r goes to position c ^ r % 8 of the row. For a fixed c and r = 0 ... 7 the positions c ^ r are all
// different, because x -> c ^ x is its own inverse, so the eight chunks of a matrix are in eight different groups of four banks.
// For a fixed r and c = 0 ... 7 they are also all different, so a whole row is still read in one wavefront.
//
// In bits of the address: bits 4 to 6 (the chunk) ^= bits 7 to 9 (the row modulo 8). The hardware does nothing else, so a tile
// must be aligned to 1024 bytes; otherwise bits 7 to 9 would not be r % 8.

struct Swizzled : PlainTile {
    static constexpr CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
    __device__ bf16 *chunk(int r, int c) { return PlainTile::chunk(r, c ^ r % 8); }
};

__global__ void __launch_bounds__(copy_threads)
    hopper_copy_kernel3(const __grid_constant__ CUtensorMap out, const __grid_constant__ CUtensorMap x) {
    copy_box<Swizzled>(out, x);
}

void hopper_copy3(CudaBf16 dev, bf16 *out, const bf16 *x, size_t R, size_t C) {
    launch_copy<Swizzled>(dev, hopper_copy_kernel3, out, x, R, C);
}

template <class X> struct HopperCopy {
    size_t R, C;
    std::vector<X> x;
    DeviceArray<X> d_x, out;

    explicit HopperCopy(const Sizes &s) : R(s[0]), C(s[1]), x(random_values<X>(R * C, 1)), d_x(x), out(R * C) {
        if (R % side || C % side) die("%zu x %zu is not a whole number of tiles\n  fix: multiples of %d", R, C, side);
    }

    static constexpr void (*versions[])(CudaBf16, X *out, const X *x, size_t R, size_t C) = {hopper_copy1, hopper_copy2,
                                                                                             hopper_copy3};
    void run(CudaBf16 dev, size_t version) { versions[version - 1](dev, out.data(), d_x.data(), R, C); }
    void check(Check &check) const {
        std::vector<X> want(x.size());
        for (size_t r = 0; r < R; r++)
            for (size_t c = 0; c < C; c++) want[c * R + r] = x[r * C + c];
        check("out", out.values(), want, 0);
    }
    Work work() const { return {.bytes = 2.0 * double(R * C) * sizeof(X)}; }
};

static const Ladder<HopperCopy, bf16> ladder({.name = "hopper_copy",
                                              .sizes = {{"R", "rows", 8192, 512}, {"C", "columns", 8192, 1024}},
                                              .checked = {{64, 64}, {64, 192}, {320, 128}},
                                              .ideas = {"loads and stores of 16 bytes", "boxes by TMA", "swizzled boxes"}});
}  // namespace CUDA_BACKEND::workshop
