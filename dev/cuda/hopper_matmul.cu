// matmul_forward in bf16, without bias, with Hopper's asynchronous instructions: out (T, OC) = x (T, IC) w (OC, IC)^T
// Contract: llmc/ops/matmul.h
//
// Timed with T = IC = OC = 4096. matmul 5 (matmul.cu) reaches the limit of mma.sync: a warp must load both operands from shared
// memory to registers, and on sm_90 these loads take as long as the products. wgmma reads its operands directly from shared
// memory. IC is a multiple of 64, OC of 2. For sm_90a: make try runs this ladder in the PTX interpreter. The trainer calls
// cuBLASLt; this ladder is here to read and to change.
//
// All versions step along IC in slabs of 64 values, 128 bytes per row. They differ in the thread that fetches a slab, in the
// synchronisation, and in the number of warpgroups that share a slab.
#include "../../llmc/ops/hopper.cuh"
#include "../../test/reference_matmul.h"
#include "common.h"

namespace CUDA_BACKEND::workshop {
using hopper::Barrier;

constexpr int depth = 64, columns = 128;  // values of a row in a slab; rows of w per block
template <int rows> struct Slabs {
    hopper::SwizzledTile<rows, depth> x;
    hopper::SwizzledTile<columns, depth> w;
    static constexpr unsigned bytes = (rows + columns) * depth * sizeof(bf16);
};

// The accumulators of a warpgroup: 128 rows by 128 columns, 128 registers per thread.
struct GroupTile {
    float c[2][columns / 8][4] = {};

    __device__ void pin() {
        hopper::pin(c[0]);
        hopper::pin(c[1]);
    }
    // Issues c += x w^T for rows row0 to row0 + 127 of x, as one group of wgmmas.
    template <int rows> __device__ void multiply(Slabs<rows> &s, int row0) {
        pin();
        hopper::wgmma_fence();
#pragma unroll
        for (int k = 0; k < depth / 16; k++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                hopper::wgmma<true>(c[half], s.x.rows_at(row0 + 64 * half, k), s.w.rows_at(0, k));
        hopper::wgmma_commit();
    }
    // Waits until at most `open` groups are in flight. The sums may be read after wait<0>.
    template <int open> __device__ void wait() {
        hopper::wgmma_wait<open>();
        pin();
    }
    // Stores rows from t0 on, columns from o0 on. A lane holds pairs of neighbouring columns, in rows g and g + 8 of its warp's 16.
    __device__ void store(bf16 *out, size_t t0, size_t o0, size_t T, size_t OC) const {
        const size_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const size_t t = t0 + 64 * half + 16 * warp + 8 * r + lane / 4;
#pragma unroll
                for (int n = 0; n < columns / 8; n++)
                    if (const size_t o = o0 + 8 * n + lane % 4 * 2; t < T && o < OC)
                        *reinterpret_cast<uint32_t *>(out + t * OC + o) = pack_bf16(c[half][n][2 * r], c[half][n][2 * r + 1]);
            }
    }
};

// ---- version 1: wgmma ----------------------------------------------------------------------------------------------------------
//
// Four warps, a warpgroup, own 128 x 128 outputs. They fill a slab with ordinary loads, as in matmul 4, and then issue eight
// products of 64 x 128 x 16 (GroupTile::multiply). No thread loads operands for them: the instruction has two descriptors, and
// the hardware reads the operands from shared memory.
//
// A descriptor. The operand is 64 rows (of x) or 128 rows (of w) by 16 values of depth, 32 bytes of each row. The descriptor gives
// its start address, the distances between its pieces of 8 rows by 16 bytes (the "core matrices"), and the swizzle. With the
// 128-byte swizzle (hopper_copy 3) a group of eight rows is one block of 8 x 128 = 1024 bytes, so the stride to the next eight
// rows is 1024 bytes for any number of rows: bits 32 to 45 are 1024 / 16 = 64. Bits 62 to 63 are 1, for this swizzle. Bits 16 to
// 29, the stride from one panel of 64 columns to the next, are not used here, because 16 values never cross a panel. The start
// address, divided by 16, is in bits 0 to 13. Step k begins 32 k bytes to the right in each row, so the address grows by 32 k,
// even though the swizzle moves chunk 2k of row r to position 2k ^ r % 8. That is correct because the hardware first computes
// the address without the swizzle, and then applies bits 4-6 ^= bits 7-9 to it. For the same reason the tile is aligned to 1024
// bytes (SwizzledTile::descriptor).
//
// Threads write the slab through the generic proxy, and wgmma reads it through the async proxy, hence fence_async and then the
// barrier. A wgmma is asynchronous: its sums and its slab must not be touched before the wait.
//
// Nothing overlaps: the tensor cores wait for loads, and the loads wait for the tensor cores.

constexpr int group_threads = 128;

template <int rows>
__device__ void fill(hopper::SwizzledTile<rows, depth> &to, const bf16 *from, size_t row0, size_t end, size_t k0, size_t IC) {
#pragma unroll 4
    for (int i = int(threadIdx.x); i < rows * 8; i += group_threads) {
        const int r = i / 8, c = i % 8;
        uint4 values = {};
        if (row0 + r < end) values = *reinterpret_cast<const uint4 *>(from + (row0 + r) * IC + k0 + 8 * c);
        *reinterpret_cast<uint4 *>(to.data + r * depth + (c ^ r % 8) * 8) = values;
    }
}

__global__ void __launch_bounds__(group_threads, 1)
    hopper_matmul_kernel1(bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    auto &s = shared_mem<Slabs<128>>();
    const size_t t0 = blockIdx.x * size_t(128), o0 = blockIdx.y * size_t(columns);
    GroupTile tile;
    for (size_t k0 = 0; k0 < IC; k0 += depth) {
        fill(s.x, x, t0, T, k0, IC);
        fill(s.w, w, o0, OC, k0, IC);
        hopper::fence_async();
        __syncthreads();
        tile.multiply(s, 0);
        tile.wait<0>();
        __syncthreads();  // all warps are done with the slab
    }
    tile.store(out, t0, o0, T, OC);
}

void hopper_matmul1(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, hopper_matmul_kernel1, Grid{ceil_div(T, 128), ceil_div(OC, columns)}, group_threads, sizeof(Slabs<128>), out, x,
           w, T, IC, OC);
}

// ---- version 2: TMA and mbarriers ----------------------------------------------------------------------------------------------
//
// Four stages of slabs, 128 KiB. One thread starts the copies of a slab (hopper_copy 2), three slabs ahead of the products. The
// other threads compute no addresses, and no loaded value passes through registers. Rows beyond T or OC arrive as zeros.
//
// Phases. Stage i holds slabs i, i + 4, i + 8, ...: slab n belongs to phase n / 4 of its stage's mbarrier, so the parity changes
// with each round through the stages (hopper::Place). No thread may fall a round behind, so a stage is refilled only after a
// barrier of the block, which all threads reach when they have waited for its products. This barrier, one per slab, is the cost:
// all warps wait for the slowest.

constexpr int stages = 4;

template <int rows> struct Ring {
    Slabs<rows> slab[stages];
    Barrier full[stages], empty[stages];
};
struct Maps {
    CUtensorMap x, w;
};

template <int rows> __device__ void fetch(Slabs<rows> &slab, Barrier &full, const Maps &maps, int t0, int o0, int n) {
    hopper::arrive_and_expect(full, slab.bytes);
    hopper::tma_load(slab.x.data, maps.x, 0, t0, n, full);
    hopper::tma_load(slab.w.data, maps.w, 0, o0, n, full);
}

__global__ void __launch_bounds__(group_threads, 1)
    hopper_matmul_kernel2(bf16 *out, const __grid_constant__ Maps maps, int T, int slabs, int OC) {
    auto &s = shared_mem<Ring<128>>();
    const int t0 = int(blockIdx.x) * 128, o0 = int(blockIdx.y) * columns;
    const auto fetch_slab = [&](int n) {
        if (threadIdx.x == 0 && n < slabs) fetch(s.slab[n % stages], s.full[n % stages], maps, t0, o0, n);
    };
    if (threadIdx.x == 0) {
        for (Barrier &full : s.full) hopper::init(full, 1);
        hopper::fence_barriers();
    }
    __syncthreads();
    for (int n = 0; n < stages - 1; n++) fetch_slab(n);
    GroupTile tile;
    hopper::Place<stages> at;
    for (int n = 0; n < slabs; n++, at.advance()) {
        hopper::wait(s.full[at.stage], at.parity);
        tile.multiply(s.slab[at.stage], 0);
        fetch_slab(n + stages - 1);  // into the stage of slab n - 1
        tile.wait<0>();
        __syncthreads();
    }
    tile.store(out, t0, o0, T, OC);
}

template <int rows> Maps maps_of(const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC, unsigned w_rows = columns) {
    return {hopper::map_of(x, T, IC, IC, rows, depth), hopper::map_of(w, OC, IC, IC, w_rows, depth)};
}

void hopper_matmul2(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, hopper_matmul_kernel2, Grid{ceil_div(T, 128), ceil_div(OC, columns)}, group_threads, sizeof(Ring<128>), out,
           maps_of<128>(x, w, T, IC, OC), int(T), int(IC / depth), int(OC));
}

// ---- version 3: a producer and a consumer --------------------------------------------------------------------------------------
//
// A separate producer warpgroup, of which one thread works, walks along IC and fetches slabs; the consumer walks along IC and
// multiplies them. Neither waits for the other while the ring of stages is neither full nor empty, so no barrier of the block is
// left. The tensor cores always have a product queued behind the current one: the consumer waits for the group before the last
// (wait<1>), and then releases that group's stage.
//
// So a stage has two mbarriers: `full`, at which bytes arrive, and `empty`, at which the consumer's four warps arrive. The
// producer waits for the `empty` phase of the previous round. In the first round it waits for parity 1, the phase before the
// first, which counts as complete.
//
//     producer       fetch 0  fetch 1  fetch 2  fetch 3  . . . . . . . . . . . .  fetch 4  . . . . .  fetch 5
//     copies            0        1        2        3                                 4                  5
//     consumer       . . . . .  issue 0  issue 1  . . . .  release 0  issue 2  . . . .  release 1  issue 3
//     tensor cores              [       0       ][       1       ][       2       ][       3       ...
//
// setmaxnreg. A block starts with the same number of registers for each thread, but a producer needs few, and a consumer's
// accumulators alone take 128. The producer's warpgroup releases registers, down to 24 per thread, and the consumer takes more, up
// to 240. An increase waits until enough registers are free, so the block must release at least as many as it takes. With 256
// threads the 65536 registers are always enough; the 384 threads of version 4 start with 168 each, and 24 + 2 * 240 = 3 * 168.

__device__ void release(Barrier &empty) {  // one arrival per warp
    if (threadIdx.x % 32 == 0) hopper::arrive(empty);
}

// The consumer's loop. It calls released(stage) when all products of a stage have ended.
template <int rows, class Released>
__device__ void consume(GroupTile &tile, Ring<rows> &s, int row0, int slabs, Released released) {
    hopper::Place<stages> at;
    hopper::wait(s.full[0], 0);
    tile.multiply(s.slab[0], row0);
    for (int n = 1; n < slabs; n++) {
        const int before = at.stage;
        at.advance();
        hopper::wait(s.full[at.stage], at.parity);
        tile.multiply(s.slab[at.stage], row0);
        tile.wait<1>();  // the previous slab's group has ended
        released(before);
    }
    tile.wait<0>();
}
// The producer's loop. fetch(stage, n) starts the copies of slab n.
template <int rows, class Fetch> __device__ void produce(Ring<rows> &s, int slabs, Fetch fetch) {
    hopper::Place<stages> at;
    for (int n = 0; n < slabs; n++, at.advance()) {
        hopper::wait(s.empty[at.stage], at.parity ^ 1);
        fetch(at.stage, n);
    }
}
template <int rows> __device__ void init_ring(Ring<rows> &s, int arrivals) {
    if (threadIdx.x == 0) {
        for (Barrier &full : s.full) hopper::init(full, 1);
        for (Barrier &empty : s.empty) hopper::init(empty, arrivals);
        hopper::fence_barriers();
    }
}

constexpr int warps3 = 4;  // of the consumer

__global__ void __launch_bounds__(2 * group_threads, 1)
    hopper_matmul_kernel3(bf16 *out, const __grid_constant__ Maps maps, int T, int slabs, int OC) {
    auto &s = shared_mem<Ring<128>>();
    const int t0 = int(blockIdx.x) * 128, o0 = int(blockIdx.y) * columns;
    init_ring(s, warps3);
    __syncthreads();
    if (threadIdx.x / 128 == 1) {
        hopper::give_registers_down_to<24>();
        if (threadIdx.x % 128 == 0)
            produce(s, slabs, [&](int stage, int n) { fetch(s.slab[stage], s.full[stage], maps, t0, o0, n); });
    } else {
        hopper::take_registers_up_to<240>();
        GroupTile tile;
        consume(tile, s, 0, slabs, [&](int stage) { release(s.empty[stage]); });
        tile.store(out, t0, o0, T, OC);
    }
}

void hopper_matmul3(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, hopper_matmul_kernel3, Grid{ceil_div(T, 128), ceil_div(OC, columns)}, 2 * group_threads, sizeof(Ring<128>), out,
           maps_of<128>(x, w, T, IC, OC), int(T), int(IC / depth), int(OC));
}

// ---- version 4: two consumers --------------------------------------------------------------------------------------------------
//
// A block owns 256 x 128 outputs, 128 rows for each consumer. Both consumers read the same slab of w: 384 rows give 256 x 128
// products, where 256 rows gave 128 x 128 before. So each product needs three quarters of the bytes from L2, and of the bytes that
// TMA writes to shared memory. While one consumer waits for a slab or stores its outputs, the tensor cores run the other's
// products.
//
// Shared memory is the limit. A wgmma of 64 x 128 x 16 occupies the tensor cores for 64 cycles, and reads 64 + 128 rows of 32
// bytes, which are 48 wavefronts of 128 bytes. A slab of version 3 has 32 KiB for 8 wgmmas, so TMA writes 32 wavefronts per
// wgmma: 80 in 64 cycles. Here a slab has 48 KiB for 16 wgmmas, and the sum is 72. With 64 x 256 sums per consumer a wgmma takes
// 128 cycles, with 80 wavefronts to read and 48 to write: 128, which just fits. That is CUTLASS's tile.

constexpr int warps4 = 8, threads4 = 3 * group_threads;

__global__ void __launch_bounds__(threads4, 1)
    hopper_matmul_kernel4(bf16 *out, const __grid_constant__ Maps maps, int T, int slabs, int OC) {
    auto &s = shared_mem<Ring<256>>();
    const int t0 = int(blockIdx.x) * 256, o0 = int(blockIdx.y) * columns, group = int(threadIdx.x) / 128;
    init_ring(s, warps4);
    __syncthreads();
    if (group == 2) {
        hopper::give_registers_down_to<24>();
        if (threadIdx.x % 128 == 0)
            produce(s, slabs, [&](int stage, int n) { fetch(s.slab[stage], s.full[stage], maps, t0, o0, n); });
    } else {
        hopper::take_registers_up_to<240>();
        GroupTile tile;
        consume(tile, s, group * 128, slabs, [&](int stage) { release(s.empty[stage]); });
        tile.store(out, size_t(t0 + group * 128), o0, T, OC);
    }
}

void hopper_matmul4(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, hopper_matmul_kernel4, Grid{ceil_div(T, 256), ceil_div(OC, columns)}, threads4, sizeof(Ring<256>), out,
           maps_of<256>(x, w, T, IC, OC), int(T), int(IC / depth), int(OC));
}

// ---- version 5: clusters -------------------------------------------------------------------------------------------------------
//
// Two blocks with the same columns, neighbours along T, form a cluster: they run at the same time on neighbouring SMs. Each block
// fetches half of the slab of w. TMA's multicast writes this half to the shared memory of both blocks, at the same offset, and
// counts its bytes at the mbarrier with the same offset in each block. Each block now reads 256 + 64 rows from L2 instead of 384.
// The writes to shared memory stay the same; their wavefronts only appear to fall because the interpreter counts a multicast as
// one write.
//
// A producer may write into the neighbour's stage only when that stage is empty. So a consumer's warps release a stage to both
// blocks, and `empty` counts the arrivals of 16 warps. mapa gives the address of the neighbour's barrier.
//
// The cluster needs two barriers. One precedes the first copy, because the neighbour's mbarriers must be initialised before bytes
// arrive at them. The other is at the end, because a block must keep its shared memory until the neighbour's last arrival.

// Starts the copies of a stage: this block's rows of x, and one half of the rows of w for both blocks.
__device__ void fetch_for_both(Slabs<256> &slab, Barrier &full, const Maps &maps, int t0, int o0, int n, int rank) {
    hopper::arrive_and_expect(full, slab.bytes);  // both halves
    hopper::tma_load(slab.x.data, maps.x, 0, t0, n, full);
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {0, %2, %3}], [%4], %5;" ::"r"(shared_address(slab.w.data + rank * (columns / 2) * depth)),
        "l"(&maps.w), "r"(o0 + rank * (columns / 2)), "r"(n), "r"(shared_address(&full)), "h"(uint16_t(3))
        : "memory");
}
__device__ void release_of(Barrier &empty, unsigned rank) {  // in the cluster's block number `rank`
    asm volatile(
        "{ .reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(
            shared_address(&empty)),
        "r"(rank)
        : "memory");
}
__device__ void meet_cluster() { asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory"); }

constexpr int warps5 = 16;  // of the consumers of both blocks

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(threads4, 1)
    hopper_matmul_kernel5(bf16 *out, const __grid_constant__ Maps maps, int T, int slabs, int OC) {
    auto &s = shared_mem<Ring<256>>();
    const int t0 = int(blockIdx.x) * 256, o0 = int(blockIdx.y) * columns, group = int(threadIdx.x) / 128;
    const int rank = int(blockIdx.x) % 2;
    init_ring(s, warps5);
    meet_cluster();
    if (group == 2) {
        hopper::give_registers_down_to<24>();
        if (threadIdx.x % 128 == 0)
            produce(s, slabs, [&](int stage, int n) { fetch_for_both(s.slab[stage], s.full[stage], maps, t0, o0, n, rank); });
        __syncwarp();
    } else {
        hopper::take_registers_up_to<240>();
        GroupTile tile;
        consume(tile, s, group * 128, slabs, [&](int stage) {
            if (threadIdx.x % 32 < 2) release_of(s.empty[stage], threadIdx.x % 32);
        });
        tile.store(out, size_t(t0 + group * 128), o0, T, OC);
    }
    meet_cluster();
}

void hopper_matmul5(CudaBf16 dev, bf16 *out, const bf16 *x, const bf16 *w, size_t T, size_t IC, size_t OC) {
    launch(dev, hopper_matmul_kernel5, Grid{ceil_div(T, 512) * 2, ceil_div(OC, columns)}, threads4, sizeof(Ring<256>), out,
           maps_of<256>(x, w, T, IC, OC, columns / 2), int(T), int(IC / depth), int(OC));
}

template <class X> struct HopperMatmul {
    size_t T, IC, OC;
    std::vector<X> x, w;
    DeviceArray<X> d_x, d_w, out;

    explicit HopperMatmul(const Sizes &s)
        : T(s[0]),
          IC(s[1]),
          OC(s[2]),
          x(random_values<X>(T * IC, 1)),
          w(random_values<X>(OC * IC, 2)),
          d_x(x),
          d_w(w),
          out(T * OC) {
        if (IC % depth || OC % 2) die("IC is %zu and OC %zu\n  fix: IC a multiple of %d, OC of 2", IC, OC, depth);
    }

    static constexpr void (*versions[])(CudaBf16, X *out, const X *x, const X *w, size_t T, size_t IC, size_t OC) = {
        hopper_matmul1, hopper_matmul2, hopper_matmul3, hopper_matmul4, hopper_matmul5};

    void run(CudaBf16 dev, size_t version) { versions[version - 1](dev, out.data(), d_x.data(), d_w.data(), T, IC, OC); }
    void check(Check &check) const {
        const Sums want = product_reference(x, IC, 1, w, 1, IC, {}, T, OC, IC);
        check("out", out.values(), want.value, allowed<X>(want, IC));
    }
    Work work() const { return {.flops = 2.0 * double(T) * double(IC) * double(OC)}; }
};

static const Ladder<HopperMatmul, bf16> ladder(
    {.name = "hopper_matmul",
     .sizes = {{"T", "tokens", 4096, 2048}, {"IC", "input channels", 4096, 512}, {"OC", "output channels", 4096, 2048}},
     .checked = {{1, 64, 2}, {300, 320, 130}, {70, 704, 256}},
     .ideas = {"wgmma on slabs of ordinary loads", "TMA and mbarriers, four stages", "a producer and a consumer",
               "two consumers share a slab", "clusters of two share the slab of w"}});
}  // namespace CUDA_BACKEND::workshop
